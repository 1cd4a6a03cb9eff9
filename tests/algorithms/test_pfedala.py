"""pFedALA against FedALA, against snapshots of what it averages, and against the clock of the paper by hand.

Tests are named after the oracles of the method: p1 to p8 of training on while waiting, c1 of aggregation centres.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.algorithm import Setup
from fedloom.algorithms.pfedala import PFedALA, Sent
from fedloom.core import tree
from fedloom.core.errors import ConfigError
from fedloom.core.optim import sgd
from fedloom.core.task import Task
from fedloom.engine.evaluate import evaluate
from fedloom.engine.rounds import advance_watched, begin
from fedloom.engine.store import RamStore
from fedloom.maths.centres import CentreModels
from fedloom.runs.settings import as_table, parse
from support.ala import EXECUTORS, HELD, LOCAL, NORMED, OPTIMIZERS, Ran, laid_out, memory_of, ran, recorded, same
from support.quadratic import hear
from support.terminal import Quick

FREE = {"latency": 0.0, "up": 1e12, "down": 1e12}  # a network that costs nothing


def fedala(world, *args, kind="fedala", **table):
    """FedALA with a start phase of three passes, since its length is not the point here."""
    given = table.pop("algorithm", {})
    short = {} if given.get("layers") == "none" else {"window": 2}  # a short start phase, where there is one
    return laid_out(world, *args, kind=kind, algorithm={**short, **given}, **table)


def waits(world, *args, **table):
    return fedala(world, *args, kind="pfedala", **table)


def exactly(j: int, **more) -> dict[str, Any]:
    """Every client trains on for j epochs."""
    return {"slow_clients": 0, "extra_min": j, "extra_max": j, **more}


def extras(exp, rounds: int = 1) -> list[dict[int, int]]:
    """For each round, how many epochs each client trained on."""
    state, store, found = begin(exp), RamStore(exp.federation.clients), []
    for _ in range(rounds):
        done = advance_watched(exp, state, store)
        found.append({did.client: did.extra for did in done.work})
        state = done.state
    return found


# -- p1, p2, p8: where it is FedALA, and where FedAvg ----------------------------------------------------
@pytest.mark.slow
@OPTIMIZERS
def test_p1_without_extra_epochs_it_is_fedala(world, optimizer) -> None:
    more = {"local": LOCAL | memory_of(optimizer)}
    ours = ran(waits(world, algorithm=exactly(0), **more))
    theirs = ran(fedala(world, **more))
    assert torch.equal(ours.w, theirs.w)
    assert same(ours.kept, theirs.kept)
    assert same(ours.given.memory, theirs.given.memory)
    assert not torch.equal(ours.kept.v, ran(waits(world, algorithm=exactly(1), **more)).kept.v)


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("settings", [{"layers": "all", "w_init": 0.0}, {"layers": 2, "eta": 5.0}, {"layers": "none"}])
def test_p1_whatever_the_settings_of_ala(world, settings, executor) -> None:
    more = {"engine": {"executor": executor}, "cohort": {"size": 2}}
    ours = ran(waits(world, algorithm=exactly(0) | settings, **more), 4)
    theirs = ran(fedala(world, algorithm=settings, **more), 4)
    assert torch.equal(ours.w, theirs.w)
    assert same(ours.kept, theirs.kept)


@pytest.mark.slow
@EXECUTORS
def test_p2_where_only_the_upload_counts_it_is_fedala(world, executor) -> None:
    engine = {"engine": {"executor": executor}}
    ours = ran(waits(world, algorithm={"average": "upload"}, **engine))
    theirs = ran(fedala(world, **engine))
    assert torch.equal(ours.w, theirs.w)
    assert same(ours.kept, theirs.kept)


@pytest.mark.slow
@OPTIMIZERS
def test_p2_with_an_optimizer_that_remembers_only_where_its_memory_is_forked(world, optimizer) -> None:
    more = {"local": LOCAL | memory_of(optimizer)}
    fork, on = (
        ran(waits(world, algorithm={"average": "upload", "extra_optimizer": way}, **more))
        for way in ("fork", "continue")
    )
    theirs = ran(fedala(world, **more))
    assert torch.equal(fork.w, theirs.w)
    assert same(fork.kept, theirs.kept)
    assert same(fork.given.memory, theirs.given.memory)
    assert not torch.equal(on.w, theirs.w)


@pytest.mark.slow
@pytest.mark.parametrize("average", ["uniform", "last", "geometric"])
def test_p8_with_w_at_1_extra_epochs_have_no_effect_at_all(world, average) -> None:
    ours = ran(waits(world, algorithm={"eta": 0.0, "average": average}, partition=HELD), 4)
    theirs = ran(laid_out(world, kind="fedavg", partition=HELD), 4)
    assert torch.equal(ours.w, theirs.w)
    assert torch.equal(ours.served(torch.arange(3)), ours.w.expand(3, -1))
    assert not torch.equal(ours.kept.v, ran(fedala(world, algorithm={"eta": 0.0}, partition=HELD), 4).kept.v)


@pytest.mark.slow
def test_p8_not_even_on_running_statistics(world) -> None:
    """The statistics that go with an upload are those of the model that is uploaded."""
    ours = ran(waits(world, (6, 12, 9), algorithm={"eta": 0.0, "sample_percent": 100.0}, **NORMED))
    theirs = ran(laid_out(world, (6, 12, 9), kind="fedavg", **NORMED))
    assert torch.equal(ours.w, theirs.w)
    assert torch.equal(ours.state.buffers, theirs.state.buffers)


@pytest.mark.slow
def test_p8_with_memory_that_goes_on_they_have_one(world) -> None:
    more = {"local": LOCAL | {"momentum": 0.9}}
    fedavg = ran(laid_out(world, kind="fedavg", **more)).w
    assert not torch.equal(ran(waits(world, algorithm={"eta": 0.0}, **more)).w, fedavg)
    assert torch.equal(ran(waits(world, algorithm={"eta": 0.0, "extra_optimizer": "fork"}, **more)).w, fedavg)


@pytest.mark.slow
def test_below_alas_layers_what_was_learned_while_waiting_is_lost(world) -> None:
    """On one layer only the averaged head survives, on all layers the body does too."""
    for layers, differs in ((1, False), ("all", True)):
        settings = {"layers": layers, "w_init": 0.0, "eta": 0.0}
        ours, theirs = (ran(waits(world, algorithm=exactly(j) | settings), 1).trained()[1].begun for j in (3, 0))
        assert torch.equal(ours[:, :65], theirs[:, :65]) == (not differs)
        assert not torch.equal(ours[:, 65:], theirs[:, 65:])


# -- p3: the mean ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def snapshots() -> dict[str, list[torch.Tensor]]:
    """The models after 0 to 5 extra epochs of each client, made once."""
    return {}


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("J", [1, 2, 5])
def test_p3_the_running_mean_is_the_mean_of_the_snapshots(world, snapshots, J, executor) -> None:
    engine = {"executor": executor}

    def kept(j, **more):
        return ran(waits(world, algorithm=exactly(j, **more), engine=engine), 1).kept.v

    if executor not in snapshots:
        snapshots[executor] = [kept(j, average="last") for j in range(6)]
    x = torch.stack(snapshots[executor][: J + 1]).double()
    assert (x[-1] - x[-2]).abs().max() > 1e-3
    powers = 0.7 ** torch.arange(J + 1).double()
    weights = {"uniform": ({}, torch.ones(J + 1).double()), "geometric": ({"ratio": 0.7}, powers)}
    for average, (more, a) in weights.items():
        mean = torch.tensordot(a / a.sum(), x, dims=1).float()
        torch.testing.assert_close(kept(J, average=average, **more), mean, rtol=1e-6, atol=3e-7)
    assert torch.equal(kept(J, average="upload"), snapshots[executor][0])


@pytest.mark.parametrize("average", ["uniform", "last", "upload", "geometric"])
@pytest.mark.parametrize("J", range(1, 11))
def test_p3_the_weights_sum_to_one(average, J) -> None:
    """A mean of ones is one, and of 0, ..., 0, 1 (the last) it is a_J; so for every place."""
    alg = PFedALA(average=average, extra_max=10, ratio=0.6)
    a = []
    for place in range(J + 1):
        mean = torch.tensor(float(place == 0))
        for j in range(1, J + 1):
            share = alg.share_of(torch.tensor(float(j))) if average != "upload" else 0.0
            mean = mean + share * (float(place == j) - mean)
        a.append(float(mean))
    assert sum(a) == pytest.approx(1, abs=1e-6)
    want = {
        "uniform": [1.0] * (J + 1),
        "last": [0.0] * J + [1.0],
        "upload": [1.0] + [0.0] * J,
        "geometric": [0.6**j for j in range(J + 1)],
    }[average]
    assert a == pytest.approx([x / sum(want) for x in want], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "other"), [(0.0, "upload"), (1.0, "uniform")])
def test_p3_geometric_weights_at_the_ends(world, ratio, other) -> None:
    a = ran(waits(world, algorithm={"average": "geometric", "ratio": ratio}), 2)
    b = ran(waits(world, algorithm={"average": other}), 2)
    torch.testing.assert_close(a.kept.v, b.kept.v, rtol=1e-6, atol=1e-7)


@EXECUTORS
def test_clients_train_on_for_as_many_epochs_as_each_has(world, executor, monkeypatch) -> None:
    """And those who are done are no longer computed; the round itself takes the steps it always takes."""
    exp = waits(world, (4, 12, 7, 9, 5), engine={"executor": executor}, algorithm={"slow_clients": 2, "extra_max": 4})
    calls = recorded(monkeypatch)
    done = advance_watched(exp, begin(exp), RamStore(5))
    extra = {did.client: did.extra for did in done.work}
    passes = [ids for name, ids, _ in calls if name == "waiting"]
    assert {k: sum(k in ids for ids in passes) for k in range(5)} == extra
    assert extra[0] == extra[1] == 0
    assert {did.client: did.steps for did in done.work} == {0: 4, 1: 8, 2: 6, 3: 6, 4: 4}


def test_what_is_uploaded_does_not_depend_on_what_comes_after(world) -> None:
    """Nor does anything that is measured of the round."""
    more = {"evaluate": {"diagnostics": ["updates"], "participants": True}, "partition": HELD}
    found = []
    for j in (0, 4):
        exp = waits(world, (6, 12, 9), algorithm=exactly(j), **more)
        done = advance_watched(exp, begin(exp), RamStore(3))
        found.append((done.state.server.w, done.found))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert found[0][1]["server/effective_lr"] == pytest.approx(1, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_o4_a_counter_goes_on_while_waiting_unless_the_memory_is_forked(world, optimizer) -> None:
    more = {"local": LOCAL | memory_of(optimizer)}
    for way, epochs in (("continue", 2), ("fork", 0)):
        now = ran(waits(world, algorithm=exactly(2, extra_optimizer=way), **more), 2)
        per_epoch = torch.tensor([2, 4, 3])
        assert now.given.memory.step.tolist() == (2 * (2 + epochs) * per_epoch).tolist()


@pytest.mark.slow
def test_extra_epochs_shift_no_batch_of_a_later_round(world) -> None:
    """Alone on all layers, a client whose memory and model are those of the upload trains as if it had not waited."""
    settings = {"layers": "all", "w_init": 0.0, "eta": 0.0, "average": "upload"}
    ours = ran(waits(world, algorithm=exactly(5) | settings), 3)
    assert torch.equal(ours.kept.v, ran(laid_out(world, kind="local_only"), 3).kept.w)


# -- p4: bytes -----------------------------------------------------------------------------------------------
def test_p4_what_is_sent_does_not_depend_on_the_extra_epochs(world) -> None:
    plain = ran(fedala(world), 2).state
    for j in (0, 1, 3):
        now = ran(waits(world, algorithm=exactly(j)), 2)
        assert (now.state.up, now.state.down) == (plain.up, plain.down)
        assert now.state.up == 2 * 3 * 4 * now.exp.task.size


# -- p5: the clock --------------------------------------------------------------------------------------------
CLOCK = {"wait_mode": "clock", "layers": "none"}  # without ALA, whose time the paper's example does not count
FIVE = LOCAL | {"epochs": 5, "batch": 0}  # an epoch takes as long, however many steps it is cut into


def clocked(world, system, sizes=(12, 12, 12), **settings):
    """Clients that need a second for an epoch of 12 examples, unless they are slow."""
    system = ({} if "speeds" in system else {"speed": 12.0}) | FREE | system
    return waits(world, sizes, algorithm=CLOCK | settings, local=FIVE, system=system)


@pytest.mark.slow
def test_p5_the_worked_example(world) -> None:
    exp = clocked(world, {"slow": [0], "slow_factor": 1.5})
    assert extras(exp, 3) == [{0: 0, 1: 2, 2: 2}] * 3
    assert ran(exp, 3).state.seconds == pytest.approx(3 * 7.5)
    told = clocked(world, {"speeds": [8.0, 12.0, 12.0]})
    assert extras(told) == [{0: 0, 1: 2, 2: 2}]


def test_p5_the_worked_example_with_a_deadline(world) -> None:
    exp = clocked(world, {"slow": [0], "slow_factor": 1.5, "deadline": 6.0})
    done = advance_watched(exp, begin(exp), RamStore(3))
    assert [(did.client, did.extra, did.late) for did in sorted(done.work)] == [
        (0, 0, True),
        (1, 1, False),
        (2, 1, False),
    ]
    assert done.state.seconds == 6.0


def test_p5_with_ala_the_first_round_too_has_time_for_two_epochs(world) -> None:
    exp = clocked(world, {"slow": [0], "slow_factor": 1.5}, layers=1)
    assert extras(exp, 1) == [{0: 0, 1: 2, 2: 2}]


@pytest.mark.slow
def test_p5_a_slower_client_leaves_the_others_more_time(world) -> None:
    factors = (1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 4.0)
    found = [extras(clocked(world, {"slow": [0], "slow_factor": f}, max_extra=100))[0] for f in factors]
    assert [each[0] for each in found] == [0] * 7
    assert [each[1] for each in found] == [math.floor(5 * (f - 1) + 1e-9) for f in factors] == [0, 1, 2, 3, 4, 5, 15]


@pytest.mark.parametrize("cap", [0, 1, 3])
def test_p5_never_more_than_the_cap(world, cap) -> None:
    """A client with hardly any data beside one with much would otherwise train on without end."""
    found = extras(clocked(world, {}, sizes=(1, 40, 7), max_extra=cap))[0]
    assert found == {0: cap, 1: 0, 2: cap}


def test_p5_an_epoch_that_fits_but_for_rounding_fits_and_without_data_there_is_none() -> None:
    alg = PFedALA(wait_mode="clock", max_extra=9)
    wait, epoch = torch.tensor([[0.3, 0.3, 0.0, 5.0], [0.1, 0.1000001, 0.1, 0.0]], dtype=torch.float64)
    assert float(wait[0] / epoch[0]) < 3
    assert alg.idle_epochs(torch.arange(4), wait, epoch, (0, 0)).tolist() == [3, 2, 0, 0]


@pytest.mark.parametrize("speeds", [(3.0, 5.0, 9.0), (9.0, 5.0, 4.5), (7.0, 7.0, 7.0)])
def test_p5_on_a_free_network_the_slowest_has_no_time(world, speeds) -> None:
    found = extras(clocked(world, {"speeds": list(speeds)}, max_extra=50))[0]
    assert found[speeds.index(min(speeds))] == 0


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_p5_by_the_formulas_of_the_paper(world, overlap) -> None:
    """With a network, a server that takes its time, and unequal clients."""
    sizes, speeds = (9, 12, 30), (30.0, 10.0, 20.0)
    system = {"speeds": list(speeds), "latency": 0.2, "up": 0.004, "down": 0.01, "aggregation": 0.7}
    exp = clocked(world, system | {"overlap_upload": overlap}, sizes=sizes, max_extra=100)
    bits = 8 * 4 * exp.task.size
    d, u = 0.1 + bits / 0.01e6, 0.1 + bits / 0.004e6
    tau = [n / s for n, s in zip(sizes, speeds, strict=True)]
    start = [d + 5 * t for t in tau]
    end = max(start) + u + 0.7 + d
    wait = [end - s - (0 if overlap else u) for s in start]
    assert extras(exp, 2) == [{i: math.floor(w / t + 1e-9) for i, (w, t) in enumerate(zip(wait, tau, strict=True))}] * 2
    assert ran(exp, 2).state.seconds == pytest.approx(2 * (end - d))
    assert len({math.floor(w / t) for w, t in zip(wait, tau, strict=True)}) == 3


def test_p5_equal_clients_train_on_while_the_network_is_at_work(world) -> None:
    slow_network = {"latency": 0.0, "up": 32e-6 * 83, "down": 1e12}  # a model of 83 numbers takes a second
    exp = clocked(world, slow_network, max_extra=100)
    assert exp.task.size == 83
    assert extras(exp) == [{0: 1, 1: 1, 2: 1}]
    assert extras(clocked(world, {})) == [{0: 0, 1: 0, 2: 0}]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["clock", "fixed"])
def test_p5_a_round_takes_as_long_as_one_of_fedala(world, mode) -> None:
    system = {"speed": 20.0, "speed_spread": 0.5, "jitter": 0.3, "aggregation": 0.1}
    ours = ran(waits(world, algorithm={"wait_mode": mode}, system=system), 3).state.seconds
    assert ours == ran(fedala(world, system=system), 3).state.seconds
    assert ours > ran(fedala(world, algorithm={"layers": "none"}, system=system), 3).state.seconds


@pytest.mark.slow
def test_p5_jitter_makes_rounds_unequal_and_repeats_itself(world) -> None:
    exp = clocked(world, {"jitter": 0.4}, max_extra=100)
    found = extras(exp, 6)
    assert found == extras(exp, 6)
    assert len({tuple(each.items()) for each in found}) > 1
    assert all(min(each.values()) == 0 for each in found)


# -- deadlines -------------------------------------------------------------------------------------------------
def test_who_is_late_is_not_heard_and_keeps_its_own_model(world) -> None:
    """The others' weights are those of their data among themselves."""
    late = {"slow": [0], "slow_factor": 1.5, "deadline": 6.0}
    settings = {"layers": "all", "w_init": 0.0}
    now = ran(clocked(world, late, sizes=(12, 9, 12), **settings), 0)
    others = clocked(world, {"slow": [0], "slow_factor": 1.5}, sizes=(12, 9, 12), **settings)
    _, done = Ran(others, *now[1:]).trained()
    weights = torch.tensor([0.0, 9.0, 12.0]).double() / 21
    after = now.on()
    torch.testing.assert_close(after.w, now.w + (weights @ done.uploads.dw.double()).float(), rtol=1e-6, atol=1e-7)
    assert torch.equal(after.kept.v[0], done.states.v[0])  # it did not wait, so that this is where its training ended
    assert after.kept.seen.tolist() == [1, 1, 1]
    assert after.state.up == 2 * 4 * now.exp.task.size
    assert after.state.down == 3 * 4 * now.exp.task.size
    assert after.on().kept.W[0].lt(1).any()  # and goes on from there


