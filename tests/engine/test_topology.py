"""Topologies: the graphs are what they are called, the matrices are fair, and what fails gives its weight back."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedloom.algorithm import Configures
from fedloom.algorithms.dfedsam import DFedSAM
from fedloom.core.errors import ConfigError, SplitError
from fedloom.engine.topology.facts import facts, faults, flaws, window
from fedloom.engine.topology.graphs import components
from fedloom.engine.topology.kinds import (
    Custom,
    Exponential,
    Full,
    Grid,
    Hypercube,
    Matching,
    OnePeerExponential,
    Random,
    RandomDirected,
    Ring,
    Star,
    SymmetricExponential,
    Torus,
)
from fedloom.engine.topology.network import Moment, Topology, last_rounds, links_up, surviving
from fedloom.engine.topology.weights import Weights, _power, cut, norm, psi, push_sum_weights, weigh
from fedloom.runs.settings import as_toml, parse, read_toml, topology_of

FAIR: list[Topology] = [Ring(), Full(), Star(), Grid(), Torus(), Exponential(), SymmetricExponential()]
FAIR += [OnePeerExponential(), Random(max_degree=4), Random(max_degree=3, exact=True), Matching()]
EVERY = [*FAIR, RandomDirected(max_degree=3, allow_row_stochastic=True)]


def name(topology: Topology) -> str:
    return topology.kind


# -- what is what ----------------------------------------------------------------------------------
def test_a_ring_hears_its_two_neighbours_and_full_everybody() -> None:
    ring = Ring().matrix(6)
    assert [(row > 0).nonzero().squeeze(1).tolist() for row in ring] == [
        sorted({(k - 1) % 6, k, (k + 1) % 6}) for k in range(6)
    ]
    assert np.allclose(ring[0, [0, 1, 5]], 1 / 3)
    assert np.allclose(Full().matrix(5), 0.2)


@pytest.mark.parametrize(("nodes", "edges"), [(2, [[0, 1]]), (3, [[0, 1], [0, 2], [1, 2]])])
@pytest.mark.parametrize("topology", [Ring(), Random(), SymmetricExponential(), Torus()], ids=name)
def test_two_nodes_have_one_edge_and_three_have_all(topology: Topology, nodes: int, edges: list[list[int]]) -> None:
    assert topology.edges(nodes).tolist() == edges


def test_a_grid_is_as_square_as_it_can_be() -> None:
    assert Grid().edges(6).tolist() == [[0, 1], [0, 3], [1, 2], [1, 4], [2, 5], [3, 4], [4, 5]]
    assert facts(Grid(), 12).degree_max == 4
    assert facts(Torus(), 12).degree_min == 4
    assert facts(Torus(rows=2), 8).degree_max == 3  # what is above is also below
    assert Torus(rows=1).edges(7).tolist() == Ring().edges(7).tolist()
    assert "only one row" in facts(Grid(), 13).notes[0]
    with pytest.raises(ConfigError, match=r"topology\.rows: 10 nodes cannot form 3 equal rows"):
        Grid(rows=3).edges(10)


def test_the_exponential_graphs_reach_powers_of_two() -> None:
    assert [j for i, j in Exponential().edges(10).tolist() if i == 7] == [1, 5, 8, 9]
    assert facts(SymmetricExponential(), 100).degree_max == 14
    hops = [OnePeerExponential().edges(10, Moment(0, t))[0].tolist() for t in range(5)]
    assert hops == [[0, 1], [0, 2], [0, 4], [0, 8], [0, 1]]


def test_a_hypercube_needs_a_power_of_two() -> None:
    assert Hypercube().edges(4, Moment(0, 1)).tolist() == [[0, 2], [1, 3]]
    (fault,) = faults(Hypercube(), 12, 0)
    assert (fault.where, "got 12" in fault.what, "8 or 16" in fault.fix) == ("topology.kind", True, True)


def test_more_pairs_than_there_are_nodes_for_are_refused() -> None:
    assert len(Matching(pairs=3).edges(9)) == 3
    assert len(Matching().edges(9)) == 4
    assert "at most 4 pairs" in faults(Matching(pairs=5), 9, 0)[0].what


# -- T1: the table of psi --------------------------------------------------------------------------
PSI = [
    (Ring(), 100, 0.998684),
    (Torus(), 100, 0.923607),
    (Grid(), 100, 0.979470),
    (Grid(weights="maxdeg"), 100, 0.980423),
    (Exponential(), 100, 0.75),
    (Exponential(), 101, 0.640),
    (SymmetricExponential(weights="uniform"), 100, 0.733333),
    (Star(), 100, 0.99),
    (Full(), 100, 0.0),
]


@pytest.mark.parametrize(("topology", "nodes", "value"), PSI, ids=lambda v: getattr(v, "kind", v))
def test_psi_is_what_the_table_says(topology: Topology, nodes: int, value: float) -> None:
    assert facts(topology, nodes).psi == pytest.approx(value, abs=1e-6 if value != 0.640 else 5e-4)


@pytest.mark.parametrize("nodes", [3, 5, 16, 33, 100])
def test_psi_in_closed_form(nodes: int) -> None:
    assert facts(Ring(), nodes).psi == pytest.approx(abs(1 + 2 * math.cos(2 * math.pi / nodes)) / 3, abs=1e-9)
    assert facts(Star(), nodes).psi == pytest.approx(1 - 1 / nodes, abs=1e-9)
    rows, columns = 4, nodes
    torus = (3 + 2 * math.cos(2 * math.pi / max(rows, columns))) / 5
    assert facts(Torus(rows=rows), rows * columns).psi == pytest.approx(torus, abs=1e-9)
    if nodes % 2 == 0:
        hops = math.ceil(math.log2(nodes))
        assert facts(Exponential(), nodes).psi == pytest.approx(1 - 2 / (hops + 1), abs=1e-9)


@pytest.mark.parametrize(("nodes", "value"), [(8, 0.0), (16, 0.0), (100, 0.1916), (12, 0.2091)])
def test_a_turn_of_one_peer_at_a_time(nodes: int, value: float) -> None:
    found = facts(OnePeerExponential(), nodes)
    assert found.steps == math.ceil(math.log2(nodes))
    assert found.psi_steps == pytest.approx(value, abs=1e-6 if value == 0 else 1e-4)
    assert (found.psi_steps == 0) == (value == 0)  # exactly, where nodes are a power of two


def test_random_graphs_contract_as_measured() -> None:
    assert np.mean([psi(Random().weigh(100, Moment(s))) for s in range(10)]) == pytest.approx(0.61, abs=0.02)
    assert np.mean([psi(Random(exact=True).weigh(100, Moment(s))) for s in range(10)]) == pytest.approx(0.59, abs=0.02)
    x = np.random.default_rng(0).normal(size=(100, 200))
    y = x - x.mean(0)
    rates = []
    for t in range(20):
        z = Random().weigh(100, Moment(0, t)).dense() @ y
        rates.append(np.linalg.norm(z) / np.linalg.norm(y))
        y = z / np.linalg.norm(z)
    assert np.mean(rates) == pytest.approx(1 / math.sqrt(11), abs=0.03)


def test_a_few_pairs_contract_as_measured() -> None:
    y, rates = np.random.default_rng(0).normal(size=(100, 500)), []
    y = y - y.mean(0)
    for t in range(60):
        z = Matching(pairs=10).weigh(100, Moment(0, t)).dense() @ y
        rates.append(np.linalg.norm(z) / np.linalg.norm(y))
        y = z
    assert np.mean(rates) == pytest.approx(math.sqrt(1 - 0.5 * 0.2 * 100 / 99), abs=0.003)


def test_the_norm_of_a_large_matrix_is_that_of_all_of_it() -> None:
    for topology in (Ring(), Exponential(), Random(max_degree=4), Star()):
        weights = topology.weigh(60)
        assert _power(weights) == pytest.approx(norm(weights.dense()), rel=1e-4)
    assert _power(Weights(2, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.full(4, 0.5))) == pytest.approx(0)


# -- T2: fair weights ------------------------------------------------------------------------------
@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, Any]:
    nodes = draw(st.integers(2, 14))
    pairs = [(i, j) for i in range(nodes) for j in range(i + 1, nodes)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True))
    return nodes, np.array(sorted(edges), dtype=np.int64).reshape(-1, 2)


def both(edges: Any) -> Any:
    return np.concatenate([edges, edges[:, ::-1]])


@pytest.mark.slow
@given(graphs(), st.booleans(), st.sampled_from(["metropolis", "maxdeg"]))
@settings(max_examples=80, deadline=None)
def test_weights_are_symmetric_and_doubly_stochastic_on_any_graph(graph: Any, lazy: bool, rule: str) -> None:
    nodes, edges = graph
    w = weigh(nodes, both(edges), rule, lazy=lazy).dense()
    assert np.array_equal(w, w.T)
    assert np.abs(w.sum(0) - 1).max() <= 1e-12
    assert np.abs(w.sum(1) - 1).max() <= 1e-12
    assert w.min() >= -1e-15
    assert w.diagonal().min() > 0
    assert np.linalg.eigvalsh(w).min() > (-1e-12 if lazy else -1)
    assert flaws(weigh(nodes, both(edges), rule, lazy=lazy), edges) == []


@given(graphs(), st.data())
@settings(max_examples=40, deadline=None)
def test_the_other_rules_are_row_stochastic(graph: Any, data: st.DataObject) -> None:
    nodes, edges = graph
    sizes = np.array(data.draw(st.lists(st.integers(0, 50), min_size=nodes, max_size=nodes)))
    for rule in ("uniform", "data_weighted"):
        w = weigh(nodes, both(edges), rule, sizes=sizes).dense()
        assert np.abs(w.sum(1) - 1).max() <= 1e-12
        assert w.min() >= -1e-12
    for i, j in edges.tolist():
        around = sizes[[i, *(k for e in edges.tolist() if i in e for k in e if k != i)]].sum()
        assert w[i, j] == pytest.approx(sizes[j] / max(around, 1))


@pytest.mark.parametrize("topology", EVERY, ids=name)
@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 16, 33])
def test_every_kind_gives_a_fair_matrix(topology: Topology, nodes: int) -> None:
    for t in range(3):
        at = Moment(1, t)
        weights = topology.weigh(nodes, at)
        w = weights.dense()
        assert np.abs(w.sum(1) - 1).max() <= 1e-12
        if topology in FAIR:
            assert flaws(weights, topology.edges(nodes, at), directed=topology.directed) == []
            assert psi(weights) <= 1 + 1e-12
        assert weights.is_symmetric() == np.allclose(w, w.T)
        assert (weights.senders() == (w > 0).sum(1)).all()


# -- T4, T5, T6 ------------------------------------------------------------------------------------
@pytest.mark.parametrize("topology", [OnePeerExponential(), Hypercube()], ids=name)
@pytest.mark.parametrize("dimensions", [1, 2, 3, 5])
def test_powers_of_two_agree_exactly_after_as_many_steps(topology: Topology, dimensions: int) -> None:
    nodes = 1 << dimensions
    x = np.random.default_rng(1).integers(-100, 100, (nodes, 3)).astype(float)
    y = x
    for t in range(dimensions):
        y = topology.weigh(nodes, Moment(0, t)).dense() @ y
    assert np.array_equal(y, np.tile(x.mean(0), (nodes, 1)))
    steps = topology.model_copy(update={"gossip_steps": dimensions})
    z = x
    for q in range(dimensions):  # the same within one round
        z = steps.weigh(nodes, Moment(0, 0, q)).dense() @ z
    assert np.array_equal(z, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "degree"),
    [
        (5, 2),
        (8, 3),
        (8, 5),
        (8, 6),
        (9, 5),
        (9, 7),
        (10, 4),
        (11, 10),
        (20, 5),
        (30, 10),
        (30, 20),
        (40, 7),
        (100, 10),
    ],
)
@pytest.mark.parametrize("exact", [False, True])
def test_random_graphs_are_connected_and_keep_to_their_degree(nodes: int, degree: int, exact: bool) -> None:
    topology = Random(max_degree=degree, exact=exact)
    for seed in range((125 if exact else 1000) // (1 if nodes < 20 else 4)):  # small graphs are the rare ones to part
        edges = topology.edges(nodes, Moment(seed))
        count = np.bincount(edges.ravel(), minlength=nodes)
        assert count.max() <= degree
        if exact:
            odd_one = nodes * degree % 2  # in pairs of an odd number somebody is left over
            assert sorted(count)[odd_one:] == [degree] * (nodes - odd_one)
        assert len(components(nodes, edges, directed=False)) == 1


def test_with_as_many_neighbours_as_others_everybody_hears_everybody() -> None:
    assert Random(max_degree=9).edges(10).tolist() == Full().edges(10).tolist()
    assert Random(max_degree=50).edges(10).tolist() == Full().edges(10).tolist()


@given(st.sampled_from([*EVERY, Random(refresh=0), Ring(comm_fraction=0.4)]), st.integers(0, 2**40), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_a_graph_is_a_function_of_seed_and_round(topology: Topology, seed: int, round_: int) -> None:
    at = Moment(seed, round_)
    edges = topology.edges(17, at)
    again = type(topology)(**topology.model_dump()).edges(17, at)
    assert edges.tolist() == again.tolist() == sorted(edges.tolist())
    assert (edges[:, 0] != edges[:, 1]).all()
    if not topology.directed:
        assert (edges[:, 0] < edges[:, 1]).all()


def test_graphs_are_drawn_anew_as_often_as_they_should_be() -> None:
    def eras(topology: Topology, rounds: int = 6) -> list[int]:
        seen: list[Any] = []
        for t in range(rounds):
            edges = topology.edges(30, Moment(5, t)).tolist()
            if edges not in seen:
                seen.append(edges)
        return len(seen)

    assert eras(Random(max_degree=4)) == 6
    assert eras(Random(max_degree=4, refresh=3)) == 2
    assert eras(Random(max_degree=4, refresh=0)) == 1
    one, fresh = Random(gossip_steps=2), Random(gossip_steps=2, fresh_steps=True)
    assert one.edges(30, Moment(5, 0, 0)).tolist() == one.edges(30, Moment(5, 0, 1)).tolist()
    assert fresh.edges(30, Moment(5, 0, 0)).tolist() != fresh.edges(30, Moment(5, 0, 1)).tolist()


def test_a_share_of_the_nodes_exchanges_and_the_others_keep_to_themselves() -> None:
    topology = Random(comm_fraction=0.1, max_degree=4)
    for t in range(5):
        w = topology.weigh(100, Moment(0, t)).dense()
        alone = w.diagonal() == 1
        assert alone.sum() == 90
        assert np.abs(w.sum(0) - 1).max() < 1e-12
        assert len(components(10, topology.drawn(10, Moment(0, t)), directed=False)) == 1
    assert faults(topology, 100, 0) == []  # in time everybody takes part
    assert 1 < facts(topology, 100).window < 1000


# -- T7: failures ----------------------------------------------------------------------------------
@given(graphs(), st.data())
@settings(max_examples=80, deadline=None)
def test_whatever_links_fail_rows_and_columns_keep_their_sums(graph: Any, data: st.DataObject) -> None:
    nodes, edges = graph
    lost = data.draw(st.sets(st.integers(0, max(len(edges) - 1, 0))))
    gone = {tuple(edges[k].tolist()) for k in lost if k < len(edges)}
    weights = weigh(nodes, both(edges), "metropolis")
    up = np.array([(min(i, j), max(i, j)) not in gone for i, j in zip(weights.to, weights.by, strict=True)])
    w = cut(weights, up, "self").dense()
    assert np.array_equal(w, w.T)
    assert np.abs(w.sum(0) - 1).max() <= 1e-12
    assert np.abs(w.sum(1) - 1).max() <= 1e-12
    assert all(w[i, j] == 0 for i, j in gone)
    renormed = cut(weights, up, "renorm").dense()
    assert np.abs(renormed.sum(1) - 1).max() <= 1e-12


@given(st.integers(3, 12), st.data())
@settings(max_examples=60, deadline=None)
def test_push_sum_takes_back_what_was_not_delivered(nodes: int, data: st.DataObject) -> None:
    pairs = [(i, j) for i in range(nodes) for j in range(nodes) if i != j]
    arcs = np.array(data.draw(st.lists(st.sampled_from(pairs), unique=True, min_size=1)))
    weights = push_sum_weights(nodes, arcs)
    assert np.abs(weights.columns() - 1).max() <= 1e-12
    up = np.array(data.draw(st.lists(st.booleans(), min_size=len(weights.to), max_size=len(weights.to))))
    left = cut(weights, up | ~weights.is_link, "sender")
    assert np.abs(left.columns() - 1).max() <= 1e-12
    assert left.value.min() >= 0


@given(st.floats(0, 0.95), st.floats(0, 0.95), st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_random_failures_preserve_the_mean(links: float, nodes: float, round_: int) -> None:
    topology = Random(max_degree=4, link_loss=links, node_loss=nodes)
    at = Moment(3, round_)
    gone = topology.offline(25, at)
    w = surviving(topology, topology.weigh(25, at), at, np.ones(25, dtype=bool)).dense()
    assert np.abs(w.sum(0) - 1).max() <= 1e-12
    assert np.abs(w.sum(1) - 1).max() <= 1e-12
    assert (w.diagonal()[gone] == pytest.approx(1)) if gone.any() else True
    assert (w[gone][:, ~gone] == 0).all()


@pytest.mark.slow
def test_failures_come_as_often_as_they_should_and_both_ways_at_once() -> None:
    topology = Random(link_loss=0.2, node_loss=0.1)
    lost, gone = [], []
    for t in range(200):
        at = Moment(1, t)
        weights = topology.weigh(50, at)
        up = links_up(topology.model_copy(update={"node_loss": 0.0}), weights, at)
        back = np.lexsort((weights.to, weights.by))
        assert np.array_equal(up, up[back])
        assert up[~weights.is_link].all()
        lost.append(1 - up[weights.is_link].mean())
        gone.append(topology.offline(50, at).mean())
    assert np.mean(lost) == pytest.approx(0.2, abs=0.01)
    assert np.mean(gone) == pytest.approx(0.1, abs=0.01)


def test_losing_a_fifth_of_the_links_costs_contraction_and_nothing_else() -> None:
    """The numbers of the specification: psi 0.63 becomes 0.77; dividing rows instead would shift the mean."""
    topology = Random(refresh=0, link_loss=0.2)
    weights, ok = topology.weigh(100), np.ones(100, dtype=bool)
    found = [psi(surviving(topology, weights, Moment(0, t), ok)) for t in range(20)]
    assert psi(weights) == pytest.approx(0.62, abs=0.03)
    assert np.mean(found) == pytest.approx(0.77, abs=0.04)
    x = np.random.default_rng(0).normal(size=100)
    error = {}
    for policy in ("self", "renorm"):
        lossy = topology.model_copy(update={"link_policy": policy})
        y = x
        for t in range(60):
            y = surviving(lossy, weights, Moment(0, t), ok).dense() @ y
        error[policy] = abs(y.mean() - x.mean())
    assert error["self"] < 1e-14
    assert error["renorm"] > 1e-4


def test_a_row_of_which_nothing_is_left_keeps_its_node() -> None:
    weights = Weights(2, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.array([0.0, 1.0, 1.0, 0.0]))
    assert cut(weights, ~weights.is_link, "renorm").dense().tolist() == [[1, 0], [0, 1]]
    assert cut(weights, ~weights.is_link, "self").dense().tolist() == [[1, 0], [0, 1]]


# -- T10, T12: what is refused ---------------------------------------------------------------------
def test_uniform_weights_on_a_star_are_refused() -> None:
    (fault,) = faults(Star(weights="uniform"), 10, 0)
    assert fault.where == "topology.weights"
    assert "columns that sum to 0.6 ... 4.6" in fault.what
    assert "metropolis" in fault.fix
    assert faults(Star(weights="uniform", allow_row_stochastic=True), 10, 0) == []
    assert "do not preserve the mean" in facts(Star(weights="uniform"), 10).notes[0]
    assert faults(Ring(weights="uniform"), 10, 0) == []  # where all have as many neighbours it is fair


def test_weights_by_data_are_refused_where_nodes_differ() -> None:
    assert faults(Ring(weights="data_weighted"), 6, 0, np.full(6, 10)) == []
    assert "allow_row_stochastic" in faults(Ring(weights="data_weighted"), 6, 0, np.arange(6))[0].fix


def test_the_published_directed_graph_is_refused_unless_allowed() -> None:
    (fault,) = faults(RandomDirected(), 100, 0)
    assert "push_sum" in fault.fix
    assert faults(RandomDirected(allow_row_stochastic=True), 100, 0) == []
    assert faults(RandomDirected(mixing="push_sum"), 100, 0) == []
    columns = RandomDirected().weigh(100).columns()
    assert columns.min() < 0.5
    assert columns.max() > 1.5


def test_an_isolated_node_keeps_to_itself_and_is_complained_about() -> None:
    topology = Custom(links=((0, 1), (1, 2), (4, 5)))
    assert topology.matrix(6)[3].tolist() == [0, 0, 0, 1, 0, 0]
    (fault,) = faults(topology, 6, 0)
    assert "3 parts, 0, 1, 2 | 4, 5 | 3" in fault.what
    allowed = topology.model_copy(update={"allow_disconnected": True})
    assert faults(allowed, 6, 0) == []
    assert "3 parts" in facts(allowed, 6).notes[0]
    assert not facts(allowed, 6).connected


def test_pairs_that_are_drawn_once_never_connect_a_network() -> None:
    assert faults(Matching(), 10, 0) == []
    assert 1 < window(Matching(), 10, 0)[0] < 30
    assert "not connected: 5 parts" in faults(Matching(refresh=0), 10, 0)[0].what


def test_a_directed_graph_must_lead_everywhere() -> None:
    chain = np.array([[0, 1], [1, 2]])
    assert len(components(3, chain, directed=True)) == 3
    assert len(components(3, np.array([[0, 1], [1, 2], [2, 0]]), directed=True)) == 1


def test_flaws_are_named() -> None:
    to, by = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    bad = Weights(2, to, by, np.array([1.5, -0.5, 0.5, 0.5]))
    assert [f.split(" ")[1] for f in flaws(bad)] == ["negative", "columns"]
    assert flaws(Weights(2, to, by, np.array([np.nan, 1, 1, 0]))) == ["has weights that are not finite"]
    assert "not neighbours" in flaws(Weights(2, to, by, np.full(4, 0.5)), np.zeros((0, 2), dtype=np.int64))[0]


def test_mixing_that_only_swaps_is_warned_about() -> None:
    swap = Custom(links=((0, 1), (1, 0)), link_weights=(1.0, 1.0))
    assert faults(swap, 2, 0) == []
    assert facts(swap, 2).psi == pytest.approx(1)
    assert "topology.lazy=true" in facts(swap, 2).notes[0]
    assert facts(swap.model_copy(update={"lazy": True}), 2).psi == pytest.approx(0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "random", "max_degree": 0}, r"topology\.max_degree: should be greater than 0 \(got 0\)"),
        ({"kind": "random", "refresh": -1}, r"topology\.refresh"),
        ({"kind": "ring", "comm_fraction": 0.0}, r"topology\.comm_fraction"),
        ({"kind": "ring", "link_loss": 1.0}, r"topology\.link_loss"),
        ({"kind": "ring", "weights": "even"}, r"topology\.weights"),
        ({"kind": "ring", "gossip_step": 2}, r"did you mean 'gossip_steps'"),
        ({"kind": "exp", "link_loss": 0.1}, "push_sum"),
        ({"kind": "exp", "mixing": "push_sum", "lazy": True}, "leave weights, lazy"),
        ({"kind": "custom"}, "needs links"),
        ({"kind": "custom", "links": [[0, 1]], "link_weights": [0.5, 0.5]}, "2 weights for 1 links"),
        ({"kind": "custom", "file": "nowhere.txt"}, "nowhere.txt"),
        ({"kind": "custom", "links": [[0, 1]], "file": "x"}, "keep one"),
    ],
)
def test_bad_settings_are_refused_with_place_and_fix(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        topology_of(given)


# -- your own --------------------------------------------------------------------------------------
def test_a_file_of_edges_becomes_part_of_the_settings(tmp_path: Path) -> None:
    plain, weighted, commas = tmp_path / "plain.txt", tmp_path / "weighted.txt", tmp_path / "edges.csv"
    plain.write_text("# a path\n0 1\n1 2\n")
    weighted.write_text("0 1 0.25\n1 0 0.25\n1 2 0.5\n2 1 0.5\n")
    commas.write_text("0,1\n1,2\n")
    read = topology_of({"kind": "custom", "file": str(plain)})
    assert read == Custom(links=((0, 1), (1, 2))) == topology_of({"kind": "custom", "file": str(commas)})
    matrix = topology_of({"kind": "custom", "file": str(weighted)}).matrix(3)
    assert matrix.tolist() == [[0.75, 0.25, 0], [0.25, 0.25, 0.5], [0, 0.5, 0.5]]
    plain.write_text("0 1.5\n")
    with pytest.raises(ConfigError, match="lines 'i j'"):
        topology_of({"kind": "custom", "file": str(plain)})
    with pytest.raises(ConfigError, match="no node 2 among 2"):
        read.edges(2)


def test_the_settings_survive_toml(tmp_path: Path) -> None:
    table = {
        "algorithm": "dpsgd",
        "partition": {"clients": 3},
        "topology": {"kind": "custom", "links": [[0, 1], [1, 2]], "link_loss": 0.1},
    }
    config = parse(table)
    (tmp_path / "again.toml").write_text(as_toml(config))
    assert parse(read_toml(tmp_path / "again.toml")).topology == config.topology


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Ring().gossip_steps = 2  # type: ignore[misc]


# -- what an algorithm says of its network ---------------------------------------------------------
class Several(DFedSAM, Configures):
    """A method whose definition has several gossip steps, on a torus."""

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        return {"topology": {"kind": "torus", "rows": 2, "gossip_steps": 4}}


def test_an_algorithm_says_what_its_network_is_where_the_user_does_not() -> None:
    def found(**table: Any) -> Topology | None:
        return parse({"algorithm": Several(), **table}).topology

    assert found() == Torus(rows=2, gossip_steps=4)
    assert found(topology={"gossip_steps": 1}) == Torus(rows=2)
    assert found(topology={"kind": "torus", "rows": 4}) == Torus(rows=4, gossip_steps=4)
    assert found(topology="ring") == Ring(gossip_steps=4)  # which has no rows
    with pytest.raises(ConfigError, match="there is no topology 'rign'"):
        found(topology="rign")
    assert parse({"algorithm": DFedSAM()}).topology == Ring()
    assert parse({"algorithm": "fedavg"}).topology is None


# -- nodes that die --------------------------------------------------------------------------------
def reaches(topology: Topology, nodes: int, at: Moment) -> list[list[int]]:
    """The parts into which those who live fall."""
    dead = topology.dead(nodes, at)
    parts = components(nodes, topology.edges(nodes, at), directed=topology.directed)
    return [part for part in parts if not dead[part[0]]]


def test_who_dies_is_known_and_stays_dead() -> None:
    topology = Ring(deaths=((3, 5), (0, 1), (3, 9)))
    gone = [np.flatnonzero(topology.dead(8, Moment(0, r))).tolist() for r in range(7)]
    assert gone == [[0], [0], [0], [0], [0, 3], [0, 3], [0, 3]]  # rounds are counted from 1, moments from 0
    chance = Ring(node_death=0.1)
    last = last_rounds(chance, 4000, 7)
    assert np.array_equal(last, last_rounds(chance.model_copy(), 4000, 7))
    for t in (0, 1, 5, 20):
        alive = (~chance.dead(4000, Moment(7, t))).mean()
        assert alive == pytest.approx(0.9 ** (t + 1), abs=0.025)
    dead = [chance.dead(50, Moment(7, t)) for t in range(30)]
    assert all((a <= b).all() for a, b in itertools.pairwise(dead))
    assert not Ring().dead(8, Moment(0, 10**9)).any()


@pytest.mark.slow
@given(st.sampled_from([Ring, Torus, Grid, Star, Full, Hypercube, SymmetricExponential]), st.data())
@settings(max_examples=60, deadline=None)
def test_the_dead_have_no_links_and_the_others_a_fair_matrix(kind: type[Topology], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, 15), min_size=1, max_size=12))
    topology = kind(deaths=tuple((node, 1) for node in sorted(gone)))
    union = components(16, np.concatenate([topology.edges(16, Moment(1, t)) for t in range(4)]), directed=False)
    assert [part for part in union if part[0] not in gone] == [sorted(set(range(16)) - gone)]  # joined again
    for t in range(4):
        weights = topology.weigh(16, Moment(1, t))
        assert not weights.is_link[np.isin(weights.to, sorted(gone)) | np.isin(weights.by, sorted(gone))].any()
        assert np.abs(weights.rows() - 1).max() < 1e-12
        assert np.abs(weights.columns() - 1).max() < 1e-12


def test_a_split_is_mended_let_be_or_refused() -> None:
    deaths = ((2, 1), (6, 3))
    rewired, apart, strict = (Ring(deaths=deaths, on_split=how) for how in ("rewire", "components", "abort"))
    for topology in (rewired, apart, strict):  # a ring with one gap is a path
        assert topology.edges(8, Moment(0, 1)).tolist() == [[0, 1], [0, 7], [3, 4], [4, 5], [5, 6], [6, 7]]
    assert reaches(apart, 8, Moment(0, 2)) == [[0, 1, 7], [3, 4, 5]]
    assert reaches(rewired, 8, Moment(0, 2)) == [[0, 1, 3, 4, 5, 7]]
    assert len(rewired.edges(8, Moment(0, 2))) == len(apart.edges(8, Moment(0, 2))) + 1
    assert np.array_equal(rewired.edges(8, Moment(0, 2)), rewired.edges(8, Moment(0, 200)))  # one link for all time
    drawn = {tuple(map(tuple, rewired.edges(8, Moment(seed, 2)).tolist())) for seed in range(20)}
    assert len(drawn) > 3
    with pytest.raises(SplitError, match=r"round 3: .*died \(2, 6\).* 2 parts .*on_split"):
        strict.edges(8, Moment(0, 2))


def test_what_was_apart_from_the_beginning_is_not_joined() -> None:
    links = ((0, 1), (1, 2), (3, 4), (4, 5))
    topology = Custom(links=links, deaths=((1, 1),), allow_disconnected=True)
    assert reaches(topology, 6, Moment(0, 0)) == [[3, 4, 5], [0, 2]]


def test_graphs_that_change_join_by_themselves() -> None:
    topology = Random(max_degree=2, deaths=((0, 1), (5, 1), (9, 1)))
    assert len(topology.edges(16, Moment(0, 0))) == len(_living_edges(topology, 16, Moment(0, 0)))
    push = Exponential(mixing="push_sum", deaths=tuple((k, 1) for k in range(1, 12)))
    assert reaches(push, 16, Moment(0, 0)) == [[0, 12, 13, 14, 15]]
    split = push.weigh(16, Moment(0, 0))
    assert np.abs(split.columns() - 1).max() < 1e-12


def _living_edges(topology: Topology, nodes: int, at: Moment) -> Any:
    planned = topology.planned(nodes, at)
    return planned[~topology.dead(nodes, at)[planned].any(1)]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"kind": "ring", "link_policy": "stale", "gossip_steps": 2}, "one gossip step"),
        ({"kind": "exp", "node_death": 0.1}, "push_sum"),
        ({"kind": "ring", "deaths": [[3]]}, "topology.deaths"),
        ({"kind": "ring", "deaths": [[3, 0]]}, "topology.deaths"),
        ({"kind": "custom", "links": [[0, 1], [1, 0]], "link_weights": [0.5, 0.5], "deaths": [[0, 1]]}, "link_weights"),
    ],
)
def test_deaths_that_cannot_be_are_refused(table: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        topology_of(table)


def test_who_dies_must_be_there() -> None:
    topology = topology_of({"kind": "ring", "deaths": [[8, 2]]})
    (fault,) = faults(topology, 8, 0)
    assert str(fault) == "topology.deaths: there is no node 8 among 8 (nodes are numbered 0 to 7)"
    assert faults(topology, 9, 0) == []
    assert any("nodes die" in note for note in facts(topology, 9).notes)
