"""The run folder: private, whole, nobody else's, and never changed by what is then refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fedloom as package
from fedloom.core import disk
from fedloom.core.errors import ConfigError, StorageError
from fedloom.runs.loop import Progress, SilentListener
from support.terminal import SMALL, Quick, environment, fedloom, files


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


@pytest.fixture(scope="module")
def finished(quick: Quick, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five rounds with checkpoints of the last two; for copies."""
    folder = tmp_path_factory.mktemp("finished")
    done = quick("run", *SMALL, "rounds=5", "checkpoint.every=1", "--out", "r", cwd=folder)
    assert done.code == 0, done.err
    return folder / "r"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "r")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, byte for byte."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def damage(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


# -- private ---------------------------------------------------------------------------------------
def test_only_its_owner_can_read_a_run_or_a_comparison(quick: Quick, tmp_path: Path) -> None:
    ring = ("algorithm.kind=dfedavg", "topology.kind=ring", "partition.clients=4", "model.kind=logistic")
    private = ("privacy.clip=1", "privacy.noise=1", "cohort.sampling=poisson", "algorithm.weighting=uniform")
    for words in (
        ("run", *SMALL, "rounds=1", "evaluate.work=true", *private, "--out", "runs/r"),
        ("run", *SMALL, "rounds=1", "algorithm.kind=local_only", "engine.store=disk", "--out", "runs/s"),
        ("run", *ring, "rounds=1", "checkpoint.curves=false", "--out", "runs/n"),
        ("compare", "fedavg", *SMALL, "--seeds", "1", "rounds=1", "--out", "runs/c"),
    ):
        done = quick(*words, cwd=tmp_path)
        assert done.code == 0, done.err
        home = tmp_path / words[-1]
        modes = {p: p.stat().st_mode & 0o777 for p in (home, *home.rglob("*"))}
        assert {p: mode for p, mode in modes.items() if mode != (0o700 if p.is_dir() else 0o600)} == {}
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "runs").stat().st_mode == (tmp_path / "plain").stat().st_mode  # it is no run folder


# -- links -----------------------------------------------------------------------------------------
LINKED = (
    ".lock",
    "metrics.jsonl",
    "summary.json.part",
    "config.toml",
    "checkpoints/00000005/meta.json.part",
    "clients",
)


@pytest.mark.parametrize("name", LINKED)
def test_a_link_is_refused_by_name_and_not_followed(quick: Quick, run: Path, name: str) -> None:
    precious = run.parent / "precious"
    if name == "clients":
        precious.mkdir()
    else:
        precious.write_bytes((run / name).read_bytes() if (run / name).exists() else b"do not lose me")
    before = contents(run.parent)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(precious)
    done = quick("resume", "r", "--rounds", "6", cwd=run.parent)
    assert done.code == 2, done.err
    assert f"r/{name}: is a link, and links are not followed" in done.err
    assert contents(run.parent) | {f"r/{name}": before.get(f"r/{name}", b"")} == before | {
        f"r/{name}": before.get(f"r/{name}", b"")
    }


def test_a_file_with_a_second_name_is_not_written_to(quick: Quick, run: Path) -> None:
    (run.parent / "backup").hardlink_to(run / "metrics.jsonl")
    before = contents(run.parent)
    done = quick("resume", "r", "--rounds", "6", cwd=run.parent)
    assert done.code == 2
    assert "r/metrics.jsonl: has another name (a hard link)" in done.err
    assert contents(run.parent) == before


def test_links_in_a_comparison_are_refused(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "precious").write_text("do not lose me")
    (tmp_path / "c" / ".lock").symlink_to(tmp_path / "precious")
    done = quick("compare", "fedavg", *SMALL, "--seeds", "1", "rounds=1", "--out", "c", cwd=tmp_path)
    assert done.code == 2
    assert "c/.lock: is a link" in done.err
    assert (tmp_path / "precious").read_text() == "do not lose me"


