"""New rows for a trained model: tables with the columns of training, arrays, images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedloom.core.errors import DataError
from fedloom.data.column_check import checked_columns, suspicions
from fedloom.data.columns import Recipe, encoded, refuse_lacking, refuse_other_kinds, with_kinds
from fedloom.data.files import Place, as_examples, is_folder, npz_arrays, place_of, read_pictures, refuse_spreadsheet
from fedloom.data.table import (
    ColumnChoice,
    RawTable,
    csv_header,
    parquet_header,
    read_csv,
    read_parquet,
    table_of_frame,
)


class NewRows(NamedTuple):
    """Rows as a ``ReadyNet`` takes them, with what else is known about them."""

    at: str
    x: NDArray[Any]
    where: Place
    y: NDArray[Any] | None = None  # the true values as written, if known
    clients: tuple[str, ...] | None = None  # the client of each row, if known
    beside: Mapping[str, NDArray[Any]] = {}  # other columns, as written
    notes: tuple[str, ...] = ()  # doubts about them, such as columns that differ from those of training
    comma: bool = False  # whether 3,5 may be a number


class ValueRange(NamedTuple):
    """The smallest and the largest of some values."""

    low: float
    high: float

    @property
    def size(self) -> float:
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}"


def range_of(x: NDArray[Any]) -> ValueRange | None:
    """That of an array, without what is missing; None: it has no values."""
    if not x.size or np.isnan(x).all():
        return None
    return ValueRange(float(np.nanmin(x)), float(np.nanmax(x)))


def new_rows(
    data: Any, recipe: Recipe | None, shape: tuple[int, ...], *, images: bool, trained: ValueRange | None = None
) -> NewRows:
    """Rows from a path, a DataFrame, an array or a tensor; ``trained``: the range of the arrays of training."""
    if isinstance(data, NewRows):
        return data
    rows = _rows_of(data, recipe, shape, images=images)
    found = range_of(rows.x) if recipe is None and trained is not None else None
    if found is None or trained is None:
        return rows
    are_pixels = len(shape) == 3
    same_type = images and rows.x.dtype == np.uint8  # bytes for a model of bytes: at worst an almost black picture
    if are_pixels and not same_type and _is_another_unit(found, trained):
        raise DataError(f"{rows.at}: {_apart(found, trained)} ({_remedy(found, trained)})")
    if _may_be_another_unit(found, trained) if are_pixels else _are_far_apart(found, trained):
        rows = rows._replace(
            notes=(
                *rows.notes,
                f"{rows.at}: {_apart(found, trained)}: {_remedy(found, trained)}",
            )
        )
    return rows


def _is_another_unit(found: ValueRange, trained: ValueRange) -> bool:
    """Whether pixels cannot be in the unit of training: many times as large, or next to nothing.

    Pixels have an upper limit. A dark picture does not reach it, but only one that is all but black stays below a
    sixty-fourth of it.
    """
    return found.size > 8 * trained.size or 0 < 64 * found.size < trained.size


def _may_be_another_unit(found: ValueRange, trained: ValueRange) -> bool:
    """Whether pixels are suspicious, although a dark picture, or a noisy one, may be so."""
    reach = (trained.high - trained.low) / 2
    outside = found.low < trained.low - reach or found.high > trained.high + reach
    lacks_negatives = found.low >= 0 and 8 * trained.low < -trained.size
    return outside or lacks_negatives or 0 < 8 * found.size < trained.size


def _are_far_apart(found: ValueRange, trained: ValueRange) -> bool:
    """The same for features, which have no limits: in a few rows, the largest of them may be small or huge."""
    return found.size > 64 * trained.size or 0 < 64 * found.size < trained.size


def _apart(found: ValueRange, trained: ValueRange) -> str:
    return f"values are {found}, but those that the model learned from are {trained}"


def _remedy(found: ValueRange, trained: ValueRange) -> str:
    if (trained.low, trained.high, found.high) == (0, 255, 1) and found.low >= 0:
        return "multiply them by 255"
    if (found.low, found.high, trained.high) == (0, 255, 1) and trained.low >= 0:
        return "divide them by 255"
    return "scale them as the rows of training were scaled"


def _rows_of(data: Any, recipe: Recipe | None, shape: tuple[int, ...], *, images: bool) -> NewRows:
    if isinstance(data, str | Path):
        return _of_path(place_of(str(data)), recipe, shape, images=images)
    if recipe is not None and hasattr(data, "columns"):
        header = [str(column) for column in data.columns]
        refuse_lacking(recipe, header, "DataFrame")
        return _of_table(table_of_frame(data, _choice(recipe, header)), recipe)
    return _of_array(data, recipe, shape, "the rows")


def _of_path(path: Path, recipe: Recipe | None, shape: tuple[int, ...], *, images: bool) -> NewRows:
    at, suffix = str(path), path.suffix.lower()
    if is_folder(path) and images:
        names, pixels = read_pictures(path, shape)
        return NewRows(at, pixels, lambda row: names[row], beside={"image": np.array(names, dtype=object)})
    if suffix == ".npz":
        held = npz_arrays(path)
        if "x" not in held:
            raise DataError(f"{at}: has no array 'x' (it has {', '.join(held) or 'nothing'})")
        found = _of_array(held["x"], recipe, shape, at)
        holders = None if "client" not in held else tuple(str(name) for name in held["client"].tolist())
        return found._replace(y=held.get("y"), clients=holders)
    readers = {".csv": (csv_header, read_csv), ".parquet": (parquet_header, read_parquet)}
    if suffix not in readers:
        refuse_spreadsheet(path)
        raise DataError(f"{at}: new rows must be .csv, .parquet or .npz" + (", or a folder of images" * images))
    if recipe is None:
        raise DataError(f"{at}: is a table, but the model learned from arrays of shape {shape} (use .npz)")
    header_of, read = readers[suffix]
    header = header_of(path)
    refuse_lacking(recipe, header, at)
    return _of_table(read(path, _choice(recipe, header)), recipe)


def _choice(recipe: Recipe, header: list[str]) -> ColumnChoice:
    """Read the features as in training, and all other columns as written."""
    used = {f.name for f in recipe.features}
    words = tuple(f.name for f in recipe.features if f.kind == "words")
    others = tuple(name for name in header if name not in used)
    return ColumnChoice(others, words=words, day_first=recipe.day_first, plain=True)


def _of_table(table: RawTable, recipe: Recipe) -> NewRows:
    refuse_other_kinds(recipe, table)
    table = with_kinds(recipe, table)
    beside = {name: cells for name, cells in table.named.items() if name != recipe.label}
    holders = table.named.get(recipe.client) if recipe.client is not None else None
    clients = None if holders is None else tuple(str(name) for name in holders.tolist())
    x = encoded(table, recipe.features)
    notes = tuple(suspicions(checked_columns(table, recipe)))
    return NewRows(table.at, x, table.where, table.named.get(recipe.label), clients, beside, notes, table.comma)


def _of_array(values: Any, recipe: Recipe | None, shape: tuple[int, ...], at: str) -> NewRows:
    plain = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if plain.ndim < 2:
        raise DataError(f"{at}: must have two dimensions or more [rows, ...] (got shape {plain.shape})")
    x = as_examples(plain, at)
    if x.shape[1:] != shape:
        names = f": {', '.join(recipe.names[:10])}" if recipe is not None else ""
        raise DataError(f"{at}: each row must have the shape {shape}{names} (got {x.shape[1:]})")
    return NewRows(at, x, lambda row: f"{at}, row {row}")
