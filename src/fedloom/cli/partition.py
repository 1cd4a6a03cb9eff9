"""``fedloom partition``: split a data set among clients and describe the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedloom.cli.console import plain_console
from fedloom.cli.options import NoUserCode, Root, Settings, Trust, file_and_overrides, is_name, refuse_user_code
from fedloom.core.disk import as_name
from fedloom.core.errors import ConfigError, Fault
from fedloom.report.words import plural


def partition(
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(help="Draw the picture here (.png, .svg or .pdf).")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
    data_root: Root = None,
) -> None:
    """Split a data set among clients and show how unequal it is.

    A bare name is a partition: fedloom partition shards data=cifar10 partition.clients=100
    """
    from fedloom.data.files import default_root
    from fedloom.report import partition as report
    from fedloom.runs.prepare import share
    from fedloom.runs.start import load_config

    refuse_user_code(no_user_code)
    names = [word for word in settings or [] if is_name(word)]
    if len(names) > 1:
        fix = f"draw one after the other, or name one: fedloom partition {names[0]}"
        raise ConfigError([Fault(names[1], f"a second partition, after '{names[0]}'", fix)])
    words = [f"partition.kind={w}" if is_name(w) else w for w in settings or []]
    experiment = load_config(*file_and_overrides(words), trust=trust)
    shared = share(experiment, data_root or default_root())
    described = shared.described()
    picture = out or Path(as_name(f"partition-{experiment.kinds['partition']}-{shared.arrays.name}.png"))
    title = f"{shared.arrays.name}, {experiment.kinds['partition']}, {plural(shared.clients, 'client')}"
    report.draw(shared.labels, shared.owner, shared.clients, shared.arrays.labels, picture, title, shared.names)
    if json_:
        print(json.dumps(described | {"picture": str(picture)}))
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in report.table(shared.summary()):
        table.add_row(name, value)
    console = plain_console()
    console.print(table)
    for note in shared.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"fingerprint {described['sha256'][:16]}", highlight=False)
    console.print(f"drawn in {picture}", highlight=False, markup=False)
