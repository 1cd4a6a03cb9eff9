"""FedALR against the geometry of its equations, and against FedAvg and FedMGDA+ where they meet."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise

import pytest
import torch

from fedloom.algorithm import Inbox, Update
from fedloom.algorithms.fedalr import FedALR, Server
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedmgda import FedMGDA
from fedloom.core.errors import ConfigError
from fedloom.engine import checkpoint
from fedloom.engine.plan import draw_cohort
from fedloom.engine.rounds import advance, begin
from fedloom.engine.store import RamStore
from fedloom.runs.settings import as_table, parse
from support.quadratic import RAGGED, Bowl, after, hear, play, vec


def rounds(alg, uploads, *, counts=None, population=0, w=None):
    """The server's states, from its first, as it hears each of these moves [K, P] in turn."""
    states = [alg.init(torch.zeros(uploads[0].shape[1]).double() if w is None else w)]
    for moves in uploads:
        counted = torch.ones(len(moves)).double() if counts is None else counts
        states.append(alg.update(states[-1], hear(Update(moves), counted, population)))
    return states


def step(moves, server=None, counts=None, population=0, **settings):
    """The step from moves [K, P]."""
    alg = FedALR(**settings)
    server = alg.init(torch.zeros(moves.shape[1]).double()) if server is None else server
    counts = torch.ones(len(moves)).double() if counts is None else counts
    return alg.update(server, hear(Update(moves), counts, population)).w - server.w


def some(K=5, P=7, seed=0, count=1):
    g = torch.Generator().manual_seed(seed)
    found = [torch.randn(K, P, generator=g).double() for _ in range(count)]
    return found[0] if count == 1 else found


def unit(moves):
    return moves / moves.norm(dim=-1, keepdim=True)


E1 = math.exp(-1)


def test_hand_worked_numbers() -> None:
    # round 1: moves (3, 0) and (0, 4) have units (1, 0) and (0, 1); gbar = m = (1/2, 1/2); s = 1/2 for both
    #          eta = e^(-1/2);  step = 1/2 e^(-1/2) (1, 1)
    # round 2: moves (0, 2) twice: gbar = (0, 1); m = (1/2 (0, 1) + 1/2 (1/2, 1/2)) = (1/4, 3/4); s = 3/4
    #          step = e^(-1/4) (0, 1)
    first, second = torch.stack([vec(3, 0), vec(0, 4)]), torch.stack([vec(0, 2), vec(0, 2)])
    states = rounds(FedALR(), [first, second])
    half = 0.5 * math.exp(-0.5)
    torch.testing.assert_close(states[1].w, vec(half, half))
    torch.testing.assert_close(states[2].m, vec(0.25, 0.75))
    torch.testing.assert_close(states[2].w, vec(half, half + math.exp(-0.25)))
    assert states[2].t == 2


def test_l1_updates_all_alike_give_steps_of_exactly_the_servers_rate() -> None:
    moves = vec(3, 4).expand(4, -1)
    states = rounds(FedALR(server_lr=0.3), [moves, 0.1 * moves, 7 * moves])
    for t in (1, 2, 3):
        torch.testing.assert_close(states[t].w, 0.3 * t * vec(0.6, 0.8))


def test_l2_so_they_are_fedavg_when_unit_updates_get_the_mean_norm_back() -> None:
    moves = vec(3, 4)[None] * vec(1, 0.5, 3)[:, None]  # one direction, lengths 5, 2.5 and 15
    torch.testing.assert_close(step(moves, apply="mean_norm"), moves.mean(0))
    torch.testing.assert_close(step(moves, apply="median_norm"), vec(3, 4))
    torch.testing.assert_close(step(moves[:2], apply="median_norm"), 0.75 * vec(3, 4))  # between two, their middle
    clients = [Bowl(torch.eye(2).double(), vec(3, 4))] * 3  # they see one direction in every round
    ours, theirs = (play(a, clients, 4, steps=2, lr=0.1).server.w for a in (FedALR(apply="mean_norm"), FedAvg()))
    torch.testing.assert_close(ours, theirs)


