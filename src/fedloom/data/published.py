"""Published sets: where they come from, and whether the files are the publisher's.

A file is hashed when it is first used. The checksum is stored next to the files with the file's size and modification
time, so that a file is not hashed again unless one of these has changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.core import disk
from fedloom.core.errors import DataError
from fedloom.data.files import LAYOUTS, Layout, root_option

CHECKSUMS = "checksums.json"  # in the folder of a set


class Remote(NamedTuple):
    """One file as its publisher offers it."""

    file: str
    size: int
    sha256: str


class Published(NamedTuple):
    """A set, the places that offer it, and the folders in which people usually keep it."""

    layout: Layout
    bases: tuple[str, ...]  # tried in order
    remotes: tuple[Remote, ...]
    folders: tuple[str, ...] = ()

    @property
    def archived(self) -> bool:
        """Whether the publisher packs the files into one archive."""
        return self.remotes[0].file.endswith(".tar.gz")

    @property
    def folder_names(self) -> tuple[str, ...]:
        return (".", self.layout.folder, self.layout.name, *self.folders)


PUBLISHED: dict[str, Published] = {
    "mnist": Published(
        LAYOUTS["mnist"],
        ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist"),
        (
            Remote(
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            Remote(
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            Remote(
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            Remote(
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        ("raw", "MNIST/raw", "MNIST"),
    ),
    "fashion_mnist": Published(
        LAYOUTS["fashion_mnist"],
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion",
        ),
        (
            Remote(
                "train-images-idx3-ubyte.gz",
                26_421_880,
                "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            Remote(
                "train-labels-idx1-ubyte.gz",
                29_515,
                "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            Remote(
                "t10k-images-idx3-ubyte.gz",
                4_422_102,
                "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            Remote(
                "t10k-labels-idx1-ubyte.gz",
                5_148,
                "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        ),
        ("raw", "FashionMNIST/raw", "FashionMNIST", "data/fashion"),
    ),
    "cifar10": Published(
        LAYOUTS["cifar10"],
        ("https://www.cs.toronto.edu/~kriz",),
        (
            Remote(
                "cifar-10-binary.tar.gz",
                170_052_171,
                "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
    ),
    "cifar100": Published(
        LAYOUTS["cifar100"],
        ("https://www.cs.toronto.edu/~kriz",),
        (
            Remote(
                "cifar-100-binary.tar.gz",
                168_513_733,
                "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
    ),
}


def refuse_changed(layout: Layout, places: Mapping[str, Path], published: Mapping[str, Published] = PUBLISHED) -> None:
    """Refuse a file that has neither its publisher's checksum nor the one that it had when it was imported.

    The publisher of an archive gives no checksums of its members: files that were unpacked manually are accepted, and
    must not change afterwards.
    """
    offered = published.get(layout.name)
    known = offered if offered is not None and offered.layout == layout else Published(layout, (), ())
    wrong = unverified(known, places, strangers=not known.remotes or known.archived)
    for file, found in wrong.items():
        home = places[file].parent
        elsewhere = root_option(home.parent)
        raise DataError(
            f"{places[file]}: is not the publisher's file, nor the one checked earlier (its sha256 is {found})\n"
            f"  download it again:           fedloom data get {layout.name}{elsewhere}\n"
            f"  or accept it:                fedloom data import {layout.name} {home}{elsewhere}"
        )


def unverified(
    published: Published, places: Mapping[str, Path], *, strangers: bool = False, anew: bool = False
) -> dict[str, str]:
    """The files with a wrong checksum, and that checksum; right ones are recorded.

    ``strangers``: accept a file without a known checksum. ``anew``: hash all files again.
    """
    right = {remote.file: remote.sha256 for remote in published.remotes}
    before, wrong = {}, {}
    for file, path in places.items():
        before[file] = _remembered(path)
        if before[file].get("stamp") == _stamp(path) and not anew:
            continue
        found, expected = disk.digest(path), {right.get(file), before[file].get("sha256")} - {None}
        if found not in expected and (expected or not strangers):
            wrong[file] = found
    if not wrong and any(entry.get("stamp") != _stamp(places[file]) for file, entry in before.items()):
        remember(places)
    return wrong


def remember(places: Mapping[str, Path]) -> None:
    """Record the checksums of right files, so that they need not be computed again."""
    for folder in {path.parent for path in places.values()}:
        here = {path.name: path for path in places.values() if path.parent == folder}
        found = {name: {"sha256": disk.digest(path), "stamp": _stamp(path)} for name, path in here.items()}
        with suppress(OSError):  # a folder that cannot be written to is hashed each time
            disk.write_bytes(folder / CHECKSUMS, json.dumps(found, indent=1).encode() + b"\n")


def _remembered(path: Path) -> dict[str, Any]:
    """What is recorded of a file; empty if that cannot be read."""
    try:
        found = json.loads((path.parent / CHECKSUMS).read_text())[path.name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp(path: Path) -> list[int]:
    """What changes when a file does."""
    now = path.stat()
    return [now.st_size, now.st_mtime_ns]
