"""Gossip: sums that preserve the mean, nodes that fail and come back, and a node that is driven by messages alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedloom
from fedloom.algorithm import Model, Traits, Work
from fedloom.algorithms.dpsgd import DPSGD
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core import tree
from fedloom.core.errors import DivergedError, SplitError
from fedloom.core.optim import Local
from fedloom.engine import checkpoint, gossip, mixing
from fedloom.engine.evaluate import evaluate, models_of
from fedloom.engine.local import train
from fedloom.engine.messages import Message, inbox_of, next_upload
from fedloom.engine.mixing import is_dense, mixed_rows
from fedloom.engine.plan import Group
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.settings import Evaluate
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import DiskStore, RamStore
from fedloom.engine.topology.kinds import Custom, Exponential, Full, Hypercube, Random, Ring, Star, Torus
from fedloom.engine.topology.network import Moment, Topology, links_up, surviving
from fedloom.engine.topology.weights import psi
from fedloom.engine.training import groups_of
from support.worlds import experiment, federation

NAN = float("nan")
SIXTEEN = (5, 9, 7, 6, 12, 3, 8, 4, 10, 2, 6, 11, 5, 9, 7, 6)


def network(topology: Topology, sizes: Any = SIXTEEN, algorithm: Any = None, **more: Any) -> Experiment:
    torch.manual_seed(0)
    chosen = {
        "local": Local(batch=4, lr=0.05, steps=1),
        "executor": "loop",
        "evaluate": Evaluate(pre_mix=False),
        **more,
    }
    return experiment(federation(sizes), nn.Linear(5, 3), algorithm or DPSGD(order="atc"), topology=topology, **chosen)


def scattered(exp: Experiment, spread_: float = 1.0) -> RunState:
    """Nodes that do not agree yet."""
    state = begin(exp)
    noise = torch.randn(state.server.w.shape, generator=torch.Generator().manual_seed(1))
    return state._replace(server=state.server._replace(w=state.server.w + spread_ * noise))


def still(**more: Any) -> dict[str, Any]:
    """Settings under which training moves nothing, so that a round is only gossip."""
    return {
        "local": Local(batch=2, lr=1e-30, steps=1),
        "executor": "lanes",
        **more,
    }  # two rows, so that all train at once


# -- the sum ---------------------------------------------------------------------------------------
@given(st.sampled_from([Ring(), Full(), Star(), Torus(), Random(max_degree=4), Exponential()]), st.integers(2, 40))
@settings(max_examples=60, deadline=None)
def test_the_sum_is_the_product_of_matrices(topology: Topology, nodes: int) -> None:
    weights = topology.weigh(nodes)
    values = (torch.randn(nodes, 7, 3), torch.randn(nodes))
    found = mixed_rows(weights, values)
    want = tree.mix(torch.from_numpy(weights.dense()), values)
    assert found[0].dtype == torch.float64
    for a, b in zip(found, want, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_neither_blocks_nor_parts_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Random(max_degree=6).weigh(40)
    x = torch.randn(40, 1001)
    whole = mixed_rows(weights, x)
    monkeypatch.setattr(mixing, "_BLOCK", 40 * 64)
    assert torch.equal(mixed_rows(weights, x), whole)
    parts = [mixed_rows(weights, x, slice(low, min(low + 7, 40))) for low in range(0, 40, 7)]
    assert torch.equal(torch.cat(parts), whole)


def test_dense_graphs_are_one_product_and_agree() -> None:
    assert is_dense(Full().weigh(40))
    assert not is_dense(Full().weigh(20))
    assert not is_dense(Star().weigh(1000))
    weights, x = Full().weigh(40), torch.randn(40, 50)
    assert torch.allclose(mixed_rows(weights, x), x.double().mean(0).expand(40, -1), atol=1e-12)


def test_float32_is_summed_in_float64() -> None:
    x = torch.tensor([[1e8], [1.0], [-1e8]])
    assert mixed_rows(Full().weigh(3), x)[0] == pytest.approx(1 / 3, abs=1e-8)


@given(st.integers(2, 12), st.integers(0, 100))
@settings(max_examples=40, deadline=None)
def test_mixing_preserves_the_mean(nodes: int, seed: int) -> None:
    values = torch.randn(nodes, 5, generator=torch.Generator().manual_seed(seed))
    assert torch.allclose(mixed_rows(Ring().weigh(nodes), values).mean(0), values.double().mean(0), atol=1e-12)


# -- T3, T4, T8: rounds in which nothing is trained ------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("topology", [Ring(), Torus(), Random(max_degree=4), Star()], ids=lambda t: t.kind)
def test_pure_gossip_keeps_the_mean_and_contracts_as_theory_says(topology: Topology) -> None:
    exp = network(topology, **still(), rounds=12)
    state, store = scattered(exp), RamStore(16)
    mean = state.server.w.double().mean(0)
    for t in range(12):
        before = (state.server.w.double() - mean).norm()
        state, _ = advance(exp, state, store)
        after = (state.server.w.double() - mean).norm()
        assert after <= psi(topology.weigh(16, Moment(exp.seed, t))) * before * (1 + 1e-4) + 1e-6
    assert torch.allclose(state.server.w.double().mean(0), mean, atol=1e-6)


@pytest.mark.slow
def test_a_hypercube_agrees_after_its_dimensions() -> None:
    exp = network(Hypercube(), **still())
    state, store = scattered(exp), RamStore(16)
    mean = state.server.w.double().mean(0).float()
    for _ in range(4):
        state, _ = advance(exp, state, store)
    assert torch.allclose(state.server.w, mean.expand(16, -1), atol=1e-6)
    assert evaluate(exp, state, store)["consensus/distance"] < 1e-6


def test_without_links_every_node_is_alone() -> None:
    """T8: the matrix that mixes nothing gives as many runs as there are nodes."""
    apart = Custom(links=((0, 1),), link_loss=0.0, allow_disconnected=True)
    sizes = (5, 9, 7, 6)
    exp = network(apart, sizes)
    state, store = begin(exp), RamStore(4)
    for _ in range(3):
        state, _ = advance(exp, state, store)
    for node in (2, 3):
        only = federation(sizes)
        rows = only.train.rows[only.train.start[node] : only.train.start[node + 1]]
        w = exp.task.w0
        for t in range(3):
            group = next(g for g in groups_of(exp, t, exp.present(t)) if node in g.ids.tolist())
            group = group.pick([group.ids.tolist().index(node)])
            picked = group.rows[0, 0][group.mask[0, 0] > 0]
            assert set(picked.tolist()) <= set(rows.tolist())
            x, y = exp.federation.examples(picked)
            net = exp.task.module(w, exp.task.buffers0)
            nn.functional.cross_entropy(net(x), y).backward()
            w = w - 0.05 * torch.cat([p.grad.flatten() for p in net.parameters()])
        assert torch.allclose(state.server.w[node], w, atol=1e-6)


@pytest.mark.slow
def test_gossip_steps_are_powers_of_the_matrix() -> None:
    one, three = network(Ring(), **still()), network(Ring(gossip_steps=3), **still())
    start = scattered(one)
    w = Ring().matrix(16)
    after, _ = advance(three, start, RamStore(16))
    want = torch.linalg.matrix_power(w, 3) @ start.server.w.double()
    assert torch.allclose(after.server.w.double(), want, atol=1e-5)
    single = start
    for _ in range(3):
        single, _ = advance(one, single, RamStore(16))
    assert torch.equal(single.server.w, after.server.w)
    assert after.up == 3 * advance(one, start, RamStore(16))[0].up


# -- T7: failures ----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("loss", [{"link_loss": 0.2}, {"node_loss": 0.3}, {"link_loss": 0.2, "node_loss": 0.1}])
@pytest.mark.parametrize("steps", [1, 2])
def test_failures_preserve_the_mean(loss: dict[str, float], steps: int) -> None:
    topology = Random(max_degree=4, gossip_steps=steps, **loss)
    exp = network(topology, **still(), rounds=50)
    state, store = scattered(exp), RamStore(16)
    mean = state.server.w.double().mean(0)
    for _ in range(50 // steps):
        state, _ = advance(exp, state, store)
    assert torch.allclose(state.server.w.double().mean(0), mean, atol=1e-6)
    assert float((state.server.w - mean.float()).norm()) < 1e-2  # and they agree all the same


def test_a_node_that_is_offline_stands_still_or_trains_alone() -> None:
    frozen = network(Ring(node_loss=0.4))
    alone = network(Ring(node_loss=0.4, train_offline=True))
    gone = frozen.topology.offline(16, Moment(3, 0))  # type: ignore[union-attr]
    assert 0 < gone.sum() < 16
    assert frozen.present(0).drawn.ids.tolist() == np.flatnonzero(~gone).tolist()
    assert len(alone.present(0).drawn.ids) == 16
    start = scattered(frozen)
    stopped = advance_watched(frozen, start, RamStore(16))
    moving = advance_watched(alone, start, RamStore(16))
    assert torch.equal(stopped.state.server.w[gone], start.server.w[gone])
    assert bool((moving.state.server.w[gone] != start.server.w[gone]).any(1).all())
    assert torch.equal(moving.state.server.w[~gone], stopped.state.server.w[~gone])
    assert [d.client for d in stopped.work] == np.flatnonzero(~gone).tolist()
    assert stopped.found["network/offline"] == gone.sum()
    assert stopped.state.nodes.away.tolist() == gone.astype(int).tolist()


@pytest.mark.parametrize("order", ["lian", "atc", "mix_then_train"])
def test_who_has_not_been_there_yet_is_as_it_began(order: Any) -> None:
    """What a node keeps for itself begins with the model of the beginning, not with that of another node."""
    exp = network(Ring(node_loss=0.4), algorithm=DPSGD(order=order))
    gone = torch.from_numpy(exp.topology.offline(16, Moment(3, 0)))  # type: ignore[union-attr]
    store = RamStore(16)
    state, _ = advance(exp, begin(exp), store)
    models = torch.cat([part.w for part in models_of(exp, state, store, torch.arange(16))])
    assert torch.equal(models[gone], exp.task.w0.expand(int(gone.sum()), -1))
    assert bool((models[~gone] != exp.task.w0).any(1).any())


def test_a_network_in_which_all_are_offline_waits() -> None:
    exp = network(Ring(node_loss=0.999))
    start = scattered(exp)
    after = advance_watched(exp, start, RamStore(16))
    assert torch.equal(after.state.server.w, start.server.w)
    assert (after.state.round, after.state.up, after.state.gradients) == (1, 0, 0)
    assert after.state.nodes.away.tolist() == [1] * 16


def test_who_was_away_too_long_asks_its_neighbours() -> None:
    stale, pull = (network(Ring(node_loss=0.3, rejoin=how, stale_after=2), **still()) for how in ("stale", "pull"))
    state = scattered(stale)
    back = next(k for k in range(16) if not stale.topology.offline(16, Moment(3, 0))[[k - 1, k, (k + 1) % 16]].any())  # type: ignore[union-attr]
    away = torch.zeros(16, dtype=torch.int64)
    away[back] = 3
    state = state._replace(nodes=state.nodes._replace(away=away))
    mean = (state.server.w[back - 1] + state.server.w[(back + 1) % 16]) / 2
    pulled, _ = advance(pull, state, RamStore(16))
    kept, _ = advance(stale, state, RamStore(16))
    row = stale.topology.weigh(16).dense()[back]  # type: ignore[union-attr]
    own = row[back]
    assert torch.allclose(pulled.server.w[back] - kept.server.w[back], own * (mean - state.server.w[back]), atol=1e-5)
    recent = state._replace(nodes=state.nodes._replace(away=away.clamp(max=2)))
    assert torch.equal(advance(pull, recent, RamStore(16))[0].server.w, kept.server.w)


def test_who_was_away_too_long_forgets_its_momentum(world) -> None:
    """Also with a method that keeps nothing of its own: the optimizer starts anew beside the model that was pulled."""
    ring = {"kind": "ring", "node_loss": 0.4, "stale_after": 0, "rejoin": "pull"}
    local = {"lr": 0.1, "momentum": 0.9, "state": "persist"}
    exp = world((6,) * 5, algorithm={"kind": "dfedavg"}, topology=ring, local=local)
    state, store, back = begin(exp), RamStore(5), set[int]()
    everyone = torch.arange(5)
    for _ in range(6):
        offline = exp.topology.offline(5, Moment(exp.seed, state.round))  # type: ignore[union-attr]
        to, _ = gossip.pulled(exp, state.round, offline, state.nodes.away.numpy())
        before = exp.given(state, store, everyone).memory
        again = gossip._rejoined(exp, state, store, offline)
        after = exp.given(again, store, everyone).memory
        for node in range(5):
            (old,), (new,) = (tree.leaves(tree.take(each, node)) for each in (before, after))
            assert torch.equal(new, torch.zeros_like(old) if node in to else old)
        back |= {node for node in to.tolist() if any(x.any() for x in tree.leaves(tree.take(before, node)))}
        state, _ = advance(exp, state, store)
    assert back


# -- messages that are used again -------------------------------------------------------------------
def remembering(topology: Topology, rounds: int, start: Any, fresh: dict[str, Any]) -> Any:
    """The same by definition: X <- W Z, in which a row that is lost is the last one that came over its link."""
    X, heard = start.double(), {}
    for t in range(rounds):
        at = Moment(3, t)
        whole, gone = topology.weigh(16, at), topology.offline(16, at)
        up = links_up(topology, whole, at)
        Z, X = X, torch.zeros_like(X)
        for i, j, value, there in zip(whole.to, whole.by, whole.value, up, strict=True):
            old = heard.get((i, j), (None, -99))
            if there:
                X[i] += value * Z[j]
                heard[i, j] = (Z[j], t)
            elif not gone[i] and t - old[1] <= topology.stale_after:
                X[i] += value * old[0]
                fresh[(t, i, j)] = t - old[1]
            else:
                X[i] += value * Z[i]
    return X


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        Ring(link_loss=0.4, link_policy="stale"),
        Random(max_degree=4, refresh=3, link_loss=0.3, node_loss=0.2, link_policy="stale", stale_after=2),
        Full(link_loss=0.3, node_loss=0.2, link_policy="stale", stale_after=0),
    ],
    ids=lambda t: t.kind,
)
def test_a_lost_message_is_the_last_one_of_its_link(topology: Topology) -> None:
    exp = network(topology, **still(), rounds=8)
    state, store = scattered(exp), RamStore(16)
    start, used = state.server.w, {}
    for _ in range(8):
        state, _ = advance(exp, state, store)
    want = remembering(topology, 8, start, used)
    assert torch.allclose(state.server.w.double(), want, atol=1e-5)
    assert bool(used) == (topology.stale_after > 0)
    assert set(used.values()) <= set(range(1, topology.stale_after + 1))


@pytest.mark.slow
def test_what_is_used_again_was_paid_for_once() -> None:
    plain, stale = (network(Ring(link_loss=0.4, link_policy=how), **still()) for how in ("self", "stale"))
    ends = [advance(exp, scattered(exp), RamStore(16))[0] for exp in (plain, stale)]
    assert torch.equal(ends[0].server.w, ends[1].server.w)  # in the first round there is nothing to use again
    two = [advance(exp, end, RamStore(16))[0] for exp, end in zip((plain, stale), ends, strict=True)]
    assert not torch.equal(two[0].server.w, two[1].server.w)
    assert (two[0].up, two[0].busiest) == (two[1].up, two[1].busiest)


# -- nodes that die --------------------------------------------------------------------------------
@pytest.mark.slow
def test_who_is_left_goes_on_with_a_mean_of_its_own() -> None:
    """Node 5 dies before the third round: it stands still, nobody hears it, and the mean is that of the others."""
    exp = network(Torus(deaths=((5, 3),)), **still(), rounds=40)
    state, store = scattered(exp), RamStore(16)
    left = torch.arange(16) != 5
    for t in range(40):
        before = state
        if t == 2:
            mean, frozen = state.server.w[left].double().mean(0), state.server.w[5]
        done = advance_watched(exp, state, store)
        state = done.state
        assert done.found["network/dead"] == float(t >= 2)
        if t >= 2:
            assert torch.equal(state.server.w[5], frozen)
            assert 5 not in [did.client for did in done.work]
            assert state.nodes.traffic[5] == before.nodes.traffic[5]
            assert done.found["consensus/contraction"] <= done.found["consensus/psi"] * (1 + 1e-4)
    assert torch.allclose(state.server.w[left].double().mean(0), mean, atol=1e-6)
    assert float((state.server.w[left].double() - mean).norm()) < 1e-3
    found = evaluate(exp, state, store)
    assert found["consensus/distance"] < 1e-3  # without the dead one, which is far away


@pytest.mark.parametrize("train_offline", [False, True])
def test_the_dead_do_not_train_whatever_the_absent_do(train_offline: bool) -> None:
    exp = network(Ring(deaths=((2, 1),), node_loss=0.4, train_offline=train_offline))
    offline = exp.topology.offline(16, Moment(3, 0))  # type: ignore[union-attr]
    assert not offline[2]
    there = set(exp.present(0).drawn.ids.tolist())
    assert there == set(range(16)) - {2} - (set() if train_offline else set(np.flatnonzero(offline).tolist()))


def test_a_network_that_splits_or_dies_out_says_so() -> None:
    exp = network(Ring(deaths=((0, 1), (8, 2)), on_split="abort"))
    state, store = begin(exp), RamStore(16)
    state, _ = advance(exp, state, store)
    with pytest.raises(SplitError, match=r"round 2: .*\(0, 8\)"):
        advance(exp, state, store)
    with pytest.raises(SplitError, match="round 1: all nodes have died"):
        advance(network(Ring(node_death=0.999999)), state._replace(round=0), store)
    with pytest.raises(SplitError, match="round 1: all nodes have died"):  # the evaluation comes first
        evaluate(network(Ring(node_death=0.999999)), state._replace(round=0), store)


class OneBadNode(DPSGD):
    """The node with seven examples computes nonsense in its second round."""

    def finish(self, x: Tensor, down: Model, mine: Any, work: Work) -> Any:
        hit = (work.examples == 7) & (work.round == 1)
        return super().finish(torch.where(hit, torch.full_like(x, NAN), x), down, mine, work)


@pytest.mark.parametrize("order", ["lian", "atc", "mix_then_train"])
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_a_bad_node_keeps_what_it_had_and_the_network_goes_on(order: Any, executor: Any) -> None:
    exp = network(Ring(), (5, 9, 7, 6), OneBadNode(order=order), executor=executor)
    state, store = begin(exp), RamStore(4)
    named = []
    for _ in range(3):
        before = state
        state, excluded = advance(exp, state, store)
        named.append(excluded)
        if excluded:
            assert torch.equal(state.server.w[2], before.server.w[2])
        models = torch.cat([part.w for part in models_of(exp, state, store, torch.arange(4))])
        assert bool(models.isfinite().all())
    assert named == [(), (2,), ()]


@pytest.mark.slow
@given(st.integers(3, 10), st.data())
@settings(max_examples=40, deadline=None)
def test_nodes_that_are_cut_off_leave_the_others_their_mean(nodes: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, nodes - 1), min_size=1, max_size=nodes - 1))
    topology = data.draw(st.sampled_from([Ring(), Full()]))
    ok = np.array([k not in bad for k in range(nodes)])
    weights = surviving(topology, topology.weigh(nodes), Moment(), ok)
    values = torch.where(torch.from_numpy(ok)[:, None], torch.randn(nodes, 4), 0)
    mixed = mixed_rows(weights, values)
    assert torch.allclose(mixed[ok].mean(0), values[ok].double().mean(0), atol=1e-12)
    assert weights.rows() == pytest.approx(np.ones(nodes))


def test_senders_are_the_neighbours_that_were_heard() -> None:
    ok = np.array([True, True, False, True, True])
    assert Ring().weigh(5).senders().tolist() == [3] * 5
    assert surviving(Ring(), Ring().weigh(5), Moment(), ok).senders().tolist() == [3, 2, 1, 2, 3]


class AllBad(DPSGD):
    def finish(self, x: Tensor, down: Model, mine: Any, work: Work) -> Any:
        return super().finish(x * NAN, down, mine, work)


def test_when_nobody_is_finite_the_run_stops() -> None:
    exp = network(Ring(), (5, 9, 7, 6), AllBad(order="atc"))
    with pytest.raises(DivergedError, match=r"round 1: no node has finite numbers \(clients 0, 1, 2, 3\)"):
        advance(exp, begin(exp), RamStore(4))


# -- T9: push-sum ----------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("loss", [{}, {"link_loss": 0.2}, {"link_loss": 0.2, "node_loss": 0.2}])
def test_push_sum_finds_the_mean_on_a_directed_graph_whatever_is_lost(loss: dict[str, float]) -> None:
    """T9, with what is delayed lost and sent again in a later round."""
    rounds = 70 if "node_loss" in loss else 50  # what is lost comes later
    exp = network(Exponential(mixing="push_sum", **loss), **still(), rounds=rounds)
    state, store = scattered(exp), RamStore(16)
    mean = state.server.w.double().mean(0)
    for _ in range(rounds):
        state, _ = advance(exp, state, store)
        held = state.nodes.mass[:, None] * state.server.w.double()
        assert float(state.nodes.mass.sum()) == pytest.approx(16, abs=1e-9)
        assert torch.allclose(held.sum(0), 16 * mean, atol=1e-4)
    assert torch.allclose(state.server.w.double(), mean.expand(16, -1), atol=1e-5)


class OneWay(Custom):
    """Links in one direction."""

    @property
    def directed(self) -> bool:
        return True


@pytest.mark.slow
def test_push_sum_corrects_for_unequal_graphs() -> None:
    """Some are heard far more often than others; mass makes up for it, training and all."""
    links = (*((i, (i + 1) % 8) for i in range(8)), (0, 3), (0, 4), (0, 5), (1, 4))
    common: dict[str, Any] = {"local": Local(batch=0, lr=0.05, steps=1), "rounds": 80, "executor": "lanes"}
    exp = network(OneWay(links=links, mixing="push_sum", gossip_steps=2), (6,) * 8, **common)
    full = network(Full(), (6,) * 8, **common)
    ends = []
    for world in (exp, full):
        state, store = begin(world), RamStore(8)
        for _ in range(80):
            state, _ = advance(world, state, store)
        ends.append(state)
    mass = ends[0].nodes.mass
    assert float(mass.max()) > 1.3
    assert float(mass.min()) < 0.8
    held, want = (mass[:, None] * ends[0].server.w.double()).sum(0) / 8, ends[1].server.w.double().mean(0)
    moved = (want - exp.task.w0).norm()
    assert float((held - want).norm() / moved) < 0.02
    assert float((ends[0].server.w.double().mean(0) - want).norm() / moved) < 0.02


@pytest.mark.slow
def test_push_sum_on_a_regular_graph_is_plain_gossip() -> None:
    plain, push = (network(Ring(mixing=how)) for how in ("average", "push_sum"))
    a, b = begin(plain), begin(push)
    one, two = RamStore(16), RamStore(16)
    for _ in range(4):
        a, _ = advance(plain, a, one)
        b, _ = advance(push, b, two)
    assert torch.allclose(a.server.w, b.server.w, atol=1e-6)
    assert b.nodes.mass.tolist() == pytest.approx([1.0] * 16)
    assert b.up == a.up + 4 * 2 * 16 * 8  # the mass travels, too


def test_a_mass_too_small_to_divide_by_is_an_error() -> None:
    exp = network(Exponential(mixing="push_sum"))
    state = begin(exp)
    light = state._replace(nodes=state.nodes._replace(mass=torch.full((16,), 1e-9, dtype=torch.float64)))
    with pytest.raises(DivergedError, match="mass"):
        advance(exp, light, RamStore(16))


# -- a node that is driven by messages -------------------------------------------------------------
class Peer:
    """One node: it has the algorithm, its own state, and what its neighbours send. It does not know the others."""

    def __init__(self, exp: Experiment, node: int) -> None:
        self.exp, self.node, self.store = exp, node, RamStore(exp.federation.clients)
        self.state = exp.algorithm.init(exp.task.w0)
        self.first = begin(exp)
        self.buffers, self.mass = exp.task.buffers0, 1.0
        self.heard: dict[int, Message] = {}  # the last message of each neighbour

    def learn(self, round_: int, plans: dict[int, Group]) -> Message:
        """Train, and say what came out of it."""
        alone = RunState(round_, tree.tmap(lambda x: x[None], self.state), self.buffers[None], 0, 0)
        group = plans[self.node]
        given_ = self.exp.given(self.first, self.store, group.ids)
        given_ = given_._replace(down=alone.server, buffers=alone.buffers)
        done = train(self.exp.algorithm, self.exp.federation, group, given_)
        self.store.scatter(group.ids, tree.rebuild(_blank(self.exp), (done.states, (), ())))
        upload, before = tree.take(done.uploads, 0), Model(self.state.w)
        if self.mass != 1.0:
            upload = tree.tmap(lambda z, u: (z.double() + (self.mass - 1) * u.double()).to(z.dtype), upload, before)
        return Message(round_, 0, self.node, upload, done.buffers[0], self.mass)

    def read(self, weights: dict[int, float], heard: dict[int, Message], *, last: bool, push: bool) -> Message:
        sizes = self.exp.federation.train.sizes
        inbox, self.buffers = inbox_of(
            self.node, weights, heard, nodes=len(sizes), examples=int(sizes.sum()), push_sum=push
        )
        mine = heard[self.node]
        if push:
            self.mass = float(inbox.weight)
        if last:
            self.state = self.exp.algorithm.update(self.state, inbox)
        self.heard |= {k: message for k, message in heard.items() if message.round == mine.round}
        return mine._replace(step=mine.step + 1, upload=next_upload(inbox, mine.upload), mass=self.mass)


def planned(exp: Experiment, round_: int) -> dict[int, Group]:
    """The work of each node by itself."""
    return {int(group.ids): group for group in groups_of(exp, round_, exp.present(round_))}


def _blank(exp: Experiment) -> Any:
    from fedloom.engine.state import Kept

    return Kept((), (), ())


WIRED = [
    Ring(),
    Random(max_degree=4),
    Random(max_degree=3, gossip_steps=2, fresh_steps=True),
    Ring(link_loss=0.3, gossip_steps=2),
    Exponential(mixing="push_sum"),
    Exponential(mixing="push_sum", link_loss=0.3, gossip_steps=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("topology", WIRED, ids=lambda t: f"{t.kind}-{t.mixing}-{t.gossip_steps}-{t.link_loss:g}")
@pytest.mark.parametrize("order", ["lian", "atc", "mix_then_train"])
def test_peers_that_only_exchange_messages_are_the_simulator_bit_for_bit(topology: Topology, order: Any) -> None:
    exp = network(topology, algorithm=DPSGD(order=order), lanes=1)
    state, store = begin(exp), RamStore(16)
    peers = [Peer(exp, k) for k in range(16)]
    push = topology.mixing == "push_sum"
    with torch.no_grad():
        for t in range(2):
            plans = planned(exp, t)
            said = [peer.learn(t, plans) for peer in peers]
            for q in range(topology.gossip_steps):
                at = Moment(exp.seed, t, q)
                w = surviving(topology, topology.weigh(16, at), at, np.ones(16, dtype=bool))
                rows = [
                    {int(j): float(v) for j, v in zip(w.by[w.to == k], w.value[w.to == k], strict=True)}
                    for k in range(16)
                ]
                last = q == topology.gossip_steps - 1
                said = [
                    peer.read(row, {k: said[k] for k in row}, last=last, push=push)
                    for peer, row in zip(peers, rows, strict=True)
                ]
            state, _ = advance(exp, state, store)
            assert torch.equal(torch.stack([peer.state.w for peer in peers]), state.server.w)
            assert [peer.mass for peer in peers] == state.nodes.mass.tolist()


@pytest.mark.slow
def test_peers_that_remember_are_the_simulator_bit_for_bit() -> None:
    topology = Torus(link_loss=0.3, link_policy="stale", stale_after=2)
    exp = network(topology, lanes=1)
    state, store, peers = begin(exp), RamStore(16), [Peer(exp, k) for k in range(16)]
    reused = 0
    with torch.no_grad():
        for t in range(6):
            plans, at = planned(exp, t), Moment(exp.seed, t)
            said = [peer.learn(t, plans) for peer in peers]
            w = topology.weigh(16, at)
            up = links_up(topology, w, at)
            for peer in peers:
                row, heard, lost = {}, {}, 0.0
                for j, value, there in zip(*(x[w.to == peer.node] for x in (w.by, w.value, up)), strict=True):
                    old = peer.heard.get(int(j))
                    if not there and (old is None or t - old.round > 2):
                        lost += value
                        continue
                    row[int(j)], heard[int(j)] = float(value), said[j] if there else old
                    reused += not there
                row[peer.node] += lost
                peer.read(row, heard, last=True, push=False)
            state, _ = advance(exp, state, store)
            assert torch.equal(torch.stack([peer.state.w for peer in peers]), state.server.w)
    assert reused > 20


# -- T11: the ledger -------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", [Ring(), Star(gossip_steps=3), Random(max_degree=4), Full()], ids=lambda t: t.kind)
def test_bytes_are_two_models_for_each_link_and_step(topology: Topology) -> None:
    exp = network(topology)
    state, _ = advance(exp, begin(exp), RamStore(16))
    edges = topology.edges(16, Moment(exp.seed, 0))
    model = 4 * exp.task.size
    assert state.up == 2 * len(edges) * model * topology.gossip_steps
    assert state.down == 0
    degree = np.bincount(edges.ravel(), minlength=16)
    assert state.nodes.traffic.tolist() == (2 * model * degree * topology.gossip_steps).tolist()
    assert state.busiest == 2 * model * degree.max() * topology.gossip_steps


def test_links_that_are_down_carry_nothing() -> None:
    lossy = network(Ring(link_loss=0.5))
    whole = network(Ring())
    sent = advance(lossy, begin(lossy), RamStore(16))[0].up
    assert 0 < sent < advance(whole, begin(whole), RamStore(16))[0].up


class Twice(FedAvg):
    @property
    def traits(self) -> Traits:
        return super().traits._replace(gradients_per_step=2.0)


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_gradients_are_counted(executor: Any) -> None:
    local = Local(batch=4, epochs=2, lr=0.05)
    steps = sum(-(-n // 4) * 2 for n in (5, 9, 7))
    for algorithm, each in ((FedAvg(), 1), (Twice(), 2), (DPSGD(), 1)):
        ring = {"topology": Ring()} if algorithm.family == "gossip" else {}
        exp = experiment(federation((5, 9, 7)), nn.Linear(5, 3), algorithm, executor=executor, local=local, **ring)
        state, store = begin(exp), RamStore(3)
        for t in range(1, 3):
            state, _ = advance(exp, state, store)
            assert state.gradients == each * steps * t
        if algorithm.family == "server":
            assert state.busiest == state.up + state.down


# -- evaluation ------------------------------------------------------------------------------------
def test_before_and_after_mixing() -> None:
    exp = network(Ring(), local=Local(batch=4, lr=0.5, steps=1), evaluate=Evaluate())
    state, store = scattered(exp), RamStore(16)
    done = advance_watched(exp, state, store)
    after = evaluate(exp, done.state, store)
    found = done.found
    assert found["consensus/contraction"] <= found["consensus/psi"] * (1 + 1e-4)
    assert found["consensus/psi"] == pytest.approx(psi(Ring().weigh(16)))
    assert found["consensus/post_mix/distance"] == pytest.approx(after["consensus/distance"], rel=1e-4)
    ratio = found["consensus/post_mix/distance"] / found["consensus/pre_mix/distance"]
    assert found["consensus/contraction"] == pytest.approx(ratio)
    mean = done.state.server.w.mean(0)
    assert after["consensus/relative"] == pytest.approx(after["consensus/distance"] / float(mean.norm()), rel=1e-4)
    for name in ("nodes/pre_mix/test", "nodes/test"):
        part = found | after
        assert part[f"{name}/accuracy_min"] <= part[f"{name}/accuracy"] <= 1
        assert part[f"{name}/accuracy_std"] >= 0
        assert part[f"{name}/loss"] > 0


def test_nodes_that_agree_have_one_accuracy() -> None:
    """E2: all nodes alike, and the average is each of them."""
    exp = network(Full())
    state, store = begin(exp), RamStore(16)
    found = evaluate(exp, state, store)
    assert found["nodes/test/accuracy"] == pytest.approx(found["consensus/test/accuracy"])
    assert found["nodes/test/accuracy_min"] == pytest.approx(found["consensus/test/accuracy"])
    assert found["nodes/test/accuracy_std"] == pytest.approx(0, abs=1e-9)
    assert found["consensus/distance"] == pytest.approx(0, abs=1e-9)


def test_a_subset_of_nodes_is_evaluated_and_changes_nothing_else() -> None:
    """E6, E7: judging is looking; and the mean over some nodes is that of these nodes."""
    all_, some = (network(Ring(), evaluate=Evaluate(nodes=n)) for n in (None, 5))
    none = network(Ring(), evaluate=Evaluate(pre_mix=False, every=2))
    states = []
    for exp in (all_, some, none):
        state, store = scattered(exp), RamStore(16)
        done = advance_watched(exp, state, store)
        assert ("nodes/pre_mix/test/accuracy" in done.found) == (exp is not none)
        states.append(done.state)
    assert torch.equal(states[0].server.w, states[1].server.w)
    assert torch.equal(states[0].server.w, states[2].server.w)
    one, two = (evaluate(exp, states[0], RamStore(16)) for exp in (all_, some))
    assert one["consensus/test/accuracy"] == two["consensus/test/accuracy"]
    assert one["nodes/test/loss"] != two["nodes/test/loss"]


@pytest.mark.slow
def test_contraction_with_failures_and_steps_keeps_to_its_bound() -> None:
    topology = Random(max_degree=4, link_loss=0.2, node_loss=0.1, gossip_steps=2)
    exp = network(topology, local=Local(batch=4, lr=0.5, steps=1), rounds=15)
    state, store = scattered(exp), RamStore(16)
    for _ in range(15):
        done = advance_watched(exp, state, store)
        assert done.found["consensus/contraction"] <= done.found["consensus/psi"] * (1 + 1e-4)
        state = done.state


# -- models that do not fit into memory ------------------------------------------------------------
class ByRows(DPSGD):
    """The same method, of which the engine is not told that it takes every parameter by itself."""

    @property
    def columnwise(self) -> bool:
        return False


LARGE = [
    Random(max_degree=4),
    Star(link_loss=0.4, link_policy="stale"),
    Ring(gossip_steps=3, link_loss=0.2, node_loss=0.2),
    Exponential(mixing="push_sum", link_loss=0.3),
    Torus(deaths=((3, 2),)),
]


@pytest.mark.slow
@pytest.mark.parametrize("topology", LARGE, ids=lambda t: t.kind)
@pytest.mark.parametrize("algorithm", [DPSGD(order="mix_then_train"), ByRows(order="atc")], ids=["columns", "rows"])
def test_on_disk_or_in_memory_by_rows_or_by_columns_it_is_the_same(
    topology: Topology, algorithm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whatever is divided how."""
    monkeypatch.setattr("fedloom.engine.store._LARGE", 1)
    runs = []
    for place, lanes, wide in (("ram", 64, 1 << 13), ("ram", 3, 5), ("disk", 3, 7), ("disk", 64, 1 << 13)):
        monkeypatch.setattr(gossip, "WIDE", wide)
        exp = network(topology, algorithm=algorithm, lanes=lanes, rounds=3)
        store = RamStore(16) if place == "ram" else DiskStore(tmp_path / f"{lanes}", 16)
        state = scattered(exp)
        found = []
        for _ in range(3):
            done = advance_watched(exp, state, store)
            state = done.state
            found.append(done.found)
        runs.append((state, found))
    for state, found in runs[1:]:
        assert torch.equal(state.server.w, runs[0][0].server.w)
        assert torch.equal(state.nodes.mass, runs[0][0].nodes.mass)
        for one, other in zip(found, runs[0][1], strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-9)
    assert {p.name for p in (tmp_path / "3").iterdir()} == {"rows.bin", "journal.bin"}  # what was large has no name


