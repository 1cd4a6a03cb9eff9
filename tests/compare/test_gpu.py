"""Cells side by side on one GPU: the daemon that they share begins and ends with the comparison."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedloom.compare import gpu

# NVIDIA's control program as far as we use it: -d begins to serve in a folder, "quit" ends it.
CONTROL = """#!/bin/sh
echo "$*" >> "$SEEN"
if [ "$1" = "-d" ]; then touch "$CUDA_MPS_PIPE_DIRECTORY/control"; exit "${REFUSES:-0}"; fi
cat >> "$SEEN"
"""


@pytest.fixture
def seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(CONTROL)
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "seen"


def test_several_workers_share_a_daemon_that_ends_with_them(seen: Path) -> None:
    with gpu.shared(2) as environment:
        folder = Path(environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert environment["CUDA_MPS_LOG_DIRECTORY"] == str(folder)
        assert (folder / "control").exists()
        assert folder.stat().st_mode & 0o077 == 0
        assert seen.read_text() == "-d\n"
    assert seen.read_text() == "-d\n\nquit\n"
    assert not folder.exists()


def test_one_worker_and_a_daemon_of_ones_own_need_none(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with gpu.shared(1) as environment:
        assert environment == {}
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(seen.parent))
    with gpu.shared(4) as environment:
        assert environment == {}
    assert not seen.exists()


def test_a_daemon_that_does_not_start_is_done_without(seen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFUSES", "1")
    with gpu.shared(2) as environment:
        assert environment == {}
    assert seen.read_text() == "-d\n"


def test_the_daemon_ends_with_a_comparison_that_is_killed(seen: Path) -> None:
    code = (
        "from fedloom.compare import gpu\n"
        "with gpu.shared(2) as e:\n"
        "    print(e['CUDA_MPS_PIPE_DIRECTORY'], flush=True)\n"
        "    input()\n"
    )
    comparison = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert comparison.stdout is not None
    folder = Path(comparison.stdout.readline().decode().strip())
    assert folder.is_dir()
    comparison.kill()
    comparison.wait()
    end = time.monotonic() + 600
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not folder.exists()
    assert seen.read_text() == "-d\n\nquit\n"