@pytest.mark.parametrize("topology", ["replicated", "sharded"])
def test_a_deadline_that_nobody_meets_keeps_the_model(world, topology) -> None:
    exp = clocked(world, {"deadline": 0.5}, layers=1, centres=2, topology=topology)
    now = ran(exp, 1)
    assert torch.equal(now.w, exp.task.w0)
    assert now.state.up == 0
    assert now.state.seconds == 0.5
    assert now.kept.seen.tolist() == [1, 1, 1]  # each has trained its own
    assert (now.kept.v != exp.task.w0).any(1).all()
    again = now.on()
    assert torch.equal(again.w, exp.task.w0)
    assert not torch.equal(again.kept.v, now.kept.v)


def test_a_deadline_that_is_missed_for_want_of_a_network_is_missed_too(world) -> None:
    """Clients are done in time, and have time to train on, but no upload arrives."""
    exp = clocked(world, {"deadline": 6.0, "up": 1e-6}, layers=1)
    done = advance_watched(exp, begin(exp), RamStore(3))
    assert torch.equal(done.state.server.w, exp.task.w0)
    assert (done.state.seconds, done.state.up) == (6.0, 0)
    assert all(did.late for did in done.work)


@pytest.mark.slow
def test_a_deadline_that_everybody_meets_changes_nothing(world) -> None:
    a, b = (ran(clocked(world, system, layers=1), 3) for system in ({}, {"deadline": 1e6}))
    assert torch.equal(a.w, b.w)
    assert same(a.kept, b.kept)
    assert a.state.seconds == b.state.seconds


