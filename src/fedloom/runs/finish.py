"""What is written after the last round: the models, the clients, the curves, the summary."""

from __future__ import annotations

import torch
from torch import Tensor

from fedloom.core import disk
from fedloom.engine import cuda_graphs
from fedloom.engine.evaluate import class_table, each_client, everyones_models, living
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore
from fedloom.report.tables import client_table, csv_text, curve_table
from fedloom.runs.folder import RunFolder, write_text
from fedloom.runs.models import (
    COMMON,
    PERSONAL,
    RECORD,
    everyone,
    record_of,
    save_common,
    save_personal,
    wanted_personal,
)
from fedloom.runs.prepare import Prepared
from fedloom.runs.result import History
from fedloom.runs.settings import config_hash
from fedloom.runs.spent import settle_spent

_MOST_CLASSES = 100  # largest confusion matrix that is saved


def common_model(exp: Experiment, state: RunState, store: ClientStore) -> tuple[Tensor, Tensor] | None:
    """The common model of a finished run: the server's, or the average of a network's nodes."""
    if not exp.algorithm.traits.common_model:
        return None
    if exp.is_network:
        left = living(exp, state).nonzero().squeeze(1)
        total = sum((part.w.double().sum(0) for part in everyones_models(exp, state, store, left)), torch.zeros(()))
        return (total / len(left)).to(exp.task.w0.dtype), state.buffers[left.to(exp.device)].mean(0)
    return exp.algorithm.global_model(state.server), state.buffers


def finish(
    prepared: Prepared,
    folder: RunFolder | None,
    state: RunState,
    store: ClientStore,
    history: History,
    model: tuple[Tensor, Tensor] | None,
) -> None:
    """Write the final files of a run folder; all ranks take part, only rank 0 writes."""
    exp = prepared.experiment
    notes = {"algorithm": history.algorithm, "round": str(state.round), "config_hash": config_hash(prepared.config)}
    if wanted_personal(prepared):
        parts = everyone(exp, state, store, model)
        if folder is None:
            for _ in parts:  # every rank sends the models of its clients
                pass
        else:
            save_personal(folder.path / PERSONAL, exp, parts, notes)
    measured = each_client(exp, state, store)
    if folder is None:
        return
    if model is not None:
        save_common(folder.path / COMMON, exp, model, notes)
        table = class_table(exp, *model) if exp.federation.classes <= _MOST_CLASSES else None
        if table is not None:
            folder.write("confusion.json", {"labels": list(prepared.shared.arrays.labels), "counts": table.tolist()})
    folder.write(RECORD, record_of(prepared).model_dump(mode="json"))
    if exp.captures:
        folder.write("steps.json", cuda_graphs.built(exp.task)._asdict())
    shared = prepared.shared
    clients = client_table(shared.counts(), shared.names, shared.arrays.labels, measured)
    write_text(folder.path / "clients.csv", csv_text(clients))
    write_text(folder.path / "curves.csv", csv_text(curve_table(history.records)))
    if prepared.config.checkpoint.curves:
        disk.write_bytes(folder.path / "curves.png", history.picture())
    settle_spent(folder, prepared)
    folder.end(history.as_json())
