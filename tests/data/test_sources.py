"""Sources read real files, keep what is in them, and refuse what is wrong with its place."""

from __future__ import annotations

import builtins
import csv
import gzip
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from fedloom.core.errors import ConfigError, DataError
from fedloom.core.schema import kinds, read
from fedloom.data import files
from fedloom.data.arrays import Arrays
from fedloom.data.columns import Feature, learned_scaling
from fedloom.data.files import (
    CIFAR10_NAMES,
    COARSE_NAMES,
    DIGIT_NAMES,
    FINE_NAMES,
    LAYOUTS,
    Layout,
    cifar10_layout,
    cifar100_layout,
    default_root,
    idx_layout,
    read_idx,
    read_records,
)
from fedloom.data.sources import (
    Cifar10,
    Cifar100,
    Csv,
    Digits,
    FashionMnist,
    Images,
    Mnist,
    Npz,
    Parquet,
    Source,
    drawn_test_rows,
    from_arrays,
    from_torch,
    pixel_scale,
    source_for_path,
)
from fedloom.data.targets import numbers_in

RNG = np.random.default_rng(0)


class SmallMnist(Mnist):
    layout: ClassVar[Layout] = idx_layout("mnist", "mnist", DIGIT_NAMES, train=6, test=3)


class SmallCifar10(Cifar10):
    layout: ClassVar[Layout] = cifar10_layout(batch=4)


class SmallCifar100(Cifar100):
    layout: ClassVar[Layout] = cifar100_layout(train=5, test=3)


