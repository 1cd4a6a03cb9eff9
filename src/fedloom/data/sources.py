"""Where rows come from: the built-in digits, a generator, four published sets, and the user's files and arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch.utils.data import Dataset, IterableDataset
from typing_extensions import override

from fedloom.core import rng
from fedloom.core.errors import DataError
from fedloom.core.schema import Kind, other_than, when
from fedloom.data import synthetic
from fedloom.data.arrays import Arrays, Ints, checked
from fedloom.data.columns import (
    Recipe,
    StatisticsBy,
    constants,
    encoded,
    filled_and_scaled,
    identifiers,
    learned_features,
    learned_scaling,
    own_scalings,
    refuse_bad,
    stand_in,
    way_of_dates,
)
from fedloom.data.files import (
    LAYOUTS,
    Decode,
    Layout,
    Rows,
    coded,
    is_file,
    is_folder,
    place_of,
    places_below,
    read_digits,
    read_images,
    read_npz,
    read_published,
    refuse_deep,
    refuse_spreadsheet,
    rows_of_arrays,
    words_of,
)
from fedloom.data.published import refuse_changed
from fedloom.data.table import (
    Column,
    ColumnChoice,
    RawTable,
    csv_header,
    parquet_header,
    read_csv,
    read_parquet,
    with_points,
)
from fedloom.data.targets import decoded

TEST_SHARE = 0.2
Scale = tuple[tuple[float, ...], tuple[float, ...]]  # the mean and the std of each channel


class Source(Kind):
    """Where the rows come from; ``load`` gives them as checked arrays."""

    pool: Annotated[bool, Field(description="put train and test rows together, so that no row is a test row")] = False
    augment: Annotated[
        Literal["none", "flip", "crop_flip"], Field(description="random augmentation of training images")
    ] = "none"
    normalise: Annotated[
        Literal["default", "half"],
        Field(description="default: the set's own mean and deviation; half: from [0, 1] to [-1, 1]"),
    ] = "default"

    _decode: Decode | None = PrivateAttr(None)

    def with_numbers(self) -> Self:
        """The same source, with numeric labels for regression."""
        other = self.model_copy()
        other._decode = decoded
        return other

    @property
    def name(self) -> str:
        """The name of the data in messages."""
        return self.kind

    def read(self, root: Path) -> Rows:
        """The rows in the files."""
        raise NotImplementedError(f"{type(self).__name__} must say how it reads its rows")

    def test_rows(self, rows: Rows, seed: int) -> NDArray[np.bool_]:
        """Which rows are test rows: those that the data marks, else a random share."""
        return drawn_test_rows(rows.y, TEST_SHARE, seed) if rows.test is None else rows.test

    def scale(self, x: NDArray[Any], test: NDArray[np.bool_]) -> Scale:
        """The default mean and std of each channel."""
        return pixel_scale(x, test)

    def load(self, root: Path, seed: int) -> Arrays:
        """The data, from files below ``root`` (or where ``path`` says), with test rows drawn by ``seed``."""
        rows = self.read(root)
        images = rows.x.ndim == 4
        for field, value, neutral in (("augment", self.augment, "none"), ("normalise", self.normalise, "default")):
            if value != neutral and not images:
                raise DataError(
                    f"data '{self.name}': {field} = '{value}' is for images [n, C, H, W] "
                    f"(got rows of shape {rows.x.shape[1:]}); leave it at '{neutral}'"
                )
        test = np.zeros(len(rows.y), np.bool_) if self.pool else self.test_rows(rows, seed)
        if self.normalise == "half":
            mean, std = ((0.5,) * rows.x.shape[1],) * 2
        else:
            mean, std = self.scale(rows.x, test)
        found = Arrays(self.name, rows.x, rows.y, test, rows.labels, mean, std, rows.client, rows.clients)
        return checked(found._replace(target=rows.target, notes=unequal_scales(rows.x, test, "scale them in the file")))


class Undivided(Source):
    """A source whose publisher does not say which rows are for the test."""

    test: Annotated[
        float, Field(ge=0, lt=1, description="share of each class kept for the test, if the data does not say which")
    ] = TEST_SHARE

    @model_validator(mode="after")
    def _one_or_the_other(self) -> Self:
        if self.pool and self.test not in (0, TEST_SHARE):
            raise ValueError(f"pool = true leaves no test rows, so test = {self.test:g} has no effect; drop one")
        return self

    @override
    def test_rows(self, rows: Rows, seed: int) -> NDArray[np.bool_]:
        if rows.test is None:
            return drawn_test_rows(rows.y, self.test, seed)
        if self.test != TEST_SHARE:
            raise DataError(
                f"data '{self.name}': marks its own test rows, so test = {self.test:g} has no effect "
                "(drop it, or the marks)"
            )
        return rows.test


class Digits(Undivided):
    """1,797 handwritten digits of 8x8 grey pixels, which come with scikit-learn: always available."""

    kind: ClassVar[str] = "digits"

    @override
    def read(self, root: Path) -> Rows:
        return read_digits()

    @override
    def scale(self, x: NDArray[Any], test: NDArray[np.bool_]) -> Scale:
        return (0.3045,), (0.3760,)


class Synthetic(Source):
    """Devices with a random linear model each: synthetic(a, b) of FedProx; each device has training and test rows.

    To keep rows with their devices, use it with ``partition = { kind = "natural", holdout = 0 }``. With
    ``u_mode = "scalar"``, the published recipe, no label depends on ``a``; the other two give it an effect. With
    ``iid`` all devices share one model and one distribution of inputs, and neither ``a`` nor ``b`` has an effect.
    """

    kind: ClassVar[str] = "synthetic"

    a: Annotated[
        float,
        Field(ge=0, description="how much the devices' models differ; see u_mode"),
        when(u_mode=other_than("scalar"), iid=False),
    ] = 0.5
    b: Annotated[
        float, Field(ge=0, description="how much the centres of the devices' inputs differ"), when(iid=False)
    ] = 0.5
    devices: Annotated[int, Field(ge=1, description="number of devices")] = 30
    features: Annotated[int, Field(ge=1, description="number of features")] = 60
    classes: Annotated[int, Field(ge=2, description="number of classes")] = 10
    sizes: Annotated[
        synthetic.Sizes, Field(description="rows of a device: lognormal(4, 2) + 50, or Pareto from 50 to 5000")
    ] = "lognormal"
    u_mode: Annotated[
        synthetic.Shift,
        Field(description="scalar: as published; per_class, shared_plus: a has an effect"),
        when(iid=False),
    ] = "scalar"
    ab_as: Annotated[
        Literal["std", "variance"],
        Field(description="whether a and b are deviations or variances of the normal laws"),
        when(iid=False),
    ] = "std"
    iid: Annotated[bool, Field(description="one model and one distribution for all devices")] = False
    split: Annotated[float, Field(gt=0, le=1, description="share of a device's rows that it trains on")] = 0.8

    @field_validator("augment", "normalise")
    @classmethod
    def _no_images(cls, value: str) -> str:
        if value not in ("none", "default"):
            raise ValueError("is for images, but this data has none")
        return value

    @override
    def load(self, root: Path, seed: int) -> Arrays:
        a, b = (value if self.ab_as == "std" else value**0.5 for value in (self.a, self.b))
        shape = synthetic.Shape(self.devices, self.features, self.classes)
        drawn = synthetic.draw_examples(
            shape, a=a, b=b, sizes=self.sizes, u_mode=self.u_mode, iid=self.iid, split=self.split, seed=seed
        )
        test = self.test_rows(drawn, seed) & (not self.pool)
        return checked(Arrays(self.name, drawn.x, drawn.y, test, drawn.labels, client=drawn.client))


class PublishedSet(Source):
    """A set with a publisher's files and a publisher's test rows."""

    layout: ClassVar[Layout]
    constants: ClassVar[Scale]

    @override
    def read(self, root: Path) -> Rows:
        return self.checked_rows(root)

    def checked_rows(self, root: Path, column: int = 0) -> Rows:
        """All rows, after a check that the files are well-formed and the publisher's."""
        places = places_below(self.layout, root)
        rows = read_published(self.layout, places, column=column)
        refuse_changed(self.layout, places)
        return rows

    @override
    def scale(self, x: NDArray[Any], test: NDArray[np.bool_]) -> Scale:
        return self.constants


