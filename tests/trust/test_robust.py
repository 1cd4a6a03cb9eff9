"""Robust rules: worked by hand, degenerate, unmoved by liars and by the order of clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedloom.algorithm import Inbox, Update
from fedloom.core.errors import ConfigError
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.store import RamStore
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from fedloom.trust.robust import Aggregation, krum_scores, replaced, robust, trimmed
from support.blobs import blobs

RULES = ("median", "trimmed_mean", "krum", "multi_krum")


class Two(NamedTuple):
    a: Tensor
    b: Tensor


def rule(name: str, x: Tensor, **more: Any) -> list[float]:
    return robust(Aggregation(rule=name, **more), Update(x)).mean.dw.tolist()  # type: ignore[arg-type]


# -- by hand ---------------------------------------------------------------------------------------
def test_median() -> None:
    assert rule("median", torch.tensor([[1.0, 9], [5, 2], [2, 3]])) == [2, 3]
    assert rule("median", torch.tensor([[1.0], [5], [2], [100]])) == [3.5]


def test_trimmed_mean() -> None:
    x = torch.tensor([[1.0], [2], [3], [5], [-1000]])
    assert rule("trimmed_mean", x, bad=0.2) == [2.0]  # without -1000 and 5
    assert rule("trimmed_mean", x, bad=0.4) == [2.0]  # only the middle one is left
    assert rule("trimmed_mean", x, bad=0.19) == [pytest.approx(-197.8)]


def test_krum() -> None:
    """n = 5, f = 1: the sum of the squared distances to the two nearest others."""
    x = torch.tensor([[0.0], [1], [3], [7], [100]])
    assert krum_scores(Update(x), 1).tolist() == pytest.approx([1 + 9, 1 + 4, 4 + 9, 16 + 36, 93**2 + 97**2])
    assert rule("krum", x, bad=0.2) == [1]
    assert rule("multi_krum", x, bad=0.2, chosen=2) == [0.5]
    assert rule("multi_krum", x, bad=0.2) == [2.75]  # all but one
    assert robust(Aggregation(rule="multi_krum", bad=0.2, chosen=2), Update(x)).counted.tolist() == [1, 1, 0, 0, 0]  # type: ignore[union-attr]


def test_all_parts_of_an_upload_count_in_krum() -> None:
    a = torch.tensor([[0.0], [0.1], [0.2], [0.3]])
    b = torch.tensor([[50.0, 0], [0, 0], [0, 0.1], [0, 0.2]])
    found = robust(Aggregation(rule="krum", bad=0.0), Two(a, b))
    assert found.mean.b.tolist() == b[2].tolist()
    assert found.mean.a.tolist() == [pytest.approx(0.2)]


def test_distances_keep_their_digits_far_from_zero() -> None:
    x = torch.tensor([[0.0], [1], [3], [7], [100]], dtype=torch.float64)
    torch.testing.assert_close(krum_scores(Update(x + 1e8), 1), krum_scores(Update(x), 1))


def test_a_huge_upload_does_not_make_all_others_equally_near() -> None:
    """Otherwise a second bad client would be chosen, as the first of equals."""
    x = torch.tensor([[50.0], [1], [1.5], [2.5], [4], [1e30]])
    assert rule("krum", x, bad=0.34) == [1.5]
    honest = krum_scores(Update(x), 2)[:5].tolist()
    assert honest == pytest.approx([46**2 + 47.5**2, 0.25 + 2.25, 0.25 + 1, 1 + 2.25, 2.25 + 6.25])


# -- degenerate ------------------------------------------------------------------------------------
values = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=2), min_size=1, max_size=9)


@pytest.mark.slow
@given(values)
@settings(max_examples=50, deadline=None)
def test_with_nothing_to_distrust_a_rule_is_the_mean(rows: list[list[float]]) -> None:
    x = torch.tensor(rows)
    mean = x.double().mean(0).tolist()
    assert rule("trimmed_mean", x, bad=0.0) == pytest.approx(mean, abs=1e-9)
    assert rule("multi_krum", x, bad=0.0) == pytest.approx(mean, abs=1e-9)
    assert rule("mean", x) == pytest.approx(mean, abs=1e-9)
    if len(x) <= 2:
        assert rule("median", x) == pytest.approx(mean, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@given(rows=values.filter(lambda rows: len(rows) > 3), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_the_order_of_clients_does_not_matter(name: str, rows: list[list[float]], seed: int) -> None:
    # Krum's choice among ties is by order: distinct points, each with two neighbours, have none.
    x = torch.tensor(rows) + torch.randn(len(rows), 2, generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    more: dict[str, Any] = {"bad": 0.0, "chosen": 2} if "krum" in name else {}
    assert rule(name, x[order], **more) == pytest.approx(rule(name, x, **more), rel=1e-6, abs=1e-6)


@pytest.mark.slow
@given(values)
@settings(max_examples=50, deadline=None)
def test_every_coordinate_stays_within_what_honest_clients_say(rows: list[list[float]]) -> None:
    """With fewer than half of the clients bad, whatever these send."""
    honest = torch.tensor(rows)
    liars = (len(rows) - 1) // 2
    x = torch.cat([honest, torch.full((liars, 2), 1e30)])
    share = min(0.499, (liars + 1e-6) / len(x))
    for name, more in (("median", {}), ("trimmed_mean", {"bad": share})):
        found = torch.tensor(rule(name, x, **more))
        assert bool((found <= honest.max(0).values + 1e-3).all()), name
        assert bool((found >= honest.min(0).values - 1e-3).all()), name


def test_the_cut_is_made_in_pieces_of_a_wide_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 3, 11, generator=torch.Generator().manual_seed(0))
    whole = trimmed(x, 2)
    monkeypatch.setattr("fedloom.trust.robust._SORTED", 20)
    assert torch.equal(trimmed(x, 2), whole)
    assert whole.shape == (3, 11)
    torch.testing.assert_close(whole, x.double().sort(0).values[2:5].mean(0))


# -- in a round ------------------------------------------------------------------------------------
def test_algorithms_read_the_robust_mean_as_their_own() -> None:
    one = torch.tensor(1.0, dtype=torch.float64)
    x = Update(torch.tensor([[1.0], [2], [9]]))
    box = Inbox(Update(torch.tensor([77.0])), 30 * one, 3 * one, 9 * one, 99 * one, x, torch.tensor([5.0, 5, 20]))
    found = replaced(Aggregation(rule="median"), box)
    assert found.mean.dw.tolist() == [2]
    assert found.total.dw.tolist() == [60]
    assert found.weights == ()
    assert replaced(Aggregation(rule="krum", bad=0.0), box).weights.tolist() == [1, 0, 0]


SIZES = (20,) * 9
ALL = {"cohort": {"sampling": "all"}}


def after(exp: Any, rounds: int = 1) -> Tensor:
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return state.server.w


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "fedopt", "qfedavg", "moon", "ditto"])
def test_every_linear_algorithm_takes_every_rule(world: Any, algorithm: str) -> None:
    for name in RULES:
        w = after(world(SIZES, model={"kind": "mlp", "widths": [6]}, algorithm=algorithm, aggregation={"rule": name}))
        assert bool(w.isfinite().all())


@pytest.mark.parametrize("algorithm", ["scaffold", "feddyn"])
@pytest.mark.parametrize("rule", RULES)
def test_states_that_the_server_keeps_count_of_exclude_rules(algorithm: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"aggregation.rule: '{rule}' discards what clients of"):
        parse({"algorithm": algorithm, "aggregation": {"rule": rule}})


def test_without_distrust_a_run_is_that_of_the_plain_mean(world: Any) -> None:
    uniform = {"algorithm": {"kind": "fedavg", "weighting": "uniform"}}
    plain = after(world(SIZES, **uniform), 3)
    for how in ({"rule": "trimmed_mean", "bad": 0.0}, {"rule": "multi_krum", "bad": 0.0}):
        torch.testing.assert_close(after(world(SIZES, aggregation=how, **uniform), 3), plain, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", RULES)
def test_rules_withstand_flipped_signs_and_the_mean_does_not(world: Any, name: str) -> None:
    bad = {"corruption": {"kind": "model_sign_flip", "kappa": 20.0, "clients": [0, 4, 7]}}
    honest = after(world(SIZES), 5)
    start = world(SIZES).task.w0

    def along(w: Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(w - start, honest - start, dim=0))

    assert along(after(world(SIZES, **bad), 5)) < 0
    trust = {"rule": name} if name == "median" else {"rule": name, "bad": 0.34}
    robustly = world(SIZES, aggregation=trust, **bad)
    assert along(after(robustly, 5)) > 0.8
    if "krum" in name:
        found = advance_watched(robustly, begin(robustly), RamStore(9)).found
        assert found["bad_clients/weight_total"] == 0


@pytest.mark.slow
def test_a_rule_does_not_depend_on_how_clients_are_grouped(world: Any) -> None:
    for name in RULES:
        one, many = (world(SIZES, aggregation={"rule": name}, engine={"lanes": lanes}) for lanes in (64, 2))
        torch.testing.assert_close(after(one), after(many), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"algorithm": "fedmgda"}, r"aggregation\.rule: 'krum' replaces a sum of uploads, but FedMGDA reads every one"),
        ({"algorithm": "dpsgd"}, r"aggregation\.rule: 'krum' is a server's rule"),
        ({"algorithm": "local_only"}, r"aggregation\.rule: 'krum' needs uploads"),
        ({"algorithm": "analytic"}, r"aggregation\.rule: 'krum' would change the statistics"),
        (
            {"algorithm": {"kind": "fedavg", "weighting": "uniform"}, "cohort": {"sampling": "proportional"}},
            r"cohort\.sampling: 'proportional' may draw a client twice",
        ),
        ({"cohort": {"size": 3}}, r"aggregation\.rule: 'krum' needs n - f - 2 > 0 neighbours, .* n = 3 .* f = 1"),
        ({"aggregation": {"rule": "multi_krum", "chosen": 6}, "cohort": {"size": 5}}, r"aggregation\.chosen: 6 of 5"),
        (
            {"aggregation": {"rule": "trimmed_mean"}, "cohort": {"size": 3}},
            r"aggregation\.bad: 0.25 of the 3 clients of a round is none: 'trimmed_mean' would be the plain mean",
        ),
        ({"aggregation": {"rule": "multi_krum", "bad": 0.2}, "cohort": {"size": 4}}, r"aggregation\.bad: 0.2 of the 4"),
        ({"aggregation": {"rule": "krum", "bad": 0.5}}, r"aggregation\.bad: .*less than 0.5"),
        ({"aggregation": {"rule": "krumm"}}, r"aggregation\.rule"),
    ],
)
def test_refusals(table: dict[str, Any], message: str) -> None:
    full = {"partition": {"kind": "natural", "holdout": 0.2}, "aggregation": {"rule": "krum", "bad": 0.34}} | table
    with pytest.raises(ConfigError, match=message):
        prepare(parse(full), Path(), blobs(SIZES))
