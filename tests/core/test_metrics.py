"""Measurements: they merge in any grouping, and say last, best and mean, never only best."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, log_loss, roc_auc_score
from torch import Tensor

from fedloom.core.metrics import (
    Verdicts,
    auc,
    client_metrics,
    rounds_to_convergence,
    score,
    spread,
    sum_by,
    summarise,
    summary_of_records,
)
from fedloom.core.vocabulary import lower_is_better

VARIANTS: tuple[Any, ...] = ("micro_logits", "micro_softmax", "macro_present")
MICRO = VARIANTS[:2]


def test_scores_are_those_of_scikit_learn() -> None:
    logits, y = torch.randn(200, 5), torch.randint(0, 5, (200,))
    got = score(logits, y)
    assert float(got.correct.mean()) == pytest.approx(accuracy_score(y, logits.argmax(1)))
    chance = logits.double().softmax(1).numpy()
    assert float(got.loss.mean()) == pytest.approx(log_loss(y.numpy(), chance, labels=range(5)), rel=1e-9)
    assert got.loss.dtype == torch.float64


def test_scores_that_are_not_finite_count_as_wrong() -> None:
    logits = torch.tensor([[float("nan"), 0.0], [float("inf"), 0.0], [1.0, 0.0]])
    got = score(logits, torch.tensor([0, 0, 0]))
    assert got.correct.tolist() == [0, 0, 1]
    assert not bool(got.loss[:2].isfinite().any())


def test_spread_over_clients() -> None:
    values, weights = np.arange(20) / 20, np.ones(20)
    weights[-1] = 100
    got = spread(values, weights, low_is_bad=True)
    assert got.weighted == pytest.approx(np.average(values, weights=weights))
    assert got.mean == pytest.approx(values.mean())
    assert got.std == pytest.approx(values.std())
    assert got.worst == pytest.approx(0.025)  # the two lowest of twenty
    assert spread(values, weights, low_is_bad=False).worst == pytest.approx(0.925)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.booleans())
def test_the_worst_tenth_is_never_better_than_the_mean(values: list[float], low_is_bad: bool) -> None:
    v = np.array(values)
    got = spread(v, np.ones(len(v)), low_is_bad=low_is_bad)
    assert got.worst <= got.mean + 1e-12 if low_is_bad else got.worst >= got.mean - 1e-12


def test_clients_without_examples_do_not_count() -> None:
    got = spread(np.array([0.0, 0.5, 1.0]), np.array([0.0, 1.0, 1.0]), low_is_bad=True)
    assert (got.weighted, got.mean, got.worst) == (0.75, 0.75, 0.5)
    assert all(math.isnan(v) for v in spread(np.zeros(2), np.zeros(2), low_is_bad=True))


def test_fewer_than_ten_clients_have_a_worst_one() -> None:
    assert spread(np.array([0.2, 0.9]), np.ones(2), low_is_bad=True).worst == 0.2


def test_summaries_say_last_best_and_mean_of_the_last_ten() -> None:
    series = [0.1 * k for k in range(15)] + [0.5]
    got = summarise("global/test/accuracy", series)
    assert got.last == 0.5
    assert got.best == pytest.approx(1.4)
    assert got.mean_last_10 == pytest.approx(np.mean(series[-10:]))
    assert summarise("global/test/loss", [3.0, 1.0, 2.0]).best == 1.0
    assert summarise("x/accuracy", [0.25]) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("name", "lower"),
    [
        ("global/test/accuracy", False),
        ("global/test/loss", True),
        ("personal/post_fit/test/loss_worst10", True),
        ("personal/pre_fit/test/accuracy_std", True),
        ("personal/pre_fit/test/accuracy_worst10", False),
        ("consensus/distance", True),
        ("bytes/up", True),
        ("personal/pre_fit/test/auc_macro_present", False),
        ("personal/pre_fit/test/auc_macro_present_std", True),
    ],
)
def test_which_way_is_better_follows_from_the_name(name: str, lower: bool) -> None:
    assert lower_is_better(name) is lower


def test_sums_by_owner() -> None:
    got = sum_by(torch.tensor([2, 0, 2]), torch.tensor([1.0, 2.0, 3.0]), 4)
    assert got.tolist() == [2.0, 0.0, 4.0, 0.0]
    assert got.dtype == torch.float64


# -- the area under the ROC curve ------------------------------------------------------------------
class Rows(NamedTuple):
    logits: Tensor  # [B, C] float32
    y: Tensor  # [B]
    owner: Tensor  # [B]
    clients: int


def areas(rows: Rows, variant: Any) -> list[float]:
    found: list[float] = auc(variant, rows.logits, rows.y, owner=rows.owner, clients=rows.clients).tolist()
    return found


def one(logits: Tensor, y: Tensor, variant: Any) -> float:
    """The area of a single client."""
    return areas(Rows(logits, y, torch.zeros_like(y), 1), variant)[0]


def by_scikit_learn(logits: Tensor, y: Tensor, variant: str) -> float:
    """The same area, defined the slow way."""
    hot = torch.nn.functional.one_hot(y, logits.shape[1]).numpy()
    if variant != "macro_present":
        scores = logits if variant == "micro_logits" else logits.double().softmax(1).float()
        return float(roc_auc_score(hot.ravel(), scores.numpy().ravel())) if len(y) else math.nan
    columns = [c for c in range(hot.shape[1]) if 0 < hot[:, c].sum() < len(y)]
    found = [roc_auc_score(hot[:, c], logits[:, c].numpy()) for c in columns]
    return float(np.mean(found)) if found else math.nan


@st.composite
def ragged(draw: Any) -> Rows:
    """Rows of a few clients in any order: some clients without rows, some with one class, and often ties."""
    clients, classes, n = draw(st.integers(1, 5)), draw(st.integers(2, 5)), draw(st.integers(0, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        logits = rng.integers(-2, 3, (n, classes)) / 2 * rng.choice([1.0, -1.0])  # -0.0 and 0.0 are equal
    else:
        logits = rng.normal(size=(n, classes)) * 10.0 ** rng.integers(-20, 20)
    y = rng.integers(0, draw(st.integers(1, classes)), n)
    owner = rng.integers(0, clients, n)
    tensors = torch.from_numpy(logits.astype(np.float32)), torch.from_numpy(y), torch.from_numpy(owner)
    return Rows(*tensors, clients)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@given(rows=ragged())
def test_areas_are_those_of_scikit_learn(variant: Any, rows: Rows) -> None:
    each = [rows.owner == k for k in range(rows.clients)]
    want = [by_scikit_learn(rows.logits[mine], rows.y[mine], variant) for mine in each]
    assert areas(rows, variant) == pytest.approx(want, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_many_rows_are_ranked_in_pieces(variant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(3000, 4).mul(8).round() / 8, torch.randint(0, 4, (3000,))
    whole = one(logits, y, variant)
    assert whole == pytest.approx(by_scikit_learn(logits, y, variant), abs=1e-6)
    monkeypatch.setattr("fedloom.core.metrics._RANKED", 64)
    assert one(logits, y, variant) == whole


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@given(rows=ragged(), seed=st.integers(0, 1000))
def test_the_order_of_rows_and_clients_changes_no_bit_of_an_area(variant: Any, rows: Rows, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    at, names = (torch.randperm(n, generator=chance) for n in (len(rows.y), rows.clients))
    mixed = Rows(rows.logits[at], rows.y[at], names[rows.owner[at]], rows.clients)
    got, want = np.array(areas(mixed, variant))[names.numpy()], np.array(areas(rows, variant))
    assert np.array_equal(got, want, equal_nan=True)


def test_a_shift_of_all_scores_of_a_row_moves_only_the_area_of_the_logits() -> None:
    torch.manual_seed(0)
    y = torch.arange(200) % 10
    logits = torch.randn(200, 10).mul(8).round() / 8 + 8 * torch.nn.functional.one_hot(y, 10)
    shifted = logits + torch.randint(-500, 500, (200, 1))  # exactly representable
    assert score(logits, y).correct.equal(score(shifted, y).correct)
    assert one(logits, y, "micro_softmax") == one(shifted, y, "micro_softmax") > 0.99
    assert one(logits, y, "micro_logits") > 0.99
    assert one(shifted, y, "micro_logits") < 0.6


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize("variant", VARIANTS)
def test_perfect_scores_have_area_one_and_constant_ones_a_half(variant: Any, classes: int) -> None:
    y = torch.arange(40) % classes
    assert one(torch.nn.functional.one_hot(y, classes).float(), y, variant) == 1.0
    assert one(torch.full((40, classes), 0.3), y, variant) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("variant", MICRO)
@given(classes=st.integers(2, 12), right=st.integers(0, 30), wrong=st.integers(0, 30))
def test_the_area_of_saturated_predictions_follows_from_their_accuracy(
    variant: Any, classes: int, right: int, wrong: int
) -> None:
    assume(right + wrong > 0)
    y = torch.arange(right + wrong) % classes
    said = torch.where(torch.arange(len(y)) < right, y, (y + 1) % classes)
    a = right / len(y)
    want = (a + 1 - (1 - a) / (classes - 1)) / 2
    assert one(torch.nn.functional.one_hot(said, classes).float(), y, variant) == pytest.approx(want, abs=1e-12)


def test_a_client_with_one_class_has_micro_areas_and_no_macro_area() -> None:
    torch.manual_seed(0)
    logits, y = torch.randn(9, 4), torch.full((9,), 2)
    for variant in MICRO:
        assert one(logits, y, variant) == pytest.approx(by_scikit_learn(logits, y, variant), abs=1e-6)
    assert math.isnan(one(logits, y, "macro_present"))


def test_a_client_without_rows_has_no_area() -> None:
    rows = Rows(torch.randn(4, 3), torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 1, 1]), 3)
    for variant in VARIANTS:
        assert [math.isnan(area) for area in areas(rows, variant)] == [True, False, True]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_take_the_area_of_their_client_only(variant: Any, bad: float) -> None:
    torch.manual_seed(0)
    rows = Rows(torch.randn(12, 3), torch.arange(12) % 3, torch.arange(12) % 2, 2)
    broken = rows.logits.clone()
    broken[4, 1] = bad
    got, want = areas(rows._replace(logits=broken), variant), areas(rows, variant)
    assert math.isnan(got[0])
    assert got[1] == want[1]


# -- verdicts on clients ---------------------------------------------------------------------------
def verdicts(rows: list[int], correct: list[float], loss: list[float] | None = None, **of: list[float]) -> Verdicts:
    losses = torch.tensor(loss or [0.0] * len(rows)).double()
    each = {name: torch.tensor(values).double() for name, values in of.items()}
    return Verdicts(torch.arange(len(rows)), torch.tensor(rows), torch.tensor(correct).double(), losses, each)


def test_accuracy_is_weighted_by_rows_and_the_plain_mean_stands_beside_it() -> None:
    got = client_metrics("p/test", verdicts([10, 90], [9, 45], [5.0, 90.0]))
    assert got["p/test/accuracy"] == pytest.approx(0.54)
    assert got["p/test/accuracy_mean"] == pytest.approx(0.70)
    assert got["p/test/accuracy_worst10"] == 0.5
    assert got["p/test/loss"] == pytest.approx(0.95)
    assert got["p/test/loss_worst10"] == 1.0
    assert list(got) == [f"p/test/{name}{end}" for name in ("accuracy", "loss") for end in ENDS]


ENDS = ("", "_mean", "_std", "_worst10")


def test_a_client_without_an_area_is_left_out_with_its_weight() -> None:
    found = verdicts([10, 30, 60], [1, 2, 3], micro_logits=[0.5, 0.9, math.nan], macro_present=[math.nan] * 3)
    got = client_metrics("p", found)
    assert got["p/auc_micro_logits"] == pytest.approx(0.8)
    assert got["p/auc_micro_logits_mean"] == pytest.approx(0.7)
    assert got["p/auc_micro_logits_worst10"] == 0.5
    assert got["p/accuracy"] == pytest.approx(0.06)
    assert not any("macro" in name for name in got)  # nobody has one: there is nothing to say


def test_a_diverged_client_is_counted_and_leaves_the_loss_to_the_others() -> None:
    got = client_metrics("p", verdicts([10, 10, 10], [5, 0, 7], [2.0, math.nan, math.inf]))
    assert got["p/loss"] == pytest.approx(0.2)
    assert got["p/accuracy"] == pytest.approx(0.4)
    assert got["p/diverged"] == 2
    assert lower_is_better("p/diverged")
    assert "p/diverged" not in client_metrics("p", verdicts([10], [5], [2.0]))
    assert math.isnan(client_metrics("p", verdicts([10], [0], [math.nan]))["p/loss"])  # there are no others


def test_a_shared_model_that_has_diverged_on_anybody_s_rows_has() -> None:
    got = client_metrics("p", verdicts([10, 10], [5, 0], [2.0, math.nan]), shared=True)
    assert math.isnan(got["p/loss"])
    assert "p/diverged" not in got


def test_clients_without_rows_have_no_verdict() -> None:
    some = verdicts([0, 4, 0], [0, 1, 0], micro_logits=[math.nan, 0.25, math.nan])
    assert client_metrics("p", some)["p/accuracy_mean"] == client_metrics("p", some)["p/auc_micro_logits_mean"] == 0.25
    assert client_metrics("p", verdicts([0, 0], [0, 0])) == {}
    assert client_metrics("p", Verdicts.cat([])) == {}


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), min_size=1, max_size=30), st.integers(0, 30))
def test_any_grouping_and_order_of_clients_gives_the_same_summary(of: list[tuple[int, float]], cut: int) -> None:
    rows, share = ([c[i] for c in of] for i in (0, 1))
    whole = verdicts(rows, [n * s for n, s in of], share, micro_logits=share)
    halves = [_taken(whole, at) for at in (torch.arange(len(of))[cut:].flip(0), torch.arange(len(of))[:cut])]
    assert client_metrics("p", Verdicts.cat(halves)) == client_metrics("p", whole)


def _taken(found: Verdicts, at: Tensor) -> Verdicts:
    return Verdicts(*(column[at] for column in found[:4]), {name: area[at] for name, area in found.auc.items()})


# -- over rounds -----------------------------------------------------------------------------------
@given(st.lists(st.floats(0, 1), min_size=2, max_size=30))
def test_the_best_of_more_rounds_is_never_worse(series: list[float]) -> None:
    for name in ("personal/pre_fit/test/accuracy", "personal/pre_fit/test/auc_micro_logits"):
        best = [summarise(name, series[:n]).best for n in range(1, len(series) + 1)]
        assert best == sorted(best)
    best = [summarise("global/test/loss", series[:n]).best for n in range(1, len(series) + 1)]
    assert best == sorted(best, reverse=True)


def by_definition(name: str, points: list[tuple[int, float]]) -> int | None:
    if not points:
        return None
    sign = -1 if lower_is_better(name) else 1
    values = [v for _, v in points]
    moving = [float(np.mean(values[max(0, k - 9) : k + 1])) for k in range(len(values))]
    end = moving[-1]
    for k, (round_, _) in enumerate(points):
        near = sign * (moving[k] - end) >= -0.01 * abs(end)
        stays = all(sign * (m - end) >= -0.02 * abs(end) for m in moving[k:])
        if near and stays:
            return round_
    return None


@given(st.lists(st.floats(0.01, 1), max_size=40), st.sampled_from(["global/test/accuracy", "global/test/loss"]))
def test_rounds_to_convergence_are_their_definition(series: list[float], name: str) -> None:
    points = [(5 * k + 5, v) for k, v in enumerate(series)]
    assert rounds_to_convergence(name, points) == by_definition(name, points)


def test_rounds_to_convergence() -> None:
    flat, late = [0.5] * 30, [0.1] * 10 + [0.8] * 30
    assert rounds_to_convergence("a/accuracy", list(enumerate(flat, 1))) == 1
    assert rounds_to_convergence("a/accuracy", list(enumerate(late, 1))) == 20  # the mean of ten needs ten
    dip = [0.8] * 15 + [0.4] * 5 + [0.8] * 30
    assert rounds_to_convergence("a/accuracy", list(enumerate(dip, 1))) == 30  # once the dip has left the mean
    falling = [1.0] * 10 + [0.1] * 30
    assert rounds_to_convergence("a/loss", list(enumerate(falling, 1))) == 20
    assert rounds_to_convergence("a/accuracy", []) is None


def test_a_summary_begins_with_training_and_leaves_out_what_was_not_measured() -> None:
    before, after = {"round": 0, "global/test/loss": 1.0}, {"round": 1, "global/test/loss": 3.0, "why": "words"}
    lines = [before, after, {"round": 2}, {"round": 3, "global/test/loss": 2.0}]
    assert summary_of_records("global/test/loss", lines) == (2.0, 2.0, 2.5)
    assert summary_of_records("global/test/loss", lines[:1]) == (1.0, 1.0, 1.0)
    assert (
        summary_of_records("why", lines),
        summary_of_records("global/test/accuracy", lines),
        summary_of_records("x", []),
    ) == (None,) * 3
