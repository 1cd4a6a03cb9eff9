"""Python processes that start in milliseconds: each is forked from one that has imported torch and fedloom.

``Popen`` is ``subprocess.Popen`` for commands like ``[sys.executable, "-m", "fedloom", ...]``, with its pipes, signals
and exit codes. The process is one of its own, with its own memory, but it shares the hash seed of the others and is
no child of the one that asked for it, so that a rank does not end with its launcher: where that is the point of a test,
the launcher is started with ``parent=True``, and forks what it starts itself. So does every warm process with Flower's
programs and whatever else has a ``preexec_fn``: these end with what started them.

Flower's programs, and the node that waits for one of them, look and try again sooner than anywhere else (``_hurry``).
"""

from __future__ import annotations

import array
import atexit
import ctypes
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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FRESH = subprocess.Popen
_FLOWER = ("client_app", "server_app", "gate", "keys", "serve", "local", "peers")
# Flower's programs, and what they import.
_PROGRAMS = {
    "flower-superlink": ("flwr.superlink.cli", "flwr.superlink.main", "uvicorn"),
    "flower-supernode": ("flwr.supernode.cli",),
    "flower-superexec": ("flwr.supercore.cli",),
    "flwr-serverapp": ("fedloom.deploy.server_app",),
    "flwr-clientapp": ("fedloom.deploy.client_app",),
    "flwr": ("flwr.cli.app",),
}
_SOON = 0.2  # seconds until Flower's programs look, or try, again; by themselves they take up to 20
_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
int clock_offset = 0;
int clock_gettime(clockid_t id, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(id, at);
  if (id == CLOCK_REALTIME) at->tv_sec += clock_offset;
  return code;
}
time_t time(time_t *to) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (to) *to = at.tv_sec;
  return at.tv_sec;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
"""
_this = {"warm": False, "parent": False}  # is this process forked from the server, and all that it starts its child?
_lock = threading.Lock()
_address: list[str] = []  # of the server, once there is one
_processes: list[subprocess.Popen[bytes]] = []


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """A process that is forked from a warm one; other commands are started as ever."""

    _answers: socket.socket | None = None

    def __init__(
        self,
        args: Any,
        *rest: Any,
        crash_at: int = 0,
        crash_by: int = signal.SIGKILL,
        place: str = "",
        copies: str = "",
        step: int = 1,
        largest_file: int = 0,
        clock: int = 0,
        parent: bool = False,
        **more: Any,
    ) -> None:
        """With ``crash_at``, killed just before it touches a file below ``place`` for that time.

        ``crash_by=SIGSTOP``: it stops there instead, for as long as a test needs, and is not killed. ``copies``: it
        goes on, and the folder ``place`` is copied below ``copies`` then and before every further ``step`` touches:
        what is there is what kills at all these places would leave. The events are listed in ``copies`` + ``.jsonl``.
        ``largest_file`` bounds the bytes of each file that it writes, as a full disk would. ``clock``: by how many
        seconds its clock is wrong, and that of all that it forks, also for C; right where there is no compiler.
        ``parent``: the processes that it starts are its own children.
        """
        crash = {"crash_at": crash_at, "crash_by": int(crash_by), "place": place, "copies": copies, "step": step}
        self._job = {**crash, "largest_file": largest_file, "clock": clock, "parent": parent}
        super().__init__(args, *rest, **more)

    def _execute_child(  # type: ignore[no-untyped-def]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ):  # fmt: skip
        words = None if shell or executable else _words(args, env)
        program = words is not None and words[0] not in ("-m", "-P")
        own = _this["parent"] or preexec_fn is not None or (program and _this["warm"])
        if words is None or (own and not _this["warm"]):
            more = (startupinfo, creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more, *rest)
        fds = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        job = self._job | {
            "words": words,
            "cwd": os.path.abspath(cwd or "."),
            "env": dict(os.environ if env is None else env),
            "new_session": bool(rest[5]),
        }
        self.pid = _forked(job, fds, preexec_fn) if own else self._asked(job, fds)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None

    def _asked(self, job: dict[str, Any], fds: list[int]) -> int:
        """Let the server fork it."""
        self._answers = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._answers.connect(_server())
        job["env"].pop("FEDLOOM_PARENT", None)
        text = json.dumps(job).encode() + b"\n"
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        sent = self._answers.sendmsg([text], ancillary)
        self._answers.sendall(text[sent:])
        return int(self._line())

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


def _forked(job: dict[str, Any], fds: list[int], before: Callable[[], Any] | None) -> int:
    """Fork it from this process, which is warm; ``before`` is done in it first."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pid = os.fork()
    if pid:
        return pid
    signal.set_wakeup_fd(-1)
    for number, fd in enumerate(fds):
        if fd != number:
            os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for kind in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(kind, signal.SIG_DFL)
    if before is not None:
        before()
    os._exit(_outcome(job))