class Mnist(PublishedSet):
    """70,000 handwritten digits of 28x28 grey pixels."""

    kind: ClassVar[str] = "mnist"
    layout: ClassVar[Layout] = LAYOUTS["mnist"]
    constants: ClassVar[Scale] = (0.1307,), (0.3081,)


class FashionMnist(PublishedSet):
    """70,000 pictures of clothes, of 28x28 grey pixels."""

    kind: ClassVar[str] = "fashion_mnist"
    layout: ClassVar[Layout] = LAYOUTS["fashion_mnist"]
    constants: ClassVar[Scale] = (0.2860,), (0.3530,)


class Cifar10(PublishedSet):
    """60,000 colour photographs of 32x32 pixels in 10 classes."""

    kind: ClassVar[str] = "cifar10"
    layout: ClassVar[Layout] = LAYOUTS["cifar10"]
    constants: ClassVar[Scale] = (0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.262)


class Cifar100(PublishedSet):
    """60,000 colour photographs of 32x32 pixels in 100 classes, which form 20 groups."""

    kind: ClassVar[str] = "cifar100"
    layout: ClassVar[Layout] = LAYOUTS["cifar100"]
    constants: ClassVar[Scale] = Cifar10.constants

    labels: Annotated[Literal["fine", "coarse"], Field(description="the 100 classes, or the 20 groups")] = "fine"

    @override
    def read(self, root: Path) -> Rows:
        return self.checked_rows(root, column=("coarse", "fine").index(self.labels))


