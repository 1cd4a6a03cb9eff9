"""DFedAvgM: its momentum against the heavy ball as it is printed, its messages against the quantiser's bounds."""

from __future__ import annotations

import pytest
import torch

from fedloom.algorithm import Setup
from fedloom.algorithms.dfedavgm import DFedAvgM, Mine, Node, quantised
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.engine.topology.network import Moment
from fedloom.engine.training import groups_of
from fedloom.runs.settings import parse
from support.gossip import RAGGED, SIZES, models, network, run, trained
from support.quadratic import Quadratic, bowls, vec, visit

PLAIN = RAGGED | {"momentum": 0.0}
FULL = {"batch": 0, "steps": 3, "lr": 0.2}


def dfedavgm(world, scheme="none", **table):
    return network(world, "dfedavgm", algorithm={"scheme": scheme, **table.pop("algorithm", {})}, **table)


def work_of(exp):
    return next(iter(groups_of(exp, 0, exp.present(0)))).work


def rounded(v, bits, seed=0):
    chance = torch.rand(v.shape, generator=torch.Generator().manual_seed(seed)).to(v.dtype)
    return quantised(v, bits, chance)


# -- the heavy ball ------------------------------------------------------------------------------------
def test_momentum_is_the_heavy_ball_of_the_paper() -> None:
    bowl, x = bowls(1)[0], vec(1, -2, 0.5)
    alg = DFedAvgM().bind(Setup(Quadratic(), sgd(momentum=0.9)))
    found, _, _ = visit(alg, bowl, Node(x), Mine(x[:0], x[:0]), 7, 0.1)
    before, y = x, x
    for _ in range(7):
        before, y = y, y - 0.1 * bowl.gradient(y) + 0.9 * (y - before)
    torch.testing.assert_close(found.w, y, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_momentum_restarts_in_every_round(world) -> None:
    """One step in a round: there is nothing to keep, and it is DFedAvg."""
    one = {"batch": 0, "steps": 1, "lr": 0.3}
    ours = run(dfedavgm(world, local=one | {"momentum": 0.9}), 4)
    torch.testing.assert_close(ours, run(network(world, local=one), 4), rtol=1e-6, atol=1e-7)


def test_momentum_is_the_default_and_can_be_said() -> None:
    assert parse({"algorithm": "dfedavgm"}).local.momentum == 0.9
    assert parse({"algorithm": "dfedavgm", "local": {"momentum": 0.5}}).local.momentum == 0.5


@pytest.mark.slow
def test_a10_without_momentum_it_is_dfedavg_bit_for_bit(world) -> None:
    ours = run(dfedavgm(world, local=PLAIN), 3)
    assert torch.equal(ours, run(network(world), 3))
    assert not torch.allclose(ours, run(dfedavgm(world), 3), rtol=1e-3)


# -- the quantiser -------------------------------------------------------------------------------------
def test_a_number_by_hand() -> None:
    # 3 bits: levels -4 to 3, s = 6 / 3 = 2;   5 / 2 = 2.5: up where chance < 1/2;   -3 / 2 = -1.5: up to -1 likewise
    v = vec(6, 5, -3, 0)
    assert quantised(v, 3, vec(0, 0.4, 0.4, 0)).tolist() == [6, 6, -2, 0]
    assert quantised(v, 3, vec(0, 0.6, 0.6, 0)).tolist() == [6, 4, -4, 0]
    assert quantised(0 * v, 3, vec(0, 0, 0, 0)).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_a12_it_errs_by_less_than_a_step_and_not_in_the_mean(bits) -> None:
    g = torch.Generator().manual_seed(1)
    v = torch.randn(50, generator=g).double()
    s = float(v.abs().max()) / (2 ** (bits - 1) - 1)
    q = rounded(v, bits)
    assert ((q - v).abs() <= s * (1 + 1e-9)).all()
    levels = q / s
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-6)
    assert levels.min() >= -(2 ** (bits - 1)) - 1e-6
    assert levels.max() <= 2 ** (bits - 1) - 1 + 1e-6
    draws = rounded(v.repeat(2000), bits).view(2000, 50)  # 1e5 draws
    deviation = s / 2 / 2000**0.5  # at most, of a mean of so many
    assert ((draws.mean(0) - v).abs() < 4.5 * deviation).all()
    low = quantised(v, bits, torch.ones(50).double())
    assert (low <= v + 1e-12).all()


