"""Tables: CSV files of any dialect, Parquet files and DataFrames, read into columns of numbers, words and dates.

Nothing is filled, scaled or left out here: ``data/columns.py`` fills, encodes and scales the columns.
"""

from __future__ import annotations

import codecs
import csv
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedloom.core.errors import DataError, nearest
from fedloom.data.files import Place, existing, reading, within, words_of

ColumnKind: TypeAlias = Literal["number", "words", "date"]

# Cells that mean a missing value, as spreadsheets and statistics packages write them.
MISSING = frozenset({"", "NA", "N/A", "n/a", "#N/A", "#NA", "NaN", "nan", "NULL", "null", "None", "<NA>", "?"})
_BLOCK = 4096  # rows that are converted together
_DELIMITERS = ",;\t|"


class Column(NamedTuple):
    """One column: numbers and days as float64 with NaN for a missing value, words as text with '' for it."""

    kind: ColumnKind
    values: NDArray[Any]
    fault: str = ""  # why the column cannot be used
    day_first: bool | None = None  # how its dates such as 03/04/2024 are read, if it has any
    code: str = ""  # a number that begins with zeros, as codes do

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Which rows lack a value."""
        found: NDArray[np.bool_] = self.values == "" if self.kind == "words" else np.isnan(self.values)
        return found


class RawTable(NamedTuple):
    """A table as read."""

    at: str  # its name in messages
    columns: dict[str, Column]  # those that may be features, in the order of the file
    named: dict[str, NDArray[Any]]  # those that describe a row, as written
    where: Place
    rows: int
    notes: tuple[str, ...] = ()  # what had to be guessed about the file
    comma: bool = False  # whether 3,5 may be a number


class ColumnChoice(NamedTuple):
    """What to read: columns that describe a row, features, and how to interpret cells."""

    named: tuple[str, ...]  # read as written
    drop: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # empty: all others
    words: tuple[str, ...] = ()  # columns of words even if these look like numbers
    day_first: bool | None = None  # how to read dates such as 03/04/2024; None: inferred from others in the column
    plain: bool = False  # the named columns may lack values, which are read as ''


def feature_names(header: Sequence[str], wanted: ColumnChoice, at: str) -> list[str]:
    """The columns that are read as features; a DataError for unknown or repeated names."""
    for index, name in enumerate(header):
        if not name:
            raise DataError(
                f"{at}: column {index + 1} has no name (name it, or delete it; pandas writes no index with index=False)"
            )
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{at}: column '{twice[0]}' occurs twice")
    asked = {"named": wanted.named}
    asked |= {"drop": wanted.drop, "features": wanted.features, "words": wanted.words}
    lost = [(field, name) for field, names in asked.items() for name in names if name not in header]
    if lost:
        listed = "; ".join(f"'{name}'{_said_by(field)} ({nearest(name, header)})" for field, name in lost)
        raise DataError(f"{at}: has no column {listed}")
    rest = [name for name in header if name not in (*wanted.named, *wanted.drop)]
    rest = [name for name in rest if name in wanted.features] if wanted.features else rest
    if not rest:
        raise DataError(f"{at}: has no column of features in addition to {', '.join(header)}")
    return rest


def _said_by(field: str) -> str:
    return "" if field == "named" else f", named by data.{field}"


# -------------------------------------------------------------------------------------------------- CSV


class Dialect(NamedTuple):
    """How a text file writes a table."""

    encoding: str
    delimiter: str

    @property
    def comma(self) -> bool:
        """Whether 3,5 may be a number: a comma separates no cells."""
        return self.delimiter == ";"

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about it."""
        found = [] if self.encoding == "utf-8-sig" else [f"read as {self.encoding}, since it is not UTF-8"]
        odd = {";": "semicolons", "\t": "tabs", "|": "bars"}.get(self.delimiter)
        return (*found, f"cells are separated by {odd}") if odd else tuple(found)


