"""Whole federations on this machine: Flower's programs, keys, certificates and processes as between real machines."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fedloom.runs.settings import parse, read_toml
from fedloom.runs.start import start
from support import warm
from support.federation import table_of

pytest.importorskip("flwr")
PATIENCE = 600.0  # seconds: a busy machine is no fault of the code


def fedloom(*words: Any, **more: Any) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    return warm.Popen([sys.executable, "-P", "-m", "fedloom", "deploy", *map(str, words)], **pipes)


def said(*words: Any, code: int = 0) -> str:
    process = fedloom(*words)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, out + err
    return out + err


@contextmanager
def running(log: Path, *words: Any) -> Iterator[subprocess.Popen[str]]:
    """A server or a node, until the block ends."""
    with log.open("w") as file:
        process = fedloom(*words, stdout=file, stderr=file)
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()


def wait_until(true: Callable[[], Any], *processes: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def experiment(folder: Path, kind: str, **more: Any) -> Path:
    """Nobody evaluates but the server: every exchange with Flower takes seconds."""
    table = table_of(kind, evaluate={"personal": False}, **more)
    (folder / "exp.toml").write_text(tomli_w.dumps(table))
    return folder / "exp.toml"


def assert_as_simulated(site: Path, folder: Path) -> None:
    start(parse(read_toml(site / "server" / "experiment.toml")), out=folder, root=Path())
    run = site / "server" / "runs" / "1"
    assert (run / "metrics.jsonl").read_bytes() == (folder / "metrics.jsonl").read_bytes()
    found, expected = load_file(run / "model.safetensors"), load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_federation_on_one_machine_computes_what_the_simulation_does(tmp_path: Path) -> None:
    site = tmp_path / "site"
    words = ("local", experiment(tmp_path, "fedala", rounds=2), "--nodes", 2, "--out", site, "--json")
    found = json.loads(said(*words).splitlines()[0])
    assert (found["state"], found["round"], found["run_dir"]) == ("completed", 2, str(site / "server" / "runs" / "1"))
    assert found["last_round"]["answered"] == ["Node 1", "Node 2"]
    assert_as_simulated(site, tmp_path / "lab")
    assert (site / "node-1" / "model.safetensors").is_file()  # its own, which nobody else has
    audit = said("audit", site / "node-1")
    assert [line.split()[1] for line in audit.splitlines()] == ["welcome", "trained", "trained", "finished"]


def test_a_run_whose_process_was_killed_goes_on_and_strangers_stay_out(tmp_path: Path) -> None:
    site, port = tmp_path / "site", _free_port()
    named = ("--nodes", "Hospital A, Hospital B", "--port", port, "--out", site)
    said("init", experiment(tmp_path, "scaffold", rounds=2), *named)
    with ExitStack() as stack:
        server = stack.enter_context(running(tmp_path / "server.log", "server", site))
        wait_until(lambda: "ready for nodes" in (tmp_path / "server.log").read_text(), server)
        _assert_closed_to_strangers(site, port)
        nodes = [
            stack.enter_context(running(tmp_path / f"{name}.log", "node", site / name, "data=experiment"))
            for name in ("hospital-a", "hospital-b")
        ]
        assert "run 1 has started" in said("start", site)
        log, state = site / "server" / "rounds.jsonl", site / "server" / "state.json"
        wait_until(log.exists, server, *nodes)
        os.kill(json.loads(state.read_text())["process"], signal.SIGKILL)
        wait_until(lambda: json.loads(said_any("status", site, "--json"))["state"] == "failed", server, *nodes)
        assert "has resumed" in said("resume", site)
        wait_until(lambda: json.loads(state.read_text())["state"] in ("completed", "failed"), server, *nodes)
        found = json.loads(said("status", site, "--json"))
        assert (found["state"], found["round"], found["server"]) == ("completed", 2, "running")
        assert found["nodes"] == {"Hospital A": "online", "Hospital B": "online"}
        assert "round 2 of 2" in said("logs", site)
        assert "has ended" in said("resume", site, code=2)
        said("revoke", site, "Hospital B")
        assert json.loads(said("status", site, "--json"))["nodes"]["Hospital B"] == "no key"
    assert_as_simulated(site, tmp_path / "lab")


def said_any(*words: Any) -> str:
    return fedloom(*words).communicate(timeout=PATIENCE)[0]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _assert_closed_to_strangers(site: Path, port: int) -> None:
    """Without TLS, with another authority, on another interface or with a key that nobody knows."""
    from fedloom.deploy import flower, keys

    trusting = ssl.create_default_context(cafile=str(site / "server" / "ca.crt"))
    for path in ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/fleet/../control/list-runs", "/"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"https://127.0.0.1:{port}{path}", data=b"", context=trusting)
        assert refused.value.code == 403
    with pytest.raises(urllib.error.HTTPError) as refused:  # let through, and refused by the SuperLink
        urllib.request.urlopen(f"https://127.0.0.1:{port}/v1/fleet/pull-messages", data=b"", context=trusting)
    assert refused.value.code in (401, 415)
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(f"https://127.0.0.1:{port}/", context=ssl.create_default_context())
    with pytest.raises(OSError, match=r"(?i)remote end closed|reset|refused|eof|bad|disconnect"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/fleet/pull-messages", data=b"")
    stranger = site.parent / "stranger"
    stranger.mkdir()
    (stranger / "node.key").write_bytes(keys.new_node().private)
    (stranger / "node.key").chmod(0o600)
    words = ["flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(_free_port())]
    words += ["--root-certificates", str(site / "server" / "ca.crt"), "--max-retries", "1"]
    words += ["--auth-supernode-private-key", str(stranger / "node.key")]
    process = flower.started(words, stranger, stranger / "log")
    assert process.wait(PATIENCE) == 1
    assert "Failed to activate SuperNode" in (stranger / "log").read_text()
