"""MOON against the contrastive loss as it is written, and against FedAvg where it must be FedAvg."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy

from fedloom.algorithm import Inbox, Model, Setup, Update
from fedloom.algorithms.moon import Mine, Moon
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Batch, Task
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.models.net import Net
from fedloom.runs.settings import parse
from support.quadratic import RAGGED, after, vec, work

MLP = {"kind": "mlp", "widths": [5]}
ONE = torch.ones(())


def contrast(alg: Moon, x: Tensor, batch: Batch, down: Model, mine: Mine) -> Tensor:
    """l_con as a function of the model."""
    return alg.contrast(alg.task.encode(x, batch), batch, down, mine)


def batch_of(x, mask=None):
    zero = torch.zeros(())
    mask = torch.ones(len(x)) if mask is None else mask
    return Batch(x, torch.zeros(len(x), dtype=torch.long), mask, zero.long(), zero, zero, torch.zeros(0))


def moon(body: nn.Module, features: int, **settings) -> Moon:
    """The algorithm on a net with this encoder."""
    torch.manual_seed(0)
    return Moon(**settings).bind(Setup(Task(Net(body, features, 3)), sgd()))


def plane(W) -> torch.Tensor:
    """The parameters of a net whose encoder is the matrix W [2, 2] (its head is zero)."""
    return torch.cat([torch.tensor(W, dtype=torch.float32).flatten(), torch.zeros(9)])


def on_the_plane(**settings) -> Moon:
    return moon(nn.Linear(2, 2, bias=False), 2, **settings)


def definition(alg, x, batch, down, before):
    """Cross-entropy between two classes: like the global representation (0), or like the last one (1)."""
    z, zg, zp = (alg.task.encode(w, batch) for w in (x, down, before))
    logits = torch.stack([cosine_similarity(z, zg), cosine_similarity(z, zp)], 1) / alg.temperature
    return cross_entropy(logits, torch.zeros(len(z), dtype=torch.long))


def test_hand_worked_numbers() -> None:
    # at x = (1, 0) the encoder W gives its first column; T = 1/2
    alg = on_the_plane()
    up, left, right = [[0, 0], [1, 0]], [[-1, 0], [0, 0]], [[1, 0], [0, 0]]
    batch = batch_of(torch.tensor([[1.0, 0.0]]))

    def l_con(local, glob, last):
        return contrast(alg, plane(local), batch, Model(plane(glob)), Mine(plane(last), ONE)).item()

    softplus = lambda v: math.log1p(math.exp(v))  # noqa: E731
    assert l_con(right, right, up) == pytest.approx(softplus((0 - 1) / 0.5), rel=1e-6)  # 0.1269
    assert l_con(right, up, right) == pytest.approx(softplus((1 - 0) / 0.5), rel=1e-6)  # 2.1269
    assert l_con(right, right, left) == pytest.approx(softplus((-1 - 1) / 0.5), rel=1e-5)  # 0.0181
    assert l_con(right, left, left) == pytest.approx(math.log(2), rel=1e-6)
    assert l_con([[7, 0], [0, 0]], right, up) == l_con(right, right, up)  # lengths do not count


def test_m1_mu_0_is_fedavg_bit_for_bit(world) -> None:
    ours = after(world(algorithm={"kind": "moon", "mu": 0.0}, model=MLP, local=RAGGED), 3)
    assert torch.equal(ours.w, after(world(model=MLP, local=RAGGED), 3).w)


@pytest.mark.parametrize("executor", ["lanes", "loop"])
@pytest.mark.parametrize("first", ["skip", "global"])
def test_m2_the_first_round_of_a_client_is_fedavg(world, first, executor) -> None:
    engine = {"executor": executor}
    ours = world(algorithm={"kind": "moon", "mu": 5.0, "first": first}, model=MLP, local=RAGGED, engine=engine)
    theirs = world(model=MLP, local=RAGGED, engine=engine)
    torch.testing.assert_close(after(ours).w, after(theirs).w, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(after(ours, 2).w, after(theirs, 2).w, rtol=1e-3)  # and the second is not


def test_m3_with_the_global_model_for_the_last_one_the_term_is_log_2_and_flat() -> None:
    alg = moon(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), 6, first="global")
    g = torch.Generator().manual_seed(1)
    batch, w = batch_of(torch.randn(7, 4, generator=g)), alg.task.w0
    x = w + 0.3 * torch.randn(w.shape, generator=g)
    for mine in (Mine(w, ONE), alg.join(Model(w))):
        value = contrast(alg, x, batch, Model(w), mine)
        assert value.item() == pytest.approx(math.log(2), rel=1e-6)
        slope = alg.task.differentiate(lambda v, mine=mine: contrast(alg, v, batch, Model(w), mine), x)
        assert slope.abs().max() < 1e-7
    skipped = alg.model_copy(update={"first": "skip"}).bind(Setup(alg.task, sgd()))
    assert contrast(skipped, x, batch, Model(w), alg.join(Model(w))).item() == 0


@pytest.mark.parametrize("temperature", [0.2, 0.5, 1.0])
def test_m4_the_term_and_its_gradient_are_those_of_two_way_cross_entropy(temperature) -> None:
    alg = moon(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), 6, temperature=temperature)
    g = torch.Generator().manual_seed(2)
    batch, w = batch_of(torch.randn(9, 4, generator=g)), alg.task.w0
    x, last = (w + 0.5 * torch.randn(w.shape, generator=g) for _ in range(2))
    mine = Mine(last, ONE)
    torch.testing.assert_close(contrast(alg, x, batch, Model(w), mine), definition(alg, x, batch, w, last))
    ours = alg.task.differentiate(lambda v: contrast(alg, v, batch, Model(w), mine), x)
    theirs = alg.task.differentiate(lambda v: definition(alg, v, batch, w, last), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    whole = alg.model_copy(update={"mu": 3.0}).bind(Setup(alg.task, sgd()))
    expected = alg.task.loss(x, batch) + 3.0 * definition(alg, x, batch, w, last)
    torch.testing.assert_close(whole.loss(x, batch, Model(w), mine), expected)


def test_m5_the_last_model_changes_only_when_its_client_takes_part(world) -> None:
    exp = world(algorithm={"kind": "moon"}, model=MLP, local=RAGGED, cohort={"size": 1})
    state, store = begin(exp), RamStore(3)
    ids = torch.arange(3)
    before = exp.given(state, store, ids).mine
    assert not before.seen.any()
    for _ in range(6):
        sent = state.server.w
        state, _ = advance(exp, state, store)
        now = exp.given(state, store, ids).mine
        changed = (now.w != before.w).any(1)
        assert int(changed.sum()) == 1
        assert now.seen[changed] == 1
        # alone in its round, the client's model is the server's new one
        torch.testing.assert_close(now.w[changed][0], state.server.w)
        assert not torch.equal(now.w[changed][0], sent)
        before = now
    assert 1 < int(now.seen.sum()) <= 3


def test_what_is_kept_is_the_model_at_the_end_of_the_round() -> None:
    w, x = vec(1, 2), vec(1.5, 1)
    upload, mine = Moon().finish(x, Model(w), Mine(0 * w, 0 * ONE), work())
    assert (upload.dw.tolist(), mine.w.tolist(), mine.seen.item()) == ([0.5, -1.0], [1.5, 1.0], 1)


def test_the_server_is_fedavgs() -> None:
    # moves (1, 0) and (0, 2) with 1 and 3 examples, half of their mean (1/4, 3/2)
    heard = Inbox(Update(vec(1, 6)), vec(4)[0], vec(2)[0], vec(2)[0], vec(4)[0])
    assert Moon(server_lr=0.5).update(Model(vec(10, 10)), heard).w.tolist() == [10.125, 10.75]
    assert Moon().weight(Update(vec(0)), work(examples=7)) == 7


@pytest.mark.slow
def test_descent_on_the_term_alone_turns_to_the_known_best_direction() -> None:
    """cos(z, p) - cos(z, g) is least where z points along g/|g| - p/|p|, and the term is softplus(-|g^ - p^| / T)."""
    alg = on_the_plane()
    glob, last = [[2.0, 0], [0, 0]], [[0, 0], [0.5, 0]]  # g^ = (1, 0), p^ = (0, 1)
    batch, mine = batch_of(torch.tensor([[1.0, 0.0]])), Mine(plane(last), ONE)
    x = plane([[1.0, 0], [0.3, 0]])
    for _ in range(300):
        x = x - 0.5 * alg.task.differentiate(lambda v: contrast(alg, v, batch, Model(plane(glob)), mine), x)
    z = alg.task.encode(x, batch)[0]
    torch.testing.assert_close(z / z.norm(), torch.tensor([1.0, -1.0]) / math.sqrt(2), rtol=1e-3, atol=1e-3)
    least = math.log1p(math.exp(-math.sqrt(2) / 0.5))
    assert contrast(alg, x, batch, Model(plane(glob)), mine).item() == pytest.approx(least, rel=1e-4)


def test_a_zero_embedding_has_cosine_0_and_a_finite_gradient() -> None:
    alg = moon(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), 3)
    dead = torch.cat([torch.zeros(6), -torch.ones(3), 0.1 * torch.ones(12)])  # every unit is off
    alive = torch.cat([torch.ones(9), 0.1 * torch.ones(12)])
    batch = batch_of(torch.tensor([[1.0, 2.0], [0.5, 0.1]]))
    mine = Mine(alive, ONE)
    assert not alg.task.encode(dead, batch).any()
    assert contrast(alg, dead, batch, Model(alive), mine).item() == pytest.approx(math.log(2))
    # a dead global representation: only the push from the last one is left
    assert contrast(alg, alive, batch, Model(dead), mine).item() == pytest.approx(math.log1p(math.exp(1 / 0.5)))
    for x, glob in ((dead, alive), (alive, dead), (dead, dead)):
        assert alg.gradient(x, batch, Model(glob), mine).isfinite().all()


def test_padding_does_not_count() -> None:
    alg = moon(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), 6)
    g = torch.Generator().manual_seed(3)
    rows, w = torch.randn(6, 4, generator=g), alg.task.w0
    x, last = (w + 0.5 * torch.randn(w.shape, generator=g) for _ in range(2))
    padded = batch_of(rows, torch.tensor([1.0, 1, 1, 1, 0, 0]))
    args = (Model(w), Mine(last, ONE))
    torch.testing.assert_close(contrast(alg, x, padded, *args), contrast(alg, x, batch_of(rows[:4]), *args))


@pytest.mark.slow
def test_a_second_round_lowers_the_term_where_fedavg_does_not(world) -> None:
    """The first rounds are alike; after the second, each client's term on its own data is less with mu > 0."""
    ids = torch.arange(3)

    def terms(mu):
        exp = world(algorithm={"kind": "moon", "mu": mu}, model=MLP, local={"batch": 0, "lr": 0.1, "steps": 10})
        state, store = begin(exp), RamStore(3)
        state, _ = advance(exp, state, store)
        last = exp.given(state, store, ids).mine
        advance(exp, state, store)
        now, start = exp.given(state, store, ids).mine.w, exp.federation.train.start
        found = []
        for k in range(3):
            rows = exp.federation.train.rows[start[k] : start[k + 1]]
            batch = batch_of(exp.federation.examples(rows)[0])
            found.append(contrast(exp.algorithm, now[k], batch, state.server, Mine(last.w[k], ONE)))
        return torch.stack(found)

    assert (terms(2.0) < terms(0.0)).all()


