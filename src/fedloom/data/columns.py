"""How each column of a table is filled, encoded and scaled; fitted on training rows only.

A ``Recipe`` has all of it as plain values, so that a run folder can store it, and new rows are prepared in the same
way. Words become one column of 0 and 1 each, by scikit-learn's ColumnTransformer. Then missing numbers are filled and
all numbers scaled (``Scaling``), by operations that a net can do as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from fedloom.core.errors import DataError, nearest
from fedloom.data.arrays import Ints
from fedloom.data.table import Column, ColumnKind, RawTable, first_other

# Where the statistics that fill and scale numbers come from: all training rows; sums over clients; or each client's
# own rows.
StatisticsBy: TypeAlias = Literal["all", "sums", "own"]
_IDENTIFIER = 20  # from this many rows, a column without repeated values looks like an index


class Feature(BaseModel):
    """One column of the table that is used."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: ColumnKind
    missing: int | None = 0  # in training rows; None: not known
    words: tuple[str, ...] = ()  # each has a column of 0 and 1; a word that is not here has 0 in all of them
    rare: int = 0  # further words, too many to have a column each
    fill: str = ""  # the word that replaces a missing one

    @property
    def width(self) -> int:
        """How many inputs of a net it becomes."""
        return len(self.words) if self.kind == "words" else 1


class Scaling(BaseModel):
    """The values that fill and scale the inputs of a net, one entry for each; a std of 0: the input is constant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    fill: tuple[float, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def applied(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Each missing number filled, each number scaled."""
        fill, mean, std = (np.array(values) for values in (self.fill, self.mean, self.std))
        whole = np.where(np.isnan(x), fill.astype(np.float32), x)
        constant = std == 0
        return np.where(constant, 0.0, (whole - mean) / np.where(constant, 1.0, std)).astype(np.float32)


class Recipe(BaseModel):
    """From a table to the inputs of a net."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    client: str | None = None
    split: str | None = None
    dropped: tuple[str, ...] = ()
    features: tuple[Feature, ...]
    day_first: bool | None = None  # whether dates such as 03/04/2024 begin with the day; None: not known
    statistics: StatisticsBy = "all"
    scaling: Scaling
    own: dict[str, Scaling] = {}  # by client, where each has its own

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the inputs of a net."""
        found = ([f.name] if f.kind != "words" else [f"{f.name}={word}" for word in f.words] for f in self.features)
        return tuple(name for names in found for name in names)

    @property
    def agreed(self) -> Recipe:
        """What clients have to agree on: nothing that was counted or fitted on the rows of a single one."""
        features = tuple(f.model_copy(update={"missing": None}) for f in self.features)
        return self.model_copy(update={"features": features, "own": {}})

    def of_client(self, name: str) -> Recipe:
        """The recipe with the statistics of one client, if it has its own."""
        return self.model_copy(update={"scaling": self.own.get(name, self.scaling), "own": {}})


# ------------------------------------------------------------------------------------------------ learning


def refuse_bad(table: RawTable) -> None:
    """One error with every column that cannot be used."""
    odd = {name: column.fault for name, column in table.columns.items() if column.fault}
    named = [name for name in identifiers(table) if table.columns[name].kind == "words" and name not in odd]
    same = "a different word in every row; nothing can be learned from it"
    bad = odd | dict.fromkeys(named, same)
    if bad:
        details = "\n".join(f"  column '{name}': {why}" for name, why in bad.items())
        fix = f"leave columns out (data.drop={','.join(bad)})"
        if odd:
            fix = f"correct the cells, {fix}, or treat them as words (data.words={','.join(odd)})"
        raise DataError(
            f"{table.at}: {len(bad)} column{'s' * (len(bad) > 1)} cannot be used as written\n{details}\n  {fix}"
        )


def identifiers(table: RawTable) -> list[str]:
    """The columns that look like an index of the rows: integers or words, none of them twice."""
    return [name for name, column in table.columns.items() if _is_identifier(column)]


