"""What tests share: one thread each, files in memory, and a way to lay out a small experiment."""

from __future__ import annotations

import compileall
import os
import shutil
import signal
import sys

# Two workers with two threads each on two cores would wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # what is asserted here is asserted of the CPU

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

import fedloom
from fedloom.core import usercode
from fedloom.data.arrays import Arrays
from fedloom.engine.state import Experiment
from fedloom.runs.overrides import without_idle
from fedloom.runs.prepare import prepare
from fedloom.runs.settings import parse
from support import shared_laws
from support.blobs import blobs

# Else pytest would rewrite the assertions of all files in each worker, which takes longer than to import them.
sys.dont_write_bytecode = False

# Runs wait for the disk after every file: a disk in memory answers at once. --basetemp names another place.
_MEMORY, _ROOM = Path("/dev/shm"), 2 << 30
if (
    "TMPDIR" not in os.environ
    and os.access(_MEMORY, os.W_OK | os.X_OK)
    and not os.statvfs(_MEMORY).f_flag & os.ST_NOEXEC  # a test runs a program that it has installed
    and shutil.disk_usage(_MEMORY).free > _ROOM
):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# A busy machine is no fault of the code: neither an example nor its generation has a limit of time.
hypothesis_settings.register_profile("fedloom", deadline=None, suppress_health_check=[HealthCheck.too_slow])
hypothesis_settings.load_profile("fedloom")


COMMANDS = {"cli", "compare", "deploy", "golden", "runs"}  # folders whose tests run whole commands, runs or comparisons
# Files with tests of many seconds, the longest first: one that began last would keep all workers waiting.
LONG = ("test_flower.py", "test_package.py", "test_site.py", "test_readme.py", "test_recipes.py", "test_ranks_cli.py")


def pytest_configure(config: pytest.Config) -> None:
    """Compile fedloom once: else each process that a test starts would, where Python is told to write no bytecode."""
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(fedloom.__path__[0], quiet=2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs whole commands is slow, wherever it lies: `make quick` is for the tests of single functions."""
    for item in items:
        whole = {"quick", "made", "compared"} & set(getattr(item, "fixturenames", ()))  # commands, and comparisons
        if item.path.parent.name in COMMANDS or whole:
            item.add_marker(pytest.mark.slow)
    items[:] = long_first(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def long_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests in an order of which each worker gets an equal part, with the long files spread over the beginnings."""
    rest = iter([item for item in items if item.path.name not in LONG])
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        files = LONG[worker::workers]
        ordered += sorted((i for i in items if i.path.name in files), key=lambda item: files.index(item.path.name))
        ordered += islice(rest, max(0, (worker + 1) * len(items) // workers - len(ordered)))
    return ordered + list(rest)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C; what tests start must not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What tests vouch for is not put on the list of whoever runs them."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(name="shared_laws")
def _shared_laws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laws of one algorithm share their runs."""
    shared_laws.share(monkeypatch)


@pytest.fixture
def world() -> Callable[..., Experiment]:
    """Lay out an experiment on blobs, one client for each size: ``world(sizes, algorithm=..., local=...)``."""

    def make(sizes: tuple[int, ...] = (4, 12, 7), *, arrays: Arrays | None = None, **table: Any) -> Experiment:
        partition = {"kind": "natural", "holdout": 0.0}
        cohort = {} if "topology" in table else {"cohort": {"sampling": "all"}}
        full = (
            {"partition": partition, "model": {"kind": "logistic"}, "local": {"batch": 0, "lr": 0.5}} | cohort | table
        )
        usercode.vouch(full)  # a test may name code of its own
        full["local"] = without_idle(full)[0]["local"]  # a closed form has no use for steps
        return prepare(parse(full), Path(), blobs(sizes) if arrays is None else arrays).experiment

    return make