# -- p6: extra epochs without a clock --------------------------------------------------------------------------
TEN = (4, 5, 6, 7, 4, 5, 6, 7, 4, 5)
SMALL = {"model": "logistic", "local": {"batch": 0, "lr": 0.1}}  # the draws are the point


def drawing(world, **table):
    return waits(world, TEN, **SMALL, algorithm={"layers": "none", **table.pop("algorithm", {})}, **table)


@pytest.mark.parametrize("slow", [0, 1, 3, 10])
def test_p6_slow_clients_have_none_and_the_others_one_to_three(world, slow) -> None:
    found = extras(drawing(world, algorithm={"slow_clients": slow}), 8)
    for each in found:
        assert [k for k, j in sorted(each.items()) if j == 0] == list(range(slow))
        assert all(1 <= j <= 3 for k, j in each.items() if k >= slow)
    if slow < 10:
        assert {j for each in found for k, j in each.items() if k >= slow} == {1, 2, 3}


def test_p6_other_ranges(world) -> None:
    found = extras(drawing(world, algorithm={"extra_min": 0, "extra_max": 1}), 6)
    assert {j for each in found for j in each.values()} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("redraw", ["round", "once"])
def test_p6_drawn_in_every_round_or_once_for_each_client(world, redraw) -> None:
    exp = drawing(world, algorithm={"redraw": redraw})
    found = extras(exp, 6)
    assert found == extras(exp, 6)
    assert (len({tuple(sorted(each.items())) for each in found}) == 1) == (redraw == "once")
    other = drawing(world, algorithm={"redraw": redraw}, seed=5)
    assert extras(other, 6) != found


