"""Several ranks from the command line: they print as one, end as one, and may be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from support import warm
from support.ports import free_ports
from support.terminal import environment, fedloom, started

WORDS = ("partition.clients=8", "cohort.size=4", "engine.executor=loop", "checkpoint.every=2", "algorithm.kind=ditto")
WORDS += ("local.batch=100", "checkpoint.curves=false")
ROUNDS = 8  # of a run that is compared; one that is to be killed would go on for ever
MANY = (*WORDS, "rounds=100000")


def result(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors", "config.toml")}


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The process of each rank that this one has started, in their order."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def wait_for(run: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the run has written so many evaluations."""
    limit = time.perf_counter() + 600
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.perf_counter() < limit
        time.sleep(0.01)


@cache
def undisturbed(rounds: int = ROUNDS) -> dict[str, bytes]:
    """The result of one process that nobody disturbed."""
    with tempfile.TemporaryDirectory() as folder:
        assert fedloom("run", *WORDS, f"rounds={rounds}", "--out", "run", cwd=Path(folder)).code == 0
        return result(Path(folder, "run"))


def cut_short(run: Path) -> int:
    """Let a run that was to be long end soon, so that it can be compared; after how many rounds."""
    path = run / "config.toml"
    last = max(ROUNDS, *(int(checkpoint.name) for checkpoint in (run / "checkpoints").glob("0*")))
    path.write_text(path.read_text().replace("rounds = 100000", f"rounds = {last}"))
    return last


@pytest.mark.slow
def test_two_ranks_print_and_write_as_one(tmp_path: Path) -> None:
    done = fedloom("run", *WORDS, f"rounds={ROUNDS}", "--out", "run", "--json", "--ranks", "2", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    assert done.json["rounds"] == ROUNDS
    assert done.err.count("fedloom 0.") == 1
    assert "2 ranks" in done.err
    assert result(tmp_path / "run") == undisturbed()
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "words"), [(1, "another rank has ended"), (0, "rank 0 of 2 was ended by signal 9")])
def test_a_rank_that_is_killed_ends_the_run_which_goes_on_with_another_number(
    tmp_path: Path, victim: int, words: str
) -> None:
    process = started("run", *MANY, "--out", "run", "--ranks", "2", cwd=tmp_path, parent=True)
    run = tmp_path / "run"
    wait_for(run, 4, process)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(ranks[victim], signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 5
    assert err.count("error:") == 1
    assert words in err
    assert f"rank {victim} of 2 was ended by signal 9" in err
    assert "continue from the last checkpoint with: fedloom resume run" in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    last = cut_short(run)
    more = () if victim else ("--ranks", "3")
    assert fedloom("resume", "run", *more, cwd=tmp_path).code == 0
    assert result(run) == undisturbed(last)


def listening(pid: int) -> set[str]:
    """The addresses, in hexadecimal, on which a process waits for others."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(link))
    lines = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes}


@pytest.mark.slow
def test_nothing_listens_outside_of_the_machine_and_ctrl_c_saves_the_round_on_all_ranks(tmp_path: Path) -> None:
    """Even where somebody has named another interface for programs of theirs."""
    process = started(
        "run", *MANY, "--out", "run", "--ranks", "2", cwd=tmp_path, parent=True, env={"GLOO_SOCKET_IFNAME": "nosuch"}
    )
    wait_for(tmp_path / "run", 4, process)
    pids = [process.pid, *ranks_of(process)]
    found = [listening(pid) for pid in pids]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert found == [set(), {"0100007F"}, {"0100007F"}]  # 127.0.0.1, for what gloo hears
    assert process.returncode == 130
    assert out.count("finishing this round") == 1
    assert "continue with: fedloom resume run" in out
    done = (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") - 1
    assert f"{done:08d}" in {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}


@pytest.mark.slow
def test_torchrun_starts_ranks_too_on_two_machines(tmp_path: Path) -> None:
    """Each with a torchrun and a folder of its own, as far as one machine can be two; rank 0 alone writes."""
    (port,) = free_ports(1)
    extra = {"GLOO_SOCKET_IFNAME": "lo"}
    machines = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        where = ["--nnodes=2", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        launcher = [sys.executable, "-m", "support.torchrun", *where, "--nproc-per-node=1"]
        command = [*launcher, "--no-python", sys.executable, "-m", "fedloom"]
        machines.append(
            warm.Popen(
                [*command, "run", *WORDS, f"rounds={ROUNDS}", "--out", "run"],
                cwd=tmp_path / str(number),
                env=environment(extra),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [machine.communicate(timeout=600) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert "".join(out for out, _ in said).count("fedloom 0.") == 1
    assert result(tmp_path / "0" / "run") == undisturbed()
    assert not list((tmp_path / "1").iterdir())


@pytest.mark.parametrize("world", [{"RANK": "x"}, {"RANK": "1"}, {"RANK": "7"}, {"WORLD_SIZE": "two", "RANK": "0"}])
def test_a_world_that_cannot_be_is_one_error(tmp_path: Path, world: dict[str, str]) -> None:
    done = fedloom("run", *WORDS, cwd=tmp_path, env={"WORLD_SIZE": "2", **world})
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert "start ranks with --ranks or torchrun, or unset RANK and WORLD_SIZE" in done.err
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_is_said_before_anything_starts(tmp_path: Path) -> None:
    done = fedloom("run", *WORDS, "--ranks", "two", cwd=tmp_path)
    assert (done.code, done.err.count("--ranks")) == (2, 1)
    assert not list(tmp_path.iterdir())
    rank = {"RANK": "1", "WORLD_SIZE": "2"}
    done = fedloom("compare", "fedavg", "fedopt", cwd=tmp_path, env={**rank, "RANK": "0"})
    assert done.code == 2
    assert "without torchrun" in done.err
