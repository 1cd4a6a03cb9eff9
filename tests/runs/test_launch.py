"""Starting ranks on this machine: the folders in which they meet."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedloom.runs.launch import meeting


def test_folders_of_launchers_that_were_killed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    stale, others = tmp_path / f"fedloom-ranks-{ended.pid}-x", tmp_path / f"fedloom-ranks-{os.getpid()}-y"
    kept = [others, tmp_path / "fedloom-ranks-", tmp_path / "fedloom-ranks-name-z", tmp_path / "other"]
    for folder in (stale, *kept):
        folder.mkdir()
    (stale / "secret").touch()
    mine = meeting()
    assert not stale.exists()
    assert all(folder.is_dir() for folder in kept)
    assert mine.stat().st_mode & 0o777 == 0o700