@pytest.mark.slow
def test_p6_more_rounds_change_no_earlier_draw_nor_does_who_else_is_there(world) -> None:
    many, few = (drawing(world, rounds=n) for n in (50, 3))
    assert extras(many, 3) == extras(few, 3)
    everybody = extras(many, 4)
    some = extras(drawing(world, cohort={"size": 4}), 4)
    for whole, part in zip(everybody, some, strict=True):
        assert part == {k: whole[k] for k in part}


# -- p7: whole epochs only --------------------------------------------------------------------------------------
def test_p7_an_epoch_that_does_not_fit_leaves_no_trace(world) -> None:
    """Time for 2, for 2.45 and for 2.95 epochs is time for two; for three it is another mean."""
    found = [ran(clocked(world, {"slow": [0], "slow_factor": f}), 1) for f in (1.4, 1.49, 1.59, 1.6)]
    for other in found[1:3]:
        assert same(other.kept, found[0].kept)
    assert not torch.equal(found[3].kept.v[1], found[0].kept.v[1])


# -- c1: aggregation centres -------------------------------------------------------------------------------------
SHARDED = {"topology": "sharded", "centres": 3}


@pytest.mark.slow
def test_c1_one_centre_is_the_server(world) -> None:
    plain, now = ran(waits(world)), ran(waits(world, algorithm={"centres": 1}))
    assert torch.equal(now.w, plain.w)
    assert same(now.kept, plain.kept)
    assert (now.state.up, now.state.down) == (plain.state.up, plain.state.down)
    for settings in ({"topology": "sharded"}, {"fused": "root"}):
        with pytest.raises(ConfigError, match="has an effect only if centres is above 1"):
            waits(world, algorithm=settings)


