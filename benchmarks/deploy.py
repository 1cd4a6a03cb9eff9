"""A round of a deployment beside a round of plain Flower, on one machine, with real processes.

    python -m benchmarks.deploy [--nodes 50] [--rounds 20] [--large-rounds 3] [--turns 1] [--only small large]

small    many nodes and a softmax regression of 650 numbers: what a round costs by itself
large    two nodes and a net of 99 MB: what bytes cost

Flower runs its own FedAvg on arrays of the same size, over TLS, without node keys, with clients that take a step in
NumPy (``benchmarks/drivers/plain_flower.py``). fedloom has TLS, keys and its gate, steps in PyTorch, checks what
arrives, and saves a checkpoint after every round. Both run in turns, Flower first. A round is counted from the end of
the one before. Processor time and memory (PSS) are those of all processes together, looked at every half second;
processor time depends less on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tomli_w
from sklearn.datasets import load_digits

from benchmarks.machine import write
from fedloom.deploy import flower, keys
from fedloom.deploy.fleet import read_rounds
from fedloom.deploy.local import run_local
from fedloom.deploy.site import SERVER
from fedloom.runs.settings import Config, parse

ROOT = Path(__file__).parents[1]
PATIENCE = 3600.0  # seconds that a federation may take
SMALL = 650  # numbers of a softmax regression on digits
LARGE = (5000, 4900)  # hidden units of a net of 99 MB
LARGE_SIZE = 64 * 5000 + 5000 + 5000 * 4900 + 4900 + 4900 * 10 + 10


def config_of(rounds: int, hidden: tuple[int, ...] = ()) -> Config:
    """FedAvg on digits, one step a round; the server evaluates at the end."""
    model = {"kind": "mlp", "widths": list(hidden)} if hidden else {"kind": "logistic"}
    return parse(
        {
            "rounds": rounds,
            "model": model,
            "partition": {"kind": "iid"},
            "local": {"steps": 1, "batch": 8},
            "cohort": {"sampling": "all"},
            "evaluate": {"personal": False, "every": rounds},
        }
    )


# -- fedloom --------------------------------------------------------------------------------------
def fedloom_rounds(nodes: int, config: Config, folder: Path) -> list[float]:
    """When each round of a deployment ended."""
    ends: list[float] = []
    with _looking(lambda: _note(ends, folder / "site" / SERVER)):
        found = run_local(config, nodes, folder / "site", folder, lambda _: None)
    assert found["state"] == "completed", found
    return ends


def _note(ends: list[float], home: Path) -> None:
    trained = [line for line in read_rounds(home) if line["kind"] == "train"]
    ends += [time.time()] * (len(trained) - len(ends))


# -- Flower ---------------------------------------------------------------------------------------
def flower_rounds(nodes: int, rounds: int, size: int, folder: Path) -> list[float]:
    """When each round of Flower's FedAvg ended."""
    os.environ["PYTHONPATH"] = str(ROOT)  # where the programs find the driver
    port, ends = flower.free_port(), folder / "ends"
    x, y = load_digits(return_X_y=True)
    np.savez(folder / "rows.npz", x=(x / 16).astype(np.float32), y=y)
    _write_app(folder, port, nodes=nodes, rounds=rounds, size=size, ends=str(ends), rows=str(folder / "rows.npz"))
    at = ["--host", "127.0.0.1", "--port"]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        words = ["flower-superlink", *at, str(port), "--disable-runtime-dependency-installation"]
        words += ["--ssl-ca-certfile", str(folder / "ca.crt")]
        words += ["--ssl-certfile", str(folder / "server.pem"), "--ssl-keyfile", str(folder / "server.key")]
        processes.append(flower.started(words, folder, folder / "superlink.log"))
        flower.wait_for_port(port, processes[0], folder / "superlink.log")
        for number in range(nodes):
            words = ["flower-supernode", "--superlink", f"127.0.0.1:{port}", *at, str(flower.free_port())]
            words += ["--root-certificates", str(folder / "ca.crt")]
            processes.append(flower.started(words, folder, folder / f"node-{number}.log"))
        flower.call(folder, "run", str(folder / "app"))
        until = time.monotonic() + PATIENCE
        while not ends.exists() or len(ends.read_text().splitlines()) <= rounds:
            assert time.monotonic() < until, flower.last_words(folder / "superlink.log")
            time.sleep(0.1)
    finally:
        flower.ended(processes)
    return [float(line) for line in ends.read_text().splitlines()[1:]]  # the first is before any round


