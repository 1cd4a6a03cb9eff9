"""The weights of a common direction: the kernel for GPUs computes what the solver for CPUs does.

What they must satisfy is tested with their method, in tests/algorithms/test_fedmgda.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedloom.algorithm import Inbox, Update
from fedloom.algorithms.fedmgda import FedMGDA
from fedloom.maths.common_direction import Limits, is_right, least_norm_weights, side_of


def vectors(clients: int, size: int, alike: float, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(clients, size, generator=g).double() + alike * torch.randn(size, generator=g).double()


def counts(clients: int, skew: int, seed: int) -> Tensor:
    """From equal ones to a few that have nearly all."""
    return (torch.rand(clients, generator=torch.Generator().manual_seed(seed)).double() + 0.05) ** skew


def programs() -> dict[str, tuple[Tensor, Tensor, Limits]]:
    """Vectors [K, P], counts [K] and limits."""
    usual = Limits(0.1, 1e-8, 5000)
    few, one = vectors(6, 9, 0.5, 3), vectors(1, 9, 0, 4)
    some = few * torch.tensor([1, 0, 1, 0, 0, 1])[:, None]
    return {
        "a cohort": (vectors(20, 40, 0, 1), counts(20, 1, 1), usual._replace(tolerance=1e-4)),
        "turns end before the gap is closed": (vectors(20, 40, 0, 1), counts(20, 1, 1), usual._replace(max_iter=23)),
        "skewed shares": (vectors(20, 400, 3, 2), counts(20, 12, 2), usual),
        "more than a power of two": (vectors(33, 50, 0.5, 3), counts(33, 3, 3), Limits(0.3, 1e-5, 5000)),
        "fewer numbers than clients": (vectors(7, 2, 0, 5), counts(7, 6, 5), Limits(0.5, 1e-6, 5000)),
        "nearly alike": (vectors(8, 50, 30, 6), counts(8, 1, 6), Limits(1.0, 1e-10, 5000)),
        "the same": (one.expand(5, -1), counts(5, 3, 7), usual),
        "opposite": (torch.cat([few, -few]), counts(12, 2, 8), Limits(1.0, 1e-8, 35)),
        "no box": (few, counts(6, 2, 9), Limits(1.0, 1e-5, 5000)),
        "no room": (few, counts(6, 2, 9), Limits(0.0, 1e-8, 5000)),
        "some did not move": (some, counts(6, 2, 10), Limits(0.3, 1e-6, 5000)),
        "one moved": (some * torch.eye(6)[:, :1], counts(6, 2, 10), usual),
        "nobody moved": (0 * few, counts(6, 2, 10), usual),
        "a client alone": (one, counts(1, 1, 11), usual),
    }


def differences(device: str) -> dict[str, float]:
    """Between the kernel's weights and the solver's."""
    from fedloom.maths import common_direction_kernel as kernel

    found = {}
    for name, (rows, count, limits) in programs().items():
        norms = rows.norm(dim=1)
        unit = rows / norms.where(norms > 0, 1)[:, None]
        given = (unit @ unit.T, count, norms)
        P, share, lengths = (t.to(device) for t in given)
        ours = kernel.least_norm_queued(P, share, lengths, limits)
        found[name] = float((ours.cpu() - least_norm_weights(*given, limits)).abs().max())
    return found


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton, the kernel's compiler, is not installed")
def test_the_kernel_is_the_solver_as_triton_interprets_it() -> None:
    code = "import json, test_common_direction as t; print(json.dumps(t.differences('cpu')))"
    env = {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert found.keys() == programs().keys()
    assert not {name: e for name, e in found.items() if not e < 1e-11}


def test_weights_are_zero_where_nobody_moved_and_shares_where_there_is_no_room() -> None:
    """So that a test against these weights is one against right ones."""
    for name, expected in (("nobody moved", torch.zeros(6).double()), ("no room", counts(6, 2, 9))):
        rows, count, limits = programs()[name]
        weights = least_norm_weights(rows @ rows.T, count, rows.norm(dim=1), limits)
        torch.testing.assert_close(weights, expected / expected.sum().clamp(min=1e-300))


def test_a_kernel_that_fails_or_computes_something_else_is_not_used() -> None:
    def fails(*_: object) -> Tensor:
        raise RuntimeError("out of resource: shared memory")

    def shares(P: Tensor, counts: Tensor, norms: Tensor, limits: Limits) -> Tensor:
        return counts / counts.sum()

    def without_box(P: Tensor, counts: Tensor, norms: Tensor, limits: Limits) -> Tensor:
        return least_norm_weights(P, counts, norms, limits._replace(epsilon=1.0))

    cpu = torch.device("cpu")
    assert all(is_right(least_norm_weights, cpu, side) for side in (16, 32, 64))
    assert not any(is_right(wrong, cpu, 16) for wrong in (fails, shares, without_box))


def test_the_side_is_a_power_of_two_that_matrix_units_can_take() -> None:
    assert [side_of(k) for k in (1, 16, 17, 32, 33, 64)] == [16, 16, 32, 32, 64, 64]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


@needs_gpu
def test_the_kernel_is_the_solver_on_a_gpu() -> None:
    assert not {name: e for name, e in differences("cuda").items() if not e < 1e-9}


@needs_gpu
def test_the_servers_step_does_not_wait_for_a_gpu() -> None:
    moves = vectors(20, 70_000, 0.3, 1).float().cuda()
    weights, one = counts(20, 2, 1).cuda(), torch.ones((), dtype=torch.float64, device="cuda")
    alg = FedMGDA(decay=0.9)
    inbox = Inbox(Update(moves[0]), one, one, one, one, Update(moves), weights)
    server = alg.update(alg.init(moves[0]), inbox)  # compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        alg.update(server, inbox)
    finally:
        torch.cuda.set_sync_debug_mode("default")
