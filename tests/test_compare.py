"""Comparisons: fair, resumable, and right in their statistics."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy import stats

from fedloom.compare import running as compare
from fedloom.core import usercode
from fedloom.core.errors import ConfigError
from fedloom.report import comparison as report
from fedloom.report.comparison import Question, Result
from fedloom.runs import catalogue, record
from fedloom.runs.api import start
from fedloom.runs.config import parse
from terminal import fedloom, files, started

SMALL: dict[str, Any] = {
    "rounds": 3,
    "partition": {"kind": "dirichlet", "clients": 6},
    "cohort": {"size": 3},
    "model": "logistic",
}
THREE = ["fedavg", "fedprox", "fedopt"]
GRID = {"partition.alpha": [0.1, 1.0]}
TABLES = ("compare.toml", "table.csv", "table.md", "table.tex", "cells.csv", "summary.json", "curves.png", "curves.svg")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in TABLES}


def table(**settings: Any) -> dict[str, Any]:
    return {**SMALL, "compare": {"algorithms": THREE, "seeds": 2, **settings}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods on two partitions with two seeds."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    paper = [{"algorithm": "fedopt", "where": {"partition.alpha": 0.1}, "value": 72.15}]
    compare.run(table(grid=GRID, target=0.3, paper=paper), folder, jobs=2)
    return folder


# -- the cells -------------------------------------------------------------------------------------
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
        assert float(line["last"]) == record.read_metrics(home)[-1]["global/test/accuracy"]


def test_all_methods_of_a_seed_start_from_the_same(whole: Path) -> None:
    lines = list(csv.DictReader(io.StringIO((whole / "cells.csv").read_text())))
    for alpha in ("0.1", "1.0"):
        per_seed = []
        for seed in ("0", "1"):
            homes = [whole / x["folder"] for x in lines if (x["partition.alpha"], x["seed"]) == (alpha, seed)]
            assert len(homes) == 3
            splits = {json.loads((h / "partition.json").read_text())["sha256"] for h in homes}
            first = {json.dumps(record.read_metrics(h)[0]) for h in homes}
            assert len(splits) == len(first) == 1
            timings = [[json.loads(x)["clients"] for x in (h / "timings.jsonl").open()] for h in homes]
            assert timings[0] == timings[1] == timings[2]
            per_seed.append(splits)
        assert per_seed[0] != per_seed[1]


def test_all_methods_of_a_seed_draw_the_same_cohorts() -> None:
    from fedloom.runs.experiment import prepare

    cells = compare.plan(table(algorithms=THREE, seeds=[5])).cells
    drawn = [[prepare(c.config, Path()).experiment.present(r).drawn.ids.tolist() for r in range(3)] for c in cells]
    assert drawn[0] == drawn[1] == drawn[2]


def test_finished_cells_are_reused(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    before = contents(folder)
    times = {p: p.stat().st_mtime_ns for p in (folder / "cells").rglob("*")}
    compare.run(tomllib.loads((folder / "compare.toml").read_text()), folder)
    assert contents(folder) == before
    assert {p: p.stat().st_mtime_ns for p in (folder / "cells").rglob("*")} == times
    larger = compare.run(table(grid=GRID, algorithms=[*THREE, "local_only"]), folder, jobs=2)
    assert len(larger.results) == 16
    assert {p: p.stat().st_mtime_ns for p in times if p.is_file()} == {p: t for p, t in times.items() if p.is_file()}


def test_the_number_of_jobs_changes_nothing(whole: Path, tmp_path: Path) -> None:
    compare.run(tomllib.loads((whole / "compare.toml").read_text()), tmp_path / "one", jobs=1)
    assert contents(tmp_path / "one") == contents(whole)


def test_two_labels_of_one_config_are_computed_once(tmp_path: Path) -> None:
    same = [{"kind": "fedavg", "label": "a"}, {"kind": "fedavg", "label": "b"}]
    done = compare.run(table(algorithms=same, seeds=1), tmp_path / "c", jobs=1)
    assert len(list((tmp_path / "c" / "cells").iterdir())) == 1
    assert [row.rank for row in done.rows] == [1, 1]


# -- interruptions ---------------------------------------------------------------------------------
LONG = ("compare", "fedavg", "fedopt", "--seeds", "2", "--jobs", "2", "--out", "out")
LONG_SETTINGS = ("rounds=40", "partition.clients=6", "cohort.size=3", "checkpoint.every=3")


def lines_in(folder: Path) -> int:
    return sum(p.read_bytes().count(b"\n") for p in folder.glob("cells/*/metrics.jsonl"))


def children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    limit = time.perf_counter() + 60
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
    want_at = tmp_path / "want"
    want_at.mkdir()
    assert fedloom(*LONG, *LONG_SETTINGS, cwd=want_at).code == 0
    for goal in (5, 60):
        process = started(*LONG, *LONG_SETTINGS, cwd=tmp_path)
        wait_for(lambda goal=goal: lines_in(tmp_path / "out") > goal, process)
        workers = children(process.pid)
        assert workers
        if goal == 5:
            os.kill(workers[0], signal.SIGKILL)
        process.kill()
        process.communicate()
        limit = time.perf_counter() + 20
        while not all(gone(pid) for pid in workers):  # they end with their parent
            assert time.perf_counter() < limit
            time.sleep(0.01)
    done = fedloom(*LONG, *LONG_SETTINGS, cwd=tmp_path)
    assert done.code == 0, done.err
    assert contents(tmp_path / "out") == contents(want_at / "out")


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = started(*LONG, *LONG_SETTINGS, "rounds=2000", cwd=tmp_path)
    wait_for(lambda: lines_in(tmp_path / "out") > 5, process)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "of 4 cells done; the same command goes on from here" in out
    assert all(gone(pid) for pid in workers)
    assert "Traceback" not in out + err
    assert not (tmp_path / "out" / "table.csv").exists()
    homes = list((tmp_path / "out" / "cells").iterdir())
    assert all(list((h / "checkpoints").iterdir()) for h in homes if lines_in(tmp_path / "out") and h.is_dir())


def test_a_worker_that_dies_fails_its_cell_alone(tmp_path: Path) -> None:
    own = tmp_path / "dies.py"
    own.write_text(
        "import os, signal\nfrom fedloom.algorithms.fedavg import FedAvg\n\n\n"
        "class Dies(FedAvg):\n    def update(self, server, inbox):\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = compare.run(table(algorithms=["fedavg", str(own)], seeds=1), tmp_path / "c", jobs=1)
    assert [r.state for r in done.results] == ["done", "failed"]
    assert "killed" in next(iter(done.failures.values()))
    assert done.rows[0].rank == 1
    assert done.rows[1].rank is None


# -- faults ----------------------------------------------------------------------------------------
def test_every_fault_at_once_and_nothing_written(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(
        """
        seed = 3
        local = { lr = -1 }
        [compare]
        algorithms = ["fedavg", "fedproxx", { kind = "fedprox", mu = -2 }]
        baseline = "moon"
        grid = { "partition.alpha" = [0.1, -1.0] }
        [[compare.paper]]
        algorithm = "fedalr"
        where = { partition = "c=2" }
        value = 1
        """
    )
    done = fedloom("compare", "c.toml", cwd=tmp_path)
    assert done.code == 2
    for words in (
        r"seed: is set by compare.seeds",
        r"local\.lr: .*greater than.*-1",
        r"no algorithm 'fedproxx'.*fedproxx.*did you mean 'fedprox'",
        r"algorithm\.mu: .*\[in fedprox",
        r"compare\.baseline: 'moon' is not one",
        r"partition\.alpha: .*-1\.0.*\[in .*fedavg · -1\.0",
        r"compare\.paper\.0\.algorithm: there is no method 'fedalr'",
        r"compare\.paper\.0\.where\.partition: is not an axis",
    ):
        assert re.search(words, done.err), (words, done.err)
    assert files(tmp_path) == {"c.toml"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"algorithms": []}, "compare.algorithms"),
        ({"algorithms": ["fedavg", "fedavg"]}, "'fedavg' is there twice"),
        ({"seeds": 0}, "compare.seeds"),
        ({"seeds": [1, 1]}, "a seed is there twice"),
        ({"grid": {"seed": [1, 2]}}, "cannot be an axis"),
        ({"grid": {"rounds": []}}, "has no values"),
        ({"grid": {"rounds": [1, 1]}}, "same label"),
        ({"grid": {"algorithm.muu": [1]}}, "no method has this setting"),
        ({"best": 1}, "compare.best: unknown key"),
    ],
)
def test_faults_of_the_compare_table(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        compare.plan(table(**settings))


def test_a_folder_with_anything_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match="not of a comparison"):
        compare.run(table(), tmp_path)
    assert files(tmp_path) == {"mine"}


def test_missing_data_is_told_once_and_nothing_written(tmp_path: Path) -> None:
    done = fedloom("compare", "fedavg", "fedprox", "data=cifar10", "--data-root", "none", cwd=tmp_path)
    assert done.code == 2
    assert done.err.count("fedloom data get cifar10") == 1
    assert files(tmp_path) == set()


def test_a_diverged_cell_does_not_stop_the_others(tmp_path: Path) -> None:
    wild = {"kind": "fedopt", "label": "wild", "lr": 1e38}
    for _ in range(2):
        done = compare.run(table(algorithms=["fedavg", wild], seeds=2), tmp_path / "c", jobs=1)
        assert [r.state for r in done.results] == ["done", "diverged"] * 2
        assert done.rows[1].diverged == 2
        assert not done.failures
        assert "| wild | diverged | diverged | diverged | - | - | - |" in (tmp_path / "c" / "table.md").read_text()


# -- plans -----------------------------------------------------------------------------------------
def test_shared_settings_go_to_the_methods_that_know_them() -> None:
    given = table(algorithms=["fedavg", "fedprox", "dpsgd"], seeds=1) | {"algorithm": {"mu": 0.5}}
    configs = {c.method.label: c.config for c in compare.plan(given).cells}
    assert getattr(configs["fedprox"].algorithm, "mu", None) == 0.5
    assert configs["dpsgd"].topology is not None
    assert configs["fedavg"].cohort.size == 3


def test_labels_grids_and_nested_keys() -> None:
    shards = {"kind": "shards", "clients": 10, "label": "c=2"}
    spec = table(
        algorithms=["fedavg", {"kind": "fedprox", "mu": 0.1}, {"kind": "fedprox", "mu": 1.0, "label": "strong"}],
        seeds=[7],
        grid={"partition": [shards, "iid"], "local": {"lr": [0.1, 0.2]}},
    )
    planned = compare.plan(spec)
    assert [m.label for m in planned.methods] == ["fedavg", "fedprox (mu=0.1)", "strong"]
    assert planned.places == (("c=2", "0.1"), ("c=2", "0.2"), ("iid", "0.1"), ("iid", "0.2"))
    assert [c.config.local.lr for c in planned.cells[:4]] == [0.1, 0.1, 0.1, 0.2]
    assert {c.seed for c in planned.cells} == {7}
    again = compare.plan(tomllib.loads(planned.as_toml()))
    assert [c.hash for c in again.cells] == [c.hash for c in planned.cells]
    assert again.as_toml() == planned.as_toml()


# -- statistics ------------------------------------------------------------------------------------
def result(method: str, seed: int, values: list[float], state: str = "done", **more: float) -> Result:
    lines = [
        {"round": i, "global/test/accuracy": v, "bytes/up": 10 * i, "bytes/down": 30 * i}
        | {k.replace("_", "/"): x * i for k, x in more.items()}
        for i, v in enumerate(values)
    ]
    return Result((), method, method, seed, "", state, lines, "")


def question(methods: tuple[str, ...], seeds: int, **more: Any) -> Question:
    metrics = dict.fromkeys(methods, "global/test/accuracy")
    plain = Question((), ((),), methods, tuple(range(seeds)), methods[0], metrics, None, {})
    return plain._replace(**more)


def test_statistics_by_hand() -> None:
    base = [[0.0, *[0.5] * 9, 0.7], [0.0, *[0.5] * 9, 0.8], [0.0, *[0.6] * 9, 0.6]]
    ours = [[0.0, *[0.7] * 9, 0.6], [0.0, *[0.8] * 9, 0.8], [0.0, *[0.9] * 9, 0.7]]
    results = [result("a", s, v) for s, v in enumerate(base)] + [
        result("b", s, v, time_simulated=2.0) for s, v in enumerate(ours)
    ]
    a, b = report.rows(question(("a", "b"), 3, target=0.7), results)
    assert a.last is not None
    assert a.last.mean == pytest.approx(0.7)
    assert a.last.std == pytest.approx(0.1)
    assert b.best == pytest.approx((0.8, 0.1))
    tails = [[0.52, 0.53, 0.6], [0.69, 0.8, 0.88]]
    assert a.tail == pytest.approx((np.mean(tails[0]), np.std(tails[0], ddof=1)))
    assert (a.rank, b.rank) == (2, 1)
    assert b.difference == pytest.approx((np.mean([0.17, 0.27, 0.28]), np.std([0.17, 0.27, 0.28], ddof=1)))
    assert b.p == pytest.approx(stats.ttest_rel(tails[1], tails[0]).pvalue)
    t = np.mean([0.17, 0.27, 0.28]) / (np.std([0.17, 0.27, 0.28], ddof=1) / math.sqrt(3))
    assert b.p == pytest.approx(2 * stats.t.sf(t, 2))
    assert a.p is None
    assert a.rounds == report.Reached(report.Mean(10.0, 0.0), 2)  # one seed never reaches it
    assert b.rounds == report.Reached(report.Mean(1.0, 0.0), 3)
    assert b.bytes == report.Reached(report.Mean(40.0, 0.0), 3)
    assert b.seconds == report.Reached(report.Mean(2.0, 0.0), 3)
    assert a.seconds is None


def test_few_seeds_and_ties() -> None:
    assert report.paired_p([0.5], [0.4]) is None
    assert report.paired_p([0.5, 0.6], [0.5, 0.6]) == 1.0
    one = report.rows(question(("a", "b"), 1), [result("a", 0, [0.5]), result("b", 0, [0.5])])
    assert [r.rank for r in one] == [1, 1]
    assert one[0].last == (0.5, None)
    assert "one seed gives none" in " ".join(report.notes(question(("a", "b"), 1), one))
    assert "says little" in " ".join(report.notes(question(("a", "b"), 3), one))


def test_a_method_that_lost_a_seed_is_not_ranked() -> None:
    results = [result("a", 0, [0.5]), result("a", 1, [0.6]), result("b", 0, [0.9]), result("b", 1, [0.2], "diverged")]
    asked = question(("a", "b"), 2)
    _, b = rows = report.rows(asked, results)
    assert (b.rank, b.seeds, b.diverged, b.p) == (None, 1, 1, None)
    assert report.sections(asked, rows)[0].lines[1][1] == "90.00 (1 diverged)"


def test_a_loss_ranks_the_other_way() -> None:
    name = "global/test/loss"
    results = [
        Result((), m, m, 0, "", "done", [{"round": i, name: v} for i, v in enumerate(values)], "")
        for m, values in (("a", [3.0, 1.0, 2.0]), ("b", [3.0, 0.5, 0.4]))
    ]
    asked = question(("a", "b"), 1, metrics=dict.fromkeys("ab", name), target=1.0)
    a, b = report.rows(asked, results)
    assert (a.rank, b.rank) == (2, 1)
    assert a.best == (1.0, None)
    assert a.rounds == ((1.0, None), 1)


def test_the_metric_is_the_first_accuracy_of_all() -> None:
    def run(method: str, *names: str) -> Result:
        return Result((), method, method, 0, "", "done", [{"round": 0, **dict.fromkeys(names, 0.5)}], "")

    runs = [run("a", "global/test/accuracy", "personal/test/accuracy"), run("b", "personal/test/accuracy")]
    assert set(report.choose_metrics("", "ab", runs).values()) == {"personal/test/accuracy"}
    apart = [run("a", "global/test/accuracy"), run("b", "personal/test/accuracy")]
    assert report.choose_metrics("", "ab", apart) == {"a": "global/test/accuracy", "b": "personal/test/accuracy"}
    assert report.choose_metrics("x", "ab", apart) == {"a": "x", "b": "x"}


# -- which metrics there can be --------------------------------------------------------------------
EVERYTHING = {
    "train": True,
    "participants": True,
    "auc": ["micro_logits", "macro_present"],
    "diagnostics": ["updates", "gamma", "dissimilarity", "rho"],
}


@pytest.mark.parametrize("kind", sorted(entry.name for entry in catalogue.entries("algorithms")))
@pytest.mark.parametrize("evaluate", [{}, EVERYTHING], ids=["plain", "everything"])
def test_every_metric_of_a_run_was_foreseen(kind: str, evaluate: dict[str, Any]) -> None:
    given = {"rounds": 2, "partition": {"clients": 4}, "model": "mlp", "algorithm": kind}
    if not parse(given).algorithm.common or kind == "local_only":  # diagnostics are about a common model
        evaluate = {key: value for key, value in evaluate.items() if key != "diagnostics"}
    if not parse(given).algorithm.waits:  # who waits for nobody has no round of clients to look at
        evaluate = {key: value for key, value in evaluate.items() if key not in ("diagnostics", "participants")}
    config = parse(given | {"evaluate": evaluate})
    history = start(config, out=None, root=Path("unused"))
    recorded = {name for line in history.records for name in line} - {"round", "excluded"}
    foreseen = compare.metric_names(config)
    told = {
        name for name in recorded - foreseen if compare._tells(config) and name.split("/")[0] not in compare._JUDGED
    }
    assert recorded - told <= foreseen
    if not evaluate:
        rare = {f"personal/{config.algorithm.served}/test/diverged", "network/offline", "network/away", "network/dead"}
        assert foreseen - recorded <= rare


@pytest.mark.parametrize(
    ("metric", "more", "says"),
    [
        ("global/test/acuracy", {}, "no method records 'global/test/acuracy' (did you mean 'global/test/accuracy'?)"),
        ("consensus/test/accuracy", {}, "no method records"),
        ("personal/post_fit/test/accuracy", {}, "did you mean 'personal/pre_fit/test/accuracy'"),
        ("personal/*/test/acuracy", {}, "no method records"),
        ("global/train/loss", {}, "it takes evaluate.train=true"),
        ("personal/pre_fit/test/loss", {"evaluate": {"personal": False}}, "it takes evaluate.personal=true"),
        ("personal/pre_fit/test/loss", {"partition": {"kind": "iid", "holdout": 0.0}}, "no method records"),
        ("participants/post_fit/test/accuracy_std", {}, "it takes evaluate.participants=true"),
        ("global/test/auc_micro_softmax", {}, 'it takes evaluate.auc=["micro_softmax"]'),
        ("gamma/max", {}, 'it takes evaluate.diagnostics=["gamma"]'),
        ("fedalr/eta_mean", {"evaluate": {"diagnostics": ["updates"]}}, "no method records"),
    ],
)
def test_a_metric_that_no_method_can_record_is_refused_before_any_runs(
    metric: str, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        compare.plan(table(metric=metric) | more)


@pytest.mark.parametrize(
    ("metric", "algorithms", "more"),
    [
        ("global/test/loss", ["fedavg", "local_only"], {}),
        ("consensus/distance", ["fedavg", "dpsgd"], {}),
        ("nodes/test/accuracy", ["dpsgd"], {}),
        ("personal/pre_fit/test/accuracy_worst10", ["fedavg"], {}),
        ("personal/*/test/accuracy", ["fedavg", "local_only"], {}),
        ("personal/pre_fit/test/accuracy", ["fedavg"], {"partition": {"kind": "natural", "holdout": 0.0}}),
        ("bytes/up", ["fedavg"], {}),
        ("theory/rho", ["fedprox"], {"evaluate": {"diagnostics": ["rho"]}}),
        ("fedalr/eta_mean", ["fedalr"], {"evaluate": {"diagnostics": ["updates"]}}),  # only a run can tell
    ],
)
def test_a_metric_that_some_method_may_record_is_taken(
    metric: str, algorithms: list[str], more: dict[str, Any]
) -> None:
    assert compare.plan(table(metric=metric, algorithms=algorithms) | more).spec.metric == metric


def test_a_mistyped_metric_costs_nothing(tmp_path: Path) -> None:
    done = fedloom("compare", "fedavg", "--metric", "global/test/acuracy", "--out", "c", cwd=tmp_path)
    assert done.code == 2
    assert "compare.metric: no method records 'global/test/acuracy' (did you mean 'global/test/accuracy'?)" in done.err
    assert files(tmp_path) == set()


# -- one folder, one comparison --------------------------------------------------------------------
@pytest.fixture
def kept(whole: Path, tmp_path: Path) -> Path:
    """A finished comparison that may be spoilt."""
    shutil.copytree(whole, tmp_path / "kept")
    return tmp_path / "kept"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (table(grid=GRID, seeds=1), "6 of its 12 cells are not in this one"),
        (table(grid=GRID, algorithms=["fedavg"]), "8 of its 12 cells"),
        (table(grid={"partition.alpha": [0.1, 2.0]}), "6 of its 12 cells"),
        (table(grid=GRID) | {"rounds": 4}, "12 of its 12 cells are not in this one; rounds is 3 there and 4 here"),
        (table(grid=GRID) | {"local": {"lr": 0.3}}, "local.lr is unset there and 0.3 here"),
    ],
)
def test_another_comparison_in_the_folder_of_one_is_refused(kept: Path, other: dict[str, Any], says: str) -> None:
    before, inside = contents(kept), files(kept)
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        compare.run(other, kept)
    words = f"--out: {kept} holds another comparison, of fedavg, fedprox, fedopt with seeds 0, 1"
    assert words in str(caught.value)
    assert "choose another folder" in str(caught.value)
    assert contents(kept) == before
    assert files(kept) == inside


def test_the_command_refuses_it_too(kept: Path) -> None:
    before = contents(kept)
    done = fedloom("compare", "fedavg", "fedprox", "--seeds", "1", "--out", "kept", cwd=kept.parent)
    assert done.code == 2
    assert "kept holds another comparison" in done.err
    assert contents(kept) == before


def test_a_comparison_that_cannot_be_read_is_not_replaced(kept: Path) -> None:
    (kept / "compare.toml").write_text("compare = 3\n")
    with pytest.raises(ConfigError, match="can no longer be read"):
        compare.run(table(grid=GRID), kept)


def test_another_question_to_the_same_cells_is_answered(kept: Path) -> None:
    times = {p: p.stat().st_mtime_ns for p in (kept / "cells").rglob("*")}
    done = compare.run(table(grid=GRID, metric="global/test/loss", baseline="fedopt"), kept)
    assert {row.metric for row in done.rows} == {"global/test/loss"}
    assert {p: p.stat().st_mtime_ns for p in (kept / "cells").rglob("*")} == times


# -- cells that comparisons share ------------------------------------------------------------------
def test_comparisons_that_share_their_cells_compute_them_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    first = compare.run(table(cells="runs/mine", metric="global/test/loss"), "runs/loss", jobs=1)
    times = {p: p.stat().st_mtime_ns for p in Path("runs/mine").rglob("*") if p.is_file() and p.name != ".lock"}
    second = compare.run(table(cells="runs/mine", algorithms=["fedopt", "fedavg"]), "runs/accuracy", jobs=1)
    assert {p: p.stat().st_mtime_ns for p in times} == times
    assert len({p.parts[2] for p in times}) == 6
    assert [(row.metric, row.seeds) for row in second.rows] == [("global/test/accuracy", 2)] * 2
    assert first.cells == second.cells == Path("runs/mine")
    for folder in ("runs/loss", "runs/accuracy"):
        assert not Path(folder, "cells").exists()
        for line in csv.DictReader(io.StringIO(Path(folder, "cells.csv").read_text())):
            assert Path(folder, line["folder"], "metrics.jsonl").is_file()
        again = tomllib.loads(Path(folder, "compare.toml").read_text())
        assert again["compare"]["cells"] == "runs/mine"


def test_shared_cells_are_used_by_one_comparison_at_a_time(tmp_path: Path) -> None:
    shared = tmp_path / "cells"
    with (
        compare._alone(shared, "compare.cells"),
        pytest.raises(ConfigError, match=f"compare.cells: another process is using {shared}"),
    ):
        compare.run(table(cells=str(shared)), tmp_path / "c")


# -- how many at a time ----------------------------------------------------------------------------
def of(**sections: Any) -> float:
    return compare.memory_of(parse(sections))


def test_memory_of_a_cell_by_hand(tmp_path: Path) -> None:
    base, floats = 0.6e9, 4
    wide = {"kind": "mlp", "widths": [512, 256]}
    parameters = 64 * 512 + 512 + 512 * 256 + 256 + 256 * 10 + 10
    assert of(model=wide) == base + 1797 * 64 + 10 * 6 * floats * parameters
    assert of(model=wide, cohort={"size": 4}) == base + 1797 * 64 + 4 * 6 * floats * parameters
    assert of(model=wide, engine={"lanes": 3}) == base + 1797 * 64 + 3 * 6 * floats * parameters
    stateful = of(model=wide, algorithm="scaffold")
    assert stateful == base + 1797 * 64 + 10 * 6 * 2 * floats * parameters + 20 * floats * parameters
    assert of(model=wide, algorithm="scaffold", engine={"store": "disk"}) == stateful - 20 * floats * parameters
    network = of(model=wide, algorithm="dfedavg")
    assert network == base + 1797 * 64 + 20 * (6 + 3) * floats * parameters
    assert of(model=wide, algorithm="dfedavg", engine={"store": "disk"}) == network - 20 * 3 * floats * parameters
    pixels = 60_000 * 3072
    assert of(data="cifar10", model="logistic") == base + pixels + 10 * 6 * floats * 30_730
    rows = {"source": "synthetic", "devices": 30}
    natural = {"kind": "natural", "holdout": 0.0}
    assert of(data=rows, partition=natural, model="logistic") == base + 30 * 450 * 240 + 10 * 6 * floats * 610


def test_models_side_by_side_never_take_more_than_the_rule_for_lanes_allows() -> None:
    many = {"clients": 1000}
    most = of(model={"kind": "mlp", "widths": [2000, 2000]}, partition=many, cohort={"size": 1000})
    assert 0.9 * compare._MOST < most - 0.6e9 < 1.1 * compare._MOST


def test_memory_of_files_and_of_what_cannot_be_told(tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, x=np.zeros((100, 5), np.float32), y=np.arange(100) % 2)
    assert of(data=str(path)) == 0.6e9 + 4 * path.stat().st_size + 1.6e9
    own = tmp_path / "breaks.py"
    own.write_text(
        "from fedloom.algorithms.fedavg import FedAvg\n\n\n"
        "class Breaks(FedAvg):\n    def init(self, w):\n        raise ValueError\n"
    )
    usercode.vouch(str(own))
    assert of(algorithm=str(own)) == 0.6e9 + 1797 * 64 + 1.6e9


def test_jobs_follow_cores_threads_and_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    small = parse({"model": "logistic", "engine": {"device": "cpu"}})
    for free, jobs in ((100e9, 8), (3.1e9, 5), (0.1e9, 1), (float("inf"), 8)):
        monkeypatch.setattr(compare, "_free_memory", lambda free=free: free)
        assert compare.default_jobs([small]) == jobs
    threads = parse({"model": "logistic", "engine": {"device": "cpu", "threads": 3}})
    assert compare.default_jobs([small, threads]) == 2
    large = parse({"model": {"kind": "mlp", "widths": [4000, 4000]}, "engine": {"device": "cpu"}})
    monkeypatch.setattr(compare, "_free_memory", lambda: 5e9)
    assert compare.default_jobs([small, large]) == 2


# -- tables ----------------------------------------------------------------------------------------
def test_tables_agree_with_each_other(whole: Path) -> None:
    lines = list(csv.DictReader(io.StringIO((whole / "table.csv").read_text())))
    assert [(x["partition.alpha"], x["algorithm"]) for x in lines] == [(a, m) for a in ("0.1", "1.0") for m in THREE]
    cells = list(csv.DictReader(io.StringIO((whole / "cells.csv").read_text())))
    for line in lines:
        own = [c for c in cells if all(c[k] == line[k] for k in ("partition.alpha", "algorithm"))]
        for name in ("last", "best", "mean_last_10"):
            values = [float(c[name]) for c in own]
            assert float(line[name]) == pytest.approx(np.mean(values))
            assert float(line[f"{name}_std"]) == pytest.approx(np.std(values, ddof=1))
    words = [
        [w.strip().strip("*") for w in x.strip("|").split("|")]
        for x in (whole / "table.md").read_text().splitlines()
        if x.startswith("|") and "--:" not in x
    ]
    assert len({len(w) for w in words}) == 1
    shown = [w for w in words if w[0] != "algorithm"]
    assert [w[0] for w in shown] == THREE * 2
    for line, w in zip(lines, shown, strict=True):
        assert w[1] == f"{100 * float(line['last']):.2f} ± {100 * float(line['last_std']):.2f}"
    tex = (whole / "table.tex").read_text()
    body = [x for x in tex.splitlines() if x.endswith("\\\\") and "multicolumn" not in x]
    assert len(body) == 7
    assert len({len(re.findall(r"(?<!\\)&", x)) for x in body}) == 1
    assert all(re.search(r"\$\\pm\$", x) for x in body[1:])


def test_the_papers_value_is_shown_where_it_belongs(whole: Path) -> None:
    lines = list(csv.DictReader(io.StringIO((whole / "table.csv").read_text())))
    papers = {(x["partition.alpha"], x["algorithm"]): x["paper"] for x in lines if x["paper"]}
    assert papers == {("0.1", "fedopt"): "0.7215"}
    text = (whole / "table.md").read_text()
    assert "paper (%)" in text
    assert text.count("72.15") == 1


@pytest.mark.parametrize(
    ("costs", "shown"),
    [
        ([{"work_gradients": 5}, {"work_gradients": 5}], []),
        ([{"work_gradients": 5}, {"work_gradients": 15}], [["2", "10", "2.00"], ["2", "30", "2.00"]]),
        ([{"work_gradients": 5}, {"bytes_up": 2e6, "work_gradients": 5}], [["2", "10", "2.00"], ["2", "10", "4.00"]]),
    ],
    ids=["equal", "gradients", "bytes"],
)
def test_what_methods_took_is_shown_where_it_differs(costs: list[dict[str, float]], shown: list[list[str]]) -> None:
    """After two rounds; what they may spend is not limited, but rounds alone would not compare them."""
    fixed = {"bytes_up": 1e6, "bytes_down": 0.0}
    runs = [result(m, 0, [0.1, 0.5, 0.6], **(fixed | cost)) for m, cost in zip("ab", costs, strict=True)]
    asked = question(("a", "b"), 1)
    (section,) = report.sections(asked, report.rows(asked, runs))
    where = [section.header.index(name) for name in ("rounds", "gradients", "MB") if name in section.header]
    assert [[line[i] for i in where] for line in section.lines] == (shown or [[], []])


def test_a_method_that_did_not_finish_took_nothing_that_could_differ() -> None:
    runs = [result("a", 0, [0.1, 0.5], work_gradients=5), result("b", 0, [0.1], "diverged", work_gradients=9)]
    asked = question(("a", "b"), 1)
    assert "gradients" not in report.sections(asked, report.rows(asked, runs))[0].header


def test_the_end_of_a_curve_is_labelled_as_in_the_table() -> None:
    """With the mean of the last ten, and without the model that nobody has trained yet."""
    runs = [result("a", 0, [0.1, 0.5, 0.7]), result("b", 0, [0.1, *[0.4] * 5, *[0.8] * 10]), result("c", 0, [0.3])]
    asked = question(("a", "b", "c"), 1)
    axes = Figure().subplots()
    report.panel(asked, (), runs, axes)
    tails = [row.tail.mean for row in report.rows(asked, runs) if row.tail is not None]
    assert tails == pytest.approx([0.6, 0.8, 0.3])
    assert {text.get_text() for text in axes.texts} == {"60.0", "80.0", "30.0"}
    late = runs[0]._replace(records=runs[0].records[1:])  # a metric that there is from the first round on
    axes = Figure().subplots()
    report.panel(question(("a",), 1), (), [late], axes)
    assert [text.get_text() for text in axes.texts] == ["60.0"]


def test_the_gain_over_the_best_of_the_others_is_a_row_of_every_table() -> None:
    runs = [result(m, s, [0.1, v, v - 0.02]) for m, v in (("a", 0.5), ("b", 0.62), ("c", 0.7)) for s in (0, 1)]
    paper = {((), "a"): 0.6391, ((), "c"): 0.7215}
    asked = question(("a", "b", "c"), 2, gain=report.Versus("c", ("a", "b")), paper=paper)
    table = report.rows(asked, runs)
    (section,) = report.sections(asked, table)
    line = dict(zip(section.header, section.lines[-1], strict=True))
    assert len(section.lines) == 4
    assert line["algorithm"] == "gain of c"
    assert (line["last (%)"], line["best (%)"]) == (
        f"{100 * (0.68 / 0.6 - 1):+.2f}%",
        f"{100 * (0.7 / 0.62 - 1):+.2f}%",
    )
    assert (line["paper (%)"], line["p"], line["rank"]) == ("+12.89%", "", "")
    assert "| gain of c | +13.33% | +12.90% |" in report.markdown(asked, table)
    assert "gain of c & +13.33\\% & +12.90\\% &" in report.latex(asked, table)
    last = list(csv.DictReader(io.StringIO(report.table_csv(asked, table))))[-1]
    assert (last["algorithm"], float(last["last"]), last["rank"]) == ("gain of c", pytest.approx(0.68 / 0.6 - 1), "")
    assert float(last["paper"]) == pytest.approx(0.7215 / 0.6391 - 1)
    assert "gain of c: relative to the best of a, b in the same column." in report.notes(asked, table)


def test_a_gain_is_of_whole_methods_and_for_a_loss_of_less() -> None:
    runs = [result("a", 0, [0.1, 0.5]), result("b", 0, [0.1], "diverged"), result("c", 0, [0.1, 0.6])]
    asked = question(("a", "b", "c"), 1, gain=report.Versus("c", ("a", "b")))
    (found,) = report.gains(asked, report.rows(asked, runs))
    assert found.last == pytest.approx(0.2)
    (nothing,) = report.gains(asked._replace(gain=report.Versus("b", ("a", "c"))), report.rows(asked, runs))
    assert nothing[1:] == (None, None, None, None)
    assert report.relative_gain("global/test/loss", 0.5, [2.0, 1.0]) == 0.5
    assert report.relative_gain("global/test/accuracy", 0.5, []) is None
    assert report.relative_gain("global/test/accuracy", 0.5, [0.0]) is None


def test_gains_in_a_file_and_in_json(tmp_path: Path) -> None:
    methods = [
        {"kind": "fedavg"},
        {"kind": "fedopt", "rule": "sgd"},
        {"kind": "fedavg", "server_lr": 0.5, "label": "half"},
    ]
    planned = compare.plan(table(algorithms=methods, gain="half", seeds=[0], baseline="fedopt"))
    assert compare._versus(planned.spec.gain, planned.methods) == (
        "half",
        ("fedopt",),
    )  # no variant of its own
    assert tomllib.loads(planned.as_toml())["compare"]["gain"] == {"of": "half"}
    for gain, said in (
        ("halve", "compare.gain.of: 'halve' is not one of the methods (did you mean 'half'?)"),
        ({"of": "half", "over": ["fedprox"]}, "compare.gain.over: 'fedprox' is not one of the methods"),
        ({"of": "half", "over": ["half"]}, "compare.gain: needs another method than 'half' to be better than"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            compare.plan(table(algorithms=methods, gain=gain))


def test_latex_escapes_what_it_must() -> None:
    label = "50% & a_b #1 ~ {x}"
    asked = question((label,), 1)
    tex = report.latex(asked, report.rows(asked, [result(label, 0, [0.5])]))
    assert "50\\% \\& a\\_b \\#1 \\textasciitilde{} \\{x\\}" in tex


def test_a_narrow_terminal_gets_fewer_columns(whole: Path) -> None:
    section = report.Section("", ["algorithm", "last", "best", "mean", "rank"], [["a", *["x" * 10] * 3, "1"]], 0)
    assert report.narrowed(section, 200) == section
    assert report.narrowed(section, 45).header == ["algorithm", "last", "mean", "rank"]


def test_many_panels_and_many_methods_can_be_drawn(tmp_path: Path) -> None:
    methods = tuple(f"m{i}" for i in range(12))
    places = tuple((str(i),) for i in range(8))
    runs = [result(m, s, [0.1, 0.5, 0.6])._replace(place=p) for m in methods for s in (0, 1) for p in places]
    asked = question(methods, 2, axes=("local.lr",), places=places)
    for name in ("a.png", "a.svg"):
        report.draw(asked, runs, tmp_path / name)
        first = (tmp_path / name).read_bytes()
        report.draw(asked, runs, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first


# -- equal terms -----------------------------------------------------------------------------------
FOUR = ["fedavg", "dfedavg", "dfedsam", "dfedgam"]
EIGHT = ("partition.clients=8", "cohort.size=4", "model.kind=logistic", "local.steps=5", "evaluate.every=2")


def test_equal_gradients_through_the_command(tmp_path: Path) -> None:
    """FedAvg calls 4 clients and takes one gradient in a step; networks train all 8 with one, two and three."""
    words = ("compare", *FOUR, "--seeds", "1", "--equal", "gradients", "--reference", "dfedgam", "rounds=2", *EIGHT)
    schedule = ("local.schedule=exponential", "local.decay=0.9")
    done = fedloom(*words, *schedule, "--metric", "*/test/accuracy", "--json", "--out", "c", cwd=tmp_path)
    assert done.code == 0, done.err
    rows = {row["algorithm"]: row for row in done.json["table"]}
    assert {m: row["rounds_spent"] for m, row in rows.items()} == dict(zip(FOUR, (12, 6, 3, 2), strict=True))
    assert {row["gradients_spent"] for row in rows.values()} == {240.0}
    assert done.json["equal"] == "gradients"
    assert done.json["budgets"] == {"all": 240.0}
    cells = list(csv.DictReader(io.StringIO((tmp_path / "c" / "cells.csv").read_text())))
    assert {cell["gradients"] for cell in cells} == {"240.0"}
    for cell in cells:
        config = tomllib.loads((tmp_path / "c" / cell["folder"] / "config.toml").read_text())
        share = 2 / config["rounds"]
        assert config["local"]["decay"] == pytest.approx(0.9**share)
        assert config["evaluate"]["every"] == max(1, round(2 / share))
    text = (tmp_path / "c" / "table.md").read_text()
    assert "as many rounds as 240 gradients of a batch allow" in text
    assert "| rounds | gradients | MB |" in text
    again = fedloom(*words, *schedule, "--metric", "*/test/accuracy", "--out", "c", cwd=tmp_path)
    assert "4 of 4 cells are done already" in again.out
    assert "gradients of a batch" in (tmp_path / "c" / "curves.svg").read_text()


@pytest.mark.parametrize(("equal", "spent"), [("bytes", "bytes_spent"), ("busiest", "busiest_spent")])
def test_equal_bytes_through_the_command(equal: str, spent: str, tmp_path: Path) -> None:
    words = ("compare", "fedavg", "dfedavg", "local_only", "--seeds", "1", "--equal", equal, "rounds=8", *EIGHT)
    done = fedloom(*words, "--json", "--out", "c", cwd=tmp_path)
    assert done.code == 0, done.err
    server, ring, alone = done.json["table"]
    # A ring of 8 sends 16 models in a round, 4 of which pass every node; a server sends and receives 8.
    assert (server["rounds_spent"], alone["rounds_spent"], alone[spent]) == (8, 8, 0)
    assert ring["rounds_spent"] == (4 if equal == "bytes" else 16)
    assert ring[spent] == server[spent] == 8 * 4 * 2 * 4 * 650
    assert any("local_only takes none of it" in note for note in done.json["notes"])


def test_a_budget_of_ones_own(tmp_path: Path) -> None:
    terms = {"equal": "gradients", "budget": 100.0, "algorithms": ["fedavg", "dfedavg", "dfedgam"], "seeds": 1}
    base = SMALL | {"local": {"steps": 5}, "compare": terms}
    planned = compare.equalised(compare.plan(base), tmp_path)
    assert [cell.config.basics.rounds for cell in planned.cells] == [6, 3, 1]  # of 15, 30 and 90 in a round
    done = compare.run(base, tmp_path / "c", jobs=1)
    notes = " ".join(report.notes(done.question, done.rows))
    assert "Equal gradients: each method trains for as many rounds as 100 gradients" in notes
    assert "fedavg came to 90% of that" in notes
    unequal = compare.plan(SMALL | {"compare": {"algorithms": THREE}})
    assert compare.equalised(unequal, tmp_path) is unequal


@pytest.mark.parametrize(
    ("terms", "says"),
    [
        ({"budget": 5.0}, "compare.budget: methods have equal rounds (got 5.0)"),
        ({"equal": "bytes", "budget": 5.0, "reference": "fedavg"}, "keep one of them"),
        ({"equal": "bytes", "reference": "fedagv"}, "'fedagv' is not one of the methods (did you mean 'fedavg'?)"),
        ({"equal": "time"}, "compare.equal"),
        (
            {"equal": "bytes", "algorithms": ["fedavg", {"kind": "fedprox", "with": {"rounds": 9}}]},
            "how many it has follows from compare.equal = 'bytes' [in fedprox]",
        ),
    ],
)
def test_terms_that_contradict_each_other_are_refused(terms: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        compare.plan(table(**terms))


def test_a_reference_that_spends_nothing_is_no_reference(tmp_path: Path) -> None:
    planned = compare.plan(table(algorithms=["local_only", "fedavg"], equal="bytes"))
    with pytest.raises(ConfigError, match="local_only spends no bytes"):
        compare.equalised(planned, tmp_path)


# -- the command -----------------------------------------------------------------------------------
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


def test_what_the_grid_overrides_and_who_is_not_paired_is_said() -> None:
    planned = compare.plan(
        {
            "partition": {"clients": 5},
            "compare": {
                "algorithms": ["fedavg", {"kind": "fedprox", "preset": "paper"}],
                "grid": {"partition": [{"kind": "iid", "clients": 10}, {"kind": "iid", "clients": 12}]},
            },
        }
    )
    assert any("partition.clients = 5 is in no cell" in note for note in planned.notes)
    assert any("fedprox draws other clients than fedavg" in note for note in planned.notes)


def test_policies_that_differ_by_definition_are_told() -> None:
    """FedALA's clients keep their optimisers' memory, others do not: with Adam that is half of a difference."""
    table = {"compare": {"algorithms": ["fedavg", "fedala"], "seeds": 1}, "local": {"optimizer": "adam"}}
    said = "local.state differs by the methods' own definitions: reset for fedavg; persist for fedala"
    assert any(said in note for note in compare.plan(table).notes)
    for state in ("reset", "persist"):
        agreed = {**table, "local": {"optimizer": "adam", "state": state}}
        assert not any("own definitions" in note for note in compare.plan(agreed).notes)
    meant = {"kind": "fedala", "with": {"local.state": "persist"}}
    told = compare.plan({**table, "compare": {"algorithms": ["fedavg", meant], "seeds": 1}}).notes
    assert not any("own definitions" in note for note in told)
    plain = {**table, "local": {"optimizer": "sgd"}}  # which has no memory to keep
    assert not any("own definitions" in note for note in compare.plan(plain).notes)


def test_what_comes_with_a_method_stays_with_it() -> None:
    """Also where the grid sets the whole section that it is in."""
    planned = compare.plan(
        {
            "rounds": 1,
            "compare": {
                "algorithms": ["fedavg", {"kind": "fedprox", "with": {"local.momentum": 0.9}}, "fedsam"],
                "seeds": [0, 1],
                "grid": {"local": [{"lr": 0.1}, {"lr": 0.2}]},
            },
        }
    )
    momentum = {(cell.method.kind, cell.config.local.momentum) for cell in planned.cells}
    assert momentum == {("fedavg", 0.0), ("fedprox", 0.9), ("fedsam", 0.0)}


def test_the_number_of_clients_can_be_an_axis() -> None:
    """With what goes with each number, under whatever else the section partition says."""
    planned = compare.plan(
        {
            "rounds": 1,
            "partition": {"kind": "iid", "holdout": 0.0},
            "compare": {
                "algorithms": ["fedavg"],
                "seeds": [0],
                "grid": {"partition.clients": [4, {"value": 8, "label": "eight", "with": {"cohort.size": 2}}]},
            },
        }
    )
    found = {cell.place: (cell.config.partition.clients, cell.config.cohort.size) for cell in planned.cells}
    assert found == {("4",): (4, None), ("eight",): (8, 2)}
    assert all(cell.config.partition.holdout == 0 for cell in planned.cells)


# -- privacy ---------------------------------------------------------------------------------------
def private(seed: int, method: str = "a", *, data: str = "d", partition: str = "p", **more: Any) -> Result:
    spent = report.Spent(data, "client", "add_or_remove_one", 2.0, 1e-5)._replace(**more)
    return Result((), method, method, seed, f"{method}{seed}{data}", "done", [], partition, spent)


def test_what_cells_on_the_same_data_tell_adds_up() -> None:
    assert report.composed([private(0)._replace(spent=None)]) == []
    assert report.composed([private(0)]) == [
        "epsilon: a (seed 0) 2 at delta 1e-05, for each client (add or remove one)."
    ]
    same = [private(0), private(0, "b", epsilon=3.5), private(0)]  # of which the last is the first
    assert report.composed(same) == [
        "epsilon: a (seed 0) 2, b (seed 0) 3.5; 2 cells on the same data add up to epsilon 5.5 at delta 2e-05, "
        "for each client (add or remove one)."
    ]
    assert len(report.composed([private(0), private(0, data="e")])) == 2
    other = report.composed([private(0), private(1, partition="q")])
    assert len(other) == 3
    assert "of an example, they all tell something" in other[-1]
    assert "epsilon inf" in report.composed([private(0), private(0, "b", epsilon=math.inf)])[0]
    assert report.composed([private(0, warning="simulated")])[0].endswith("(add or remove one) (simulated).")


def test_every_cell_has_its_own_noise_and_all_are_composed(tmp_path: Path) -> None:
    settings = SMALL | {"rounds": 2, "privacy": {"clip": 1.0, "noise": 1.0}, "cohort": {"sampling": "all"}}
    methods = [{"kind": "fedavg", "weighting": "uniform"}, {"kind": "fedprox", "weighting": "uniform"}]
    done = compare.run({**settings, "compare": {"algorithms": methods, "seeds": [0]}}, tmp_path / "out", jobs=1)
    homes = [done.cells / result.hash for result in done.results]
    assert len({(home / "noise.key").read_text() for home in homes}) == 2
    each = [record.read_metrics(home)[-1]["privacy/epsilon"] for home in homes]
    note = next(note for note in done.summary()["notes"] if note.startswith("epsilon"))
    assert f"2 cells on the same data add up to epsilon {sum(each):.4g} at delta 2e-05" in note
    assert note in (tmp_path / "out" / "table.md").read_text()


def test_personal_models_after_local_training_can_be_what_is_compared(tmp_path: Path) -> None:
    """The other reading of when a personal model is judged, by settings that a recipe can have."""
    settings = SMALL | {"rounds": 2, "evaluate": {"participants": True}, "cohort": {"sampling": "all"}}
    wanted = {"algorithms": ["fedala", "fedavg"], "seeds": [0], "metric": "participants/post_fit/test/accuracy"}
    done = compare.run({**settings, "compare": wanted}, tmp_path / "out", jobs=1)
    assert {row.method for row in done.rows} == {"fedala", "fedavg"}
    for result in done.results:
        last = record.read_metrics(done.cells / result.hash)[-1]
        assert last["participants/post_fit/test/accuracy"] != last["personal/pre_fit/test/accuracy"]
