"""``fedloom predict``: the models of a finished run on new rows."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.cli.console import in_one_line
from fedloom.cli.options import NoUserCode, Trust, refuse_user_code
from fedloom.core import disk
from fedloom.core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from fedloom.data.new_rows import NewRows
    from fedloom.runs.load import Predictor

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]
Data = Annotated[Path, typer.Argument(metavar="DATA", help="A .csv, .parquet or .npz file, or a folder of images.")]
Client = Annotated[str | None, typer.Option(help="Use the model of this client, by its name.")]
ByClient = Annotated[
    bool, typer.Option("--by-client", help="Each row by the model of the client that the table names for it.")
]


def predict(
    run: Run,
    data: Data,
    out: Annotated[Path, typer.Option(help="Write the predictions here, as CSV.")] = Path("predictions.csv"),
    client: Client = None,
    by_client: ByClient = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Predict the classes of new rows with the models of a run.

    The common model predicts, unless a client is chosen. Columns that are not features (such as patient numbers)
    are copied to the front.
    """
    refuse_user_code(no_user_code)
    if os.path.realpath(out) == os.path.realpath(data):  # which a link to itself does not upset
        raise ConfigError([Fault("--out", f"{out} is the file to predict", "choose another")])
    from fedloom.report.words import plural
    from fedloom.runs.look import refuse_file_of_run

    refuse_file_of_run(out)
    models = chosen(run, client, by_client=by_client, trust=trust)
    rows = models.rows(data)
    by_client = each_by_its_client(models, rows, client, by_client)
    lines = predicted_lines(models, rows, by_client=by_client)
    disk.write_result(out, as_csv(lines).encode())
    whose = (
        "each client's model" if by_client else f"the model of {models.owner}" if models.owner else "the common model"
    )
    print(f"{plural(len(lines) - 1, 'row')} predicted by {whose}: {out}")
    print_notes(rows.notes)


def print_notes(notes: Sequence[str]) -> None:
    """Print what is suspicious about new rows; not to stdout, which may be read by a program."""
    for note in notes:
        print(in_one_line(f"note: {note}"), file=sys.stderr)


def chosen(run: Path, client: str | None, *, by_client: bool, trust: bool) -> Predictor:
    """The models of a run, or the model of one client."""
    from fedloom.runs.load import load

    if client is not None and by_client:
        raise ConfigError([Fault("--client", "is one model, --by-client is several", "choose one")])
    models = load(run, trust=trust)
    return models if client is None else models.client(client)


def each_by_its_client(models: Predictor, rows: NewRows, client: str | None, asked: bool) -> bool:
    """Whether each row is predicted by its client's model: on request, or if that is the only way and rows name one."""
    return asked or (client is None and not models.has_common_model and rows.clients is not None)


def predicted_lines(models: Predictor, rows: NewRows, *, by_client: bool) -> list[list[Any]]:
    """A header, and for each row its copied columns, its class, and the probability of every class."""
    words = models.predict(rows, by_client=by_client)
    chances = [()] * len(words) if models.is_regression else models.predict_proba(rows, by_client=by_client)
    said = [str(number) for number in words.astype("float32")] if models.is_regression else words.tolist()
    ours = ["prediction", *(f"p({label})" for label in models.labels)]
    lines: list[list[Any]] = [["row", *copied_names([*rows.beside], {"row", *ours}), *ours]]
    for index, (word, each) in enumerate(zip(said, chances, strict=True)):
        known = [cells[index] for cells in rows.beside.values()]
        lines.append([index + 1, *known, word, *(f"{p:.6f}" for p in each)])
    return lines


def copied_names(names: Sequence[str], ours: AbstractSet[str]) -> list[str]:
    """The names of copied columns; one that is also a name of ours is marked, since no name may occur twice."""
    found: list[str] = []
    for name in names:
        new = name
        while new in ours or (new != name and new in {*names, *found}):
            new += " (input)"
        found.append(new)
    return found


def as_csv(lines: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    return text.getvalue()
