"""Each method is given the place of its grid that is best on validation rows; test rows have no part in the choice."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.compare.look import comparison
from fedloom.compare.plan import plan
from fedloom.compare.run import run
from fedloom.core.errors import ConfigError
from fedloom.report.comparison.question import Result
from fedloom.report.comparison.selected import chosen_sections, select, selection_notes
from fedloom.report.page.content import content_of
from fedloom.report.page.language import sentence_in
from support.comparisons import question, table
from support.terminal import Quick

LR = {"local.lr": [0.01, 0.1], "partition.alpha": [0.1, 1.0]}


def result(
    place: tuple[str, ...], method: str, seed: int, test: float, validation: float, state: str = "done"
) -> Result:
    line = {"round": 1, "global/test/accuracy": test, "global/validation/accuracy": validation}
    line |= {"global/validation/loss": -validation, "bytes/up": 0, "bytes/down": 0}
    return Result(place, method, method, seed, "", state, [line], "")


def asked(places: tuple[tuple[str, ...], ...], axes: tuple[str, ...] = ("local.lr",)) -> Any:
    return question(("a", "b"), 2, axes=axes, places=places)


def test_the_best_on_validation_is_chosen_even_where_another_is_better_on_test() -> None:
    spots = [("a", "0.1", 0.9, 0.5), ("a", "1", 0.6, 0.7), ("b", "0.1", 0.8, 0.8), ("b", "1", 0.95, 0.3)]
    results = [result((p,), m, seed, t + 0.01 * seed, v) for m, p, t, v in spots for seed in (0, 1)]
    for wanted in ("accuracy", "loss", "global/validation/accuracy", "*/validation/loss"):
        found = select(asked((("0.1",), ("1",))), results, wanted, ["local.lr"])
        assert {method: choice.place for (_, method), choice in found.choices.items()} == {"a": ("1",), "b": ("0.1",)}
        assert [(row.method, row.rank) for row in found.rows] == [("a", 2), ("b", 1)]
        assert [row.tail.mean for row in found.rows if row.tail] == pytest.approx([0.605, 0.805])
    (section,) = chosen_sections(found)
    assert section.header[:3] == ["algorithm", "chosen", "validation"]
    assert section.lines[0][:2] == ["a", "local.lr=1"]


def test_a_choice_at_the_edge_of_an_axis_has_a_note() -> None:
    """The method a is best at the largest rate, b between two; words have no edge."""
    values = {"a": {"1": 0.9, "0.1": 0.5, "0.3": 0.6}, "b": {"1": 0.1, "0.1": 0.5, "0.3": 0.6}}
    results = [result((p,), m, seed, 0.5, v) for m, at in values.items() for p, v in at.items() for seed in (0, 1)]
    places = (("1",), ("0.1",), ("0.3",))
    found = select(asked(places), results, "accuracy", ["local.lr"])
    (note,) = selection_notes(found)[1:]
    assert note == "chosen: the best local.lr of a is the largest that was tried (1)."
    assert sentence_in("zh", note) != note
    smallest = select(asked(places), results, "loss", ["local.lr"])._replace(tried={"local.lr": ("1", "2")})
    assert selection_notes(smallest)[1:] == ["chosen: the best local.lr of a is the smallest that was tried (1)."]
    words = [r._replace(place=({"1": "slow", "0.1": "fast", "0.3": "both"}[r.place[0]],)) for r in results]
    assert len(selection_notes(select(asked((("slow",), ("fast",), ("both",))), words, "accuracy", ["local.lr"]))) == 1


def test_a_place_that_lost_a_seed_is_not_chosen() -> None:
    results = [
        result((p,), m, seed, 0.5, 0.9 if p == "1" else 0.4) for p in ("0.1", "1") for m in "ab" for seed in (0, 1)
    ]
    lost = [r._replace(state="diverged") if (r.place, r.method, r.seed) == (("1",), "a", 1) else r for r in results]
    found = select(asked((("0.1",), ("1",))), lost, "accuracy", ["local.lr"])
    assert {method: choice.place for (_, method), choice in found.choices.items()} == {"a": ("0.1",), "b": ("1",)}


def test_a_comparison_says_what_was_chosen_and_by_what(tmp_path: Path) -> None:
    given = table(algorithms=["fedavg", "ditto"], grid=LR, select="accuracy") | {"evaluate": {"validation": 0.3}}
    done = run(given, tmp_path / "out", jobs=2)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    chosen = summary["selected"]
    assert chosen["over"] == ["local.lr"]  # for each partition.alpha, which poses the problem
    assert [(row["algorithm"], row["partition.alpha"]) for row in chosen["table"]] == [
        *(("fedavg", "0.1"), ("ditto", "0.1"), ("fedavg", "1.0"), ("ditto", "1.0")),
    ]
    for row in chosen["table"]:
        places = [
            other
            for other in summary["table"]
            if (other["algorithm"], other["partition.alpha"]) == (row["algorithm"], row["partition.alpha"])
        ]
        best = max(places, key=lambda other: other["validation"])
        assert [other["chosen"] for other in places] == [other is best for other in places]
        assert row["chosen"] == {"local.lr": best["local.lr"]}
        assert row["mean_last_10"] == best["mean_last_10"]
        assert row["chosen_by"] == row["metric"].replace("/test/", "/validation/")
        # by hand, from the run folders
        cells = [c for c in csv.DictReader((tmp_path / "out" / "cells.csv").open()) if _same(c, best)]
        lines = [(tmp_path / "out" / c["folder"] / "metrics.jsonl").read_text().splitlines()[1:] for c in cells]
        values = [sum(json.loads(line)[row["chosen_by"]] for line in each) / len(each) for each in lines]
        assert row["validation"] == pytest.approx(sum(values) / len(values))
    text = (tmp_path / "out" / "table.md").read_text()
    assert text.startswith("## Chosen by validation")
    assert "Evaluations of a run: only 3" in text
    page = content_of(comparison(tmp_path / "out", "out"), "en")
    assert [each.caption for each in page.results[:2]] == [
        f"chosen by validation, partition.alpha = {alpha}" for alpha in ("0.1", "1.0")
    ]
    again = plan({**given, "compare": {**given["compare"], "select": {"metric": "loss", "over": ["local.lr"]}}})
    assert {cell.hash for cell in again.cells} == {Path(r.hash).name for r in done.results}  # the same cells


def test_less_of_an_error_of_the_user_s_own_is_better(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def loss_top(outputs, y):\n    return 1 - (outputs.argmax(1) == y).double().mean()\n"
    )
    evaluate = {"validation": 0.3, "metrics": [f"{tmp_path}/own.py:loss_top"]}
    given = table(algorithms=["fedavg"], seeds=1, grid={"local.lr": [0.0001, 0.1]}, select="loss_top")
    run(given | {"evaluate": evaluate}, tmp_path / "out", jobs=1)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    (chosen,), places = summary["selected"]["table"], summary["table"]
    assert chosen["chosen"] == {"local.lr": "0.1"}
    assert chosen["validation"] == min(place["validation"] for place in places) < 0.5


def _same(cell: dict[str, str], row: dict[str, Any]) -> bool:
    return all(cell[key] == row[key] for key in ("algorithm", "local.lr", "partition.alpha"))


@pytest.mark.parametrize(
    ("select", "grid", "validation", "fault"),
    [
        ("accuracy", LR, 0.0, r"compare.select: choosing needs validation rows, but evaluate.validation is 0 \(set"),
        ("global/test/accuracy", LR, 0.2, "is not measured on validation rows .use global/validation/accuracy"),
        ("acuracy", LR, 0.2, "compare.select: no method records 'acuracy'"),
        ("accuracy", {"partition.alpha": [0.1, 1.0]}, 0.2, "compare.select: there is nothing to choose from"),
        ({"metric": "loss", "over": ["local.ll"]}, LR, 0.2, "'local.ll' is not an axis of the grid .did you mean"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_anything_runs(
    select: Any, grid: dict[str, Any], validation: float, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        plan(table(grid=grid, select=select) | {"evaluate": {"validation": validation}})


def test_several_values_of_a_setting_are_a_grid(tmp_path: Path) -> None:
    done = Quick()("compare", "fedavg", "local.lr=0.1,0.2", cwd=tmp_path)
    assert done.code == 2
    assert "(got '0.1,0.2') (to try each of them: --grid local.lr=0.1,0.2)" in done.err


def test_the_next_option_is_not_taken_for_a_metric(tmp_path: Path) -> None:
    done = Quick()("compare", "fedavg", "--select", "--out", "chosen", cwd=tmp_path)
    assert done.code == 2
    assert "--select: should be a metric (got '--out') (as in --select accuracy)" in done.err