# -- gone while the run is at work -----------------------------------------------------------------
class Meddler(SilentListener):
    """Does something to the folder after the first round."""

    def __init__(self, deed: Callable[[], Any]) -> None:
        self._deed = deed

    def advanced(self, progress: Progress) -> None:
        if progress.round == 1:
            self._deed()


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("what", ["folder", "metrics.jsonl", "replaced", "clients/rows.bin"])
def test_files_that_vanish_while_a_run_writes_them_are_an_error(tmp_path: Path, what: str, every: int) -> None:
    run = tmp_path / "r"

    def deed() -> None:
        if what == "folder":
            shutil.rmtree(run)
        elif what == "replaced":
            os.replace(shutil.copy(run / "metrics.jsonl", tmp_path / "copy"), run / "metrics.jsonl")
        else:
            (run / what).unlink()

    with pytest.raises(StorageError, match=r"r/(metrics\.jsonl|clients/rows\.bin): was (deleted|replaced)"):
        package.run(
            "local_only",
            data="digits",
            rounds=3,
            partition={"clients": 4},
            model="logistic",
            checkpoint={"every": every},
            engine={"store": "disk"},
            out=run,
            listener=Meddler(deed),
        )
    assert not (run / "summary.json").exists()


# -- one at a time ---------------------------------------------------------------------------------
def test_who_comes_second_writes_nothing(quick: Quick, tmp_path: Path) -> None:
    """The first has only just begun: its folder holds nothing but its lock."""
    (tmp_path / "r").mkdir()
    lock = disk.lock(tmp_path / "r" / ".lock")
    done = quick("run", *SMALL, "rounds=1", "--out", "r", cwd=tmp_path)
    assert done.code == 2
    assert "r: another process is using this run folder" in done.err
    assert files(tmp_path / "r") == {".lock"}
    os.close(lock)
    assert quick("run", *SMALL, "rounds=1", "--out", "r", cwd=tmp_path).code == 0


def test_a_refused_run_can_be_tried_again_in_the_same_process(run: Path) -> None:
    with pytest.raises(ConfigError, match="--rounds"):
        package.resume(run, rounds=2)
    assert package.resume(run, rounds=6).rounds == 6


# -- what is refused changes nothing ---------------------------------------------------------------
@pytest.mark.parametrize("words", [("--from", "4"), ("--from", "4", "--rounds", "9"), ("--rounds", "20")])
def test_damaged_metrics_are_refused_before_anything_changes(quick: Quick, run: Path, words: tuple[str, ...]) -> None:
    damage(run / "metrics.jsonl", 30)
    before = contents(run)
    done = quick("resume", "r", *words, cwd=run.parent)
    assert done.code == 2
    assert "metrics.jsonl: is damaged" in done.err
    assert contents(run) == before


def test_more_rounds_are_not_written_down_before_the_checkpoint_is_accepted(quick: Quick, run: Path) -> None:
    damage(run / "checkpoints" / "00000005" / "state.safetensors", -1)
    before = contents(run)
    done = quick("resume", "r", "--rounds", "20", cwd=run.parent)
    assert done.code == 2
    assert "checkpoints/00000005 is damaged" in done.err
    assert contents(run) == before


def test_no_checkpoint_is_said_to_be_intact_where_there_is_none(tmp_path: Path) -> None:
    words = ("partition.clients=4", "model.kind=mlp", "rounds=2", "checkpoint.every=1", "--out", "r")
    done = fedloom("run", *words, cwd=tmp_path, largest_file=15_000)
    assert done.code == 4, done.err
    assert (tmp_path / "r" / "checkpoints").is_dir()
    assert "writing below r failed: File too large" in done.err
    assert "intact" not in done.err


# -- damaged metrics -------------------------------------------------------------------------------
def test_a_run_with_damaged_metrics_goes_on_without_the_damaged_lines(quick: Quick, finished: Path, run: Path) -> None:
    """Damage before the older checkpoint: the states are whole, but no checkpoint's metrics are."""
    damage(run / "metrics.jsonl", 30)
    damaged = (run / "metrics.jsonl").read_bytes()
    refused = quick("resume", "r", cwd=run.parent)
    assert refused.code == 2
    assert "--from" not in refused.err
    assert "fedloom resume r --repair continues without the damaged lines" in refused.err
    longer = shutil.copytree(finished, run.parent / "longer")
    assert quick("resume", "longer", "--rounds", "7", cwd=run.parent).code == 0
    done = quick("resume", "r", "--repair", "--rounds", "7", cwd=run.parent)
    assert done.code == 0, done.err
    assert "note: metrics.jsonl was damaged: 5 of 6 lines are kept" in done.out
    assert (run / "metrics.damaged.jsonl").read_bytes() == damaged
    whole = (longer / "metrics.jsonl").read_bytes().splitlines()
    assert (run / "metrics.jsonl").read_bytes().splitlines() == whole[1:]
    assert (run / "model.safetensors").read_bytes() == (longer / "model.safetensors").read_bytes()
    again = quick("resume", "r", cwd=run.parent)
    assert (again.code, "damaged" in again.out) == (0, False)