def read_csv(path: Path, wanted: ColumnChoice, limit: float = math.inf) -> RawTable:
    """The table in a CSV file with a header line, with any separator and encoding."""
    dialect = _dialect(existing(path))
    words = set(wanted.words)
    while True:  # a column that turns out to contain words is read again as such: twice at most
        read = _Reader(path, dialect, wanted, words, limit)
        turned = read.all()
        if not turned:
            return read.table()
        words |= turned


def csv_header(path: Path) -> list[str]:
    """The names of the columns of a CSV file."""
    return _header(path, _records(path, _dialect(existing(path))))


def _header(path: Path, records: Iterator[tuple[int, list[str]]]) -> list[str]:
    """The names in the first record."""
    names = [name.strip() for name in next(records, (0, []))[1]]
    if not names:
        raise DataError(f"{path}: is empty (its first line must name the columns)")
    if names[0].lower().startswith("sep="):
        raise DataError(
            f"{path}: its first line, {names[0]}, is for Excel and must be deleted (the next one names columns)"
        )
    return names


def _dialect(path: Path) -> Dialect:
    with reading(path), path.open("rb") as file:
        head = file.read(4)
        file.seek(0)
        if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            encoding = "utf-16"
        else:
            encoding = "utf-8-sig" if _is_utf8(file) else "cp1252"
        file.seek(0)
        first = file.readline().decode(encoding, errors="replace") if encoding != "utf-16" else ""
    if encoding == "utf-16":
        with reading(path), path.open(encoding=encoding) as text:
            first = text.readline()
    outside = re.sub(r'"[^"]*"', "", first)
    counts = {mark: outside.count(mark) for mark in _DELIMITERS}
    return Dialect(encoding, max(_DELIMITERS, key=lambda mark: counts[mark]))  # a comma, if there is none of them


def _is_utf8(file: Any) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while block := file.read(1 << 20):
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _records(path: Path, dialect: Dialect) -> Iterator[tuple[int, list[str]]]:
    """Each record with the number of the line it ends on; a blank line is no record."""
    with reading(path), path.open(encoding=dialect.encoding, newline="") as file:
        reader = csv.reader(file, strict=True, delimiter=dialect.delimiter)
        try:
            yield from ((reader.line_num, row) for row in reader if row)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: is not well-formed CSV: {error}") from error