def _is_identifier(column: Column) -> bool:
    if column.kind == "date" or len(column.values) < _IDENTIFIER or column.missing.any():
        return False
    whole = column.kind == "words" or bool((column.values == np.floor(column.values)).all())
    return whole and len(set(column.values.tolist())) == len(column.values)


def constants(table: RawTable, train: NDArray[np.bool_]) -> list[str]:
    """The columns that have a single value, or none, in the training rows."""
    present = {name: column.values[train & ~column.missing] for name, column in table.columns.items()}
    return [name for name, values in present.items() if train.sum() > 1 and (values == values[:1]).all()]


def stand_in(column: Column) -> float | None:
    """A number such as -999 that lies far from all others, as those that are written for a missing value; else None."""
    if column.kind != "number" or column.missing.all():
        return None
    for value in (float(np.nanmin(column.values)), float(np.nanmax(column.values))):
        if not re.fullmatch(r"(-9|-?99)9*", f"{value:.15g}"):
            continue
        others = column.values[~column.missing & (column.values != value)]
        if len(others) and np.abs(others - value).min() > np.ptp(others) > 0:
            return value
    return None


def way_of_dates(table: RawTable) -> bool | None:
    """Whether dates such as 03/04/2024 begin with the day in all columns that have them; None: not known."""
    found = {column.day_first for column in table.columns.values()} - {None}
    return found.pop() if len(found) == 1 else None


def learned_features(table: RawTable, train: NDArray[np.bool_], most_words: int) -> tuple[Feature, ...]:
    """How each column is filled and encoded, fitted on the training rows."""
    words = {name: column for name, column in table.columns.items() if column.kind == "words"}
    taught = _taught_words({name: column.values[train] for name, column in words.items()}, most_words)
    found = []
    for name, column in table.columns.items():
        about: dict[str, Any] = {"name": name, "kind": column.kind, "missing": int(column.missing[train].sum())}
        found.append(Feature(**about, **taught.get(name, {})))
    return tuple(found)


def _taught_words(columns: dict[str, NDArray[Any]], most: int) -> dict[str, dict[str, Any]]:
    """The words of each column, in order, and the one that fills gaps: the most frequent."""
    if not columns:
        return {}
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    empty = [name for name, values in columns.items() if not (values != "").any()]
    some = {name: values for name, values in columns.items() if name not in empty}
    found: dict[str, dict[str, Any]] = {name: {} for name in empty}
    parts = [
        (
            str(index),
            make_pipeline(
                SimpleImputer(missing_values="", strategy="most_frequent"),
                OneHotEncoder(max_categories=most, handle_unknown="ignore", sparse_output=False),
            ),
            [index],
        )
        for index in range(len(some))
    ]
    if some:
        fitted = ColumnTransformer(parts).fit(np.stack(list(some.values()), axis=1))
        for index, name in enumerate(some):
            imputer, encoder = (step for _, step in fitted.named_transformers_[str(index)].steps)
            rare = encoder.infrequent_categories_[0] if most else None
            out = set() if rare is None else set(rare.tolist())
            kept = tuple(str(word) for word in encoder.categories_[0].tolist() if word not in out)
            found[name] = {"words": kept, "rare": len(out), "fill": str(imputer.statistics_[0])}
    return found


def encoded(table: RawTable, features: Sequence[Feature]) -> NDArray[np.float32]:
    """The table as numbers, NaN where one is missing; a word has 1 in its own column.  ``[rows, numbers]``"""
    x = np.empty((table.rows, sum(f.width for f in features)), np.float32)
    words = [f for f in features if f.kind == "words" and f.words]
    ones = _one_hot(table, words) if words else np.empty((table.rows, 0), np.float32)
    at = taken = 0
    with np.errstate(over="ignore"):
        for f in features:
            if f.kind == "words":
                x[:, at : at + f.width] = ones[:, taken : taken + f.width]
                taken += f.width
            else:
                x[:, at] = table.columns[f.name].values
            at += f.width
    return x


