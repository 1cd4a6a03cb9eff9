"""Published sets are fetched over real HTTP on loopback, resumed, verified and put in place whole or not at all."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import re
import struct
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from fedloom.core import disk
from fedloom.core.errors import DataError, StorageError
from fedloom.data import download
from fedloom.data.download import get, import_files
from fedloom.data.files import (
    DIGIT_NAMES,
    LAYOUTS,
    Layout,
    cifar10_layout,
    idx_layout,
    missing_files,
    places_below,
    read_published,
)
from fedloom.data.published import CHECKSUMS, PUBLISHED, Published, Remote, refuse_changed

RNG = np.random.default_rng(1)
IDX = idx_layout("mnist", "mnist", DIGIT_NAMES, train=400, test=100)
CIFAR = cifar10_layout(batch=50)


def idx(values: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def idx_files() -> dict[str, bytes]:
    content = {}
    for part in IDX.parts:
        images = RNG.integers(0, 256, (part.rows, 28, 28), np.uint8)
        labels = RNG.integers(0, 10, part.rows).astype(np.uint8)
        for file, values in zip(part.files, (images, labels), strict=True):
            content[file] = gzip.compress(idx(values), 1)
    return content


def cifar_files() -> dict[str, bytes]:
    table = RNG.integers(0, 256, (6, 50, 3073), np.uint8)
    table[:, :, 0] %= 10
    return {file: rows.tobytes() for file, rows in zip(CIFAR.files, table, strict=True)}


def tar(members: dict[str, bytes], links: dict[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name, target in (links or {}).items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, target
            archive.addfile(info)
    return out.getvalue()


def in_folder(files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"cifar-10-batches-bin/{file}": content for file, content in files.items()}


def offered(layout: Layout, files: dict[str, bytes], *bases: str) -> dict[str, Published]:
    remotes = tuple(Remote(file, len(body), hashlib.sha256(body).hexdigest()) for file, body in files.items())
    return {layout.name: Published(layout, bases, remotes)}


class Server(ThreadingHTTPServer):
    """Serves ``files``; can ignore ranges, hide lengths, and break off after so many bytes of one answer."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.ranges = self.lengths = True
        self.breaks: list[int] = []
        self.shift = 0
        self.asked: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version: ClassVar[str] = "HTTP/1.0"  # type: ignore[misc]

    def do_GET(self) -> None:
        wanted, server = self.headers.get("Range"), self.server
        server.asked.append((self.path, wanted))
        body = server.files.get(self.path.lstrip("/"))
        if body is None:
            return self.send_error(404)
        start = 0
        if wanted and server.ranges:
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])  # type: ignore[index]
            if start >= len(body):
                return self.send_error(416)
            start += server.shift
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        else:
            self.send_response(200)
        if server.lengths:
            self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        stop = start + server.breaks.pop(0) if server.breaks else len(body)
        self.wfile.write(body[start:stop])
        return None

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[Server]:
    with Server({}) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def content_of(folder: Path) -> dict[str, bytes]:
    """The files of a set, without what is remembered of them."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != CHECKSUMS}


# ------------------------------------------------------------------------------------------------ the facts


def test_the_published_facts_are_complete() -> None:
    assert set(PUBLISHED) == set(LAYOUTS)
    for name, published in PUBLISHED.items():
        assert published.layout == LAYOUTS[name]
        assert all(re.fullmatch(r"[0-9a-f]{64}", remote.sha256) and remote.size > 0 for remote in published.remotes)
        assert all(base.startswith("http") and not base.endswith("/") for base in published.bases)
        if not published.archived:
            assert {remote.file for remote in published.remotes} == set(published.layout.files)
    assert len({remote.sha256 for published in PUBLISHED.values() for remote in published.remotes}) == 10


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'mnist'"):
        get("mnits", tmp_path)
    with pytest.raises(DataError, match="no published data set is called 'digits'"):
        import_files("digits", tmp_path, tmp_path)


# ---------------------------------------------------------------------------------------------- downloading


def test_files_are_fetched_and_reported(tmp_path: Path, server: Server) -> None:
    server.files = files = idx_files()
    seen: list[tuple[int, int]] = []
    published = offered(IDX, files, server.url)
    folder = get("mnist", tmp_path, lambda done, total: seen.append((done, total)), published=published)
    assert folder == tmp_path / "mnist"
    assert content_of(folder) == files
    total = sum(len(body) for body in files.values())
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {total}
    asked = len(server.asked)
    get("mnist", tmp_path, published=published)
    assert len(server.asked) == asked  # what is there is not fetched again


def test_only_what_is_missing_or_damaged_is_fetched(tmp_path: Path, server: Server) -> None:
    server.files = files = idx_files()
    published = offered(IDX, files)
    folder = get("mnist", tmp_path, base_url=server.url + "/", published=published)
    first, second, *_ = files
    (folder / first).unlink()
    (folder / second).write_bytes(b"damaged")
    server.asked.clear()
    get("mnist", tmp_path, base_url=server.url, published=published)
    assert [path for path, _ in server.asked] == [f"/{first}", f"/{second}"]
    assert content_of(folder) == files


def test_an_archive_is_unpacked(tmp_path: Path, server: Server) -> None:
    files = cifar_files()
    archive = {"cifar-10-binary.tar.gz": tar(in_folder(files) | {"cifar-10-batches-bin/readme.html": b"hello"})}
    server.files = archive
    folder = get("cifar10", tmp_path, base_url=server.url, published=offered(CIFAR, archive))
    assert content_of(folder) == files  # neither the archive nor the other members stay
    assert read_published(CIFAR, places_below(CIFAR, tmp_path)).x.shape == (300, 3, 32, 32)


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("lengths", [True, False])
def test_an_earlier_run_is_continued(tmp_path: Path, server: Server, ranges: bool, lengths: bool) -> None:
    server.files = files = idx_files()
    server.ranges, server.lengths = ranges, lengths
    file, body = next(iter(files.items()))
    part = tmp_path / "mnist" / f"{file}.part"
    part.parent.mkdir()
    part.write_bytes(body[:1000])
    seen: list[int] = []
    folder = get("mnist", tmp_path, lambda done, _: seen.append(done), published=offered(IDX, files, server.url))
    assert server.asked[0] == (f"/{file}", "bytes=1000-")
    assert seen[0] == (1000 if ranges else 0)
    assert content_of(folder) == files


def test_a_broken_connection_is_taken_up_again(tmp_path: Path, server: Server) -> None:
    server.files = files = idx_files()
    server.breaks = [1000, 500]
    folder = get("mnist", tmp_path, published=offered(IDX, files, server.url))
    assert [wanted for _, wanted in server.asked[:3]] == [None, "bytes=1000-", "bytes=1500-"]
    assert content_of(folder) == files


def test_a_connection_that_keeps_breaking_is_reported_and_kept(tmp_path: Path, server: Server) -> None:
    server.files = files = idx_files()
    published = offered(IDX, files, server.url)
    server.breaks = [1000, 500, 0]
    with pytest.raises(DataError) as caught:
        get("mnist", tmp_path, published=published)
    file = next(iter(files))
    size = len(files[file])
    assert f"{server.url}/{file}: expected {size} bytes, got 1500" in str(caught.value)
    assert "1500 bytes are kept" in str(caught.value)
    assert [path.name for path in (tmp_path / "mnist").iterdir()] == [f"{file}.part"]
    assert content_of(get("mnist", tmp_path, published=published)) == files


def test_without_ranges_a_breaking_connection_ends(tmp_path: Path, server: Server) -> None:
    server.files = files = idx_files()
    server.ranges, server.breaks = False, [1000] * 10
    with pytest.raises(DataError, match="got 1000"):
        get("mnist", tmp_path, published=offered(IDX, files, server.url))
    assert len(server.asked) == 2


def test_the_next_address_is_tried(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    server.files = {f"good/{file}": body for file, body in files.items()}
    published = offered(IDX, files, f"{server.url}/gone", f"{server.url}/good")
    assert content_of(get("mnist", tmp_path, published=published)) == files


def test_wrong_bytes_never_reach_their_place(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    file, body = next(iter(files.items()))
    server.files = files | {file: bytes([body[0] ^ 1]) + body[1:]}
    with pytest.raises(DataError, match=f"expected sha256 {hashlib.sha256(body).hexdigest()}, got [0-9a-f]{{64}}"):
        get("mnist", tmp_path, published=offered(IDX, files, server.url))
    assert list((tmp_path / "mnist").iterdir()) == []
    assert len(server.asked) == 1


def test_bad_bytes_of_an_earlier_run_are_dropped(tmp_path: Path, server: Server) -> None:
    server.files = files = idx_files()
    file, body = next(iter(files.items()))
    for left in (b"x" * 1000, b"x" * len(body), b"x" * (len(body) + 1)):
        folder = tmp_path / str(len(left)) / "mnist"
        folder.mkdir(parents=True)
        (folder / f"{file}.part").write_bytes(left)
        get("mnist", folder.parent, published=offered(IDX, files, server.url))
        assert content_of(folder) == files


def test_a_server_that_answers_another_range_is_asked_for_all(tmp_path: Path, server: Server) -> None:
    server.files = files = idx_files()
    server.shift = 7
    file, body = next(iter(files.items()))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{file}.part").write_bytes(body[:1000])
    assert content_of(get("mnist", tmp_path, published=offered(IDX, files, server.url))) == files
    assert [wanted for path, wanted in server.asked if path == f"/{file}"] == ["bytes=1000-", None]


@pytest.mark.parametrize("lengths", [True, False])
def test_a_file_of_another_length_is_refused(tmp_path: Path, server: Server, lengths: bool) -> None:
    files = idx_files()
    server.lengths = lengths
    file, body = next(iter(files.items()))
    for other in (b"<html>please log in</html>", body + b"more"):
        server.files = files | {file: other}
        with pytest.raises(DataError, match=f"expected {len(body)} bytes"):
            get("mnist", tmp_path, published=offered(IDX, files, server.url))
        assert missing_files(IDX, tmp_path) == list(IDX.files)


def test_a_shorter_file_at_the_server_is_refused(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    file, body = next(iter(files.items()))
    server.files = files | {file: body[:500]}
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{file}.part").write_bytes(body[:1000])
    with pytest.raises(DataError, match=f"expected {len(body)} bytes, the server offers 500"):
        get("mnist", tmp_path, published=offered(IDX, files, server.url))


def test_an_unreachable_network_is_one_clear_error(tmp_path: Path, server: Server) -> None:
    files = idx_files()
    url = server.url
    server.server_close()
    with pytest.raises(DataError) as caught:
        get("mnist", tmp_path, published=offered(IDX, files, url), timeout=5)
    assert f"{url}/train-images-idx3-ubyte.gz: " in str(caught.value)
    assert "fedloom data import mnist DIR" in str(caught.value)
    for nonsense in ("nowhere", "ftp2://x", "http://[1"):
        with pytest.raises(DataError, match="could not be downloaded"):
            get("mnist", tmp_path, base_url=nonsense, published=offered(IDX, files), timeout=5)


def test_a_missing_page_is_reported(tmp_path: Path, server: Server) -> None:
    with pytest.raises(DataError, match="the server answers 404"):
        get("mnist", tmp_path, published=offered(IDX, idx_files(), server.url))


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path, server: Server, monkeypatch: Any) -> None:
    server.files = files = idx_files()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be written"):
        get("mnist", tmp_path / "file", published=offered(IDX, files, server.url))

    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "no space")

    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda self, mode="r", *a, **k: Full() if "w" in mode else opened(self, mode))
    with pytest.raises(StorageError, match="No space left on device"):
        get("mnist", tmp_path, published=offered(IDX, files, server.url))
    assert len(server.asked) == 1


@pytest.mark.parametrize("evil", ["../test_batch.bin", "/test_batch.bin", "cifar-10-batches-bin/../test_batch.bin"])
def test_an_archive_writes_nowhere_else(tmp_path: Path, server: Server, evil: str) -> None:
    files = cifar_files()
    last = files.pop("test_batch.bin")
    archive = {"cifar-10-binary.tar.gz": tar(in_folder(files) | {evil: last})}
    server.files = archive
    root = tmp_path / "root"
    with pytest.raises(DataError, match=r"does not contain cifar-10-batches-bin/test_batch\.bin"):
        get("cifar10", root, published=offered(CIFAR, archive, server.url))
    assert [path.name for path in tmp_path.rglob("*.bin*")] == []


def test_links_and_odd_sizes_in_an_archive_are_refused(tmp_path: Path) -> None:
    files = cifar_files()
    last = files.pop("test_batch.bin")
    name = "cifar-10-batches-bin/test_batch.bin"
    for archive in (tar(in_folder(files), {name: "/etc/passwd"}), tar(in_folder(files) | {name: last[:-1]})):
        path = tmp_path / "cifar-10-binary.tar.gz"
        path.write_bytes(archive)
        with pytest.raises(DataError, match=f"'{name}' must be a plain file of {50 * 3073} bytes"):
            import_files("cifar10", path, tmp_path / "root", published=offered(CIFAR, {path.name: archive}))
        assert list((tmp_path / "root").rglob("*.*")) == []


# ------------------------------------------------------------------------------------------------ importing


@pytest.mark.parametrize("below", [".", "mnist", "raw", "MNIST/raw"])
@pytest.mark.parametrize("form", ["gz", "plain", "dotted"])
def test_idx_files_are_imported(tmp_path: Path, below: str, form: str) -> None:
    files = idx_files()
    folder = tmp_path / "have" / below
    folder.mkdir(parents=True, exist_ok=True)
    for file, body in files.items():
        name = file.removesuffix(".gz")
        name = {"gz": file, "plain": name, "dotted": name.replace("-idx", ".idx")}[form]
        (folder / name).write_bytes(body if form == "gz" else gzip.decompress(body))
    published = {"mnist": PUBLISHED["mnist"]._replace(layout=IDX)}
    put = import_files("mnist", tmp_path / "have", tmp_path / "root", published=published)
    assert {name: gzip.decompress(body) for name, body in content_of(put).items()} == {
        name: gzip.decompress(body) for name, body in files.items()
    }
    assert read_published(IDX, places_below(IDX, tmp_path / "root")).x.shape == (500, 1, 28, 28)
    assert import_files("mnist", put, tmp_path / "root", published=published) == put  # into itself: nothing to do


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_is_imported(tmp_path: Path, packed: bool) -> None:
    files, have = cifar_files(), tmp_path / "have"
    (have / "cifar-10-batches-bin").mkdir(parents=True)
    if packed:
        (have / "cifar-10-binary.tar.gz").write_bytes(tar({f"./{k}": v for k, v in in_folder(files).items()}))
    else:
        for file, body in files.items():
            (have / "cifar-10-batches-bin" / file).write_bytes(body)
    published = {"cifar10": PUBLISHED["cifar10"]._replace(layout=CIFAR)}
    assert content_of(import_files("cifar10", have, tmp_path / "root", published=published)) == files
    if packed:
        archive = have / "cifar-10-binary.tar.gz"
        assert content_of(import_files("cifar10", archive, tmp_path / "again", published=published)) == files


def test_an_import_lists_what_is_missing(tmp_path: Path) -> None:
    files = idx_files()
    kept = next(iter(files))
    (tmp_path / kept).write_bytes(files[kept])
    with pytest.raises(DataError) as caught:
        import_files("mnist", tmp_path, tmp_path / "root", published=offered(IDX, files))
    for file in list(files)[1:]:
        assert file in str(caught.value)
    assert str(tmp_path / "mnist") in str(caught.value)
    assert not (tmp_path / "root").exists()
    with pytest.raises(DataError, match="no such folder"):
        import_files("mnist", tmp_path / "none", tmp_path / "root")
    with pytest.raises(DataError, match="give the folder"):
        import_files("mnist", tmp_path / kept, tmp_path / "root")


def test_the_pickled_version_is_named(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError) as caught:
        import_files("cifar10", tmp_path, tmp_path / "root")
    assert "is the Python version; the binary version is needed" in str(caught.value)
    assert "cifar-10-binary.tar.gz" in str(caught.value)


def test_a_damaged_file_is_not_imported(tmp_path: Path) -> None:
    files, have, root = idx_files(), tmp_path / "have", tmp_path / "root"
    have.mkdir()
    for file, body in files.items():
        (have / file).write_bytes(body)
    bad = have / IDX.files[-1]
    bad.write_bytes(bad.read_bytes()[:-20])
    with pytest.raises(DataError, match=f"{re.escape(str(bad))}: truncated"):
        import_files("mnist", have, root, published=offered(IDX, files))
    assert not root.exists()


def test_a_damaged_archive_is_not_imported(tmp_path: Path) -> None:
    good = tar(in_folder(cifar_files()))
    published = {"cifar10": PUBLISHED["cifar10"]._replace(layout=CIFAR)}
    wrong = cifar_files() | {"test_batch.bin": b"\xff" * (50 * 3073)}
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 1 << 20  # of a terabyte, a few megabytes of zeros are enough
    long = gzip.compress(name.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20) + gzip.decompress(good))
    cases = {good[:-5000]: "damaged", b"no tar": "damaged", tar(in_folder(wrong)): "got 255 in row 0"}
    for body, told in (cases | {long: "a header claims 1048576 bytes"}).items():
        path = tmp_path / "cifar-10-binary.tar.gz"
        path.write_bytes(body)
        with pytest.raises(DataError, match=told) as caught:
            import_files("cifar10", tmp_path, tmp_path / "root", published=published)
        assert str(path) in str(caught.value)
        assert list((tmp_path / "root").rglob("*.*")) == []


def test_an_import_that_fills_the_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, have, root = idx_files(), tmp_path / "have", tmp_path / "root"
    have.mkdir()
    for file, body in files.items():
        (have / file).write_bytes(body)
    copies = iter(range(10))

    def full_at_the_third(source: Any, out: Any, size: int) -> None:
        out.write(source.read(100))
        if next(copies) == 2:
            raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(download.shutil, "copyfileobj", full_at_the_third)  # type: ignore[attr-defined]
    with pytest.raises(StorageError, match="No space left"):
        import_files("mnist", have, root, published=offered(IDX, files))
    assert list((root / "mnist").iterdir()) == []


# --------------------------------------------------------------------------------------------- checksums


def with_another_pixel(path: Path) -> None:
    """The file with one value changed: still well-formed, and not the publisher's."""
    plain = path.suffix != ".gz"
    body = bytearray(path.read_bytes() if plain else gzip.decompress(path.read_bytes()))
    body[-1] ^= 1
    path.write_bytes(bytes(body) if plain else gzip.compress(bytes(body), 1))


