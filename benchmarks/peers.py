"""A round of fedloom compared with the same round in other simulators, on this machine's CPU.

    python -m benchmarks.peers --envs FOLDER [--rounds 3] [--turns 3] [--only fedloom flgo flwr pfl hand] [--smoke]

The round of the FedALR paper: 100 clients with 500 CIFAR-10-shaped images each, 20 of them a round, one epoch of plain
SGD in batches of 64, FedAvg, the net ``cnn64``. The images are random and the same for all; nothing is evaluated in a
timed round. Each simulator has a virtual environment of its own below FOLDER, made when it is not there yet, with the
same PyTorch as ``constraints.txt`` says, and a driver in ``benchmarks/drivers`` that fedloom is no part of.

A turn starts every row once, as a process of its own: a round to get warm, then the timed ones. Turns follow each other
forwards and backwards, so that a machine that gets slower slows all equally, and the ratios are taken within turns.
Every row says how many steps and examples it trained in a round; one that did other work than was asked for is listed
among those that failed, with the reason, as is one that cannot be installed or run here.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import tomli_w

from benchmarks.drivers.work import CLASSES, SHAPE, Work
from benchmarks.machine import ratio, write

ROOT = Path(__file__).parents[1]
PARAMETERS = 797_962
TEST = 100  # rows on which fedloom evaluates before the first round and after the last
PATIENCE = 1800  # seconds that a row may take for its rounds
PACKAGES = {"flgo": "flgo>=0.4.4,<0.5", "flwr": "flwr[simulation]>=1.41,<1.43", "pfl": "pfl>=0.6,<0.7"}
PINNED = ("torch", "numpy")  # the versions of constraints.txt, for all
BUSY = 0.5  # load before the first turn above which a number is not worth much
SMOKE = Work(clients=6, examples=96, cohort=3)
BASE, SHARED = "fedloom", "fedloom-ranks"  # the rows that the others are compared with


class CannotError(Exception):
    """A row has no number, and why."""


@dataclass(frozen=True)
class Row:
    """One way to take the round."""

    family: str  # fedloom, hand, or a package of PACKAGES
    processes: int = 1  # that share out the clients of a round
    threads: int | None = None  # of PyTorch; None: what is chosen without a word
    bf16: bool = False  # the net computes in 16 bits


@dataclass
class Found:
    """What the turns of one row gave."""

    each: list[list[float]] = field(default_factory=list)  # seconds of the rounds, turn by turn
    whole: list[float] = field(default_factory=list)  # seconds of the process, turn by turn
    report: dict[str, Any] = field(default_factory=dict)  # of its process
    failed: str = ""


class Place(NamedTuple):
    """Where the data, and the environments, are."""

    data: Path
    envs: Path


def rows(cores: int) -> dict[str, Row]:
    """Every row, by name: each simulator as it comes, and in the ways it has to use all cores."""
    return {
        "hand": Row("hand"),
        "hand-bf16": Row("hand", bf16=True),
        BASE: Row("fedloom"),
        "flgo": Row("flgo"),
        "flgo-threads": Row("flgo", threads=cores),
        "flgo-parallel": Row("flgo", processes=cores),
        SHARED: Row("fedloom", processes=cores),
        "flwr": Row("flwr"),
        "flwr-parallel": Row("flwr", processes=cores),
        "flwr-parallel-bf16": Row("flwr", processes=cores, bf16=True),
        "fedloom-bf16": Row("fedloom", bf16=True),
        "pfl": Row("pfl"),
        "pfl-parallel": Row("pfl", processes=cores),
        "pfl-parallel-bf16": Row("pfl", processes=cores, bf16=True),
        "fedloom-ranks-bf16": Row("fedloom", processes=cores, bf16=True),
    }


# ----------------------------------------------------------------------------------------------- data, environments


def lay_out(folder: Path, work: Work) -> None:
    """The examples of all clients, for the drivers and, as one npz file, for fedloom."""
    rng, n = np.random.default_rng(0), work.clients * work.examples
    x = rng.integers(0, 256, (n + TEST, *SHAPE), dtype=np.uint8)
    y = rng.integers(0, CLASSES, n + TEST)
    client = np.arange(n + TEST) // work.examples % work.clients
    np.save(folder / "x.npy", x[:n])
    np.save(folder / "y.npy", y[:n])
    np.savez(folder / "all.npz", x=x, y=y, client=client, test=np.arange(n + TEST) >= n)
    (folder / "work.json").write_text(json.dumps(work._asdict()))


def python_of(family: str, envs: Path) -> Path:
    """The Python of this simulator, in an environment that is made if it is not there."""
    if family not in PACKAGES:
        return Path(sys.executable)
    env = envs.resolve() / family
    python, ready = env / "bin" / "python", env / "ready"
    if ready.exists() and ready.read_text() == PACKAGES[family]:
        return python
    print(f"making the environment of {family}", flush=True)
    pins = pinned()
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(env)],
        [str(python), "-m", "pip", "install", "--quiet", *pins],  # first, so that it is the build for this machine
        [str(python), "-m", "pip", "install", "--quiet", PACKAGES[family], *pins],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotError(f"cannot be installed: {reason(done.stderr)}")
    ready.write_text(PACKAGES[family])
    return python


def pinned() -> list[str]:
    """The lines of ``constraints.txt`` that hold for all environments."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in PINNED]


