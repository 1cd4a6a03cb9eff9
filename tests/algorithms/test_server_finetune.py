"""The controls for methods that use labelled examples at the server: to train on them, and to solve with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.maths.linear_head import head_of
from fedloom.maths.proxy_set import proxy_batches, proxy_loss
from support.proxies import after, spoiled


def test_server_finetune_is_fedavg_and_then_training_on_the_proxy_set(laid_out) -> None:
    exp = laid_out({"kind": "server_finetune", "server_epochs": 2, "server_lr": 0.1, "proxy_batch": 8}, seed=3)
    w = torch.nn.Parameter(after(laid_out("fedavg", seed=3)).server.w.clone())
    steps = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    for epoch in range(2):
        for rows in proxy_batches(20, 8, 3, 0, epoch):
            steps.zero_grad()
            x, y = exp.algorithm.proxy.x[rows], exp.algorithm.proxy.y[rows]
            torch.nn.functional.cross_entropy(exp.task.apply(w, x, exp.task.buffers0), y).backward()
            steps.step()
    torch.testing.assert_close(after(exp).server.w, w.detach())


@pytest.mark.slow
def test_server_finetune_helps_where_clients_are_bad(laid_out) -> None:
    tuned = spoiled(laid_out({"kind": "server_finetune", "server_lr": 0.1}), 0, 1)
    plain = spoiled(laid_out("fedavg"), 0, 1)
    losses = [float(proxy_loss(tuned.task, tuned.algorithm.proxy, after(exp, 3).server.w)) for exp in (tuned, plain)]
    assert losses[0] < losses[1]


@pytest.mark.parametrize("bias", [True, False])
def test_proxy_ridge_is_ridge_on_the_proxy_set_whatever_clients_have(laid_out, bias) -> None:
    exp = laid_out({"kind": "proxy_ridge", "bias": bias, "ridge": 0.01})
    x, y = exp.algorithm.proxy.x.double().numpy(), np.eye(3)[exp.algorithm.proxy.y.numpy()]
    x = np.concatenate([x, np.ones((20, 1))], 1) if bias else x
    gram = x.T @ x
    head = np.linalg.solve(gram + 0.01 * np.trace(gram) / len(gram) * np.eye(len(gram)), x.T @ y)
    state = after(exp, 2)
    np.testing.assert_allclose(head_of(exp.task, state.server.w, bias).numpy(), head, rtol=1e-5, atol=1e-6)
    assert torch.equal(after(spoiled(exp, 0, 1, 2)).server.w, state.server.w)
    assert state.up == 0
    assert state.gradients == 0