def test_chance_goes_by_node_round_and_place(world) -> None:
    exp = dfedavgm(world, "direct", algorithm={"bits": 4})
    g = torch.Generator().manual_seed(1)
    v = torch.randn(exp.task.size, generator=g)

    def q(round_, client):
        work = work_of(exp)
        return exp.algorithm.quantised(v, work._replace(round=torch.tensor(round_), client=torch.tensor(client)))

    assert torch.equal(q(1.0, 2), q(1.0, 2))
    assert not torch.equal(q(1.0, 2), q(1.0, 3))
    assert not torch.equal(q(1.0, 2), q(2.0, 2))


def test_another_seed_is_another_chance(world) -> None:
    def sent(seed):
        exp = dfedavgm(world, "direct", algorithm={"bits": 4}, seed=seed)
        work = work_of(exp)._replace(round=torch.tensor(1.0), client=torch.tensor(2))
        return exp.algorithm.quantised(torch.arange(exp.task.size).sin(), work)

    assert torch.equal(sent(1), sent(1))
    assert not torch.equal(sent(1), sent(2))


# -- what is sent --------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["direct", "compensated", "choco"])
def test_a11_a13_with_all_bits_it_is_the_plain_average(world, scheme) -> None:
    ours = run(dfedavgm(world, scheme, algorithm={"bits": 32}), 4)
    torch.testing.assert_close(ours, run(dfedavgm(world), 4), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["compensated", "choco"])
@pytest.mark.parametrize("bits", [3, 8])
def test_quantised_messages_preserve_the_mean(world, scheme, bits) -> None:
    gamma = {"gamma": 0.6} if scheme == "choco" else {}
    exp = dfedavgm(world, scheme, algorithm={"bits": bits} | gamma, local=FULL)
    exact = dfedavgm(world, local=FULL)
    state, store = begin(exp), RamStore(len(SIZES))
    for _ in range(3):
        ends = trained(exact, state._replace(server=Node(models(exp, state, store))), RamStore(len(SIZES)))
        state, _ = advance(exp, state, store)
        torch.testing.assert_close(models(exp, state, store).mean(0), ends.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "topology"), [("direct", "star"), ("direct", "random"), ("compensated", "star")])
def test_quantised_models_by_their_definition(world, scheme, topology) -> None:
    """Neighbours hear Q(z); a node's own z counts as it is, or also makes up for what the others lose of it."""
    table = {"bits": 4, "rounding": "floor"}
    exp = dfedavgm(world, scheme, algorithm=table, local=FULL, topology={"kind": topology})
    exact = dfedavgm(world, local=FULL, topology={"kind": topology})
    N, work = len(SIZES), work_of(exp)
    state, store, X = begin(exp), RamStore(N), exp.task.w0.expand(N, -1)
    for t in range(3):
        W = exp.topology.matrix(N, Moment(exp.seed, t)).float()
        Z = trained(exact, begin(exact)._replace(server=Node(X), round=t), RamStore(N))
        Q = torch.stack([exp.algorithm.quantised(z, work) for z in Z])
        own = W.diagonal()[:, None] if scheme == "direct" else 1.0
        state, _ = advance(exp, state, store)
        X = models(exp, state, store)
        assert (X - (W @ Q + own * (Z - Q))).abs().median() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_choco_by_its_definition(world, gamma) -> None:
    """With copies v_l of everybody, written with dense matrices."""
    exp = dfedavgm(world, "choco", algorithm={"bits": 6, "gamma": gamma, "rounding": "floor"}, local=FULL)
    exact = dfedavgm(world, local=FULL)
    W, N = exp.topology.matrix(len(SIZES)).float(), len(SIZES)
    X = V = exp.task.w0.expand(N, -1)
    work = work_of(exp)
    state, store = begin(exp), RamStore(N)
    for t in range(3):
        Z = trained(exact, begin(exact)._replace(server=Node(X), round=t), RamStore(N))
        V = V + torch.stack([exp.algorithm.quantised(z - v, work) for z, v in zip(Z, V, strict=True)])
        X = Z + gamma * (W @ V - V)
        state, _ = advance(exp, state, store)
        # a number near a step may fall on either side of it
        assert (models(exp, state, store) - X).abs().median() < 1e-5
        X, V = models(exp, state, store), exp.given(state, store, torch.arange(N)).mine.v


@pytest.mark.slow
def test_the_errors_of_choco_vanish_and_those_of_quantised_models_do_not(world) -> None:
    """Gossip alone from models that differ: differences shrink, and the steps of the quantiser with them."""
    gaps = {}
    for scheme, rounds in (("compensated", 30), ("choco", 60)):
        exp = dfedavgm(world, scheme, algorithm={"bits": 5}, local={"batch": 0, "steps": 1, "lr": 1e-12})
        N = len(SIZES)
        X = exp.task.w0 + torch.randn(N, exp.task.size, generator=torch.Generator().manual_seed(0))
        state, store = begin(exp)._replace(server=Node(X)), RamStore(N)
        for _ in range(rounds):
            state, _ = advance(exp, state, store)
        found = models(exp, state, store)
        torch.testing.assert_close(found.mean(0), X.mean(0), rtol=1e-3, atol=1e-4)
        gaps[scheme] = float((found - found.mean(0)).norm())
    assert gaps["choco"] < 1e-3
    assert gaps["compensated"] > 0.1


