"""Running a comparison: cells that are fair, computed once and kept."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.compare import worker
from fedloom.compare.cells import Cell, counted_alike
from fedloom.compare.crew import InterruptedComparison, Standing, Unwatched, job_of
from fedloom.compare.partial import TablesAsCellsEnd
from fedloom.compare.plan import ComparisonPlan, plan
from fedloom.compare.run import run
from fedloom.core import usercode
from fedloom.core.signals import handling
from fedloom.engine.local import capture_for
from fedloom.runs import prepare
from fedloom.runs.folder import read_metrics
from support.comparisons import GRID, HELD, SMALL, TABLES, THREE, contents, table
from support.terminal import fedloom, started


def test_what_a_comparison_leaves(whole: Path) -> None:
    assert {p.name for p in whole.iterdir()} == {*TABLES, "cells", ".lock"}
    lines = list(csv.DictReader(io.StringIO((whole / "cells.csv").read_text())))
    assert len(lines) == 12 == len(list((whole / "cells").iterdir()))
    for line in lines:
        home = whole / line["folder"]
        config = tomllib.loads((home / "config.toml").read_text())
        assert config["algorithm"]["kind"] == line["kind"]
        assert config["seed"] == int(line["seed"])
        assert config["partition"]["alpha"] == float(line["partition.alpha"])
        described = json.loads((home / "environment.json").read_text())
        assert described["config_hash"].startswith(home.name)
        assert float(line["last"]) == read_metrics(home)[-1]["global/test/accuracy"]


def test_all_methods_of_a_seed_start_from_the_same(whole: Path) -> None:
    lines = list(csv.DictReader(io.StringIO((whole / "cells.csv").read_text())))
    for alpha in ("0.1", "1.0"):
        per_seed = []
        for seed in ("0", "1"):
            homes = [whole / x["folder"] for x in lines if (x["partition.alpha"], x["seed"]) == (alpha, seed)]
            assert len(homes) == 3
            splits = {json.loads((h / "partition.json").read_text())["sha256"] for h in homes}
            first = {json.dumps(read_metrics(h)[0]) for h in homes}
            assert len(splits) == len(first) == 1
            timings = [[json.loads(x)["clients"] for x in (h / "timings.jsonl").open()] for h in homes]
            assert timings[0] == timings[1] == timings[2]
            per_seed.append(splits)
        assert per_seed[0] != per_seed[1]


def test_all_methods_of_a_seed_draw_the_same_cohorts() -> None:
    from fedloom.runs.prepare import prepare

    cells = plan(table(algorithms=THREE, seeds=[5])).cells
    drawn = [[prepare(c.config, Path()).experiment.present(r).drawn.ids.tolist() for r in range(3)] for c in cells]
    assert drawn[0] == drawn[1] == drawn[2]


@pytest.mark.usefixtures("all_pictures")
def test_finished_cells_are_reused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    before = contents(folder)
    times = {p: p.stat().st_mtime_ns for p in (folder / "cells").rglob("*")}
    run(tomllib.loads((folder / "compare.toml").read_text()), folder)
    assert contents(folder) == before
    assert {p: p.stat().st_mtime_ns for p in (folder / "cells").rglob("*")} == times
    larger = run(table(grid=GRID, algorithms=[*THREE, "local_only"]), folder, jobs=2)
    assert len(larger.results) == 16
    assert {p: p.stat().st_mtime_ns for p in times if p.is_file()} == {p: t for p, t in times.items() if p.is_file()}


@pytest.mark.usefixtures("all_pictures")
def test_the_number_of_jobs_changes_nothing(whole: Path, tmp_path: Path) -> None:
    run(tomllib.loads((whole / "compare.toml").read_text()), tmp_path / "one", jobs=1)
    assert contents(tmp_path / "one") == contents(whole)


def test_two_labels_of_one_config_are_computed_once(tmp_path: Path) -> None:
    same = [{"kind": "fedavg", "label": "a"}, {"kind": "fedavg", "label": "b"}]
    done = run(table(algorithms=same, seeds=1), tmp_path / "c", jobs=1)
    assert len(list((tmp_path / "c" / "cells").iterdir())) == 1
    assert [row.rank for row in done.rows] == [1, 1]


LONG = ("compare", "held.py", "fedopt", "--seeds", "2", "--jobs", "2", "--out", "out")
LONG_SETTINGS = ("rounds=10", "partition.clients=6", "cohort.size=3", "checkpoint.every=2", "model=logistic")


def lines_in(folder: Path) -> int:
    return sum(p.read_bytes().count(b"\n") for p in folder.glob("cells/*/metrics.jsonl"))


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    limit = time.perf_counter() + 600
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.perf_counter() < limit
        time.sleep(0.01)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_killed_and_repeated_is_never_killed(tmp_path: Path) -> None:
    """A method of which a worker does four rounds and then waits is always at work when it is killed."""
    want_at = tmp_path / "want"
    want_at.mkdir()
    for place in (tmp_path, want_at):
        (place / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    assert fedloom(*LONG, *LONG_SETTINGS, cwd=want_at).code == 0
    for goal in (3, 12):
        process = started(*LONG, *LONG_SETTINGS, cwd=tmp_path, parent=True)
        wait_for(lambda goal=goal: lines_in(tmp_path / "out") > goal, process)
        workers = children(process.pid)
        assert workers
        if goal == 12:
            os.kill(workers[0], signal.SIGKILL)
        process.kill()
        process.communicate()
        limit = time.perf_counter() + 600
        while not all(gone(pid) for pid in workers):  # they end with their parent
            assert time.perf_counter() < limit
            time.sleep(0.01)
    (tmp_path / "hold").unlink()
    done = fedloom(*LONG, *LONG_SETTINGS, cwd=tmp_path)
    assert done.code == 0, done.err
    assert contents(tmp_path / "out") == contents(want_at / "out")


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    process = started(*LONG, *LONG_SETTINGS, "rounds=1000000", cwd=tmp_path, parent=True)
    wait_for(lambda: lines_in(tmp_path / "out") > 5, process)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "of 4 cells done; repeat the command to continue" in out
    assert all(gone(pid) for pid in workers)
    assert "Traceback" not in out + err
    assert not (tmp_path / "out" / "table.csv").exists()
    begun = [file.parent for file in (tmp_path / "out").glob("cells/*/metrics.jsonl") if file.read_bytes()]
    assert begun  # a cell that was interrupted before its first round has nothing to save
    assert all(list((home / "checkpoints").iterdir()) for home in begun)


def test_a_worker_that_is_asked_to_stop_in_the_last_round_of_a_cell_ends(tmp_path: Path) -> None:
    """It waited for another cell, and the comparison for its end."""
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    settings = table()["compare"] | {"algorithms": [str(tmp_path / "held.py")], "seeds": 1}
    asked = SMALL | {"rounds": 5, "compare": settings}
    usercode.vouch(asked)
    (cell,) = plan(asked).cells
    folder = tmp_path / "cells" / cell.hash
    words = [sys.executable, "-P", "-m", "fedloom.compare.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=tmp_path, **pipes) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps([job_of(cell, folder, tmp_path)]) + "\n")
        process.stdin.flush()
        wait_for(lambda: lines_in(tmp_path) == 5, process)  # the fifth round is held
        process.terminate()
        (tmp_path / "hold").unlink()
        try:
            assert process.wait(600) == 130
        finally:
            process.kill()
    assert (folder / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("compile_", ["off", "on"])
def test_cells_together_come_to_what_each_comes_to_alone(tmp_path: Path, compile_: str) -> None:
    """With compiled steps, seeds and rates take them side by side; else they take turns, and have the same bits."""
    engine = {"compile": compile_, "executor": "lanes"}
    asked = SMALL | {
        "engine": engine,
        "compare": {"algorithms": ["fedavg"], "seeds": 2, "grid": {"local.lr": [0.1, 0.05]}},
    }
    alone, joint = tmp_path / "alone", tmp_path / "joint"
    assert not run(asked, alone, jobs=1).failures
    assert not run(asked, joint, jobs=1, together=3).failures
    plain = {p.name: read_metrics(p) for p in (alone / "cells").iterdir()}
    assert len(plain) == 4
    for name, lines in plain.items():
        found = read_metrics(joint / "cells" / name)
        assert [line["round"] for line in found] == [line["round"] for line in lines]
        if compile_ == "off":
            assert found == lines
        assert found[-1]["global/test/loss"] == pytest.approx(lines[-1]["global/test/loss"], rel=1e-4)


@pytest.mark.slow
def test_cells_together_stop_together_and_go_on(tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    words = ["compare", "held.py", "fedavg", "--seeds", "2", "--together", "2", "--jobs", "1", "--out", "out"]
    process = started(*words, *LONG_SETTINGS, cwd=tmp_path, parent=True)
    wait_for(lambda: lines_in(tmp_path / "out") >= 4, process)
    process.send_signal(signal.SIGINT)
    (tmp_path / "hold").unlink()
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "Traceback" not in out + err
    done = fedloom(*words, *LONG_SETTINGS, cwd=tmp_path)
    assert done.code == 0, done.err
    want = fedloom(*words[:-1], "want", *LONG_SETTINGS, "--together", "1", cwd=tmp_path)
    assert want.code == 0, want.err
    assert contents(tmp_path / "out") == contents(tmp_path / "want")


FAILS_ONCE = """
from fedloom import FedAvg