def _words(args: Any, env: Mapping[str, str] | None) -> list[str] | None:
    """What this Python is to run: a module of fedloom's or of ours, or one of Flower's programs; None: another one."""
    world = os.environ if env is None else env
    if world.get("PYTHONPATH") != os.environ.get("PYTHONPATH") or isinstance(args, str | bytes):
        return None
    words = [str(word) for word in args]
    program = Path(sys.executable).with_name(Path(words[0]).name)
    if program.name in _PROGRAMS and words[0] in (program.name, str(program)):
        return None if "LD_PRELOAD" in world else [str(program), *words[1:]]  # which only a new program loads
    module = [word for word in words[1:] if word != "-P"]
    ours = words[0] == sys.executable and module[0] == "-m" and module[1].partition(".")[0] in ("fedloom", "support")
    return words[1:] if ours else None


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
            folder = Path(tempfile.mkdtemp(prefix="warm"))
            path = str(folder / "socket")
            before, subprocess.Popen = subprocess.Popen, FRESH  # type: ignore[misc]
            process = subprocess.Popen(
                [sys.executable, "-P", __file__, path],
                env={**os.environ, "OMP_NUM_THREADS": "1", **_clock(folder)},
                stdin=subprocess.PIPE,  # closed when this process ends, however it ends
                stdout=subprocess.PIPE,
            )
            subprocess.Popen = before  # type: ignore[misc]
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            _address.append(path)
            _processes.append(process)
        return _address[0]


def _clock(folder: Path) -> dict[str, str]:
    """What lets the clock of processes be set; nothing where there is no compiler."""
    if shutil.which("cc") is None:
        return {}
    (folder / "clock.c").write_text(_CLOCK)
    words = ["cc", "-shared", "-fPIC", "-o", str(folder / "clock.so"), str(folder / "clock.c"), "-ldl"]
    subprocess.run(words, check=True)
    return {"LD_PRELOAD": str(folder / "clock.so")}


