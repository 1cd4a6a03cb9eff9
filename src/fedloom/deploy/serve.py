"""The server's side as processes: the SuperLink, the gate, and the nodes that may come in."""

from __future__ import annotations

import datetime
import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedloom.core import disk
from fedloom.core.errors import CheckpointError, ConfigError, Fault, FedloomError
from fedloom.deploy import flower, keys
from fedloom.deploy.contract import read_contract, read_outline
from fedloom.deploy.fleet import STOP, read_population, read_rounds, shown_metrics
from fedloom.deploy.site import (
    NODES,
    RUNS,
    SERVER,
    SERVER_TOML,
    folder_name,
    is_conducted,
    log_file,
    read_listens,
    read_rules,
    read_state,
    write_state,
)
from fedloom.deploy.waits import held_lock, until_stopped, writing
from fedloom.deploy.wire import HEARD
from fedloom.engine.checkpoint import readable
from fedloom.runs.look import look_at_run

ENDED = ("completed", "failed", "stopped")  # states of a run
_PATIENCE = 60.0  # seconds until a process that was killed must be gone
_LOOK = 0.5  # seconds between two looks at a log that grows
_FLOWER = "flower.json"  # Flower's number of the last run


def serve(site: Path, say: Callable[[str], None], *, trust: bool = False) -> None:
    """Run the server of a federation until it is stopped; ``trust``: the code in its contract may run."""
    home = site / SERVER
    contract, listens = read_contract(home, trust=trust), read_listens(home)
    _refuse_expired(home)
    lock = held_lock(home / ".server.lock", "another process serves this federation", f"fedloom deploy server {site}")
    inner = flower.free_port()
    processes: list[subprocess.Popen[bytes]] = []
    with until_stopped() as stop, writing(home, f"fedloom deploy server {site}"):
        try:
            _refuse_taken(home, *listens.place)
            log = home / "superlink.log"
            processes.append(flower.started(_superlink(home, inner), home, log))
            flower.wait_for_port(inner, processes[0], log)
            (home / NODES).unlink(missing_ok=True)  # what another SuperLink knew
            (home / HEARD).unlink(missing_ok=True)
            flower.write_connection(home, inner)  # from here on `start` may register keys too
            register(home, contract.nodes)
            bind, port = listens.place
            words = [sys.executable, "-P", "-m", "fedloom.deploy.gate", str(home.absolute()), bind]
            processes.append(flower.started([*words, str(port), str(inner)], home, home / "gate.log"))
            reached = "127.0.0.1" if bind == "0.0.0.0" else bind
            flower.wait_for_port(port, processes[1], home / "gate.log", reached)
            say(f"ready for nodes on {listens.host}:{listens.port}; start a run: fedloom deploy start {site}")
            while not stop.wait(0.5):
                for process, log in zip(processes, (home / "superlink.log", home / "gate.log"), strict=True):
                    if process.poll() is not None:
                        raise flower.FlowerError(f"{log.stem} has ended: {flower.last_words(log)}")
        finally:
            flower.ended(processes)
            os.close(lock)


def _superlink(home: Path, port: int) -> list[str]:
    """It keeps messages in memory: no upload stays on its disk, and large ones take half of the processor time."""
    at = home.absolute()
    return [
        *("flower-superlink", "--host", "127.0.0.1", "--port", str(port), "--enable-supernode-auth"),
        *("--ssl-ca-certfile", str(at / "ca.crt")),
        *("--ssl-certfile", str(at / "server.pem"), "--ssl-keyfile", str(at / "server.key")),
        "--disable-runtime-dependency-installation",
    ]


def _refuse_expired(home: Path) -> None:
    """Refuse to start with a certificate that nodes will refuse."""
    end = keys.valid_until((home / "server.pem").read_bytes())
    if end <= datetime.datetime.now(datetime.UTC):
        what = f"has ended on {end:%Y-%m-%d}, and nodes refuse it"
        raise ConfigError([Fault(str(home / "server.pem"), what, f"fedloom deploy renew {home.parent}")])


