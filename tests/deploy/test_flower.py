"""Whole federations on this machine: Flower's programs, keys, certificates and processes as between real machines."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import reduce
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from fedloom.core.disk import write_bytes
from fedloom.deploy.conduct import conduct
from fedloom.deploy.fleet import Failed, read_rounds
from fedloom.runs.settings import parse, read_toml
from fedloom.runs.start import start
from support import warm
from support.federation import a_site, config_of, here, table_of, weights
from support.ports import free_ports
from support.way import Way

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


class Running:
    """Servers and nodes that run until the block ends."""

    def __init__(self, logs: Path) -> None:
        self._logs, self._processes = logs, dict[str, subprocess.Popen[str]]()

    def start(self, name: str, *words: Any, **more: Any) -> subprocess.Popen[str]:
        with self.log(name).open("a") as file:
            self._processes[name] = fedloom(*words, stdout=file, stderr=file, **more)
        return self._processes[name]

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def stop(self, *names: str) -> None:
        """Stop these, at the same time."""
        ending = {name: self._processes.pop(name) for name in names}
        for process in ending.values():
            process.send_signal(signal.SIGTERM)
        for name, process in ending.items():
            assert process.wait(PATIENCE) == 0, self.log(name).read_text()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        """Stop the nodes, and then the server, to which they say goodbye."""
        try:
            if failed is None:
                self.stop(*self._processes.keys() - {"server"})
                self.stop(*self._processes)
        finally:
            for process in self._processes.values():
                process.kill()


@contextmanager
def killed_at_last(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive the block, where it would be waited for, even if the block fails."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(true: Callable[[], Any], *processes: subprocess.Popen[str]) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)


def _state(site: Path) -> str:
    return str(json.loads((site / "server" / "state.json").read_text())["state"])


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


def test_a_federation_on_one_machine_computes_what_the_simulation_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where an organisation has a proxy, which does not lead to other processes of the same machine."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    site = tmp_path / "site"
    words = ("local", experiment(tmp_path, "fedala", rounds=1), "--nodes", 2, "--out", site, "--json")
    printed = said(*words)
    found = json.loads(printed.splitlines()[0])
    assert re.search(r"\nround 1 of 1  .* s  global/test/accuracy 0\.", printed)
    assert (found["state"], found["round"], found["run_dir"]) == ("completed", 1, str(site / "server" / "runs" / "1"))
    assert found["last_round"]["answered"] == ["Node 1", "Node 2"]
    assert_as_simulated(site, tmp_path / "lab")
    assert (site / "node-1" / "model.safetensors").is_file()  # its own, which nobody else has
    audit = said("audit", site / "node-1")
    assert [line.split()[1] for line in audit.splitlines()] == ["welcome", "trained", "finished"]


def test_a_run_survives_kills_and_a_bad_network_and_strangers_stay_out(tmp_path: Path) -> None:
    """The SuperLink is killed in the second round, and with it the run, which loses what a node has trained.

    The other node comes back with other keys; its network stalls and breaks.
    """
    site, (port,) = tmp_path / "site", free_ports(1)
    named = ("--nodes", "Hospital A, Hospital B", "--port", port, "--out", site)
    said("init", experiment(tmp_path, "scaffold", rounds=2), *named)
    state, saved = site / "server" / "state.json", site / "server" / "runs" / "1" / "checkpoints" / "00000001"
    with Way(port) as network, Running(tmp_path) as programs:

        def node(name: str, **more: Any) -> subprocess.Popen[str]:
            return programs.start(name, "node", site / name, "data=experiment", **more)

        settings = site / "hospital-b" / "node.toml"
        settings.write_text(settings.read_text().replace(str(port), str(network.port)))
        with killed_at_last(fedloom("server", site)) as first:
            wait_until(lambda: listens(port), first)
            _assert_closed_to_strangers(site, port)
            a, b = node("hospital-a", **_stops_in_round(2, site / "hospital-a")), node("hospital-b")
            assert "run 1 has started" in said("start", site)
            wait_until(lambda: _is_stopped(a), first, a, b)
            assert saved.exists()
            run = json.loads(state.read_text())["process"]
            os.kill(_descendant(first.pid, "flower-superlink"), signal.SIGKILL)
            a.send_signal(signal.SIGCONT)
            assert "superlink has ended" in first.communicate(timeout=PATIENCE)[1]
            assert first.returncode == 5
        programs.stop("hospital-b")
        wait_until(lambda: _has_ended(run), a)
        before = state.read_bytes()
        assert f"the server does not run; start it with: fedloom deploy server {site}" in said("resume", site, code=5)
        assert state.read_bytes() == before  # that there was no such run is not how the last one ended
        wait_until(lambda: "cannot be reached; trying again" in programs.log("hospital-a").read_text(), a)
        server = programs.start("server", "server", site)
        wait_until(lambda: "ready for nodes" in programs.log("server").read_text(), server)
        old = (site / "hospital-b" / "node.key").read_bytes()
        said("revoke", site, "Hospital B")
        assert not (site / "server" / "hospital-b.pub").exists()
        refused = said("resume", site, code=2)
        assert "rules.quorum: 2 of 2 nodes are needed, and keys were revoked: Hospital B" in refused
        assert "hand node.key" in said("renew", site, "Hospital B")
        assert (site / "hospital-b" / "node.key").read_bytes() != old
        b = node("hospital-b")
        network.stalls = True
        assert "has resumed" in said("resume", site)
        network.stalls = False
        network.cut()
        wait_until(lambda: json.loads(state.read_text())["state"] in ("completed", "failed"), server, a, b)
        assert "has ended" in said("resume", site, code=2)
        assert "no run is under way" in said("stop", site, "--now", code=2)
        found = json.loads(said("status", site, "--json"))
        assert (found["state"], found["round"], found["server"]) == ("completed", 2, "running")
        assert found["nodes"] == {"Hospital A": "online", "Hospital B": "online"}
        assert "round 2 of 2" in said("logs", site)
        assert programs.log("hospital-a").read_text().count(f"connected to 127.0.0.1:{port}") >= 2
    lines = [(line["round"], line["answered"]) for line in read_rounds(site / "server") if line["kind"] == "train"]
    assert lines == [(0, ["Hospital A", "Hospital B"]), (1, ["Hospital A", "Hospital B"])]  # none of them twice
    assert_as_simulated(site, tmp_path / "lab")


def test_a_secure_sum_goes_on_without_a_node_that_is_killed_in_it(tmp_path: Path) -> None:
    """All its processes are killed once it has sealed its seeds and trained: the others must take its masks away.

    Nobody waits for it until the deadline, since its key is revoked. The clock of another node is two minutes slow.
    The run is started while the server still registers keys, and nodes come through a proxy that has the server's port.
    """
    site, (inner,), quorum = tmp_path / "site", free_ports(1), ("quorum = 1.0", "quorum = 0.6")
    with Way(inner) as proxy, Running(tmp_path) as programs:
        named = ("--nodes", "Ada, Bea, Cem", "--port", proxy.port, "--out", site)
        said("init", experiment(tmp_path, "scaffold", rounds=1), *named)
        shutil.copytree(site, tmp_path / "plain")
        rules = site / "server" / "server.toml"
        more = [("secure_sum = false", "secure_sum = true"), ("proxied = 0", f"proxied = {inner}")]
        rules.write_text(reduce(lambda text, change: text.replace(*change), [quorum, *more], rules.read_text()))
        server = programs.start("server", "server", site)
        wait_until((site / "server" / "flwr" / "config.toml").exists, server)
        said("start", site)
        ada, bea = (
            programs.start(name, "node", site / name, "data=experiment", clock=clock)
            for name, clock in (("ada", -120), ("bea", 0))
        )
        nowhere = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        cem = fedloom("node", site / "cem", "data=experiment", **nowhere, **_stops_in_round(1, site / "cem"))
        wait_until(lambda: _is_stopped(cem), server, cem, ada, bea)
        at_once = (*_descendants(cem.pid), cem.pid)
        for kind in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none answers for one that is dead already
            for pid in at_once:
                with suppress(ProcessLookupError):
                    os.kill(pid, kind)
        said("revoke", site, "Cem")
        done = site / "server" / "runs" / "1" / "summary.json"
        wait_until(lambda: done.exists() or _state(site) == "failed", server, ada, bea)
    (line,) = (line for line in read_rounds(site / "server") if line["kind"] == "train")
    assert (line["answered"], *line["failed"]) == (["Ada", "Bea"], "Cem")
    # Flower may notice first, also that what its killed processes had begun to send never arrives.
    noticed = ("its key has been revoked", "is not connected", "was cut off while it sent its answer")
    assert line["failed"]["Cem"] in noticed
    plain = tmp_path / "plain" / "server"
    (plain / "server.toml").write_text((plain / "server.toml").read_text().replace(*quorum))
    other = here(plain)
    other.tamper = lambda count, client, answer: Failed("was killed") if (count, client) == (2, 2) else answer
    conduct(plain, other, 1, print)
    for found, expected in zip(weights(site / "server" / "runs" / "1"), weights(plain / "runs" / "1"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def _descendants(pid: int) -> list[int]:
    """The processes below this one."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        with suppress(OSError):  # it has ended meanwhile
            below = [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
            found, waiting = found + below, waiting + below
    return found


def _descendant(pid: int, name: str) -> int:
    """The process below this one that is this program."""
    for one in _descendants(pid):
        with suppress(OSError):  # it has ended meanwhile
            if Path(f"/proc/{one}/comm").read_text().strip() == name[:15]:
                return one
    raise AssertionError(f"no process below {pid} is {name}")


def _stops_in_round(number: int, folder: Path) -> dict[str, Any]:
    """What lets a node stop once it has trained a round, before it saves its state and answers.

    It reads the file of its states once, and each round removes, opens and renames a part of it.
    """
    return {"crash_at": 3 * number - 1, "crash_by": signal.SIGSTOP, "place": str(folder / "runs" / "1" / "states.json")}


def _is_stopped(process: subprocess.Popen[str]) -> bool:
    return "State:\tT" in Path(f"/proc/{process.pid}/status").read_text()


def _has_ended(pid: int) -> bool:
    """Also if nobody has asked for its exit code yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_an_app_ends_with_what_started_it(tmp_path: Path) -> None:
    """As Flower's apps would not, which leaves two of them at work when a node is started again."""
    app = "import time, pathlib, sys; from fedloom.deploy.waits import end_with_parent; end_with_parent(); "
    app += "pathlib.Path(sys.argv[1]).write_text('ready'); time.sleep(600)"
    starter = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]]); print(p.pid, flush=True)"
    )
    words = [sys.executable, "-c", f"{starter}; p.wait()", app, str(tmp_path / "there")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait_until((tmp_path / "there").exists, parent)
        parent.kill()
    wait_until(lambda: _has_ended(pid))


def test_a_certificate_that_has_ended_is_refused_by_the_server_and_by_nodes(tmp_path: Path) -> None:
    from fedloom.deploy import keys

    site, (port,) = tmp_path / "site", free_ports(1)
    said("init", experiment(tmp_path, "fedavg"), "--nodes", "Ada, Bea", "--port", port, "--out", site)
    home = site / "server"
    authority = keys.read_authority((site / "authority" / "ca.key").read_bytes(), (home / "ca.crt").read_bytes())
    ended = keys.new_server(["127.0.0.1"], *authority, days=0)
    (home / "server.pem").write_bytes(ended.public)
    (home / "server.key").write_bytes(ended.private)
    time.sleep(1.1)  # until it has ended
    assert f"fedloom deploy renew {site}" in said("server", site, code=2)

    def refused(why: str) -> None:
        assert re.search(why, " ".join(said("node", site / "ada", "data=experiment", code=5).split()))

    with a_gate(home, port, upstream=1):
        refused(r"certificate has expired \(at the coordinator: fedloom deploy renew\), or this .* clock is fast")
    assert "start the server again" in said("renew", site)
    assert keys.valid_until((home / "server.pem").read_bytes()) > keys.valid_until(ended.public)
    settings = site / "ada" / "node.toml"
    settings.write_text(settings.read_text().replace("127.0.0.1", "127.0.0.2"))
    with a_gate(home, port, upstream=1):
        refused(r"127\.0\.0\.2:.* certificate is for another name; set server in node\.toml")
        strange = keys.new_authority("another")[0].public
        (site / "ada" / "ca.crt").write_bytes(strange)
        refused("certificate is not the federation's")


@contextmanager
def a_gate(home: Path, port: int, upstream: int) -> Iterator[None]:
    """The gate of a server alone."""
    from fedloom.deploy import flower

    words = [sys.executable, "-P", "-m", "fedloom.deploy.gate", str(home), "0.0.0.0", str(port), str(upstream)]
    with (home / "gate.log").open("ab") as log:
        gate = warm.Popen(words, env=flower.world(home), cwd=home, stdout=log, stderr=log)
    try:
        flower.wait_for_port(port, gate, home / "gate.log")
        yield
    finally:
        flower.ended([gate])


def test_a_port_that_is_taken_is_named_and_nothing_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said("init", experiment(tmp_path, "fedavg"), "--nodes", "Ada, Bea", "--port", port, "--out", tmp_path / "site")
        told = said("server", tmp_path / "site", code=2)
    assert f"server.toml, server: cannot listen on port {port} of 127.0.0.1: Address already in use" in told
    assert not (tmp_path / "site" / "server" / "superlink.log").exists()
    proxy = (tmp_path / "site" / "server" / "nginx.conf").read_text()
    assert f"listen {port} ssl" in proxy
    assert f"proxy_pass https://127.0.0.1:{port + 1};" in proxy  # both cannot listen on one port
    assert f"proxied = {port + 1}" in proxy


def test_a_node_cannot_fill_the_memory_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower stores the pieces of a message as they come, however many there are."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)  # as in a ServerApp, which sends messages
    home, (port,), piece = a_site(tmp_path / "site", config_of("fedavg")), free_ports(1), 30 << 20
    received: list[int] = []

    class Stored(BaseHTTPRequestHandler):
        """In the place of the SuperLink."""

        def do_POST(self) -> None:
            received.append(len(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(401 if self.headers["flwr-public-key"] == "Zm9yZ2Vk" else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(home / "server.pem", home / "server.key")
    trusting = ssl.create_default_context(cafile=str(home / "ca.crt"))

    def sent(key: str, path: str = "push-object", size: int = piece) -> int:
        """The status of the answer."""
        asked = urllib.request.Request(f"https://127.0.0.1:{port}/v1/fleet/{path}", data=bytes(size))
        asked.add_header("flwr-public-key", key)
        try:
            with urllib.request.urlopen(asked, context=trusting) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            return refused.code

    with ThreadingHTTPServer(("127.0.0.1", 0), Stored) as superlink:
        superlink.socket = own.wrap_socket(superlink.socket, server_side=True)
        threading.Thread(target=superlink.serve_forever, daemon=True).start()
        with a_gate(home, port, superlink.server_address[1]):
            (home / "allowance").write_text(str(1 << 20))  # as for a message whose answer has so many bytes at most
            assert [sent("Zm9yZ2Vk") for _ in range(3)] == [401] * 3  # does not count: its key is another one's
            assert [sent("QWRh") for _ in range(4)] == [200, 200, 413, 413]
            assert (sent("QWRh", "pull-messages", 1), sent("QmVh")) == (200, 200)
            assert sum(received) == 6 * piece + 1  # nothing that was refused
            wait_until((home / "heard.json").exists)
            assert "forged" not in (home / "heard.json").read_text()
            write_bytes(home / "allowance", str(1 << 20).encode())  # the next message
            assert sent("QWRh") == 200
            assert sent("QWRh", size=65 << 20) == 413
            _assert_named(home, sent)
        superlink.shutdown()


def _assert_named(home: Path, sent: Callable[[str], int]) -> None:
    """A node that was cut off is named as such: all that Flower knows is that parts of its answer never came."""
    from flwr.common.constant import ErrorCode

    from fedloom.deploy.keys import pem_of
    from fedloom.deploy.server_app import FlowerTransport, cut_off

    key, there, halted = b64encode(pem_of((home / "bea.pub").read_bytes()).encode()).decode(), [12], list[Any]()

    class Halting:
        """A grid on which Bea's answer is cut off."""

        def get_node_ids(self) -> list[int]:
            return there

        def push_messages(self, messages: list[Any]) -> list[str]:
            return [str(message.metadata.dst_node_id) for message in messages]

        def pull_messages(self, names: list[str]) -> list[Any]:
            assert names == ["12"]
            halted.append(self)
            assert halted[1:] or [sent(key) for _ in range(3)] == [200, 200, 413]
            about = SimpleNamespace(reply_to_message_id="12")
            error = SimpleNamespace(code=ErrorCode.MESSAGE_UNAVAILABLE, reason="objects are unavailable")
            return [SimpleNamespace(metadata=about, has_error=lambda: True, error=error)]

    names, too_much = ("Ada", "Bea", "Cem"), Failed("sent more than its answer can have, and was cut off")
    assert cut_off(home, names) == set()  # the keys of before are of no node
    transport = FlowerTransport(cast(Any, Halting()), lambda: {1: 12}, lambda: cut_off(home, names))
    assert transport.exchange(b"asked", [1], PATIENCE, 1) == {1: too_much}
    killed = FlowerTransport(cast(Any, Halting()), lambda: {1: 12}, set)
    found = killed.exchange(b"asked", [1], PATIENCE, 1)
    assert found == {1: Failed("was cut off while it sent its answer")}
    there.clear()
    assert transport.exchange(b"asked", [1], PATIENCE, 1) == {1: too_much}


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
    words = ["flower-supernode", "--superlink", f"127.0.0.1:{port}", "--port", str(free_ports(1)[0])]
    words += ["--root-certificates", str(site / "server" / "ca.crt"), "--max-retries", "1"]
    words += ["--auth-supernode-private-key", str(stranger / "node.key")]
    with (stranger / "log").open("wb") as log:
        process = warm.Popen(words, env=flower.world(stranger), cwd=stranger, stdout=log, stderr=log)
    assert process.wait(PATIENCE) == 1
    assert "Failed to activate SuperNode" in (stranger / "log").read_text()
