"""Python processes that start in milliseconds: each is forked from one that has imported torch and fedloom.

``Popen`` is ``subprocess.Popen`` for commands like ``[sys.executable, "-m", "fedloom", ...]``, with its pipes, signals
and exit codes. The process is one of its own, with its own memory, but it shares the hash seed of the others and is
no child of the one that asked for it, so that a rank does not end with its launcher: where that is the point of a test,
the launcher is started with ``parent=True``, and forks what it starts itself.
"""

from __future__ import annotations

import array
import atexit
import gc
import json
import os
import pkgutil
import random
import resource
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

FRESH = subprocess.Popen
_FLOWER = ("client_app", "server_app", "gate", "keys", "serve", "local", "peers")
_lock = threading.Lock()
_address: list[str] = []  # of the server, once there is one
_processes: list[subprocess.Popen[bytes]] = []


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process that the server forks; other commands, and those with a ``preexec_fn``, are started as ever."""

    _answers: socket.socket | None = None

    def __init__(
        self,
        args: Any,
        *rest: Any,
        crash_at: int = 0,
        crash_by: int = signal.SIGKILL,
        place: str = "",
        largest_file: int = 0,
        parent: bool = False,
        **more: Any,
    ) -> None:
        """With ``crash_at``, killed just before it touches a file below ``place`` for that time.

        ``crash_by=SIGSTOP``: it stops there instead, for as long as a test needs, and is not killed.
        ``largest_file`` bounds the bytes of each file that it writes, as a full disk would. ``parent``: the processes
        that it starts are its own children.
        """
        crash = {"crash_at": crash_at, "crash_by": int(crash_by), "place": place}
        self._job = {**crash, "largest_file": largest_file, "parent": parent}
        super().__init__(args, *rest, **more)

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ):  # fmt: skip
        if shell or executable or preexec_fn or not _is_python(args, env):
            more = (startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more, *rest)
        self._answers = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._answers.connect(_server())
        job = _job(args, cwd, env, new_session=rest[5]) | self._job
        job["env"].pop("FEDLOOM_PARENT", None)
        fds = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        text = json.dumps(job).encode() + b"\n"
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        sent = self._answers.sendmsg([text], ancillary)
        self._answers.sendall(text[sent:])
        self.pid = int(self._line())
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None

    def _line(self) -> bytes:
        """One answer of the server: first the process id, in the end the exit code."""
        assert self._answers is not None
        found = b""
        while not found.endswith(b"\n"):
            more = self._answers.recv(1)
            assert more, "the server of warm processes has ended"
            found += more
        return found

    def _internal_poll(self, _deadstate: Any = None, *rest: Any, **more: Any) -> int | None:
        if self._answers is None:
            return super()._internal_poll(_deadstate, *rest, **more)  # type: ignore[misc,no-any-return]
        if self.returncode is None and self._answers.fileno() == -1:
            self.returncode = _deadstate  # nobody has waited for it, and it is being collected
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._answers is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                waiting = select.poll()
                waiting.register(self._answers, select.POLLIN)
                if not waiting.poll(None if timeout is None else 1000 * timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0)
                self.returncode = int(self._line())
                self._answers.close()
        return self.returncode


class Child(subprocess.Popen):  # type: ignore[type-arg]
    """A process that is forked from this one, which is warm, and is its child."""

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ):  # fmt: skip
        if shell or executable or preexec_fn or not _is_python(args, env):
            more = (startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more, *rest)
        job = _job(args, cwd, env, new_session=rest[5])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            for number, fd in enumerate((p2cread, c2pwrite, errwrite)):
                if fd != -1:
                    os.dup2(fd, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os._exit(_outcome(job))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


def _job(args: Any, cwd: Any, env: Mapping[str, str] | None, *, new_session: Any) -> dict[str, Any]:
    """What a process is to do."""
    nothing = {"crash_at": 0, "place": "", "largest_file": 0, "parent": False}
    return nothing | {
        "words": [str(word) for word in args[1:]],
        "cwd": os.path.abspath(cwd or "."),
        "env": dict(os.environ if env is None else env),
        "new_session": bool(new_session),
    }


def _is_python(args: Any, env: Mapping[str, str] | None) -> bool:
    """Whether a command is a module of fedloom's or of ours, run by this Python, and may be another's child."""
    world = os.environ if env is None else env
    moved = world.get("PYTHONPATH") != os.environ.get("PYTHONPATH")
    if moved or isinstance(args, str | bytes) or args[0] != sys.executable:
        return False
    words = [str(word) for word in args[1:] if word != "-P"]
    return words[0] == "-m" and words[1].partition(".")[0] in ("fedloom", "support")


@contextmanager
def processes() -> Iterator[None]:
    """Whatever starts Python processes meanwhile starts them warm."""
    before = subprocess.Popen
    subprocess.Popen = Popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


def _server() -> str:
    """The address of the server, which lives as long as this process."""
    with _lock:
        if not _address:
            path = str(Path(tempfile.mkdtemp(prefix="warm"), "socket"))
            before, subprocess.Popen = subprocess.Popen, FRESH  # type: ignore[misc]
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, path],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                stdout=subprocess.PIPE,
            )
            subprocess.Popen = before  # type: ignore[misc]
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            _address.append(path)
            _processes.append(process)
        return _address[0]


# -- the server ------------------------------------------------------------------------------------
def serve(path: str) -> None:
    """Fork a process for every job that comes in, and report its exit code, until stdin is closed."""
    _import_all()
    _address.append(path)
    subprocess.Popen = Popen  # type: ignore[misc]  # of processes that the forked ones start
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    ended, end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    gc.freeze()
    print("ready", flush=True)
    while True:
        ready = select.select([0, ended, listener], [], [])[0]
        if 0 in ready:
            shutil.rmtree(Path(path).parent, ignore_errors=True)
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if ended in ready:
            os.read(ended, 4096)
            while running and (found := os.waitpid(-1, os.WNOHANG))[0]:
                connection = running.pop(found[0])
                with suppress(OSError):  # nobody waits for it any more
                    connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(found[1]))
                connection.close()
        if listener in ready:
            connection = listener.accept()[0]
            job, fds = _received(connection)
            _import_for(job)
            child = os.fork() if job else None
            if child == 0:
                signal.set_wakeup_fd(-1)
                for number, fd in enumerate(fds):
                    os.dup2(fd, number)
                for other in (ended, end, *fds):
                    os.close(other)
                for closed in (listener, connection, *running.values()):
                    closed.close()
                os._exit(_outcome(job))
            for fd in fds:
                os.close(fd)
            if child is None:
                continue
            running[child] = connection
            with suppress(OSError):
                connection.sendall(b"%d\n" % child)


def _import_all() -> None:
    """Import what commands need: the first gradient imports the compiler, the first parse every algorithm and model.

    Some commands import large libraries when they need them: for statistics, networks, pictures, privacy.
    """
    import torch
    from matplotlib.figure import Figure

    import fedloom
    from fedloom.core.schema import Spec
    from fedloom.report.figure import PICTURES, as_file
    from fedloom.runs.settings import parse

    # Kernels are for a GPU; what needs Flower, an optional extra, is imported by those who need it.
    others = ("fedloom.__main__", "fedloom.core.lanes.", *(f"fedloom.deploy.{name}" for name in _FLOWER))
    for module in pkgutil.walk_packages(fedloom.__path__, "fedloom."):
        if not module.name.startswith(others):
            import_module(module.name)
    parse({})
    _build(Spec)
    torch.func.vmap(torch.func.grad(lambda x: (x * x).sum()))(torch.ones(2, 2))
    figure = Figure()
    figure.suptitle("any")
    for suffix in PICTURES:
        as_file(figure, suffix)
    for name in ("networkx", "scipy.stats", "dp_accounting"):
        with suppress(ImportError):  # of an optional extra
            import_module(name)


def _import_for(job: dict[str, Any]) -> None:
    """Import Flower's command line where a process is to run it; as an optional extra it is not imported before."""
    if "fedloom.deploy.flower_commands" in job.get("words", ()):
        with suppress(ImportError):
            import_module("flwr.cli.app")