class File(Undivided):
    """The user's own data at ``path``."""

    path: Annotated[str, Field(min_length=1, description="the file or folder")]
    limit_gb: Annotated[float, Field(gt=0, description="most gigabytes of data to unpack; more is refused")] = 16.0

    @property
    @override
    def name(self) -> str:
        return self.path

    @property
    def place(self) -> Path:
        return place_of(self.path)

    @property
    def limit(self) -> float:
        """The same in bytes."""
        return 1e9 * self.limit_gb


class Npz(File):
    """NumPy arrays x, y and, optionally, client and test; or x_train, y_train, x_test, y_test."""

    kind: ClassVar[str] = "npz"

    @override
    def read(self, root: Path) -> Rows:
        return read_npz(self.place, self.limit, self._decode)


class Images(File):
    """A folder of images: ``[train|test/][client/]class/image``."""

    kind: ClassVar[str] = "images"

    size: Annotated[int | None, Field(ge=1, description="scale every image to size x size pixels")] = None
    channels: Annotated[Literal[1, 3], Field(description="1: grey, 3: colour")] = 3

    @override
    def read(self, root: Path) -> Rows:
        return read_images(self.place, self.size, self.channels, self.limit)


class Table(File):
    """A table: a column of labels, and features in all columns that are neither named here nor dropped.

    Numbers stay numbers, words become a column of 0 and 1 each, dates become days. Missing values are filled.
    """

    label: Annotated[str, Field(description="the column of the classes")] = "label"
    client: Annotated[str | None, Field(description="the column that names the client of a row")] = None
    split: Annotated[str | None, Field(description="the column that says train or test")] = None
    drop: Annotated[tuple[str, ...], Field(description="columns to leave out, such as patient numbers")] = ()
    features: Annotated[
        tuple[str, ...], Field(description="columns to use; unset: all that are not named or dropped")
    ] = ()
    words: Annotated[
        tuple[str, ...], Field(description="columns whose numbers are codes, each to be treated as a word")
    ] = ()
    most_words: Annotated[
        int, Field(ge=2, description="most words of a column that get their own column; rarer ones are left out")
    ] = 100
    day_first: Annotated[
        bool | None,
        Field(description="whether dates such as 03/04/2024 begin with the day; unset: inferred from the values"),
    ] = None
    standardise: Annotated[bool, Field(description="give each number mean 0, std 1 over the training rows")] = True
    statistics: Annotated[
        StatisticsBy,
        Field(
            description="where medians, means and deviations come from: all training rows together; sums that "
            "clients add up (the mean fills gaps); or each client's own rows (needs data.client): see docs/tables.md"
        ),
    ] = "all"

    @field_validator("augment", "normalise")
    @classmethod
    def _no_images(cls, value: str) -> str:
        if value not in ("none", "default"):
            raise ValueError("is for images, but a table has none")
        return value

    @model_validator(mode="after")
    def _columns_are_used_once(self) -> Self:
        if self.statistics == "own" and self.client is None:
            raise ValueError("statistics = 'own' needs data.client, the column that names the client of a row")
        both = sorted({*self.drop} & {*self.features, *self.words, *(self.named)})
        if both:
            raise ValueError(f"'{both[0]}' is both dropped and used; choose one")
        return self

    @property
    def named(self) -> tuple[str, ...]:
        """The columns that describe a row and are not features."""
        return tuple(name for name in (self.label, self.client, self.split) if name is not None)

    @property
    def wanted(self) -> ColumnChoice:
        return ColumnChoice(self.named, self.drop, self.features, self.words, self.day_first)

    def header(self) -> list[str]:
        """The names of its columns."""
        raise NotImplementedError

    def table(self) -> RawTable:
        """The table as written."""
        raise NotImplementedError

    @contextmanager
    def _label_explained(self) -> Iterator[None]:
        """An error about a table without the column of the label says how to name another, if nobody named one."""
        try:
            yield
        except DataError as error:
            if "label" in self.model_fields_set or f"has no column '{self.label}'" not in str(error):
                raise
            raise DataError(f"{error}; data.label=COLUMN names the column to predict") from error

    @override
    def read(self, root: Path) -> Rows:
        return self.rows_of(self.table())

    @override
    def load(self, root: Path, seed: int) -> Arrays:
        return self.arrays_of(self.table(), seed)

    def rows_of(self, table: RawTable) -> Rows:
        """The content of the named columns; ``arrays_of`` reads the features."""
        where = table.where
        decode = self._decode or (lambda *of: (*coded(*of), None))
        label = table.named[self.label]
        if self._decode is not None and table.comma:  # numbers; a class that is called 3,5 keeps its name
            label = with_points(label)
        y, labels, target = decode(label, f"label (column '{self.label}')", where)
        client: Ints | None = None
        clients: tuple[str, ...] = ()
        test = None
        if self.client is not None:
            client, clients = coded(table.named[self.client], f"client (column '{self.client}')", where)
        if self.split is not None:
            parts = np.char.lower(table.named[self.split].astype(str))
            odd = ~np.isin(parts, ("train", "test"))
            if odd.any():
                row = int(np.argmax(odd))
                what = f"must be train or test (got {str(parts[row])!r})"
                raise DataError(f"{where(row)}, column '{self.split}': {what}")
            test = parts == "test"
        return Rows(np.empty((table.rows, 0), np.float32), y, labels, test, client, clients, target)

    def arrays_of(self, table: RawTable, seed: int) -> Arrays:
        """The table as inputs of a net, prepared by statistics of its training rows."""
        refuse_bad(table)
        rows = self.rows_of(table)
        test = np.zeros(len(rows.y), np.bool_) if self.pool else self.test_rows(rows, seed)
        recipe, x = self.prepared(table, rows, ~test)
        holders = [rows.clients[k] for k in rows.client] if recipe.own and rows.client is not None else None
        notes = (*(f"{table.at}: {note}" for note in table.notes), *self.pointed_out(table, ~test))
        if rows.target is not None:
            notes += (*_stand_in(self.label, Column("number", rows.target), "remove these rows"),)
        x = filled_and_scaled(x, recipe, holders)
        found = Arrays(self.name, x, rows.y, test, rows.labels, client=rows.client, clients=rows.clients)
        return checked(found._replace(recipe=recipe, notes=notes, target=rows.target))

    def prepared(self, table: RawTable, rows: Rows, train: NDArray[np.bool_]) -> tuple[Recipe, NDArray[np.float32]]:
        """How each column is prepared, and the features as numbers, before they are filled and scaled."""
        features = learned_features(table, train, self.most_words)
        x = encoded(table, features)
        common = learned_scaling(x, features, train, self.statistics, self.standardise)
        own = {}
        if self.statistics == "own" and rows.client is not None:
            own = own_scalings(x, features, train, rows.client, rows.clients, common, self.standardise)
        recipe = Recipe(
            label=self.label,
            client=self.client,
            split=self.split,
            dropped=self.drop,
            features=features,
            day_first=way_of_dates(table) if self.day_first is None else self.day_first,
            statistics=self.statistics,
            scaling=common,
            own=own,
        )
        return recipe, x

    def pointed_out(self, table: RawTable, train: NDArray[np.bool_]) -> list[str]:
        """Notes on choices of columns, and on numbers, that look like mistakes."""
        chosen, indices, same = {*self.features}, identifiers(table), constants(table, train)
        notes = [
            f"column '{name}' has a different whole number in every row: if it is only an index, set data.drop={name}"
            for name in indices
            if name not in chosen
        ]
        if dull := [name for name in same if name not in chosen]:
            what = "nothing can be learned from columns with one value, or none, in training rows"
            notes.append(f"{what}: set data.drop={','.join(dull)}")
        for name, column in table.columns.items():
            if column.code and name not in (*indices, *same):
                what = f"has numbers that begin with zeros, such as {column.code}, and is read without them"
                notes.append(f"column '{name}' {what}: if they are codes, set data.words={name}")
            notes += _stand_in(name, column, "leave these cells empty")
        return notes


