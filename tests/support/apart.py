"""Nodes as processes of their own, reached through the sockets that Flower's apps use: all but Flower and the network.

python -m support.apart FOLDER CLIENT SOCKET serves one node, as ``fedloom deploy node`` does.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.deploy import wire
from fedloom.deploy.contract import read_contract
from fedloom.deploy.ends import rows_of_client
from fedloom.deploy.fleet import Failed
from fedloom.deploy.node import Node, Place
from fedloom.deploy.site import folder_name, read_node
from fedloom.runs.prepare import share
from support import warm
from support.terminal import HANG


class Apart:
    """A transport to nodes that can be killed, frozen and started again.

    ``sent``: called with the number of the message and the nodes that it went to, while they work. Only nodes that are
    ``frozen`` are ever late: how long the others take says how busy the machine is.
    """

    def __init__(self, home: Path) -> None:
        self._folders = [home.parent / folder_name(name) for name in read_contract(home).nodes]
        self._sockets = Path(tempfile.mkdtemp(prefix="apart"))
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.count, self.starts = 0, 0
        self.frozen: set[int] = set()
        self.sent: Callable[[int, list[int]], None] = lambda _count, _ids: None

    def start(self, *clients: int, **fault: Any) -> None:
        """Start nodes, with ``fault`` as in ``warm.Popen``; messages wait until they listen."""
        for client in clients:
            self.starts += 1
            path = self._sockets / str(client)
            path.unlink(missing_ok=True)
            place = {"place": str(self._folders[client])} if "crash_at" in fault else {}
            words = [sys.executable, "-m", "support.apart", str(self._folders[client]), str(client), str(path)]
            self.processes[client] = warm.Popen(words, **fault, **place)

    def kill(self, *clients: int) -> None:
        """SIGKILL."""
        for client in clients:
            self.processes[client].kill()
            self.processes[client].wait()

    def freeze(self, client: int) -> None:
        self.processes[client].send_signal(signal.SIGSTOP)
        self.frozen.add(client)

    def thaw(self, client: int) -> None:
        self.processes[client].send_signal(signal.SIGCONT)
        self.frozen.discard(client)

    def exchange(self, data: bytes, ids: list[int], seconds: float, needed: int) -> dict[int, bytes | Failed]:
        self.count += 1
        for client in ids:
            while not (self._sockets / str(client)).exists() and self.processes[client].poll() is None:
                time.sleep(0.01)
        found: dict[int, bytes | Failed] = {}
        threads = {k: threading.Thread(target=self._asked, args=(found, k, data), daemon=True) for k in ids}
        for thread in threads.values():
            thread.start()
        self.sent(self.count, ids)
        for client, thread in threads.items():
            thread.join(seconds if client in self.frozen else HANG)
        late = Failed(f"is late (no answer in {seconds:g} s)", late=True)
        return {client: found.get(client, late) for client in ids}

    def _asked(self, found: dict[int, bytes | Failed], client: int, data: bytes) -> None:
        try:
            answer: bytes | Failed = wire.ask(str(self._sockets / str(client)), data)
        except OSError as error:
            answer = Failed(f"is not connected ({type(error).__name__})")
        found[client] = answer


def serve(folder: Path, client: int, path: str) -> None:
    contract = read_contract(folder)
    own = rows_of_client(share(contract.config, Path()), client)
    node = Node(Place(contract, client, own, folder, read_node(folder).policy))
    listener = wire.listen(path)
    while True:
        wire.answer_one(listener, node.answer)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
