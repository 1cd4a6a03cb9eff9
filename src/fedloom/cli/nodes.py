"""What `fedloom deploy` and `fedloom peers` share: a node's own data, the data root, and lines of progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedloom.cli.console import harmless
from fedloom.core.errors import ConfigError, Fault

OwnData = Annotated[
    list[str] | None,
    typer.Argument(metavar="data=FILE", help="Its data; data=experiment: its share of the experiment's data."),
]


def own_data(words: list[str] | None) -> str:
    """The file that ``data=FILE`` names; empty without this argument."""
    data = ""
    for word in words or []:
        key, equals, value = word.partition("=")
        if key != "data" or not equals or not value:
            raise ConfigError([Fault(word, "is not understood", "data=FILE")])
        data = value
    return data


def root_or_default(given: Path | None) -> Path:
    from fedloom.data.files import default_root

    return given or default_root()


def say(line: str) -> None:
    """A line of progress; results go to stdout."""
    print(harmless(line), file=sys.stderr, flush=True)