@pytest.mark.slow
def test_the_recursion_as_printed_is_not_an_average(world) -> None:
    """x <- x + sum W (z - x): with all bits it adds mean moves, and never brings models together."""
    exp = dfedavgm(world, "diff_literal", algorithm={"bits": 32}, local={"batch": 0, "steps": 1, "lr": 1e-12})
    X = exp.task.w0 + torch.randn(len(SIZES), exp.task.size, generator=torch.Generator().manual_seed(0))
    state, store = begin(exp)._replace(server=Node(X)), RamStore(len(SIZES))
    for _ in range(5):
        state, _ = advance(exp, state, store)
    torch.testing.assert_close(models(exp, state, store), X, rtol=1e-5, atol=1e-6)
    exp = dfedavgm(world, "diff_literal", algorithm={"bits": 32}, local=FULL)
    state, store, X = begin(exp), RamStore(len(SIZES)), begin(exp).server.w
    W = exp.topology.matrix(len(SIZES)).float()
    Z = trained(dfedavgm(world, local=FULL), state, store)
    state, _ = advance(exp, state, store)
    torch.testing.assert_close(models(exp, state, store), X + W @ (Z - X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", ["direct", "choco", "diff_literal"])
def test_bytes_are_those_of_the_bits(world, scheme) -> None:
    exp = dfedavgm(world, scheme, algorithm={"bits": 4})
    state, _ = advance(exp, begin(exp), RamStore(len(SIZES)))
    links, size, tensors = 2 * len(SIZES), exp.task.size, len(exp.task.names)
    assert state.up == links * (-(-4 * size // 8) + 4 * tensors)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["direct", "compensated", "choco", "diff_literal"])
def test_lanes_and_loop_agree(world, scheme) -> None:
    """But for numbers so near to a step that rounding decides."""
    ends = [run(dfedavgm(world, scheme, algorithm={"bits": 8}, engine={"executor": e}), 3) for e in ("lanes", "loop")]
    assert (ends[0] - ends[1]).abs().median() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["none", "direct", "compensated", "choco", "diff_literal"])
def test_some_columns_at_a_time_is_all_at_once(world, scheme, monkeypatch) -> None:
    monkeypatch.setattr("fedloom.engine.gossip.WIDE", 5)
    columns = run(dfedavgm(world, scheme), 3)
    monkeypatch.setattr(DFedAvgM, "columnwise", False)
    assert torch.equal(columns, run(dfedavgm(world, scheme), 3))


@pytest.mark.parametrize(
    ("scheme", "topology", "says"),
    [
        ("choco", {"kind": "random"}, "copies of what each neighbour .* not the same in every round .*refresh=0"),
        ("choco", {"kind": "hypercube"}, "not the same in every round"),
        ("choco", {"kind": "ring", "link_loss": 0.1}, "has links that fail"),
        ("choco", {"kind": "ring", "deaths": [[0, 3]]}, "has links that fail"),
        ("choco", {"kind": "ring", "gossip_steps": 2}, "topology.gossip_steps: .*passed on"),
        ("direct", {"kind": "ring", "gossip_steps": 2}, "topology.gossip_steps: .*passed on"),
        ("compensated", {"kind": "exp", "mixing": "push_sum"}, "topology.mixing: push_sum"),
    ],
)
def test_a14_networks_for_which_its_messages_are_not_made_are_refused(scheme, topology, says) -> None:
    with pytest.raises(ConfigError, match=says):
        parse({"algorithm": {"kind": "dfedavgm", "scheme": scheme}, "topology": topology})


def test_networks_for_which_they_are_made() -> None:
    parse({"algorithm": {"kind": "dfedavgm", "scheme": "choco"}, "topology": {"kind": "random", "refresh": 0}})
    parse({"algorithm": {"kind": "dfedavgm", "scheme": "direct"}, "topology": {"kind": "random", "link_loss": 0.1}})
    parse({"algorithm": {"kind": "dfedavgm"}, "topology": {"kind": "random", "gossip_steps": 3}})


def test_settings() -> None:
    for table, word in (
        ({"bits": 20, "scheme": "direct"}, "bits is 2"),
        ({"bits": 1}, "bits"),
        ({"gamma": 0.5}, "choco"),
    ):
        with pytest.raises(ConfigError, match=word):
            parse({"algorithm": {"kind": "dfedavgm", **table}})
