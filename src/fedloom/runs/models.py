"""The models of a run, and all that is needed to predict with them: written at its end, as JSON and safetensors.

model.json             classes, clients, the net's settings, how inputs are scaled (a table's columns: columns.json)
model.safetensors      the common model
personal.safetensors   one row for each client, if clients have their own models
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedloom.algorithm.capabilities import adaptation_of
from fedloom.core.slots import slots
from fedloom.data.arrays import Ints
from fedloom.data.new_rows import ValueRange, range_of
from fedloom.engine import checkpoint
from fedloom.engine.evaluate import ClientModels, everyones_models
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore
from fedloom.runs.prepare import Prepared
from fedloom.runs.settings import as_table

RECORD, COMMON, PERSONAL, COLUMNS = "model.json", "model.safetensors", "personal.safetensors", "columns.json"
_PART_BYTES = 1 << 24  # of repeated common models in memory, for clients without their own
_MOST_BYTES = 1 << 30  # largest personal models that are saved by default


class Origin(BaseModel):
    """The deployment in which a node's model was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    campaign: str  # the name of the federation
    run: int | None = None  # of the server's; a network without a server has a single one
    rounds: int  # that were done


class ModelRecord(BaseModel):
    """What a model is, and what its inputs are."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    algorithm: str
    task: Literal["classification", "regression"] = "classification"
    model: dict[str, Any]  # the settings of the net
    shape: tuple[int, ...]  # of one input
    labels: tuple[str, ...]  # the classes in order; none where a number is learned
    unit: tuple[float, float] | None = None  # of a number that is learned: its mean and deviation
    clients: tuple[str, ...]  # in order
    named: bool = True  # whether the data calls them so; else these are numbers (earlier versions did not say)
    scale: tuple[float, ...]  # inputs are multiplied by it, for each channel
    shift: tuple[float, ...]  # and this is subtracted
    images: bool = False  # inputs are pixels of 0 to 255, as bytes
    values: tuple[float, float] | None = None  # the smallest and the largest input of training, unless of a table
    layout: dict[str, tuple[int, ...]]  # of a row of personal models
    buffer_layout: dict[str, tuple[int, ...]]
    personal: bool  # whether clients have their own models
    data: str  # what the run learned from
    origin: Origin | None = None  # of a node's model


def record_of(prepared: Prepared) -> ModelRecord:
    """What the models of a run are."""
    exp, shared, config = prepared.experiment, prepared.shared, prepared.config
    arrays = shared.arrays
    scale, shift = shared.rescaling()
    return ModelRecord(
        algorithm=config.kinds["algorithm"],
        model=as_table(config)["model"],
        shape=arrays.shape,
        task=config.task.kind,
        labels=arrays.labels if arrays.target is None else (),
        unit=None if arrays.target is None else arrays.unit,
        clients=shared.names,
        named=bool(shared.names_in_data),
        scale=scale,
        shift=shift,
        images=arrays.x.dtype == "uint8",
        values=_values_of(prepared),
        layout=exp.task.layout,
        buffer_layout=exp.task.buffer_layout,
        personal=are_personal(exp),
        data=arrays.name,
    )


def _values_of(prepared: Prepared) -> ValueRange | None:
    """The smallest and the largest value of arrays that a net learned from, where they are here."""
    shared = prepared.shared
    x, test = shared.arrays.x, shared.arrays.test
    are_here = prepared.experiment.at_client or not shared.elsewhere
    if shared.arrays.recipe is not None or not are_here:
        return None
    parts = [found for some in _blocks(np.flatnonzero(~test)) if (found := range_of(x[some])) is not None]
    return ValueRange(min(part.low for part in parts), max(part.high for part in parts)) if parts else None


def _blocks(rows: Ints) -> list[Ints]:
    """A few rows at a time: all of them, copied, may not fit into memory."""
    return np.array_split(rows, max(1, len(rows) // 4096))


def are_personal(exp: Experiment) -> bool:
    """Whether clients predict with their own models."""
    shares = exp.algorithm.family in ("server", "closed_form") and not adaptation_of(exp.algorithm)
    return not (shares and exp.buffers == "average")


def wanted_personal(prepared: Prepared) -> bool:
    """Whether the clients' own models are saved: on request, or if they are not too large."""
    exp, wish = prepared.experiment, prepared.config.checkpoint.personal
    if wish == "none" or not are_personal(exp) or exp.fleet is not None:  # nodes save their models and do not send them
        return False
    row = exp.task.size + exp.task.buffers0.numel()
    return wish == "all" or 4 * row * exp.federation.clients <= _MOST_BYTES


def fixed_tensors(exp: Experiment) -> dict[str, Tensor]:
    """The tensors of the net that no client trains."""
    trained = {*exp.task.layout, *exp.task.buffer_layout}
    whole = exp.task.tensors(exp.task.w0, exp.task.buffers0)
    return {name: x for name, x in whole.items() if name not in trained}


def everyone(
    exp: Experiment, state: RunState, store: ClientStore, common: tuple[Tensor, Tensor] | None
) -> Iterator[ClientModels]:
    """The models of all clients, some at a time; a client without a kept state has the common model."""
    left = torch.ones(exp.federation.clients, dtype=torch.bool)
    with torch.no_grad():
        for part in everyones_models(exp, state, store, torch.arange(exp.federation.clients)):
            left[part.ids.cpu()] = False
            yield part
    if common is not None:
        rows = max(1, _PART_BYTES // (4 * max(1, common[0].numel())))
        for ids in torch.split(left.nonzero().squeeze(1), rows):
            yield ClientModels(ids, *(x.expand(len(ids), -1) for x in common))


def save_personal(path: Path, exp: Experiment, parts: Iterator[ClientModels], notes: Mapping[str, str]) -> None:
    """One row for each client, in the order of the clients, and the tensors that all of them share."""
    clients, task = exp.federation.clients, exp.task
    fixed = fixed_tensors(exp)
    form: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "w": (torch.float32, (clients, task.size)),
        "buffers": (torch.float32, (clients, task.buffers0.numel())),
        **{f"fixed.{name}": (x.dtype, tuple(x.shape)) for name, x in fixed.items()},
    }
    with slots(path, form, json.dumps(dict(notes))) as file:
        for name, x in fixed.items():
            file.put(f"fixed.{name}", 0, x)
        for part in parts:
            for first, end in _neighbours(part.ids):
                file.put("w", int(part.ids[first]), part.w[first:end].float())
                file.put("buffers", int(part.ids[first]), part.buffers[first:end].float())


def _neighbours(ids: Tensor) -> Iterator[tuple[int, int]]:
    """Where runs of consecutive numbers begin and end in ``ids``: their rows are contiguous in a file."""
    cuts = (ids.diff() != 1).nonzero().squeeze(1).add(1).tolist()
    return pairwise([0, *cuts, len(ids)] if len(ids) else [])


def save_common(path: Path, exp: Experiment, model: tuple[Tensor, Tensor], notes: dict[str, str]) -> None:
    """The common model under the names of the net's parameters."""
    checkpoint.save_model(path, exp.task.tensors(*model), notes)
