"""``fedloom export``: a model of a finished run for other programs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedloom.cli.console import harmless
from fedloom.cli.options import NoUserCode, Trust, refuse_user_code
from fedloom.cli.predict import Client, Run, chosen


def export(
    run: Run,
    format_: Annotated[
        Literal["pt2", "onnx"], typer.Option("--format", help="torch.export's archive, or ONNX (an optional extra).")
    ] = "pt2",
    out: Annotated[Path | None, typer.Option(help="The file; by default model.pt2 or model.onnx in RUN.")] = None,
    client: Client = None,
    trust: Trust = False,
    no_user_code: NoUserCode = False,
) -> None:
    """Export a model as one file that runs without fedloom.

    The file is loaded again, and its outputs are compared with the original's.
    """
    from fedloom.runs.export import export as write
    from fedloom.runs.look import refuse_file_of_run

    refuse_user_code(no_user_code)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that no net here needs
    models = chosen(run, client, by_client=False, trust=trust)
    path = out or run / f"model.{format_}"
    refuse_file_of_run(path)
    apart = write(models, path, format_)
    shape = ", ".join(["rows", *map(str, models.record.shape)])
    takes = f"[{shape}]" + (f": {', '.join(models.inputs)}" if models.inputs else "")
    outputs = harmless(", ".join(models.labels)) or "the number"
    print(f"{path}\ninput: float32 {takes}\noutputs: {outputs}")
    print(f"loaded again, its outputs differ from the original's by {apart:.2g} at most")