class _Reader:
    """Reads a CSV file block by block, so that a table of numbers takes only the memory of its numbers."""

    def __init__(self, path: Path, dialect: Dialect, wanted: ColumnChoice, words: set[str], limit: float) -> None:
        self._path, self._dialect, self._wanted, self._limit = path, dialect, wanted, limit
        self._records = _records(path, dialect)
        self._header = _header(path, self._records)
        self._features = feature_names(self._header, wanted, str(path))
        self._words = words
        self._parts: dict[str, list[NDArray[Any]]] = {name: [] for name in self._features}
        self._named: dict[str, list[str]] = {name: [] for name in wanted.named}
        self._lines: list[int] = []
        self._turned: set[str] = set()  # columns in which a cell is not a number
        self._has_commas = False  # whether some number has a decimal comma
        self._pointed: dict[str, str] = {}  # columns whose only points may be those of thousands, and a cell of each
        self._decimal: set[str] = set()  # columns with a decimal point or comma
        self._codes: dict[str, str] = {}  # columns with numbers that begin with zeros, and a cell of each

    def all(self) -> set[str]:
        """Read every row; returns the columns that turned out to contain words and must be read again."""
        block: list[list[str]] = []
        for line, row in self._records:
            if len(row) != len(self._header):
                at = f"{self._path}, line {line}"
                raise DataError(f"{at}: has {len(row)} cells where the header has {len(self._header)}")
            block.append(row)
            self._lines.append(line)
            if len(block) == _BLOCK:
                self._take(block)
                block = []
        self._take(block)
        if not self._lines:
            raise DataError(f"{self._path}: has a header but no rows")
        return self._turned

    def _take(self, block: list[list[str]]) -> None:
        for name, parts in self._parts.items():
            spot = self._header.index(name)
            cells = [row[spot].strip() for row in block]
            if name in self._words:
                parts.append(np.array(["" if cell in MISSING else cell for cell in cells], dtype=object))
            elif name not in self._turned:
                numbers = as_numbers(cells, comma=self._dialect.comma)
                if numbers is None:
                    self._turned.add(name)
                else:
                    parts.append(numbers)
                    self._codes[name] = self._codes.get(name) or _code_among(cells, numbers)
                    if self._dialect.comma:
                        self._look_at_points(name, cells)
        for name, column in self._named.items():
            column.extend(row[self._header.index(name)].strip() for row in block)
        within(self._limit, 8 * len(self._lines) * len(self._features), str(self._path))

    def _look_at_points(self, name: str, cells: Sequence[str]) -> None:
        """Remember whether 1.753 may mean 1753 in this column."""
        for cell in cells:
            if "," in cell:
                self._has_commas = True
                self._decimal.add(name)
            elif "." in cell and name not in self._decimal:
                if _POINTED.fullmatch(cell):
                    self._pointed.setdefault(name, cell)
                else:
                    self._decimal.add(name)

    def table(self) -> RawTable:
        where: Place = lambda row: f"{self._path}, line {self._lines[row]}"  # noqa: E731
        columns = {}
        for name, parts in self._parts.items():
            values = np.concatenate(parts) if parts else np.zeros(0)
            forced = name in self._wanted.words
            column = typed(values, where, forced, self._wanted.day_first, self._dialect.comma)
            columns[name] = column._replace(code=self._codes.get(name, "")) if column.kind == "number" else column
            if self._has_commas and name in self._pointed and name not in self._decimal:
                cell = self._pointed[name]
                why = f"a point may separate thousands where other columns have decimal commas (got {cell!r})"
                columns[name] = columns[name]._replace(fault=f"{why}; write {cell.replace('.', '')} or {_comma(cell)}")
        named = {name: words_of(cells, f"word in column '{name}'", where) for name, cells in self._named.items()}
        return RawTable(
            str(self._path), columns, named, where, len(self._lines), self._dialect.notes, self._dialect.comma
        )


def as_numbers(cells: Sequence[str], *, comma: bool = False) -> NDArray[np.float64] | None:
    """Cells as numbers, NaN for missing ones; None if a cell is not a number. ``comma``: 3,5 is a number, too."""
    try:
        return np.array([math.nan if cell in MISSING else _float(cell, comma) for cell in cells], np.float64)
    except ValueError:
        return None


def _float(cell: str, comma: bool) -> float:
    if "_" in cell:  # Python reads 0_7 as 7, but in a table it is a code
        raise ValueError(cell)
    return float(_with_point(cell) if comma else cell)


def _code_among(cells: Sequence[Any], numbers: NDArray[np.float64]) -> str:
    """The first of whole numbers that begins with zeros, such as 007: as a number it loses them; '' if none does."""
    if (np.floor(numbers) < numbers).any():
        return ""
    return next((cell for cell in cells if cell and cell[0] == "0" and cell.isdigit() and cell.strip("0")[:1]), "")


def with_points(cells: NDArray[Any]) -> NDArray[Any]:
    """Cells as written, but numbers with a decimal point where they have a decimal comma."""
    return np.array([_with_point(str(cell)) for cell in cells.tolist()])


def _with_point(cell: str) -> str:
    return cell.replace(",", ".") if re.fullmatch(r"[-+]?\d+,\d+", cell) else cell


# ------------------------------------------------------------------------------- the kinds of columns