# -- the server ------------------------------------------------------------------------------------
def serve(path: str) -> None:
    """Fork a process for every job that comes in, and report its exit code, until stdin is closed."""
    # libuv, which uvicorn prefers, remembers the numbers of its pipe, and closes them in whatever is forked: there they
    # may be what was opened for the new process to write to. Without it uvicorn runs on asyncio.
    sys.modules["uvloop"] = None  # type: ignore[assignment]
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

    Some commands import large libraries when they need them: for statistics, networks, pictures, privacy, tables.
    """
    import torch
    from matplotlib.figure import Figure

    import fedloom
    from fedloom.cli.main import command
    from fedloom.core.schema import Spec
    from fedloom.report.figure import PICTURES, as_file
    from fedloom.runs.environment import code_hash
    from fedloom.runs.settings import parse

    # Kernels are for a GPU; what needs Flower, an optional extra, is imported by those who need it.
    others = ("fedloom.__main__", "fedloom.core.lanes.", *(f"fedloom.deploy.{name}" for name in _FLOWER))
    for module in pkgutil.walk_packages(fedloom.__path__, "fedloom."):
        if not module.name.startswith(others):
            import_module(module.name)
    command()
    code_hash()
    parse({})
    _build(Spec)
    torch.func.vmap(torch.func.grad(lambda x: (x * x).sum()))(torch.ones(2, 2))
    figure = Figure()
    figure.suptitle("any")
    for suffix in PICTURES:
        as_file(figure, suffix)
    for name in ("networkx", "scipy.stats", "dp_accounting", "sklearn.compose", "sklearn.impute"):
        with suppress(ImportError):  # of an optional extra
            import_module(name)


def _import_for(job: dict[str, Any]) -> None:
    """Import Flower where a process is to run its programs; as an optional extra it is not imported before."""
    words = job.get("words", ("",))
    wanted = {"flwr"} if "fedloom.deploy.flower_commands" in words else set()
    if Path(words[0]).name in _PROGRAMS or ("deploy" in words and {"server", "node", "local"} & set(words)):
        wanted = set(_PROGRAMS)
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # as in the environment of each program; it is read once
    gate = {"uvicorn"} if "fedloom.deploy.gate" in words else set()
    for name in gate | {name for program in wanted for name in _PROGRAMS[program]}:
        with suppress(ImportError):
            import_module(name)
    if "flwr.supernode.cli" in sys.modules:
        _hurry()


def _hurry() -> None:
    """Shorten how long Flower's programs wait before they look, or try, again: tests are not about its patience.

    What they do then, what they give up on and how often they try stay the same.
    """
    supernode: Any = import_module("flwr.supernode.start_client_internal")  # asks for messages, waits for answers
    supernode.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, _SOON)))
    retries: Any = import_module("flwr.supercore.retry.http_retry")  # when the other side does not answer
    retries.MAX_RETRY_DELAY = _SOON
    objects: Any = import_module("flwr.supercore.inflatable.inflatable_utils")  # parts that have not arrived yet
    for function in vars(objects).values():
        if "initial_backoff" in (getattr(function, "__kwdefaults__", None) or {}):
            function.__kwdefaults__.update(initial_backoff=_SOON / 2, backoff_cap=_SOON)
    server: Any = import_module("fedloom.deploy.server_app")  # looks for answers
    server._LOOK = _SOON
    node: Any = import_module("fedloom.deploy.take_part")  # starts a SuperNode that has ended again
    node._AGAIN = 5 * _SOON


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
    elif words[0] == "-m":
        sys.path.insert(0, os.getcwd())
    if words[0] == "-m" and words[1].startswith("support."):
        sys.path.insert(0, str(Path(__file__).parents[1]))
    _this.update(warm=True, parent=job["parent"] or _this["parent"])
    if job["largest_file"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    if job["clock"]:
        with suppress(ValueError):  # there was no compiler
            ctypes.c_int.in_dll(ctypes.CDLL(None), "clock_offset").value = job["clock"]
    if job["crash_at"]:
        _at_touches(job)
    code = 1
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            ctypes.CDLL(None).prctl(15, Path(words[0]).name.encode())  # PR_SET_NAME, as for any program
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
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


def _at_touches(job: dict[str, Any]) -> None:
    """Die like a power cut, stop, or be copied, just before this process touches a file for the given time."""
    place, number, touched, copying = job["place"], job["crash_at"], 0, False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal touched, copying
        if (
            event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod")
            and not copying
            and any(place in str(a) for a in arguments[:2])
        ):
            touched += 1
            if job["copies"] and touched >= number and (touched - number) % job["step"] == 0:
                copying = True
                with suppress(FileNotFoundError):  # before the first touch there is nothing
                    shutil.copytree(place, Path(job["copies"], f"{touched:04d}"), symlinks=True)
                    with Path(f"{job['copies']}.jsonl").open("a") as events:
                        print(json.dumps([touched, event, *map(str, arguments[:2])]), file=events)
                copying = False
            elif touched == number:
                os.kill(os.getpid(), job["crash_by"])

    sys.addaudithook(hook)


if __name__ == "__main__":
    serve(sys.argv[1])
