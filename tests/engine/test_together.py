"""Runs in one process whose clients train in the same steps: what each computes is what it computes alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fedloom.algorithm import AnyAlgorithm
from fedloom.algorithms.fedala import FedALA
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedprox import FedProx
from fedloom.algorithms.fedsam import FedSAM
from fedloom.algorithms.qfedavg import QFedAvg
from fedloom.algorithms.scaffold import Scaffold
from fedloom.core import tree
from fedloom.core.errors import DivergedError
from fedloom.core.optim import Local
from fedloom.engine import cuda_graphs
from fedloom.engine import together as together_module
from fedloom.engine.plan import Cohort
from fedloom.engine.rounds import begin, rounds
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.engine.together import asked_to_stop, together
from support.worlds import experiment, federation

SIZES = (3, 40, 17, 8, 25, 1)
SEEDS = (3, 4, 5)


def world(
    seed: int,
    algorithm: Callable[[], AnyAlgorithm] = FedAvg,
    *,
    frozen: tuple[str, ...] = (),
    rate: float = 0.1,
    momentum: float = 0.5,
    sizes: tuple[int, ...] = SIZES,
    last: int = 3,
) -> Experiment:
    """A run with this seed: its own start, cohorts and batches."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    local = Local(batch=4, epochs=2, lr=rate, momentum=momentum)
    how: dict[str, Any] = {"capture": "graph", "local": local, "cohort": Cohort(size=4), "rounds": last}
    return experiment(federation(sizes), net, algorithm(), seed=seed, frozen=frozen, **how)


def ended(exp: Experiment) -> Any:
    """The server after the last round, and what each client has."""
    state, store = begin(exp), RamStore(len(SIZES))
    for done in rounds(exp, state, store):
        state = done.state
    return state.server, exp.given(state, store, torch.arange(len(SIZES))).mine


