"""``fedloom evaluate``: evaluate the models of a finished run on labelled rows."""

from __future__ import annotations

from rich.table import Table

from fedloom.cli.console import plain_console
from fedloom.cli.options import Json, NoUserCode, Trust, refuse_user_code
from fedloom.cli.predict import ByClient, Client, Data, Run, chosen, each_by_its_client, print_notes


def evaluate(
    run: Run,
    data: Data,
    client: Client = None,
    by_client: ByClient = False,
    json_: Json = False,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Evaluate the models of a run on labelled rows.

    The labels are in the column that the run was trained on.
    """
    from fedloom.runs.load import note_of_one_class
    from fedloom.runs.origin import learned_from

    refuse_user_code(no_user_code)
    models = chosen(run, client, by_client=by_client, trust=trust)
    rows = models.rows(data)
    found = models.evaluate(rows, by_client=each_by_its_client(models, rows, client, by_client))
    of_one = note_of_one_class(models.labels, found["confusion"]) if "confusion" in found else ""
    print_notes((*rows.notes, of_one) if of_one else rows.notes)
    if json_:
        from fedloom.runs.folder import as_json

        print(as_json(found))
        return
    console = plain_console()
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in found.items():
        if name != "confusion":
            table.add_row(name, f"{value:,}" if isinstance(value, int) else f"{value:.4f}")
    console.print(table)
    if "confusion" in found and len(models.labels) <= 20:
        console.print("\ntrue class (line) and prediction (column)")
        console.print(_confusion(models.labels, found["confusion"]))
    if learned_from(run, data):
        print(f"\nnote: the run learned from {data}: most of these rows were trained on, which flatters the model")


def _confusion(labels: tuple[str, ...], counts: list[list[int]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for label in labels:
        table.add_column(label, justify="right")
    for label, line in zip(labels, counts, strict=True):
        table.add_row(label, *(f"{count:,}" for count in line))
    return table