@pytest.mark.slow
def test_columns_and_rows_agree_bit_for_bit() -> None:
    for topology in LARGE:
        ends = []
        for algorithm in (DPSGD(order="atc"), ByRows(order="atc")):
            exp = network(topology, algorithm=algorithm, lanes=5)
            state, store = scattered(exp), RamStore(16)
            for _ in range(2):
                state, _ = advance(exp, state, store)
            ends.append(state.server.w)
        assert torch.equal(*ends)


def test_a_room_on_disk_is_written_and_read_and_leaves_nothing(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, 4)
    room = store.room((3, 1 << 18), torch.float32, torch.device("cpu"))
    room.copy_(torch.arange(3 << 18).view(3, -1))
    assert torch.equal(room, torch.arange(3 << 18, dtype=torch.float32).view(3, -1))
    other = store.room((3, 1 << 18), torch.float32, torch.device("cpu"))
    other.fill_(1)
    assert float(room[2, 5]) == (2 << 18) + 5
    assert {p.name for p in tmp_path.iterdir()} == {"rows.bin", "journal.bin"}


# -- whole runs ------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        Random(max_degree=4, link_loss=0.2, node_loss=0.2),
        WIRED[-1],
        Ring(node_death=0.1, link_loss=0.2, deaths=((3, 2), (9, 3))),
        Torus(link_loss=0.4, node_loss=0.1, link_policy="stale", stale_after=3),
    ],
    ids=lambda t: t.kind,
)
def test_a_resumed_network_is_the_one_that_never_stopped(topology: Topology, tmp_path: Path) -> None:
    exp = network(topology, rounds=4)
    whole, store = begin(exp), RamStore(16)
    for _ in range(4):
        whole, _ = advance(exp, whole, store)
    state, store = begin(exp), RamStore(16)
    for _ in range(4):
        state, _ = advance(exp, state, store)
        checkpoint.save(tmp_path, state, store, {})
        store = RamStore(16)
        state = checkpoint.load_state(tmp_path, begin(exp), store).state
    assert torch.equal(state.server.w, whole.server.w)
    assert (state.gradients, state.up, state.busiest) == (whole.gradients, whole.up, whole.busiest)
    for a, b in zip(tree.leaves(state.nodes), tree.leaves(whole.nodes), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [DPSGD(order="mix_then_train"), DPSGD(order="atc")], ids=["state", "none"])
