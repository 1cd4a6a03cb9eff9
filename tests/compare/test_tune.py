"""A search by Optuna: resumable, by validation rows alone, on the same cells as a comparison."""

from __future__ import annotations

import csv
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import optuna
import pytest

from fedloom.compare.ranges import is_range, ranges_of
from fedloom.compare.tune import Search, checked_search, edge_notes
from fedloom.core.errors import ConfigError
from fedloom.runs.settings import as_table, parse, read_toml
from support.comparisons import HELD
from support.terminal import HANG, SMALL, fedloom, started

FIXED = (*SMALL, "rounds=2", "evaluate.validation=0.3")


def trials(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "trials.csv").open()))


def written(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (folder / "cells").rglob("metrics.jsonl")}


def test_a_search_finds_the_best_on_validation_rows_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    words = ("tune", *FIXED, "local.lr=0.01,0.3,1e30", "local.batch=8..64:log", "--out", "s", "--seeds", 2, "--jobs", 2)
    done = fedloom(*words, "--trials", 4, "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    folder, found = tmp_path / "s", trials(tmp_path / "s")
    assert [trial["trial"] for trial in found] == ["0", "1", "2", "3"]
    for trial in found:  # with this rate nothing is finite
        assert (trial["state"] == "diverged") == (float(trial["local.lr"]) == 1e30)
    finished = [trial for trial in found if trial["state"] == "done"]
    best = max(finished, key=lambda trial: float(trial["value"]))
    assert done.json["best"]["number"] == int(best["trial"])
    assert done.json["notes"][0].startswith("Evaluations of a run: only 2; the mean of the last ten is the mean of the")
    assert f"note: {done.json['notes'][0]}" in done.err
    chosen = read_toml(folder / "best.toml")
    assert (chosen["local"]["lr"], chosen["local"]["batch"]) == (float(best["local.lr"]), int(best["local.batch"]))

    # By hand, from the run folders of both seeds.
    mine = [home for home in (folder / "cells").iterdir() if _settings(home) == (best["local.lr"], best["local.batch"])]
    lines = [(home / "metrics.jsonl").read_text().splitlines()[1:] for home in mine]
    each = [sum(json.loads(line)["global/validation/accuracy"] for line in run) / len(run) for run in lines]
    assert len(each) == 2
    assert float(best["value"]) == pytest.approx(sum(each) / 2)

    study = optuna.load_study(study_name="fedloom", storage=f"sqlite:///{folder / 'study.db'}")
    assert [trial.state.is_finished() for trial in study.trials] == [True] * 4

    shown = fedloom("show", "s", "--json", cwd=tmp_path).json["runs"]
    names = [f"trial {trial['trial']}, seed {seed}" for trial in found for seed in (0, 1)]
    assert [run["name"] for run in shown] == [name for name in names if name in {run["name"] for run in shown}]
    assert names[:2] == [run["name"] for run in shown[:2]]  # a later trial may share the runs of an earlier one
    assert len(shown) == len(list((folder / "cells").iterdir()))

    before = written(folder)
    assert fedloom(*words, "--trials", 4, "--json", cwd=tmp_path).json == done.json  # nothing is left to do
    assert written(folder) == before
    more = fedloom(*words, "--trials", 5, cwd=tmp_path)
    assert more.code == 0
    assert trials(folder)[:4] == found
    assert len(trials(folder)) == 5
    now = read_toml(folder / "best.toml")["local"]
    assert f"local.lr={now['lr']} local.batch={now['batch']}\n" in more.out  # at the end of a command
    other = fedloom("tune", *FIXED, "local.lr=0.01,0.3", "--out", "s", cwd=tmp_path)
    assert other.code == 2
    assert "s contains another search" in other.err


def _settings(home: Path) -> tuple[str, str]:
    local = read_toml(home / "config.toml")["local"]
    return str(local["lr"]), str(local["batch"])


def test_after_ctrl_c_the_same_command_continues(tmp_path: Path) -> None:
    """Its third trial waits until Ctrl-C was pressed."""
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    words = ("tune", "algorithm=held.py", *FIXED, "local.lr=0.01..1", "--trials", 4, "--jobs", 1, "--out", "s")
    with started(*words, cwd=tmp_path) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("trials 1/4"):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        while "finishing" not in process.stdout.readline():
            assert process.poll() is None
        (tmp_path / "hold").unlink()
        out, err = process.communicate(timeout=HANG)
    assert (process.returncode, err) == (130, "")
    assert "trials done; repeat the command to continue" in out
    first = trials(tmp_path / "s")
    assert 1 <= len(first) <= 3
    assert fedloom(*words, cwd=tmp_path).code == 0
    assert trials(tmp_path / "s")[: len(first)] == first
    assert [trial["state"] for trial in trials(tmp_path / "s")] == ["done"] * 4
    homes = [home for home in (tmp_path / "s" / "cells").iterdir() if (home / "summary.json").is_file()]
    assert len(homes) == 4  # the trial that was at work was finished, and none was begun in its place


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["local.lr=1..0.1"], "local.lr: the first bound must be below the second"),
        (["local.lr=0..1:log"], "local.lr: on a log scale both bounds are above 0"),
        (["local.lr=0.1..1:exp"], "local.lr: there is no scale 'exp'"),
        (["local.lr=a..b"], "local.lr: 'a' is not a number"),
        (["local.lr=0.1,0.1"], "local.lr: two choices are the same"),
        (["local.lr=0.1,0.2", "local.lr=1..2"], "local.lr: is given twice"),
        (["seed=0..9"], "seed: is not a setting to search"),
        (["local.lr=-1..1"], r"local.lr: should be .*got -1"),
        (["local.rl=0.1..1"], "local.rl: unknown key"),
        (["algorithm.kind=fedavg,fedavgg"], "there is no algorithm 'fedavgg'"),
        ([], "fedloom tune: no setting has a range to search"),
    ],
)
def test_what_cannot_be_searched_is_refused(words: list[str], fault: str) -> None:
    base = as_table(parse({"evaluate": {"validation": 0.2}}))
    with pytest.raises(ConfigError, match=fault):
        checked_search(Search(base, ranges_of(words), 3, ""))