def _build(cls: Any) -> None:
    """Build the validators of all classes of settings, which would else be built when they are first needed."""
    for each in cls.__subclasses__():
        each.model_rebuild()
        _build(each)


def _received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A job and its stdin, stdout and stderr; nothing where the one that asked has been killed meanwhile."""
    text, ancillary, _, _ = connection.recvmsg(1 << 16, socket.CMSG_SPACE(12))
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data)
    while not text.endswith(b"\n") and (more := connection.recv(1 << 16)):
        text += more
    return json.loads(text) if text.endswith(b"\n") else {}, list(fds)


def _outcome(job: dict[str, Any]) -> int:
    """Do what ``python words...`` does, in a process that was just forked; the exit code."""
    import numpy as np

    atexit._clear()  # what is to be done when the server ends
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()  # no two processes draw the same by accident
    np.random.seed()
    if job["new_session"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    words = list(job["words"])
    if words[0] == "-P":
        words.pop(0)
    else:
        sys.path.insert(0, os.getcwd())
    if words[1].startswith("support."):
        sys.path.insert(0, str(Path(__file__).parents[1]))
    if job["parent"]:
        subprocess.Popen = Child  # type: ignore[misc]
    if job["largest_file"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    if job["crash_at"]:
        _crash_at(job["crash_at"], job["crash_by"], job["place"])
    code = 1
    try:
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    return code


def _crash_at(number: int, by: int, place: str) -> None:
    """Die like a power cut, or stop, just before this process touches a file below ``place`` for the given time."""
    touched = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal touched
        if event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod") and any(
            place in str(a) for a in arguments[:2]
        ):
            touched += 1
            if touched == number:
                os.kill(os.getpid(), by)

    sys.addaudithook(hook)


if __name__ == "__main__":
    serve(sys.argv[1])