def test_l3_lengths_of_updates_do_not_count() -> None:
    moves, scale = some(), vec(1e-3, 1, 10, 0.2, 500)[:, None]
    torch.testing.assert_close(step(scale * moves), step(moves), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(step(scale * moves, apply="raw"), step(moves, apply="raw"))


def rates_of(alg, moves, server):
    """The eta_i that the server gives these moves."""
    m = alg.update(server, hear(Update(moves), torch.ones(len(moves)).double())).m
    return alg.rates(unit(moves), m)


def test_l4_rates_lie_between_e_to_the_minus_2_and_1() -> None:
    alg, seen = FedALR(), []
    for seed in range(20):
        moves = some(K=3, P=2, seed=seed)
        seen += rates_of(alg, moves, Server(vec(0, 0), unit(some(1, 2, seed + 50))[0], vec(9)[0])).tolist()
    assert min(seen) >= math.exp(-2) - 1e-12
    assert max(seen) <= 1 + 1e-12
    ends = alg.rates(torch.stack([vec(1, 0), vec(0, 1), vec(-1, 0)]), vec(1, 0))
    torch.testing.assert_close(ends, vec(1, E1, math.exp(-2)))


@pytest.mark.parametrize("server_lr", [0.1, 1.0, 5.0])
def test_l5_no_step_is_longer_than_the_servers_rate(server_lr) -> None:
    states = rounds(FedALR(server_lr=server_lr), [*some(count=10), vec(1, 0, 0, 0, 0, 0, 0).expand(5, -1)])
    for a, b in pairwise(states):
        assert (b.w - a.w).norm() <= server_lr + 1e-12


def test_l6_m_is_the_mean_of_all_rounds_means() -> None:
    heard = some(count=12)
    states = rounds(FedALR(), heard)
    means = torch.stack([unit(moves).mean(0) for moves in heard])
    for t in range(1, 13):
        torch.testing.assert_close(states[t].m, means[:t].mean(0), rtol=1e-12, atol=1e-12)
        assert states[t].t == t


def test_l7_in_the_first_round_a_client_agrees_by_its_mean_cosine() -> None:
    moves = some()
    cosines = unit(moves) @ unit(moves).T
    eta = rates_of(FedALR(), moves, FedALR().init(0 * moves[0]))
    torch.testing.assert_close(eta, torch.exp(cosines.mean(1) - 1), rtol=1e-12, atol=1e-12)


def test_l8_an_opposite_pair_gets_e_to_the_minus_1_and_no_step() -> None:
    moves = torch.stack([vec(1, 2), vec(-3, -6)])
    torch.testing.assert_close(rates_of(FedALR(), moves, FedALR().init(vec(0, 0))), vec(E1, E1))
    assert step(moves).norm() < 1e-15


@pytest.mark.parametrize("K", [1, 2, 5])
def test_l9_orthogonal_updates_in_the_first_round(K) -> None:
    """s = 1 / K and a step of server_lr exp(1 / K - 1) / sqrt(K); of one client, exactly server_lr."""
    moves = 3 * torch.eye(6).double()[:K]
    assert step(moves, server_lr=0.5).norm().item() == pytest.approx(0.5 * math.exp(1 / K - 1) / math.sqrt(K))


def test_l10_without_adaptivity_it_is_fedmgda_without_a_box() -> None:
    moves = some()
    for ours in (step(moves, map="const"), step(moves, preset="no_adapt")):
        alg = FedMGDA(epsilon=0.0, eta=E1)
        heard = hear(Update(moves), torch.ones(5).double())
        torch.testing.assert_close(ours, alg.update(alg.init(0 * moves[0]), heard).w, rtol=1e-6, atol=1e-6)


def test_l11_rates_of_mean_one_are_the_softmax_of_the_agreements() -> None:
    alg, g, m = FedALR(eta_norm="mean1"), unit(some()), 0.3 * some(1)[0]
    eta = alg.rates(g, m)
    assert eta.mean().item() == pytest.approx(1)
    torch.testing.assert_close(eta / eta.sum(), torch.softmax(g @ m, 0))
    sharper = FedALR(eta_norm="mean1", temperature=0.1).rates(g, m)
    torch.testing.assert_close(sharper / 5, torch.softmax(g @ m / 0.1, 0))


def test_l12_to_count_absent_clients_is_to_scale_by_k_over_n() -> None:
    moves = some()
    torch.testing.assert_close(step(moves, population=20, weight_by="population"), step(moves) * 5 / 20)


def test_weighting_by_data_is_in_the_sum_alone() -> None:
    moves, n = some(), vec(1, 2, 3, 4, 10)
    eta = rates_of(FedALR(), moves, FedALR().init(0 * moves[0]))
    torch.testing.assert_close(step(moves, counts=n, weight_by="samples"), (n / 20 * eta) @ unit(moves))


def test_l13_a_rotation_commutes_with_the_update() -> None:
    heard = some(count=4)
    Q = torch.linalg.qr(some(7, 7, seed=9))[0]
    plain = rounds(FedALR(), heard)[-1]
    turned = rounds(FedALR(), [moves @ Q for moves in heard])[-1]
    torch.testing.assert_close(turned.w, plain.w @ Q, rtol=1e-12, atol=1e-12)


def test_l14_a_client_that_did_not_move_is_as_good_as_absent() -> None:
    first, second = some(count=2)
    with_zero = [torch.cat([m[:2], 0 * m[:1], m[2:]]) for m in (first, second)]
    ours, theirs = rounds(FedALR(), with_zero)[-1], rounds(FedALR(), [first, second])[-1]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("apply", ["unit", "mean_norm", "median_norm", "raw"])
def test_nobody_moved_is_no_round(apply) -> None:
    states = rounds(FedALR(apply=apply), [some(), torch.zeros(5, 7).double(), some(seed=1)])
    assert all(torch.equal(a, b) for a, b in zip(states[2], states[1], strict=True))
    assert states[3].t == 2


@pytest.mark.parametrize("scale", [0.01, 30.0])
def test_l15_the_raw_formula_is_a_projection_and_blind_to_lengths(scale) -> None:
    """normalise = false, map = identity, apply = raw: eta_i u_i = <uh_i, m> uh_i."""
    options = {"normalise": False, "map": "identity", "apply": "raw", "momentum_lag": 1}
    m, moves = some(1, seed=3)[0], some()
    server = Server(torch.zeros(7).double(), m, vec(2)[0])  # with a lag, the m that is used is this one
    projected = ((unit(moves) @ m)[:, None] * unit(moves)).mean(0)
    torch.testing.assert_close(step(moves, server, **options), projected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step(scale * moves, server, **options), projected, rtol=1e-12, atol=1e-12)


def test_l15b_without_normalising_m_is_made_of_raw_updates() -> None:
    moves = some()
    options = {"normalise": False, "map": "identity", "apply": "raw"}
    m = moves.mean(0)
    torch.testing.assert_close(step(moves, **options), ((unit(moves) @ m)[:, None] * unit(moves)).mean(0))
    # orthogonal and equally long: FedAvg / K;  identical: FedAvg
    torch.testing.assert_close(step(2 * torch.eye(4).double(), **options), torch.full((4,), 2 / 16).double())
    torch.testing.assert_close(step(vec(3, 4).expand(3, -1), **options), vec(3, 4))


@pytest.mark.slow
def test_l16_m_and_t_restored_give_the_next_step_bit_for_bit(world, tmp_path) -> None:
    exp = world(algorithm={"kind": "fedalr"}, local=RAGGED)
    state, store = begin(exp), RamStore(3)
    for _ in range(2):
        state, _ = advance(exp, state, store)
    checkpoint.save(tmp_path, state, store, {})
    again = checkpoint.load_state(tmp_path, begin(exp), RamStore(3)).state
    assert again.server.t == 2
    assert again.server.m.abs().max() > 0
    ours, theirs = (advance(exp, s, RamStore(3))[0].server for s in (again, state))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_l17_over_many_random_rounds_rates_tend_to_e_to_the_minus_1() -> None:
    alg = FedALR()
    server, g, spread = alg.init(torch.zeros(30).double()), torch.Generator().manual_seed(0), []
    for _ in range(300):
        moves = torch.randn(10, 30, generator=g).double()
        server = alg.update(server, hear(Update(moves), torch.ones(10).double()))
        off = (alg.rates(unit(moves), server.m) - E1).abs().max()
        assert off <= E1 * (server.m.norm().exp() - 1) + 1e-12
        spread.append(float(off))
    assert server.m.norm() < 0.05
    assert spread[-1] < 0.1 * spread[0]


# -- the readings that the text leaves open ---------------------------------------------------------------
def test_exponential_memory_is_corrected_for_its_start() -> None:
    heard = some(count=4)
    means = [unit(m).mean(0) for m in heard]
    alg = FedALR(momentum="ema", ema_beta=0.5)
    states = rounds(alg, heard)
    # weights 1/2 (1/8, 1/4, 1/2, 1) of the four rounds, divided by 1 - 1/16
    direction = sum(0.5 ** (4 - k) * means[k] for k in range(4)) / (1 - 0.5**4)
    expected = (torch.exp(unit(heard[3]) @ direction - 1) @ unit(heard[3])) / 5
    torch.testing.assert_close(states[4].w - states[3].w, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(states[1].w, rounds(FedALR(), heard[:1])[1].w)  # the first round is the same


def test_no_memory_is_this_round_alone() -> None:
    heard = some(count=3)
    states = rounds(FedALR(momentum="none"), heard)
    torch.testing.assert_close(states[3].w - states[2].w, step(heard[2]))


def test_a_lag_uses_the_direction_of_the_round_before() -> None:
    heard = some(count=2)
    states = rounds(FedALR(momentum_lag=1), heard)
    torch.testing.assert_close(states[1].w, E1 * unit(heard[0]).mean(0))  # there was none: s = 0
    eta = torch.exp(unit(heard[1]) @ unit(heard[0]).mean(0) - 1)
    torch.testing.assert_close(states[2].w - states[1].w, eta @ unit(heard[1]) / 5)


def test_m_starts_anew_every_so_many_rounds() -> None:
    heard = some(count=5)
    states = rounds(FedALR(momentum_reset_every=2), heard)
    means = [unit(m).mean(0) for m in heard]
    assert [int(s.t) for s in states] == [0, 1, 2, 1, 2, 1]
    torch.testing.assert_close(states[4].m, (means[2] + means[3]) / 2)
    torch.testing.assert_close(states[5].m, means[4])


def test_raw_updates_may_enter_the_memory_and_unit_ones_the_rates() -> None:
    moves = some()
    eta = torch.exp(unit(moves) @ moves.mean(0) - 1)
    torch.testing.assert_close(step(moves, momentum_input="raw"), eta @ unit(moves) / 5)


def test_cosine_divides_by_the_length_of_m() -> None:
    moves = some()
    m = unit(moves).mean(0)
    eta = torch.exp(unit(moves) @ m / m.norm() - 1)
    torch.testing.assert_close(step(moves, align="cosine"), eta @ unit(moves) / 5)
    opposite = torch.stack([vec(1, 0), vec(-1, 0)])  # m = 0: no cosine to speak of
    assert step(opposite, align="cosine").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("clip01", [1, 0.3, 0, 0]), ("relu", [2, 0.3, 0, 0]), ("identity", [2, 0.3, 0, -0.5]), ("const", [0.7] * 4)],
)
def test_maps_from_agreement_to_rate(name, expected) -> None:
    g = torch.eye(4).double()
    found = FedALR(map=name, const_value=0.7).rates(g, vec(2, 0.3, 0, -0.5))
    torch.testing.assert_close(found, vec(*expected))