def test_a_search_needs_validation_rows_a_known_metric_and_a_folder_of_its_own(tmp_path: Path) -> None:
    ranges = ranges_of(["local.lr=0.1..1"])
    with pytest.raises(ConfigError, match=r"evaluate\.validation is 0"):
        checked_search(Search({}, ranges, 3, ""))
    with pytest.raises(ConfigError, match=r"--metric: nothing on validation rows is called 'acuracy' \(did you mean"):
        checked_search(Search({"evaluate": {"validation": 0.2}}, ranges, 3, "acuracy"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine\n")
    done = fedloom("tune", *FIXED, "local.lr=0.1..1", "--out", "mine", cwd=tmp_path)
    assert (done.code, done.out.count("trials 1/")) == (2, 0)
    assert "mine already exists and is not a search" in done.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("data=mine.npz", "error: mine.npz: no such file"),
        ("partition.clients=5..5000", "partition.clients: 5000 clients cannot share 1438 rows"),
    ],
)
def test_data_that_every_trial_would_refuse_are_one_error(word: str, says: str, tmp_path: Path) -> None:
    fixed = ("model.kind=logistic", "rounds=1", "evaluate.validation=0.2")
    done = fedloom("tune", *fixed, "local.lr=0.1..1", word, "--out", "s", cwd=tmp_path)
    assert (done.code, done.err.count(says), (tmp_path / "s").exists()) == (2, 1, False)


def test_numbers_are_drawn_with_few_digits_and_within_their_bounds() -> None:
    lr, epochs, kind = ranges_of(["local.lr=0.12341..0.2:log", "local.epochs=1..5", "model.kind=mlp,logistic"])
    assert lr.setting(0.150000001) == 0.15
    assert lr.setting(0.123411) == 0.12341  # with four digits it would be below
    assert (epochs.whole, kind.choices) == (True, ("mlp", "logistic"))
    assert [is_range(word) for word in ("a=1..2", "a=b,c", 'a=["b", "c"]', "a=0.5", "exp.toml")] == [
        *(True, True, False, False, False),
    ]