def reason(said: str) -> str:
    """The line of a process's output that says why it failed, without places on this machine."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["nothing was said"]
    telling = [line for line in lines if re.match(r"ERROR|[\w.]*(Error|Exception|Fault)\b", line)] or lines
    return re.sub(r"(https?:/)?(/[\w.+@-]+){2,}", "...", telling[-1])[:300]


# ----------------------------------------------------------------------------------------------------------- turns


def ran(command: list[str]) -> str:
    """What a process wrote to its standard output; it has the machine's cores and no word on threads."""
    hidden = {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, complaints = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise CannotError(f"took more than {PATIENCE} s") from error
    finally:
        if process.poll() is None:  # with all that it started
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode:
        raise CannotError(f"ended with code {process.returncode}: {reason(complaints)}")
    return said


def driven(row: Row, place: Place, rounds: int) -> dict[str, Any]:
    """What the driver of a simulator says of its rounds."""
    python = python_of(row.family, place.envs)
    how: list[str] = []
    if row.family == "pfl" and row.processes > 1:
        how = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(row.processes)]
    given = ["--rounds", str(rounds), "--processes", str(row.processes)]
    given += [] if row.threads is None else ["--threads", str(row.threads)]
    given += ["--bf16"] * row.bf16
    said = ran([str(python), *how, "-m", f"benchmarks.drivers.{row.family}", str(place.data), *given])
    report: dict[str, Any] = json.loads(said.splitlines()[-1])
    return report


def woven(row: Row, place: Place, rounds: int, work: Work) -> dict[str, Any]:
    """What the run folder of ``fedloom run`` says of its rounds: all of them but for the evaluation."""
    experiment = {
        "rounds": 1 + rounds,
        "data": {"source": "npz", "path": str(place.data / "all.npz"), "normalise": "half"},
        "partition": {"kind": "natural", "holdout": 0.0},
        "model": {"kind": "cnn64"},
        "algorithm": {"kind": "fedavg"},
        "local": {"lr": work.lr, "batch": work.batch},
        "cohort": {"size": work.cohort},
        "evaluate": {"every": 1 + rounds, "personal": False, "work": True},
        "engine": {"device": "cpu", "precision": "fp32"},
    }
    with tempfile.TemporaryDirectory() as scratch:
        file, out = Path(scratch) / "peers.toml", Path(scratch) / "run"
        file.write_text(tomli_w.dumps(experiment))
        words = ["engine.precision=bf16"] * row.bf16
        words += [] if row.processes == 1 else ["--ranks", str(row.processes)]
        ran([sys.executable, "-m", "fedloom", "run", str(file), "--out", str(out), *words])
        timed, worked = (_lines(out / f"{name}.jsonl")[1:] for name in ("timings", "work"))
        where = json.loads((out / "environment.json").read_text())
    steps = sum(sum(line["steps"]) for line in worked)
    clients = sum(line["clients"] for line in timed)
    about = ("executor", "executor_reason", "threads", "ranks")
    return {
        "seconds": [line["train"] + line["record"] for line in timed],
        "steps_a_round": steps / rounds,
        "examples_a_round": clients * work.examples / rounds,
        "parameters": where["parameters"],
        "settings": {
            "command": " ".join(["fedloom run FILE", *words]),
            "bf16": row.bf16,
            **{key: where[key] for key in about},
        },
        "versions": where["versions"],
    }


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def turn(row: Row, found: Found, place: Place, rounds: int, work: Work) -> None:
    """One turn of a row; once it has failed, it is not tried again."""
    take = partial(woven, work=work) if row.family == "fedloom" else driven
    began = time.perf_counter()
    try:
        report = take(row, place, rounds)
        check(report, work)
    except CannotError as error:
        found.failed = str(error)
        return
    found.whole.append(round(time.perf_counter() - began, 2))
    found.each.append([round(s, 4) for s in report.pop("seconds")])
    found.report = report


