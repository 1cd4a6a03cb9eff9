"""What `fedloom deploy` and `fedloom peers` share: options, a node's own data, and lines of progress."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.cli.console import harmless
from fedloom.cli.options import file_and_overrides
from fedloom.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from fedloom.runs.settings import Config

OwnData = Annotated[
    list[str] | None,
    typer.Argument(metavar="data=FILE", help="Its data; data=experiment: its share of the experiment's data."),
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
