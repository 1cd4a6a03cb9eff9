"""AFL: whatever the partition, the number of clients and their order, the head is that of one machine with all data."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedloom
from fedloom.algorithm import Setup
from fedloom.algorithms.analytic import Analytic
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Task
from fedloom.engine import laws
from fedloom.engine.local import lane_limit
from fedloom.maths.linear_head import head_of, with_head
from fedloom.maths.ridge import statistics_bytes
from fedloom.models.net import Net
from fedloom.runs.settings import parse
from fedloom.runs.start import load_config, start
from support import shared_laws
from support.closed_form import OWNERS, apart, dealt, rounds


def central(exp, *, ridge=1e-3, bias=False, rows=slice(None)) -> torch.Tensor:
    """Ridge regression of the features of these training rows, by another way than the package's."""
    fed, task = exp.federation, exp.task
    x, y = fed.examples(fed.train.rows[rows])
    with torch.no_grad():
        x = task.features(task.w0, x, task.buffers0).double().numpy()
    x = np.concatenate([x, np.ones((len(x), 1))], 1) if bias else x
    y = np.eye(fed.classes)[y.numpy()]
    rho = ridge * np.trace(x.T @ x) / x.shape[1]
    long = np.concatenate([x, np.sqrt(rho) * np.eye(x.shape[1])])
    padded = np.concatenate([y, np.zeros((x.shape[1], fed.classes))])
    return torch.from_numpy(np.linalg.lstsq(long, padded, rcond=None)[0])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["logistic", {"kind": "random_features", "width": 9}, {"kind": "mlp", "widths": [7]}])
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_a1_every_partition_gives_central_ridge(world, owner, model) -> None:
    exp = world(arrays=dealt(owner), algorithm={"kind": "analytic", "bias": True}, model=model)
    state = rounds(exp)
    exact = (
        isinstance(model, str) or model["kind"] == "random_features"
    )  # else a feature depends on its batch, a little
    assert apart(state.server.head, central(exp, bias=True)) < (1e-9 if exact else 1e-6)
    torch.testing.assert_close(head_of(exp.task, state.server.w), state.server.head, rtol=1e-6, atol=1e-6)
    body = exp.task.mask("body.").bool()
    assert torch.equal(state.server.w[body], exp.task.w0[body])


@pytest.mark.slow
@pytest.mark.parametrize(("agg", "digits"), [("aa", 1e-8), ("aa_simplified", 1e-11)])
def test_a2_three_ways_agree_over_several_rounds(world, agg, digits) -> None:
    """A3: what is left of the intermediary ridge is the ridge that was asked for."""
    settings = {"arrays": dealt(OWNERS["sixty"]), "cohort": {"size": 7}}
    ridge = {"ri_ridge": 0.5} if agg == "aa" else {}
    exp = world(**settings, algorithm={"kind": "analytic", "agg": agg, **ridge})
    whole = rounds(world(**settings, algorithm="analytic"), 8).server
    pairwise = rounds(exp, 8).server
    assert 30 < int((whole.standing == 1).sum()) < 60
    assert apart(pairwise.head, whole.head) < digits
    torch.testing.assert_close(pairwise.rows, whole.rows)


def test_the_head_is_as_published_without_ridge(world) -> None:
    exp = world(arrays=dealt(OWNERS["two"]), algorithm={"kind": "analytic", "ridge": 0.0})
    assert apart(rounds(exp).server.head, central(exp, ridge=0.0)) < 1e-9


def test_who_comes_again_is_not_counted_twice_and_who_comes_late_joins(world) -> None:
    exp = world(arrays=dealt(OWNERS["two"]), algorithm="analytic", cohort={"size": 1}, seed=1)
    first, state = rounds(exp, 1).server, rounds(exp, 9).server
    assert first.standing.tolist() in ([0, 1], [1, 0])
    assert state.standing.tolist() == [1, 1]
    assert float(state.counts.sum()) == 60
    assert apart(state.head, central(exp)) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("agg", ["sum", "aa", "aa_simplified"])
