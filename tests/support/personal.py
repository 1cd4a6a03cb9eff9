"""Runs of methods that give each client a model of its own."""

from __future__ import annotations

import torch
from torch import nn

from fedloom.engine.evaluate import models_of
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore


def run(exp, rounds):
    """The state after some rounds, and what every client is served [N, P]."""
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return state, served(exp, state, store)


def served(exp, state, store):
    parts = list(models_of(exp, state, store, torch.arange(exp.federation.clients)))
    return torch.cat([p.w for p in parts])[torch.cat([p.ids for p in parts]).argsort()]


def full_gradient(exp, client, w):
    start = exp.federation.train.start
    net = exp.task.module(w, exp.task.buffers0)
    x, y = exp.federation.examples(exp.federation.train.rows[start[client] : start[client + 1]])
    nn.functional.cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])
