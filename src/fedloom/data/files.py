"""Readers: each turns files into rows, or says which file is wrong, where in it, and what was expected."""

from __future__ import annotations

import gzip
import importlib.util
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fedloom.core.errors import DataError, nearest
from fedloom.data.arrays import Ints

Bytes: TypeAlias = NDArray[np.uint8]
Place: TypeAlias = Callable[[int], str]  # the place of a row, in words
SPREADSHEETS = (".xlsx", ".xls", ".xlsm", ".xlsb", ".ods")
_WHOLE_PART = re.compile(r"\.0*$")  # what comes after the whole part of a number that is whole


class Rows(NamedTuple):
    """What a reader found, before test rows are chosen."""

    x: NDArray[Any]
    y: Ints
    labels: tuple[str, ...]
    test: NDArray[np.bool_] | None = None  # None: the files do not say
    client: Ints | None = None
    clients: tuple[str, ...] = ()  # their names
    target: NDArray[np.float64] | None = None  # the labels as numbers, in regression


# From labels to classes, their names, and the regression targets.
Decode: TypeAlias = Callable[[NDArray[Any], str, Place], tuple[Ints, tuple[str, ...], NDArray[np.float64] | None]]


def default_root() -> Path:
    """The folder of all data: $FEDLOOM_DATA, else fedloom/data below the user's cache folder."""
    chosen = os.environ.get("FEDLOOM_DATA")
    if chosen:
        return place_of(chosen)
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "fedloom" / "data"


