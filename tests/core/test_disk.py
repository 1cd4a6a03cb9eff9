"""Files that are opened for writing are never files elsewhere."""

from __future__ import annotations

import fcntl
import os
import resource
import stat
import time
from pathlib import Path

import pytest

from fedloom.core import disk
from fedloom.core.errors import CheckpointError, StorageError


@pytest.mark.parametrize("there", [True, False])
def test_nothing_is_opened_or_made_through_a_link(tmp_path: Path, there: bool) -> None:
    """Also where the link is put there after the folder was looked through."""
    victim, link = tmp_path / "victim", tmp_path / "link"
    if there:
        victim.write_text("mine")
    link.symlink_to(victim)
    for opened in (lambda: disk.open_own(link, os.O_WRONLY), lambda: disk.lock(link)):
        with pytest.raises(CheckpointError, match="is a link, and links are not followed"):
            opened()
    disk.write_bytes(link, b"ours")
    assert not link.is_symlink()
    assert victim.exists() == there
    assert not there or victim.read_text() == "mine"


def test_a_file_with_two_names_is_not_written_to(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    link.hardlink_to(victim)
    with pytest.raises(CheckpointError, match="has another name"):
        disk.open_own(link, os.O_WRONLY)
    disk.write_bytes(link, b"ours")
    assert victim.read_text() == "mine"


def test_a_lock_is_seen_while_it_is_held(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not disk.is_locked(path)
    assert not path.exists()  # to ask writes nothing, so that it works in a read-only folder
    held = disk.lock(path)
    assert disk.is_locked(path)
    os.close(held)
    assert not disk.is_locked(path)


def test_a_result_replaces_a_file_and_no_pipe(tmp_path: Path) -> None:
    """Into a pipe, and in place of a link, which may lead anywhere; nothing else in the folder is touched."""
    target, link, pipe = tmp_path / "there" / "x.csv", tmp_path / "x.csv", tmp_path / "pipe"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to(target)
    (tmp_path / "there" / "x.csv.part").write_text("mine")
    disk.write_result(link, b"new")
    assert not link.is_symlink()
    assert (link.read_bytes(), target.read_bytes()) == (b"new", b"old")
    disk.write_result(target, b"new")
    assert (tmp_path / "there" / "x.csv.part").read_text() == "mine"
    assert sorted(path.name for path in target.parent.iterdir()) == ["x.csv", "x.csv.part"]
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    disk.write_result(pipe, b"read by another program")
    assert os.read(reader, 100) == b"read by another program"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_result_that_does_not_fit_leaves_the_old_one(tmp_path: Path) -> None:
    path, limits = tmp_path / "p.png", resource.getrlimit(resource.RLIMIT_FSIZE)
    disk.write_result(path, b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(StorageError, match="cannot write"):
            disk.write_result(path, bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_to_ask_for_a_lock_writes_nothing_and_disturbs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not disk.is_locked(tmp_path / "lock")
    assert list(tmp_path.iterdir()) == []
    os.close(disk.lock(tmp_path / "lock"))
    asked = os.open(tmp_path / "lock", os.O_RDONLY)
    fcntl.flock(asked, fcntl.LOCK_SH)  # as another process that asks does for a moment
    assert not disk.is_locked(tmp_path / "lock")
    monkeypatch.setattr(time, "sleep", lambda _seconds: os.close(asked))  # by then the other process has its answer
    os.close(disk.lock(tmp_path / "lock"))
