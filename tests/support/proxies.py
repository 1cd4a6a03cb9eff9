"""Experiments in which clients have wrong labels or stay away."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from fedloom.engine.plan import Drawn
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore

SIZES = (30, 50, 20, 40)


def spoiled(exp, *bad):
    """The experiment with labels of these clients moved on by one; the proxy set is as it was."""
    fed = exp.federation
    y = fed.y.clone()
    for i in bad:
        rows = fed.train.rows[fed.train.start[i] : fed.train.start[i + 1]]
        y[rows] = (y[rows] + 1) % fed.classes
    return replace(exp, federation=fed._replace(y=y))


def deserted(exp, *rounds):
    """The experiment in which nobody takes part in these rounds."""

    class Deserted(type(exp)):
        def present(self, round_):
            found = super().present(round_)
            nobody = Drawn(found.drawn.ids[:0], found.drawn.times[:0])
            return found._replace(drawn=nobody, steps=found.steps[:0]) if round_ in rounds else found

    return Deserted(**{f.name: getattr(exp, f.name) for f in dataclasses.fields(exp) if f.init})


def after(exp, rounds=1):
    """The state after some rounds."""
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return state
