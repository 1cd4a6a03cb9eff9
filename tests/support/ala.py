"""What tests of FedALA and pFedALA share."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fedloom.core import tree
from fedloom.core.optim import optimizers
from fedloom.engine import local
from fedloom.engine.evaluate import models_of
from fedloom.engine.lateness import foresee_lateness
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.engine.training import groups_of
from support.quadratic import RAGGED

MLP = {"kind": "mlp", "widths": [6, 5]}  # three layers


LOCAL = RAGGED | {"state": "persist"}  # of 4, 12 and 7 examples: 4, 8 and 6 steps


HELD = {"kind": "natural", "holdout": 0.3}


EXECUTORS = pytest.mark.parametrize("executor", ["lanes", "loop"])


SHORT = {"window": 3}  # a start phase of four passes and not of eleven: its length is the point of few tests

_laid_out: dict[str, Experiment] = {}
_runs: dict[int, list[Ran]] = {}  # by experiment: its run after 0, 1, ... rounds


def laid_out(world, *args, kind="fedala", **table):
    """An experiment with a net of three layers and optimizers that remember; one that was laid out before is shared."""
    short = SHORT if kind in ("fedala", "pfedala") and table.get("algorithm", {}).get("layers") != "none" else {}
    algorithm = {"kind": kind, **short, **table.pop("algorithm", {})}
    full = {"model": MLP, "local": LOCAL} | table | {"algorithm": algorithm}
    if "arrays" in full:
        return world(*args, **full)
    key = repr((args, sorted(full.items())))
    if key not in _laid_out:
        _laid_out[key] = world(*args, **full)
    return _laid_out[key]


class Ran(NamedTuple):
    """A run so far."""

    exp: Any
    state: Any
    store: Any

    @property
    def w(self) -> Tensor:
        """The server's model."""
        return self.state.server.w

    @property
    def kept(self) -> Any:
        """What every client keeps.  [N, ...]"""
        return self.given.mine

    @property
    def given(self) -> Any:
        return self.exp.given(self.state, self.store, torch.arange(self.exp.federation.clients))

    def on(self, rounds: int = 1) -> Ran:
        state, store = self.state, copy.deepcopy(self.store)
        for _ in range(rounds):
            state, _ = advance(self.exp, state, store)
        return Ran(self.exp, state, store)

    def trained(self) -> tuple[Tensor, Any]:
        """The clients of the next round in order, and what they do in it, watched."""
        exp, state = self.exp, self.state
        present = exp.present(state.round)
        ids, parts = [], []
        for group in groups_of(exp, state.round, present, foresee_lateness(exp, state, present, 0).extra):
            given = exp.given(state, self.store, group.ids)
            with torch.no_grad():
                parts.append(local.train(exp.algorithm, exp.federation, group, given, watched=True))
            ids.append(group.ids)
        order = torch.cat(ids).argsort()
        return torch.cat(ids)[order], tree.take(tree.cat(parts), order)

    def served(self, ids: Tensor) -> Tensor:
        """The models with which these clients predict.  [K, P]"""
        with torch.no_grad():
            parts = list(models_of(self.exp, self.state, self.store, ids))
        found = dict(zip(torch.cat([p.ids for p in parts]).tolist(), torch.cat([p.w for p in parts]), strict=True))
        return torch.stack([found[i] for i in ids.tolist()])


def ran(exp, rounds: int = 3) -> Ran:
    """The run after some rounds; those of an experiment that is shared are computed once."""
    if all(exp is not other for other in _laid_out.values()):
        return Ran(exp, begin(exp), RamStore(exp.federation.clients)).on(rounds)
    runs = _runs.setdefault(id(exp), [Ran(exp, begin(exp), RamStore(exp.federation.clients))])
    while len(runs) <= rounds:
        runs.append(runs[-1].on())
    return runs[rounds].on(0)  # with a store of its own


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal, bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def memory_of(name: str) -> dict[str, Any]:
    """Settings of ``local`` for this optimizer; SGD with momentum, so that it has something to remember."""
    return {"optimizer": name, "lr": 0.02} | ({"momentum": 0.9} if name == "sgd" else {})


OPTIMIZERS = pytest.mark.parametrize("optimizer", sorted(optimizers()))


def recorded(monkeypatch) -> list[tuple[str, list[int], list[int]]]:
    """A list that grows by (phase, clients, steps of each) with every stretch of training that is computed."""
    _runs.clear()  # what was computed before would not be recorded
    calls: list[tuple[str, list[int], list[int]]] = []
    descend = local._descend

    def spy(alg, phase, fed, group, *args, **more):
        calls.append((phase.name, group.ids.tolist(), list(group.steps)))
        return descend(alg, phase, fed, group, *args, **more)

    monkeypatch.setattr(local, "_descend", spy)
    return calls


class Normed(nn.Module):
    """A net with BatchNorm."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(shape[0], 6), nn.BatchNorm1d(6), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.norm(self.fc(x))))
        return out


NORMED = {"model": {"kind": "support.ala:Normed"}, "local": LOCAL | {"drop_last": True}}