def close(a: Any, b: Any) -> bool:
    return all(torch.allclose(x, y, atol=1e-5) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many clients were trained at once, each time."""
    found: list[int] = []
    plain = cuda_graphs.descend

    def counting(alg: Any, phase: Any, fed: Any, group: Any, at: Any, given: Any) -> Any:
        found.append(len(group.ids))
        return plain(alg, phase, fed, group, at, given)

    monkeypatch.setattr(cuda_graphs, "descend", counting)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedAvg, Scaffold, QFedAvg, FedALA], ids=lambda a: a.__name__)
def test_runs_come_to_what_they_come_to_alone(algorithm: Callable[[], AnyAlgorithm], trained: list[int]) -> None:
    """With state at clients, with surveys before training, and with phases that each client ends by itself."""
    alone = [ended(world(seed, algorithm)) for seed in SEEDS]
    steps = len(trained)
    trained.clear()
    found = together([lambda seed=seed: ended(world(seed, algorithm)) for seed in SEEDS])
    for a, b in zip(found, alone, strict=True):
        assert close(a, b)
    assert not close(alone[0], alone[1])
    assert max(trained) == 4 * len(SEEDS)
    assert len(trained) < steps
    if algorithm is not FedALA:  # whose clients pass over their data as often as they need
        assert 3 * len(trained) == steps


@pytest.mark.slow
def test_a_run_that_is_shorter_leaves_the_others_alone(trained: list[int]) -> None:
    last = (1, 3, 2)
    pairs = list(zip(SEEDS, last, strict=True))
    found = together([lambda s=s, n=n: ended(world(s, last=n)) for s, n in pairs])
    assert trained == [12, 8, 4]
    for one, (seed, n) in zip(found, pairs, strict=True):
        assert close(one, ended(world(seed, last=n)))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedAvg, FedProx, Scaffold, FedALA], ids=lambda a: a.__name__)
def test_runs_with_other_rates_and_partitions_share_their_steps(
    algorithm: Callable[[], AnyAlgorithm], trained: list[int]
) -> None:
    """A learning rate is a number of the client; a partition decides only which rows it reads."""
    others: list[dict[str, Any]] = [{"rate": 0.1}, {"rate": 0.03}, {"sizes": SIZES[::-1]}]
    made = [lambda how=how: world(3, algorithm, last=2, **how) for how in others]
    alone = [ended(make()) for make in made]
    trained.clear()
    found = together([lambda make=make: ended(make()) for make in made])
    for a, b in zip(found, alone, strict=True):
        assert close(a, b)
    assert not close(alone[0][0], alone[1][0])
    assert not close(alone[0][0], alone[2][0])
    assert max(trained) == 4 * len(made)


@pytest.mark.slow
def test_runs_with_other_steps_are_not_joined(trained: list[int]) -> None:
    """Another momentum or pull, which act from the second step, or a part that is frozen as each run has drawn it."""
    makes: list[Callable[[], Experiment]] = [
        *(lambda m=m: world(3, momentum=m, last=1) for m in (0.5, 0.9)),
        *(lambda mu=mu: world(3, lambda: FedProx(mu=mu), last=1) for mu in (0.5, 1.0)),
    ]
    found = together([lambda make=make: ended(make()) for make in makes])
    assert trained == [4, 4, 4, 4]
    for one, make in zip(found, makes, strict=True):
        assert close(one, ended(make()))
    trained.clear()
    frozen = ("0.weight", "0.bias")
    found = together([lambda s=s: ended(world(s, frozen=frozen, last=1)) for s in SEEDS])
    assert trained == [4, 4, 4]
    for one, seed in zip(found, SEEDS, strict=True):
        assert close(one, ended(world(seed, frozen=frozen, last=1)))


@pytest.mark.slow
def test_steps_that_differ_by_little_are_not_joined(trained: list[int]) -> None:
    """A radius that follows each run's rate, and frozen parts under a rate so small that models hardly move."""

    def with_rate(rate: float) -> Experiment:
        return world(3, lambda: FedSAM(rho_schedule="prop_lr"), rate=rate, momentum=0.0, last=1)

    rates = (0.02, 0.002)
    found = together([lambda r=r: ended(with_rate(r)) for r in rates])
    assert trained == [4, 4]
    for one, rate in zip(found, rates, strict=True):
        assert close(one, ended(with_rate(rate)))
    trained.clear()
    frozen = ("0.weight", "0.bias")
    together([lambda s=s: ended(world(s, frozen=frozen, rate=1e-5, momentum=0.0, last=1)) for s in SEEDS])
    assert trained == [4, 4, 4]


@pytest.mark.slow
def test_a_run_that_needs_a_phase_more_meets_the_others_again(trained: list[int]) -> None:
    """Clients of FedALA pass over their data as often as they need; the others wait with their next phase."""
    together([lambda s=s: ended(world(s, FedALA, last=4)) for s in SEEDS])
    assert trained[-1] == 4 * len(SEEDS)


@pytest.mark.slow
def test_runs_on_other_data_are_not_joined(trained: list[int]) -> None:
    def other() -> Any:
        exp = world(4, last=1)
        exp.federation.x[0] += 1
        return ended(exp)

    together([lambda: ended(world(3, last=1)), other])
    assert trained == [4, 4]


@pytest.mark.slow
def test_one_that_fails_does_not_stop_the_others() -> None:
    came: list[Any] = []

    def diverges() -> None:
        exp = world(4)
        exp.federation.x[:] = torch.nan
        ended(exp)

    with pytest.raises(DivergedError):
        together([lambda: came.append(ended(world(3))), diverges, lambda: came.append(ended(world(5)))])
    assert len(came) == 2
    assert close(came[0], ended(world(3)))


@pytest.mark.slow
def test_an_error_in_joint_training_is_that_of_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the GPU is gone")

    monkeypatch.setattr(cuda_graphs, "descend", broken)
    seen: list[str] = []

    def one(seed: int) -> None:
        try:
            ended(world(seed))
        except RuntimeError as error:
            seen.append(str(error))

    together([lambda s=s: one(s) for s in SEEDS])
    assert seen == ["the GPU is gone"] * 3


@pytest.mark.slow
def test_a_step_that_cannot_be_tried_is_not_joined(monkeypatch: pytest.MonkeyPatch, trained: list[int]) -> None:
    def full(*_: Any) -> bool:
        raise torch.OutOfMemoryError("no memory to try it")

    monkeypatch.setattr(together_module, "_same_step", full)
    found = together([lambda s=s: ended(world(s, last=1)) for s in SEEDS])
    assert trained == [4, 4, 4]
    assert close(found[0], ended(world(SEEDS[0], last=1)))


@pytest.mark.slow
def test_an_error_between_the_turns_ends_all_runs_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(together_module, "_same_step", broken)
    with pytest.raises(KeyboardInterrupt):
        together([lambda s=s: ended(world(s, last=1)) for s in SEEDS])


def test_only_one_run_runs_at_a_time_and_all_hear_that_they_should_stop() -> None:
    stop, active, most = threading.Event(), 0, 0

    def one() -> bool:
        nonlocal active, most
        active += 1
        most = max(most, active)
        event = asked_to_stop()
        assert event is not None
        event.set()
        active -= 1
        return event is stop

    assert together([one] * 5, stop) == [True] * 5
    assert most == 1
    assert asked_to_stop() is None


def test_no_runs_and_one_run() -> None:
    assert together([]) == []
    assert together([lambda: 7]) == [7]