@pytest.mark.slow
def test_c1_centres_that_hear_everybody_are_one_centre_at_three_times_the_bytes(world) -> None:
    plain, three = (ran(waits(world, algorithm={"centres": k})) for k in (1, 3))
    assert torch.equal(three.w, plain.w)
    assert same(three.kept, plain.kept)
    assert (three.state.up, three.state.down) == (3 * plain.state.up, 3 * plain.state.down)


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("cohort", [{"sampling": "all"}, {"size": 3}])
def test_c1_shards_mixed_by_their_data_are_fedavgs_mean(world, executor, cohort) -> None:
    more = {"engine": {"executor": executor}, "cohort": cohort}
    ours = ran(waits(world, (4, 12, 7, 9, 5), algorithm=SHARDED | {"mix": "samples", "eta": 0.0}, **more), 4)
    theirs = ran(laid_out(world, (4, 12, 7, 9, 5), kind="fedavg", **more), 4)
    torch.testing.assert_close(ours.w, theirs.w, rtol=1e-5, atol=1e-6)


def test_c1_in_one_round_to_the_last_digits(world) -> None:
    ours = ran(waits(world, (4, 12, 7, 9, 5), algorithm=SHARDED | {"mix": "samples"}), 1).w
    torch.testing.assert_close(ours, ran(laid_out(world, (4, 12, 7, 9, 5), kind="fedavg"), 1).w, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_c1_equal_shards_mixed_alike_are_too_and_unequal_ones_are_not(world) -> None:
    # clients 0 and 3, 1 and 4, 2 and 5 share a centre
    for sizes, equal in (((6, 9, 4, 9, 6, 11), True), ((6, 9, 4, 9, 6, 31), False)):
        ours = ran(waits(world, sizes, algorithm=SHARDED), 1).w
        theirs = ran(laid_out(world, sizes, kind="fedavg"), 1).w
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7) == equal