def typed(values: NDArray[Any], where: Place, forced: bool, day_first: bool | None, comma: bool = False) -> Column:
    """A column with its kind: numbers are numbers; words are dates, words, or numbers with mistakes in them."""
    if forced and values.dtype == object:
        return Column("words", values)
    # DataFrames also hold numbers as text, and as objects such as Decimal.
    numbers = as_numbers(values.tolist(), comma=comma) if values.dtype == object else values
    if numbers is not None:
        with np.errstate(over="ignore"):
            bad = np.isinf(numbers.astype(np.float32))
        row = int(np.argmax(bad))
        fault = f"{where(row)}: is not a finite number (got {numbers[row]:g})" if bad.any() else ""
        return Column(
            "number", numbers, fault, code=_code_among(values.tolist(), numbers) if values.dtype == object else ""
        )
    present = [(row, word) for row, word in enumerate(values.tolist()) if word]
    days = _days(values, day_first)
    if days is not None:
        return days
    no_numbers = [(row, word) for row, word in present if as_numbers([word], comma=comma) is None]
    no_dates = [(row, word) for row, word in present if not _is_date(word, day_first)]
    for odd, what in ((no_numbers, "number"), (no_dates, "date")):
        if odd and 2 * len(odd) <= len(present):
            row, word = odd[0]
            more = f", and {len(odd) - 1} more" if len(odd) > 1 else ""
            return Column("words", values, f"{where(row)}: is not a {what} (got {word!r}{more})")
    if what := _written_for_people([word for _, word in present], comma):
        row, word = no_numbers[0]
        return Column("words", values, f"{where(row)}: has {what} (got {word!r})")
    return Column("words", values)


# Numbers that are written for people.
_POINTED = re.compile(r"[-+]?[1-9]\d{0,2}(\.\d{3})+")
_UNIT = "numbers with a unit"
_DAY, _YEAR = r"(0?[1-9]|[12]\d|3[01])", r"(19|20)\d\d"  # a day or a month; 97-51-3791 is a code
_WRITTEN = {
    "numbers with thousands separators": re.compile(r"[-+]?\d{1,3}([.,' ]\d{3})+([.,]\d+)?"),
    "numbers with decimal commas, which are read only where semicolons separate cells": re.compile(r"[-+]?\d+,\d+"),
    _UNIT: re.compile(r"[-+]?\d+([.,]\d+)? ?[a-zA-Zµ%°/]{1,8}"),
    "dates with years of two digits": re.compile(rf"{_DAY}[./-]{_DAY}[./-]\d\d"),
    "dates in a form other than 2024-03-31": re.compile(
        rf"({_DAY}[./-]{_DAY}[./-]{_YEAR}|{_YEAR}[./-]{_DAY}[./-]{_DAY})([ T]+\d{{1,2}}:\d\d.*)?"
        rf"|{_DAY}[. -]{{1,2}}[^\W\d_]{{3,9}}[., -]{{1,2}}({_YEAR}|\d\d)|[^\W\d_]{{3,9}} {_DAY}, ?{_YEAR}"
    ),
}
_MANY_WORDS = 20  # categories such as 10 mg and 20 mg are fewer


def _written_for_people(words: Sequence[str], comma: bool) -> str:
    """What keeps a column of numbers, or dates, from being one; empty if its words are words."""
    distinct = set(words)
    odd = {word for word in distinct if as_numbers([word], comma=comma) is None}
    if len(distinct) <= _MANY_WORDS or not odd:
        return ""
    what = next((what for what, form in _WRITTEN.items() if all(map(form.fullmatch, odd))), "")
    is_code = what == _UNIT and len({word.lstrip("+-0123456789.,' ") for word in odd}) > 2  # 12A, 7B and 31C
    return "" if is_code else what


def _comma(number: str) -> str:
    """A number whose last point becomes a decimal comma."""
    whole, _, rest = number.rpartition(".")
    return f"{whole.replace('.', '')},{rest}"


_ISO = re.compile(r"\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)?Z?)?")
_POINTS = re.compile(r"(\d{1,2})\.(\d{1,2})\.(\d{4})")
_SLASHES = re.compile(r"(\d{1,2})/(\d{1,2})/(\d{4})")
_YEAR_FIRST = re.compile(r"(\d{4})/(\d{1,2})/(\d{1,2})")


