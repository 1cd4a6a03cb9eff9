"""An asynchronous server: which client arrives when, what it makes of old models, and that nothing else decides."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedloom
from fedloom.algorithm import Work
from fedloom.algorithms.async_sgd import AsyncSGD
from fedloom.core import usercode
from fedloom.core.errors import ConfigError, DivergedError
from fedloom.data.arrays import Arrays
from fedloom.engine import checkpoint
from fedloom.engine.forecast import forecast
from fedloom.engine.rounds import advance_watched, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse

# One example of each client takes 1, 2 and 5 seconds; messages take no time worth the name.
DEVICES = {"speeds": [1.0, 0.5, 0.2], "latency": 0.0, "up": 1e30, "down": 1e30}
ONE = {"batch": 1, "steps": 1, "lr": 0.5}


class Line(nn.Module):
    """One weight; logits (w x, 0)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.w * x, 0 * x], 1)


def line(**table: Any) -> Experiment:
    """Three clients with one example each: x = 1, 2 and -1, all of class 0."""
    x = np.array([[1.0], [2.0], [-1.0], [1.0]], dtype=np.float32)
    arrays = Arrays("line", x, np.zeros(4, int), np.arange(4) == 3, ("a", "b"), client=np.array([0, 1, 2, 0]))
    full = {
        "data": {"source": "in-memory"},
        "model": {"kind": "test_arrivals:Line"},
        "partition": {"kind": "natural", "holdout": 0.0},
        "cohort": {"sampling": "all"},
        "local": ONE,
        "system": DEVICES,
        "algorithm": "async_sgd",
    }
    usercode.vouch(full["model"])
    return prepare(parse(full | table), Path(), arrays).experiment


def after(exp: Experiment, rounds: int) -> list[Any]:
    state, store, found = begin(exp), RamStore(exp.federation.clients), []
    for _ in range(rounds):
        done = advance_watched(exp, state, store)
        state = done.state
        found.append(done)
    return found


def move(w: float, x: float) -> float:
    """A step of rate 0.5 on the loss ln(1 + e^(-w x)), less where it began."""
    return 0.5 * x / (1 + np.exp(w * x))


