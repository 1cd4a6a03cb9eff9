"""The console of every command."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    """A console that prints names as they are: ``loaders.py:three:`` must not become an emoji, nor ``[b]`` a style."""
    return Console(highlight=False, markup=False, emoji=False, **options)