def _days(values: NDArray[Any], day_first: bool | None) -> Column | None:
    """A column of dates as days since 1970; None if it contains anything else."""
    distinct = sorted({word for word in values.tolist() if word})
    if not distinct:
        return None
    slashed = [found for word in distinct if (found := _SLASHES.fullmatch(word))]
    if day_first is None and slashed:
        first, second = (max(int(found[k]) for found in slashed) for k in (1, 2))
        day_first = first > 12 if first > 12 or second > 12 else None
    try:
        day = {word: _day(word, bool(day_first)) for word in distinct}
    except ValueError:
        return None
    if slashed and day_first is None:
        what = f"may mean day/month or month/day (got {slashed[0][0]}); set data.day_first to true or false"
        return Column("words", values, what)
    days = np.array([day[word] if word else math.nan for word in values.tolist()], np.float64)
    return Column("date", days, day_first=day_first if slashed else None)


def _is_date(word: str, day_first: bool | None) -> bool:
    """Whether a word is a date, for one way of reading 03/04/2024, or for either."""
    for way in (True, False) if day_first is None else (day_first,):
        with suppress(ValueError):
            _day(word, way)
            return True
    return False


def first_other(column: Column, kind: ColumnKind, comma: bool, day_first: bool | None) -> int:
    """The first row whose word is neither missing nor of this kind; 0 if there is none."""
    for row, word in enumerate(column.values.tolist() if column.kind == "words" else []):
        fits = as_numbers([word], comma=comma) is not None if kind == "number" else _is_date(word, day_first)
        if word and not fits:
            return row
    return 0


def _day(word: str, day_first: bool) -> float:
    if _ISO.fullmatch(word):
        plain = word.removesuffix("Z")
    elif found := _POINTS.fullmatch(word):
        plain = f"{found[3]}-{int(found[2]):02d}-{int(found[1]):02d}"
    elif found := _YEAR_FIRST.fullmatch(word):
        plain = f"{found[1]}-{int(found[2]):02d}-{int(found[3]):02d}"
    elif found := _SLASHES.fullmatch(word):
        day, month = (found[1], found[2]) if day_first else (found[2], found[1])
        plain = f"{found[3]}-{int(month):02d}-{int(day):02d}"
    else:
        raise ValueError(word)
    return float(np.datetime64(plain, "s").astype(np.int64)) / 86_400


# -------------------------------------------------------------------------------- Parquet and DataFrames


def read_parquet(path: Path, wanted: ColumnChoice, limit: float = math.inf) -> RawTable:
    """The table in a Parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow (pip install 'fedloom[parquet]')") from error
    try:
        with pq.ParquetFile(existing(path)) as file:
            meta = file.metadata  # a few bytes can encode very many rows of one value
            groups = [meta.row_group(k).total_byte_size for k in range(meta.num_row_groups)]
            within(limit, max(sum(groups), meta.num_rows * meta.num_columns), str(path))
            batches, size = [], 0
            for batch in file.iter_batches():
                size += batch.nbytes
                within(limit, size, str(path))
                batches.append(batch)
            table = pa.Table.from_batches(batches, file.schema_arrow)
            table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, NotImplementedError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    # pandas stores its row index as such a column; it is not a feature
    names = [name for name in table.column_names if not name.startswith("__index_level_")]
    return _of_arrow(table.select(names), str(path), wanted)


def parquet_header(path: Path) -> list[str]:
    """The names of the columns of a Parquet file."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        names = pq.read_schema(existing(path)).names
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow (pip install 'fedloom[parquet]')") from error
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error
    return [name for name in names if not name.startswith("__index_level_")]


