"""Runs of methods without a server."""

from __future__ import annotations

import torch

from fedloom.engine.evaluate import models_of
from fedloom.engine.local import train
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.engine.training import groups_of


def gradient(exp, node, w):
    rows = exp.federation.train.rows[exp.federation.train.start[node] : exp.federation.train.start[node + 1]]
    net = exp.task.module(w, exp.task.buffers0)
    x, y = exp.federation.examples(rows)
    torch.nn.functional.cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def models(exp, state, store):
    return torch.cat([part.w for part in models_of(exp, state, store, torch.arange(exp.federation.clients))])


SIZES = (6, 9, 4, 12, 7)


RAGGED = {"batch": 3, "lr": 0.2, "epochs": 2}


def network(world, kind="dfedavg", sizes=SIZES, **table):
    algorithm = {"kind": kind, **table.pop("algorithm", {})}
    return world(sizes, algorithm=algorithm, **({"topology": "ring", "local": RAGGED} | table))


def trained(exp, state, store):
    """What every node sends in the next round.  [N, P]"""
    found = {}
    for group in groups_of(exp, state.round, exp.present(state.round)):
        sent = train(exp.algorithm, exp.federation, group, exp.given(state, store, group.ids)).uploads.w
        found |= dict(zip(group.ids.tolist(), sent, strict=True))
    return torch.stack([found[i] for i in range(exp.federation.clients)])


def run(exp, rounds):
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return models(exp, state, store)