def test_rates_that_cancel_fall_back_on_counting_alike() -> None:
    g = torch.stack([vec(1, 0), vec(-1, 0)])
    for name in ("identity", "relu"):
        alg = FedALR(map=name, eta_norm="mean1")
        assert alg.rates(g, vec(0.4, 0) if name == "identity" else vec(0, 1)).tolist() == [1, 1]


def test_what_the_sum_is_made_of() -> None:
    moves = some()
    eta, r = rates_of(FedALR(), moves, FedALR().init(0 * moves[0])), moves.norm(dim=1)
    torch.testing.assert_close(step(moves, apply="raw"), eta @ moves / 5)
    torch.testing.assert_close(step(moves, apply="mean_norm"), r.mean() * step(moves))
    torch.testing.assert_close(step(moves, apply="median_norm"), r.median() * step(moves))


def test_raw_constant_one_by_data_is_fedavg() -> None:
    moves, n = some(), vec(1, 2, 3, 4, 10)
    ours = step(moves, counts=n, apply="raw", weight_by="samples", map="const", const_value=1.0)
    torch.testing.assert_close(ours, n @ moves / 20)


def test_the_scale_of_fedavg_is_restored_by_the_preset_of_that_name() -> None:
    moves = 3 * unit(some())  # equal lengths
    ours = step(moves, preset="fedavg_scale")
    eta = torch.exp(unit(moves) @ unit(moves).mean(0))
    torch.testing.assert_close(ours, (eta / eta.mean()) @ moves / 5)
    assert 0.8 < (ours.norm() / moves.mean(0).norm()).item() < 1.5