@pytest.mark.slow
@pytest.mark.parametrize("sends", ["move", "model"])
def test_three_clients_by_hand(sends: str) -> None:
    """Client 0 arrives at 1, 2, 3, ..., client 1 at 2, 4, ..., client 2 at 5; at 2, two arrive together.

    Each move counts whole, divided by max(tau, 1); of two that arrive together the mean is taken.
    """
    exp = line(algorithm={"kind": "async_sgd", "sends": sends})
    first, second = after(exp, 2)
    w = [0.0]

    def taken(now: float, start: float, x: float, tau: int) -> float:
        d = move(start, x)
        return (d if sends == "move" else start + d - now) / max(tau, 1)

    w.append(w[0] + taken(w[0], w[0], 1, 0))  # t = 1: client 0, from the first model
    w.append(w[1] + (taken(w[1], w[1], 1, 0) + taken(w[1], w[0], 2, 1)) / 2)  # t = 2: client 0 anew, and client 1
    assert [d.client for d in first.work] == [0, 1, 0]  # of those who arrive together, older models first
    assert first.state.seconds == pytest.approx(2.0)
    assert float(first.state.server.w) == pytest.approx(w[2], rel=1e-5)
    assert first.found == {"staleness/mean": pytest.approx(1 / 3), "staleness/max": 1.0}
    w.append(w[2] + taken(w[2], w[2], 1, 0))  # t = 3: client 0
    w.append(w[3] + (taken(w[3], w[3], 1, 0) + taken(w[3], w[2], 2, 1)) / 2)  # t = 4: both again
    assert [d.client for d in second.work] == [0, 1, 0]
    assert float(second.state.server.w) == pytest.approx(w[4], rel=1e-5)
    (third,) = after(exp, 3)[2:]
    # t = 5: client 0, and client 2, whose model is four steps old; then client 0 again, alone, at 6 with client 1
    now = w[4] + (taken(w[4], w[4], 1, 0) + taken(w[4], w[0], -1, 4)) / 2
    now = now + (taken(now, now, 1, 0) + taken(now, w[4], 2, 1)) / 2
    assert [d.client for d in third.work] == [2, 0, 1, 0]
    assert float(third.state.server.w) == pytest.approx(now, rel=1e-5)
    assert third.found["staleness/max"] == 4.0
    assert third.state.seconds == pytest.approx(6.0)
    assert third.state.up == third.state.down == 4 * (3 + 3 + 4)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"discount": "constant"}, [1, 1, 1]),
        ({"discount": "inverse"}, [1, 1, 1 / 3]),
        ({"discount": "polynomial", "exponent": 2.0}, [1, 1 / 4, 1 / 16]),
    ],
)
def test_how_much_an_old_move_counts(settings: dict[str, Any], expected: list[float]) -> None:
    found = AsyncSGD(**settings).freshness(torch.tensor([0.0, 1.0, 3.0]))
    assert found.tolist() == pytest.approx(expected)
    work = Work(*[torch.tensor(4.0)] * 4, staleness=torch.tensor(3.0))
    counted = AsyncSGD(weighting="samples", **settings).weight(None, work)  # type: ignore[arg-type]
    assert float(counted) == pytest.approx(4 * expected[2])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"discount": "polynomial"}, {"weighting": "samples"}])
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_clients_that_take_equally_long_are_fedavg(
    world: Callable[..., Experiment], executor: str, settings: dict[str, Any]
) -> None:
    """All arrive together, and nobody's model is old: the same models, bytes, gradients and seconds, bit for bit."""
    sizes, how = (8, 8, 8, 8), {"local": {"batch": 4, "epochs": 2, "lr": 0.2}, "engine": {"executor": executor}}
    fedavg = {"weighting": settings.get("weighting", "uniform")}
    ours = after(world(sizes, algorithm={"kind": "async_sgd", **settings}, **how), 3)
    theirs = after(world(sizes, algorithm={"kind": "fedavg"} | fedavg, **how), 3)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.state.server.w, other.state.server.w)
        assert mine.state[3:7] == other.state[3:7]  # up, down, seconds, gradients
        assert mine.found["staleness/max"] == 0
        assert sorted(mine.work) == sorted(other.work)


def test_a_model_that_is_sent_is_fedavg_up_to_rounding(world: Callable[..., Experiment]) -> None:
    ours, theirs = (
        after(world((8, 8, 8), algorithm=alg), 3)[-1].state.server.w
        for alg in ({"kind": "async_sgd", "sends": "model"}, {"kind": "fedavg"})
    )
    assert torch.allclose(ours, theirs, atol=1e-6)


UNEQUAL: dict[str, Any] = {
    "system": {"speed_spread": 1.0, "link_spread": 0.5, "jitter": 0.3},
    "cohort": {"size": 3},
    "local": {"batch": 4, "momentum": 0.9, "lr": 0.1, "state": "persist", "schedule": "cosine"},
    "rounds": 6,
}
SIZES = (5, 20, 9, 14, 7, 3)


@pytest.mark.slow
def test_a_run_that_is_resumed_after_every_round_is_the_same(world: Callable[..., Experiment], tmp_path: Path) -> None:
    """Models that are under way are in the checkpoint, bit for bit, and so is when they arrive."""
    exp = world(SIZES, algorithm="async_sgd", **UNEQUAL)
    whole = after(exp, 6)
    assert max(done.found["staleness/max"] for done in whole) > 2
    state, store = begin(exp), RamStore(6)
    for done in whole:
        state = advance_watched(exp, state, store).state
        checkpoint.save(tmp_path, state, store, {})
        store = RamStore(6)
        state = checkpoint.load_state(tmp_path, begin(exp), store).state
        assert torch.equal(state.server.w, done.state.server.w)
        assert torch.equal(state.under_way.arrival, done.state.under_way.arrival)
        assert torch.equal(state.under_way.server.w, done.state.under_way.server.w)
        assert state[3:7] == done.state[3:7]


