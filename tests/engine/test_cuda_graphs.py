"""Steps that are packed onto lanes and replayed: on a CPU nothing is recorded, and all else is the same."""

from __future__ import annotations

import dataclasses
import math
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedloom.algorithm import AnyAlgorithm
from fedloom.algorithms.fedavg import FedAvg
from fedloom.algorithms.fedprox import FedProx
from fedloom.algorithms.local_only import LocalOnly
from fedloom.algorithms.qfedavg import QFedAvg
from fedloom.algorithms.scaffold import Scaffold
from fedloom.core import tree
from fedloom.core.errors import DivergedError
from fedloom.core.lanes.conv import LaneConv2d
from fedloom.core.optim import Local, Optimizer
from fedloom.core.task import Capture
from fedloom.engine import cuda_graphs
from fedloom.engine.cuda_graphs import pack, width_for
from fedloom.engine.local import capture_for, train
from fedloom.engine.plan import Address, Cohort, plans
from fedloom.engine.rounds import advance, begin, rounds
from fedloom.engine.settings import Evaluate
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.engine.training import groups_of
from support.worlds import experiment, federation

STEPS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(steps=STEPS, width=st.integers(1, 40))
def test_every_step_is_taken_once_and_in_order(steps: list[int], width: int) -> None:
    """Over the ticks each client takes its steps 0, 1, 2, ..., never two of them at once."""
    clients, when, _ = pack(tuple(steps), width)
    for client, count in enumerate(steps):
        ticks, lanes = (clients == client).nonzero(as_tuple=True)
        assert len(set(ticks.tolist())) == len(ticks), "a client is in two lanes at once"
        assert when[ticks, lanes][ticks.argsort()].tolist() == list(range(count))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(steps=STEPS, width=st.integers(1, 40))
