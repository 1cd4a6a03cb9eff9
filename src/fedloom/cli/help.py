"""Help as plain text: two repairs of typer 0.20, each to be deleted once typer does without it."""

from __future__ import annotations

from typing import Any

import typer.core


class _Argument(typer.core.TyperArgument):
    """click 8.5 deletes the help of an argument that typer has given it."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.help = given.get("help")


def repair() -> None:
    """Show the help of arguments, and ``[required]`` instead of the escaped ``\\[required]``."""
    typer.core.HAS_RICH = False  # typer escapes for rich's markup, although help has none
    typer.main.TyperArgument = _Argument  # type: ignore[attr-defined]