def table_of_frame(frame: Any, wanted: ColumnChoice, name: str = "DataFrame") -> RawTable:
    """The table of a pandas DataFrame."""
    where: Place = lambda row: f"{name}, row {row}"  # noqa: E731
    header = [str(column) for column in frame.columns]
    features = feature_names(header, wanted, name)
    if not len(frame):
        raise DataError(f"{name}: has no rows")
    cells = {column: frame.iloc[:, index] for index, column in enumerate(header)}
    columns = {each: _frame_column(cells[each], where, each in wanted.words, wanted) for each in features}
    named = {}
    for each in wanted.named:
        if wanted.plain:
            cells[each] = cells[each].astype(object).where(~cells[each].isna(), "")
        elif cells[each].isna().any():
            row = int(np.argmax(cells[each].isna().to_numpy()))
            raise DataError(f"{where(row)}, column '{each}': is missing (fill it or drop the row)")
        named[each] = words_of(cells[each].tolist(), f"word in column '{each}'", where)
    return RawTable(name, columns, named, where, len(frame))


def _frame_column(cells: Any, where: Place, forced: bool, wanted: ColumnChoice) -> Column:
    kind = getattr(cells.dtype, "kind", "O")
    if kind in "biuf" and not forced:
        return typed(cells.to_numpy(dtype=np.float64, na_value=math.nan), where, False, None)
    missing = cells.isna().to_numpy()
    if kind == "M":
        days = cells.dt.tz_localize(None).to_numpy("datetime64[s]").astype(np.int64) / 86_400
        return Column("date", np.where(missing, math.nan, days))
    words = [
        "" if lacks or str(cell).strip() in MISSING else str(cell).strip()
        for cell, lacks in zip(cells.tolist(), missing.tolist(), strict=True)
    ]
    forced = forced or str(cells.dtype) == "category"
    return typed(np.array(words, dtype=object), where, forced, wanted.day_first)


def _of_arrow(table: Any, at: str, wanted: ColumnChoice) -> RawTable:
    features = feature_names(table.column_names, wanted, at)
    if not table.num_rows:
        raise DataError(f"{at}: has no rows")
    where: Place = lambda row: f"{at}, row {row}"  # noqa: E731
    columns = {name: _arrow_column(table[name], where, name in wanted.words, wanted) for name in features}
    named = {name: _named(table[name], name, at, where, wanted.plain) for name in wanted.named}
    return RawTable(at, columns, named, where, table.num_rows)


def _arrow_column(cells: Any, where: Place, forced: bool, wanted: ColumnChoice) -> Column:
    import pyarrow as pa

    kind = cells.type
    if pa.types.is_dictionary(kind):
        cells, forced = cells.cast(kind.value_type), True
        kind = cells.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or forced:
        words = [
            "" if cell is None or str(cell).strip() in MISSING else str(cell).strip() for cell in cells.to_pylist()
        ]
        return typed(np.array(words, dtype=object), where, forced, wanted.day_first)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        seconds = cells.cast(pa.timestamp("us", tz=getattr(kind, "tz", None))).cast(pa.int64())
        return Column("date", _floats(seconds) / 86_400e6)
    if pa.types.is_decimal(kind):
        return typed(_floats(cells.cast(pa.float64())), where, False, None)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind):
        return typed(_floats(cells), where, False, None)
    return Column("words", np.full(len(cells), "", dtype=object), f"must contain numbers, words or dates (got {kind})")


def _floats(cells: Any) -> NDArray[np.float64]:
    if not cells.null_count:
        return np.asarray(cells.to_numpy(), np.float64)
    return np.array([math.nan if cell is None else cell for cell in cells.to_pylist()], np.float64)


def _named(cells: Any, name: str, at: str, where: Place, plain: bool) -> NDArray[Any]:
    import pyarrow as pa

    if plain and cells.null_count:
        return np.array(["" if cell is None else str(cell) for cell in cells.to_pylist()], dtype=object)

    if pa.types.is_nested(cells.type):
        raise DataError(f"{at}, column '{name}': must contain one value in each row (got {cells.type})")
    if cells.null_count:
        row = int(np.argmax(cells.is_null().to_numpy()))
        raise DataError(f"{where(row)}, column '{name}': is missing (fill it or drop the row)")
    with reading(Path(at)):
        return words_of(cells.to_pylist(), f"word in column '{name}'", where)
