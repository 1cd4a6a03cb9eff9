"""A node's side as processes: this one, which has the data, and a SuperNode, which connects to the server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fedloom.core.errors import ConfigError, Fault
from fedloom.data.column_check import suspicions
from fedloom.deploy import flower, wire
from fedloom.deploy.contract import Contract, read_contract, refuse_undeployable
from fedloom.deploy.ends import OwnRows
from fedloom.deploy.keys import NODE_KEY, SEAL_CERTIFICATE, SEAL_KEY, refuse_wrong_keys
from fedloom.deploy.node import Node, Place, Policy
from fedloom.deploy.own_data import refuse_wrong_columns, rows_for
from fedloom.deploy.site import NodeSettings, read_node, refuse_open_key
from fedloom.deploy.waits import held_lock, until_stopped, writing
from fedloom.engine.local import release_memory

_AGAIN = 5.0  # seconds after which a SuperNode that has ended is started again
_REFUSED = 120.0  # seconds for which the server may refuse a key: up to a minute after a crash
_CERTIFICATES = {  # what OpenSSL says, and what it means here
    "mismatch": "is for another name; set server in node.toml to the --host of `fedloom deploy init`",
    "not yet valid": "is not valid yet: is this machine's clock slow?",
    "has expired": "has expired (at the coordinator: fedloom deploy renew), or this machine's clock is fast",
    "CERTIFICATE_EXPIRED": "has expired (at the coordinator: fedloom deploy renew), or this machine's clock is fast",
}
_ENDS = {  # what a SuperNode says at its end, and what it means here
    "Failed to activate SuperNode": "the server refuses this node; its key is in use (for up to a minute after a "
    "crash, or by another process), was revoked or is not known",
    "terminated gracefully": "the server has ended the connection; it stopped, it revoked this key, or this machine's "
    "clock is wrong",
}
_OTHER = "is not the federation's: another server or a proxy that inspects TLS answers there"


def take_part(folder: Path, data: str, root: Path, say: Callable[[str], None], *, trust: bool = False) -> None:
    """Take part in a federation as the node whose folder this is, until stopped.

    ``trust``: the code in its contract may run.
    """
    contract, settings = _agreed(folder, trust=trust)
    for name in (NODE_KEY, *((SEAL_KEY,) if (folder / SEAL_CERTIFICATE).is_file() else ())):
        refuse_open_key(folder / name)
    refuse_wrong_keys(folder, settings.identity.name)
    client = contract.nodes.index(settings.identity.name)
    own = rows_for(contract, client, data or settings.identity.data, root)
    refuse_wrong_columns(own, settings.policy.accept_columns, folder)
    lock = held_lock(folder / ".node.lock", "another process is this node", f"fedloom deploy node {folder}")
    place = Place(contract, client, own, folder, settings.policy)
    name, server = settings.identity.name, settings.identity.server
    say(f"{name}: {own.train} training rows and {own.test} test rows, server {server}")
    for line in suspicions(own.checks):
        say(f"note: {line}")
    meeting = Path(tempfile.mkdtemp(prefix="fedloom-node-"))  # mode 0700; a short name, as sockets need
    try:
        with writing(folder, f"fedloom deploy node {folder}"):
            _serve(folder, settings, Node(place, say), str(meeting / "socket"), say)
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
        os.close(lock)


def rows_of_node_at(folder: Path, data: str, root: Path, *, trust: bool = False) -> tuple[OwnRows, Policy]:
    """The rows of the node whose folder this is, as it would take part with them, and what its owner allows."""
    contract, settings = _agreed(folder, trust=trust)
    client = contract.nodes.index(settings.identity.name)
    return rows_for(contract, client, data or settings.identity.data, root), settings.policy


def _agreed(folder: Path, *, trust: bool) -> tuple[Contract, NodeSettings]:
    """The contract in a node's folder, of which it is a part, and its own settings."""
    contract = read_contract(folder, trust=trust)
    if contract.config.algorithm.family == "gossip":
        fix = f"fedloom peers start {folder}"
        raise ConfigError([Fault(str(folder), "is the folder of a node in a network without a server", fix)])
    settings = read_node(folder)
    refuse_undeployable(contract.config)
    if settings.identity.name not in contract.nodes:
        raise ConfigError([Fault(f"{folder}, node.name", f"'{settings.identity.name}' is not in the contract")])
    return contract, settings