def idx(values: NDArray[np.uint8]) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def write_mnist(root: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Six train and three test rows, in the order in which they are loaded."""
    x, y = RNG.integers(0, 256, (9, 28, 28), np.uint8), np.arange(9, dtype=np.uint8)
    folder = root / "mnist"
    folder.mkdir(parents=True)
    for split, rows in (("train", slice(0, 6)), ("t10k", slice(6, 9))):
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x[rows])))
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(y[rows])))
    return x, y


def records(labels: NDArray[np.uint8], x: NDArray[np.uint8]) -> bytes:
    return np.concatenate([labels, x.reshape(len(x), -1)], 1).astype(np.uint8).tobytes()


def refusal(source: Source, root: Path = Path("unused")) -> str:
    with pytest.raises(DataError) as caught:
        source.load(root, 0)
    return str(caught.value)


# ------------------------------------------------------------------------------------------- the kinds


def test_every_kind_is_found_by_name() -> None:
    assert set(kinds(Source, "fedloom.data.sources")) == {
        "digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "npz", "csv", "parquet", "images", "synthetic",
    }  # fmt: skip


def test_settings_are_read_strictly() -> None:
    spec, faults = read(Mnist, {"pool": True, "augment": "flip", "normalise": "half"}, "data.source")
    assert spec == Mnist(pool=True, augment="flip", normalise="half")
    assert not faults
    for cls, table, place in (
        (Mnist, {"test": 0.3}, "test: unknown key"),
        (Digits, {"test": 1.0}, "test"),
        (Digits, {"pool": True, "test": 0.5}, "pool = true leaves no test rows"),
        (Csv, {"path": "a.csv", "augment": "flip"}, "augment: is for images"),
        (Csv, {}, "path: required"),
        (Cifar100, {"labels": "finest"}, "labels"),
        (Images, {"path": "a", "channels": 2}, "channels"),
    ):
        spec_or_none, faults = read(cls, table, "data")
        assert spec_or_none is None
        assert place in str(ConfigError(faults))


def test_a_path_names_its_kind(tmp_path: Path) -> None:
    assert source_for_path("some/file.npz") == ("npz", {"path": "some/file.npz"})
    assert source_for_path("T.CSV") == ("csv", {"path": "T.CSV"})
    assert source_for_path("t.parquet") == ("parquet", {"path": "t.parquet"})
    assert source_for_path(str(tmp_path)) == ("images", {"path": str(tmp_path)})
    (tmp_path / "a.h5").write_bytes(b"")
    for bad, told in (("nowhere", "no such file or folder"), (str(tmp_path / "a.h5"), "not of a supported type")):
        with pytest.raises(DataError, match=told):
            source_for_path(bad)


def test_a_spreadsheet_is_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "t.xlsx").write_bytes(b"PK\3\4")
    with pytest.raises(DataError, match=r"files of Excel .* are not read \(save the table as CSV\)"):
        source_for_path(str(tmp_path / "t.xlsx"))
    with pytest.raises(DataError, match="no such file"):
        source_for_path(str(tmp_path / "none.xlsx"))


def test_the_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "d"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert default_root() == tmp_path / "d"
    monkeypatch.delenv("FEDLOOM_DATA")
    assert default_root() == tmp_path / "c" / "fedloom" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "fedloom" / "data"


# ---------------------------------------------------------------------------------------------- digits


def test_digits_are_always_there(tmp_path: Path) -> None:
    a = Digits().load(tmp_path, 1)
    assert a.x.shape == (1797, 1, 8, 8)
    assert a.x.dtype == np.uint8
    assert a.x.max() == 255
    assert a.labels == DIGIT_NAMES
    assert a.test.sum() == 359
    assert np.bincount(a.y[a.test]).min() >= 34  # stratified: each class gives about a fifth
    pixels = a.x / 255
    assert pixels.mean() == pytest.approx(a.mean[0], abs=1e-4)
    assert pixels.std() == pytest.approx(a.std[0], abs=1e-4)


def test_digits_are_split_by_the_seed_alone(tmp_path: Path) -> None:
    one, same, other = (Digits().load(tmp_path, seed).test for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()
    assert not Digits(pool=True).load(tmp_path, 1).test.any()
    assert not Digits(test=0).load(tmp_path, 1).test.any()


# ------------------------------------------------------------------------------------------ published sets


def test_mnist_is_read_as_published(tmp_path: Path) -> None:
    x, y = write_mnist(tmp_path)
    a = SmallMnist().load(tmp_path, 0)
    assert (a.x == x[:, None]).all()
    assert (a.y == y).all()
    assert a.test.tolist() == [False] * 6 + [True] * 3
    assert (a.mean, a.std, a.name) == ((0.1307,), (0.3081,), "mnist")
    half = SmallMnist(normalise="half", pool=True).load(tmp_path, 0)
    assert (half.mean, half.std) == ((0.5,), (0.5,))
    assert not half.test.any()


def test_cifar10_is_read_as_published(tmp_path: Path) -> None:
    x, y = RNG.integers(0, 256, (24, 3, 32, 32), np.uint8), (np.arange(24) % 10).astype(np.uint8)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for i, file in enumerate(SmallCifar10.layout.files):
        rows = slice(4 * i, 4 * i + 4)
        (folder / file).write_bytes(records(y[rows, None], x[rows]))
    a = SmallCifar10(augment="crop_flip").load(tmp_path, 0)
    assert (a.x == x).all()
    assert (a.y == y).all()
    assert a.test.tolist() == [False] * 20 + [True] * 4
    assert a.labels == CIFAR10_NAMES
    assert a.mean == (0.4914, 0.4822, 0.4465)
    assert SmallCifar10(normalise="half").load(tmp_path, 0).std == (0.5, 0.5, 0.5)


def test_cifar100_has_fine_and_coarse_labels(tmp_path: Path) -> None:
    x, y = RNG.integers(0, 256, (8, 3, 32, 32), np.uint8), np.array([[i, 10 * i + 9] for i in range(8)], np.uint8)
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    (folder / "train.bin").write_bytes(records(y[:5], x[:5]))
    (folder / "test.bin").write_bytes(records(y[5:], x[5:]))
    fine, coarse = SmallCifar100().load(tmp_path, 0), SmallCifar100(labels="coarse").load(tmp_path, 0)
    assert (fine.x == x).all()
    assert (fine.y == y[:, 1]).all()
    assert (coarse.y == y[:, 0]).all()
    assert (fine.classes, coarse.classes) == (100, 20)


def test_the_published_sets_demand_all_their_rows(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    assert "must contain 60000 x 28 x 28" in refusal(Mnist(), tmp_path)
    counts = {name: sum(part.rows for part in layout.parts) for name, layout in LAYOUTS.items()}
    assert counts == {"mnist": 70_000, "fashion_mnist": 70_000, "cifar10": 60_000, "cifar100": 60_000}
    assert (len(set(FINE_NAMES)), len(set(COARSE_NAMES))) == (100, 20)
    assert list(FINE_NAMES) == sorted(FINE_NAMES)


def test_a_missing_set_says_what_where_and_how(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    message = refusal(SmallMnist(), tmp_path)
    assert "no t10k-labels-idx1-ubyte.gz in" in message
    assert str(tmp_path / "mnist") in message
    assert "fedloom data get mnist" in message
    assert "fedloom data import mnist DIR" in message
    assert "fedloom data get fashion_mnist" in refusal(FashionMnist(), tmp_path)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda good: good[: len(good) // 2], "truncated"),
        (lambda good: good[:1000] + bytes(64) + good[1064:], "damaged"),
        (lambda good: b"\x1f\x8bnonsense", "damaged"),
        (lambda good: b"<html>not here</html>", "is not an idx file"),
        (lambda good: b"", "an empty file"),
        (lambda good: gzip.compress(b"\0\0\x08\3\0\0"), "expected 16 header bytes, found 6"),
        (lambda good: gzip.compress(b"\0\0\x0d\3" + gzip.decompress(good)[4:]), "got 00 00 0d 03"),
        (lambda good: gzip.compress(gzip.decompress(good)[:-10]), "6 x 28 x 28 = 4704 bytes of data, found 4694"),
        (lambda good: gzip.compress(gzip.decompress(good) + b"!"), "too long"),
        (lambda good: gzip.compress(idx(np.zeros((6, 20, 28), np.uint8))), "its header says 6 x 20 x 28"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path: Path, damage: Any, told: str) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    message = refusal(SmallMnist(), tmp_path)
    assert told in message
    assert str(path) in message


def test_a_label_outside_the_classes_is_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.array([1, 10, 2], np.uint8))))
    assert f"{path}: labels must be in 0..9 (got 10 in row 1)" in refusal(SmallMnist(), tmp_path)


def test_a_damaged_record_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    good = records(np.zeros((5, 2), np.uint8), np.zeros((5, 3072), np.uint8))
    (folder / "test.bin").write_bytes(good[: 3 * 3074])
    (folder / "train.bin").write_bytes(good[:-7])
    assert f"truncated: expected {5 * 3074} bytes (5 records of 3074), found {5 * 3074 - 7}" in refusal(
        SmallCifar100(), tmp_path
    )
    (folder / "train.bin").write_bytes(good + b"!")
    assert "too long" in refusal(SmallCifar100(), tmp_path)
    (folder / "train.bin").write_bytes(good[:3074] + b"\x14" + good[3075:])
    assert "train.bin: labels must be in 0..19 (got 20 in row 1)" in refusal(SmallCifar100(), tmp_path)


def test_readers_take_the_row_count_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    values = RNG.integers(0, 256, (7, 2, 3), np.uint8)
    path.write_bytes(idx(values))
    assert (read_idx(path) == values).all()
    path.write_bytes(records(np.full((4, 1), 9, np.uint8), np.ones((4, 12), np.uint8)))
    x, y = read_records(path, (3, 2, 2), 1)
    assert (x.shape, y.tolist()) == ((4, 3, 2, 2), [[9]] * 4)
    path.write_bytes(b"12345")
    with pytest.raises(DataError, match="expected 13 bytes"):
        read_records(path, (3, 2, 2), 1)


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), packed=st.booleans())
def test_idx_round_trips(tmp_path_factory: pytest.TempPathFactory, shape: list[int], packed: bool) -> None:
    path = tmp_path_factory.mktemp("idx") / "file"
    values = RNG.integers(0, 256, shape, np.uint8)
    path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    found = read_idx(path, tuple(shape))
    assert found.shape == values.shape
    assert (found == values).all()


# ------------------------------------------------------------------------------------------------- npz


def npz(tmp_path: Path, **arrays: Any) -> Npz:
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return Npz(path=str(path))


def test_npz_round_trips(tmp_path: Path) -> None:
    x, y = RNG.normal(size=(10, 4)), np.arange(10) % 3
    test = np.arange(10) < 2
    a = npz(tmp_path, x=x, y=y, test=test, client=np.array(["b", "a"] * 5)).load(tmp_path, 0)
    assert a.x.dtype == np.float32
    assert (a.x == x.astype(np.float32)).all()
    assert (a.y == y).all()
    assert (a.test == test).all()
    assert a.client is not None
    assert a.client.tolist() == [1, 0] * 5
    assert a.labels == ("0", "1", "2")
    assert (a.mean, a.std) == ((0.0,), (1.0,))


def test_npz_with_its_own_split(tmp_path: Path) -> None:
    arrays = {"x_train": np.ones((4, 2)), "y_train": [0, 1, 0, 1], "x_test": np.zeros((2, 2)), "y_test": [0, 1]}
    a = npz(tmp_path, **arrays, client_train=[7, 7, 30, 30], client_test=[7, 30], labels=["no", "yes"]).load(
        tmp_path, 0
    )
    assert a.test.tolist() == [False] * 4 + [True] * 2
    assert a.client is not None
    assert a.client.tolist() == [0, 0, 1, 1, 0, 1]
    assert a.labels == ("no", "yes")
    assert not npz(tmp_path, **arrays).model_copy(update={"pool": True}).load(tmp_path, 0).test.any()
    only = {key: value for key, value in arrays.items() if key.endswith("train")}
    assert npz(tmp_path, **only).model_copy(update={"test": 0.5}).load(tmp_path, 0).test.sum() == 2


@pytest.mark.parametrize(
    ("shape", "dtype", "found", "kept"),
    [
        ((5, 6, 7), np.uint8, (1, 6, 7), np.uint8),
        ((5, 6, 7, 3), np.uint8, (3, 6, 7), np.uint8),
        ((5, 3, 6, 7), np.uint8, (3, 6, 7), np.uint8),
        ((5, 1, 6, 3), np.uint8, (1, 6, 3), np.uint8),
        ((5, 4, 6, 7), np.uint8, (4, 6, 7), np.uint8),
        ((5, 6, 7, 1), np.float64, (1, 6, 7), np.float32),
        ((5, 6, 7), np.float16, (6, 7), np.float32),
        ((5, 6), np.uint8, (6,), np.float32),
        ((5, 6), np.int64, (6,), np.float32),
        ((5, 6), np.bool_, (6,), np.float32),
    ],
)
def test_npz_shapes_and_types(
    tmp_path: Path, shape: tuple[int, ...], dtype: Any, found: tuple[int, ...], kept: Any
) -> None:
    a = npz(tmp_path, x=np.ones(shape, dtype), y=[0, 1, 0, 1, 0]).load(tmp_path, 0)
    assert a.shape == found
    assert a.x.dtype == kept
    assert a.x.flags.c_contiguous


def test_channels_last_images_are_turned(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (5, 6, 7, 3), np.uint8)
    a = npz(tmp_path, x=x, y=[0, 1, 0, 1, 0]).load(tmp_path, 0)
    assert (a.x[2, 1] == x[2, :, :, 1]).all()
    pixels = a.x[~a.test] / 255
    assert np.allclose(a.mean, pixels.mean((0, 2, 3)))
    assert np.allclose(a.std, pixels.std((0, 2, 3)))


BAD_NPZ: list[tuple[dict[str, Any], str]] = [
    ({"x": np.ones((3, 2))}, "has no array 'y'"),
    ({"x": np.ones((3, 2)), "y": [0, 1, 0], "clients": [0, 1, 2]}, "unknown array 'clients' (did you mean 'client'?)"),
    ({"x": np.ones((3, 2)), "y": [0, 1, 0], "x_test": np.ones((3, 2))}, "has both 'x' and 'x_test'"),
    ({"x_train": np.ones((3, 2)), "y_train": [0, 1, 0], "x_test": np.ones((3, 2))}, "has no array 'y_test'"),
    ({"x_train": np.ones((3, 2)), "y_train": [0, 1]}, "equally many rows (got x_train 3, y_train 2)"),
    ({"x_train": np.ones((1, 2)), "y_train": [0], "x_test": np.ones((1, 3)), "y_test": [0]}, "do not fit together"),
    ({"x": np.ones((3, 2)), "y": [0, 1]}, "y must have one entry for each of the 3 rows of x (got shape (2,))"),
    ({"x": np.ones((3, 2)), "y": np.eye(3)}, "take y.argmax(1)"),
    ({"x": np.ones((3, 2)), "y": [0, 0.5, 1]}, "row 1: the label must be a whole number or a word (got 0.5) (to"),
    ({"x": np.ones((3, 2)), "y": [0, np.nan, 1]}, "row 1: the label must be a whole number or a word (got nan)"),
    ({"x": np.ones((3, 2)), "y": [0, 1, 2], "labels": ["a", "b"]}, "row 2: the label must be in 0..1 (got 2)"),
    ({"x": np.array([[0.0], [np.nan]]), "y": [0, 1]}, "not finite (first in row 1)"),
    ({"x": np.array([[0.0], [1e300]]), "y": [0, 1]}, "not finite (first in row 1)"),
    ({"x": np.array([["a"], ["b"]]), "y": [0, 1]}, "x must be numeric"),
    ({"x": np.ones(3), "y": [0, 1, 0]}, "at least two dimensions"),
    ({"x": np.ones((0, 3)), "y": np.ones(0, int)}, "has no rows"),
    ({"x": np.ones((3, 2)), "y": [0, 1, 0], "test": [0, 2, 0]}, "row 1: test must be true or false"),
    ({"x": np.ones((3, 2)), "y": [0, 1, 0], "test": [True] * 3}, "every row is a test row"),
    ({"x": np.ones((3, 2)), "y": np.array([0, None, {}], object)}, "array 'y' cannot be read"),
]


@pytest.mark.parametrize(("arrays", "told"), BAD_NPZ, ids=[told for _, told in BAD_NPZ])
def test_bad_npz_is_refused(tmp_path: Path, arrays: dict[str, Any], told: str) -> None:
    message = refusal(npz(tmp_path, **arrays))
    assert told in message
    assert "data.npz" in message


def test_damaged_npz_is_refused(tmp_path: Path) -> None:
    source = npz(tmp_path, x=np.ones((300, 2)), y=np.zeros(300, int))
    path = Path(source.path)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    assert "is not a complete npz file" in refusal(source)
    path.write_bytes(good[:300] + b"!!!!" + good[304:])
    assert "damaged" in refusal(source)
    path.unlink()
    assert "no such file" in refusal(source)
    np.save(tmp_path / "one.npy", np.ones(3))
    assert "is not a complete npz file" in refusal(Npz(path=str(tmp_path / "one.npy")))


def test_what_is_for_images_is_refused_elsewhere(tmp_path: Path) -> None:
    source = npz(tmp_path, x=np.ones((4, 2)), y=[0, 1, 0, 1])
    assert "augment = 'flip' is for images" in refusal(source.model_copy(update={"augment": "flip"}))
    assert "normalise = 'half' is for images" in refusal(source.model_copy(update={"normalise": "half"}))


def test_a_share_beside_marked_test_rows_is_refused(tmp_path: Path) -> None:
    source = npz(tmp_path, x=np.ones((4, 2)), y=[0, 1, 0, 1], test=[0, 0, 1, 1])
    assert "marks its own test rows" in refusal(source.model_copy(update={"test": 0.5}))


# --------------------------------------------------------------------------------------------- csv, parquet

TABLE: dict[str, list[Any]] = {
    "age": [20.0, 30.0, 40.0, 50.0, 1000.0],
    "flat": [0.1, 0.1, 0.1, 0.1, 7.0],
    "label": ["no", "yes", "no", "yes", "no"],
    "who": [10, 9, 10, 9, 2],
    "split": ["train", "train", "Train", "train", "TEST"],
}


def write_table(path: Path, table: dict[str, list[Any]]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.table(table), path)
    else:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([list(table), *zip(*table.values(), strict=True)])
    return str(path)


@pytest.mark.parametrize("kind", [Csv, Parquet])
def test_tables_round_trip(tmp_path: Path, kind: type[Csv | Parquet]) -> None:
    path = write_table(tmp_path / f"t.{kind.kind}", TABLE)
    plain = kind(path=path, client="who", split="split", standardise=False).load(tmp_path, 0)
    assert plain.x.tolist() == np.array([TABLE["age"], TABLE["flat"]], np.float32).T.tolist()
    assert plain.labels == ("no", "yes")
    assert plain.y.tolist() == [0, 1, 0, 1, 0]
    assert plain.client is not None
    assert plain.client.tolist() == [2, 1, 2, 1, 0]  # 2 < 9 < 10: numbers are sorted as numbers
    assert plain.test.tolist() == [False] * 4 + [True]
    scaled = kind(path=path, client="who", split="split").load(tmp_path, 0).x
    assert np.allclose(scaled[:4, 0].mean(), 0, atol=1e-6)
    assert np.allclose(scaled[:4, 0].std(), 1)
    assert scaled[4, 0] == pytest.approx((1000 - 35) / np.std([20, 30, 40, 50]))
    assert (scaled[:, 1] == 0).all()  # constant over the training rows
    unsplit = {key: value for key, value in TABLE.items() if key in ("age", "label")}
    drawn = kind(path=write_table(tmp_path / f"u.{kind.kind}", unsplit), test=0.4).load(tmp_path, 0)
    assert drawn.test.sum() == 2


def test_whole_number_labels_keep_their_order(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"a": [1, 2, 3, 4], "label": ["10", "9", "10.0", "-1"]})
    a = Csv(path=path).load(tmp_path, 0)
    assert a.labels == ("-1", "9", "10")
    assert a.y.tolist() == [2, 1, 2, 0]


def test_the_first_label_that_is_no_class_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"a": [1, 2, 3, 4], "label": ["3", "247.5", "152.3", "247.5"]})
    assert "line 3: the label (column 'label') must be a whole number or a word (got '247.5')" in refusal(
        Csv(path=path)
    )


def test_a_table_without_a_label_says_which_setting_names_it(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", {"a": [1, 2], "ill": ["x", "y"]})
    fix = "; data.label=COLUMN names the column to predict"
    assert refusal(Csv(path=path)).endswith(f"has no column 'label' (known: a, ill){fix}")
    assert "COLUMN" not in refusal(Csv(path=path, label="label"))  # such as that of a contract, which nobody can change
    (tmp_path / "nameless.csv").write_text(",a\n1,2\n")
    assert "COLUMN" not in refusal(Csv(path=str(tmp_path / "nameless.csv")))


def test_codes_with_an_underscore_are_words(tmp_path: Path) -> None:
    """Python takes 1_0 for 10."""
    table = {"a": ["0_7", "2_3", "0_7", "2_3"], "label": ["1_0", "10", "1_0", "10"]}
    found = Csv(path=write_table(tmp_path / "t.csv", table)).load(tmp_path, 0)
    assert found.recipe.names == ("a=0_7", "a=2_3")
    assert found.labels == ("10", "1_0")


def test_csv_as_spreadsheets_write_it(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes('﻿"a", label\r\n1.5,x\r\n\r\n 2 ,"y"\r\n'.encode())
    a = Csv(path=str(tmp_path / "t.csv"), standardise=False, test=0).load(tmp_path, 0)
    assert a.x.tolist() == [[1.5], [2.0]]
    assert a.labels == ("x", "y")


BAD_CSV = [
    ("", "is empty"),
    ("a,label\n", "no rows"),
    ("a,label\n1,x\nsix,y\n", "column 'a': {path}, line 3: is not a number (got 'six')"),
    ("a,label\n2024-02-28,x\n2024-02-30,y\n", "column 'a': {path}, line 3: is not a date (got '2024-02-30')"),
    ("a,label\n1,x\n\n1e40,y\n", "line 4: is not a finite number (got 1e+40)"),
    ("a,label\n1,x\n1,y,z\n", "line 3: has 3 cells where the header has 2"),
    ("a,label\n1,0.5\n2,1\n", "line 2: the label (column 'label') must be a whole number or a word (got '0.5') (to"),
    ("a,label\n1,\n2,x\n", "line 2: the label (column 'label') is empty (fill it in, or remove such rows)"),
    ("a,label\n1,x\n2,\n3,\n", "line 3: the label (column 'label') is empty, and in 1 more (fill"),
    ("a,labels\n1,x\n", "has no column 'label' (did you mean 'labels'?)"),
    ("a,LABEL\n1,x\n", "has no column 'label' (did you mean 'LABEL'?)"),
    ("a,a,label\n1,2,x\n", "column 'a' occurs twice"),
    ("label\nx\n", "has no column of features"),
    (",a,label\n0,1,x\n", "column 1 has no name"),
    ("sep=;\na;label\n1;x\n", "its first line, sep=, is for Excel and must be deleted"),
    ('a,label\n1,"x\n', "line 2: is not well-formed CSV"),
]


@pytest.mark.parametrize(("text", "told"), BAD_CSV, ids=[told for _, told in BAD_CSV])
def test_bad_csv_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    message = refusal(Csv(path=str(tmp_path / "t.csv")))
    assert told.replace("{path}", str(tmp_path / "t.csv")) in message
    assert str(tmp_path / "t.csv") in message


def test_an_empty_target_is_refused_with_the_number_of_its_rows() -> None:
    with pytest.raises(DataError, match=r"row 1: the target is empty, and in 2 more \(fill it in, or remove such rows"):
        numbers_in(np.array(["1.5", "", "", "2", ""]), "target", lambda row: f"row {row}")


def test_a_csv_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,label\n1,\x81\x8d\n")  # neither UTF-8 nor Windows-1252
    told = refusal(Csv(path=str(tmp_path / "t.csv")))
    assert told.endswith("or of another type (save a table as CSV, in UTF-8)")
    assert "codec" not in told
    assert "no such file" in refusal(Csv(path=str(tmp_path / "none.csv")))
    assert "is a folder" in refusal(Csv(path=str(tmp_path)))


@pytest.mark.parametrize("kind", [Csv, Parquet])
def test_an_odd_split_word_is_refused(tmp_path: Path, kind: type[Csv | Parquet]) -> None:
    table: dict[str, list[Any]] = {"a": [1, 2, 3], "label": [0, 1, 0], "part": ["train", "val", "test"]}
    message = refusal(kind(path=write_table(tmp_path / f"t.{kind.kind}", table), split="part"))
    assert "column 'part': must be train or test (got 'val')" in message


BAD_PARQUET: list[tuple[dict[str, list[Any]], str]] = [
    ({"a": [1.0, 2.0], "label": [0, None]}, "row 1, column 'label': is missing"),
    ({"a": [[1], [2]], "label": [0, 1]}, "column 'a': must contain numbers, words or dates (got list"),
    ({"a": [1.0, float("inf")], "label": [0, 1]}, "row 1: is not a finite number"),
    ({"a": [1.0, 2.0], "label": [0.5, 1.0]}, "row 0: the label (column 'label') must be a whole number or a word"),
    ({"a": [], "label": []}, "has no rows"),
    ({"a": [1.0], "lable": [1]}, "did you mean 'lable'?"),
]


@pytest.mark.parametrize(("table", "told"), BAD_PARQUET, ids=[told for _, told in BAD_PARQUET])
def test_bad_parquet_is_refused(tmp_path: Path, table: dict[str, list[Any]], told: str) -> None:
    assert told in refusal(Parquet(path=write_table(tmp_path / "t.parquet", table)))


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = Path(write_table(tmp_path / "t.parquet", TABLE))
    path.write_bytes(path.read_bytes()[:100])
    assert "cannot be read as Parquet" in refusal(Parquet(path=str(path)))


def test_the_row_index_of_pandas_is_no_feature(tmp_path: Path) -> None:
    table: dict[str, list[Any]] = {"a": [1.0, 2.0], "label": ["x", "y"], "__index_level_0__": [5, 6]}
    a = Parquet(path=write_table(tmp_path / "t.parquet", table), test=0).load(tmp_path, 0)
    assert a.shape == (1,)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def lacking(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return whole(name, *rest, **more)

    path = write_table(tmp_path / "t.parquet", TABLE)
    monkeypatch.setattr(builtins, "__import__", lacking)
    assert "pip install 'fedloom[parquet]'" in refusal(Parquet(path=path))


# -------------------------------------------------------------------------------------------------- images


def picture(path: Path, size: tuple[int, int] = (5, 4), level: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (level, 0, 255)).save(path)


def test_class_folders(tmp_path: Path) -> None:
    for i in range(4):
        picture(tmp_path / "cat" / f"{i}.png", level=i)
        picture(tmp_path / "dog" / f"{i}.PNG", level=10 + i)
    (tmp_path / ".DS_Store").write_bytes(b"")
    (tmp_path / "README.txt").write_text("made by hand")
    a = Images(path=str(tmp_path), test=0.25, augment="flip").load(tmp_path, 0)
    assert a.x.shape == (8, 3, 4, 5)
    assert a.x[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert (a.x[:, 2] == 255).all()
    assert a.labels == ("cat", "dog")
    assert a.y.tolist() == [0] * 4 + [1] * 4
    assert a.test.sum() == 2
    assert a.client is None
    assert a.std[1:] == (1.0, 1.0)  # channels without variation are not divided by nothing
    grey = Images(path=str(tmp_path), channels=1, size=2).load(tmp_path, 0)
    assert grey.x.shape == (8, 1, 2, 2)


def test_client_folders_and_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for client in ("10", "9"):
            for name in ("a", "b"):
                picture(tmp_path / split / client / name / "0.png", level=int(client))
    a = Images(path=str(tmp_path)).load(tmp_path, 0)
    assert a.client is not None
    assert [a.x[row, 0, 0, 0] for row in range(8)] == [9 + int(client) for client in a.client]
    assert a.test.sum() == 4
    assert a.labels == ("a", "b")
    only = Images(path=str(tmp_path / "train"), test=0.5).load(tmp_path, 0)
    assert only.client is not None
    assert set(only.client.tolist()) == {0, 1}


@pytest.mark.parametrize("names", [("train", "val"), ("train", "test", "valid"), ("Train", "Test")])
def test_other_splits_of_images_do_not_become_clients(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        for label in ("a", "b"):
            picture(tmp_path / name / label / "0.png")
    said = refusal(Images(path=str(tmp_path)))
    assert f"has the folders {', '.join(sorted(names))}, but only train and test divide a folder of images" in said
    picture(tmp_path / "bus" / "a" / "0.png")  # then they are names like any others
    assert len(Images(path=str(tmp_path)).load(tmp_path, 0).clients) == len(names) + 1


def test_unequal_features_of_a_file_are_pointed_out(tmp_path: Path) -> None:
    x = np.arange(20.0).reshape(10, 2) * [1, 200]
    notes = npz(tmp_path, x=x, y=[0, 1] * 5, test=[False] * 10).load(tmp_path, 0).notes
    deviation = np.std(np.arange(0.0, 20.0, 2.0))
    what = f"features have very different scales (std from {deviation:.3g} to {200 * deviation:.3g})"
    assert notes == (f"{what}: scale them in the file",)


def test_bad_image_folders_are_refused(tmp_path: Path) -> None:
    source = Images(path=str(tmp_path))
    assert "contains no images" in refusal(source)
    assert "no such folder" in refusal(Images(path=str(tmp_path / "none")))
    picture(tmp_path / "a" / "0.png")
    picture(tmp_path / "b" / "1.png", size=(6, 4))
    message = refusal(source)
    assert f"{tmp_path / 'b' / '1.png'}: is 6x4 pixels where {tmp_path / 'a' / '0.png'} is 5x4" in message
    assert "size = 4" in message
    (tmp_path / "b" / "1.png").write_bytes((tmp_path / "a" / "0.png").read_bytes()[:40])
    assert f"{tmp_path / 'b' / '1.png'}: cannot be read as an image" in refusal(source)
    (tmp_path / "b" / "1.png").unlink()
    picture(tmp_path / "b" / "deeper" / "1.png")
    assert "different depths" in refusal(source)
    picture(tmp_path / "0.png")
    assert "is not at [client/]class/image" in refusal(source)
    (tmp_path / "0.png").unlink()
    (tmp_path / "a" / "notes.txt").write_text("")
    assert f"{tmp_path / 'a' / 'notes.txt'}: is not an image" in refusal(source)


def test_images_of_sixteen_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.fromarray(np.full((4, 4), 1000, np.uint16)).save(tmp_path / "a" / "0.png")
    assert "more than 8 bits" in refusal(Images(path=str(tmp_path), channels=1))


# --------------------------------------------------------------------------------------------- from Python


def test_arrays_and_tensors_are_alike() -> None:
    x, y, client = RNG.normal(size=(20, 3)).astype(np.float32), np.arange(20) % 4, np.arange(20) // 5
    one = from_arrays(x, y, client=client, seed=3)
    two = from_arrays(torch.tensor(x), torch.tensor(y), client=torch.tensor(client), seed=3)
    for a, b in ((one.x, two.x), (one.y, two.y), (one.test, two.test), (one.client, two.client)):
        assert a is not None
        assert (a == b).all()
    assert one.test.sum() == 4
    assert from_arrays(x, y, test=torch.arange(20) < 7).test.sum() == 7
    assert from_arrays(torch.tensor(x).bfloat16(), y).x.dtype == np.float32
    assert from_arrays(x, y, labels=list("abcde")).classes == 5
    assert from_arrays(x.tolist(), ["u", "v"] * 10, name="mine").labels == ("u", "v")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"y": [0, 1, 4], "labels": ["a", "b"]}, "data 'arrays', row 2: the label must be in 0..1 (got 4)"),
        ({"client": [0, 1]}, "client must have one entry"),
        ({"client": [0.5, 1, 2]}, "row 0: the client must be a whole number or a word (got 0.5)"),
        ({"test_fraction": 1.0}, "test_fraction must be in [0, 1)"),
    ],
)
def test_bad_arrays_are_refused(more: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError) as caught:
        from_arrays(**{"x": np.ones((3, 2)), "y": [0, 1, 0], **more})
    assert told in str(caught.value)


class Pairs(Dataset[Any]):
    """A torch data set that never raises IndexError."""

    def __init__(self, make: Any, size: int = 6) -> None:
        self.make, self.size, self.reads = make, size, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Any:
        self.reads += 1
        return self.make(i)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ((np.full(2, i, np.float32), i % 2) for i in range(6))


def test_torch_data_sets() -> None:
    tensors = Pairs(lambda i: (torch.full((3, 4, 5), float(i)), torch.tensor(i % 2)))
    a = from_torch(tensors, name="mine")
    assert (a.x.shape, a.name) == ((6, 3, 4, 5), "mine")
    assert a.x.dtype == np.float32
    assert tensors.reads == 6
    grey = from_torch(Pairs(lambda i: (Image.new("L", (5, 4), i), i % 2)))
    assert grey.x.shape == (6, 1, 4, 5)
    assert grey.x.dtype == np.uint8
    assert grey.x[:, 0, 0, 0].tolist() == list(range(6))
    colour = Pairs(lambda i: (Image.new("P", (3, 3), i), i % 2))
    colour.classes = ["cat", "dog", "owl"]  # type: ignore[attr-defined]
    b = from_torch(colour, test_fraction=0)
    assert (b.shape, b.labels, b.test.any()) == ((3, 3, 3), ("cat", "dog", "owl"), np.False_)
    assert from_torch(Stream()).x.tolist() == [[i, i] for i in range(6)]


@pytest.mark.parametrize(
    ("dataset", "told"),
    [
        (Pairs(lambda i: (np.ones(2 + (i == 3)), 0)), "row 3: has shape (3,) where row 0 has (2,)"),
        (Pairs(lambda i: np.ones(3)), "row 0: must be a pair (x, y) (got ndarray)"),
        (Pairs(lambda i: None, size=0), "has no rows"),
        (Pairs(lambda i: (np.ones(2), i / 2)), "row 1: the label must be a whole number"),
    ],
)
def test_bad_torch_data_sets_are_refused(dataset: Dataset[Any], told: str) -> None:
    with pytest.raises(DataError) as caught:
        from_torch(dataset)
    assert told in str(caught.value)


# ------------------------------------------------------------------------------------------- pure functions


@settings(max_examples=100, deadline=None)
@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=80),
    share=st.floats(0, 0.95),
    seed=st.integers(0, 2**32),
)
def test_drawn_test_rows_are_stratified(labels: list[int], share: float, seed: int) -> None:
    y = np.array(labels)
    test = drawn_test_rows(y, share, seed)
    counts, taken = np.bincount(y), np.bincount(y[test], minlength=y.max() + 1)
    assert (np.abs(taken - share * counts) <= 1).all()
    assert (counts - taken >= (counts > 0)).all()  # every class keeps a row to train on
    assert test.sum() <= round(share * len(y)) + 1
    assert (test == drawn_test_rows(y, share, seed)).all()


def test_many_small_classes_still_give_their_share() -> None:
    assert drawn_test_rows(np.repeat(np.arange(50), 2), 0.2, 0).sum() == 20


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(2, 20), columns=st.integers(1, 4), seed=st.integers(0, 1000))
def test_standardised_training_rows(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(rows, columns)) * 1e3 + 50).astype(np.float32)
    test = rng.random(rows) < 0.3
    test[:2] = False
    features = [Feature(name=str(k), kind="number") for k in range(columns)]
    train = learned_scaling(x, features, ~test, "all", True).applied(x)[~test]
    assert np.allclose(train.mean(0), 0, atol=1e-4)
    assert np.allclose(train.std(0), 1, atol=1e-3)


def test_pixel_scale_is_over_all_blocks() -> None:
    x = RNG.integers(0, 256, (10_000, 2, 2, 2), np.uint8)
    test = np.arange(10_000) % 5 == 0
    mean, std = pixel_scale(x, test)
    assert np.allclose(mean, (x[~test] / 255).mean((0, 2, 3)))
    assert np.allclose(std, (x[~test] / 255).std((0, 2, 3)))


def test_a_lost_digits_file_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    assert "pip install scikit-learn" in refusal(Digits())


def test_load_gives_arrays(tmp_path: Path) -> None:
    assert isinstance(Digits().load(tmp_path, 0), Arrays)