def test_a_network_on_disk_is_resumed_bit_for_bit(
    algorithm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedloom.engine.store._LARGE", 1)
    exp = network(Random(max_degree=4, link_loss=0.2, node_loss=0.2), algorithm=algorithm, rounds=3, lanes=3)
    whole, ram = begin(exp), RamStore(16)
    for _ in range(3):
        whole, _ = advance(exp, whole, ram)
    state, store = begin(exp), DiskStore(tmp_path / "clients", 16)
    for _ in range(3):
        state, _ = advance(exp, state, store)
        checkpoint.save(tmp_path, state, store, {})
        store = DiskStore(tmp_path / "clients", 16)
        state = checkpoint.load_state(tmp_path, begin(exp), store).state
    assert torch.equal(state.server.w, whole.server.w)
    ends = [torch.cat([part.w for part in models_of(exp, state, s, torch.arange(16))]) for s in (store, ram)]
    assert torch.equal(*ends)


@pytest.mark.slow
def test_a_run_that_loses_links_and_nodes_learns_all_the_same(tmp_path: Path) -> None:
    """The bar: 20 % of the links and 10 % of the nodes fail in every round, on digits with 16 nodes."""
    common: dict[str, Any] = {
        "data": "digits",
        "rounds": 25,
        "model": "logistic",
        "partition": {"clients": 16, "alpha": 1.0},
        "local": {"epochs": 1, "lr": 0.1},
        "evaluate": {"every": 5},
    }
    bad = {"kind": "random", "max_degree": 4, "link_loss": 0.2, "node_loss": 0.1}
    history = fedloom.run({"kind": "dpsgd", "order": "atc"}, topology=bad, out=tmp_path / "run", **common)
    assert history.summary["consensus/test/accuracy"].last > 0.85
    assert history.summary["nodes/test/accuracy"].last > 0.8
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]
    assert last["work/gradients"] > 0
    assert 0 < last["bytes/busiest"] < last["bytes/up"] + last["bytes/down"]
    assert {"nodes/pre_mix/test/accuracy", "consensus/contraction", "consensus/psi", "network/offline"} <= set(last)
    drawn = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert (drawn["kind"], drawn["nodes"], drawn["connected"]) == ("random", 16, True)
    assert len(drawn["first_round"]) == drawn["edges"]
    assert (tmp_path / "run" / "topology.png").stat().st_size > 1000