def _stand_in(name: str, column: Column, fix: str) -> list[str]:
    """A note on a number that may stand for a missing value."""
    value = stand_in(column)
    if value is None:
        return []
    rows = int((column.values == value).sum())
    what = f"has {value:g} in {rows:,} row{'s' * (rows > 1)}, far from all its other values"
    return [f"column '{name}' {what}: if it stands for a missing value, {fix}"]


class Csv(Table):
    """A CSV file whose first line names the columns; the separator and the encoding are detected."""

    kind: ClassVar[str] = "csv"

    @override
    def header(self) -> list[str]:
        return csv_header(self.place)

    @override
    def table(self) -> RawTable:
        with self._label_explained():
            return read_csv(self.place, self.wanted, self.limit)


class Parquet(Table):
    """A Parquet file."""

    kind: ClassVar[str] = "parquet"

    @override
    def header(self) -> list[str]:
        return parquet_header(self.place)

    @override
    def table(self) -> RawTable:
        with self._label_explained():
            return read_parquet(self.place, self.wanted, self.limit)


def source_for_path(path: str) -> tuple[str, dict[str, str]]:
    """The kind of source that reads ``path``, and its settings."""
    place = place_of(path)
    suffix = place.suffix.lower()
    if is_folder(place):
        return "images", {"path": path}
    if suffix in (".npz", ".csv", ".parquet"):
        return suffix[1:], {"path": path}
    refuse_spreadsheet(place)
    problem = "is not of a supported type" if is_file(place) else f"no such file or folder ({place.absolute()})"
    raise DataError(f"{path}: {problem} (.npz, .csv, .parquet, or a folder of images)")