def test_a_clipped_step_keeps_its_direction() -> None:
    moves = some()
    plain, clipped = step(moves), step(moves, clip_step=0.01)
    torch.testing.assert_close(clipped, 0.01 * plain / plain.norm())
    torch.testing.assert_close(step(moves, clip_step=10.0), plain)


def test_a_client_drawn_twice_speaks_twice() -> None:
    moves = some()
    twice = torch.cat([moves[:1], moves])
    for options in ({}, {"apply": "mean_norm"}, {"apply": "median_norm"}, {"eta_norm": "mean1"}):
        torch.testing.assert_close(step(moves, counts=vec(2, 1, 1, 1, 1), **options), step(twice, **options))


def test_a_client_drawn_twice_speaks_twice_through_the_engine(world) -> None:
    many = {"sampling": "proportional", "size": 6}
    exp = world((5, 9, 5), cohort=many, algorithm={"kind": "fedalr", "preset": "no_adapt", "const_value": 1.0})
    train = exp.federation.train
    drawn = draw_cohort(exp.cohort, train.sizes, exp.seed, 0)
    assert drawn.times.max() > 1
    expected = 0
    for k, times in zip(drawn.ids.tolist(), drawn.times.tolist(), strict=True):
        rows = train.rows[train.start[k] : train.start[k + 1]]
        only = train._replace(rows=rows, start=torch.tensor([0, len(rows)]))
        plain = world((5, 9, 5))
        alone = dataclasses.replace(plain, federation=plain.federation._replace(train=only))
        expected = expected + times / 6 * unit(after(alone).w - exp.task.w0)
    torch.testing.assert_close(after(exp).w - exp.task.w0, expected, rtol=1e-4, atol=1e-5)


