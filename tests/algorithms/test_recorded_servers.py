"""Servers whose steps are recorded come to what they come to without recordings: see ``fedloom.core.replay``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedloom.core import replay, tree
from fedloom.core.replay import recording_notes
from fedloom.core.task import Task
from support.proxies import after


def same(a: Any, b: Any) -> bool:
    """To the bit, but for kernels of a GPU that do not give the same bits twice."""
    pairs = list(zip(tree.leaves(a), tree.leaves(b), strict=True))
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-5) if x.is_cuda else torch.equal(x, y) for x, y in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "fedlaw", "server_epochs": 5, "proxy_batch": 8},
        {"kind": "fedlaw", "server_epochs": 8, "proxy_batch": 8, "stage": "two_stage", "shrink_exclude": ["bias"]},
        {"kind": "law_afl", "schedule": "per_round", "server_epochs": 3, "proxy_batch": 8, "head_steps": 10},
        {"kind": "law_afl", "schedule": "frozen", "head_steps": 10},
        {"kind": "server_finetune", "server_epochs": 3, "proxy_batch": 8},
        {"kind": "server_finetune", "server_epochs": 3, "proxy_batch": 8, "server_optimizer": "adam"},
        {"kind": "feddf", "epochs": 3, "batch": 8},
        {"kind": "fedbe", "epochs": 3, "batch": 8},
    ],
    ids=lambda s: f"{s['kind']}-{len(s)}",
)
def test_servers_come_to_what_they_come_to_without_recordings(
    laid_out: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    def end(exp: Any) -> Any:
        return after(exp, 3).server

    want = end(laid_out(settings))
    monkeypatch.setattr(replay, "can_record", lambda value: True)
    monkeypatch.setattr(Task, "recorder", lambda self, *constants: replay.Recorder(self, constants))
    exp = laid_out(settings)
    assert same(end(exp), want)
    notes = recording_notes(exp.task)
    assert all("recorded in" in note for note in notes)
    assert 1 <= len(notes) <= 4  # each kind of step once, not once in a round
