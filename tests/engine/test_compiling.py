"""Operations that are replaced by others before a step is compiled: the same numbers up to rounding."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fedloom.engine.compiling import _FUSIBLE, _libraries_are_hashed

aten = torch.ops.aten


def norm(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    pixels = x[0, 0].numel()
    found: tuple[Tensor, Tensor, Tensor] = aten.native_group_norm(x, None, None, *x.shape[:2], pixels, groups, 1e-5)
    return found


@pytest.mark.parametrize("mean", [0.0, 1000.0])
@pytest.mark.parametrize(("shape", "groups"), [((3, 6, 5, 4), 3), ((2, 4, 3, 3), 1), ((2, 4, 1, 1), 4), ((5, 8, 7), 2)])
def test_group_norm_keeps_small_differences_of_large_numbers(shape: tuple[int, ...], groups: int, mean: float) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) + mean
    traced = make_fx(norm, decomposition_table=_FUSIBLE)(x, groups)
    assert all(node.target != aten.native_group_norm.default for node in traced.graph.nodes)
    right = norm(x.double(), groups)
    for found, expected in zip(traced(x, groups), right, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4 if mean == 0 else 1e-2)


def test_group_norm_in_16_bits_sums_in_32() -> None:
    x = torch.randn(3, 6, 20, 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = make_fx(norm, decomposition_table=_FUSIBLE)(x, 2)(x, 2)
    for each, expected in zip(found, norm(x.double(), 2), strict=True):
        assert each.dtype == torch.bfloat16
        torch.testing.assert_close(each.double(), expected, rtol=1e-2, atol=1e-2)


def test_a_norm_in_64_bits_stays() -> None:
    x = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    traced = make_fx(norm, decomposition_table=_FUSIBLE)(x, 2)
    assert any(node.target == aten.native_group_norm.default for node in traced.graph.nodes)


def test_libraries_are_hashed_by_another_thread_and_their_errors_are_left_to_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor import codecache

    asked: list[threading.Thread] = []

    def refused() -> None:
        asked.append(threading.current_thread())
        raise OSError("no such file")

    monkeypatch.setattr(codecache, "torch_key", refused)
    with _libraries_are_hashed():
        pass
    assert len(asked) == 1
    assert asked[0] is not threading.main_thread()
    assert not asked[0].is_alive()


def test_the_compiler_still_asks_for_these_hashes() -> None:
    """They are private: if a release of torch renames them, this says so."""
    from torch._inductor import codecache

    assert codecache.torch_key()
    assert codecache.CacheBase.get_system()["hash"]
