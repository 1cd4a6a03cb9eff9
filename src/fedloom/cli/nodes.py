"""What `fedloom deploy` and `fedloom peers` share: options, a node's own data, and lines of progress."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedloom.cli.console import harmless, in_one_line, plain_console
from fedloom.cli.options import file_and_overrides
from fedloom.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from fedloom.data.column_check import ColumnCheck
    from fedloom.deploy.ends import OwnRows
    from fedloom.runs.settings import Config

OwnData = Annotated[
    list[str] | None,
    typer.Argument(metavar="data=FILE", help="Its data; data=experiment: its share of the experiment's data."),
]

CheckData = Annotated[
    bool, typer.Option("--check", help="Only compare the columns of its table with the contract, and end.")
]

NodeCount = Annotated[int, typer.Option(min=2, max=64, help="How many nodes.")]
NewFolder = Annotated[Path | None, typer.Option(help="The folder to make; by default a new one below runs/.")]


def own_data(words: list[str] | None) -> str:
    """The file that ``data=FILE`` names; empty without this argument."""
    data = ""
    for word in words or []:
        key, equals, value = word.partition("=")
        if key != "data" or not equals or not value:
            raise ConfigError([Fault(word, "is not understood", "data=FILE")])
        data = value
    return data


def show_columns(own: OwnRows) -> None:
    """Print how the columns of a node's table compare with the contract's, and what is suspicious."""
    from fedloom.data.column_check import suspicions

    print(f"{own.train} training rows and {own.test} test rows")
    if not own.checks:
        print("its data has no columns to compare, or is a part of the experiment's own")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("column")
    for head in ("missing", "unknown words", "mean", "shift", "spread"):
        table.add_column(head, justify="right")
    for check in own.checks:
        shares = f"{check.missing:.1%}", f"{check.unknown:.1%}" if check.kind == "words" else ""
        numbers = ("" if math.isnan(x) else f"{x:.4g}" for x in (check.shift, check.spread))
        table.add_row(in_one_line(check.name), *shares, mean_of(check), *numbers)
    plain_console().print(table)
    if not all(math.isnan(check.shift) for check in own.checks):
        print("shift and spread: mean and deviation after scaling, expected near 0 and 1")
    for line in suspicions(own.checks):
        print(in_one_line(f"note: {line}"))


def mean_of(check: ColumnCheck) -> str:
    """The mean of a column as its owner writes such values: of dates, a date."""
    import numpy as np

    if math.isnan(check.mean):
        return ""
    return str(np.datetime64(round(check.mean), "D")) if check.kind == "date" else f"{check.mean:.4g}"


def settings_and_folder(words: list[str] | None, out: Path | None, *, of: str, trust: bool) -> tuple[Config, Path]:
    """The experiment, and the folder in which all of its nodes run on this machine."""
    from fedloom.runs.folder import unused
    from fedloom.runs.start import load_config

    config = load_config(*file_and_overrides(words or []), trust=trust)
    return config, out or unused(Path("runs") / f"{of}-{config.kinds['algorithm']}")


def root_or_default(given: Path | None) -> Path:
    from fedloom.data.files import default_root

    return given or default_root()


def say(line: str) -> None:
    """A line of progress; results go to stdout."""
    print(harmless(line), file=sys.stderr, flush=True)