def place_of(path: str) -> Path:
    """A user's path with ``~`` expanded."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise DataError(f"{path}: cannot be resolved: {error} (write the full path)") from error


def is_folder(path: str | Path) -> bool:
    """Whether the path is a folder that can be read."""
    try:
        return Path(path).is_dir()
    except OSError:  # such as a name that is too long for any file
        return False


def is_file(path: str | Path) -> bool:
    """Whether the path is a file that can be read."""
    try:
        return Path(path).is_file()
    except OSError:
        return False


# ------------------------------------------------------------------------------------------- published sets


class Part(NamedTuple):
    """Some rows of a published set: an idx pair (images, labels), or one file of fixed-length records."""

    files: tuple[str, ...]
    rows: int
    test: bool


class Layout(NamedTuple):
    """The files of a published set on disk."""

    name: str
    folder: str
    shape: tuple[int, int, int]
    parts: tuple[Part, ...]
    classes: tuple[tuple[str, ...], ...]  # the class names, for each label a row has

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(file for part in self.parts for file in part.files)

    @property
    def record(self) -> int:
        """The bytes of one record: its labels, then its pixels."""
        return len(self.classes) + math.prod(self.shape)


DIGIT_NAMES = tuple("0123456789")
FASHION_NAMES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
COARSE_NAMES = tuple(
    """aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things large_natural_outdoor_scenes
    large_omnivores_and_herbivores medium_mammals non-insect_invertebrates people reptiles small_mammals trees
    vehicles_1 vehicles_2""".split()  # noqa: SIM905
)
FINE_NAMES = tuple(
    """apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
    man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
    pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
    skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
    tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm""".split()  # noqa: SIM905
)


def idx_layout(name: str, folder: str, classes: tuple[str, ...], train: int = 60_000, test: int = 10_000) -> Layout:
    """The layout of MNIST and of sets in the same format."""
    pair = "{0}-images-idx3-ubyte.gz", "{0}-labels-idx1-ubyte.gz"
    parts = (
        Part(tuple(file.format("train") for file in pair), train, False),
        Part(tuple(file.format("t10k") for file in pair), test, True),
    )
    return Layout(name, folder, (1, 28, 28), parts, (classes,))


def cifar10_layout(batch: int = 10_000) -> Layout:
    """The layout of the binary version of CIFAR-10, with ``batch`` rows in each of its six files."""
    train = tuple(Part((f"data_batch_{i}.bin",), batch, False) for i in range(1, 6))
    parts = (*train, Part(("test_batch.bin",), batch, True))
    return Layout("cifar10", "cifar-10-batches-bin", (3, 32, 32), parts, (CIFAR10_NAMES,))


def cifar100_layout(train: int = 50_000, test: int = 10_000) -> Layout:
    """The layout of the binary version of CIFAR-100, whose rows have a coarse and a fine label."""
    parts = (Part(("train.bin",), train, False), Part(("test.bin",), test, True))
    return Layout("cifar100", "cifar-100-binary", (3, 32, 32), parts, (COARSE_NAMES, FINE_NAMES))


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        idx_layout("mnist", "mnist", DIGIT_NAMES),
        idx_layout("fashion_mnist", "fashion-mnist", FASHION_NAMES),
        cifar10_layout(),
        cifar100_layout(),
    )
}


def missing_files(layout: Layout, root: Path) -> list[str]:
    """The files of a published set that are not below ``root``."""
    return [file for file in layout.files if not (root / layout.folder / file).is_file()]


def places_below(layout: Layout, root: Path) -> dict[str, Path]:
    """The path of each file of a published set below ``root``; a DataError that says how to get missing ones."""
    missing = missing_files(layout, root)
    if missing:
        raise DataError(
            f"data '{layout.name}' is not installed: no {', '.join(missing)} in {root / layout.folder}\n"
            f"  download it:                 fedloom data get {layout.name}{root_option(root)}\n"
            f"  or import files you have:     fedloom data import {layout.name} DIR{root_option(root)}"
        )
    return {file: root / layout.folder / file for file in layout.files}


def root_option(root: Path) -> str:
    """The option that names this folder of all data, where a command would use another one."""
    return "" if root == default_root() else f" --data-root {root}"


def read_published(layout: Layout, places: Mapping[str, Path], column: int = 0) -> Rows:
    """All rows of a published set, every file of it checked, with label ``column`` as the class."""
    counts = [part.rows for part in layout.parts]
    x = np.empty((sum(counts), *layout.shape), np.uint8)
    y = np.empty((sum(counts), len(layout.classes)), np.uint8)
    start = 0
    for part in layout.parts:
        rows = slice(start, start + part.rows)
        files = [places[file] for file in part.files]
        if len(files) == 2:
            x[rows] = read_idx(files[0], (part.rows, *layout.shape[1:]))[:, None]
            y[rows] = read_idx(files[1], (part.rows,))[:, None]
        else:
            x[rows], y[rows] = read_records(files[0], layout.shape, len(layout.classes), part.rows)
        for labels, names in zip(y[rows].T, layout.classes, strict=True):
            if labels.max() >= len(names):
                bad = int(np.argmax(labels >= len(names)))
                raise DataError(
                    f"{files[-1]}: labels must be in 0..{len(names) - 1} (got {labels[bad]} in row {bad}); "
                    "the file is damaged or is another set"
                )
        start = rows.stop
    test = np.repeat([part.test for part in layout.parts], counts)
    return Rows(x, y[:, column].astype(np.int64), layout.classes[column], test)


def read_idx(path: Path, shape: tuple[int, ...] | None = None) -> Bytes:
    """The unsigned bytes of an idx file, plain or gzip by its content, of exactly ``shape`` if given."""
    with reading(path), _plain(path) as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08" or magic[3] == 0:
            raise DataError(
                f"{path}: is not an idx file of unsigned bytes: it must begin with 00 00 08 and the number of "
                f"dimensions (got {magic.hex(' ') or 'an empty file'})"
            )
        header = file.read(4 * magic[3])
        if len(header) < 4 * magic[3]:
            raise DataError(f"{path}: truncated: expected {4 + 4 * magic[3]} header bytes, found {4 + len(header)}")
        found = tuple(int(n) for n in np.frombuffer(header, ">u4"))
        if shape is not None and found != shape:
            raise DataError(f"{path}: must contain {_by(shape)} bytes of data (its header says {_by(found)})")
        size = math.prod(found)
        body = file.read(size + 1)  # one more than there should be: finds surplus bytes, and the checksum of gzip
    if len(body) != size:
        surplus = "at least " if len(body) > size else ""
        raise DataError(
            f"{path}: {'too long' if surplus else 'truncated'}: its header claims {_by(found)} = {size} bytes "
            f"of data, found {surplus}{len(body)}"
        )
    return np.frombuffer(body, np.uint8).reshape(found)


def read_records(path: Path, shape: tuple[int, ...], labels: int, rows: int | None = None) -> tuple[Bytes, Bytes]:
    """The images and the labels of a file of records (label bytes, then pixels), ``rows`` of them if that is given."""
    record = labels + math.prod(shape)
    with reading(path):
        size = path.stat().st_size
        expected = record * (max(1, round(size / record)) if rows is None else rows)
        if size != expected:
            raise DataError(
                f"{path}: {'truncated' if size < expected else 'too long'}: expected {expected} bytes "
                f"({expected // record} records of {record}), found {size}"
            )
        table = np.fromfile(path, np.uint8).reshape(-1, record)
    return table[:, labels:].reshape(-1, *shape), table[:, :labels]


def read_digits() -> Rows:
    """The 1797 digits of 8x8 pixels that scikit-learn's wheel carries, read without importing scikit-learn."""
    spec = importlib.util.find_spec("sklearn")
    homes = [Path(home) for home in (spec.submodule_search_locations or [])] if spec else []
    known = [home / "datasets" / "data" / "digits.csv.gz" for home in homes]
    path = next((path for path in known if path.is_file()), None) or next(
        (path for home in homes for path in home.rglob("digits.csv.gz")), None
    )
    if path is None:
        raise DataError("data 'digits': scikit-learn's file digits.csv.gz was not found (pip install scikit-learn)")
    with reading(path), gzip.open(path, "rt") as file:
        table = np.loadtxt(file, dtype=np.int64, delimiter=",", ndmin=2)
    if table.shape[1] != 65 or not (table.min() >= 0 and table[:, :64].max() <= 16 and table[:, 64].max() <= 9):
        raise DataError(f"{path}: must have 64 pixels in 0..16 and a digit in each line (pip install scikit-learn)")
    x = (table[:, :64] * 255 // 16).astype(np.uint8).reshape(-1, 1, 8, 8)
    return Rows(x, table[:, 64], DIGIT_NAMES)


# --------------------------------------------------------------------------------------------- arrays, npz

NPZ_KEYS = ("x", "y", "client", "test")
NPZ_SPLIT_KEYS = tuple(f"{key}_{split}" for key in ("x", "y", "client") for split in ("train", "test"))


def read_npz(path: Path, limit: float = math.inf, decode: Decode | None = None) -> Rows:
    """The rows of an npz file: x, y, client, test; or x_train, y_train, x_test, y_test, client_train, client_test.

    ``client`` and ``test`` are optional, and so is ``labels``, the names of the classes 0, 1, 2, ... An archive of more
    than ``limit`` bytes, once unpacked, is not.
    """
    found = npz_arrays(path, limit)
    for key in found:
        if key not in (*NPZ_KEYS, *NPZ_SPLIT_KEYS, "labels"):
            raise DataError(f"{path}: unknown array '{key}' ({nearest(key, (*NPZ_KEYS, *NPZ_SPLIT_KEYS, 'labels'))})")
    whole, split = [key for key in found if key in NPZ_KEYS], [key for key in found if key in NPZ_SPLIT_KEYS]
    if whole and split:
        raise DataError(f"{path}: has both '{whole[0]}' and '{split[0]}' (use x and y, or x_train, y_train, ...)")
    if split:
        found = {**_joined(found, path), **({"labels": found["labels"]} if "labels" in found else {})}
    for key in ("x", "y"):
        if key not in found:
            raise DataError(f"{path}: has no array '{key}' (it has {', '.join(found) or 'nothing'})")
    labels = tuple(str(name) for name in np.atleast_1d(found["labels"]).tolist()) if "labels" in found else None
    return rows_of_arrays(found["x"], found["y"], found.get("client"), found.get("test"), labels, str(path), decode)


def npz_arrays(path: Path, limit: float = math.inf) -> dict[str, NDArray[Any]]:
    """The arrays of an npz file, whatever they are."""
    if not zipfile.is_zipfile(existing(path)):
        raise DataError(f"{path}: is not a complete npz file ({path.stat().st_size} bytes; write it with numpy.savez)")
    with reading(path), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        within(limit, sum(member.file_size for member in members), str(path))
        return {member.filename.removesuffix(".npy"): _npy(archive, member, str(path)) for member in members}


def _npy(archive: zipfile.ZipFile, member: zipfile.ZipInfo, at: str) -> NDArray[Any]:
    """One array of an archive, if it is as long as its header says: no memory is allocated for missing data."""
    try:
        with archive.open(member) as file:
            version = npy.read_magic(file)
            shape, _, dtype = (npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0)(file)
            promised, there = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if promised != there and not dtype.hasobject:
            raise ValueError(f"its header claims {promised} bytes, but it has {there}")
        with archive.open(member) as file:
            found: NDArray[Any] = npy.read_array(file, allow_pickle=False)
            return found
    except (ValueError, TypeError, SyntaxError, OverflowError, MemoryError, RecursionError, EOFError) as error:
        raise DataError(
            f"{at}: array '{member.filename.removesuffix('.npy')}' cannot be read: {error} "
            "(save plain numbers or strings, not objects)"
        ) from error


def _joined(found: Mapping[str, NDArray[Any]], path: Path) -> dict[str, NDArray[Any]]:
    """The train arrays followed by the test arrays; without any test array, the train arrays alone."""
    splits = ("train", "test") if any(key.endswith("_test") for key in found) else ("train",)
    keys = [key for key in ("x", "y", "client") if any(f"{key}_{split}" in found for split in ("train", "test"))]
    for key in keys:
        for split in splits:
            if f"{key}_{split}" not in found:
                raise DataError(f"{path}: has no array '{key}_{split}' (it has {', '.join(found)})")
    for split in splits:
        sizes = {key: len(np.atleast_1d(found[f"{key}_{split}"])) for key in keys}
        if len(set(sizes.values())) > 1:
            listed = ", ".join(f"{key}_{split} {size}" for key, size in sizes.items())
            raise DataError(f"{path}: the {split} arrays must have equally many rows (got {listed})")
    try:
        joined = {key: np.concatenate([found[f"{key}_{split}"] for split in splits]) for key in keys}
    except ValueError as error:
        raise DataError(f"{path}: the train and test arrays do not fit together: {error}") from error
    if len(splits) == 2:
        key = keys[0]
        joined["test"] = np.repeat([False, True], [len(found[f"{key}_train"]), len(found[f"{key}_test"])])
    return joined


def rows_of_arrays(
    x: NDArray[Any],
    y: NDArray[Any],
    client: NDArray[Any] | None,
    test: NDArray[Any] | None,
    labels: Sequence[str] | None,
    at: str,
    decode: Decode | None = None,
) -> Rows:
    """A user's arrays as rows; a DataError, placed by ``at``, if they are invalid.

    ``decode`` turns labels into classes, and perhaps numbers, instead of ``coded``.
    """
    where: Place = lambda row: f"{at}, row {row}"  # noqa: E731
    if x.ndim == 0:
        raise DataError(f"{at}: x must have at least two dimensions [rows, features] (got the single value {x})")
    examples = as_examples(x, at)
    for name, column in (("y", y), ("client", client), ("test", test)):
        if column is not None and column.shape not in ((len(x),), (len(x), 1)):
            hint = " (of one-hot labels, take y.argmax(1))" if name == "y" and column.ndim == 2 else ""
            raise DataError(
                f"{at}: {name} must have one entry for each of the {len(x)} rows of x (got shape {column.shape}){hint}"
            )
    target = None
    if decode is not None:
        codes, names, target = decode(y.reshape(-1), "label", where)
    elif labels is None:
        codes, names = coded(y.reshape(-1), "label", where)
    else:
        codes, names = numbered(y.reshape(-1), len(labels), "label", where), tuple(labels)
    holders, clients = (None, ()) if client is None else coded(client.reshape(-1), "client", where)
    marked = None if test is None else _flags(test.reshape(-1), where)
    return Rows(examples, codes, names, marked, holders, clients, target)


def as_examples(x: NDArray[Any], at: str) -> NDArray[Any]:
    """uint8 images as [n, C, H, W]; all other numbers as float32, their values unchanged.

    Four dimensions are images: channels come first if the second dimension is 1 or 3, last if only the fourth
    is, and first if neither is. Three dimensions of uint8 are grey images [n, H, W].
    """
    if x.dtype.kind not in "buif":
        raise DataError(f"{at}: x must be numeric (got {x.dtype})")
    if x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4:
        return np.ascontiguousarray(x)
    with np.errstate(over="ignore"):  # an overflow becomes infinite, which `checked` refuses by row
        return np.ascontiguousarray(x, dtype=np.float32)


def numbered(column: NDArray[Any], count: int, what: str, where: Place) -> Ints:
    """The column, if it consists of numbers of classes, of which there are ``count``."""
    codes = _whole_numbers(column, what, where)
    outside = (codes < 0) | (codes >= count)
    if outside.any():
        row = int(np.argmax(outside))
        raise DataError(f"{where(row)}: the {what} must be in 0..{count - 1} (got {codes[row]})")
    return codes.astype(np.int64)


def refuse_empty(words: NDArray[Any], what: str, where: Place) -> None:
    """An error that names the first empty cell, and says how many there are."""
    rows = np.flatnonzero(words == "")
    if len(rows):
        more = f", and in {len(rows) - 1:,} more" if len(rows) > 1 else ""
        raise DataError(f"{where(int(rows[0]))}: the {what} is empty{more} (fill it in, or remove such rows)")


def coded(column: NDArray[Any], what: str, where: Place) -> tuple[Ints, tuple[str, ...]]:
    """The rank of each value among the sorted distinct ones (numbers by size, words by spelling), and their names."""
    column = _of_objects(column, what, where)
    if column.dtype.kind in "US":
        words = column if column.dtype.kind == "U" else _decoded(column, what, where)
        distinct, codes = np.unique(words, return_inverse=True)
        refuse_empty(words, what, where)
        numbers = [number_of(word) for word in distinct.tolist()]
        if any(number is None for number in numbers):
            return codes.reshape(-1).astype(np.int64), tuple(distinct.tolist())
        bad = np.array([not isinstance(number, int) for number in numbers])[codes.reshape(-1)]
        if bad.any():
            row = int(np.argmax(bad))
            raise DataError(f"{where(row)}: {_not_whole(what, repr(str(words.reshape(-1)[row])))}")
        _refuse_two_spellings(distinct.tolist(), numbers, what, lambda index: where(int(np.argmax(codes == index))))
        values = sorted({number for number in numbers if isinstance(number, int)})
        rank = {value: index for index, value in enumerate(values)}
        ranks = np.array([rank[number] for number in numbers if isinstance(number, int)], np.int64)
        return ranks[codes.reshape(-1)], tuple(str(value) for value in values)
    distinct, codes = np.unique(_whole_numbers(column, what, where), return_inverse=True)
    return codes.reshape(-1).astype(np.int64), tuple(str(int(value)) for value in distinct.tolist())


def _refuse_two_spellings(words: Sequence[str], numbers: Sequence[Any], what: str, at: Place) -> None:
    """Refuse different words that spell one number, such as 01 and 1: they may be codes of two things.

    1 and 1.0 are the same: tables with missing values write whole numbers in both ways.
    """
    known: dict[Any, str] = {}
    for index, (word, number) in enumerate(zip(words, numbers, strict=True)):
        other = known.setdefault(number, word)
        if _WHOLE_PART.sub("", other) != _WHOLE_PART.sub("", word):
            fix = "write it in one way, or with a letter before it if they are two things"
            raise DataError(f"{at(index)}: the {what} '{word}' is '{other}' elsewhere, the same number ({fix})")


def coded_as(column: NDArray[Any], labels: Sequence[str], what: str, where: Place) -> Ints:
    """The index of each value among these labels; a DataError for an unknown one."""
    codes, found = coded(column.reshape(-1), what, where)
    places = {label: index for index, label in enumerate(labels)}
    strangers = [name for name in found if name not in places]
    if strangers:
        row = int(np.argmax(codes == found.index(strangers[0])))
        known = ", ".join(labels[:10])
        raise DataError(f"{where(row)}: the {what} '{strangers[0]}' was not in training (known: {known})")
    return np.array([places[name] for name in found], np.int64)[codes]


def words_of(values: Sequence[Any], what: str, where: Place) -> NDArray[Any]:
    """A column as an array; words that NumPy would change are refused, and so is a gap, which would become a word."""
    has_words = any(isinstance(word, str) for word in values)
    for row, word in enumerate(values):
        if has_words and isinstance(word, float) and math.isnan(word):
            raise DataError(f"{where(row)}: the {what} is missing (fill it in, or remove such rows)")
        if isinstance(word, str | bytes) and word[-1:] in ("\0", b"\0"):
            raise DataError(f"{where(row)}: the {what} ends in a zero byte (got {word!r}); remove it")
    return np.array(values)


def _decoded(column: NDArray[Any], what: str, where: Place) -> NDArray[Any]:
    """Bytes as the text that they are in UTF-8: others would have to be guessed, and might become the same."""
    try:
        return np.char.decode(column, "utf-8")
    except UnicodeDecodeError:
        row, word = next((row, word) for row, word in enumerate(column.tolist()) if not _is_text(word))
        raise DataError(f"{where(row)}: the {what} is not UTF-8 text (got {word!r}); store words as text") from None


def _is_text(word: bytes) -> bool:
    try:
        word.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def number_of(word: str) -> int | float | None:
    """The number a word spells, as an int where it is whole; None for any other word."""
    if "_" in word:  # Python reads 0_7 as 7, but in data it is a code
        return None
    try:
        return int(word)
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number.is_integer() else number


def known_as(word: str, known: Sequence[str]) -> str:
    """The known name that a word means: the same, or the only one that is the same number, as 1 for 01 and 1.0."""
    number = None if word in known else number_of(word)
    same = [] if number is None else [name for name in known if number_of(name) == number]
    return same[0] if len(same) == 1 else word


def _not_whole(what: str, got: str) -> str:
    """What is wrong with a number that names no class."""
    fix = " (to learn numbers: task=regression)" if what.startswith("label") and "nan" not in got else ""
    return f"the {what} must be a whole number or a word (got {got}){fix}"


def _whole_numbers(column: NDArray[Any], what: str, where: Place) -> NDArray[Any]:
    """The column, if it consists of whole numbers of any type and size."""
    column = _of_objects(column, what, where)
    if column.dtype.kind == "f":
        bad = ~np.isfinite(column) | (column != np.floor(column))
        if bad.any():
            row = int(np.argmax(bad))
            raise DataError(f"{where(row)}: {_not_whole(what, str(column[row]))}")
    elif column.dtype.kind not in "bui":
        raise DataError(f"{where(0)}: the {what} must be a whole number or a word (got {column.dtype})")
    return column


def _of_objects(column: NDArray[Any], what: str, where: Place) -> NDArray[Any]:
    """A column of Python objects, as pandas keeps words, as an array of words or of numbers."""
    if column.dtype.kind != "O":
        return column
    values = column.tolist()
    known: tuple[type, ...] = (str,) if any(isinstance(value, str) for value in values) else (int, float, np.number)
    for row, value in enumerate(values):
        if not isinstance(value, known):
            raise DataError(f"{where(row)}: the {what} must be a whole number or a word (got {value!r})")
    return words_of(values, what, where)


def _flags(test: NDArray[Any], where: Place) -> NDArray[np.bool_]:
    if test.dtype.kind not in "bui" or ((test != 0) & (test != 1)).any():
        row = 0 if test.dtype.kind not in "bui" else int(np.argmax((test != 0) & (test != 1)))
        raise DataError(f"{where(row)}: test must be true or false (got {test[row]})")
    return test.astype(np.bool_)


# -------------------------------------------------------------------------------------------------- images

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


def read_images(folder: Path, size: int | None, channels: int, limit: float = math.inf) -> Rows:
    """The images below ``folder``: [train|test/][client/]class/image, the depth shows whether there are clients."""
    if not is_folder(folder):
        raise DataError(f"{folder}: no such folder of images (looked for {folder.absolute()})")
    with reading(folder):
        splits = {entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")}
        divided = "train" in splits and splits <= {"train", "test"}
        _refuse_other_splits(folder, splits)
        listed = _image_paths(folder)
    inner = [parts[1:] if divided else parts for parts in listed]
    form = ("train|test/" if divided else "") + "[client/]class/image"
    for parts, rest in zip(listed, inner, strict=True):
        if len(rest) not in (2, 3):
            raise DataError(f"{folder.joinpath(*parts)}: is not at {form} below {folder}")
        if len(rest) != len(inner[0]):
            raise DataError(
                f"{folder.joinpath(*parts)} and {folder.joinpath(*listed[0])}: are at different depths; every image "
                f"must be at {form} below {folder}, with client folders everywhere or nowhere"
            )
    pixels = _stacked([folder.joinpath(*parts) for parts in listed], size, channels, limit, str(folder))
    where: Place = lambda row: str(folder.joinpath(*listed[row]))  # noqa: E731
    y, labels = coded(np.array([rest[-2] for rest in inner]), "class folder", where)
    has_clients = len(inner[0]) == 3
    client, clients = coded(np.array([r[0] for r in inner]), "client folder", where) if has_clients else (None, ())
    test = np.array([parts[0] == "test" for parts in listed]) if divided and "test" in splits else None
    return Rows(pixels, y, labels, test, client, clients)


_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


def _refuse_other_splits(folder: Path, names: set[str]) -> None:
    """Refuse folders such as train and val, which would become clients, and their test rows rows to train on."""
    other = sorted(names - {"train", "test"})
    if other and len(names) > 1 and {name.lower() for name in names} <= _SPLITS:
        what = f"has the folders {', '.join(sorted(names))}, but only train and test divide a folder of images"
        fix = "rename Train and the like; move the others into train: evaluate.validation=0.1 keeps rows of it apart"
        raise DataError(f"{folder}: {what} ({fix})")


def read_pictures(folder: Path, shape: tuple[int, ...]) -> tuple[list[str], Bytes]:
    """The images below a folder, however deep, scaled to this shape, and their names."""
    with reading(folder):
        listed = [parts for parts in sorted(_files_below(folder)) if parts[-1].lower().endswith(SUFFIXES)]
    if not listed:
        raise DataError(f"{folder}: contains no images (looked for {', '.join(SUFFIXES)})")
    channels, height, _ = shape
    pixels = _stacked([folder.joinpath(*parts) for parts in listed], height, channels, math.inf, str(folder))
    return ["/".join(parts) for parts in listed], pixels


def _image_paths(folder: Path) -> list[tuple[str, ...]]:
    """The path of every image below the folder, in order of name; any other file is refused."""
    files = sorted(_files_below(folder))
    files = [parts for parts in files if not any(part.startswith(".") for part in parts) and parts[-1] != "Thumbs.db"]
    images = [parts for parts in files if parts[-1].lower().endswith(SUFFIXES)]
    if not images:
        raise DataError(f"{folder}: contains no images (looked for {', '.join(SUFFIXES)})")
    homes = {parts[:-1] for parts in images}
    for parts in files:
        if parts[:-1] in homes and not parts[-1].lower().endswith(SUFFIXES):
            raise DataError(f"{folder.joinpath(*parts)}: is not an image ({', '.join(SUFFIXES)}); remove it")
    return images


_DEEPEST = 5  # one more than [train|test/][client/]class/image: deeper folders are not searched


def _files_below(folder: Path) -> Iterator[tuple[str, ...]]:
    """The path of every file below a folder; an OSError for a folder that cannot be read."""

    def refused(error: OSError) -> None:
        raise OSError(error.errno, f"{error.filename}: {error.strerror}")

    for home, folders, names in os.walk(folder, onerror=refused):
        above = Path(home).relative_to(folder).parts
        yield from ((*above, name) for name in names if is_file(Path(home, name)))
        if len(above) >= _DEEPEST - 1:
            folders.clear()


def _stacked(paths: Sequence[Path], size: int | None, channels: int, limit: float, at: str) -> Bytes:
    if size is not None:
        within(limit, len(paths) * channels * size * size, at)
    first = _pixels(paths[0], size, channels)
    within(limit, len(paths) * first.size, at)
    stack = np.empty((len(paths), *first.shape), np.uint8)
    for index, path in enumerate(paths):
        pixels = _pixels(path, size, channels)
        if pixels.shape != first.shape:
            got, want = ("x".join(str(n) for n in shape[:0:-1]) for shape in (pixels.shape, first.shape))
            raise DataError(
                f"{path}: is {got} pixels where {paths[0]} is {want}; images must be of one size "
                f"(or give size, as in size = {min(first.shape[1:])})"
            )
        stack[index] = pixels
    return stack


def refuse_deep(image: Image.Image, at: str) -> None:
    """Refuse an image of more than 8 bits: converting it would cut off all levels above 255."""
    if image.mode[0] in "IF":
        raise DataError(f"{at}: has more than 8 bits in a pixel (mode {image.mode}); save it with 8")


def _pixels(path: Path, size: int | None, channels: int) -> Bytes:
    """One image as [C, H, W], upright."""
    try:
        with Image.open(path) as image:
            refuse_deep(image, str(path))
            upright = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image: {error}") from error
    if size is not None:
        upright = upright.resize((size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(upright, np.uint8)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


# ------------------------------------------------------------------------------------------------- reading


def existing(path: Path) -> Path:
    """The path, if it is a file."""
    if not is_file(path):
        looked = "" if path.is_absolute() else f" (looked for {path.absolute()})"
        raise DataError(f"{path}: {'is a folder, not a file' if is_folder(path) else f'no such file{looked}'}")
    return path


def refuse_spreadsheet(path: Path) -> None:
    """Refuse what a spreadsheet saves unless it is told otherwise, with the way out."""
    if path.suffix.lower() in SPREADSHEETS and is_file(path):
        raise DataError(f"{path}: files of Excel and other spreadsheets are not read (save the table as CSV)")


def within(limit: float, size: int, at: str) -> None:
    """Refuse data that unpacks to more than ``limit`` bytes, before memory is allocated for it."""
    if size > limit:
        raise DataError(
            f"{at}: unpacks to {size / 1e9:,.1f} GB or more, but data.limit_gb = {limit / 1e9:g} "
            f"(if that is right, set data.limit_gb={math.ceil(size / 1e9) + 1})"
        )


@contextmanager
def _plain(path: Path) -> Iterator[gzip.GzipFile | BufferedReader]:
    """The file's content, unpacked where it is gzip, whatever its name says."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        if zipped:
            with gzip.open(raw) as file:
                yield file
        else:
            yield raw


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Errors inside while reading are raised as a DataError about ``path``."""
    try:
        yield
    except EOFError as error:
        raise DataError(f"{path}: truncated: the gzip stream in its {path.stat().st_size} bytes has no end") from error
    except (gzip.BadGzipFile, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: damaged: {error} ({path.stat().st_size} bytes)") from error
    except UnicodeDecodeError as error:
        what = "has bytes that are not text, so it is damaged or of another type"
        raise DataError(f"{path}: {what} (save a table as CSV, in UTF-8)") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(str(n) for n in shape)