def _serve(folder: Path, settings: NodeSettings, node: Node, path: str, say: Callable[[str], None]) -> None:
    listener = wire.listen(path)
    port = flower.free_port()
    log = folder / "supernode.log"
    # A daemon thread: answering a message does not keep the process from ending.
    threading.Thread(target=_answer_all, args=(listener, node), daemon=True).start()
    with until_stopped() as stop:
        refused = 0.0  # since when the server refuses this node
        while not stop.is_set():
            began, written = time.monotonic(), log.stat().st_size if log.exists() else 0
            process = flower.started(_supernode(folder, settings, path, port), folder, log)
            accepted, reported = False, None  # whether the server let it in; whether it is reached, as last reported
            try:
                while process.poll() is None and not _has_given_up(log, written) and not stop.wait(0.5):
                    accepted, reached = accepted or _is_accepted(log, written), _reaches(log, written)
                    if reached not in (None, reported):
                        reported, server = reached, settings.identity.server
                        say(f"connected to {server}" if reached else f"{server} cannot be reached; trying again")
                again = time.monotonic() + _AGAIN
                _let_end(process, stop, again)
            finally:
                flower.ended([process])
            if stop.is_set():
                break
            welcome = accepted or _is_accepted(log, written) or not _is_refused(log, written)
            refused = 0.0 if welcome else refused or began
            _raise_if_permanent(settings, log, written, time.monotonic() - refused if refused else 0.0)
            say(f"{_reason(log, written)}; trying again")
            stop.wait(again - time.monotonic())
    listener.close()


def _let_end(process: subprocess.Popen[bytes], stop: threading.Event, until: float) -> None:
    """Give a SuperNode time to end by itself, with the reason at the end of its log."""
    while process.poll() is None and time.monotonic() < until and not stop.wait(0.1):
        pass


def _has_given_up(log: Path, since: int) -> bool:
    """Whether a SuperNode keeps running without a connection: one that broke while connecting is not tried again."""
    words = flower.last_words(log, 100, since)
    return "Giving up reconnection" in words or "handshake error" in words


def _is_accepted(log: Path, since: int) -> bool:
    """Whether the server has let a SuperNode in, which it says once."""
    return "SuperNode ID" in flower.last_words(log, 100, since)


def _is_refused(log: Path, since: int) -> bool:
    """Whether a SuperNode says that the server does not let it in; otherwise the network may be to blame."""
    words = flower.last_words(log, 30, since)
    return any(sign in words for sign in _ENDS)


def _reason(log: Path, since: int) -> str:
    """Why a SuperNode has ended, as far as its log tells."""
    words = flower.last_words(log, 30, since)
    lines = [line for line in words.split(" / ") if not line.startswith(("INFO", "For more information"))]
    other = f"the connection has ended: {lines[-1] if lines else f'see {log}'}"
    return next((said for sign, said in _ENDS.items() if sign in words), other)


def _reaches(log: Path, since: int) -> bool | None:
    """Whether a SuperNode reaches the server, by what it said last about that; None if it said nothing."""
    words = flower.last_words(log, 100, since)
    failed, there = words.rfind("Connection attempt failed"), words.rfind("Connection successful")
    there = max(there, words.rfind("SuperNode ID"))
    return None if failed == there else there > failed


def _answer_all(listener: object, node: Node) -> None:
    while True:
        try:
            wire.answer_one(listener, node.answer)  # type: ignore[arg-type]
            release_memory()
        except OSError:  # the listener is closed
            return


def _raise_if_permanent(settings: NodeSettings, log: Path, since: int, seconds: float) -> None:
    """An error that says what to do, if trying again does not help."""
    words = flower.last_words(log, 30, since)
    if "CERTIFICATE_VERIFY_FAILED" in words or "CERTIFICATE_EXPIRED" in words:
        what = next((said for sign, said in _CERTIFICATES.items() if sign in words), _OTHER)
        raise flower.FlowerError(f"{settings.identity.server}: the server's certificate {what}; see {log}")
    if seconds > _REFUSED:
        what = "the server refuses this node: its key is not registered, was revoked or is in use elsewhere,"
        what += " or this machine's clock is wrong"
        raise flower.FlowerError(f"{settings.identity.server}: {what}; see {log}")


def _supernode(folder: Path, settings: NodeSettings, path: str, port: int) -> list[str]:
    at = folder.absolute()
    return [
        *("flower-supernode", "--superlink", settings.identity.server),
        *("--root-certificates", str(at / "ca.crt"), "--auth-supernode-private-key", str(at / "node.key")),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--node-config", f"{wire.SOCKET}={json.dumps(path)}"),
    ]
