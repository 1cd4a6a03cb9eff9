"""Results that stay: finished cells as small files, gathered from several places, and tables drawn from them alone."""

from __future__ import annotations

import csv
import json
import math
import shutil
import tarfile
from pathlib import Path

import pytest

from fedloom.compare.collect import Collected, collect
from fedloom.compare.equal_terms import Terms, kept_terms, on_terms, terms_text
from fedloom.compare.kept import document_text, kept_result, read_document
from fedloom.compare.look import look_at
from fedloom.compare.plan import plan
from fedloom.compare.run import run
from fedloom.compare.sources import look
from fedloom.core.errors import ConfigError
from fedloom.report.comparison.question import PrivacyCost
from fedloom.report.page.content import content_of
from fedloom.report.view import ComparisonView
from fedloom.runs.environment import code_hash
from fedloom.runs.settings import read_toml
from support.comparisons import SMALL, table
from support.terminal import fedloom


def gathered(whole: Path, out: Path, *sources: Path, replace: bool = False) -> Collected:
    done = collect(plan(read_toml(whole / "compare.toml")), out, [look(path) for path in sources], replace=replace)
    assert done is not None
    return done


@pytest.fixture(scope="module")
def all_kept(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cells as kept results: to draw their curves again for every test would take most of the time."""
    folder = tmp_path_factory.mktemp("kept") / "r"
    gathered(whole, folder, whole)
    return folder


@pytest.fixture
def kept(all_kept: Path, tmp_path: Path) -> Path:
    """A copy of them, in ``r``."""
    return Path(shutil.copytree(all_kept, tmp_path / "r"))


def same_table(one: Path, other: Path) -> bool:
    """Whether two tables have the same numbers, but for the digits that are not kept."""
    a, b = (list(csv.reader((folder / "table.csv").open())) for folder in (one, other))
    return len(a) == len(b) and all(_alike(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


def _alike(a: str, b: str) -> bool:
    try:
        return float(a) == pytest.approx(float(b), rel=1e-5, abs=1e-6)
    except ValueError:
        return a == b


def test_tables_of_kept_results_are_those_of_the_comparison(whole: Path, tmp_path: Path) -> None:
    done = gathered(whole, tmp_path / "r", whole)
    assert (done.cells, done.new, done.missing) == (12, 12, ())
    assert same_table(tmp_path / "r", whole)
    assert (tmp_path / "r" / "missing.txt").read_text() == ""
    table = (tmp_path / "r" / "table.csv").read_bytes()
    again = gathered(whole, tmp_path / "r")
    assert (again.cells, again.new) == (12, 0)
    assert (tmp_path / "r" / "table.csv").read_bytes() == table


def test_a_result_is_small_and_says_how_it_was_made(all_kept: Path) -> None:
    files = sorted((all_kept / "cells").glob("*.json"))
    assert len(files) == 12
    for file in files:
        kept = json.loads(file.read_text())
        assert file.stat().st_size < 20_000
        assert kept["hash"] == file.stem
        assert kept["state"] == "done"
        assert kept["origin"]["precision"] == "fp32"
        assert kept["origin"]["code"] == code_hash()
        assert set(kept["origin"]["versions"]) == {"python", "fedloom", "torch", "numpy"}
        assert kept["settings"]["seed"] == kept["seed"]
        assert kept["metrics"]["round"] == [0, 1, 2, 3]
        accuracy = kept["metrics"]["global/test/accuracy"]
        assert kept["summary"]["global/test/accuracy"]["last"] == accuracy[-1]
        assert kept["summary"]["global/test/accuracy"]["best"] == max(accuracy[1:])
        assert kept["seconds"] > 0


def test_cells_of_two_machines_meet(whole: Path, tmp_path: Path) -> None:
    """Half of the cells ran here, and half there; both are in the table, and what is missing between is named."""
    homes = sorted((whole / "cells").iterdir())
    for name, some in (("here", homes[:5]), ("there/deep/inside", homes[5:])):
        for home in some:
            shutil.copytree(home, tmp_path / name / "cells" / home.name)
    first = gathered(whole, tmp_path / "r", tmp_path / "here")
    assert (first.new, len(first.missing)) == (5, 7)
    names = (tmp_path / "r" / "missing.txt").read_text().splitlines()
    assert names == [cell.name for cell in first.missing]
    text = (tmp_path / "r" / "table.md").read_text()
    assert "5 of 12 cells are finished; missing: seed" in text
    assert all(cell.method.label in text.partition("missing:")[2] for cell in first.missing)
    second = gathered(whole, tmp_path / "r", tmp_path / "there")
    assert (second.new, second.missing) == (7, ())
    assert same_table(tmp_path / "r", whole)


def test_one_seed_of_all_methods_is_a_table_of_its_own(whole: Path, kept: Path, tmp_path: Path) -> None:
    """Methods are ranked by the seeds that were run, and the missing ones are named in a few words."""
    for file in (kept / "cells").iterdir():
        if json.loads(file.read_text())["seed"] == 1:
            file.unlink()
    done = gathered(whole, tmp_path / "one", kept)
    assert done.comparison.question.seeds == (0,)
    assert sorted(row.rank or 0 for row in done.comparison.rows) == [1, 1, 2, 2, 3, 3]
    assert "6 of 12 cells are finished; missing: seed 1 of every method" in (tmp_path / "one" / "table.md").read_text()


def test_results_of_elsewhere_come_as_a_folder_or_an_archive(whole: Path, all_kept: Path, tmp_path: Path) -> None:
    shutil.copytree(all_kept, tmp_path / "results" / "p" / "a")
    with tarfile.open(tmp_path / "results.tgz", "w:gz") as tar:
        tar.add(tmp_path / "results", "results")
    for source in ("results", "results.tgz"):
        done = gathered(whole, tmp_path / f"from-{source}", tmp_path / source)
        assert (done.new, done.missing) == (12, ())
        assert same_table(tmp_path / f"from-{source}", whole)
    (tmp_path / "no.tgz").write_text("nothing")
    with pytest.raises(ConfigError, match=r"no\.tgz is not a folder or tar archive"):
        look(tmp_path / "no.tgz")


def test_other_code_is_named_and_another_result_does_not_replace_one(
    whole: Path, all_kept: Path, tmp_path: Path
) -> None:
    shutil.copytree(all_kept, tmp_path / "a")
    table = (tmp_path / "a" / "table.csv").read_bytes()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = min((tmp_path / "b" / "cells").glob("*.json"))
    changed = json.loads(first.read_text())
    changed["origin"]["code"] = "feedfacefeed"
    changed["metrics"]["global/test/accuracy"][-1] = 0.123
    first.write_text(json.dumps(changed))
    done = gathered(whole, tmp_path / "a", tmp_path / "b")
    remarks = " ".join(done.comparison.question.remarks)
    assert "has another result by code feedfacefeed" in remarks
    assert (tmp_path / "a" / "table.csv").read_bytes() == table
    mixed = gathered(whole, tmp_path / "b")
    assert "different code or machines" in " ".join(mixed.comparison.question.remarks)
    replaced = gathered(whole, tmp_path / "a", tmp_path / "b", replace=True)
    assert "different code or machines" in " ".join(replaced.comparison.question.remarks)
    assert json.loads((tmp_path / "a" / "cells" / first.name).read_text()) == changed


def test_results_of_other_settings_are_not_in_the_tables_and_that_is_said(whole: Path, kept: Path) -> None:
    table = read_toml(whole / "compare.toml")
    table["compare"]["algorithms"] = table["compare"]["algorithms"][::2]
    done = collect(plan(table), kept)
    assert done is not None
    assert done.cells == 8
    assert "4 kept results are of other settings" in " ".join(done.comparison.question.remarks)


def test_results_of_an_earlier_version_are_found_by_their_settings(whole: Path, kept: Path, tmp_path: Path) -> None:
    """A version that did not know a setting yet gave its cells other hashes; the default of the setting is meant."""
    for k, file in enumerate(sorted((kept / "cells").iterdir())):
        result = json.loads(file.read_text())
        del result["settings"]["local"]["momentum"]
        result["hash"] = f"{k:016x}"
        (file.parent / f"{k:016x}.json").write_text(json.dumps(result))
        file.unlink()
    done = gathered(whole, tmp_path / "b", kept)
    assert (done.new, done.missing) == (12, ())
    assert same_table(tmp_path / "b", whole)
    assert {path.stem for path in (tmp_path / "b" / "cells").iterdir()} == {
        path.name for path in (whole / "cells").iterdir()
    }
    assert gathered(whole, kept).missing == ()
    assert len(list((kept / "cells").iterdir())) == 12


def test_equal_terms_are_kept_so_that_the_data_are_not_needed() -> None:
    """FedSAM takes two gradients a step, and so half of the rounds; where that was counted, it need not be again."""
    table = {
        **SMALL,
        "data": "mnist",
        "compare": {"algorithms": ["fedavg", "fedsam"], "seeds": 1, "equal": "gradients"},
    }
    planned = plan(table)
    terms = Terms({(): 30.0}, {((), "fedavg"): 6, ((), "fedsam"): 3})
    assert kept_terms(planned, ["{", "[]", terms_text(planned, terms)]) == terms
    assert {c.method.label: c.config.basics.rounds for c in on_terms(planned, terms).cells} == {
        "fedavg": 6,
        "fedsam": 3,
    }
    other = plan({**table, "rounds": 4})
    assert kept_terms(other, [terms_text(planned, terms)]) is None


_SOUND = '{"format": 2, "hash": "x", "seed": 0, "state": "done", "origin": {}, "settings": {}, "partition": ""'


def test_kept_results_are_shown_with_their_evaluations(whole: Path, kept: Path) -> None:
    """``show``, ``report`` and ``show --plot`` of a folder of results, as of the runs that they came from."""
    ran, stored = look_at([whole]), look_at([kept])
    assert isinstance(ran, ComparisonView)
    assert isinstance(stored, ComparisonView)
    assert len(stored.cells) == 12
    for mine, theirs in zip(stored.cells, ran.cells, strict=True):
        assert (mine.method, mine.place, mine.seed) == (theirs.method, theirs.place, theirs.seed)
        assert [line["round"] for line in mine.records] == [0, 1, 2, 3]
        for line, other in zip(mine.records, theirs.records, strict=True):
            assert line == pytest.approx({name: other[name] for name in line}, rel=1e-5)
    next((kept / "cells").glob("*.json")).write_text("{}")
    assert sum(cell.state == "missing" for cell in look_at([kept]).cells) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a result"),
        ('{"format": 9}', "has format 9"),
        ('{"format": 2, "hash": "x", "seed": 0}', "has no valid 'state'"),
        (_SOUND + ', "metrics": {"loss": [1]}}', "has metrics of different lengths"),
        (_SOUND + ', "metrics": {"round": ["a"]}}', "has metrics without a round"),
        (_SOUND + ', "metrics": {"round": [1], "a/loss": ["0.9"]}}', r"has no valid 'metrics' \(got .*0\.9"),
        (_SOUND + ', "metrics": {"round": [1], "a/loss": [Infinity]}}', "has no valid 'metrics'"),
        (_SOUND + ', "privacy": {"epsilon": 1}, "metrics": {}}', "has no valid 'privacy'"),
        (_SOUND + ', "repairs": 5, "metrics": {}}', "has no valid 'repairs'"),
        (_SOUND.replace("done", "missing") + ', "metrics": {}}', r"has no valid 'state' \(got missing"),
        (_SOUND.replace('"origin": {}', '"origin": {"versions": "2"}') + ', "metrics": {}}', "has no valid 'origin'"),
        (_SOUND + ', "metrics": {}}', "is the result of another cell, x"),
    ],
)
def test_a_damaged_result_is_refused(whole: Path, kept: Path, text: str, says: str) -> None:
    first = min((kept / "cells").glob("*.json"))
    first.write_text(text)
    with pytest.raises(ConfigError, match=says):
        gathered(whole, kept)
    assert first.read_text() == text


def test_an_infinite_epsilon_is_kept(tmp_path: Path) -> None:
    """Without noise uploads are only clipped: JSON has no number for what that costs."""
    (cell,) = plan(table(algorithms=["fedavg"], seeds=1)).cells
    document = json.loads(_SOUND + ', "metrics": {"round": [1], "bytes/up": [1]}}') | {"hash": cell.hash}
    cost = PrivacyCost("d", "client", "replace_one", math.inf, 1e-5)
    text = document_text(document | {"privacy": cost._asdict()})
    assert kept_result(cell, read_document(text, cell.hash, "x")).spent == cost


def test_a_run_folder_whose_environment_is_damaged_is_refused(whole: Path, tmp_path: Path) -> None:
    home = min((whole / "cells").iterdir())
    shutil.copytree(home, tmp_path / "cells" / home.name)
    (tmp_path / "cells" / home.name / "environment.json").write_text("{")
    with pytest.raises(ConfigError, match=r"environment\.json: cannot be read"):
        gathered(whole, tmp_path / "r", tmp_path)


def test_the_command(whole: Path, tmp_path: Path) -> None:
    shutil.copy(whole / "compare.toml", tmp_path / "c.toml")
    done = fedloom("collect", "c.toml", "--from", whole, "--out", "results/c", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "12 of 12 cells, 12 of them new: results/c" in done.out
    assert fedloom("collect", "c.toml", "--from", "nowhere", "--out", "results/c", cwd=tmp_path).code == 2
    found = fedloom("collect", "c.toml", "--out", "results/c", "--json", cwd=tmp_path)
    assert (found.json["new"], found.json["missing"], found.json["cells"]) == (0, [], 12)
    other = fedloom("collect", "c.toml", "rounds=2", "--from", whole, "--out", "results/d", cwd=tmp_path)
    assert other.code == 2
    assert "no finished cell of c.toml is below" in other.err
    assert not (tmp_path / "results" / "d").exists()


@pytest.mark.parametrize("word", ["runs/mine", "runs/mine/compare.toml"])
def test_a_comparison_that_ran_needs_no_other_word_than_its_folder(whole: Path, tmp_path: Path, word: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(whole)
    done = fedloom("collect", word, cwd=tmp_path)
    assert done.code == 0, done.err
    assert f"12 of 12 cells, 12 of them new: results/{whole.name}" in done.out


def test_seeds_of_two_places_meet_by_one_command_for_many_recipes(tmp_path: Path) -> None:
    """Two recipes run with a seed each in two places; an archive of one and the runs of the other are merged."""
    for place, seed in (("one", 0), ("two", 1)):
        for name, method in (("a", "fedprox"), ("b", "fedopt")):
            recipe = tmp_path / place / "experiments" / "paper" / f"{name}.toml"
            recipe.parent.mkdir(parents=True, exist_ok=True)
            recipe.write_text(_RECIPE.format(method=method))
            runs = tmp_path / place / "runs" / f"compare-{name}"  # where the command puts them
            run(read_toml(recipe) | {"compare": read_toml(recipe)["compare"] | {"seeds": [seed]}}, runs, jobs=1)
    there = fedloom("collect", "experiments", cwd=tmp_path / "two")
    assert there.code == 0, there.err
    with tarfile.open(tmp_path / "two.tgz", "w:gz") as tar:
        tar.add(tmp_path / "two" / "results", "results")
    here = fedloom("collect", "experiments", "--from", "runs", "--from", "../two.tgz", cwd=tmp_path / "one")
    assert here.code == 0, here.err
    for name in ("a", "b"):
        assert f"experiments/paper/{name}.toml: 4 of 4 cells, 4 of them new: results/paper/{name}" in here.out
        rows = list(csv.DictReader((tmp_path / "one" / "results" / "paper" / name / "table.csv").open()))
        assert [row["seeds"] for row in rows] == ["2", "2"]


def test_a_folder_grows_seed_by_seed_and_a_list_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(_RECIPE.format(method="fedprox"))
    (tmp_path / "queue.txt").write_text("# the order\n\na.toml  # first\n")
    before = fedloom("collect", "queue.txt", "--missing", cwd=tmp_path)
    assert before.out.splitlines() == [
        "a.toml: 0 of 4 cells (seed 0: 0 of 2, seed 1: 0 of 2)",
        "  next 2 cells: fedloom compare a.toml --seed 0",
    ]
    rest = ("--seeds", 2, "--kept", "results", "--out", "elsewhere")
    for seed, words in ((1, ("--seed", 1)), (0, rest)):
        done = fedloom("compare", "a.toml", *words, "--jobs", 1, cwd=tmp_path)
        assert (done.code, "2 of 4 cells were left out" in done.out) == (0, seed == 0)
        places = ("--from", "elsewhere") if seed == 0 else ()
        assert fedloom("collect", "a.toml", *places, cwd=tmp_path).code == 0
        found = fedloom("collect", "queue.txt", "--missing", "--json", cwd=tmp_path)
        left = ["fedavg · seed 0", "fedprox · seed 0"] if seed == 1 else []
        assert found.json == {"a.toml": {"cells": 4, "there": 4 - len(left), "missing": left}}
    assert len(list((tmp_path / "elsewhere" / "cells").iterdir())) == 2
    for words in ((), ("--seed", 0), ("--only", "algorithm=fedavg")):
        done = fedloom("compare", "a.toml", *words, "--kept", "results", "--out", "third", cwd=tmp_path)
        assert (done.code, done.err, (tmp_path / "third").exists()) == (0, "", False)
        assert done.out.startswith("nothing to run: no cell is left (their results are kept elsewhere")
    again = fedloom("compare", "a.toml", "--kept", "results", "--out", "elsewhere", "--json", cwd=tmp_path)
    assert (again.code, again.json["cells"]) == (0, 4)  # it has cells of its own
    wrong = fedloom("compare", "a.toml", "--kept", "nowhere", cwd=tmp_path)
    assert (wrong.code, "--kept: there is no folder nowhere" in wrong.err) == (2, True)


_RECIPE = """
rounds = 2
model = "logistic"
partition = {{ kind = "iid", clients = 4 }}

[compare]
algorithms = ["fedavg", "{method}"]
seeds = [0, 1]
"""


def test_repairs_of_partitions_are_below_the_tables_and_kept(tmp_path: Path) -> None:
    harsh = {"partition": {"kind": "dirichlet", "clients": 50, "alpha": 0.01}, "rounds": 1}
    run(SMALL | harsh | {"compare": {"algorithms": ["fedavg"], "seeds": 1}}, tmp_path / "c", jobs=1)
    gathered(tmp_path / "c", tmp_path / "r", tmp_path / "c")
    for folder in ("c", "r"):
        (note,) = (x for x in (tmp_path / folder / "table.md").read_text().splitlines() if x.startswith("- partition"))
        assert "that had fewer than 10 rows; this changes label mixes: heterogeneity was 0." in note
        assert note[2:] in content_of(look_at([tmp_path / folder]), "en").notes