@pytest.mark.slow
def test_a_client_is_at_work_on_one_model_at_a_time(world: Callable[..., Experiment]) -> None:
    exp = world(SIZES, algorithm="async_sgd", **UNEQUAL)
    found = after(exp, 6)
    for done in found:
        at_work = done.state.under_way.ids.tolist()
        assert len(set(at_work)) == 3
        assert bool((done.state.under_way.arrival >= done.state.seconds).all())
    assert {d.client for done in found for d in done.work} == set(range(6))  # and all come
    seconds = [done.state.seconds for done in found]
    assert seconds == sorted(set(seconds))


def test_what_will_be_spent_is_known_beforehand(world: Callable[..., Experiment]) -> None:
    exp = world(SIZES, algorithm="async_sgd", **UNEQUAL)
    for done, said in zip(after(exp, 4), islice(forecast(exp), 4), strict=True):
        assert (said.gradients, said.bytes) == (done.state.gradients, done.state.up + done.state.down)


def test_the_slowest_does_not_hold_up_the_others(world: Callable[..., Experiment]) -> None:
    """Twenty arrivals of five clients, one of which is a hundred times slower, against four rounds that wait for it."""
    slow = {"system": {"slow": [0], "slow_factor": 100.0}}
    ours, theirs = (
        after(world((8,) * 5, algorithm=kind, **slow), 4)[-1].state.seconds for kind in ("async_sgd", "fedavg")
    )
    assert ours < theirs / 10


def test_a_round_without_finite_work_ends_the_run(world: Callable[..., Experiment]) -> None:
    exp = world((8, 8), algorithm="async_sgd", local={"batch": 4, "lr": 3e38, "epochs": 2})
    with pytest.raises(DivergedError, match=r"round 1: no client returned finite numbers .clients 0, 1.; the local"):
        after(exp, 1)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"system": {"deadline": 3.0}}, r"system.deadline: the server of AsyncSGD does not wait for clients.*got 3.0"),
        ({"system": {"stragglers": 0.5}}, "system.stragglers: the server of AsyncSGD does not wait for clients"),
        ({"system": {"dropout": 0.5}}, "system.dropout"),
        ({"cohort": {"sampling": "poisson"}}, r"cohort.sampling: .*set it to uniform or all"),
        ({"aggregation": {"rule": "median"}}, "aggregation.rule: .*set it to mean"),
        ({"privacy": {"clip": 1.0, "noise": 1.0}}, "privacy.clip: .*epsilon is counted in rounds"),
        ({"evaluate": {"diagnostics": ["updates"]}}, "evaluate.diagnostics"),
        ({"evaluate": {"participants": True}}, "evaluate.participants"),
        (
            {"algorithm": {"kind": "async_sgd", "exponent": 2.0}},
            "algorithm.exponent: .*only if discount is polynomial",
        ),
    ],
)
def test_what_needs_rounds_is_refused(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse({"algorithm": "async_sgd"} | table)


def test_statistics_that_would_be_meant_are_refused() -> None:
    model = {"kind": "resnet20", "width": 4, "norm": "batch"}
    with pytest.raises(ConfigError, match=r"model.buffers: .*does not wait for clients"):
        fedloom.run("async_sgd", model=model, rounds=1)


@pytest.mark.slow
def test_a_run_folder_of_arrivals_resumes(tmp_path: Path) -> None:
    how: dict[str, Any] = {"model": {"kind": "logistic"}, "system": {"speed_spread": 1.0}, "checkpoint": {"every": 1}}
    fedloom.run("async_sgd", rounds=3, partition={"clients": 6}, cohort={"size": 4}, out=tmp_path / "r", **how)
    names = ("metrics.jsonl", "model.safetensors")
    whole = [(tmp_path / "r" / name).read_bytes() for name in names]
    assert b"staleness/mean" in whole[0]
    fedloom.resume(tmp_path / "r", at=2)
    assert [(tmp_path / "r" / name).read_bytes() for name in names] == whole
