"""A recipe on a page: ours beside the paper's, verdicts, reductions and missing cells, all from kept results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w

from fedloom.compare.collect import collect
from fedloom.compare.pages import RecipeReport, recipes_in, report_of
from fedloom.compare.plan import plan
from fedloom.compare.sources import look
from fedloom.runs.settings import read_toml

HEAD = "# Table 9: three methods,\n# in small.\n#\n# Cost: nothing.\n\n"
CLAIM = {"says": "FedOpt is best", "source": "Table 9", "algorithm": "fedopt", "test": "best"}


@pytest.fixture
def recipe(whole: Path, tmp_path: Path) -> Path:
    """The comparison of all tests as a recipe with claims, and its results collected beside it."""
    table = read_toml(whole / "compare.toml")
    table["compare"]["claims"] = [CLAIM, CLAIM | {"says": "at 0.1", "where": {"partition.alpha": 0.1}}]
    table["compare"]["reductions"] = ["three rounds, since a test must be short."]
    path = tmp_path / "experiments" / "paper" / "table9.toml"
    path.parent.mkdir(parents=True)
    path.write_text(HEAD + tomli_w.dumps(table))
    assert collect(plan(table), tmp_path / "results" / "paper" / "table9", [look(whole)]) is not None
    return path


def reported(recipe: Path) -> RecipeReport:
    return report_of(recipe, recipe.parents[2] / "results", "../r")


def cells_of(recipe: Path) -> Path:
    return recipe.parents[2] / "results" / "paper" / "table9" / "cells"


def row(text: str, method: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {method} |"))
    return [word.strip(" *") for word in line.strip("|").split("|")]


def test_ours_stands_beside_the_papers(recipe: Path) -> None:
    found = reported(recipe)
    assert (found.name, found.title) == ("paper/table9", "Table 9: three methods, in small.")
    assert (len(found.cells), len(found.there), found.seeds) == (12, 12, (2, 2))
    _, ours, paper, difference, *_ = row(found.text, "fedopt")
    kept = [json.loads(file.read_text()) for file in cells_of(recipe).iterdir()]
    mine = [
        k["summary"]["global/test/accuracy"]["mean_last_10"]
        for k in kept
        if (k["method"], k["place"]) == ("fedopt", ["0.1"])
    ]
    mean = 100 * sum(mine) / 2
    assert (ours.split(" ± ")[0], paper) == (f"{mean:.2f}", "72.15")
    assert float(difference) == pytest.approx(mean - 72.15, abs=0.01)
    assert "- Reduced: three rounds, since a test must be short." in found.text
    assert "![curves](../r/paper/table9/curves.png)" in found.text
    assert "- All 12 cells are finished." in found.text
    assert sum(found.verdicts.values()) == 2
    assert "not run" not in found.verdicts
    assert "| claim | in the paper |" in found.text


def test_missing_cells_and_changed_settings_are_reductions(recipe: Path) -> None:
    """Results without a seed and without a place; the recipe asks for more rounds than were run."""
    for file in cells_of(recipe).iterdir():
        kept = json.loads(file.read_text())
        if kept["seed"] == 1 or kept["place"] == ["0.1"]:
            file.unlink()
    recipe.write_text(recipe.read_text().replace("rounds = 3", "rounds = 50"))
    found = reported(recipe)
    assert (len(found.there), found.seeds) == (3, (1, 2))
    assert found.verdicts == {"not run": 2}
    assert "- Reduced: `rounds` is 3 (recipe: 50)." in found.text
    assert "- Reduced: 1 of 2 seeds." in found.text
    assert "3 of 12 cells are finished; missing: seed" in found.text
    assert "cells are finished." not in found.text
    assert "Without any result, and left out: 1 column." in found.text


def test_a_recipe_that_was_not_run_is_counted(recipe: Path, tmp_path: Path) -> None:
    found = report_of(recipe, tmp_path / "nothing", "")
    assert (len(found.cells), len(found.there), found.seeds, found.text) == (12, 0, (0, 2), "")
    assert found.verdicts == {"not run": 2}


def test_a_cell_of_another_recipe_counts(recipe: Path) -> None:
    """One that was run for Table 9 is not missing in a figure of the same runs, which has no table of its own yet."""
    figure = recipe.with_name("figure3.toml")
    figure.write_text(recipe.read_text().replace("rounds = 3", "rounds = 3  # the same"))
    assert len(reported(figure).there) == 12
    cells_of(recipe).joinpath(f"{min(reported(recipe).there)}.json").unlink()
    found = reported(figure)
    assert (len(found.there), found.text, found.verdicts) == (11, "", {"not run": 2})
    assert found.there == reported(recipe).there


def test_a_queue_names_recipes_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("# order\na/b.toml\n\nc.toml # last\n")
    assert recipes_in(tmp_path / "q.txt") == [tmp_path / "a/b.toml", tmp_path / "c.toml"]
