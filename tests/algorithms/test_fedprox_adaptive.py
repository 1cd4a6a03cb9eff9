"""The adaptive proximal weight, by hand."""

from __future__ import annotations

import pytest
import torch

from fedloom.algorithm import Inbox
from fedloom.algorithms.fedprox_adaptive import FedProxAdaptive, Moved
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore


def heard(loss: float) -> Inbox[Moved]:
    one = torch.ones((), dtype=torch.float64)
    return Inbox(Moved(2 * torch.ones(3, dtype=torch.float64), 2 * loss * one), 2 * one, one, one, one)


@pytest.mark.parametrize(
    ("losses", "weights"),
    [
        ([3.0, 2.0, 1.0], [0.5, 0.5, 0.4]),  # the first sets the mark; two falls lower mu
        ([3.0, 4.0, 5.0], [0.5, 0.6, 0.7]),
        ([3.0, 2.0, 4.0, 3.0, 2.0], [0.5, 0.5, 0.6, 0.6, 0.5]),  # a rise starts the count anew
        ([3.0, 2.0, 1.0, 0.9, 0.8], [0.5, 0.5, 0.4, 0.4, 0.3]),  # so does lowering
    ],
)
def test_mu_follows_the_loss(losses, weights) -> None:
    alg = FedProxAdaptive(mu=0.5, patience=2)
    server = alg.init(torch.zeros(3))
    for loss, mu in zip(losses, weights, strict=True):
        server = alg.update(server, heard(loss))
        assert float(server.mu) == pytest.approx(mu)
    assert server.w.tolist() == [len(losses)] * 3


def test_mu_stays_between_zero_and_one() -> None:
    alg = FedProxAdaptive(mu=0.95, patience=1)
    server = alg.init(torch.zeros(3))
    for loss in range(5):
        server = alg.update(server, heard(float(loss)))
    assert float(server.mu) == 1.0
    for loss in range(20, 0, -1):
        server = alg.update(server, heard(-float(20 - loss)))
    assert float(server.mu) == 0.0


def test_at_zero_the_first_round_is_fedavg_and_the_loss_is_that_of_all_data(world) -> None:
    local = {"batch": 3, "lr": 0.2, "epochs": 2}
    exp, plain = world(algorithm="fedprox_adaptive", local=local), world(local=local)
    state, _ = advance(exp, begin(exp), RamStore(3))
    torch.testing.assert_close(state.server.w, advance(plain, begin(plain), RamStore(3))[0].server.w)
    x, y = exp.federation.examples(exp.federation.train.rows)
    loss = torch.nn.functional.cross_entropy(exp.task.apply(exp.task.w0, x, exp.task.buffers0), y)
    assert float(state.server.loss) == pytest.approx(float(loss), rel=1e-5)
