"""Whether the rows of a batch influence each other, in a net or a loss of the user's own: found by trying.

Clients side by side have batches that are padded with rows that count nothing. In a net with BatchNorm, or a loss that
counts the classes of a batch, these rows would count after all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedloom.core.channels_last import has_own_code, perturbed

_ROWS, _TRIES = 6, 8


def net_mixes_rows(net: nn.Module, shape: tuple[int, ...] | None) -> bool:
    """Whether what a net computes for a row in this mode, or its statistics, depends on the other rows.

    Most layers of torch and of fedloom are known, and nets of these alone are not tried.
    """
    return shape is not None and not _is_known(net) and _tried(net, shape, _rows_meet)


def _is_known(net: nn.Module) -> bool:
    """Whether no layer but BatchNorm could compare rows, as attention over the first axis does, or keep statistics."""
    layers = [m for m in net.modules() if not isinstance(m, nn.modules.batchnorm._BatchNorm)]
    keep = any(buffer.is_floating_point() for layer in layers for buffer in layer.buffers(recurse=False))
    return not keep and not has_own_code(net) and not any(isinstance(m, nn.MultiheadAttention) for m in layers)


def net_remembers(net: nn.Module, shape: tuple[int, ...] | None) -> bool:
    """Whether a batch changes what a net computes for later ones, in another way than through its statistics.

    Then it has attributes, or counters, which no client sends and no checkpoint holds, or changes its own weights.
    """
    return shape is not None and _tried(net, shape, _is_marked)


def _tried(
    net: nn.Module, shape: tuple[int, ...], has: Callable[[nn.Module, Tensor, Tensor, torch.Generator], bool]
) -> bool:
    """Whether two batches show it: of numbers around 0 or, for nets that read words as numbers, of 0 and 1."""
    numbers = torch.Generator().manual_seed(0)
    device = next((p.device for p in net.parameters()), torch.device("cpu"))
    for low in (-2, 0):
        x, others = (torch.rand(_ROWS, *shape, generator=numbers).to(device) for _ in range(2))
        x, others = (4 * x - 2, 4 * others - 2) if low else (x.round(), others.round())
        try:
            with torch.no_grad():
                return has(net, x, others, numbers)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a net that fails is refused elsewhere, with what it was given
            continue
    return False


def _rows_meet(net: nn.Module, x: Tensor, others: Tensor, numbers: torch.Generator) -> bool:
    trial = perturbed(net, numbers)
    others[0] = x[0]
    before = _statistics(trial)
    first, again = (copy.deepcopy(trial)(rows)[0] for rows in (x, others))
    trial(x)
    moved = any(not torch.equal(a, b) for a, b in zip(_statistics(trial), before, strict=True))
    return moved or not _same(first, again)


def _is_marked(net: nn.Module, x: Tensor, others: Tensor, numbers: torch.Generator) -> bool:
    fresh, used = perturbed(net, numbers), perturbed(net, numbers)
    expected = [copy.deepcopy(fresh).train(training)(x) for training in (True, False)]
    for training in (True, False):
        before = [p.clone() for p in used.parameters()]
        used.train(training)(others)
        if not all(map(torch.equal, used.parameters(), before)):
            return True
    found = [_with_floats_of(fresh, used).train(training)(x) for training in (True, False)]
    return not all(map(_same, found, expected))


def _with_floats_of(fresh: nn.Module, used: nn.Module) -> nn.Module:
    """The used net with the weights and statistics of the other."""
    own = dict((*used.named_parameters(), *used.named_buffers()))
    for name, x in (*fresh.named_parameters(), *fresh.named_buffers()):
        if x.is_floating_point():
            own[name].copy_(x)
    return used


def loss_mixes_rows(loss: Callable[[Tensor, Tensor], Tensor], outputs: int, *, regression: bool) -> bool:
    """Whether the loss of a row depends on the other rows."""
    numbers = torch.Generator().manual_seed(0)
    try:
        return any(_loss_of_first_moves(loss, outputs, regression, numbers) for _ in range(_TRIES))
    except Exception:  # it was tried on examples before, and refused if it failed
        return False


def _loss_of_first_moves(
    loss: Callable[[Tensor, Tensor], Tensor], outputs: int, regression: bool, numbers: torch.Generator
) -> bool:
    out, others = (3 * torch.randn(_ROWS, outputs, generator=numbers) for _ in range(2))
    if regression:
        y, other = (torch.randn(_ROWS, generator=numbers) for _ in range(2))
    else:
        y, other = (torch.randint(outputs, (_ROWS,), generator=numbers) for _ in range(2))
    others[0], other[0] = out[0], y[0]
    return not _same(loss(out, y)[0], loss(others, other)[0])


def _statistics(net: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in net.buffers() if buffer.is_floating_point()]


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(a.abs().max()), equal_nan=True))
