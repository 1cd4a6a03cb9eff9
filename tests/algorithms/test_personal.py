"""Local training and fine-tuned FedAvg: what is personal stays personal."""

from __future__ import annotations

import dataclasses

import torch

from fedloom.engine.evaluate import evaluate, models_of
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore

LOCAL = {"batch": 3, "lr": 0.2, "epochs": 2}


def after(exp, rounds):
    state, store = begin(exp), RamStore(exp.federation.clients)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
    return state, store


def test_local_only_is_training_alone(world) -> None:
    """A client that trains alone for three rounds is FedAvg in a federation of that client only."""
    together = world((6, 9), algorithm="local_only", local=LOCAL, partition={"kind": "natural", "holdout": 0.3})
    state, store = after(together, 3)
    models = torch.cat([part.w for part in models_of(together, state, store, torch.arange(2))])
    # FedAvg with one client moves the server to that client's model; client 0 has the same address in both
    alone = world((6, 9), algorithm="fedavg", local=LOCAL, partition={"kind": "natural", "holdout": 0.3})
    single = alone.federation.train
    only_first = alone.federation._replace(train=single._replace(start=single.start.clone().clamp(max=single.start[1])))
    state, _ = after(dataclasses.replace(alone, federation=only_first), 3)
    torch.testing.assert_close(state.server.w, models[0])


def test_local_only_sends_nothing_and_has_no_common_model(world) -> None:
    exp = world(algorithm="local_only", partition={"kind": "natural", "holdout": 0.3}, local=LOCAL)
    state, store = after(exp, 2)
    assert (state.up, state.down) == (0, 0)
    assert not any(name.startswith("global/") for name in evaluate(exp, state, store))
    assert torch.equal(state.server.w, exp.task.w0)


def test_an_unseen_client_still_has_the_initial_model(world) -> None:
    exp = world(algorithm="local_only", partition={"kind": "natural", "holdout": 0.3}, cohort={"size": 1}, local=LOCAL)
    state, store = after(exp, 1)
    models = torch.cat([part.w for part in models_of(exp, state, store, torch.arange(3))])
    moved = (models != exp.task.w0).any(1)
    assert moved.sum() == 1


def test_fine_tuning_leaves_the_run_alone(world) -> None:
    part = {"kind": "natural", "holdout": 0.3}
    plain = world(algorithm="fedavg", partition=part, local=LOCAL)
    tuned = world(algorithm={"kind": "fedavg_ft", "epochs": 3}, partition=part, local=LOCAL)
    state_a, store_a = after(plain, 2)
    state, store = begin(tuned), RamStore(3)
    for _ in range(2):
        before = evaluate(tuned, state, store)
        assert before == evaluate(tuned, state, store)  # a throw-away copy: judging twice changes nothing
        state, _ = advance(tuned, state, store)
    assert torch.equal(state.server.w, state_a.server.w)
    judged, common = evaluate(tuned, state, store), evaluate(plain, state_a, store_a)
    assert judged["global/test/loss"] == common["global/test/loss"]
    assert judged["personal/post_fit/test/loss"] != common["personal/pre_fit/test/loss"]


def test_fine_tuned_copy_is_plain_training(world) -> None:
    """One epoch of full-batch fine-tuning is one gradient step from the global model on the client's own rows."""
    exp = world(
        algorithm={"kind": "fedavg_ft", "epochs": 1}, partition={"kind": "natural", "holdout": 0.3}, engine={"lanes": 2}
    )
    state, store = begin(exp), RamStore(3)
    with torch.no_grad():
        parts = list(models_of(exp, state, store, torch.arange(3)))
    found = dict(zip(torch.cat([p.ids for p in parts]).tolist(), torch.cat([p.w for p in parts]), strict=True))
    for client in range(3):
        rows = exp.federation.train.rows[exp.federation.train.start[client] : exp.federation.train.start[client + 1]]
        net = exp.task.module(exp.task.w0, exp.task.buffers0)
        x, y = exp.federation.examples(rows)
        torch.nn.functional.cross_entropy(net(x), y).backward()
        g = torch.cat([p.grad.flatten() for p in net.parameters()])
        torch.testing.assert_close(found[client], exp.task.w0 - 0.5 * g, rtol=1e-5, atol=1e-6)
