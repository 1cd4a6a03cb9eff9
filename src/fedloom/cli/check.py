"""``fedloom check``: the laws that every algorithm obeys."""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fedloom import __version__
from fedloom.core.disk import as_name
from fedloom.core.errors import ConfigError, Fault, FedloomError
from fedloom.runs.launch import follow_parent


def check(
    algorithm: Annotated[str, typer.Argument(help="A name, file.py, file.py:Class or package.module:Class.")],
    json_: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Put an algorithm, yours or ours, to the laws that every algorithm here obeys."""
    from fedloom.engine import laws
    from fedloom.runs.find import find_algorithm

    own_code(no_user_code, algorithm)
    cls = find_algorithm(algorithm, "algorithm")
    verdicts = [(law, laws.verdict(law, cls)) for law in laws.LAWS]
    broken = [law for law, fault in verdicts if fault]
    if json_:
        print(json.dumps({law.__name__: fault or "holds" for law, fault in verdicts}))
    else:
        for law, fault in verdicts:
            print(f"{'BROKEN' if fault else 'holds ':6}  {laws.title(law)}" + (f"\n        {fault}" if fault else ""))
        print(f"\n{len(verdicts) - len(broken)} of {len(verdicts)} laws hold for {algorithm}")
    if broken:
        raise typer.Exit(1)
