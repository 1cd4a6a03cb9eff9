"""A run that was stopped, however rudely, and continued is the run that was never stopped: byte for byte."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedloom.core.errors import CheckpointError
from fedloom.runs.prepare import prepare
from fedloom.runs.resume import resume
from fedloom.runs.start import load_config
from fedloom.runs.start import run as start
from support import warm
from support.terminal import Quick, environment, fedloom, started

BASE = ("partition.clients=6", "model.kind=logistic", "local.batch=150", "seed=4", "checkpoint.curves=false")
SERVER = (*BASE, "cohort.size=3")
KINDS: dict[str, tuple[str, ...]] = {
    "fedavg": (*SERVER, "algorithm.kind=fedavg", "local.momentum=0.5"),
    "fedopt": (*SERVER, "algorithm.kind=fedopt", "checkpoint.curves=true"),
    "local_only/ram": (*SERVER, "algorithm.kind=local_only"),
    "local_only/disk": (*SERVER, "algorithm.kind=local_only", "engine.store=disk"),
    "dpsgd": (*BASE, "algorithm.kind=dpsgd"),
    "scaffold": (*SERVER, "algorithm.kind=scaffold"),
}
SOME = ("fedavg", "local_only/disk", "dpsgd")  # a server's, clients' and a network's state


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


def result(run: Path) -> dict[str, bytes]:
    """What must not depend on how a run came to its end."""
    names = ("metrics.jsonl", "model.safetensors", "personal.safetensors", "partition.safetensors", "config.toml")
    return {name: (run / name).read_bytes() for name in names if (run / name).exists()}


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the run has written so many evaluations."""
    limit = time.perf_counter() + 600
    while lines(run) < count:
        ended = process.poll() is not None
        assert not ended or lines(run) >= count, process.communicate()
        assert time.perf_counter() < limit
        time.sleep(0.005)


# -- kill -9 ---------------------------------------------------------------------------------------
HALF = {"fedavg": 0, "dpsgd": 1, "scaffold": 0, "local_only/disk": 1}  # two without and two with states of clients