def test_one_client_alone_in_its_first_round_moves_by_the_servers_rate(world) -> None:
    exp = world((9,), algorithm={"kind": "fedalr", "server_lr": 0.25})
    plain = after(world((9,))).w - exp.task.w0
    torch.testing.assert_close(after(exp).w - exp.task.w0, 0.25 * plain / plain.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lr", [0.001, 0.1])
def test_it_walks_to_a_common_optimum_by_unit_steps_whatever_the_local_rate(lr) -> None:
    """Round bowls with one bottom at distance 5: ten steps of 1/2 in a straight line, and it is there."""
    clients = [Bowl(a * torch.eye(2).double(), vec(3, 4)) for a in (0.5, 1, 2)]
    path = play(FedALR(server_lr=0.5), clients, 10, lr=lr).path
    for t, w in enumerate(path[:10]):
        torch.testing.assert_close(w, 0.5 * t * vec(0.6, 0.8), rtol=1e-9, atol=1e-9)
    assert (path[10] - vec(3, 4)).norm() < 1e-6


@pytest.mark.slow
def test_near_the_optimum_it_does_not_anneal() -> None:
    """Steps have the length of the rates, so it stays about the optimum and does not settle; raw ones settle."""
    clients = [Bowl(torch.eye(2).double(), vec(3, 4))] * 2
    unit_steps = play(FedALR(server_lr=0.5), clients, 60, lr=0.1, w=vec(0.1, 0)).path[-10:]
    raw_steps = play(FedALR(preset="raw"), clients, 60, lr=0.5, w=vec(0.1, 0)).path[-10:]
    assert max((w - vec(3, 4)).norm() for w in unit_steps) < 0.5
    assert min((b - a).norm() for a, b in pairwise(unit_steps)) > 0.05
    assert max((w - vec(3, 4)).norm() for w in raw_steps) < 1e-3


def test_presets_are_named_readings_and_what_is_said_beside_them_counts() -> None:
    assert FedALR(preset="no_adapt").map == "const"
    assert FedALR(preset="no_adapt").const_value == pytest.approx(E1)
    assert (FedALR(preset="fedavg_scale").apply, FedALR(preset="fedavg_scale").eta_norm) == ("mean_norm", "mean1")
    assert FedALR(preset="raw").apply == "raw"
    assert FedALR(preset="raw", eta_norm="mean1").eta_norm == "mean1"
    for wrong in ("fast", ["raw"], {"a": 1}):
        with pytest.raises(ConfigError, match="preset"):
            parse({"algorithm": {"kind": "fedalr", "preset": wrong}})


def test_clients_are_sent_the_model_alone() -> None:
    alg = FedALR()
    down = alg.send(alg.init(vec(1, 2)))
    assert down.w.tolist() == [1, 2]
    assert down.m.numel() == down.t.numel() == 0


def test_reported_rates_are_those_that_were_used() -> None:
    """With a lag the first round has no direction yet, and every rate is exp(-1)."""
    alg = FedALR(momentum_lag=1)
    one = torch.ones((), dtype=torch.float64)
    moves = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    inbox = Inbox((), one, one, one, one, Update(moves), torch.ones(3, dtype=torch.float64))
    server = alg.init(torch.zeros(2))
    told = alg.diagnostics(server, inbox, alg.update(server, inbox))
    assert float(told["fedalr/eta_min"]) == pytest.approx(math.exp(-1))
    assert float(told["fedalr/eta_max"]) == pytest.approx(math.exp(-1))


@pytest.mark.parametrize(
    ("preset", "other", "said"),
    [
        ("no_adapt", {"map": "exp"}, "preset = 'no_adapt' is map = 'const' (got 'exp'): leave map out"),
        ("raw", {"apply": "unit"}, "preset = 'raw' is apply = 'raw' (got 'unit')"),
        ("fedavg_scale", {"eta_norm": "none"}, "preset = 'fedavg_scale' is eta_norm = 'mean1' (got 'none')"),
    ],
)
def test_a_run_is_the_reading_that_it_is_recorded_as(preset, other, said) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse({"algorithm": {"kind": "fedalr", "preset": preset, **other}})
    whole = as_table(parse({"algorithm": {"kind": "fedalr", "preset": preset}}))
    assert as_table(parse(whole)) == whole
