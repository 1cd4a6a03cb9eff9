"""Options and arguments that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedloom.core.errors import ConfigError, Fault

Root = Annotated[Path | None, typer.Option("--data-root", help="The folder of data sets (or set FEDLOOM_DATA).")]
ResultFolders = Annotated[
    list[Path], typer.Argument(metavar="RUN|COMPARISON|FOLDER...", help="Runs, comparisons, or a folder of them.")
]
PageLanguage = Annotated[
    Literal["en", "zh"], typer.Option("--lang", help="The language of the page: English or Chinese.")
]
WithPage = Annotated[bool, typer.Option("--watch", help="Also serve a live page: see fedloom watch.")]
Json = Annotated[bool, typer.Option("--json", help="Print as JSON.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as JSON, as the last line of stdout.")]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N|auto",
        help="Split the clients of a round among N processes on this machine; auto: one for each core, or GPU.",
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run code that the file or folder names, even if you have never run it.")
]
NoUserCode = Annotated[
    bool, typer.Option("--no-user-code", help="Refuse any code outside fedloom (or set FEDLOOM_NO_USER_CODE=1).")
]
Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[EXPERIMENT.toml] [KEY=VALUE]...", help="An experiment file and settings that override it."
    ),
]


def refuse_user_code(wanted: bool) -> None:
    """Refuse any code outside fedloom, if requested."""
    from fedloom.core import usercode

    if wanted:
        usercode.refuse_all()


def file_and_overrides(words: list[str]) -> tuple[Path | None, list[str]]:
    """The experiment file among the command-line arguments, and the settings."""
    together = re.sub(r" *= *", "=", " ".join(words))
    if any(word.startswith("=") for word in words[1:]):
        raise ConfigError([Fault(" ".join(words), "settings are written without spaces", f"write {together}")])
    files = [w for w in words if "=" not in w]
    for word in files:
        if not word.endswith(".toml") and not Path(word).exists():
            raise ConfigError([Fault(word, "no such experiment file", _setting_meant(word))])
    if len(files) > 1:
        raise ConfigError([Fault(files[1], "a second experiment file", "settings are written key=value")])
    return (Path(files[0]) if files else None), [w for w in words if "=" in w]


def refuse_twice(words: list[str]) -> None:
    """Refuse a setting that is given twice: one of its values would be dropped without a word."""
    keys = [word.partition("=")[0].strip() for word in words if "=" in word]
    twice = [key for key in dict.fromkeys(keys) if keys.count(key) > 1]
    if twice:
        raise ConfigError([Fault(key, "is given twice", "name it once") for key in twice])


def _setting_meant(word: str) -> str:
    """A hint at the setting whose value a bare word may be."""
    from fedloom.runs.find import choices_named

    found = choices_named(word)
    return f"did you mean {' or '.join(found)}?" if found else "settings are written key=value"


def is_name(word: str) -> bool:
    """Whether a command-line argument is neither a setting nor a file of settings."""
    return "=" not in word and not word.endswith(".toml")
