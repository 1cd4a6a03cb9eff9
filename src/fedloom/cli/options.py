"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedloom.core.errors import ConfigError, Fault

Root = Annotated[Path | None, typer.Option("--data-root", help="Where data sets lie (or set FEDLOOM_DATA).")]
ResultFolders = Annotated[
    list[Path], typer.Argument(metavar="RUN|COMPARISON|FOLDER...", help="Runs, comparisons, or a folder of them.")
]
Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as JSON, as the last line of stdout.")]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N|auto",
        help="Share out the clients over N processes on this machine; auto: one for each core, or GPU.",
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that the file or folder names, though you have not run it before.")
]
NoUserCode = Annotated[
    bool, typer.Option("--no-user-code", help="Refuse all code but fedloom's own (or set FEDLOOM_NO_USER_CODE=1).")
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[EXPERIMENT.toml] [KEY=VALUE]...", help="An experiment file and settings that override it."
    ),
]


def refuse_user_code(wanted: bool) -> None:
    """Refuse all code but fedloom's own, if wanted."""
    from fedloom.core import usercode

    if wanted:
        usercode.refuse_all()


def file_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """The experiment file among the words of a command line, and the settings."""
    files = [w for w in words if "=" not in w]
    if len(files) > 1:
        raise ConfigError([Fault(files[1], "a second experiment file", "settings are written key=value")])
    return (Path(files[0]) if files else None), [w for w in words if "=" in w]


def is_name(word: str) -> bool:
    """Whether a word of a command line is neither a setting nor a file of settings."""
    return "=" not in word and not word.endswith(".toml")
