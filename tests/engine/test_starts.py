"""Nodes of a network that begin with a model of their own each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedloom.engine import checkpoint
from fedloom.engine.evaluate import evaluate, models_of
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore, RamStore
from fedloom.engine.topology.network import Moment

NODES = 5
METHODS: list[dict[str, Any]] = [
    *({"kind": "dpsgd", "order": order} for order in ("lian", "atc", "mix_then_train")),
    *({"kind": "dfedavgm", "scheme": scheme} for scheme in ("none", "direct", "compensated", "diff_literal")),
    {"kind": "dfedavgm", "scheme": "choco", "gamma": 0.5},
    {"kind": "dfedavg"},
    {"kind": "dfedsam"},
    {"kind": "dfedgam"},
]


def network(world: Any, algorithm: dict[str, Any], start: str = "independent", **more: Any) -> Experiment:
    topology = {"kind": "ring", "start": start, **more.pop("topology", {})}
    exp: Experiment = world((6,) * NODES, algorithm=algorithm, topology=topology, local={"batch": 0, "lr": 0.3}, **more)
    return exp


def models(exp: Experiment, state: RunState, store: ClientStore) -> Tensor:
    return torch.cat([part.w for part in models_of(exp, state, store, torch.arange(NODES))])


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: "-".join(map(str, a.values())))
def test_every_method_begins_where_its_nodes_do_and_resumes_exactly(
    world: Any, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    exp = network(world, algorithm)
    assert exp.starts is not None
    assert len({tuple(row.tolist()) for row in exp.starts}) == NODES
    state, store = begin(exp), RamStore(NODES)
    assert torch.allclose(models(exp, state, store), exp.starts, atol=1e-7)
    assert evaluate(exp, state, store)["consensus/distance"] > 0.1
    state, _ = advance(exp, state, store)
    checkpoint.save(tmp_path, state, store, {})
    other = RamStore(NODES)
    again = checkpoint.load_state(tmp_path, begin(exp), other).state
    for _ in range(2):
        state, _ = advance(exp, state, store)
        again, _ = advance(exp, again, other)
    assert torch.equal(models(exp, state, store), models(exp, again, other))


def test_starts_are_drawn_by_seed_and_node(world: Any) -> None:
    one, same, another = (network(world, {"kind": "dfedavg"}, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.starts, same.starts)
    assert not torch.equal(one.starts, another.starts)
    assert network(world, {"kind": "dfedavg"}, "common").starts is None


def test_a_node_that_hears_nobody_is_sgd_from_its_own_start(world: Any) -> None:
    exp = network(world, {"kind": "dpsgd", "order": "atc"}, topology={"link_loss": 0.999})
    state, store = begin(exp), RamStore(NODES)
    w = exp.starts[2].clone().requires_grad_()
    for _ in range(3):
        state, _ = advance(exp, state, store)
        rows = exp.federation.train.rows[exp.federation.train.start[2] : exp.federation.train.start[3]]
        x, y = exp.federation.examples(rows)
        (g,) = torch.autograd.grad(torch.nn.functional.cross_entropy(exp.task.apply(w, x, exp.task.buffers0), y), w)
        w = (w - 0.3 * g).detach().requires_grad_()
    torch.testing.assert_close(models(exp, state, store)[2], w.detach(), rtol=1e-4, atol=1e-6)


def test_a_node_that_sleeps_at_first_keeps_its_own_start(world: Any) -> None:
    """Until it has trained, the state of a node is the one that goes with its own start, and not with another's."""
    exp = network(world, {"kind": "dpsgd", "order": "mix_then_train"}, topology={"node_loss": 0.6})
    state, store = begin(exp), RamStore(NODES)
    asleep = torch.from_numpy(exp.topology.offline(NODES, Moment(exp.seed, 0)))
    assert 0 < int(asleep.sum()) < NODES
    state, _ = advance(exp, state, store)
    found = models(exp, state, store)
    assert torch.equal(found[asleep], exp.starts[asleep])
    assert not torch.equal(found[~asleep], exp.starts[~asleep])