def centred(dw, weights, each=None, **settings):
    """The state after a round in which clients 0, 1, ... moved from 0 by these numbers."""
    alg = PFedALA(**SHARDED | settings).bind(Setup(Task(torch.nn.Linear(1, 1, bias=False)), sgd()))
    state = CentreModels(torch.zeros(1), torch.zeros(3, 1) if each is None else torch.tensor(each)[:, None])
    ids = [i for i, x in enumerate(dw) if x is not None]
    uploads = Sent(torch.tensor([[float(dw[i])] for i in ids]), torch.tensor(ids))
    after = alg.update(state, hear(uploads, torch.tensor([float(weights[i]) for i in ids]).double()))
    return after.w.item(), after.each[:, 0].tolist()


def test_c1_by_hand() -> None:
    # centre 0 hears clients 0 and 3, centre 1 hears 1, centre 2 hears 2
    dw, n = (1, 10, 100, 5), (3, 2, 1, 1)
    assert centred(dw, n) == (pytest.approx((2 + 10 + 100) / 3), [2, 10, 100])
    assert centred(dw, n, mix="samples")[0] == pytest.approx((3 + 20 + 100 + 5) / 7)
    assert centred(dw, n, mix=(1.0, 1.0, 2.0))[0] == pytest.approx((2 + 10 + 200) / 4)
    # overlap with two copies: client k reaches centres k and k + 1
    overlapped = centred((1, 10, 100), (1, 1, 1), topology="overlap", copies=2)
    assert overlapped == (pytest.approx(37), [50.5, 5.5, 55])