def test_a4_a_client_that_is_forgotten_was_never_there(world, agg) -> None:
    exp = world(arrays=dealt(OWNERS["skewed"]), algorithm={"kind": "analytic", "forget": [1], "agg": agg})
    with_it, without = rounds(exp, 1).server, rounds(exp, 2).server
    assert apart(with_it.head, central(exp)) < 1e-9
    others = np.flatnonzero(OWNERS["skewed"] != 1)
    assert apart(without.head, central(exp, rows=_ranks(exp, others))) < (1e-8 if agg == "aa" else 1e-10)
    assert without.standing.tolist().count(2) == 1
    after = rounds(exp, 5).server
    assert torch.equal(after.w, without.w)  # it is neither asked again nor counted again


@pytest.mark.parametrize("agg", ["eq29", "eq32", "eq35"])
def test_coefficients_as_law_afl_prints_them_do_not_give_the_head(world, agg) -> None:
    exp = world(arrays=dealt(OWNERS["skewed"]), algorithm={"kind": "analytic", "agg": agg})
    head = rounds(exp, 1).server.head
    assert bool(head.isfinite().all())
    assert apart(head, central(exp)) > 0.1


def _ranks(exp, rows):
    """Where these rows of the data are among the training rows."""
    return torch.isin(exp.federation.train.rows, torch.from_numpy(rows))


def test_when_all_are_forgotten_nothing_is_left(world) -> None:
    exp = world(arrays=dealt(OWNERS["two"]), algorithm={"kind": "analytic", "forget": [0, 1]})
    state = rounds(exp, 2).server
    assert not state.rows.any()
    assert not head_of(exp.task, state.w).any()


def test_nobody_trains_and_later_rounds_cost_nothing(world) -> None:
    exp = world(arrays=dealt(OWNERS["two"]), algorithm="analytic", evaluate={"diagnostics": ["updates"]})
    one, five = rounds(exp, 1), rounds(exp, 5)
    d, classes = 6, 3
    assert one.up == 2 * statistics_bytes(d, classes) == five.up
    assert one.down == 2 * 4 * (d * classes + classes)
    assert five.gradients == 0
    assert torch.equal(one.server.w, five.server.w)


def test_nothing_is_sent_for_a_body_that_all_can_draw(world) -> None:
    exp = world(arrays=dealt(OWNERS["two"]), algorithm="analytic", model={"kind": "random_features", "width": 50})
    assert rounds(exp).down == 2 * 4 * (50 * 3 + 3)


def test_a_class_that_nobody_has_is_never_predicted(world) -> None:
    arrays = dealt(OWNERS["two"])
    exp = world(arrays=arrays._replace(test=arrays.test | (arrays.y == 2)), algorithm="analytic")
    assert not rounds(exp).server.head[:, 2].any()


def test_many_features_are_not_stacked_side_by_side(world) -> None:
    exp = world(arrays=dealt(OWNERS["sixty"]), algorithm="analytic", model={"kind": "random_features", "width": 300})
    assert exp.lanes == (1 << 26) // (2 * (300 * 300 + 300 * 3))
    assert exp.lanes < lane_limit(exp.task, exp.device)
    wide = Analytic().bind(Setup(Task(Net(torch.nn.Linear(4, 4096), 4096, 10)), sgd(), torch.ones(3)))
    assert lane_limit(wide.task, exp.device, wide.lane_size) == 1


def test_it_is_evaluated_where_it_has_batch_normalisation(world) -> None:
    """The body is in evaluation mode at clients and server, and its statistics never move."""
    arrays = dealt(OWNERS["two"])
    images = arrays._replace(x=np.random.default_rng(0).normal(size=(80, 1, 6, 6)).astype(np.float32))
    exp = world(arrays=images, algorithm="analytic", model={"kind": "resnet20", "norm": "batch"})
    state = rounds(exp, 2)
    assert torch.equal(state.buffers, exp.task.buffers0)
    assert apart(state.server.head, central(exp)) < 1e-4


# -- what is refused -------------------------------------------------------------------------------
class Bare(torch.nn.Module):
    def __init__(self, shape, classes, after: bool = False) -> None:
        super().__init__()
        self.body = torch.nn.Flatten()
        self.head = torch.nn.Linear(shape[0], classes, bias=False)
        self.after = after

    def forward(self, x):
        return self.head(self.body(x)).sigmoid() if self.after else self.head(self.body(x))


