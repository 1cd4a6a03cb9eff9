"""Files that are opened for writing are never files elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedloom.core import disk
from fedloom.core.errors import CheckpointError


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
    held = disk.lock(path)
    assert disk.is_locked(path)
    os.close(held)
    assert not disk.is_locked(path)
