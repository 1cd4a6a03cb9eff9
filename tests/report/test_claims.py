"""Claims of a paper, decided from results made by hand: each kind of test and each verdict."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest
from scipy import stats

from fedloom.report.comparison.claims import Claim, as_dicts, decide, latex, markdown, sentences, table_csv
from fedloom.report.comparison.question import Question, Result
from support.comparisons import question, result

PLACES = (("0.1",), ("0.2",), ("0.4",))


def runs(**values: list[float]) -> list[Result]:
    """One result for each method and seed, with this accuracy in every round."""
    return [result(method, seed, [0.1, v, v]) for method, each in values.items() for seed, v in enumerate(each)]


def claim(test: str, method: str = "a", *others: str, **more: Any) -> Claim:
    fields: dict[str, Any] = {"says": "so", "source": "Table 1", "places": ((),), "paths": (), "rises": True}
    fields |= {"by": 0.0, "reported": {}, "metric": "", "statistic": "mean_last_10"}
    return Claim(**(fields | {"test": test, "method": method, "others": others} | more))


def verdict(claimed: Claim, results: list[Result], **more: Any) -> str:
    methods = tuple(dict.fromkeys(r.method for r in results))
    (decided,) = decide(question(methods, 3, **more), results, [claimed])
    return decided.verdict


CLEAR = runs(a=[0.70, 0.71, 0.72], b=[0.60, 0.612, 0.619], c=[0.50, 0.51, 0.52])


@pytest.mark.parametrize(
    ("claimed", "results", "says"),
    [
        (claim("above", "a", "b", by=0.05), CLEAR, "holds"),
        (claim("above", "a", "b", "c"), CLEAR, "holds"),
        (claim("above", "b", "a"), CLEAR, "does not hold"),
        (claim("above", "a", "b", by=0.2), CLEAR, "does not hold"),
        (claim("above", "a", "b", by=0.1), CLEAR, "undecided"),
        (claim("above", "a", "b"), runs(a=[0.9, 0.4, 0.7], b=[0.5, 0.8, 0.6]), "undecided"),
        (claim("above", "a", "b"), runs(a=[0.9], b=[0.1]), "undecided"),
        (claim("best", "a"), CLEAR, "holds"),
        (claim("best", "b"), CLEAR, "does not hold"),
        (claim("best", "a"), runs(a=[0.7, 0.71], b=[0.69, 0.73], c=[0.1, 0.1]), "undecided"),
        (claim("order", "a", "b", "c"), CLEAR, "holds"),
        (claim("order", "a", "c", "b"), CLEAR, "does not hold"),
        (claim("order", "a", "b", "c"), runs(a=[0.9], b=[0.5], c=[0.1]), "undecided"),
        (claim("within", by=0.03, reported={(): 0.71}), CLEAR, "holds"),
        (claim("within", by=0.03, reported={(): 0.91}), CLEAR, "does not hold"),
        (claim("within", by=0.03, reported={(): 0.74}), CLEAR, "undecided"),
        (claim("above", "b", "a", metric="bytes/up"), CLEAR, "does not hold"),  # as many bytes: none is better
    ],
)
def test_verdicts(claimed: Claim, results: list[Result], says: str) -> None:
    assert verdict(claimed, results) == says


@pytest.mark.parametrize(
    ("levels", "rises", "says"),
    [
        ((0.5, 0.6, 0.7), True, "holds"),
        ((0.5, 0.6, 0.7), False, "does not hold"),
        ((0.7, 0.6, 0.5), False, "holds"),
        ((0.5, 0.6, 0.6), True, "undecided"),
    ],
)
def test_a_trend_along_the_grid(levels: tuple[float, ...], rises: bool, says: str) -> None:
    noise = {0: 0.0, 1: 0.01, 2: -0.01}
    own = [
        result("a", seed, [v + noise[seed] * (place == ("0.4",))])._replace(place=place)
        for place, v in zip(PLACES, levels, strict=True)
        for seed in noise
    ]
    asked = {"axes": ("local.lr",), "places": PLACES}
    assert verdict(claim("trend", places=PLACES, paths=(PLACES,), rises=rises), own, **asked) == says


def placed(levels: dict[str, dict[tuple[str, ...], float]]) -> list[Result]:
    """Results of three seeds, a hundredth apart, of each method at each place."""
    return [
        result(method, seed, [0.0, v + seed / 100])._replace(place=place)
        for method, each in levels.items()
        for place, v in each.items()
        for seed in range(3)
    ]


SGD, ADAM, ASGD = ("sgd",), ("adam",), ("asgd",)


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (((SGD, ADAM), (ASGD, ADAM)), "holds"),
        (((ADAM, SGD),), "does not hold"),
        (((SGD, ADAM), (SGD, ASGD)), "does not hold"),  # equal in every seed: none is better
    ],
)
def test_values_of_one_axis_are_compared(pairs: Any, says: str) -> None:
    own = placed({"a": {SGD: 0.8, ASGD: 0.8, ADAM: 0.6}})
    asked = {"axes": ("local.optimizer",), "places": (SGD, ADAM, ASGD)}
    assert verdict(claim("above", places=(SGD, ADAM, ASGD), pairs=pairs), own, **asked) == says
    short = [r for r in own if r.seed == 0]
    assert verdict(claim("above", places=(SGD, ADAM, ASGD), pairs=pairs[:1]), short, **asked) == "undecided"


@pytest.mark.parametrize(("by", "says"), [(0.0, "holds"), (0.15, "holds"), (0.25, "does not hold")])
def test_a_method_is_steadier_if_its_values_are_less_far_apart(by: float, says: str) -> None:
    """a varies by 0.1 over three places, b by 0.3."""
    levels = {
        "a": dict(zip(PLACES, (0.5, 0.6, 0.55), strict=True)),
        "b": dict(zip(PLACES, (0.2, 0.5, 0.4), strict=True)),
    }
    own, asked = placed(levels), {"axes": ("local.lr",), "places": PLACES}
    assert verdict(claim("steadier", "a", "b", places=PLACES, paths=(PLACES,), by=by), own, **asked) == says
    assert verdict(claim("steadier", "b", "a", places=PLACES, paths=(PLACES,)), own, **asked) == "does not hold"
    lost = [r for r in own if r.place != PLACES[2] or r.seed == 0]
    assert verdict(claim("steadier", "a", "b", places=PLACES, paths=(PLACES,)), lost, **asked) == "undecided"


def curves(**values: list[list[float]]) -> list[Result]:
    """One result for each method and seed, with these accuracies from round 0 on."""
    return [result(method, seed, v) for method, each in values.items() for seed, v in enumerate(each)]


FAST = curves(a=[[0, 0.7, 0.8, 0.8]] * 2, b=[[0, 0.2, 0.4, 0.81], [0, 0.2, 0.4, 0.82]])
SWINGS = curves(a=[[0, 0.5, 0.6, 0.6], [0, 0.5, 0.6, 0.7]], b=[[0, 0.5, 0.8, 0.4], [0, 0.5, 0.81, 0.4]])
DRIFTS = curves(a=[[0, 0.9, 0.85, 0.8, 0.75]] * 2, b=[[0, 0.8, 0.9, 0.8, 0.9]] * 2)
NEVER = curves(a=[[0, 0.7, 0.8, 0.8]] * 2, b=[[0, 0.2, 0.4, 0.5]] * 2)
EARLY = curves(a=[[0, 0.8, 0.8, 0.8]] * 2, b=[[0, 0.1, 0.2, 0.9]] * 2)


@pytest.mark.parametrize(
    ("claimed", "results", "says"),
    [
        (claim("above", "a", "b", statistic="mean_all"), FAST, "holds"),
        (claim("above", "b", "a", statistic="mean_all"), FAST, "does not hold"),
        (claim("above", "a", "b", statistic="mean_all"), FAST[::2], "undecided"),
        (claim("above", "a", "b", statistic="rounds_to", target=0.75), FAST, "holds"),
        (claim("above", "b", "a", statistic="rounds_to", target=0.75), FAST, "does not hold"),
        (claim("above", "a", "b", statistic="rounds_to", target=0.55, by=1.5), FAST, "holds"),
        (claim("above", "a", "b", statistic="bytes_to", target=0.55), FAST, "holds"),
        (claim("above", "a", "b", statistic="rounds_to", target=0.75, by=1), NEVER, "holds"),
        (claim("above", "b", "a", statistic="rounds_to", target=0.75), NEVER, "does not hold"),
        (claim("above", "a", "b", statistic="rounds_to", target=0.95), NEVER, "undecided"),  # neither ever did
        (claim("above", "a", "b", statistic="setbacks", by=0.3), SWINGS, "holds"),
        (claim("above", "b", "a", statistic="setbacks"), SWINGS, "does not hold"),
        (claim("above", "a", "b", statistic="swing_last_20"), [r for r in SWINGS if r.seed == 0], "undecided"),
        (claim("above", "a", "b", statistic="swing_last_20"), SWINGS, "holds"),
        (claim("above", "a", "b", statistic="swing_last_20", by=0.05), DRIFTS, "holds"),
        (claim("above", "a", "b", statistic="convergence", by=2), EARLY, "holds"),
        (claim("above", "a", "b", statistic="convergence"), FAST, "does not hold"),  # both in the last round
        (claim("above", "a", "b", statistic="convergence"), EARLY[::2], "undecided"),
    ],
)
def test_speed_and_steadiness(claimed: Claim, results: list[Result], says: str) -> None:
    assert verdict(claimed, results) == says


@pytest.mark.parametrize(
    ("claimed", "says"),
    [
        (claim("above", "a", "b", "c"), "not run"),
        (claim("above", "b", "a", "c"), "does not hold"),  # whatever c would do
        (claim("best", "a"), "not run"),
        (claim("order", "a", "b", "c"), "not run"),
        (claim("within", "c", by=0.03, reported={(): 0.71}), "not run"),
        (claim("above", "a", "b"), "holds"),
    ],
)
def test_a_claim_is_not_run_if_it_depends_on_a_method_without_runs(claimed: Claim, says: str) -> None:
    asked = question(("a", "b", "c"), 3)
    (decided,) = decide(asked, [r for r in CLEAR if r.method != "c"], [claimed])
    assert decided.verdict == says
    assert (": not run" in sentences(asked, [decided])[0]) == (says != "holds")


def test_runs_of_different_seeds_are_not_compared() -> None:
    apart = [r for r in CLEAR if (r.method, r.seed) in {("a", 0), ("b", 1), ("b", 2)}]
    assert verdict(claim("above", "a", "b"), apart) == "not run"


def test_what_an_unfinished_search_spent_decides_only_against_a_cheaper_run() -> None:
    """a stops after two rounds without the target, b needs four: how many a would need is not known."""
    early = [result("a", seed, [0.1, 0.2, 0.2]) for seed in (0, 1)]
    late = [result("b", seed, [0.1, 0.2, 0.2, 0.5, 0.8 + seed / 100]) for seed in (0, 1)]
    cheaper = {"statistic": "rounds_to", "target": 0.75}
    assert verdict(claim("above", "a", "b", **cheaper), early + late) == "undecided"
    assert verdict(claim("above", "b", "a", **cheaper), early + late) == "undecided"
    longer = [result("a", seed, [0.1] + 5 * [0.2]) for seed in (0, 1)]
    assert verdict(claim("above", "b", "a", **cheaper), longer + late) == "holds"
    assert verdict(claim("above", "a", "b", **cheaper), longer + late) == "does not hold"


def test_of_a_loss_less_is_better() -> None:
    name = "global/test/loss"
    results = [
        Result((), m, m, seed, "", "done", [{"round": 1, name: v + seed / 100}], "")
        for m, v in (("a", 0.5), ("b", 1.0))
        for seed in (0, 1)
    ]
    metrics = {"metrics": dict.fromkeys("ab", name)}
    assert verdict(claim("above", "a", "b", by=0.4), results, **metrics) == "holds"
    assert verdict(claim("above", "b", "a"), results, **metrics) == "does not hold"


def test_lost_seeds_do_not_decide() -> None:
    results = [*runs(a=[0.9, 0.9]), result("b", 0, [0.1]), result("b", 1, [0.1], "diverged")]
    assert verdict(claim("above", "a", "b"), results) == "undecided"


@pytest.mark.parametrize("state", ["diverged", "failed"])
def test_a_lost_seed_does_not_favour_the_method_that_lost_it(state: str) -> None:
    """a is clearly better with two seeds; the third one is lost by b, or by a."""
    both, ahead, behind = runs(a=[0.7, 0.71], b=[0.6, 0.61]), claim("above", "a", "b"), claim("above", "b", "a")
    of_b = [*both, result("a", 2, [0.1, 0.72]), result("b", 2, [0.1, 0.7], state)]
    of_a = [*both, result("a", 2, [0.1, 0.7], state), result("b", 2, [0.1, 0.6])]
    assert [verdict(ahead, of_b), verdict(behind, of_b)] == ["holds", "does not hold"]
    assert [verdict(ahead, of_a), verdict(behind, of_a)] == ["undecided", "undecided"]
    assert verdict(claim("within", by=0.1, reported={(): 0.7}), of_a) == "undecided"
    (decided,) = decide(question(("a", "b"), 3), of_a, [ahead])
    assert sentences(question(("a", "b"), 3), [decided])[0].endswith("a - b: +10 [+10, +10] over 2 seeds, 1 lost")


def test_a_method_that_never_finished_was_run() -> None:
    wild = [*runs(a=[0.7, 0.71]), *(result("b", seed, [0.1], "diverged") for seed in (0, 1))]
    (decided,) = decide(question(("a", "b"), 2), wild, [claim("best", "a")])
    assert decided.verdict == "undecided"
    assert "a - b: no seed has this number" in sentences(question(("a", "b"), 2), [decided])[0]


def test_the_numbers_that_decide_are_those_of_the_paired_test() -> None:
    asked: Question = question(("a", "b", "c"), 3)
    (decided,) = decide(asked, CLEAR, [claim("above", "a", "b")])
    (gap,) = decided.differences
    interval = stats.ttest_rel([0.70, 0.71, 0.72], [0.60, 0.612, 0.619]).confidence_interval()
    assert (gap.low, gap.high) == pytest.approx((interval.low, interval.high))
    assert gap.seeds == 3


def test_every_form_has_the_verdict_and_the_numbers() -> None:
    asked = question(("a", "b", "c"), 3)
    decided = decide(asked, CLEAR, [claim("above", "a", "b", says="a & b"), claim("best", "b")])
    first, second = sentences(asked, decided)
    assert first.startswith("holds: a & b (Table 1). a - b: +9.967 [")
    assert "over 3 seeds" in first
    assert second.startswith("does not hold: so (Table 1). b - a: -9.967 [")
    assert "| holds | a & b | Table 1 | a - b: +9.967 [" in markdown(asked, decided)
    assert "holds & a \\& b & Table 1 &" in latex(asked, decided)
    lines = list(csv.DictReader(io.StringIO(table_csv(asked, decided))))
    assert [(x["verdict"], x["difference_what"]) for x in lines] == [
        ("holds", "a - b"),
        ("does not hold", "b - a"),
        ("does not hold", "b - c"),
    ]
    assert [x["verdict"] for x in as_dicts(asked, decided)] == ["holds", "does not hold"]
