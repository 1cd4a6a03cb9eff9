"""``fedloom export``: a model of a finished run for other programs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedloom.cli.console import harmless
from fedloom.cli.options import NoUserCode, Trust, refuse_user_code
from fedloom.cli.predict import Client, Run, chosen

if TYPE_CHECKING:
    from fedloom.data.columns import Feature


def export(
    run: Run,
    format_: Annotated[
        Literal["pt2", "onnx"] | None,
        typer.Option("--format", help="torch.export's archive (default), or ONNX (an optional extra)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The file, .pt2 or .onnx; by default model.pt2 or model.onnx in RUN.")
    ] = None,
    client: Client = None,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Export a model as one file that runs without fedloom.

    The file is loaded again, and its outputs are compared with the original's.
    """
    from fedloom.runs.export import export as write
    from fedloom.runs.export import format_of
    from fedloom.runs.look import refuse_file_of_run

    refuse_user_code(no_user_code)
    kind = format_of(format_, out)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that no net here needs
    models = chosen(run, client, by_client=False, trust=trust)
    path = out or run / f"model.{kind}"
    refuse_file_of_run(path)
    apart = write(models, path, kind)
    shape = ", ".join(["rows", *map(str, models.record.shape)])
    takes = f"[{shape}]" + (f": {', '.join(models.inputs)}" if models.inputs else "")
    takes += f", values of {models.values}" if models.values is not None else ""
    outputs = "the number" if models.is_regression else f"logits (before softmax) of {', '.join(models.labels)}"
    print(harmless(f"{path}\ninput: float32 {takes}\noutputs: {outputs}"))
    for line in rules(models.features):
        print(harmless(line))
    print(f"loaded again, its outputs differ from the original's by {apart:.2g} at most")


def rules(features: Sequence[Feature]) -> list[str]:
    """How cells of a table become inputs, as far as these columns need it."""
    from fedloom.runs.export import DATE_UNIT

    fills = [f"{feature.name}={feature.fill}" for feature in features if feature.words]
    kinds = {feature.kind for feature in features}
    found = [f"date: {DATE_UNIT}"] if "date" in kinds else []
    found += ["missing number or date: NaN"] if kinds & {"number", "date"} else []
    found += [f"missing word: set the column of its fill ({', '.join(fills)})"] if fills else []
    return [*found, "unknown word: 0 in all of its columns"] if fills else found