def test_c1_lost_centres_leave_their_share_to_the_others() -> None:
    dw, n = (1, 10, 100), (3, 2, 1)
    assert centred(dw, n, lost=(2,))[0] == pytest.approx(5.5)
    assert centred(dw, n, lost=(0, 2))[0] == pytest.approx(10)
    assert centred(dw, n, lost=(2,), mix="samples")[0] == pytest.approx((3 + 20) / 5)
    assert centred(dw, n, lost=(0,), mix=(8.0, 1.0, 3.0))[0] == pytest.approx((10 + 300) / 4)


def test_c1_a_centre_without_clients_keeps_its_model() -> None:
    """It still answers with it; by data, it counts for nothing."""
    each = [7.0, 8.0, 9.0]
    assert centred((1, None, 100), (1, 1, 1), each) == (pytest.approx((1 + 8 + 100) / 3), [1, 8, 100])
    assert centred((1, None, 100), (1, 1, 3), each, mix="samples")[0] == pytest.approx(301 / 4)


def test_c1_where_no_centre_that_answers_heard_anybody_the_model_stays(world) -> None:
    assert centred((None, 10, None), (1, 1, 1), [7.0, 8.0, 9.0], mix="samples", lost=(1,)) == (0, [7, 10, 9])
    exp = waits(
        world, algorithm={"centres": 2, "topology": "sharded", "mix": "samples", "lost": [0]}, cohort={"size": 1}
    )
    now = ran(exp, 0)
    for t in range(6):
        heard = int(exp.present(t).drawn.ids) % 2 == 1
        before, now = now, now.on()
        assert torch.equal(now.w, before.w) == (not heard)


def test_c1_a_run_follows_its_centres(world) -> None:
    """Centres keep models of their own from round to round."""
    exp = waits(world, (4, 12, 7, 9), algorithm={"centres": 2, "topology": "sharded"}, cohort={"size": 1})
    now = ran(exp, 0)
    for t in range(5):
        k = int(exp.present(t).drawn.ids)
        before, now = now.state.server, now.on()
        assert not torch.equal(now.state.server.each[k % 2], before.each[k % 2])
        assert torch.equal(now.state.server.each[1 - k % 2], before.each[1 - k % 2])
        torch.testing.assert_close(now.w, now.state.server.each.mean(0))


def test_c1_the_order_in_which_uploads_come_changes_no_bit() -> None:
    alg = PFedALA(**SHARDED).bind(Setup(Task(torch.nn.Linear(20, 3)), sgd()))
    g = torch.Generator().manual_seed(0)
    uploads, n = Sent(torch.randn(7, 63, generator=g), torch.arange(7)), torch.rand(7, generator=g).double()
    state = CentreModels(torch.randn(63, generator=g), torch.randn(3, 63, generator=g))
    order = torch.randperm(7, generator=g)
    a, b = (alg.update(state, hear(tree.take(uploads, p), n[p])) for p in (torch.arange(7), order))
    assert same(a, b)