def test_no_plan_has_fewer_ticks(steps: list[int], width: int) -> None:
    assert pack(tuple(steps), width).ticks == max(*steps, -(-sum(steps) // width))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(steps=STEPS, width=st.integers(1, 40))
def test_lanes_keep_their_clients_within_a_segment_and_some_lane_changes_between_two(
    steps: list[int], width: int
) -> None:
    packed = pack(tuple(steps), width)
    assert [tick for first, end in packed.segments for tick in range(first, end)] == list(range(packed.ticks))
    for first, end in packed.segments:
        assert bool((packed.client[first:end] == packed.client[first]).all())
    for tick in packed.changes[1:]:
        assert not torch.equal(packed.client[tick - 1], packed.client[tick])


def test_clients_stay_in_their_lanes_if_lanes_change_seldom() -> None:
    assert pack((30, 30), 2).stay((30, 30)) == "all"
    assert pack((30, 30, 30, 30), 2).stay((30, 30, 30, 30)) == "segment"  # changed once in 60 ticks
    assert pack((100, 0), 2).stay((100, 0)) == "segment"  # a lane of its own would be the second client's
    assert pack((3, 2, 1), 2).stay((3, 2, 1)) == "tick"


def test_clients_of_one_length_all_have_a_lane() -> None:
    assert width_for([8] * 20, 64) == 20


def test_one_long_client_does_not_let_nineteen_lanes_idle() -> None:
    """32 ticks in any case: five lanes do 160 steps in them, twenty would idle three times out of four."""
    steps = [32, 30, 28, 25, 20, 10] + [1] * 14
    assert width_for(steps, 64) == 5


def test_cohorts_of_varying_size_share_a_few_widths() -> None:
    """Twenty draws with replacement are 13 to 20 clients: each width of its own would be compiled by itself."""
    assert {width_for([8] * n, 64, usual=20) for n in range(13, 21)} <= {5, 8, 10, 15, 20}
    assert width_for([8] * 17, 64, usual=20) == 10
    assert width_for([8] * 19, 64, usual=20) == 20
    assert width_for([8] * 20, 64, usual=20) == 20
    assert width_for([8] * 7, 64, usual=7) == 7


def test_a_tick_is_never_wider_than_what_a_gpu_can_use() -> None:
    assert width_for([4] * 4096, 64) <= 128


# -- rounds --------------------------------------------------------------------------------------
SIZES = (3, 40, 17, 8, 25, 1)


def world(
    algorithm: AnyAlgorithm | None = None,
    capture: Capture = "graph",
    *,
    spoiled: int | None = None,
    local: Local | None = None,
) -> Experiment:
    """Six clients, four of them in each round; ``spoiled``: one whose first example is not finite."""
    fed = federation(SIZES)
    if spoiled is not None:
        fed.x[fed.train.rows[fed.train.start[spoiled]]] = math.inf
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    local = local or Local(batch=4, epochs=2, lr=0.1, momentum=0.5)
    return experiment(fed, net, algorithm, capture=capture, local=local, cohort=Cohort(size=4), rounds=6)


def one_by_one(exp: Experiment) -> list[tuple[Any, tuple[int, ...]]]:
    state, store, found = begin(exp), RamStore(len(SIZES)), []
    for _ in range(exp.rounds):
        state, excluded = advance(exp, state, store)
        found.append((state, excluded))
    return found


def in_a_row(exp: Experiment) -> list[tuple[Any, tuple[int, ...]]]:
    return [(done.state, done.excluded) for done in rounds(exp, begin(exp), RamStore(len(SIZES)))]


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [FedAvg(), FedProx(mu=0.1), Scaffold(), LocalOnly()], ids=lambda a: type(a).__name__
)
def test_a_round_that_is_begun_early_is_the_same_round(algorithm: AnyAlgorithm) -> None:
    """The next round is given to do before anybody looks at the last, which changes nothing, to the bit."""
    alone, together = one_by_one(world(algorithm)), in_a_row(world(algorithm))
    assert len(alone) == len(together) == 6
    for (a, _), (b, _) in zip(alone, together, strict=True):
        assert same(a.server, b.server)
        assert (a.round, a.up, a.down, a.gradients) == (b.round, b.up, b.down, b.gradients)


@pytest.mark.slow
def test_gradients_are_counted_in_rounds_that_are_measured_after_a_speculative_one() -> None:
    """A round with diagnostics is not speculative, but may be begun before the one before it is checked."""
    measured = Evaluate(every=2, diagnostics=("updates",))
    found = [
        [state.gradients for state, _ in in_a_row(dataclasses.replace(world(capture=capture), evaluate=measured))]
        for capture in ("graph", "eager")
    ]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(("segment", "stay"), [(1, "segment"), (1 << 20, "tick")])
@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold()], ids=lambda a: type(a).__name__)
def test_replayed_rounds_are_those_of_plain_lanes(
    algorithm: AnyAlgorithm, segment: int, stay: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long clients stay in their lanes; with Scaffold each also has something of its own."""
    monkeypatch.setattr(cuda_graphs, "_SEGMENT", segment)
    monkeypatch.setattr(cuda_graphs, "_TICK", 0)  # so that lanes are scarce, and change their clients
    exp = world(algorithm)
    for (a, _), (b, _) in zip(in_a_row(exp), in_a_row(world(algorithm, capture="eager")), strict=True):
        for x, y in zip(tree.leaves(a.server), tree.leaves(b.server), strict=True):
            assert torch.allclose(x, y, atol=1e-6)
        assert a.gradients == b.gradients
    assert stay in {kind[1] for tables in cuda_graphs._graphs(exp.task).held.values() for kind in tables._replays}


class HeavyBall(Local):
    """An optimizer whose memory is the point before, as people write it: nothing is copied."""

    def make_optimizer(self) -> Optimizer:
        return Optimizer(lambda x: x, lambda g, before, x, lr: (x - lr * g + 0.5 * (x - before), x))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [SIZES, (8,) * len(SIZES)], ids=["segment", "all"])
def test_a_step_may_return_what_it_was_given_as_something_else(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of the point is overwritten first, and then copied to that of the point before."""
    monkeypatch.setattr(cuda_graphs, "_SEGMENT", 1)
    ends = []
    for capture in ("graph", "eager"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        settings: dict[str, Any] = {"capture": capture, "local": HeavyBall(batch=4, lr=0.05), "rounds": 2}
        ends.append(in_a_row(experiment(federation(sizes), net, FedAvg(), **settings))[-1][0].server.w)
    torch.testing.assert_close(ends[0], ends[1])


@pytest.mark.slow
def test_replayed_convolutions_do_what_each_client_does_alone() -> None:
    """Their operators, in lanes that are packed and replayed, against plain convolutions of one client at a time."""
    ends = []
    for executor, capture in (("lanes", "graph"), ("loop", "eager")):
        torch.manual_seed(1)
        net = nn.Sequential(
            nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 4, (1, 3), padding=(0, 1)), nn.ReLU(), nn.MaxPool2d((1, 2)),
            nn.Conv2d(4, 6, 1, 2), nn.Flatten(), nn.Linear(6, 3),
        )  # fmt: skip
        exp = experiment(
            federation(SIZES), net, Scaffold(), executor=executor, capture=capture, local=Local(batch=4, lr=0.1)
        )  # type: ignore[arg-type]
        ends.append((in_a_row(exp)[-1][0].server, sum(isinstance(m, LaneConv2d) for m in exp.task._train.modules())))
    (lanes, converted), (alone, plain) = ends
    assert (converted, plain) == (2, 0)
    for a, b in zip(tree.leaves(lanes), tree.leaves(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_surveys_are_replayed_and_are_those_of_plain_lanes() -> None:
    exp = world(QFedAvg(q=2.0))
    for (a, _), (b, _) in zip(in_a_row(exp), in_a_row(world(QFedAvg(q=2.0), capture="eager")), strict=True):
        assert torch.allclose(a.server.w, b.server.w, atol=1e-6)
    assert {key[1] for key in cuda_graphs._graphs(exp.task).held} == {"batches", "survey"}


@pytest.mark.slow
def test_lanes_without_a_client_change_nothing() -> None:
    """Drawn with replacement, rounds have fewer clients than lanes."""
    drawn = Cohort(size=4, sampling="proportional")
    graph, eager = (dataclasses.replace(world(capture=c), cohort=drawn) for c in ("graph", "eager"))  # type: ignore[arg-type]
    assert {len(graph.present(r).drawn.ids) for r in range(graph.rounds)} > {4}
    for (a, _), (b, _) in zip(in_a_row(graph), in_a_row(eager), strict=True):
        assert torch.allclose(a.server.w, b.server.w, atol=1e-6)
        assert a.gradients == b.gradients


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold()], ids=lambda a: type(a).__name__)
def test_a_speculative_round_that_is_not_finite_is_done_again_without_the_client(algorithm: AnyAlgorithm) -> None:
    """Client 1 returns no finite number: it is left out, and the round that was begun on it is forgotten."""
    speculative, careful = in_a_row(world(algorithm, spoiled=1)), in_a_row(world(algorithm, capture="eager", spoiled=1))
    assert [excluded for _, excluded in speculative] == [excluded for _, excluded in careful]
    assert (1,) in [excluded for _, excluded in speculative]
    for (a, _), (b, _) in zip(speculative, careful, strict=True):
        assert bool(a.server.w.isfinite().all())
        assert torch.allclose(a.server.w, b.server.w, atol=1e-6)


@pytest.mark.slow
def test_a_run_that_diverges_says_so_in_the_round_in_which_it_does() -> None:
    exp = world()
    exp.federation.x[:] = math.nan
    with pytest.raises(DivergedError, match="round 1: no client returned finite numbers"):
        in_a_row(exp)


def test_rounds_end_where_they_are_asked_to() -> None:
    exp = world()
    assert [done.state.round for done in rounds(exp, begin(exp), RamStore(len(SIZES)), last=2)] == [1, 2]


def test_what_outlasts_a_step_is_not_where_the_next_step_is_taken() -> None:
    """What a group of clients came to is what it was, however many groups have trained since."""
    exp = world(LocalOnly())
    state, store = begin(exp), RamStore(len(SIZES))
    group, other = (next(iter(groups_of(exp, r, exp.present(r)))) for r in range(2))
    with torch.no_grad():
        came = train(exp.algorithm, exp.federation, group, exp.given(state, store, group.ids))
        before = tree.tmap(torch.clone, came.states)
        train(exp.algorithm, exp.federation, other, exp.given(state, store, other.ids))
    assert same(before, came.states)


def narrow_after_wide(capture: Capture) -> Any:
    """Where a client with one full batch ends, and then one whose only batch is narrow, by the same recorded step."""
    exp = world(capture=capture)
    state, store, ends = begin(exp), RamStore(len(SIZES)), []
    for client in (3, 0):  # of 8 and of 3 examples, in batches of 4
        address = Address(exp.seed, client)
        plan = plans(exp.local, exp.federation.train, torch.tensor([client]), address, lr=0.1, lanes=4)
        with torch.no_grad():
            given = exp.given(state, store, torch.tensor([client]))
            ends.append(train(exp.algorithm, exp.federation, next(iter(plan)), given).uploads)
    return tuple(ends)


def test_a_narrow_batch_after_a_wide_one_has_nothing_of_it() -> None:
    for a, b in zip(tree.leaves(narrow_after_wide("graph")), tree.leaves(narrow_after_wide("eager")), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.slow
def test_clients_of_one_batch_each_are_all_counted_and_kept() -> None:
    """With whole-data batches clients of unequal width train in several groups, none of which may be lost."""
    found = []
    for capture in ("graph", "eager"):
        exp = world(Scaffold(), capture, local=Local(batch=0, epochs=2, lr=0.1))
        state, store = begin(exp), RamStore(len(SIZES))
        assert len(list(groups_of(exp, 0, exp.present(0)))) > 1
        for done in rounds(exp, state, store):
            state = done.state
        found.append((state, exp.given(state, store, torch.arange(len(SIZES))).mine))
    (a, mine), (b, plain) = found
    assert a.gradients == b.gradients
    for x, y in zip(tree.leaves((a.server, mine)), tree.leaves((b.server, plain)), strict=True):
        assert torch.allclose(x, y, atol=1e-6)


@pytest.mark.slow
def test_a_step_that_cannot_be_captured_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise cuda_graphs._NotCapturableError("it asks the GPU for a number")

    monkeypatch.setattr(cuda_graphs._Replay, "run", refuse)
    exp = world()
    ((state, _), *_), ((plain, _), *_) = in_a_row(exp), in_a_row(world(capture="eager"))
    assert same(state.server, plain.server)
    assert "cannot be captured" in cuda_graphs.built(exp.task).notes[0]


@pytest.mark.slow
def test_memory_that_is_full_halves_the_lanes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    run, widths = cuda_graphs._Replay.run, []

    def full(self: Any, group: Any, packed: Any) -> None:
        widths.append(packed.client.shape[1])
        if widths[-1] > 2:
            raise torch.OutOfMemoryError("full")
        run(self, group, packed)

    monkeypatch.setattr(cuda_graphs._Replay, "run", full)
    monkeypatch.setattr(cuda_graphs, "_TICK", 1 << 20)  # a tick costs so much that lanes are cheap
    exp = world()
    ((state, _), *_), ((plain, _), *_) = in_a_row(exp), in_a_row(world(capture="eager"))
    assert widths[widths.index(4) + 1] == 2
    assert 4 not in widths[widths.index(4) + 1 :]
    assert torch.allclose(state.server.w, plain.server.w, atol=1e-6)
    assert cuda_graphs.built(exp.task).notes == ("the GPU's memory is full: 2 lanes from here on",)


@pytest.mark.slow
def test_a_compiled_step_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is recorded; what the compiler makes of a step is the same all the same."""
    monkeypatch.setattr(cuda_graphs, "_TOGETHER", 2)  # each further step is compiled like the second
    exp, threads = world(capture="compiled"), torch.get_num_threads()
    compiled = in_a_row(exp)
    for (a, _), (b, _) in zip(compiled, in_a_row(world(capture="eager")), strict=True):
        assert torch.allclose(a.server.w, b.server.w, atol=1e-5)
    assert cuda_graphs.built(exp.task).compiling > 0
    assert torch.get_num_threads() == threads
    for (a, _), (b, _) in zip(compiled, in_a_row(world(capture="compiled")), strict=True):
        assert torch.equal(a.server.w, b.server.w)


@pytest.mark.slow
@pytest.mark.parametrize("small", [1 << 18, 0], ids=["blocks", "steps"])
def test_plans_that_become_longer_are_the_same_plans(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ticks as one function are compiled once for each width, however long plans become."""
    calls: list[bool] = []

    def as_it_is(step: Any, _: Any, *, small: bool) -> Any:
        calls.append(small)
        return step

    monkeypatch.setattr(cuda_graphs, "compiled", as_it_is)
    monkeypatch.setattr(cuda_graphs, "_ROOM", 8)
    monkeypatch.setattr(cuda_graphs, "_SMALL", small)
    exp = world(capture="compiled")
    for (a, _), (b, _) in zip(in_a_row(exp), in_a_row(world(capture="eager")), strict=True):
        assert torch.allclose(a.server.w, b.server.w, atol=1e-6)
    assert calls == [bool(small)]


@pytest.mark.slow
def test_a_step_that_no_cpu_compiler_takes_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cuda_graphs, "compiled", fail)
    exp = world(capture="compiled")
    for (a, _), (b, _) in zip(in_a_row(exp), in_a_row(world(capture="eager")), strict=True):
        assert torch.allclose(a.server.w, b.server.w, atol=1e-6)
    assert cuda_graphs.built(exp.task).notes == (
        "the step 'batches' cannot be captured, and runs eagerly (no compiler)",
    )


def test_how_much_is_made_ready_depends_on_how_long_a_run_is() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert [capture_for("auto", gpu, True, ticks) for ticks in (10, 1000, 100_000)] == ["eager", "graph", "compiled"]
    assert [capture_for(w, gpu, True, 1000) for w in ("on", "off")] == ["compiled", "eager"]
    assert capture_for("on", gpu, False, 1e6) == capture_for("auto", cpu, True, 1e9) == "eager"


def test_runs_that_use_the_same_code_compile_if_all_gain_what_compiling_once_and_loading_it_takes() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")

    def least(alike: int) -> int:
        return next(n for n in range(0, 9_000, 100) if capture_for("auto", gpu, True, n, alike) == "compiled")

    assert [least(alike) for alike in (1, 3, 6, 1000)] == [8_000, 4_000, 3_000, 2_100]
    assert capture_for("auto", cpu, True, 1e9, 1000) == "eager"
    assert capture_for("off", gpu, True, 5_000, 10) == "eager"


def test_a_cpu_compiles_on_request_and_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, found = torch.device("cpu"), "/usr/bin/g++"
    monkeypatch.setattr(shutil, "which", lambda name: found if name == "g++" else None)
    assert capture_for("on", cpu, True, 10) == "compiled"
    found = ""
    assert capture_for("on", cpu, True, 10) == "eager"