def check(report: dict[str, Any], work: Work) -> None:
    """That it trained what was asked for, not more and not less."""
    wanted = {
        "steps_a_round": work.steps,
        "examples_a_round": work.cohort * work.examples,
        "parameters": PARAMETERS,
    }
    for name, value in wanted.items():
        if report[name] != value:
            raise CannotError(f"did other work: {name} {report[name]:g}, not {value:g}")


# ---------------------------------------------------------------------------------------------------------- results


def summed_up(found: dict[str, Found]) -> dict[str, Any]:
    """Each row in numbers; the ratios say how many times faster fedloom is."""
    seconds = {name: [median(each) for each in one.each] for name, one in found.items() if not one.failed}
    results: dict[str, Any] = {}
    for name, one in found.items():
        if one.failed:
            results[name] = {"failed": one.failed}
            continue
        results[name] = {
            "seconds": round(median(seconds[name]), 4),
            "each": one.each,
            "process_seconds": one.whole,
            **{f"over_{base}": round(ratio(seconds, base, name), 3) for base in (BASE, SHARED) if base in seconds},
            **one.report,
        }
    return results


def table(results: dict[str, Any]) -> str:
    bases = (BASE, SHARED)
    lines = [f"{'':20}{'s a round':>11}" + "".join(f"{'/ ' + base:>17}" for base in bases)]
    for name, one in results.items():
        if "failed" in one:
            lines.append(f"{name:20}  {one['failed']}")
            continue
        ratios = (f"{one[f'over_{base}']:17.2f}" if f"over_{base}" in one else f"{'':17}" for base in bases)
        lines.append(f"{name:20}{one['seconds']:11.3f}" + "".join(ratios))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=Path, required=True, help="where the virtual environments are, or are made")
    parser.add_argument("--rounds", type=int, default=3, help="that a row is timed for in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--only", nargs="*", help=f"rows, or all rows of a simulator; {BASE} and {SHARED} are always among them"
    )
    parser.add_argument("--smoke", action="store_true", help="a round of nearly nothing, once; no result is written")
    given = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cores = len(os.sched_getaffinity(0))
    every = rows(cores)
    known = {*every, *(row.family for row in every.values())}
    if unknown := sorted(set(given.only or ()) - known):
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    wanted = set(given.only or known)
    chosen = {name: row for name, row in every.items() if name in (BASE, SHARED) or {name, row.family} & wanted}
    work, turns = (SMOKE, 1) if given.smoke else (Work(), given.turns)
    found, loads = {name: Found() for name in chosen}, []
    for family in sorted({row.family for row in chosen.values()} & set(PACKAGES)):
        try:
            python_of(family, given.envs)
        except CannotError as error:
            for name, row in chosen.items():
                found[name].failed = str(error) if row.family == family else found[name].failed
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder), given.envs)
        lay_out(place.data, work)
        for number in range(turns):
            loads.append(round(os.getloadavg()[0], 2))
            if number == 0 and loads[0] > BUSY:
                print(f"load {loads[0]}: others use this machine, which hurts rows of many threads most", flush=True)
            for name in list(chosen)[:: -1 if number % 2 else 1]:
                if not found[name].failed:
                    turn(chosen[name], found[name], place, given.rounds, work)
                    print(number + 1, name, found[name].failed or found[name].each[-1], flush=True)
    results: dict[str, Any] = {
        "work": {**work._asdict(), "net": "cnn64", "parameters": PARAMETERS, "steps_a_round": work.steps},
        "cores": cores,
        "load_before": loads,
        "rows": summed_up(found),
    }
    print(table(results["rows"]))
    print(json.dumps(results, indent=1) if given.smoke else write("peers", results))


if __name__ == "__main__":
    main()
