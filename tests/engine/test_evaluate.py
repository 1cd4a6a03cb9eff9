"""Evaluation: what is asked for changes nothing else, and neither padding, order, batches nor executors matter."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import fedloom
from fedloom.algorithm import Model
from fedloom.algorithms.dpsgd import DPSGD
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedavg_ft import FedAvgFT
from fedloom.algorithms.local_only import LocalOnly
from fedloom.compare.foreseen import metric_names
from fedloom.core.errors import ConfigError, DivergedError
from fedloom.core.metrics import Verdicts, client_metrics
from fedloom.data.arrays import Arrays
from fedloom.data.federation import Federation
from fedloom.engine.evaluate import _HELD, ClientModels, _batches, evaluate, evaluate_models
from fedloom.engine.rounds import advance, begin
from fedloom.engine.settings import Evaluate
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import RamStore
from fedloom.engine.topology.kinds import Ring
from fedloom.runs.settings import parse
from support.worlds import experiment, federation, ranges

VARIANTS = ("micro_logits", "micro_softmax", "macro_present")
OWN_TEST = (7, 0, 1, 12, 3)  # held-out rows: one client has none, one has a single class
IMAGE = (1, 6, 6)


def ragged(shape: tuple[int, ...] = (5,)) -> Federation:
    """Clients with a few training rows each, and ``OWN_TEST`` held-out ones."""
    fed = federation((6, 9, 4, 8, 5), shape=shape, classes=3)
    return fed._replace(test=ranges(OWN_TEST, offset=2))


def net_of(shape: tuple[int, ...] = (5,)) -> nn.Module:
    torch.manual_seed(2)
    if len(shape) == 3:
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def world(algorithm: Any = None, *, shape: tuple[int, ...] = (5,), auc: Any = VARIANTS, **settings: Any) -> Experiment:
    ring = {"topology": Ring()} if algorithm is not None and algorithm.family == "gossip" else {}
    return experiment(ragged(shape), net_of(shape), algorithm, evaluate=Evaluate(auc=auc), **settings, **ring)


def models(exp: Experiment, ids: Sequence[int]) -> ClientModels:
    """A model for each client that depends on nothing but the client."""
    w = torch.stack([exp.task.w0 + 0.3 * torch.sin(exp.task.w0 * 50 + k) for k in ids])
    return ClientModels(torch.tensor(ids), w, exp.task.buffers0.expand(len(ids), -1))


def after(exp: Experiment, rounds: int = 2) -> tuple[RunState, RamStore]:
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return state, store


def table(found: Verdicts) -> dict[int, list[float]]:
    """The verdict on each client."""
    columns = [found.rows.double(), found.correct, found.loss, *found.auc.values()]
    return dict(zip(found.ids.tolist(), torch.stack(columns, 1).tolist(), strict=True))


def by_hand(exp: Experiment, part: ClientModels, k: int) -> list[float]:
    """The same with a plain module and scikit-learn."""
    test, client = exp.federation.test, int(part.ids[k])
    x, y = exp.federation.examples(test.rows[test.start[client] : test.start[client + 1]])
    logits = exp.task.module(part.w[k], part.buffers[k])(x).detach()
    hot = nn.functional.one_hot(y, 3).numpy()
    share = logits.double().softmax(1).float()
    micro = [float(roc_auc_score(hot.ravel(), s.numpy().ravel())) for s in (logits, share)]
    both = [c for c in range(3) if 0 < hot[:, c].sum() < len(y)]
    macro = [roc_auc_score(hot[:, c], logits[:, c].numpy()) for c in both]
    loss = float(nn.functional.cross_entropy(logits.double(), y, reduction="sum"))
    right = float((logits.argmax(1) == y).sum())
    return [float(len(y)), right, loss, *micro, float(np.mean(macro)) if macro else math.nan]


def same(got: dict[int, list[float]], want: dict[int, list[float]]) -> None:
    assert got.keys() == want.keys()
    for client, values in got.items():
        assert values == pytest.approx(want[client], abs=1e-6, nan_ok=True), client


# -- judging clients -------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", [(5,), IMAGE], ids=["vector", "image"])
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_each_client_is_evaluated_as_a_plain_module_would_be(executor: Any, shape: tuple[int, ...]) -> None:
    exp = world(executor=executor, shape=shape)
    part = models(exp, range(5))
    want = {k: by_hand(exp, part, k) for k, rows in enumerate(OWN_TEST) if rows}  # who has no rows is skipped
    assert math.isnan(want[2][-1])  # one row, one class
    same(table(evaluate_models(exp, part)), want)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_neither_padding_nor_order_nor_grouping_matters(executor: Any) -> None:
    exp = world(executor=executor)
    whole = evaluate_models(exp, models(exp, range(5)))
    for groups in (([4, 2], [1, 0], [3]), ([3, 2, 1, 4, 0],), ([0], [1], [2], [3], [4])):
        parts = [evaluate_models(exp, models(exp, ids)) for ids in groups]
        same(table(Verdicts.cat(parts)), table(whole))
        assert client_metrics("p", Verdicts.cat(parts)) == pytest.approx(client_metrics("p", whole), abs=1e-6)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_few_scores_are_held_at_once_and_few_rows_pass_at_once(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exp = world(executor=executor)
    part = models(exp, range(5))
    whole, common = table(evaluate_models(exp, part)), evaluate(exp, begin(exp), RamStore(5))
    monkeypatch.setattr("fedloom.engine.evaluate._HELD", 25)  # one client of 7 rows, or two of 3
    monkeypatch.setattr("fedloom.engine.evaluate._chunk", lambda _: 4)
    same(table(evaluate_models(exp, part)), whole)
    assert evaluate(exp, begin(exp), RamStore(5)) == pytest.approx(common, abs=1e-6)


@pytest.mark.slow
@given(st.lists(st.integers(0, 200_000) | st.integers(0, 9), max_size=60), st.integers(2, 100))
def test_batches_hold_every_client_with_rows_once_and_no_more_than_fits(sizes: list[int], classes: int) -> None:
    found = _batches(torch.tensor(sizes, dtype=torch.int64), classes)
    assert sorted(k for batch in found for k in batch.tolist()) == [k for k, n in enumerate(sizes) if n]
    for batch in found:
        assert len(batch) == 1 or len(batch) * max(sizes[k] for k in batch.tolist()) * classes <= _HELD


def test_nobody_to_judge() -> None:
    exp = world()
    assert len(evaluate_models(exp, models(exp, [1])).ids) == 0
    empty = dataclasses.replace(exp, federation=exp.federation._replace(test=ranges([0] * 5)))
    assert client_metrics("p", evaluate_models(empty, models(empty, range(5)))) == {}
    assert not any(name.startswith("personal") for name in evaluate(empty, begin(empty), RamStore(5)))


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_model_that_is_not_finite_is_wrong_about_everything_and_has_no_area(executor: Any) -> None:
    exp = world(executor=executor)
    part = models(exp, range(5))
    well = table(evaluate_models(exp, part))
    broken = part._replace(w=part.w.index_fill(0, torch.tensor([3]), math.nan))
    got = table(evaluate_models(exp, broken))
    assert got[3][:2] == [12.0, 0.0]
    assert all(math.isnan(value) for value in got[3][2:])
    same({k: v for k, v in got.items() if k != 3}, {k: v for k, v in well.items() if k != 3})
    named = client_metrics("p", evaluate_models(exp, broken))
    assert named["p/diverged"] == 1
    assert all(math.isfinite(value) for value in named.values())


# -- the metrics of a moment -----------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedAvg(), FedAvgFT(), LocalOnly(), DPSGD()], ids=lambda a: type(a).__name__)
def test_areas_change_no_other_number_and_executors_agree(algorithm: Any) -> None:
    found: list[dict[str, float]] = []
    ways = (("lanes", 64, ()), ("lanes", 64, VARIANTS), ("lanes", 2, VARIANTS), ("loop", 1, VARIANTS))
    for executor, lanes, auc in ways:
        exp = world(algorithm, executor=executor, lanes=lanes, auc=auc)
        found.append(evaluate(exp, *after(exp)))
    plain, asked, narrow, looped = found
    assert {name: value for name, value in asked.items() if "/auc_" not in name} == plain
    assert asked == pytest.approx(narrow, abs=1e-6)
    assert asked == pytest.approx(looped, abs=1e-6)
    point = f"personal/{algorithm.traits.served}/test"
    names = [f"{point}/auc_{v}{end}" for v in VARIANTS for end in ("", "_mean", "_std", "_worst10")]
    common = {"server": "global", "gossip": "consensus"}.get(algorithm.family)
    names += [f"{common}/test/auc_{v}" for v in VARIANTS] if common else []
    assert {name for name in asked if "/auc_" in name} == set(names)


def test_a_shared_model_gets_the_verdicts_of_its_copies() -> None:
    """One pass over all rows, and one model for each client, are two ways to the same numbers."""
    exp = world()
    state, store = after(exp)
    copies = ClientModels(torch.arange(5), state.server.w.expand(5, -1), state.buffers.expand(5, -1))
    found = evaluate(exp, state, store)
    got = {name: value for name, value in found.items() if name.startswith("personal/")}
    assert got == pytest.approx(client_metrics("personal/pre_fit/test", evaluate_models(exp, copies)), abs=1e-6)


def test_the_area_on_the_common_test_set_is_that_of_all_its_rows() -> None:
    exp = world()
    state, store = after(exp)
    x, y = exp.federation.examples(exp.federation.common)
    logits = exp.task.module(state.server.w, state.buffers)(x).detach().numpy()
    hot = np.eye(3)[y.numpy()]
    found = evaluate(exp, state, store)
    assert found["global/test/auc_micro_logits"] == pytest.approx(roc_auc_score(hot.ravel(), logits.ravel()), abs=1e-6)
    macro = roc_auc_score(hot, logits, average="macro")
    assert found["global/test/auc_macro_present"] == pytest.approx(macro, abs=1e-6)


def test_variants_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.auc"):
        fedloom.run("fedavg", rounds=1, evaluate={"auc": ["macro"]})


# -- whole runs ------------------------------------------------------------------------------------
def awkward() -> Arrays:
    """Four clients: an ordinary one, one with a single class, one without rows to hold out, one with two classes."""
    rng = np.random.default_rng(0)
    client = np.repeat([0, 1, 2, 3], [24, 12, 1, 16])
    y = rng.integers(0, 3, len(client))
    y[client == 1] = 2
    y[client == 3] %= 2
    x = rng.normal(size=(len(client), 4)) + 1.5 * np.eye(3, 4)[y]
    return Arrays("awkward", x.astype(np.float32), y, np.zeros(len(y), dtype=bool), ("a", "b", "c"), client=client)


def run(algorithm: Any, **settings: Any) -> fedloom.History:
    return fedloom.run(
        algorithm,
        data=awkward(),
        partition={"kind": "natural", "holdout": 0.25},
        model="logistic",
        evaluate={"auc": list(VARIANTS)},
        **{"rounds": 2, "cohort": {"sampling": "all"}, **settings},
    )


@pytest.mark.parametrize("executor", ["loop", "lanes"])
@pytest.mark.parametrize("algorithm", ["fedavg", "fedavg_ft", "local_only"])
def test_a_run_with_clients_of_one_class_and_clients_without_test_rows(algorithm: str, executor: str) -> None:
    history = run(algorithm, engine={"executor": executor})
    point = "pre_fit" if algorithm == "fedavg" else "post_fit"
    for variant in VARIANTS:
        series = history.metrics[f"personal/{point}/test/auc_{variant}"]
        assert ((series >= 0) & (series <= 1)).all()


class Doomed(LocalOnly):
    """A client's model is broken as soon as it has been trained."""

    def serve(self, down: Model, mine: Model) -> Tensor:
        return torch.where((mine.w != down.w).any(), math.nan, mine.w)