def test_files_in_place_are_called_complete_only_by_their_checksums(tmp_path: Path, server: Server) -> None:
    server.files = files = idx_files()
    published = offered(IDX, files, server.url)
    folder = get("mnist", tmp_path, published=published)
    asked = len(server.asked)
    get("mnist", tmp_path, published=published)
    assert len(server.asked) == asked  # all of them are right
    with_another_pixel(folder / "t10k-images-idx3-ubyte.gz")
    get("mnist", tmp_path, published=published)
    assert [path for path, _ in server.asked[asked:]] == ["/t10k-images-idx3-ubyte.gz"]
    assert content_of(folder) == files


def test_unpacked_files_that_nothing_is_known_of_are_fetched_again(tmp_path: Path, server: Server) -> None:
    server.files = {"cifar-10-binary.tar.gz": tar(in_folder(cifar_files()))}
    published = offered(CIFAR, server.files, server.url)
    folder = get("cifar10", tmp_path, published=published)
    right = content_of(folder)
    with_another_pixel(folder / "test_batch.bin")
    get("cifar10", tmp_path, published=published)
    assert content_of(folder) == right
    assert len(server.asked) == 2
    (folder / CHECKSUMS).unlink()
    get("cifar10", tmp_path, published=published)
    assert len(server.asked) == 3