def _write_app(folder: Path, port: int, **asked: Any) -> None:
    authority, key, certificate = keys.new_authority("plain Flower")
    pair = keys.new_server(["127.0.0.1"], key, certificate)
    for name, data in (("ca.crt", authority.public), ("server.pem", pair.public), ("server.key", pair.private)):
        (folder / name).write_bytes(data)
    link = {"address": f"127.0.0.1:{port}", "root-certificates": str(folder / "ca.crt")}
    connection = {"superlink": {"default": flower.CONNECTION, flower.CONNECTION: link}}
    driver = "benchmarks.drivers.plain_flower"
    components = {"serverapp": f"{driver}:server", "clientapp": f"{driver}:client"}
    app = {
        "project": {"name": "plain", "version": "1.0.0", "license": "Apache-2.0", "dependencies": []},
        "tool": {"flwr": {"app": {"publisher": "plain", "components": components, "config": asked}}},
    }
    for path, table in ((folder / "flwr" / "config.toml", connection), (folder / "app" / "pyproject.toml", app)):
        path.parent.mkdir()
        path.write_text(tomli_w.dumps(table))


# -- measuring ------------------------------------------------------------------------------------
class Watch:
    """What the processes below this one use."""

    def __init__(self) -> None:
        self.most = 0  # kilobytes at one time
        self._spent: dict[int, float] = {}  # seconds of each process
        self._totals: list[tuple[float, float]] = []  # time, seconds of all processes until then

    def look(self) -> None:
        used, waiting = 0, [os.getpid()]
        while waiting:
            one = waiting.pop()
            with suppress(OSError, IndexError, ValueError, StopIteration):
                tasks = Path(f"/proc/{one}/task").glob("*/children")
                waiting += [int(child) for task in tasks for child in task.read_text().split()]
                if one != os.getpid():
                    times = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:13]
                    self._spent[one] = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
                    lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()
                    used += int(next(line for line in lines if line.startswith("Pss:")).split()[1])
        self.most = max(self.most, used)
        self._totals.append((time.time(), sum(self._spent.values())))

    def spent(self, since: float, until: float) -> float:
        """Seconds that all processes together have computed between two moments."""
        at = [max((total for when, total in self._totals if when <= moment), default=0.0) for moment in (since, until)]
        return at[1] - at[0]


def measured(work: Callable[[Path], list[float]]) -> dict[str, Any]:
    """Seconds of each round but the first, processor seconds of one of them, and the memory of all processes."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, _looking(watch.look, 0.5):
        ends = work(Path(folder))
    each = [round(b - a, 3) for a, b in pairwise(ends)]
    cpu = watch.spent(ends[0], ends[-1]) / len(each)
    return {"each": each, "cpu": round(cpu, 3), "memory_mb": round(watch.most / 1024)}


@contextmanager
def _looking(look: Callable[[], object], seconds: float = 0.1) -> Iterator[None]:
    """Look again and again while something else is done."""
    stop = threading.Event()

    def again() -> None:
        while not stop.wait(seconds):
            with suppress(OSError, ValueError):
                look()

    thread = threading.Thread(target=again)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        look()


def compared(nodes: int, rounds: int, turns: int, size: int, hidden: tuple[int, ...] = ()) -> dict[str, Any]:
    """Both in turns: seconds and processor seconds of a round, memory, and how many times as much fedloom takes."""
    config = config_of(rounds, hidden)
    took: dict[str, list[dict[str, Any]]] = {"flower": [], "fedloom": []}
    for _ in range(turns):
        took["flower"].append(measured(lambda folder: flower_rounds(nodes, rounds, size, folder)))
        took["fedloom"].append(measured(lambda folder: fedloom_rounds(nodes, config, folder)))
        print(json.dumps(took), flush=True)
    found: dict[str, Any] = {"nodes": nodes, "rounds": rounds, "turns": turns, "parameters": size}
    for name, each in took.items():
        seconds = median(second for one in each for second in one["each"])
        cpu, memory = median(one["cpu"] for one in each), max(one["memory_mb"] for one in each)
        found[name] = {"seconds_a_round": round(seconds, 3), "cpu_a_round": round(cpu, 3), "memory_mb": memory}
        found[name]["each"] = [one["each"] for one in each]
    for what in ("seconds_a_round", "cpu_a_round", "memory_mb"):
        found[f"ratio_{what}"] = round(found["fedloom"][what] / found["flower"][what], 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--large-rounds", type=int, default=3)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--only", nargs="+", default=["small", "large"], choices=["small", "large"])
    asked = parser.parse_args()
    results: dict[str, Any] = {"load_before": os.getloadavg()[0]}
    if "small" in asked.only:
        results["small"] = compared(asked.nodes, asked.rounds, asked.turns, SMALL)
    if "large" in asked.only:
        results["large"] = compared(2, asked.large_rounds, asked.turns, LARGE_SIZE, LARGE)
    results["load_after"] = os.getloadavg()[0]
    print(write("deploy", results))


if __name__ == "__main__":
    main()
