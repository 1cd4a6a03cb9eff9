"""What a node checks when it starts, and what it says when it cannot."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from fedloom.core import disk
from fedloom.core.errors import CheckpointError, ConfigError, DataError, StorageError
from fedloom.deploy.peers.bundles import read_bundle
from fedloom.deploy.site import conducted
from fedloom.deploy.waits import held_lock, writing
from support.federation import a_site, config_of

pytest.importorskip("flwr")
from fedloom.deploy.gate import Heard
from fedloom.deploy.keys import pem_of
from fedloom.deploy.members import renew_server
from fedloom.deploy.serve import _heard, serve
from fedloom.deploy.take_part import _reason, take_part


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return a_site(tmp_path / "site", config_of("fedavg")).parent


def start(folder: Path) -> None:
    take_part(folder, "experiment", Path(), print)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_one_error(number: int, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *, wait: bool = False) -> int:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(disk, "lock", refused)
    for begin, again in (
        (lambda: start(site / "ada"), f"fedloom deploy node {site / 'ada'}"),
        (lambda: serve(site, print), f"fedloom deploy server {site}"),
        (lambda: conducted(site / "server").__enter__(), f"fedloom deploy resume {site}"),
    ):
        with pytest.raises(StorageError, match=f"{os.strerror(number)}; .*: let this user write there, then {again}"):
            begin()
    with pytest.raises(PermissionError), writing(site, "try again"):  # of a file that is not below
        raise PermissionError(errno.EACCES, "Permission denied", "/elsewhere/rows.csv")


def test_a_second_process_is_refused(site: Path) -> None:
    held = held_lock(site / "ada" / ".node.lock", "", "")
    with pytest.raises(CheckpointError, match="ada: another process is this node"):
        start(site / "ada")
    os.close(held)


@pytest.mark.parametrize("name", ["node.key", "node.pub", "seal.key", "seal.crt", "ca.crt"])
def test_a_damaged_key_is_refused_at_the_start(name: str, site: Path) -> None:
    (site / "ada" / name).write_bytes(b"no key")
    what = {"node.key": "a node's private key", "node.pub": "a public key", "seal.key": "a private key"}
    with pytest.raises(
        ConfigError, match=rf'ada/{name}: is not {what.get(name, "a certificate")} \(restore it .* renew SITE "Ada"\)'
    ):
        start(site / "ada")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["node.key"], r"ada/node\.key: is not the key that 'Ada' was handed"),
        (["seal.key"], r"ada/seal\.key: is not the key of seal\.crt"),
        (["seal.key", "seal.crt"], r"ada/seal\.crt: is that of 'Bea', not of 'Ada'"),
    ],
)
def test_the_key_of_another_node_is_refused_at_the_start(names: list[str], why: str, site: Path) -> None:
    for name in names:
        shutil.copy(site / "bea" / name, site / "ada" / name)
    with pytest.raises(ConfigError, match=why):
        start(site / "ada")


def test_a_server_that_is_gone_is_not_called_one_that_refuses(tmp_path: Path) -> None:
    log = tmp_path / "supernode.log"
    log.write_text("INFO : SuperNode ID: 7\nSuperNode terminated gracefully.\n")
    assert _reason(log, 0).startswith("the server has ended the connection; it stopped, it revoked this key")


def test_status_says_when_a_node_was_last_heard(site: Path) -> None:
    home, names = site / "server", ("Ada", "Bea", "Cem")
    assert _heard(home, names) == {}  # before the first
    heard = Heard(home)
    assert heard.note(pem_of((home / "ada.pub").read_bytes()).encode())
    assert not heard.note(b"a key of an earlier server")  # not so soon again
    heard.save()
    (home / "bea.pub").unlink()  # it was revoked
    assert list(_heard(home, names)) == ["Ada"]
    assert 0 <= _heard(home, names)["Ada"] < 600


def test_a_folder_that_is_none_names_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no such folder \(make one with: fedloom deploy init\)"):
        renew_server(tmp_path)
    with pytest.raises(DataError, match=r"not a folder of a network \(make one with: fedloom peers init\)"):
        read_bundle(tmp_path)
