"""A node's own file in the form of the contract: the same columns and classes, prepared in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fedloom.core.errors import ConfigError, DataError, Fault
from fedloom.data.arrays import Arrays, checked
from fedloom.data.column_check import ColumnCheck, checked_columns, refuse_wrong
from fedloom.data.columns import (
    CONTRACT,
    Recipe,
    encoded,
    own_scalings,
    refuse_lacking,
    refuse_other_kinds,
    with_kinds,
)
from fedloom.data.files import Rows
from fedloom.data.sources import File, Source, Table, source_for_path
from fedloom.deploy.contract import Contract, Form
from fedloom.deploy.ends import OwnRows, rows_of_client, rows_of_node
from fedloom.deploy.site import NODE_TOML
from fedloom.runs.find import CHOOSE
from fedloom.runs.prepare import share
from fedloom.runs.settings import Config

SourceT = TypeVar("SourceT", bound=Source)
EXPERIMENT_DATA = "experiment"  # instead of a file: the node's share of the experiment's data


def rows_for(contract: Contract, client: int, data: str, root: Path) -> OwnRows:
    """The rows of a node, from its own file or from the experiment's data."""
    if not data:
        fix = f"add data=FILE; data={EXPERIMENT_DATA} is a part of the experiment's own data"
        raise ConfigError([Fault("data", "where are this node's rows?", fix)])
    if data == EXPERIMENT_DATA:
        source = contract.config.data
        if isinstance(source, File) and not source.place.exists():  # a bundle names the file, and not its folder
            what = f"data={EXPERIMENT_DATA} needs the experiment's own data, and {source.path} is not in this folder"
            raise ConfigError([Fault("data", what, "data=FILE reads this node's own rows")])
        return rows_of_client(share(contract.config, root), client)
    return own_rows(contract, data)


def own_rows(contract: Contract, path: str) -> OwnRows:
    """The rows of a node's own file; refused if they do not fit the contract."""
    config, form = contract.config, contract.form
    kind, settings = source_for_path(path)
    recipe: Recipe | None = None
    checks: tuple[ColumnCheck, ...] = ()
    if form.recipe is not None:
        if not issubclass(CHOOSE["data"](kind, "data.source"), Table):
            raise DataError(f"{path}: is not a table, which the contract requires (.csv or .parquet)")
        asked = {name: getattr(config.data, name) for name in ("label", "words", "standardise")}
        table = _learned(config, CHOOSE["data"](kind, "data.source")(**settings, **asked))
        rows, recipe, checks = _table_rows(table, Recipe.model_validate(form.recipe))
    else:
        rows = _learned(config, _file(config, kind, settings)).read(Path())
    arrays = _fitted(rows, form, path)._replace(recipe=recipe)
    return rows_of_node(arrays, config.partition.holdout, config.basics.seed)._replace(checks=checks)


def refuse_wrong_columns(own: OwnRows, accepted: Sequence[str], folder: Path) -> None:
    """Refuse columns that do not mean what the contract says, unless the node's owner has accepted them."""
    fix = f"in [policy] of {folder / NODE_TOML} write accept_columns ="
    refuse_wrong(own.checks, accepted, own.arrays.name, fix)


def _file(config: Config, kind: str, settings: dict[str, str]) -> Source:
    """How a file is read: by the contract's settings if it is of the contract's kind."""
    cls = CHOOSE["data"](kind, "data.source")
    if issubclass(cls, Table):
        raise DataError(f"{settings['path']}: is a table, but the contract is for '{config.kinds['data']}'")
    found: Source = config.data.model_copy(update=settings) if isinstance(config.data, cls) else cls(**settings)
    return found


def _learned(config: Config, source: SourceT) -> SourceT:
    """The source with the labels of the task: classes, or numbers."""
    return source.with_numbers() if config.task.is_regression else source


def _table_rows(source: Table, recipe: Recipe) -> tuple[Rows, Recipe, tuple[ColumnCheck, ...]]:
    """The rows of a table, how they were prepared, and how its columns compare with the contract's."""
    names = tuple(feature.name for feature in recipe.features)
    own = source.model_copy(update={"features": names, "day_first": recipe.day_first})
    refuse_lacking(recipe, own.header(), str(own.place), CONTRACT)  # the owner of a node has no data.features
    table = own.table()
    refuse_other_kinds(recipe, table, CONTRACT)
    table = with_kinds(recipe, table)
    raw = encoded(table, recipe.features)
    if recipe.statistics == "own":
        recipe = _by_own_rows(recipe, raw, scale=source.standardise)
    rows = own.rows_of(table)._replace(x=recipe.scaling.applied(raw))
    return rows, recipe, checked_columns(table, recipe)


def _by_own_rows(recipe: Recipe, raw: NDArray[np.float32], *, scale: bool) -> Recipe:
    """The recipe with the statistics of these rows; for columns that lack any value, the common ones."""
    everyone, one = np.ones(len(raw), np.bool_), np.zeros(len(raw), np.int64)
    found = own_scalings(raw, recipe.features, everyone, one, ("",), recipe.scaling, scale)
    return recipe.model_copy(update={"scaling": found.get("", recipe.scaling)})


def _fitted(rows: Rows, form: Form, path: str) -> Arrays:
    """The rows with the contract's classes and scale; refused if their shape or a class differs."""
    if tuple(rows.x.shape[1:]) != form.shape or str(rows.x.dtype) != form.dtype:
        here = f"{list(rows.x.shape[1:])} {rows.x.dtype}"
        raise DataError(f"{path}: an example has the form {here}, in the contract {list(form.shape)} {form.dtype}")
    test = np.zeros(len(rows.y), np.bool_)
    if form.unit is not None:
        arrays = Arrays(path, rows.x, rows.y, test, rows.labels, form.mean, form.std)
        return checked(_in_unit(arrays, rows, form.unit), of_one_client=True)
    strangers = sorted(set(rows.labels) - set(form.labels))
    if strangers:
        known = ", ".join(form.labels[:20])
        raise DataError(f"{path}: has the class '{strangers[0]}', which the contract does not know (known: {known})")
    numbers = np.array([form.labels.index(label) for label in rows.labels], dtype=np.int64)
    arrays = Arrays(path, rows.x, numbers[rows.y], test, form.labels, form.mean, form.std)
    return checked(arrays, of_one_client=True)


def _in_unit(arrays: Arrays, rows: Rows, unit: tuple[float, float]) -> Arrays:
    """The arrays with regression targets, in the unit of the contract."""
    if rows.target is None:
        raise DataError(f"{arrays.name}: has classes, but the contract is for regression")
    mean, std = unit
    return arrays._replace(target=((rows.target - mean) / std).astype(np.float32), unit=(mean, std))