def _refuse_taken(home: Path, bind: str, port: int) -> None:
    """Refuse an address on which the gate cannot listen, before anything is started."""
    try:
        socket.create_server((bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET).close()
    except (OSError, UnicodeError) as error:
        what = f"cannot listen on port {port} of {bind}: {getattr(error, 'strerror', None) or error}"
        fix = "end what listens there, or choose another port, also in node.toml of the nodes"
        if getattr(error, "errno", None) != errno.EADDRINUSE:
            fix = "bind is an address of this machine, and ports below 1024 are for root"
        raise ConfigError([Fault(f"{home / SERVER_TOML}, server", what, fix)]) from error


def registered(home: Path) -> dict[str, str]:
    """Flower's number of each node whose key is registered, by name."""
    path = home / NODES
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def revoked_key(home: Path, name: str) -> bool:
    """Whether a node's key was revoked, and no other has taken its place."""
    return not (home / f"{folder_name(name)}.pub").is_file()


def register(home: Path, names: tuple[str, ...]) -> None:
    """Let the SuperLink know the keys of nodes that it does not know yet; one that was revoked is not there."""
    with _registering(home):
        known = registered(home)
        new = [name for name in names if name not in known and not revoked_key(home, name)]
        paths = [str(home.absolute() / f"{folder_name(name)}.pub") for name in new]
        answers = flower.calls(home, *(("supernode", "register", path) for path in paths)) if new else []
        ids = (str(flower.unrefused(home, answer)["node-id"]) for answer in answers)
        known |= dict(zip(new, ids, strict=True))
        if new or not (home / NODES).exists():
            disk.write_bytes(home / NODES, json.dumps(known, indent=1).encode())


@contextmanager
def _registering(home: Path) -> Iterator[None]:
    """One process at a time: the SuperLink refuses a key that it already has, and a server that starts has to register
    the same keys as a run that is started meanwhile."""
    lock = disk.lock(home / ".keys.lock", wait=True)
    try:
        yield
    finally:
        os.close(lock)


# -- runs -----------------------------------------------------------------------------------------
def last_run(home: Path) -> int:
    """The number of the last run; 0 where there is none."""
    return max((int(p.name) for p in (home / RUNS).glob("*") if p.name.isdecimal()), default=0)


def is_done(home: Path, run: int) -> bool:
    """Whether a run has come to its end."""
    return (home / RUNS / str(run) / "summary.json").is_file()


def start_run(site: Path) -> int:
    """Start a new run; its number."""
    home = site / SERVER
    read_outline(home)
    last = last_run(home)
    _refuse_running(home, site)
    if last and not is_done(home, last):
        raise CheckpointError(f"{home / RUNS / str(last)}: has not ended; continue with: fedloom deploy resume {site}")
    return _begun(home, last + 1)


def resume_run(site: Path) -> int:
    """Go on with the last run from its last checkpoint, as a new run of Flower's; its number."""
    home = site / SERVER
    read_outline(home)
    last = last_run(home) or int(read_state(home).get("run", 0))
    if not last:
        raise CheckpointError(f"{home}: has no run yet; start one with: fedloom deploy start {site}")
    if is_done(home, last):
        raise CheckpointError(f"{home / RUNS / str(last)}: has ended; a new one: fedloom deploy start {site}")
    _refuse_running(home, site)
    return _begun(home, last)


def _refuse_running(home: Path, site: Path) -> None:
    if is_conducted(home):
        raise CheckpointError(f"{home}: a run is under way; stop it with: fedloom deploy stop {site}")


def _refuse_revoked(home: Path, names: tuple[str, ...]) -> None:
    """Refuse to start where too many keys were revoked for the quorum."""
    gone = [name for name in names if revoked_key(home, name)]
    rules = read_rules(home)
    needed = rules.needed(len(names))
    if len(names) - len(gone) < needed:
        what = f"{needed} of {len(names)} nodes are needed, and keys were revoked: {', '.join(gone)}"
        lower = "a secure sum needs more than half" if rules.secure_sum else "or lower quorum"
        fix = f'fedloom deploy renew {home.parent} "{gone[0]}"; {lower} (quorum is {rules.quorum:g})'
        raise ConfigError([Fault(f"{home / SERVER_TOML}, rules.quorum", what, fix)])


def _begun(home: Path, run: int) -> int:
    names = read_outline(home).nodes
    _refuse_revoked(home, names)
    with writing(home, "try again"):
        register(home, names)
        disk.make_folder(home / RUNS)
        (home / STOP).unlink(missing_ok=True)
        before = read_state(home)
        write_state(home, run, "starting")
        try:
            number = flower.run_app(home, run)
        except flower.FlowerError:  # there is no such run, so the last one is still that of before
            write_state(home, int(before.pop("run", 0)), before.pop("state", "idle"), **before)
            raise
        disk.write_bytes(home / _FLOWER, json.dumps({"run": run, "id": number}).encode())
    return run


def stop_run(site: Path, *, now: bool = False) -> None:
    """Let the run under way end after its round; ``now``: at once, and without that round."""
    home = site / SERVER
    read_outline(home)
    if not is_conducted(home):
        raise CheckpointError(f"{home}: no run is under way")
    if now:
        _end_run(home)
    else:
        with writing(home, "try again"):
            disk.write_bytes(home / STOP, b"")


def _end_run(home: Path) -> None:
    """End the process of the run; its last checkpoint stays."""
    recorded, number, until = read_state(home), _flower_id(home), time.monotonic() + _PATIENCE
    while is_conducted(home) and time.monotonic() < until:
        with suppress(ProcessLookupError, KeyError):
            os.kill(int(recorded["process"]), signal.SIGKILL)
        time.sleep(0.1)
    write_state(home, int(recorded.get("run", 0)), "stopped", why="stopped in a round, which is lost")
    if number:
        with suppress(flower.FlowerError):  # the run is over, whether or not the SuperLink knows
            flower.call(home, "stop", number)


def revoke(site: Path, name: str) -> None:
    """Let a node's key open nothing any more; the key can never be registered again."""
    home = site / SERVER
    read_outline(home)
    with _registering(home), writing(home, "try again"):
        known = registered(home)
        if name not in known:
            raise ConfigError([Fault("NAME", f"no node is called '{name}'", f"nodes: {', '.join(known) or 'none'}")])
        flower.call(home, "supernode", "unregister", known.pop(name))
        (home / f"{folder_name(name)}.pub").unlink(missing_ok=True)  # first, so that no later server registers it
        disk.write_bytes(home / NODES, json.dumps(known, indent=1).encode())


def _flower_id(home: Path) -> str:
    try:
        return str(json.loads((home / _FLOWER).read_bytes())["id"])
    except (OSError, ValueError, KeyError):
        return ""


def log_text(site: Path) -> str:
    """The log of the last run; Flower's, where it has failed before it wrote its own."""
    home = site / SERVER
    read_outline(home)
    run, number = read_state(home).get("run"), _flower_id(home)
    if not run or not number:
        raise CheckpointError(f"{home}: has no run yet; start one with: fedloom deploy start {site}")
    own = log_file(home, int(run))
    return own.read_text(encoding="utf-8") if own.is_file() else flower.log_of(home, number)


def followed_log(site: Path, stop: threading.Event) -> Iterator[str]:
    """The log of the last run, part by part, until the run has ended."""
    home, shown = site / SERVER, 0
    while True:
        over = not _is_under_way(site)  # looked at first: what a run says last is in its log by then
        own = log_file(home, int(read_state(home).get("run", 0)))
        text = log_text(site) if over or own.is_file() else ""
        yield text[shown:]
        shown = len(text)
        if over or stop.wait(_LOOK):
            return


def _is_under_way(site: Path) -> bool:
    home = site / SERVER
    if is_conducted(home):
        return True
    return read_state(home).get("state") == "starting" and status_of(site)["state"] in ("starting", "running")


def status_of(site: Path) -> dict[str, Any]:
    """How the federation is doing: its server, its nodes, its last run."""
    home = site / SERVER
    contract, number = read_outline(home), _flower_id(home)
    found: dict[str, Any] = {"site": str(site), "server": "running", "nodes": dict.fromkeys(contract.nodes, "unknown")}
    flower_run: dict[str, Any] = {}
    try:
        about_run = [("list", "--run-id", number)] if number else []
        listed, *more = flower.calls(home, ("supernode", "list"), *about_run)
        by_id = {str(node["node-id"]): str(node["status"]) for node in flower.unrefused(home, listed)["nodes"]}
        known = registered(home)
        found["nodes"] = {name: by_id.get(known.get(name, ""), "no key") for name in contract.nodes}
        found["heard"] = _heard(home, contract.nodes)
        flower_run = next((run for answer in more for run in answer.get("runs", [])), {})  # of this SuperLink
    except flower.FlowerError as error:
        found |= {"server": "not running", "why": str(error)}
    conducted = is_conducted(home)  # checked first: a run records how it ended before it releases its lock
    recorded = read_state(home)
    folder = home / RUNS / str(recorded.get("run"))
    saved = readable(folder / "checkpoints")
    state, why = _state_of_run(recorded, conducted, flower_run, _gone(site, saved=bool(saved)))
    lines = [line for line in read_rounds(home) if line["run"] == recorded.get("run")]
    trained = [line for line in lines if line["kind"] == "train"]
    rounds = {line["round"] + 1: line for line in trained}
    done = max(rounds, default=0)
    found |= {"state": state, "run": recorded.get("run"), "round": done, "rounds": contract.rounds}
    if state == "failed" and done > max(saved, default=0):  # nodes have sent, but a round is done once it is saved
        found |= {"round": max(saved, default=0), "failed_round": done}
    if why:
        found["why"] = why
    if done:
        found["last_round"] = {key: rounds[done][key] for key in ("answered", "late", "failed", "seconds")}
    population = read_population(home, int(recorded.get("run", 0)))
    if population is not None:
        found["rows"] = dict(zip(contract.nodes, population.train, strict=False))
    if folder.is_dir():  # a run that failed before its first round has none
        found |= {"run_dir": str(folder), **_progress(folder, running=state == "running")}
    return found


def _progress(folder: Path, *, running: bool) -> dict[str, Any]:
    """The newest metrics of a run, how long its rounds take, and how long the rest will take."""
    try:
        view = look_at_run(folder)
    except FedloomError:  # it has only begun, or its files are damaged, which a run says itself
        return {}
    found: dict[str, Any] = {"metrics": shown_metrics(view.last)}
    if view.timings:
        found["seconds_a_round"] = round(view.seconds / len(view.timings), 3)
    if running and view.seconds_left is not None:
        found["seconds_left"] = round(view.seconds_left, 1)
    return found


def _heard(home: Path, names: tuple[str, ...]) -> dict[str, float]:
    """How many seconds ago the gate has heard of each node, by name; a node is heard every few seconds."""
    try:
        times = json.loads((home / HEARD).read_bytes())
    except FileNotFoundError:
        return {}
    paths = {name: home / f"{folder_name(name)}.pub" for name in names}
    known = {name: keys.pem_of(path.read_bytes()) for name, path in paths.items() if path.is_file()}
    return {name: round(max(0.0, time.time() - times[key]), 1) for name, key in known.items() if key in times}


def _gone(site: Path, *, saved: bool) -> str:
    """What has become of a run whose process is gone, and how it goes on; ``saved``: whether it has a checkpoint."""
    left = "from its last checkpoint" if saved else "from the beginning, since nothing was saved before"
    return f"the process of the run is gone; fedloom deploy resume {shlex.quote(str(site))} continues it {left}"


def _state_of_run(recorded: dict[str, Any], conducted: bool, flower_run: dict[str, Any], gone: str) -> tuple[str, str]:
    """The state of the last run and why: from what it wrote itself, whether its process lives, and what Flower says.

    ``gone``: why it has failed if its process does not live.
    """
    own, flowers, details = (
        recorded.get("state", "idle"),
        flower_run.get("status", ""),
        flower_run.get("status-details", ""),
    )
    found, why = "failed", gone
    if own in ENDED or own == "idle":
        found, why = own, str(recorded.get("why", ""))
    elif conducted:
        found, why = "running", ""
    elif own == "starting" and flowers in ("pending", "starting", "running"):
        found, why = "starting", ""
    elif flowers == "finished:stopped":
        found, why = "stopped", ""
    elif details not in ("", "N/A"):
        why = f"{why} ({details})"
    return found, why
