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
from fedloom.data.files import Place, as_examples, is_folder, npz_arrays, place_of, read_pictures
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
    notes: tuple[str, ...] = ()  # columns that differ from those of training


def new_rows(data: Any, recipe: Recipe | None, shape: tuple[int, ...], *, images: bool) -> NewRows:
    """Rows from a path, a DataFrame, an array or a tensor."""
    if isinstance(data, NewRows):
        return data
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
    return NewRows(table.at, x, table.where, table.named.get(recipe.label), clients, beside, notes)


def _of_array(values: Any, recipe: Recipe | None, shape: tuple[int, ...], at: str) -> NewRows:
    plain = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if plain.ndim < 2:
        raise DataError(f"{at}: must have two dimensions or more [rows, ...] (got shape {plain.shape})")
    x = as_examples(plain, at)
    if x.shape[1:] != shape:
        names = f": {', '.join(recipe.names[:10])}" if recipe is not None else ""
        raise DataError(f"{at}: each row must have the shape {shape}{names} (got {x.shape[1:]})")
    return NewRows(at, x, lambda row: f"{at}, row {row}")