def test_settings_that_do_not_go_together_are_one_refused_trial(tmp_path: Path) -> None:
    """Five clients in a round are possible with ten clients, and not with three; the ends of each range alone are."""
    clients, size = "partition.clients=10,3", "cohort.size=2,5"
    fixed = ("model.kind=logistic", "checkpoint.curves=false", "rounds=1", "evaluate.validation=0.2")
    words = ("tune", clients, size, *fixed, "--trials", 6, "--jobs", 1, "--out", "s")
    done = fedloom(*words, cwd=tmp_path)
    assert done.code == 0, done.err
    found = trials(tmp_path / "s")
    together = {(trial["partition.clients"], trial["cohort.size"]): trial["state"] for trial in found}
    assert together[("3", "5")] == "refused"  # the seed draws it
    assert {state for pair, state in together.items() if pair != ("3", "5")} == {"done"}
    assert "refused  cohort.size: 5" in done.out
    assert fedloom(*words, cwd=tmp_path).code == 0
    assert trials(tmp_path / "s") == found


def test_a_trial_whose_process_was_killed_is_tried_again(tmp_path: Path) -> None:
    """Its settings are those of a new trial, and the search says that one has failed."""
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    words = ("tune", "algorithm=held.py", *FIXED, "local.lr=0.01..1", "--trials", 3, "--jobs", 1, "--out", "s")
    with started(*words, cwd=tmp_path, fresh=True) as process:
        assert process.stdout is not None
        while len(list((tmp_path / "s").glob("cells/*/config.toml"))) < 3:
            assert process.poll() is None
            time.sleep(0.01)
        (worker,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(worker), signal.SIGKILL)
        (tmp_path / "hold").unlink()
        process.communicate(timeout=HANG)
    assert process.returncode == 1
    before = {trial["local.lr"]: trial["state"] for trial in trials(tmp_path / "s")}
    assert sorted(before.values()) == ["done", "done", "failed"]
    assert fedloom(*words, cwd=tmp_path).code == 0
    after = trials(tmp_path / "s")
    assert {trial["local.lr"]: trial["state"] for trial in after} == dict.fromkeys(before, "done")
    listed = {line["trial"] for line in csv.DictReader((tmp_path / "s" / "cells.csv").open())}
    assert listed == {trial["trial"] for trial in after}


def test_a_study_that_cannot_be_opened_is_one_error(tmp_path: Path) -> None:
    words = ("tune", *FIXED, "local.lr=0.1..1", "--trials", 1, "--out", "s")
    assert fedloom(*words, cwd=tmp_path).code == 0
    (tmp_path / "s" / "study.db").unlink()
    (tmp_path / "s" / "study.db").mkdir()
    done = fedloom(*words, cwd=tmp_path)
    assert done.code == 4
    assert "study.db: unable to open database file" in done.err
    assert "Traceback" not in done.err


def test_a_search_over_numbers_goes_on(tmp_path: Path) -> None:
    """The data is read as the task reads it, so that it is not taken for changed data."""
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "int.npz", x=draw.normal(size=(200, 4)), y=draw.integers(0, 50, 200))
    fixed = ("data=int.npz", "task=regression", "partition.clients=4", "rounds=1", "evaluate.validation=0.2")
    words = ("tune", *fixed, "model.kind=logistic", "checkpoint.curves=false", "local.lr=0.01,0.1", "--out", "s")
    assert fedloom(*words, "--trials", 1, cwd=tmp_path).code == 0
    done = fedloom(*words, "--trials", 2, cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(trials(tmp_path / "s")) == 2


@pytest.mark.parametrize(
    ("word", "value", "end"),
    [
        ("local.lr=0.001..1:log", 0.9, "largest"),
        ("local.lr=0.001..1:log", 0.0011, "smallest"),
        ("local.lr=0.001..1:log", 0.1, ""),
        ("local.lr=0.0..1.0", 0.1, ""),
        ("local.epochs=1..5", 5, "largest"),
        ("local.epochs=1..5", 4, ""),
        ("local.batch=32,16,64", 16, "smallest"),
        ("local.batch=32,16,64", 32, ""),
        ("local.optimizer=sgd,adam", "adam", ""),
        ("local.nesterov=true,false", True, ""),
    ],
)
def test_a_best_value_at_the_end_of_its_range_has_a_note(word: str, value: object, end: str) -> None:
    ranges = ranges_of([word])
    key = ranges[0].key
    says = [f"the best {key} is at the end of its range ({value}, the {end})."] if end else []
    assert edge_notes(ranges, {key: value}) == says
    assert edge_notes(ranges, {}) == []
