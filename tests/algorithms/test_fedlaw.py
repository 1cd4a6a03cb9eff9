"""FedLAW in a run: what the server makes of uploads and its proxy set. The mathematics is tested in tests/maths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedloom.algorithm.capabilities import needs_proxy
from fedloom.algorithms.fedlaw import FedLAW, shrinking
from fedloom.core.errors import ConfigError
from fedloom.engine.rounds import advance_watched, begin
from fedloom.engine.store import RamStore
from fedloom.maths.learned_weights import Stack, aggregated, learn_weights
from fedloom.maths.proxy_set import ProxyGradient, proxy_epochs, proxy_loss
from support.blobs import blobs
from support.proxies import SIZES, after, deserted, spoiled

FEDLAW = {"kind": "fedlaw", "server_lr": 0.1, "server_epochs": 50}


@pytest.mark.slow
@pytest.mark.parametrize("param", ["exp", "quad", "exp_cap", "fixed"])
@pytest.mark.parametrize("cohort", [{"sampling": "all"}, {"size": 2}])
def test_f1_without_epochs_it_is_fedavg_to_the_bit(laid_out, param, cohort) -> None:
    ours = laid_out({"kind": "fedlaw", "server_epochs": 0, "param": param}, cohort=cohort)
    theirs = laid_out("fedavg", cohort=cohort)
    assert torch.equal(after(ours, 4).server.w, after(theirs, 4).server.w)


def test_a_round_is_what_law_learns_of_these_uploads(laid_out) -> None:
    exp = laid_out({"kind": "fedlaw", "server_epochs": 3, "proxy_batch": 7}, seed=5)
    w0, sizes = exp.task.w0, exp.federation.train.sizes
    state = after(exp)
    moves = torch.stack(_moves(exp))
    epochs = proxy_epochs(exp.task, exp.algorithm.proxy, 3, 7, (5, 0))
    assert [len(e) for e in epochs] == [3, 3, 3]
    along = ProxyGradient(exp.task, exp.algorithm.proxy)
    how = learn_weights(Stack(w0, moves), sizes.double(), along, epochs).how
    assert torch.equal(state.server.w, aggregated(Stack(w0, moves), how))
    assert torch.equal(state.server.lam, how.lam)


def _moves(exp):
    """What each client uploads in the first round, in the order of clients."""
    from fedloom.engine.local import train
    from fedloom.engine.training import groups_of

    state, store = begin(exp), RamStore(exp.federation.clients)
    found = {}
    with torch.no_grad():
        for group in groups_of(exp, 0, exp.present(0)):
            outcome = train(exp.algorithm, exp.federation, group, exp.given(state, store, group.ids))
            found |= dict(zip(group.ids.tolist(), outcome.uploads.dw, strict=True))
    return [found[i] for i in sorted(found)]


@pytest.mark.slow
def test_bad_clients_lose_their_weight(laid_out) -> None:
    exp = spoiled(laid_out(FEDLAW), 1)
    server = after(exp, 5).server
    share = float(exp.federation.train.sizes[1]) / sum(SIZES)
    assert float(server.lam[1]) < share / 3
    assert float(server.lam.sum()) == pytest.approx(1, abs=1e-12)
    plain = after(spoiled(laid_out("fedavg"), 1), 5).server.w
    assert proxy_loss(exp.task, exp.algorithm.proxy, server.w) < proxy_loss(exp.task, exp.algorithm.proxy, plain)


def test_a_fixed_shrink_is_applied_once_a_round(laid_out) -> None:
    settings = {"kind": "fedlaw", "server_epochs": 0, "param": "fixed", "shrink": 0.95}
    shrunk, plain = after(laid_out(settings)).server, after(laid_out("fedavg")).server
    torch.testing.assert_close(shrunk.w, 0.95 * plain.w)
    assert float(shrunk.shrink) == pytest.approx(0.95)


def test_what_is_excluded_does_not_shrink(laid_out) -> None:
    settings = {"kind": "fedlaw", "server_epochs": 0, "param": "fixed", "shrink": 0.5, "shrink_exclude": ["bias"]}
    exp = laid_out(settings, model={"kind": "mlp", "widths": [4]})
    plain = after(laid_out("fedavg", model={"kind": "mlp", "widths": [4]})).server.w
    w = after(exp).server.w
    bias = exp.task.mask("body.fc1.0.bias", "head.bias").bool()
    torch.testing.assert_close(w[bias], plain[bias])
    torch.testing.assert_close(w[~bias], 0.5 * plain[~bias])


def test_exclusions_by_name_and_by_kind(world) -> None:
    images = blobs((9,))._replace(x=np.zeros((29, 1, 4, 4), dtype=np.float32))
    task = world(arrays=images, model="resnet20").task
    assert shrinking(task, ()) is None
    assert torch.equal(shrinking(task, ("head.",)), ~task.mask("head.").bool())
    left = ~shrinking(task, ("bn",))
    assert 0 < int(left.sum()) < task.size / 10
    assert shrinking(task, ("bn",)).all() == torch.tensor(False)
    with pytest.raises(ConfigError, match="no parameter has a name that begins with 'haed'"):
        shrinking(task, ("haed",))


@pytest.mark.parametrize("rule", ["grid", "ratio"])
def test_a_shrink_by_rule(laid_out, rule) -> None:
    server = after(laid_out({"kind": "fedlaw", "shrink_rule": rule, "server_epochs": 2})).server
    assert 0.5 <= float(server.shrink) <= 1
    assert rule == "ratio" or float(server.shrink) in (0.90, 0.93, 0.95, 0.97, 0.99, 1.0)


def test_the_printed_shrink_is_one_over_the_squares_of_full_gradients(laid_out) -> None:
    exp = laid_out({"kind": "fedlaw", "shrink_rule": "eq5", "shrink": 0.5, "server_epochs": 2})
    fed, net = exp.federation, exp.task.module(exp.task.w0, exp.task.buffers0)
    squares = []
    for i in range(fed.clients):
        x, y = fed.examples(fed.train.rows[fed.train.start[i] : fed.train.start[i + 1]])
        g = torch.autograd.grad(torch.nn.functional.cross_entropy(net(x), y), list(net.parameters()))
        squares.append(sum(float(part.double().square().sum()) for part in g))
    state = after(exp)
    assert float(state.server.shrink) == pytest.approx(0.5 * len(squares) / sum(squares), rel=1e-5)
    assert state.up == 4 * (4 * exp.task.size + 4)  # one number more


def test_the_pseudo_gradient_reading_takes_the_squares_of_moves(laid_out) -> None:
    exp = laid_out({"kind": "fedlaw", "shrink_rule": "eq5_moves", "shrink": 0.5, "server_epochs": 2})
    squares = [float(move.double().square().sum()) for move in _moves(exp)]
    server = after(exp).server
    assert float(server.shrink) == pytest.approx(0.5 * len(squares) / sum(squares), rel=1e-6)
    by_law = laid_out({"kind": "fedlaw", "param": "fixed", "server_epochs": 2})
    torch.testing.assert_close(server.lam, after(by_law).server.lam)  # learned with gamma = 1


@pytest.mark.slow
def test_frozen_weights_are_those_of_the_first_round(laid_out) -> None:
    exp = spoiled(laid_out({**FEDLAW, "freeze_after": 1}), 1)
    first, later = after(exp, 1).server, after(exp, 4).server
    torch.testing.assert_close(later.lam, first.lam)
    assert torch.equal(later.shrink, first.shrink)
    assert not torch.equal(later.w, first.w)


@pytest.mark.slow
def test_frozen_weights_do_not_drift_where_cohorts_change(laid_out) -> None:
    """What was learned of a client stays as it is, whoever it meets later."""
    exp = spoiled(laid_out({**FEDLAW, "freeze_after": 2}, cohort={"size": 2}, seed=3), 1)
    learned, later = after(exp, 2).server, after(exp, 40).server
    assert torch.equal(later.offsets, learned.offsets)
    assert bool((learned.offsets != 0).any())
    assert torch.equal(later.shrink, learned.shrink)
    ids = exp.present(39).drawn.ids
    kept = exp.federation.train.sizes[ids] * learned.offsets[ids].exp()
    torch.testing.assert_close(later.lam[ids], kept / kept.sum())


@pytest.mark.slow
def test_weights_are_learned_before_they_are_frozen(laid_out) -> None:
    """A round in which nobody is heard is not the one in which they are learned."""
    exp = deserted(laid_out({**FEDLAW, "freeze_after": 1}), 0)
    assert float(after(exp, 1).server.learned) == 0
    assert bool((after(exp, 3).server.offsets != 0).all())
    assert float(after(exp, 3).server.learned) == 1


@pytest.mark.slow
def test_bounds_of_gamma_are_settings_and_say_when_they_decide(laid_out) -> None:
    table = {"evaluate": {"diagnostics": ["updates"]}}
    found = {}
    for high in (1.2, 50.0):
        exp = laid_out({**FEDLAW, "shrink_max": high}, **table)
        found[high] = advance_watched(exp, begin(exp), RamStore(4)).found
    assert found[1.2]["weights/shrink"] == pytest.approx(1.2)
    assert found[1.2]["weights/shrink_bounded"] == 1
    assert found[50.0]["weights/shrink"] > 1.2
    assert found[50.0]["weights/shrink_bounded"] == 0
    with pytest.raises(ConfigError, match=r"gamma begins at 0.4, which is not between shrink_min = 0.5"):
        laid_out({"kind": "fedlaw", "shrink": 0.4})


def test_two_stages_learn_too(laid_out) -> None:
    server = after(spoiled(laid_out({**FEDLAW, "stage": "two_stage"}), 1)).server
    assert float(server.lam[1]) < 50 / sum(SIZES) / 2


def test_who_is_not_there_counts_nothing_and_is_remembered(laid_out) -> None:
    exp = laid_out(FEDLAW, cohort={"size": 2}, seed=2)
    server = after(exp, 1).server
    assert int((server.lam > 0).sum()) == 2
    assert torch.equal(server.offsets != 0, server.lam > 0)


def test_what_it_tells(laid_out) -> None:
    exp = laid_out(FEDLAW, evaluate={"diagnostics": ["updates", "weights"]})
    done = advance_watched(exp, begin(exp), RamStore(4))
    lam = done.state.server.lam
    assert done.found["weights/variance"] == pytest.approx(float(lam.var(correction=0)))
    assert done.found["weights/effective"] == pytest.approx(1 / float((lam**2).sum()))
    assert done.found["weights/largest"] == pytest.approx(float(lam.max()))
    assert done.found["weights/shrink"] == pytest.approx(float(done.state.server.shrink))


def test_only_the_model_travels(laid_out) -> None:
    exp = laid_out(FEDLAW)
    state = after(exp)
    assert state.down == state.up == 4 * 4 * exp.task.size


@pytest.mark.slow
def test_batch_normalisation_learns_on_statistics_of_proxy_batches(world) -> None:
    rng = np.random.default_rng(0)
    images = blobs(SIZES)._replace(x=rng.normal(size=(sum(SIZES) + 20, 1, 4, 4)).astype(np.float32))
    settings = {"kind": "fedlaw", "server_epochs": 2, "proxy_batch": 5}
    exp = world(
        SIZES, arrays=images, algorithm=settings, model={"kind": "resnet20", "norm": "batch"}, proxy={"size": 11}
    )
    assert [len(e) for e in proxy_epochs(exp.task, exp.algorithm.proxy, 1, 5, (0, 0))] == [2]  # not one of one row
    assert bool(after(exp).server.w.isfinite().all())


@pytest.mark.slow
def test_running_statistics_come_from_the_proxy_set_or_from_clients(world) -> None:
    """By ``proxy`` they are those of the proxy batches; by ``average`` the clients'; one pass moves the latter."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES) + 20, 1, 4, 4)).astype(np.float32) * 3 + 1
    images = blobs(SIZES)._replace(x=x)
    found = {}
    for bn in ("proxy", "average", "recalibrate"):
        settings = {"kind": "fedlaw", "server_epochs": 8, "server_lr": 1e-9, "proxy_batch": 11, "bn": bn}
        model = {"kind": "resnet20", "norm": "batch"}
        exp = world(SIZES, arrays=images, algorithm=settings, model=model, proxy={"size": 11}, local={"lr": 0.01})
        state = after(exp)
        found[bn] = state.buffers
    held = exp.algorithm.proxy
    net = exp.task.module(state.server.w, exp.task.buffers0).train()
    with torch.no_grad():
        for _ in range(8):
            net(held.x)
    seen = torch.cat([b.flatten() for _, b in net.named_buffers() if b.is_floating_point()])
    torch.testing.assert_close(found["proxy"], seen, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(found["average"], seen, rtol=1e-2, atol=1e-2)
    one = torch.nn.functional.mse_loss(found["recalibrate"], seen)
    assert one < torch.nn.functional.mse_loss(found["average"], seen)


def test_without_a_proxy_set_it_is_refused(laid_out) -> None:
    with pytest.raises(ConfigError, match=r"proxy.size: the server of this algorithm learns from its own rows"):
        laid_out("fedlaw", proxy={"size": 0})
    assert needs_proxy(FedLAW())