def test_a_run_in_which_a_client_s_model_is_not_finite_goes_on() -> None:
    history = run(Doomed(), cohort={"size": 1}, rounds=1)
    before, now = history.records
    assert "personal/post_fit/test/diverged" not in before
    assert now["personal/post_fit/test/diverged"] == 1
    assert all(math.isfinite(value) for value in now.values())
    assert now["personal/post_fit/test/accuracy_worst10"] == 0


def test_a_run_in_which_no_client_s_model_is_finite_ends() -> None:
    with pytest.raises(DivergedError, match=r"the evaluation is not finite \(personal/post_fit/test/loss"):
        run(Doomed())


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "name"), [("fedavg", "global"), ("dfedgam", "consensus")])
def test_flatness_is_no_less_than_at_any_point_of_the_ball(world, algorithm, name) -> None:
    """R0 and R1 of the mean loss on all training rows, against random points of the ball around the common model."""
    more = {"topology": "ring"} if name == "consensus" else {}
    rho = 0.2
    exp = world((6, 9, 7), algorithm=algorithm, evaluate={"flatness": rho}, **more)
    state, store = begin(exp), RamStore(3)
    state, _ = advance(exp, state, store)
    found = evaluate(exp, state, store)
    w = state.server.w.mean(0) if name == "consensus" else state.server.w
    x, y = exp.federation.examples(exp.federation.train.rows)

    def loss(at):
        return torch.nn.functional.cross_entropy(exp.task.apply(at, x, exp.task.buffers0), y)

    g = torch.Generator().manual_seed(3)
    for _ in range(50):
        d = torch.randn(w.shape, generator=g)
        there = (w + rho * d / d.norm()).requires_grad_()
        (slope,) = torch.autograd.grad(loss(there), there)
        assert float(loss(there) - loss(w)) <= found[f"{name}/flatness/R0"] + 1e-6
        assert rho * float(slope.norm()) <= found[f"{name}/flatness/R1"] + 1e-6
    assert 0 < found[f"{name}/flatness/R0"] <= found[f"{name}/flatness/R1"]
    plain = world((6, 9, 7), algorithm=algorithm, **more)
    assert "flatness" not in "".join(evaluate(plain, state, store))
    assert {k for k in found if "flatness" in k} <= metric_names_of(algorithm, rho, more)


def metric_names_of(algorithm, rho, more):
    return metric_names(parse({"algorithm": algorithm, "evaluate": {"flatness": rho}, **more}))


@pytest.mark.parametrize("algorithm", ["local_only", "fedrep"])
def test_where_there_is_no_common_model_nothing_is_flat(algorithm) -> None:
    with pytest.raises(ConfigError, match=r"evaluate\.flatness: there is no common model with"):
        parse({"algorithm": algorithm, "evaluate": {"flatness": 0.1}})
