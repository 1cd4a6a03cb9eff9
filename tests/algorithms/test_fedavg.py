"""FedAvg against arithmetic done another way."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedloom.algorithm import Inbox, Model, Update, Work
from fedloom.algorithms.fedavg import FedAvg
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore


def one_round(exp):
    return advance(exp, begin(exp), RamStore(exp.federation.clients))[0].server.w


def plain_gradient(exp, rows, w):
    """The mean gradient over rows, by autograd on an ordinary module."""
    net = exp.task.module(w, exp.task.buffers0)
    x, y = exp.federation.examples(rows)
    nn.functional.cross_entropy(net(x), y).backward()
    return torch.cat([p.grad.flatten() for p in net.parameters()])


def members(exp, client):
    start = exp.federation.train.start
    return exp.federation.train.rows[start[client] : start[client + 1]]


def test_hand_worked_numbers() -> None:
    # two clients moved by (1, 0) and (0, 2), with 1 and 3 examples
    total = Update(torch.tensor([1.0 * 1 + 3.0 * 0, 1.0 * 0 + 3.0 * 2], dtype=torch.float64))
    heard = Inbox(total, torch.tensor(4.0), torch.tensor(2.0), torch.tensor(5.0), torch.tensor(40.0))
    after = FedAvg(server_lr=0.5).update(Model(torch.tensor([10.0, 10.0])), heard)
    assert after.w.tolist() == [10.125, 10.75]


def test_one_full_batch_step_is_gradient_descent_on_the_pooled_data(world) -> None:
    exp = world()
    g = plain_gradient(exp, exp.federation.train.rows, exp.task.w0)
    torch.testing.assert_close(one_round(exp), exp.task.w0 - 0.5 * g, rtol=1e-5, atol=1e-6)


def test_uniform_weighting_counts_clients_alike(world) -> None:
    exp = world(algorithm={"kind": "fedavg", "weighting": "uniform"})
    gs = torch.stack([plain_gradient(exp, members(exp, i), exp.task.w0) for i in range(3)])
    torch.testing.assert_close(one_round(exp), exp.task.w0 - 0.5 * gs.mean(0), rtol=1e-5, atol=1e-6)


def test_update_form_is_the_average_of_models(world) -> None:
    exp = world(local={"batch": 3, "lr": 0.2, "epochs": 2})
    uploads, sizes = [], torch.tensor([4.0, 12.0, 7.0])
    for i in range(3):
        alone = world(local={"batch": 3, "lr": 0.2, "epochs": 2})
        part = advance_only(alone, i)
        uploads.append(part)
    average = (torch.stack(uploads).double() * (sizes / sizes.sum())[:, None]).sum(0)
    torch.testing.assert_close(one_round(exp).double(), average, rtol=1e-5, atol=1e-6)


def advance_only(exp, client):
    """The model that one client returns."""
    from fedloom.engine.local import train
    from fedloom.engine.plan import Address, plans

    ids = torch.tensor([client])
    group = next(plans(exp.local, exp.federation.train, ids, Address(exp.seed, 0), lr=exp.local.lr, lanes=1))
    state = begin(exp)
    with torch.no_grad():
        outcome = train(exp.algorithm, exp.federation, group, exp.given(state, RamStore(3), ids))
    return state.server.w + outcome.uploads.dw[0]


@pytest.mark.parametrize("server_lr", [0.25, 2.0])
def test_server_lr_scales_the_step(world, server_lr) -> None:
    plain = one_round(world()) - world().task.w0
    scaled = one_round(world(algorithm={"kind": "fedavg", "server_lr": server_lr})) - world().task.w0
    torch.testing.assert_close(scaled, server_lr * plain, rtol=1e-4, atol=1e-6)


def test_drawing_a_client_twice_counts_it_twice(world) -> None:
    exp = world(
        (5, 5, 5),
        cohort={"sampling": "proportional", "size": 6},
        algorithm={"kind": "fedavg", "weighting": "uniform"},
    )
    drawn = exp.present(0).drawn
    assert drawn.times.sum() == 6
    gs = torch.stack([plain_gradient(exp, members(exp, int(i)), exp.task.w0) for i in drawn.ids])
    mean = (gs * drawn.times[:, None]).sum(0) / 6
    torch.testing.assert_close(one_round(exp), exp.task.w0 - 0.5 * mean, rtol=1e-5, atol=1e-6)


def test_a_client_alone_is_its_own_model(world) -> None:
    exp = world((9,), local={"batch": 4, "lr": 0.1})
    torch.testing.assert_close(one_round(exp), advance_only(exp, 0))


def test_weight_is_the_number_of_examples() -> None:
    work = Work(torch.tensor(3.0), torch.tensor(7.0), torch.tensor(0.1), torch.tensor(0.0))
    assert FedAvg().weight(Update(torch.zeros(2)), work) == 7
    assert FedAvg(weighting="uniform").weight(Update(torch.zeros(2)), work) == 1