def _one_hot(table: RawTable, features: Sequence[Feature]) -> NDArray[np.float32]:
    from sklearn.compose import ColumnTransformer
    from sklearn.preprocessing import OneHotEncoder

    filled = np.stack([_filled(table.columns[f.name].values, f.fill) for f in features], axis=1)
    parts = [
        (
            f.name,
            OneHotEncoder(
                categories=[np.array(f.words, dtype=object)],
                handle_unknown="ignore",
                sparse_output=False,
                dtype=np.float32,
            ),
            [index],
        )
        for index, f in enumerate(features)
    ]
    return np.asarray(ColumnTransformer(parts).fit_transform(filled), np.float32)


def _filled(values: NDArray[Any], fill: str) -> NDArray[Any]:
    return np.where(values == "", fill, values).astype(object)


def learned_scaling(
    x: NDArray[np.float32], features: Sequence[Feature], train: NDArray[np.bool_], how: StatisticsBy, scale: bool
) -> Scaling:
    """The values that fill and scale numbers, from the training rows; columns of words are not scaled.

    Columns without a gap have such a value, too: rows that come later may have gaps there.
    """
    numeric = np.array([f.kind != "words" for f in features for _ in range(f.width)], np.bool_)
    rows = x[train].astype(np.float64)
    fill = np.zeros(x.shape[1])
    for column in np.flatnonzero(numeric):
        there = rows[~np.isnan(rows[:, column]), column]
        if len(there):
            fill[column] = np.mean(there) if how == "sums" else np.median(there)
    rows = np.where(np.isnan(rows), fill.astype(np.float32), rows)
    if not scale or not len(rows):
        return Scaling(fill=tuple(fill), mean=(0.0,) * x.shape[1], std=(1.0,) * x.shape[1])
    constant = rows.max(0) == rows.min(0)
    mean, std = rows.mean(0), np.where(constant, 0.0, rows.std(0))
    mean, std = np.where(numeric, mean, 0.0), np.where(numeric, std, 1.0)
    return Scaling(fill=tuple(fill.tolist()), mean=tuple(mean.tolist()), std=tuple(std.tolist()))


def own_scalings(
    x: NDArray[np.float32],
    features: Sequence[Feature],
    train: NDArray[np.bool_],
    client: Ints,
    names: Sequence[str],
    common: Scaling,
    scale: bool,
) -> dict[str, Scaling]:
    """The statistics of each client's own training rows; for columns that these lack, those of all rows."""
    found = {}
    for index, name in enumerate(names):
        mine = train & (client == index)
        if not mine.any():
            continue
        own = learned_scaling(x, features, mine, "own", scale)
        lacks = np.isnan(x[mine]).all(0)
        mixed = {part: np.where(lacks, getattr(common, part), getattr(own, part)) for part in ("fill", "mean", "std")}
        found[name] = Scaling(**{part: tuple(values.tolist()) for part, values in mixed.items()})
    return found


def filled_and_scaled(x: NDArray[np.float32], recipe: Recipe, clients: Sequence[str] | None) -> NDArray[np.float32]:
    """The inputs of a net; ``clients``: the client of each row, if each client has its own scaling."""
    if clients is None or not recipe.own:
        return recipe.scaling.applied(x)
    holders, out = np.array(clients, dtype=object), np.empty_like(x)
    for name in set(clients):
        mine = holders == name
        out[mine] = recipe.own.get(name, recipe.scaling).applied(x[mine])
    return out


# ------------------------------------------------------------------------------------------------- listing


