"""The console of every command."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# Control characters except newlines and tabs, characters that change the direction of text, and lone surrogates.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Untrusted text without terminal control sequences."""
    return _COMMANDS.sub("\ufffd", text)


def in_one_line(text: str) -> str:
    """The same where line breaks are untrusted, too: words and columns of a table may contain them."""
    return harmless("\ufffd".join(text.splitlines()))


class _Harmless(Console):
    """A console that writes no control sequences except its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))

    def on_broken_pipe(self) -> None:
        """Whoever read this has gone (``| head``): print nothing more, instead of ending a run that nobody watches."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())  # where the interpreter flushes the rest at exit
        os.close(nowhere)


def plain_console(**options: Any) -> Console:
    """A console that prints names as they are: ``loaders.py:three:`` must not become an emoji, nor ``[b]`` a style."""
    return _Harmless(highlight=False, markup=False, emoji=False, **options)