def test_a_net_of_ones_own_without_bias(world) -> None:
    exp = world(arrays=dealt(OWNERS["two"]), algorithm="analytic", model={"kind": f"{__name__}:Bare"})
    assert apart(rounds(exp).server.head, central(exp)) < 1e-9


@pytest.mark.parametrize(
    ("algorithm", "model", "words"),
    [
        ({"forget": [7]}, "logistic", "algorithm.forget: there is no client 7 among 2"),
        ({"bias": True}, {"kind": f"{__name__}:Bare"}, "the head of this net has no bias"),
        ({}, {"kind": f"{__name__}:Bare", "after": True}, "are not those of its 'head'"),
        ({"agg": "aa", "ri_ridge": 0.0}, "logistic", "needs ri_ridge > 0"),
    ],
)
def test_what_cannot_be_solved_is_refused(world, algorithm, model, words) -> None:
    with pytest.raises(ConfigError, match=words):
        world(arrays=dealt(OWNERS["two"]), algorithm={"kind": "analytic", **algorithm}, model=model)


def test_a_cohort_size_is_enough_to_ask_for_less_than_all() -> None:
    assert parse({"algorithm": "analytic"}).cohort.sampling == "all"
    assert parse({"algorithm": "analytic", "cohort": {"size": 5}}).cohort.sampling == "uniform"


@pytest.mark.slow
def test_a_head_goes_into_the_parameters_and_comes_out(world) -> None:
    task = world(arrays=dealt(OWNERS["two"]), model={"kind": "mlp", "widths": [7]}).task
    head = torch.randn(8, 3, dtype=torch.float64)
    torch.testing.assert_close(head_of(task, with_head(task, task.w0, head)), head.float().double(), rtol=0, atol=0)
    assert not head_of(task, with_head(task, task.w0, head[:7]))[7].any()


class Product(Analytic):
    agg: Literal["sum", "aa"] = "aa"


class Recursion(Analytic):
    agg: Literal["sum", "aa_simplified"] = "aa_simplified"


@pytest.mark.slow
@pytest.mark.usefixtures("shared_laws")
@shared_laws.BUT_SETTINGS
@pytest.mark.parametrize("form", [Product, Recursion])
def test_laws_of_the_pairwise_forms(law, form) -> None:
    """But for settings: that the form has no effect is AFL's theorem."""
    assert laws.verdict(law, form) == ""


# -- from the command line -------------------------------------------------------------------------
DEALS = [
    ("iid", "partition.clients=2"),
    ("iid", "partition.clients=500"),
    ("shards", "partition.clients=20"),
    ("dirichlet", "partition.alpha=0.01", "partition.clients=20"),
]


@pytest.mark.slow
def test_digits_do_not_depend_on_the_partition(tmp_path) -> None:
    """A7: the same accuracy, to the last example, and the weights of central ridge to eight digits."""
    found, heads = set(), []
    for k, (kind, *settings) in enumerate(DEALS):
        words = ["algorithm=analytic", "model=logistic", f"partition={kind}", "partition.holdout=0", *settings]
        config = load_config(
            None, [*words, "rounds=1", "checkpoint.curves=false"]
        )  # what the command line does with its words
        start(config, out=tmp_path / str(k), root=tmp_path)
        heads.append(load_file(tmp_path / str(k) / "checkpoints" / "00000001" / "state.safetensors")["server.head"])
        found.add((tmp_path / str(k) / "metrics.jsonl").read_text().splitlines()[-1].split('"global/test/loss"')[0])
    assert len(found) == 1, found
    assert all(apart(head, heads[0]) < 1e-8 for head in heads)


@pytest.mark.slow
def test_a_body_from_an_earlier_run(tmp_path) -> None:
    """The body of a net trained for some rounds, frozen: far better than the same body as it was drawn."""
    model = {"kind": "mlp", "widths": [32]}
    fedloom.run("fedavg", rounds=8, model=model, checkpoint={"curves": False}, out=tmp_path / "first")
    weights = str(tmp_path / "first" / "model.safetensors")
    trained = fedloom.run("analytic", rounds=1, model=model | {"weights": weights})
    drawn = fedloom.run("analytic", rounds=1, model=model)
    assert trained.summary["global/test/accuracy"].last > drawn.summary["global/test/accuracy"].last + 0.02
