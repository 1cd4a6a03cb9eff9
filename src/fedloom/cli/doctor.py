"""``fedloom doctor``: the health of an installation, found by trying things."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import typer

from fedloom import __version__
from fedloom.report.words import plural


def doctor() -> None:
    """Check this machine: versions, devices, data, a short run."""
    failed = 0
    for finding in findings():
        failed += not finding.ok
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.what}: {finding.detail}", flush=True)
    if failed:
        raise typer.Exit(1)


class Finding(NamedTuple):
    """One thing that was tried."""

    ok: bool
    what: str
    detail: str


def findings() -> Iterator[Finding]:
    """One finding after another, the quick ones first."""
    import torch

    from fedloom.data.files import default_root, missing_files
    from fedloom.data.published import PUBLISHED

    yield Finding(
        True, "versions", f"fedloom {__version__}, python {platform.python_version()}, torch {torch.__version__}"
    )
    yield _tried("devices", _devices)
    root = default_root()
    here = [name for name, p in PUBLISHED.items() if not missing_files(p.layout, root)]
    found = f"found, but not verified: {', '.join(here)}" if here else "nothing yet"
    yield Finding(True, "data", f"digits (built in); below {root}: {found}")
    yield _tried("run folder", _folder)
    yield _tried("training", _training)


def _tried(what: str, attempt: Callable[[], str]) -> Finding:
    try:
        return Finding(True, what, attempt())
    except Exception as error:  # any error is the finding
        return Finding(False, what, f"{type(error).__name__}: {error}")


def _devices() -> str:
    import torch

    cpu = f"cpu with {plural(torch.get_num_threads(), 'thread')}"
    if not torch.cuda.is_available():
        return f"{cpu}; no GPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    assert float(torch.ones(2, device="cuda").sum()) == 2.0
    return f"{cpu}; {', '.join(names)}"


def _folder() -> str:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "probe").write_bytes(b"0" * 4096)
    return "can be written"


def _training() -> str:
    from fedloom.runs.start import run

    began = time.perf_counter()
    result = run("fedavg", data="digits", rounds=3, seed=0)
    accuracy, seconds = result.summary["global/test/accuracy"].last, time.perf_counter() - began
    return f"3 rounds of FedAvg on digits in {seconds:.1f} s, accuracy {accuracy:.2f}"