# --------------------------------------------------------------------------------------------- from Python


def from_arrays(
    x: Any,
    y: Any,
    *,
    client: Any = None,
    test: Any = None,
    name: str = "arrays",
    labels: Sequence[str] | None = None,
    test_fraction: float = TEST_SHARE,
    standardise: bool = False,
    numbers: bool = False,
    seed: int = 0,
) -> Arrays:
    """Data from NumPy arrays or torch tensors; if ``test`` is not given, ``test_fraction`` of each class is drawn.

    ``labels`` are the names of the classes 0, 1, 2, ...; without them, the distinct values of ``y`` are the
    classes, in sorted order. ``standardise`` gives each feature mean 0 and std 1 over the training rows.
    ``numbers``: y are regression targets.
    """
    if not 0 <= test_fraction < 1:
        raise DataError(f"data '{name}': test_fraction must be in [0, 1) (got {test_fraction})")
    at = f"data '{name}'"
    given = (("client", client), ("test", test))
    holder, marked = (None if column is None else array_of(column, f"{at}: {what}") for what, column in given)
    if isinstance(y, list | tuple):
        y = words_of(y, "label", lambda row: f"{at}, row {row}")
    decode = decoded if numbers else None
    rows = rows_of_arrays(array_of(x, f"{at}: x"), array_of(y, f"{at}: y"), holder, marked, labels, at, decode)
    kept = drawn_test_rows(rows.y, test_fraction, seed) if rows.test is None else rows.test
    mean, std = pixel_scale(rows.x, kept)
    if standardise and rows.x.ndim != 2:
        raise DataError(f"{at}: standardise is for rows of numbers (got rows of shape {rows.x.shape[1:]})")
    if standardise:
        scale = rows.x[~kept].astype(np.float64)
        mean, std = tuple(scale.mean(0).tolist()), tuple(np.where(scale.std(0) > 0, scale.std(0), 1.0).tolist())
    found = Arrays(name, rows.x, rows.y, kept, rows.labels, mean, std, rows.client, rows.clients)
    fix = "scale them, or pass data={'x': x, 'y': y, 'standardise': True}"
    notes = () if standardise else unequal_scales(rows.x, kept, fix)
    return checked(found._replace(notes=notes, target=rows.target))