def places(cut: Path, kind: str) -> list[Path]:
    """The copies to go on from, so that of every kind of touch one is tried, with states of clients and without.

    The two methods of each pair in ``HALF`` share the kinds of touches; all others are tried at three places.
    """
    by_kind: dict[str, list[str]] = {}
    touches = [json.loads(line) for line in cut.with_suffix(".jsonl").read_text().splitlines()]
    for number, event, path, how in touches:
        where = re.search(r"checkpoints/|clients/|(metrics|timings)\.jsonl$|\.", path)
        read = "to read" if (event, how) == ("open", "r") else ""
        by_kind.setdefault(f"{event} {where and where[0]} {read}", []).append(f"{number:04d}")
    assert len(by_kind) >= 14
    if kind not in HALF:
        return sorted(cut.iterdir())[10::33]
    own = [k for k in by_kind if crc32(k.encode()) % 2 == HALF[kind] or "clients/" in k]
    return [cut / by_kind[k][len(by_kind[k]) // 2] for k in own]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_kind_of_touch_of_a_file(quick: Quick, tmp_path: Path, kind: str) -> None:
    """A power cut before a file is opened, renamed, deleted and so on, through the whole life of a run.

    What each would leave is copied while a run goes on undisturbed. Some of the copies that go on are really killed
    once more, at another place, before they may finish.
    """
    words = (*KINDS[kind], "rounds=3", "checkpoint.every=1")
    copied = {"crash_at": 1, "place": "whole", "copies": str(tmp_path / "cut")}
    assert quick("run", *words, "--out", "whole", cwd=tmp_path, **copied).code == 0
    want = result(tmp_path / "whole")
    for number, run in enumerate(places(tmp_path / "cut", kind)):
        name = f"cut/{run.name}"
        if (run / "config.toml").exists():
            if number % 3 == 1:
                quick("resume", name, cwd=tmp_path, crash_at=7 + int(run.name) % 11, place=name)
            ended = quick("resume", name, cwd=tmp_path)
        else:
            ended = quick("run", *words, "--out", name, cwd=tmp_path)
        assert ended.code == 0, (name, ended.err)
        assert result(run) == want, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_killed_at_random_moments(tmp_path: Path, kind: str) -> None:
    """A run that has ended before the kill, as it may on a busy machine, begins again."""
    chance = random.Random(f"moments {kind}")
    words = (*KINDS[kind], "rounds=14", f"checkpoint.every={chance.randint(1, 3)}")
    done = fedloom("run", *words, "--out", "whole", cwd=tmp_path, fresh=kind == "fedavg")  # which hashes otherwise
    assert done.code == 0, done.err
    run, kills = tmp_path / "r", 0
    while kills < 2:
        process = started(*(("resume", "r") if kills else ("run", *words, "--out", "r")), cwd=tmp_path)
        wait_for(run, chance.randint(1, 4) + 5 * kills, process)
        time.sleep(chance.uniform(0.0, 0.05))
        process.kill()
        _, err = process.communicate(timeout=600)
        assert process.returncode in (0, -signal.SIGKILL), err
        kills += 1
        if process.returncode == 0:
            shutil.rmtree(run)
            kills = 0
    resumed = fedloom("resume", "r", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert result(run) == result(tmp_path / "whole")


# -- asked to stop ---------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, "fedavg"), (signal.SIGTERM, "local_only/disk")], ids=str)
def test_asked_to_stop_it_saves_says_how_to_go_on_and_exits_with_130(
    quick: Quick, tmp_path: Path, number: signal.Signals, kind: str
) -> None:
    words = (*KINDS[kind], "checkpoint.every=100000")
    process = started("run", *words, "rounds=100000", "--out", "r", cwd=tmp_path)
    wait_for(tmp_path / "r", 4, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    stopped = re.search(r"stopped and saved after round (\d+); continue with: fedloom resume r", out)
    assert stopped
    last = int(stopped[1])
    assert last >= 3
    assert [p.name for p in (tmp_path / "r" / "checkpoints").iterdir()] == [f"{last:08d}"]
    resumed = quick("resume", "r", "--rounds", last + 3, cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert f"resumed after round {last} of {last + 3}" in resumed.out
    assert quick("run", *words, f"rounds={last + 3}", "--out", "whole", cwd=tmp_path).code == 0
    assert result(tmp_path / "r") == result(tmp_path / "whole")


def test_asked_twice_it_stops_at_once(tmp_path: Path) -> None:
    """In a round that would take hours."""
    process = started("run", *KINDS["fedavg"], "local.epochs=1000000", "--out", "r", cwd=tmp_path)
    assert process.stdout is not None
    wait_for(tmp_path / "r", 1, process)
    process.send_signal(signal.SIGINT)
    next(line for line in process.stdout if "finishing this round" in line)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in err


# -- more rounds, other rounds ---------------------------------------------------------------------
@pytest.mark.parametrize("kind", SOME)
def test_a_longer_run_is_the_short_one_continued(quick: Quick, tmp_path: Path, kind: str) -> None:
    words = (*KINDS[kind], "checkpoint.every=2")
    assert quick("run", *words, "rounds=3", "--out", "short", cwd=tmp_path).code == 0
    assert quick("run", *words, "rounds=5", "--out", "long", cwd=tmp_path).code == 0
    done = quick("resume", "short", "--rounds", "5", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.json["rounds"] == 5
    assert result(tmp_path / "short") == result(tmp_path / "long")


OUT_OF_STEP = ("evaluate.every=4", "checkpoint.every=2")


@pytest.mark.parametrize("kind", SOME)
def test_an_evaluation_only_made_because_the_run_ended_is_not_there_when_it_goes_on(
    quick: Quick, tmp_path: Path, kind: str
) -> None:
    watched = ('evaluate.diagnostics=["updates"]',) if kind in ("fedavg", "scaffold") else ()
    words = (*KINDS[kind], *OUT_OF_STEP, *watched)
    assert quick("run", *words, "rounds=11", "--out", "long", cwd=tmp_path).code == 0
    assert quick("run", *words, "rounds=3", "--out", "r", cwd=tmp_path).code == 0
    for rounds in (6, 8, 11):  # ends between two evaluations, with one, and between two again
        done = quick("resume", "r", "--rounds", rounds, cwd=tmp_path)
        assert done.code == 0, done.err
        last = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["round"] == rounds
        if rounds == 6:
            before = result(tmp_path / "r")
            assert quick("resume", "r", cwd=tmp_path).code == 0
            assert result(tmp_path / "r") == before
    assert result(tmp_path / "r") == result(tmp_path / "long")


@pytest.mark.slow
def test_killed_while_it_is_lengthened(quick: Quick, tmp_path: Path) -> None:
    words = (*KINDS["local_only/ram"], *OUT_OF_STEP)
    assert quick("run", *words, "rounds=7", "--out", "whole", cwd=tmp_path).code == 0
    assert quick("run", *words, "rounds=5", "--out", "short", cwd=tmp_path).code == 0
    longer, cuts = ("--rounds", 7), {"crash_at": 1, "step": 13, "place": "short", "copies": str(tmp_path / "cut")}
    assert quick("resume", "short", *longer, cwd=tmp_path, **cuts).code == 0
    want, runs = result(tmp_path / "whole"), sorted((tmp_path / "cut").iterdir())
    assert len(runs) > 3
    for run in (tmp_path / "short", *runs):
        again = quick("resume", run.relative_to(tmp_path), *longer, cwd=tmp_path)
        assert again.code == 0, (run.name, again.err)
        assert result(run) == want, run.name


def test_who_was_excluded_is_still_said_when_the_run_goes_on(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text(
        "import torch\nfrom fedloom.algorithms.fedavg import FedAvg\nfrom fedloom.algorithm import Update\n\n\n"
        "class Faulty(FedAvg):\n    def finish(self, x, down, mine, work):\n"
        "        bad = (work.round == 2) & (work.examples < 150)\n"
        "        return Update(torch.where(bad, torch.nan, x - down.w)), ()\n"
    )
    words = ("partition.clients=6", "cohort.sampling=all", "model.kind=logistic", "algorithm.kind=faulty.py", "seed=4")
    words += ("evaluate.every=4", "checkpoint.curves=false")
    assert quick("run", *words, "rounds=5", "--out", "long", cwd=tmp_path).code == 0
    done = quick("run", *words, "rounds=3", "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 3, 3]
    assert lines[1]["excluded"]
    assert "global/test/accuracy" in lines[2]
    assert quick("resume", "r", "--rounds", "5", cwd=tmp_path).code == 0
    assert result(tmp_path / "r") == result(tmp_path / "long")


def test_a_run_cut_short_ends_with_an_evaluation(quick: Quick, tmp_path: Path) -> None:
    words = (*SERVER, "evaluate.every=4", "checkpoint.every=1")
    assert quick("run", *words, "rounds=5", "--out", "short", cwd=tmp_path).code == 0
    assert quick("run", *words, "rounds=6", "--out", "r", cwd=tmp_path).code == 0
    for more in (("--from", "5", "--rounds", "5"), ()):
        done = quick("resume", "r", *more, cwd=tmp_path)
        assert done.code == 0, done.err
        assert result(tmp_path / "r") == result(tmp_path / "short")


def test_resuming_a_finished_run_changes_nothing(quick: Quick, run: Path, tmp_path: Path) -> None:
    before = result(run)
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    done = quick("resume", "r", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert result(tmp_path / "r") == before
    assert done.json["metrics"] == summary["metrics"]
    # no rounds were done, so the pace is still that of the rounds that were
    assert done.json["rounds_per_second"] < 3 * summary["rounds_per_second"] + 1


def test_fewer_rounds_than_were_done_are_refused(quick: Quick, run: Path, tmp_path: Path) -> None:
    before = result(run)
    done = quick("resume", "r", "--rounds", "3", cwd=tmp_path)
    assert done.code == 2
    assert re.search(r"--rounds: 3, but this run has done [4-9] \(see --from\)", done.err)
    assert result(tmp_path / "r") == before


def test_a_schedule_laid_out_for_its_rounds_is_not_stretched(quick: Quick, tmp_path: Path) -> None:
    words = (*SERVER, "local.schedule=cosine", "rounds=3", "--out", "r")
    assert quick("run", *words, cwd=tmp_path).code == 0
    done = quick("resume", "r", "--rounds", "5", cwd=tmp_path)
    assert done.code == 2
    assert "cosine" in done.err
    assert tomllib.loads((tmp_path / "r" / "config.toml").read_text())["rounds"] == 3


def test_timings_have_every_round_once(quick: Quick, tmp_path: Path) -> None:
    words = (*SERVER, "rounds=4", "checkpoint.every=2", "--out", "r")
    assert quick("run", *words, cwd=tmp_path, crash_at=12, place="r/checkpoints").code == -9
    assert quick("resume", "r", cwd=tmp_path).code == 0
    assert quick("resume", "r", "--rounds", "6", cwd=tmp_path).code == 0
    timed = [json.loads(line)["round"] for line in (tmp_path / "r" / "timings.jsonl").read_text().splitlines()]
    assert timed == sorted(set(timed))
    assert {5, 6} <= set(timed)


# -- damage ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(quick: Quick, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five rounds with checkpoints of the last two; for copies."""
    folder = tmp_path_factory.mktemp("finished")
    assert quick("run", *SERVER, "rounds=5", "checkpoint.every=1", "--out", "r", cwd=folder).code == 0
    return folder / "r"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "r")


def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_works(quick: Quick, run: Path) -> None:
    want = result(run)
    path = run / "checkpoints" / "00000005" / "state.safetensors"
    raw = bytearray(path.read_bytes())
    path.unlink()
    refused = quick("resume", "r", cwd=run.parent)
    where = "r/checkpoints/00000005"
    assert f"checkpoint {where} is damaged: {where}/state.safetensors: No such file or directory;" in refused.err
    raw[-1] ^= 1
    path.write_bytes(raw)
    refused = quick("resume", "r", cwd=run.parent)
    assert refused.code == 2
    assert "Traceback" not in refused.err
    assert "checkpoints/00000005 is damaged: state.safetensors" in refused.err
    offered = re.search(r"fedloom (resume r --from 4)", refused.err)
    assert offered
    assert result(run) == want
    done = quick(*offered[1].split(), cwd=run.parent)
    assert done.code == 0, done.err
    assert result(run) == want


@pytest.mark.parametrize("name", ["config.toml", "partition.json", "metrics.jsonl", "timings.jsonl"])
def test_other_damaged_files_are_refused_or_not_needed(quick: Quick, run: Path, name: str) -> None:
    path = run / name
    path.write_bytes(b"\x00{" * (path.stat().st_size // 2 + 1))
    done = quick("resume", "r", "--rounds", "6", cwd=run.parent)
    assert "Traceback" not in done.err
    if name == "timings.jsonl":
        assert done.code == 0, done.err
    else:
        assert done.code == 2
        assert name in done.err


def test_metrics_that_were_cut_off_are_refused(quick: Quick, run: Path) -> None:
    os.truncate(run / "metrics.jsonl", 100)
    done = quick("resume", "r", "--rounds", "6", cwd=run.parent)
    assert done.code == 2
    assert re.search(r"metrics\.jsonl: has 100 bytes, the checkpoint needs \d+", done.err)


def test_what_is_not_there_is_said_so(quick: Quick, run: Path) -> None:
    for words, message in (
        (("resume", "nowhere"), "nowhere: there is no such folder"),
        (("resume", "r", "--from", "2"), r"no checkpoint of round 2 \(there are: \[4, 5\]\)"),
    ):
        done = quick(*words, cwd=run.parent)
        assert done.code == 2
        assert re.search(message, done.err)
    before = result(run)
    shutil.rmtree(run / "checkpoints")
    done = quick("resume", "r", "--from", "4", cwd=run.parent)
    assert done.code == 2
    assert "no checkpoint of round 4" in done.err
    assert result(run) == before


# -- a full disk -----------------------------------------------------------------------------------
LIMITS: dict[str, tuple[tuple[str, ...], int]] = {  # each as long as it takes to reach the limit
    "metrics": (("fedavg", "evaluate.every=1", "data.test=0.9", "rounds=8"), 4_000),
    "checkpoint": (("local_only", "evaluate.every=50", "model.kind=mlp", "rounds=4"), 20_000),
    "rows": (("local_only", "evaluate.every=50", "model.kind=mlp", "engine.store=disk", "rounds=5"), 200_000),
    "picture": (("fedavg", "evaluate.every=2", "checkpoint.curves=true", "rounds=6"), 20_000),
    "partition": (("fedavg", "rounds=4"), 5_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", LIMITS)
def test_a_full_disk_stops_the_run_and_what_was_saved_stays(quick: Quick, tmp_path: Path, what: str) -> None:
    """A limit on the size of files stands for the disk: each case is full at another file."""
    (kind, *more), limit = LIMITS[what]
    words = (*SERVER, f"algorithm.kind={kind}", *more, "checkpoint.every=1")
    done = fedloom("run", *words, "--out", "r", cwd=tmp_path, largest_file=limit)
    assert done.code == 4, (done.code, done.err)
    assert "Traceback" not in done.err
    assert re.search(r"error: writing below r failed: File too large", done.err)
    resumed = quick("resume", "r", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    if what in ("metrics", "rows", "picture"):
        assert "resumed after round" in resumed.out
        assert "the last checkpoint is intact: fedloom resume r" in done.err
    assert quick("run", *words, "--out", "whole", cwd=tmp_path).code == 0
    assert result(tmp_path / "r") == result(tmp_path / "whole")


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-m", "sh", "-c", "mount -t tmpfs tmpfs /mnt"], check=False).returncode != 0,
    reason="needs the right to mount",
)
@pytest.mark.slow
@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_disk_that_is_really_full(quick: Quick, tmp_path: Path, store: str) -> None:
    words = (*SERVER, "algorithm.kind=local_only", f"engine.store={store}", "rounds=5", "checkpoint.every=2")
    (tmp_path / "disk").mkdir()
    command = [sys.executable, "-m", "support.full_disk", "80k", "run", *words, "--out", "r"]
    with warm.processes():
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600, check=False
        )
    assert done.returncode == 4, done.stderr
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    resumed = quick("resume", "left/r", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "resumed after round" in resumed.out
    assert quick("run", *words, "--out", "whole", cwd=tmp_path).code == 0
    assert result(tmp_path / "left" / "r") == result(tmp_path / "whole")


# -- one at a time, and the same data --------------------------------------------------------------
def test_a_run_folder_is_used_by_one_process_at_a_time(quick: Quick, tmp_path: Path) -> None:
    first = started("run", *SERVER, "rounds=100000", "--out", "r", cwd=tmp_path)
    try:
        wait_for(tmp_path / "r", 2, first)
        for words, message in (
            (("resume", "r"), "r: another process is using this run folder"),
            (("run", *SERVER, "--out", "r"), "--out: r already exists.*fedloom resume r"),
        ):
            second = quick(*words, cwd=tmp_path)
            assert second.code == 2
            assert re.search(message, second.err)
        seen = lines(tmp_path / "r")
        wait_for(tmp_path / "r", seen + 2, first)
    finally:
        first.kill()
        first.wait()
    assert json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[0])["round"] == 0


def save_blobs(path: Path, shift: float) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 200)
    x = (rng.normal(size=(200, 4)) + y[:, None] + shift).astype(np.float32)
    np.savez(path, x=x, y=y)


def test_other_data_than_the_run_began_with_is_refused(quick: Quick, tmp_path: Path) -> None:
    save_blobs(tmp_path / "own.npz", 0.0)
    words = ("data.source=own.npz", "partition.clients=4", "model.kind=logistic", "rounds=2", "checkpoint.curves=false")
    done = quick("run", *words, "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.err
    before = result(tmp_path / "r")
    save_blobs(tmp_path / "own.npz", 0.1)
    done = quick("resume", "r", "--rounds", "4", cwd=tmp_path)
    assert done.code == 2
    assert "r: the data has changed since this run began" in done.err
    assert result(tmp_path / "r") == before
    done = quick("resume", "r", "--rounds", "3", "--accept-changes", cwd=tmp_path)
    assert done.code == 0, done.err
    told = json.loads((tmp_path / "r" / "environment.json").read_text())["changes"]
    assert told[0].startswith("after round 2: the data has changed since this run began (")
    assert quick("resume", "r", "--rounds", "4", cwd=tmp_path).code == 0  # with the data that was accepted
    save_blobs(tmp_path / "own.npz", 0.0)
    assert quick("resume", "r", "--rounds", "5", cwd=tmp_path).code == 2


def test_a_run_goes_on_from_another_folder_with_its_own_files_and_data_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("mine", "data", "elsewhere"):
        (tmp_path / name).mkdir()
    for name, rows in {"x": np.eye(60, 4, dtype=np.float32), "y": np.arange(60) % 3}.items():
        np.save(tmp_path / "data" / f"{name}.npy", rows)
    loader = "import numpy\n\n\ndef rows(root):\n    return numpy.load(root / 'x.npy'), numpy.load(root / 'y.npy')\n"
    (tmp_path / "mine" / "own.py").write_text(loader)
    monkeypatch.chdir(tmp_path / "mine")
    settings = {"partition": {"clients": 4}, "model": "logistic", "checkpoint": {"curves": False}}
    start(data="own.py:rows", data_root="../data", rounds=2, out="r", **settings)
    assert (tmp_path / "mine" / "r" / "code" / "own.py").read_text() == loader
    whole = start(data="own.py:rows", data_root="../data", rounds=3, out="w", **settings)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resume("../mine/r", rounds=3).records == whole.records
    assert Path.cwd() == tmp_path / "elsewhere"
    (tmp_path / "mine" / "own.py").write_text(loader + "# other\n")
    with pytest.raises(CheckpointError, match=r"own\.py has changed"):
        resume("../mine/r", rounds=4)
    assert resume("../mine/r", rounds=4, accept_changes=True).rounds == 4
    assert (tmp_path / "mine" / "r" / "code-after-round-3" / "own.py").read_text().endswith("# other\n")


def test_a_run_killed_before_it_was_laid_out_can_be_continued(quick: Quick, tmp_path: Path) -> None:
    assert quick("run", *SERVER, "rounds=2", "--out", "whole", cwd=tmp_path).code == 0
    (tmp_path / "r").mkdir()
    shutil.copy(tmp_path / "whole" / "config.toml", tmp_path / "r")
    done = quick("resume", "r", cwd=tmp_path)
    assert done.code == 0, done.err
    assert result(tmp_path / "r") == result(tmp_path / "whole")
    assert json.loads((tmp_path / "r" / "environment.json").read_text())["executor"] == "lanes"


def test_settings_that_were_edited_since_the_run_began_are_reported(quick: Quick, tmp_path: Path) -> None:
    words = (*KINDS["fedavg"], "rounds=2")
    assert quick("run", *words, "--out", "run", cwd=tmp_path).code == 0
    longer = quick("resume", "run", "--rounds", "3", cwd=tmp_path)
    assert "has changed since the run began" not in longer.out
    settings = tmp_path / "run" / "config.toml"
    settings.write_text(settings.read_text().replace("lr = 0.1", "lr = 0.2"))
    edited = quick("resume", "run", "--rounds", "4", cwd=tmp_path)
    assert edited.code == 0
    assert "note: config.toml has changed since the run began" in edited.out
    assert "has changed since the run began" not in quick("resume", "run", "--rounds", "5", cwd=tmp_path).out


# -- unlearning ------------------------------------------------------------------------------------
CLOSED = ("partition.clients=6", "partition.kind=iid", "model.kind=logistic", "algorithm.kind=analytic", "rounds=1")
CLOSED += ("seed=4", "checkpoint.curves=false")
DRAWN = ("cohort.sampling=uniform", "cohort.size=2")


def head(run: Path) -> Tensor:
    return load_file(run / "model.safetensors")["head.weight"].double()


@pytest.mark.parametrize("agg", ["sum", "aa_simplified"])
def test_a_finished_run_forgets_clients_as_if_they_had_never_been_there(quick: Quick, tmp_path: Path, agg: str) -> None:
    words = (*CLOSED, f"algorithm.agg={agg}")
    assert quick("run", *words, "--out", "run", cwd=tmp_path).code == 0
    all_of_them = head(tmp_path / "run")
    done = quick("resume", "run", "--forget", "3", "--forget", "1", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.json["rounds"] == 2
    assert "clients to forget: [3, 1]" in done.err
    left = without(tmp_path / "run", (1, 3))
    assert torch.allclose(head(tmp_path / "run"), left, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(head(tmp_path / "run"), all_of_them, rtol=1e-2)
    settings = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert (settings["rounds"], settings["algorithm"]["forget"]) == (2, [3, 1])
    again = quick("resume", "run", "--forget", "5", cwd=tmp_path)  # and another one later
    assert again.code == 0, again.err
    assert torch.allclose(head(tmp_path / "run"), without(tmp_path / "run", (1, 3, 5)), rtol=1e-5, atol=1e-6)


def without(run: Path, gone: tuple[int, ...]) -> Tensor:
    """The head of ridge regression on all rows but those of these clients, by NumPy."""
    digits = load_config(run / "config.toml")
    prepared = prepare(digits, Path())
    fed = prepared.experiment.federation
    rows = torch.cat([fed.train.rows[fed.train.start[i] : fed.train.start[i + 1]] for i in range(6) if i not in gone])
    x, y = fed.examples(rows)
    x, onehot = x.flatten(1).double().numpy(), np.eye(fed.classes)[y.numpy()]
    gram = x.T @ x
    ridge = 1e-3 * np.trace(gram) / len(gram)
    return torch.from_numpy(np.linalg.solve(gram + ridge * np.eye(len(gram)), x.T @ onehot).T)


@pytest.mark.parametrize(
    ("settings", "words", "says"),
    [
        ((*SERVER, "rounds=1"), ("--forget", "1"), "--forget: fedavg cannot unlearn a client exactly"),
        (CLOSED, ("--forget", "6"), "algorithm.forget: there is no client 6 among 6"),
        (
            CLOSED,
            ("--forget", "1", "--rounds", "1"),
            "--rounds: the clients to forget have all taken part only by round 2 (got 1)",
        ),
        (CLOSED, ("--forget", "1", "--from", "7"), "has no checkpoint of round 7"),
        ((*CLOSED, *DRAWN), ("--forget", "0"), "--forget: client 0 has sent nothing yet"),
    ],
)
def test_what_cannot_be_forgotten_is_refused_and_nothing_changes(
    quick: Quick, tmp_path: Path, settings: tuple[str, ...], words: tuple[str, ...], says: str
) -> None:
    assert quick("run", *settings, "--out", "run", cwd=tmp_path).code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    done = quick("resume", "run", *words, cwd=tmp_path)
    assert done.code == 2
    assert says in " ".join(done.err.split())
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("chance", [DRAWN, ("system.dropout=0.6",)])
def test_a_run_goes_on_until_who_is_to_be_forgotten_has_come(
    quick: Quick, tmp_path: Path, chance: tuple[str, ...]
) -> None:
    assert quick("run", *CLOSED, *chance, "rounds=2", "--out", "run", cwd=tmp_path).code == 0

    def standing() -> list[int]:
        newest = max((tmp_path / "run" / "checkpoints").iterdir())
        return load_file(newest / "state.safetensors")["server.standing"].tolist()

    known = standing().index(1)
    done = quick("resume", "run", "--forget", known, cwd=tmp_path)
    assert done.code == 0, done.err
    assert standing()[known] == 2
    again = quick("resume", "run", "--forget", known, cwd=tmp_path)
    assert (again.code, f"client {known} is forgotten already" in again.err) == (2, True)


def test_a_private_closed_form_can_forget_whatever_its_budget_is(quick: Quick, tmp_path: Path) -> None:
    private = ("privacy.feature_clip=1", "privacy.epsilon=8", "privacy.mechanism=local")
    assert quick("run", *CLOSED, *private, "--out", "run", cwd=tmp_path).code == 0
    spent = json.loads((tmp_path / "run" / "privacy.json").read_text())["epsilon"]
    done = quick("resume", "run", "--forget", "3", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["epsilon"] == spent


def test_asked_twice_within_code_that_makes_an_error_of_it_a_run_still_stops(tmp_path: Path) -> None:
    """As C++ code of torch does."""

    def ask(_progress: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt as error:
            raise RuntimeError("KeyboardInterrupt: At: ...") from error

    with pytest.raises(KeyboardInterrupt):
        start(rounds=3, partition={"clients": 4}, model="logistic", out=tmp_path / "r", on_round=ask)
    assert resume(tmp_path / "r").rounds == 3
