"""The gradients that a run says it has taken, against those that autograd has seen, for every algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pytest
import torch

from fedloom.algorithm.capabilities import needs_proxy
from fedloom.engine.forecast import forecast
from fedloom.engine.lateness import foresee_lateness
from fedloom.engine.local import train
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import RamStore
from fedloom.engine.training import groups_of
from fedloom.runs.find import algorithms

SIZES, BATCH = (12, 6, 24), 6  # whole batches, of which halves and thirds are whole, too
KINDS = list(algorithms(own=False))
VARIANTS = [
    {"kind": "pfedme", "inner_steps": 3},
    {"kind": "perfedavg", "variant": "hessian_free"},
    {"kind": "scaffold", "option": "I"},
    {"kind": "relaxation", "gamma_target": 0.05},
    {"kind": "fedala", "profile": "paper", "max_start_passes": 12},
    {"kind": "pfedala", "profile": "paper", "max_start_passes": 12},
    {"kind": "fedrep", "head_epochs": 2},
    {"kind": "fedrep", "preset": "fedbabu"},
    {"kind": "feddyn", "alpha_by": "samples"},
    {"kind": "ditto", "personal_epochs": 2},
    {"kind": "dfedgam", "hvp": "central"},
    {"kind": "dfedgam", "rule": "gam_fd"},
    {"kind": "fedlaw", "shrink_rule": "eq5", "server_epochs": 1},
    {"kind": "law_afl", "schedule": "warmup_then_analytic", "warmup": 2, "shrink_rule": "eq5", "server_epochs": 1},
    {"kind": "law_afl", "schedule": "per_round", "fresh": True, "head_steps": 2, "server_epochs": 1},
]
WHOLE = {"fedala": {"sample_percent": 50.0}, "pfedala": {"sample_percent": 50.0}}  # whole batches of these, too
CASES = [{"kind": kind, **WHOLE.get(kind, {})} for kind in KINDS] + VARIANTS
# What only training decides, of which a forecast knows a part: see engine/forecast.py.
UNSURE = [case for case in CASES if case["kind"] in ("fedala", "pfedala") or "gamma_target" in case]


def named(case: object) -> str:
    return " ".join(str(value) for value in case.values()) if isinstance(case, dict) else f"{case:g}"


def laid_out(world, case: dict) -> Experiment:
    cls = algorithms(own=False)[case["kind"]]
    table = {"local": {"batch": BATCH, "lr": 0.1, "epochs": 2}, "model": {"kind": "mlp", "widths": [5]}}
    table |= {"topology": "ring"} if cls.family == "gossip" else {}
    table |= {"proxy": {"size": 6, "source": "test"}} if needs_proxy(cls()) else {}
    return world(SIZES, algorithm=case, engine={"executor": "loop"}, **table)


@contextmanager
def counted(exp: Experiment) -> Iterator[list[int]]:
    """The numbers of examples that each backward pass through the net went back through."""
    seen: list[int] = []

    def watch(net, given, out) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: seen.append(len(given[0])))

    hooks = [net.register_forward_hook(watch) for net in (exp.task._train, exp.task._eval)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def in_training(exp: Experiment, state: RunState, store: RamStore) -> float:
    """The gradients of a batch that the clients of the next round take."""
    if exp.is_asynchronous:  # who takes part is not drawn for a round, and nobody keeps anything
        with counted(exp) as seen:
            advance(exp, state, RamStore(3))
        return sum(seen) / BATCH
    present = exp.present(state.round)
    extra = None if exp.is_network else foresee_lateness(exp, state, present, 0).extra
    with counted(exp) as seen, torch.no_grad():
        for group in groups_of(exp, state.round, present, extra):
            for k in range(len(group.ids)):
                one = group.pick([k])
                train(exp.algorithm, exp.federation, one, exp.given(state, store, one.ids))
    return sum(seen) / BATCH


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=named)
def test_gradients_are_those_that_autograd_sees(world, case) -> None:
    exp = laid_out(world, case)
    state, store = begin(exp), RamStore(3)
    for _ in range(3):
        expected = state.gradients + in_training(exp, state, store)
        state, _ = advance(exp, state, store)
        assert state.gradients == pytest.approx(expected)
    if case not in UNSURE:
        assert next(islice(forecast(exp), 2, None)).gradients == pytest.approx(state.gradients)


def test_there_is_something_to_count(world) -> None:
    """The count above is not one of nothing: two passes of seven batches, and ALA's from the second round on."""
    exp = laid_out(world, {"kind": "fedavg"})
    assert in_training(exp, begin(exp), RamStore(3)) == 2 * sum(SIZES) / BATCH
    assert UNSURE
    twice = laid_out(world, {"kind": "fedkd"})
    assert in_training(twice, begin(twice), RamStore(3)) == 4 * sum(SIZES) / BATCH


@pytest.mark.parametrize(
    ("case", "cost"),
    [
        ({"kind": "fedkd"}, 2),
        ({"kind": "pfedme", "inner_steps": 3}, 3),
        ({"kind": "perfedavg", "variant": "hessian_free"}, 4 / 3),
        ({"kind": "fedsam"}, 2),
        ({"kind": "scaffold", "option": "I"}, 1.5),  # one pass more than two
    ],
    ids=named,
)
def test_time_follows_the_gradients(world, case, cost) -> None:
    spans = []
    for kind in ({"kind": "fedavg"}, case):
        exp = laid_out(world, kind)
        start = exp.timetable(0, exp.present(0), 0, 0).start
        spans.append(float(start.max() - start.min()))  # without what is the same for all
    assert spans[1] > 0
    assert spans[1] / spans[0] == pytest.approx(cost)


def test_a_forecast_counts_what_clients_do_beside_training(world) -> None:
    """ALA's pass, and the epochs while they wait, as drawn."""
    plain, ala, waiting = (laid_out(world, {"kind": kind}) for kind in ("fedavg", "fedala", "pfedala"))
    one, two, three = (next(forecast(exp)).gradients for exp in (plain, ala, waiting))
    assert one == 2 * sum(SIZES) / BATCH
    assert two > one
    extra = foresee_lateness(waiting, begin(waiting), waiting.present(0), 0).extra
    assert three == two + sum(n * SIZES[i] / BATCH for i, n in extra.items())
    assert three > two