def from_torch(
    dataset: Dataset[Any],
    *,
    name: str = "dataset",
    labels: Sequence[str] | None = None,
    test_fraction: float = TEST_SHARE,
    numbers: bool = False,
    seed: int = 0,
) -> Arrays:
    """Data from one pass through a torch data set of (x, y) pairs: x a tensor, an array or a PIL image.

    The names of the classes are ``labels``, or else the data set's own ``classes``, where it has them.
    """
    x, classes, own = examples_of(dataset, name)
    labels = labels if labels is not None else own
    fraction: Any = {"test_fraction": test_fraction, "numbers": numbers}
    return from_arrays(x, classes, name=name, labels=labels, seed=seed, **fraction)


def examples_of(dataset: Dataset[Any], name: str) -> tuple[NDArray[Any], list[Any], list[str] | None]:
    """The inputs and labels of a torch data set, and its class names where it has them."""
    examples: list[NDArray[Any]] = []
    classes: list[Any] = []
    for row, pair in enumerate(_pairs(dataset)):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise DataError(f"data '{name}', row {row}: must be a pair (x, y) (got {type(pair).__name__})")
        example = _example(pair[0], f"data '{name}', row {row}")
        if examples and example.shape != examples[0].shape:
            raise DataError(
                f"data '{name}', row {row}: has shape {example.shape} where row 0 has {examples[0].shape}; "
                "rows must be of one shape (resize them in the data set's transform)"
            )
        examples.append(example)
        classes.append(pair[1].item() if hasattr(pair[1], "item") else pair[1])
    if not examples:
        raise DataError(f"data '{name}': has no rows")
    own = getattr(dataset, "classes", None)
    named = isinstance(own, (list, tuple)) and not isinstance(classes[0], str)
    return np.stack(examples), classes, [str(word) for word in own] if named and own is not None else None