@pytest.mark.parametrize(
    ("settings", "up", "down"),
    [
        ({"topology": "replicated"}, 3, 3),
        ({"topology": "sharded"}, 1, 3),
        ({"topology": "overlap", "copies": 2}, 2, 3),
        ({"topology": "replicated", "fused": "root"}, 3, 1),
        ({"topology": "sharded", "fused": "root"}, 1, 1),
        ({"topology": "overlap", "copies": 3, "fused": "root"}, 3, 1),
    ],
)
def test_c1_bytes_of_each_topology(world, settings, up, down) -> None:
    now = ran(waits(world, algorithm={"centres": 3} | settings, cohort={"size": 2}), 2)
    model = 4 * now.exp.task.size
    assert (now.state.up, now.state.down) == (2 * 2 * up * model, 2 * 2 * down * model)


@pytest.mark.slow
def test_c1_who_sees_all_copies_hears_what_everybody_sends(world) -> None:
    """Overlap with as many copies as centres is replication, up to rounding."""
    all_, replicated = (
        ran(waits(world, algorithm={"centres": 3, **how}), 2) for how in ({"topology": "overlap", "copies": 3}, {})
    )
    torch.testing.assert_close(all_.w, replicated.w, rtol=1e-5, atol=1e-6)


# -- evaluation, settings ---------------------------------------------------------------------------------------
def test_a_client_is_evaluated_with_what_its_next_round_begins_with(world) -> None:
    exp = waits(
        world, (6, 14, 9), partition=HELD, engine={"executor": "loop"}, algorithm={"layers": "all", "w_init": 0.5}
    )
    now = ran(exp, 3)
    ids, done = now.trained()
    assert torch.equal(now.served(ids), done.begun)
    before = evaluate(*now)
    assert before == evaluate(*now)
    assert torch.equal(now.on().w, ran(exp, 4).w)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"wait_mode": "wall"}, "wall"),
        ({"extra_min": 4}, "extra_min"),
        ({"centres": 3, "mix": [1.0, 2.0]}, "mix"),
        ({"centres": 2, "mix": [0.0, 0.0]}, "mix"),
        ({"centres": 2, "mix": [0.0, 1.0], "lost": [1]}, "mix"),
        ({"centres": 2, "lost": [0, 1]}, "lost"),
        ({"centres": 2, "lost": [2]}, "lost"),
        ({"centres": 2, "topology": "overlap", "copies": 3}, "copies"),
        ({"ratio": -0.5}, "ratio"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong, match) -> None:
    with pytest.raises(ConfigError, match=match):
        parse({"algorithm": {"kind": "pfedala", **wrong}})


def test_lists_may_be_written_in_a_file() -> None:
    config = parse({"algorithm": {"kind": "pfedala", "centres": 2, "topology": "sharded", "mix": [1, 3], "lost": [0]}})
    assert (config.algorithm.mix, config.algorithm.lost) == ((1.0, 3.0), (0,))
    assert parse(as_table(config)).algorithm == config.algorithm


# -- killed and resumed -----------------------------------------------------------------------------------------
WORDS = (
    "algorithm.kind=pfedala",
    "algorithm.eta=5.0",
    "algorithm.max_start_passes=3",
    "algorithm.centres=2",
    "algorithm.topology=sharded",
    "partition.clients=4",
    "cohort.size=3",
    "model.kind=logistic",
    "local.batch=100",
    "local.optimizer=adam",
    "rounds=5",
    "checkpoint.every=1",
)


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


@pytest.fixture(scope="module")
def whole(quick: Quick, tmp_path_factory) -> dict[str, bytes]:
    """What a run leaves that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert quick("run", *WORDS, "--out", "r", cwd=folder).code == 0
    return results(folder / "r")


def results(run: Path) -> dict[str, bytes]:
    return {name: (run / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors")}


@pytest.mark.parametrize("store", ["ram", "disk"])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(quick: Quick, whole, tmp_path: Path, store: str) -> None:
    """SIGKILL in its fourth round, when every client has a W and a mean of its own, and resumed."""
    words = (*WORDS, f"engine.store={store}")
    ended = quick("run", *words, "--out", "r", cwd=tmp_path, crash_at=3, place="r/checkpoints/.00000004")
    assert ended.code == -9, ended.err
    resumed = quick("resume", "r", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert "resumed after round 3 of 5" in resumed.out
    assert results(tmp_path / "r") == whole