def test_metrics_that_are_gone_begin_anew(quick: Quick, run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    done = quick("resume", "r", "--repair", "--rounds", "7", cwd=run.parent)
    assert done.code == 0, done.err
    assert [json.loads(x)["round"] for x in (run / "metrics.jsonl").read_text().splitlines()] == [5, 6, 7]


def test_damage_after_the_older_checkpoint_can_be_undone(quick: Quick, finished: Path, run: Path) -> None:
    damage(run / "metrics.jsonl", -9)
    refused = quick("resume", "r", cwd=run.parent)
    assert refused.code == 2
    offered = re.search(r"fedloom (resume r --from 4) goes back to before the damage", refused.err)
    assert offered
    assert quick(*offered[1].split(), cwd=run.parent).code == 0
    assert (run / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("point", [1, 2, 3, 4, 5, 6])
def test_killed_while_metrics_are_repaired(quick: Quick, finished: Path, run: Path, point: int) -> None:
    damage(run / "metrics.jsonl", 30)
    whole = (finished / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    words = ("resume", "r", "--repair")
    assert quick(*words, cwd=run.parent, crash_at=point, place="metrics").code in (-9, 0)
    done = quick(*words, cwd=run.parent)
    assert done.code == 0, done.err
    assert (run / "metrics.jsonl").read_bytes() == b"".join(whole[1:])


# -- the manifest ----------------------------------------------------------------------------------
def test_the_manifest_of_an_ended_run_has_every_file(finished: Path) -> None:
    manifest = json.loads((finished / "manifest.json").read_text())["sha256"]
    plain = {name for name in files(finished) if (finished / name).is_file()}
    assert set(manifest) == plain - {".lock", "manifest.json"}
    for name, digest in manifest.items():
        assert hashlib.sha256((finished / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("name", ["environment.json", "partition.safetensors", "partition.json"])
def test_a_file_that_the_run_did_not_write_is_refused(quick: Quick, run: Path, name: str) -> None:
    path = run / name
    path.write_bytes(path.read_bytes() + b" ")
    before = contents(run)
    done = quick("resume", "r", "--rounds", "7", cwd=run.parent)
    assert done.code == 2
    assert f"r/{name}: has changed since the run wrote it" in done.err
    assert contents(run) == before
    path.unlink()
    gone = quick("resume", "r", "--rounds", "7", cwd=run.parent)
    assert (gone.code, f"r/{name}: is missing" in gone.err) == (2, True)


def test_a_damaged_manifest_is_named(quick: Quick, run: Path) -> None:
    (run / "manifest.json").write_text("[]")
    done = quick("resume", "r", cwd=run.parent)
    assert (done.code, "r/manifest.json: is damaged" in done.err) == (2, True)
    (run / "manifest.json").unlink()
    assert quick("resume", "r", cwd=run.parent).code == 0


@pytest.mark.parametrize("point", range(1, 7))
def test_killed_around_the_manifest(quick: Quick, finished: Path, run: Path, point: int) -> None:
    """It never speaks of a file that a crash left as it was before, or as it was to be."""
    words = ("resume", "r", "--rounds", "6")
    ended = quick(*words, cwd=run.parent, crash_at=point, place="manifest.json")
    assert ended.code == -9
    done = quick(*words, cwd=run.parent)
    assert done.code == 0, done.err
    assert (run / "metrics.jsonl").read_bytes().startswith((finished / "metrics.jsonl").read_bytes())


# -- where client states are kept ------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "first"), [("local_only", "ram"), ("scaffold", "disk")])
def test_client_states_move_when_the_store_changes(quick: Quick, tmp_path: Path, kind: str, first: str) -> None:
    words = (*SMALL, f"algorithm.kind={kind}", "checkpoint.every=2", "local.batch=150")
    assert quick("run", *words, "rounds=6", "--out", "whole", cwd=tmp_path).code == 0
    assert quick("run", *words, "rounds=3", f"engine.store={first}", "--out", "r", cwd=tmp_path).code == 0
    config, stores = tmp_path / "r" / "config.toml", {"ram": "disk", "disk": "ram"}
    now = first
    for rounds in (4, 6):  # there and back, with checkpoints of both kinds beside each other
        config.write_text(config.read_text().replace(f'store = "{now}"', f'store = "{stores[now]}"'))
        now = stores[now]
        done = quick("resume", "r", "--rounds", rounds, cwd=tmp_path)
        assert done.code == 0, done.err
        older, newest = sorted((tmp_path / "r" / "checkpoints").iterdir())
        again = shutil.copytree(tmp_path / "r", tmp_path / f"from{rounds}")
        back = quick("resume", again.name, "--from", int(older.name), cwd=tmp_path)
        assert back.code == 0, back.err
        assert (again / "metrics.jsonl").read_bytes() == (tmp_path / "r" / "metrics.jsonl").read_bytes()
        assert int(newest.name) == rounds
    for name in ("metrics.jsonl", "personal.safetensors", "model.safetensors"):
        if (tmp_path / "whole" / name).exists():
            assert (tmp_path / "r" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_states_on_disk_that_are_gone_are_not_begun_anew(quick: Quick, tmp_path: Path) -> None:
    words = (*SMALL, "algorithm.kind=local_only", "engine.store=disk", "rounds=2", "--out", "r")
    assert quick("run", *words, cwd=tmp_path).code == 0
    shutil.rmtree(tmp_path / "r" / "clients")
    config = tmp_path / "r" / "config.toml"
    config.write_text(config.read_text().replace('store = "disk"', 'store = "ram"'))
    done = quick("resume", "r", "--rounds", "3", cwd=tmp_path)
    assert done.code == 2
    assert "r/clients/journal.bin: is missing, and so are the states of clients" in done.err


# -- finished cells --------------------------------------------------------------------------------
CELLS = ("compare", "fedavg", "fedprox", *SMALL, "--seeds", "1", "rounds=1", "--out", "c", "--json")


@pytest.fixture(scope="module")
def compared(quick: Quick, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A comparison of two methods, for copies, and its table."""
    folder = tmp_path_factory.mktemp("compared")
    first = quick(*CELLS, cwd=folder)
    assert first.code == 0, first.err
    return folder / "c", first.json["table"]


@pytest.mark.parametrize("sealed", [True, False])
def test_a_cell_that_was_changed_is_not_in_the_table(
    quick: Quick, compared: tuple[Path, Any], tmp_path: Path, sealed: bool
) -> None:
    shutil.copytree(compared[0], tmp_path / "c")
    cell = min((tmp_path / "c" / "cells").iterdir())
    if not sealed:  # as earlier versions left it
        (cell / "manifest.json").unlink()
    path = cell / "metrics.jsonl"
    good = path.read_bytes()
    path.write_bytes(
        re.sub(rb'("global/test/accuracy": 0\.)(\d)', lambda m: m[1] + b"%d" % ((int(m[2]) + 1) % 10), good)
    )
    assert path.read_bytes() != good
    done = quick(*CELLS, cwd=tmp_path)
    assert done.code == 1
    (name, why), *others = done.json["failures"].items()
    assert others == []
    assert re.match(r"(fedavg|fedprox) · seed 0", name)
    assert f"c/cells/{cell.name}/metrics.jsonl: {'has changed since' if sealed else 'is '}" in why
    assert f"delete c/cells/{cell.name} and repeat the command to rerun it" in why
    assert done.json["failed"] == 1
    if sealed:
        shutil.rmtree(cell)
        again = quick(*CELLS, cwd=tmp_path)
        assert again.code == 0
        assert again.json["table"] == compared[1]


def test_the_name_of_a_comparison_leads_nowhere_else(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    words = ("compare", "fedavg", *SMALL, "--seeds", "1", "rounds=1", "name=x/../../../out")
    done = quick(*words, cwd=tmp_path / "here")
    assert done.code == 0, done.err
    assert {p.name for p in tmp_path.iterdir()} == {"here"}
    assert [p.name for p in (tmp_path / "here" / "runs").iterdir()] == ["compare-x-..-..-..-out"]
    from fedloom.compare.plan import plan

    assert plan({"name": "x/../../out", "compare": {"algorithms": ["fedavg"]}}).name == "x-..-..-out"


# -- temporary files -------------------------------------------------------------------------------
KILLED = """
import os, signal, sys
import fedloom
from fedloom.runs.loop import SilentListener

class End(SilentListener):
    def advanced(self, progress):
        os.kill(os.getpid(), signal.SIGKILL)

def run(out):
    fedloom.run("local_only", data="digits", rounds=3, partition={"clients": 4}, model="logistic",
                engine={"store": "disk"}, out=out, listener=End())

if not os.fork():
    run(None)
assert os.wait()[1] == signal.SIGKILL
run("r")
"""


def test_a_kill_leaves_nothing_among_temporary_files(tmp_path: Path) -> None:
    """Neither of a run in memory nor of one in a folder."""
    (tmp_path / "tmp").mkdir()
    cache = str(tmp_path / "cache")  # torch's own, which is there to stay
    env = environment({"TMPDIR": str(tmp_path / "tmp"), "TORCHINDUCTOR_CACHE_DIR": cache})
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, env=env, timeout=600, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list((tmp_path / "tmp").iterdir()) == []


# -- numbers that JSON has no word for -------------------------------------------------------------
def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_what_is_not_finite_is_not_in_the_files(quick: Quick, tmp_path: Path) -> None:
    words = (*SMALL, "local.batch=150", "system.speed=1e-307", "checkpoint.every=1")
    assert quick("run", *words, "rounds=2", "--out", "whole", cwd=tmp_path).code == 0
    assert quick("run", *words, "rounds=1", "--out", "r", cwd=tmp_path).code == 0
    assert quick("resume", "r", "--rounds", "2", cwd=tmp_path).code == 0
    for name in ("metrics.jsonl", "summary.json", "manifest.json", "environment.json", "partition.json"):
        for line in (tmp_path / "r" / name).read_text().splitlines() if name.endswith("l") else []:
            strict(line)
        if name.endswith("n"):
            strict((tmp_path / "r" / name).read_text())
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    last = strict((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["round"] == 2
    assert "time/simulated" not in last
    grid = ("--grid", "system.speed=1e-307,1000", "--target", "0.2", "--x", "seconds")
    done = quick("compare", "fedavg", *SMALL, "--seeds", "1", "rounds=1", *grid, "--out", "c", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    strict((tmp_path / "c" / "summary.json").read_text())
    strict(done.out.splitlines()[-1])


# -- nobody trains ---------------------------------------------------------------------------------
def test_a_system_in_which_nobody_trains_is_refused(quick: Quick, tmp_path: Path) -> None:
    for words in (
        ("system.stragglers=1.0",),
        ("system.stragglers=0.9", "cohort.size=3"),
        ("system.stragglers=1.0", "cohort.sampling=poisson"),
    ):
        done = quick("run", *SMALL, "rounds=1", *words, "--out", "r", cwd=tmp_path)
        assert done.code == 2
        assert "system.stragglers: stragglers are left out, and all clients are stragglers" in done.err
    assert not (tmp_path / "r").exists()
    for words in (("algorithm.kind=fedprox",), ("system.policy=partial",)):
        done = quick("run", *SMALL, "rounds=1", "system.stragglers=1.0", *words, "--print-config", cwd=tmp_path)
        assert done.code == 0, done.err


def test_rounds_in_which_nobody_trained_are_reported(quick: Quick, tmp_path: Path) -> None:
    words = (*SMALL, "cohort.size=1", "system.dropout=0.999", "rounds=3", "--out", "r")
    done = quick("run", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "warning: no client trained in 3 of 3 rounds (all were late or dropped out)" in done.out
    (tmp_path / "own.py").write_text("def nobody(rng, clients, size):\n    return []\n")
    words = (*SMALL, "cohort.sampling=own.py:nobody", "rounds=2", "--out", "n")
    assert "no client trained in 2 of 2 rounds (none was chosen)" in quick("run", *words, cwd=tmp_path).out
    assert "no client trained" not in quick("run", *SMALL, "rounds=1", "--out", "s", cwd=tmp_path).out