def _pairs(dataset: Dataset[Any]) -> Iterable[Any]:
    # a data set with a length need not end an iteration by IndexError, so its length is what counts
    return dataset if isinstance(dataset, IterableDataset) else (dataset[i] for i in range(len(dataset)))  # type: ignore[arg-type]


def _example(x: Any, at: str) -> NDArray[Any]:
    if isinstance(x, Image.Image):
        refuse_deep(x, at)
        pixels = np.asarray(x if x.mode in ("L", "RGB") else x.convert("RGB"), np.uint8)
        return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.atleast_1d(array_of(x, f"{at}: x"))


def array_of(values: Any, at: str) -> NDArray[Any]:
    """Values as an array; a DataError, placed by ``at``, for those that are masked or do not form one."""
    if isinstance(values, torch.Tensor):
        plain = values.detach().cpu()
        return (plain.float() if plain.dtype == torch.bfloat16 else plain).numpy()
    if np.ma.is_masked(values):
        raise DataError(f"{at} has masked values, and NumPy would use what is below the mask (fill or remove them)")
    try:
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise DataError(f"{at} is not an array: {error}") from error


# ------------------------------------------------------------------------------------------- pure functions


def drawn_test_rows(y: Ints, share: float, seed: int) -> NDArray[np.bool_]:
    """``share`` of the rows, the same share of each class as nearly as whole rows allow, leaving each class one row."""
    counts = np.bincount(y)
    quota = counts * share
    take = np.floor(quota).astype(np.int64)
    # largest remainders: many small classes together still give their share
    extra = round(float(quota.sum())) - int(take.sum())
    take[np.argsort(take - quota, kind="stable")[:extra]] += 1
    take = np.minimum(take, np.maximum(counts - 1, 0))
    order = rng.stream(seed, "test_split").permutation(len(y))
    by_class = order[np.argsort(y[order], kind="stable")]
    rank = np.arange(len(y)) - np.repeat(np.cumsum(counts) - counts, counts)
    test = np.zeros(len(y), np.bool_)
    test[by_class] = rank < np.repeat(take, counts)
    return test


def unequal_scales(x: NDArray[Any], test: NDArray[np.bool_], fix: str) -> tuple[str, ...]:
    """A note if features have very different scales: nets learn badly from such rows."""
    if x.ndim != 2 or not x.size or x.dtype != np.float32 or not (~test).any():
        return ()
    with np.errstate(over="ignore", invalid="ignore"):
        spread = x[~test].std(0)
        moving = spread[np.isfinite(spread) & (spread > 0)]
        far = np.abs(x[~test].mean(0)).max()
    if not len(moving) or (moving.max() < 100 * moving.min() and far < 100):
        return ()
    what = f"features have very different scales (std from {moving.min():.3g} to {moving.max():.3g})"
    return (f"{what}: {fix}",)


def pixel_scale(x: NDArray[Any], test: NDArray[np.bool_]) -> Scale:
    """The mean and std of each channel over the training images, in [0, 1]; (0, 1) for what is not uint8 images."""
    if x.dtype != np.uint8 or x.ndim != 4 or test.all():
        return (0.0,), (1.0,)
    train = np.flatnonzero(~test)
    total, squares = np.zeros(x.shape[1]), np.zeros(x.shape[1])
    for block in np.array_split(train, max(1, len(train) // 4096)):  # in blocks, since float64 is eight times uint8
        pixels = x[block] / 255.0
        total += pixels.sum((0, 2, 3))
        squares += (pixels**2).sum((0, 2, 3))
    count = len(train) * x.shape[2] * x.shape[3]
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return tuple(mean.tolist()), tuple(np.where(std > 1e-6, std, 1.0).tolist())