rounds = 0


class FailsOnce(FedAvg):
    def update(self, server, inbox):
        global rounds
        rounds += 1
        if rounds == 2:
            raise RuntimeError("only once in a process")
        return super().update(server, inbox)
"""


@pytest.mark.slow
def test_one_of_the_cells_together_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS_ONCE)
    asked = SMALL | {"compare": {"algorithms": [str(tmp_path / "fails.py")], "seeds": 3}}
    done = run(asked, tmp_path / "c", jobs=1, together=3)
    ((name, why),) = done.failures.items()
    assert "seed 0" in name
    assert "only once in a process" in why
    assert len(list((tmp_path / "c" / "cells").glob("*/summary.json"))) == 2


def test_a_cell_knows_how_many_use_its_code_when_it_starts_and_when_it_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []

    def decide(*given: Any) -> Any:
        known.append(given[-1])
        return capture_for(*given)

    monkeypatch.setattr(prepare, "capture_for", decide)
    cell = counted_alike(plan(table(algorithms=["fedavg"], seeds=4)).cells)[0]
    for _ in range(2):
        ended = worker._outcome(job_of(cell, tmp_path / "c", tmp_path), worker.Reporter(io.StringIO(), cell.hash))
        assert ended is not None
        assert ended["state"] == "done"
    assert known == [4, 4]


class Impatient(Unwatched):
    """Whoever presses Ctrl-C when the first cell has ended and the second has begun."""

    def moved(self, standing: Standing) -> None:
        if standing.done == 1 and not standing.ended:
            raise KeyboardInterrupt


def test_tables_are_there_after_an_interruption_and_say_what_is_missing(tmp_path: Path) -> None:
    both = table(algorithms=["fedavg", "fedprox"], seeds=1)
    with pytest.raises(InterruptedComparison):
        run(both, tmp_path / "c", jobs=1, watcher=Impatient())
    early = (tmp_path / "c" / "table.md").read_text()
    assert "1 of 2 cells are missing: the comparison has not ended" in early
    assert "fedavg" in early
    assert (tmp_path / "c" / "curves.png").is_file()
    run(both, tmp_path / "c", jobs=1)
    assert "missing" not in (tmp_path / "c" / "table.md").read_text()
    assert not list((tmp_path / "c" / "cells").glob("*/curves.png"))  # unless it is asked for


class Pressed(tuple[Cell, ...]):
    """Cells during whose reading somebody presses Ctrl-C."""

    read = 0

    def __iter__(self) -> Iterator[Cell]:
        signal.raise_signal(signal.SIGINT)
        yield from super().__iter__()
        Pressed.read += 1


def test_ctrl_c_while_the_tables_are_written_waits_for_them(tmp_path: Path) -> None:
    """Interrupted within the first import of Matplotlib, they could not be written later either."""
    planned = plan(table())
    tables = TablesAsCellsEnd(planned._replace(cells=Pressed(planned.cells)), tmp_path, tmp_path, Unwatched())
    with handling(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        tables.write()
    assert Pressed.read == 2  # those that have ended, and all


def test_a_changed_loss_of_one_s_own_runs_cells_again_and_each_keeps_its_copy(tmp_path: Path) -> None:
    file, kept = tmp_path / "losses.py", []
    asked = table(algorithms=["fedavg"], seeds=1) | {"task": {"loss": f"{file}:focal"}}
    for gamma in (2.0, 3.0):
        file.write_text(
            "import torch\n\n\ndef focal(outputs, y):\n"
            "    sure = torch.log_softmax(outputs, -1).gather(-1, y[:, None]).squeeze(-1)\n"
            f"    return -((1 - sure.exp()) ** {gamma}) * sure\n"
        )
        run(asked, tmp_path / "c", jobs=1)
        (home,) = (tmp_path / "c" / "cells").iterdir()
        (copy,) = (home / "code").glob("*losses.py")
        assert copy.read_text() == file.read_text()
        kept.append((home.name, (home / "metrics.jsonl").read_bytes()))
    assert kept[0][0] == kept[1][0]  # the settings are the same, what they name is not
    assert kept[0][1] != kept[1][1]
    (aside,) = (tmp_path / "c" / "replaced").glob("*/run/metrics.jsonl")
    assert aside.read_bytes() == kept[0][1]


def test_cells_are_run_again_if_their_data_or_a_version_has_changed(tmp_path: Path) -> None:
    rows = [f"{k % 7},{k % 5},{k % 2}" for k in range(60)]
    file = tmp_path / "rows.csv"
    file.write_text("a,b,label\n" + "\n".join(rows))
    asked = table(algorithms=["fedavg", "fedprox"], seeds=1) | {"data": {"source": "csv", "path": str(file)}}
    asked |= {"partition": {"kind": "iid", "clients": 4}, "model": {"kind": "logistic"}, "rounds": 1}

    def again() -> dict[str, bytes]:
        run(asked, tmp_path / "c", jobs=1)
        return {path.parent.name: path.read_bytes() for path in (tmp_path / "c" / "cells").glob("*/metrics.jsonl")}

    first = again()
    file.write_text("a,b,label\n" + "\n".join(row[:-1] + str(1 - int(row[-1])) for row in rows))
    other = again()
    assert sorted(first) == sorted(other)
    assert all(first[name] != other[name] for name in first)
    assert len(list((tmp_path / "c" / "replaced").glob("*/run/metrics.jsonl"))) == 2
    record = tmp_path / "c" / "cells" / next(iter(first)) / "environment.json"
    record.write_text(record.read_text().replace('"torch": "', '"torch": "0.'))
    assert again() == other
    assert len(list((tmp_path / "c" / "replaced").glob("*/run/metrics.jsonl"))) == 3
    again()
    assert len(list((tmp_path / "c" / "replaced").glob("*/run/metrics.jsonl"))) == 3


def test_a_worker_that_dies_fails_its_cell_alone(tmp_path: Path) -> None:
    own = tmp_path / "dies.py"
    own.write_text(
        "import os, signal\nfrom fedloom.algorithms.fedavg import FedAvg\n\n\n"
        "class Dies(FedAvg):\n    def update(self, server, inbox):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = run(table(algorithms=["fedavg", str(own)], seeds=1), tmp_path / "c", jobs=1)
    assert [r.state for r in done.results] == ["done", "failed"]
    assert "killed" in next(iter(done.failures.values()))
    assert done.rows[0].rank == 1
    assert done.rows[1].rank is None


def test_the_line_of_a_failed_cell_says_why(tmp_path: Path) -> None:
    said: list[str] = []

    class Listening(Unwatched):
        def moved(self, standing: Standing) -> None:
            said.append(standing.ended)

    (tmp_path / "rules.py").write_text("def short(uploads, weights):\n    return uploads[0, 1:]\n")
    wrong = table(algorithms=["fedavg"], seeds=1) | {"aggregation": {"rule": f"{tmp_path}/rules.py:short"}}
    run(wrong, tmp_path / "c", jobs=1, watcher=Listening())
    (line,) = filter(None, said)
    assert line.startswith("fedavg · seed 0: failed (aggregation.rule: ")
    assert line.endswith(")")


def test_the_line_of_a_failed_cell_begins_with_what_is_wrong_and_not_with_what_to_do(tmp_path: Path) -> None:
    said: list[str] = []

    class Listening(Unwatched):
        def started(self, plan: ComparisonPlan, folder: Path, jobs: int, standing: Standing) -> None:
            (tmp_path / "gone").touch()

        def moved(self, standing: Standing) -> None:
            said.append(standing.ended)

    (tmp_path / "scans.py").write_text(
        "from pathlib import Path\nimport numpy as np\n\n\ndef load():\n"
        f"    if Path({str(tmp_path / 'gone')!r}).exists():\n"
        "        raise ValueError('no scans of March\\n  ask:     the archive\\n  or wait: until May')\n"
        "    return np.arange(80.0)[:, None], np.arange(80) % 2\n"
    )
    run(
        table(algorithms=["fedavg"], seeds=1) | {"data": f"{tmp_path}/scans.py:load"},
        tmp_path / "c",
        watcher=Listening(),
    )
    (line,) = filter(None, said)
    assert "no scans of March; ask: the archive)" in line


def test_a_diverged_cell_does_not_stop_the_others(tmp_path: Path) -> None:
    wild = {"kind": "fedopt", "label": "wild", "lr": 1e38}
    for _ in range(2):
        done = run(table(algorithms=["fedavg", wild], seeds=2), tmp_path / "c", jobs=1)
        assert [r.state for r in done.results] == ["done", "diverged"] * 2
        assert done.rows[1].diverged == 2
        assert not done.failures
        assert "| wild | diverged | diverged | diverged | - | - | - |" in (tmp_path / "c" / "table.md").read_text()


def test_the_command(tmp_path: Path) -> None:
    words = ("compare", "fedavg", "fedprox", "--seeds", "2", "rounds=2", "partition.clients=6", "cohort.size=3")
    done = fedloom(*words, "--target", "0.2", "--grid", "local.lr=0.1,0.2", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert len(done.out.splitlines()) == 1
    found = done.json
    assert list(found) == [
        *("folder", "metric", "baseline", "seeds", "target", "cells", "diverged", "failed", "table", "notes"),
        "failures",
    ]
    assert found["folder"] == "runs/compare-fedavg-fedprox-digits"
    assert (found["cells"], found["diverged"], found["failed"]) == (8, 0, 0)
    assert [(x["local.lr"], x["algorithm"]) for x in found["table"]] == [
        (lr, m) for lr in ("0.1", "0.2") for m in ("fedavg", "fedprox")
    ]
    assert {"last", "last_std", "rank", "p", "rounds_to_target"} <= set(found["table"][0])
    folder = tmp_path / found["folder"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {k: v for k, v in found.items() if k not in ("folder", "failures")}
    plain = fedloom("compare", folder / "compare.toml", "--out", folder, cwd=tmp_path)
    assert "8 of 8 cells are done already" in plain.out
    assert "local.lr = 0.2" in plain.out
    assert "\x1b" not in plain.out


def test_every_cell_has_its_own_noise_and_all_are_composed(tmp_path: Path) -> None:
    settings = SMALL | {"rounds": 2, "privacy": {"clip": 1.0, "noise": 1.0}, "cohort": {"sampling": "all"}}
    methods = [{"kind": "fedavg", "weighting": "uniform"}, {"kind": "fedprox", "weighting": "uniform"}]
    done = run({**settings, "compare": {"algorithms": methods, "seeds": [0]}}, tmp_path / "out", jobs=1)
    homes = [done.cells / result.hash for result in done.results]
    assert len({(home / "noise.key").read_text() for home in homes}) == 2
    each = [read_metrics(home)[-1]["privacy/epsilon"] for home in homes]
    note = next(note for note in done.summary()["notes"] if note.startswith("epsilon"))
    assert f"2 cells on the same data add up to epsilon {sum(each):.4g} at delta 2e-05" in note
    assert note in (tmp_path / "out" / "table.md").read_text()


def test_seeds_read_the_same_clients_although_they_test_on_other_rows(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 240)
    np.savez(tmp_path / "own.npz", x=rng.normal(size=(240, 4)) + y[:, None], y=y, client=np.arange(240) % 8)
    settings = {"data": str(tmp_path / "own.npz"), "partition": "natural", "rounds": 1, "cohort": {"sampling": "all"}}
    settings |= {"privacy": {"clip": 1.0, "noise": 1.0}}
    methods = [{"kind": "fedavg", "weighting": "uniform"}]
    done = run({**settings, "compare": {"algorithms": methods, "seeds": [0, 1]}}, tmp_path / "out", jobs=1)
    spent = [result.spent for result in done.results]
    assert len({each.data for each in spent if each}) == 2
    total = sum(each.epsilon for each in spent if each)
    note = next(note for note in done.summary()["notes"] if note.startswith("epsilon"))
    assert f"2 cells on the same data add up to epsilon {total:.4g} at delta 2e-05" in note


def test_personal_models_after_local_training_can_be_what_is_compared(tmp_path: Path) -> None:
    """The other reading of when a personal model is measured, by settings that a recipe can have."""
    settings = SMALL | {"rounds": 2, "evaluate": {"participants": True}, "cohort": {"sampling": "all"}}
    wanted = {"algorithms": ["fedala", "fedavg"], "seeds": [0], "metric": "participants/post_fit/test/accuracy"}
    done = run({**settings, "compare": wanted}, tmp_path / "out", jobs=1)
    assert {row.method for row in done.rows} == {"fedala", "fedavg"}
    for result in done.results:
        last = read_metrics(done.cells / result.hash)[-1]
        assert last["participants/post_fit/test/accuracy"] != last["personal/pre_fit/test/accuracy"]


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_own_data_is_not_taken_for_changed(task: str, tmp_path: Path) -> None:
    """Neither where a method keeps rows for the server, nor where labels are numbers; but other rows are."""
    draw = np.random.default_rng(0)
    x, y = draw.normal(size=(200, 4)), draw.integers(0, 3, 200) + 10 * (task == "regression")
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    methods = ("fedavg", "feddf") if task == "classification" else ("fedavg", "fedprox")
    given = ("data=mine.npz", f"task={task}", "rounds=1", "partition.clients=4", "model.kind=logistic", "proxy.size=20")
    words = ("compare", *methods, *(given if task == "classification" else given[:-1]), "--seeds", 1, "--out", "c")
    assert fedloom(*words, cwd=tmp_path).code == 0
    again = fedloom(*words, cwd=tmp_path)
    assert "2 of 2 cells are done already" in again.out
    np.savez(tmp_path / "mine.npz", x=x + 1, y=y)
    assert "since the data has changed" in fedloom(*words, cwd=tmp_path).out


@pytest.mark.slow
def test_methods_with_different_splits_are_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition that draws from the clock, say, is new in each process."""
    monkeypatch.chdir(tmp_path)
    draw = "return np.random.default_rng().integers(0, clients, len(y))"
    Path("anew.py").write_text(f"import numpy as np\n\n\ndef own(y, clients):\n    {draw}\n")
    table = {"rounds": 1, "partition": {"kind": "anew.py:own", "clients": 3}, "model": "logistic"}
    done = run(table | {"compare": {"algorithms": ["fedavg", "fedprox"], "seeds": 2}}, tmp_path / "c", jobs=1)
    said = next(note for note in done.question.remarks if "different splits" in note)
    assert said.startswith("fedavg and fedprox have different splits of the data with seed 0, and in 1 more cases")