def listed(recipe: Recipe, table: str = "") -> list[str]:
    """How each kind of column is filled, encoded and scaled, in a line."""
    by_kind = {kind: [f for f in recipe.features if f.kind == kind] for kind in ("number", "date", "words")}
    scaled_ = any(s not in (0.0, 1.0) for s in recipe.scaling.std)
    then = {"all": "", "sums": ", from sums", "own": ", by each client"}[recipe.statistics]
    scale = f"mean 0, std 1{then}" if scaled_ else "unscaled"
    gap = "mean" if recipe.statistics == "sums" else "median"
    lines = []
    for kind, word in (("number", "numbers"), ("date", "dates")):
        if by_kind[kind]:
            lines.append(f"{word}: {_several(_gaps(by_kind[kind]))} ({'days, ' * (kind == 'date')}{scale})")
    if any(f.missing for f in by_kind["number"] + by_kind["date"]):
        lines.append(f"a missing number or date becomes the {gap}{then}")
    if by_kind["words"]:
        details = [f"{f.name}{_lacking(f)} ({_vocabulary(f)})" for f in by_kind["words"]]
        lines.append(
            f"words: {_several(details)}; missing values become the most frequent word; "
            "unknown words are encoded as all zeros"
        )
    if recipe.dropped:
        lines.append(f"left out: {_several(list(recipe.dropped))}")
    named = [f"{what} {name}" for what, name in (("label", recipe.label), ("client", recipe.client)) if name]
    lines.append(", ".join([*named, *([f"split {recipe.split}"] if recipe.split else [])]))
    return [f"columns of {table}, {line}" if table else line for line in lines]


def _vocabulary(f: Feature) -> str:
    more = f" and {f.rare} rare ones" if f.rare else ""
    return (", ".join(f.words) if len(f.words) <= 5 else f"{len(f.words)} words") + more or "none"


def _lacking(f: Feature) -> str:
    return f" [{f.missing} missing]" if f.missing else ""


def _gaps(features: Sequence[Feature]) -> list[str]:
    return [f"{f.name}{_lacking(f)}" for f in features]


def _several(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:10])} and {len(names) - 10} more"


# ------------------------------------------------------------------------------------------- for new rows


class SaidBy(NamedTuple):
    """Where the columns of a new table are laid down, in the words of its errors."""

    needs: str
    those: str
    kind: str  # of a column, where {} is


TRAINING = SaidBy("that the model was trained with", "those that the model was trained with", "but had {} in training")
CONTRACT = SaidBy("which the contract requires", "those of the contract", "but the contract has {}")


def refuse_lacking(recipe: Recipe, header: Sequence[str], at: str, by: SaidBy = TRAINING) -> None:
    """One error with every column that a new table lacks."""
    lost = [f.name for f in recipe.features if f.name not in header]
    if lost:
        needed = {recipe.label, recipe.client, recipe.split, *(f.name for f in recipe.features)}
        spare = [name for name in header if name not in needed]  # one of these may be a lost one under another name
        near = {name: hint for name in lost if (hint := nearest(name, spare)).startswith("did")}
        details = ", ".join(f"'{name}'" + (f" ({near[name]})" if name in near else "") for name in lost[:10])
        more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
        more += f" (others in it: {', '.join(spare[:10])})" if spare and len(near) < len(lost) else ""
        raise DataError(f"{at}: lacks columns {by.needs}: {details}{more}")


def refuse_other_kinds(recipe: Recipe, table: RawTable, by: SaidBy = TRAINING) -> None:
    """One error with every column of another kind than the recipe's; an empty column fits any kind."""
    kinds = {f.name: f.kind for f in recipe.features}
    details = []
    for name, column in table.columns.items():
        if (column.fault or column.kind != kinds[name]) and not column.missing.all():
            row = first_other(column, kinds[name], table.comma, recipe.day_first)
            cell = column.values[row] if column.kind == "words" else f"{column.values[row]:.15g}"
            got = f"has {column.kind}, {by.kind.format(kinds[name])} ({table.where(row)}: got '{cell}')"
            details.append(f"  column '{name}': {column.fault or got}")
    if details:
        raise DataError(f"{table.at}: its columns differ from {by.those}\n" + "\n".join(details))


def with_kinds(recipe: Recipe, table: RawTable) -> RawTable:
    """The table, with empty columns in the kind they had in training."""
    columns = dict(table.columns)
    for f in recipe.features:
        if columns[f.name].kind != f.kind:
            empty: Any = "" if f.kind == "words" else math.nan
            columns[f.name] = Column(f.kind, np.full(table.rows, empty, dtype=object if f.kind == "words" else float))
    return table._replace(columns=columns)
