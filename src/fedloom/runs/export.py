"""A model of a run as a file that other programs run: torch.export's .pt2, or ONNX; checked by running it again."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.core import disk
from fedloom.core.errors import ConfigError, DataError, Fault
from fedloom.data.columns import Feature
from fedloom.runs.load import Predictor

Format: TypeAlias = Literal["pt2", "onnx"]
ABOUT = "fedloom.json"  # the name of the description: an extra file in .pt2, a key of the metadata in ONNX
DATE_UNIT = "days since 1970-01-01"
_CLOSE = 1e-4  # tolerated difference of the exported net's outputs, relative to the largest output if that is above 1


def format_of(asked: Format | None, out: Path | None) -> Format:
    """The format that was asked for, or that the name of the file means.

    A file of another name is refused: it may be a table of the user's own, which would be lost. Devices and pipes,
    which cannot be lost, have any name.
    """
    kinds: tuple[Format, ...] = get_args(Format) if asked is None else (asked,)
    if out is None or out.is_char_device() or out.is_fifo():
        return kinds[0]
    suffix = out.suffix.lower().removeprefix(".")
    found = next((kind for kind in kinds if kind == suffix), kinds[0])
    if suffix != found:
        ends = " or ".join(f".{kind}" for kind in kinds)
        by = "" if asked is None else f", as --format {asked} does"
        raise ConfigError([Fault("--out", f"{out} does not end in {ends}{by}", f"such as {out.stem}.{found}")])
    return found


def export(models: Predictor, path: Path, kind: Format) -> float:
    """Write the model and the preparation of inputs; returns the largest difference from the original's outputs."""
    net, about = models.module, json.dumps(description_of(models))
    x = example_rows(models)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data, said = _as_pt2(net, x, about) if kind == "pt2" else _as_onnx(net, x, about)
    with torch.no_grad():
        theirs, ours = torch.from_numpy(said), net(x)
    apart = float((theirs - ours).abs().max())
    if not agree(theirs, ours):
        raise DataError(f"{path}: the exported net differs from the original by {apart:.3g}, so it was not written")
    disk.write_result(path, data)
    return apart


def description_of(models: Predictor) -> dict[str, Any]:
    """What a program has to know to use the exported file, as plain values.

    ``columns``: of a table, in the order of the inputs; each has its words, of which a row has 1 in one and 0 in the
    others, or a number, or a date as days. A missing word is replaced by ``fill``, a missing number or date is NaN.
    """
    return {
        "inputs": list(models.inputs) or list(models.record.shape),
        "values": None if models.values is None else list(models.values),
        "columns": [_described_column(feature) for feature in models.features],
        "outputs": "number" if models.is_regression else "logits",
        "labels": list(models.labels),
    }


def _described_column(feature: Feature) -> dict[str, Any]:
    more: dict[str, Any] = {"missing": "NaN"}
    if feature.kind == "words":
        more = {"words": list(feature.words), "fill": feature.fill}
    elif feature.kind == "date":
        more["unit"] = DATE_UNIT
    return {"name": feature.name, "kind": feature.kind, **more}


def agree(theirs: Tensor, ours: Tensor) -> bool:
    """Whether outputs differ only by rounding."""
    return bool((theirs - ours).abs().max() <= _CLOSE * max(1.0, float(ours.abs().max())))


def example_rows(models: Predictor) -> Tensor:
    """Rows of the right shape, with a gap in one of them where the model takes a table."""
    shape = models.record.shape
    x = torch.linspace(0, 255 if models.record.images else 2, 3 * int(np.prod(shape))).view(3, *shape)
    if models.inputs:
        x[1, 0] = torch.nan
    return x


def _as_pt2(net: nn.Module, x: Tensor, about: str) -> tuple[bytes, NDArray[np.float32]]:
    """The file, made in memory (torch ends the process if it cannot write one), and the outputs of what it contains."""
    program = torch.export.export(net, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},))
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={ABOUT: about})
    data = file.getvalue()
    with torch.no_grad():
        again: Tensor = torch.export.load(io.BytesIO(data)).module()(x)
    return data, again.numpy()


def _as_onnx(net: nn.Module, x: Tensor, about: str) -> tuple[bytes, NDArray[np.float32]]:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        what = f"needs {error.name}, which is not installed"
        raise ConfigError([Fault("--format", f"onnx {what}", "pip install 'fedloom[onnx]'")]) from error
    program = torch.onnx.export(
        net,
        (x,),
        dynamo=True,
        input_names=["rows"],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("rows")},),
        verbose=False,
    )
    assert program is not None
    program.model.metadata_props[ABOUT] = about
    data = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    found: NDArray[np.float32] = session.run(None, {"rows": x.numpy()})[0]
    return data, found