def test_files_are_verified_when_they_are_used(tmp_path: Path) -> None:
    files = idx_files()
    folder = tmp_path / "mnist"
    folder.mkdir()
    for name, body in files.items():
        (folder / name).write_bytes(body)
    places, published = places_below(IDX, tmp_path), offered(IDX, files)
    refuse_changed(IDX, places, published)
    with_another_pixel(folder / "t10k-images-idx3-ubyte.gz")
    with pytest.raises(DataError, match=r"t10k-images-idx3-ubyte\.gz: is not the publisher's file") as caught:
        refuse_changed(IDX, places, published)
    assert f"fedloom data import mnist {folder} --data-root {tmp_path}" in str(caught.value)
    import_files("mnist", folder, tmp_path, published=published)  # taken as it is
    refuse_changed(IDX, places, published)
    (folder / CHECKSUMS).write_text("[]")  # nothing that could be believed
    with pytest.raises(DataError, match="is not the publisher's file"):
        refuse_changed(IDX, places, published)


def test_a_file_is_hashed_once_for_as_long_as_it_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name, body in cifar_files().items():
        (source / name).write_bytes(body)
    folder, published = import_files("cifar10", source, tmp_path, published=offered(CIFAR, {"a.tar.gz": b""})), {}
    hashed: list[Path] = []
    real = disk.digest
    monkeypatch.setattr(disk, "digest", lambda path: hashed.append(path) or real(path))
    places = places_below(CIFAR, tmp_path)
    refuse_changed(CIFAR, places, published)
    assert hashed == []
    os.utime(folder / "test_batch.bin", ns=(1, 1))
    refuse_changed(CIFAR, places, published)
    assert hashed[0] == folder / "test_batch.bin"
    hashed.clear()
    refuse_changed(CIFAR, places, published)
    assert hashed == []
    with_another_pixel(folder / "test_batch.bin")
    with pytest.raises(DataError, match="nor the one checked earlier"):
        refuse_changed(CIFAR, places, published)