def test_a_net_without_an_encoder_and_a_client_drawn_twice_are_refused() -> None:
    bare = Task(nn.Linear(2, 3))
    alg = Moon().bind(Setup(bare, sgd()))
    with pytest.raises(ConfigError, match="body"):
        contrast(alg, bare.w0, batch_of(torch.ones(1, 2)), Model(bare.w0), Mine(bare.w0, ONE))
    with pytest.raises(ConfigError, match="sampling"):
        parse({"algorithm": "moon", "cohort": {"sampling": "proportional"}})
    with pytest.raises(ConfigError, match="temperature"):
        parse({"algorithm": {"kind": "moon", "temperature": 0}})


def test_a_net_without_an_encoder_is_refused(world) -> None:
    """On logistic regression the contrastive term is constant, and MOON would be FedAvg without saying so."""
    exp = world(algorithm="moon", model="logistic")
    with pytest.raises(ConfigError, match="encoder"):
        advance(exp, begin(exp), RamStore(3))


def test_uniform_weighting_is_that_of_fedavg_in_a_first_round(world) -> None:
    net = {"kind": "mlp", "widths": [6]}
    a = after(world(algorithm={"kind": "moon", "weighting": "uniform"}, model=net))
    b = after(world(algorithm={"kind": "fedavg", "weighting": "uniform"}, model=net))
    assert torch.equal(a.w, b.w)
