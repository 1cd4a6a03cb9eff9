"""Help as plain text: four repairs of typer 0.20, each to be deleted once typer does without it."""

from __future__ import annotations

from typing import Any

import click
import typer.core


class _Argument(typer.core.TyperArgument):
    """click 8.5 deletes the help of an argument that typer has given it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.help = given.get("help")


def _nothing(self: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """typer lists the arguments with the options; click 8.5 would list them once more."""


def repair() -> None:
    """Show the help of arguments, once, and ``[required]`` instead of the escaped ``\\[required]``.

    Commands near an unknown one are named once, by click, which typer would repeat.
    """
    typer.core.HAS_RICH = False  # typer escapes for rich's markup, although help has none
    typer.main.TyperArgument = _Argument  # type: ignore[attr-defined]
    typer.core.TyperCommand.format_arguments = _nothing  # type: ignore[method-assign]
    if hasattr(click.exceptions, "NoSuchCommand"):  # since click 8.4
        typer.core.TyperGroup.resolve_command = click.Group.resolve_command  # type: ignore[method-assign]
