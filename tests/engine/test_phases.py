"""Phases: what a client does in a round beside plain training, and how long it does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.algorithm import Adapts, Carry, HasPhases, Model, Phase, Surveys, TrainsParts, Update, Work
from fedloom.algorithms.dpsgd import DPSGD
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core import tree
from fedloom.core.optim import Local
from fedloom.core.task import Batch
from fedloom.engine import local
from fedloom.engine.evaluate import models_of
from fedloom.engine.local import Given, Outcome, fit, train
from fedloom.engine.plan import Address, Group, again, plans
from fedloom.engine.rounds import advance_watched, begin
from fedloom.engine.state import Experiment
from fedloom.engine.store import RamStore
from fedloom.engine.topology.kinds import Ring
from fedloom.engine.training import groups_of
from support.worlds import experiment, federation, ranges

SIZES = (4, 23, 1, 12, 7)
LOCAL = Local(batch=5, epochs=2, lr=0.1, momentum=0.5)
STEPS = [2, 10, 2, 6, 4]
PER_EPOCH = [1, 5, 1, 3, 2]
EXECUTORS = pytest.mark.parametrize("executor", ["lanes", "loop"])


class Trace(NamedTuple):
    """A model, and numbers in which a client's steps leave a trace: lanes run the code once for many clients."""

    w: Tensor
    steps: Tensor  # [] how many there were
    examples: Tensor  # [] how many they read
    order: Tensor  # [] a number that depends on what was read, and in which order
    passes: Tensor  # [8] what ``order`` was at the end of each pass
    done: Tensor  # [] passes


class Traced(FedAvg, HasPhases, Adapts, TrainsParts):
    """FedAvg whose clients keep a trace; ``plan`` says what their phases are."""

    plan: ClassVar[Callable[[Any], tuple[Phase, ...]]] = lambda alg: (Phase(alg.step),)
    prelude: ClassVar[Callable[[Any], tuple[Phase, ...]]] = lambda alg: ()

    def phases(self) -> tuple[Phase, ...]:
        return type(self).plan(self)

    def adaptation(self) -> tuple[Phase, ...]:
        return type(self).prelude(self)

    def join(self, down: Model) -> Any:
        return Trace(torch.zeros_like(down.w), *[torch.zeros(())] * 3, torch.zeros(8), torch.zeros(()))

    def start(self, down: Model, mine: Trace, work: Work) -> Trace:
        return mine._replace(w=down.w)

    def memory(self, x: Trace) -> Any:
        return self.optimizer.init(x.w)

    def step(self, at: Carry, batch: Batch, down: Model, mine: Trace) -> Carry:
        g = self.task.grad(at.x.w, batch)
        w, memory = self.optimizer.update(g, at.memory, at.x.w, batch.lr)
        return Carry(at.x._replace(w=w), memory)

    def note(self, at: Carry, batch: Batch, down: Model, mine: Trace) -> Carry:
        """A step that trains nothing and leaves a trace."""
        place = torch.arange(1, len(batch.mask) + 1)
        x, read = at.x, (batch.x[:, 0] * batch.mask * place).sum()
        return at._replace(
            x=x._replace(steps=x.steps + 1, examples=x.examples + batch.mask.sum(), order=0.7 * x.order + read)
        )

    def both(self, at: Carry, batch: Batch, down: Model, mine: Trace) -> Carry:
        return self.note(self.step(at, batch, down, mine), batch, down, mine)

    def end(self, at: Carry, seen: Any, down: Model, mine: Trace, work: Work) -> tuple[Carry, Tensor]:
        """The end of a pass: remember its order, and begin another."""
        x = at.x
        passes = torch.where(torch.arange(8) == x.done, x.order, x.passes)
        return at._replace(x=x._replace(passes=passes, order=0 * x.order, done=x.done + 1)), x.done < 0

    def finish(self, x: Trace, down: Model, mine: Trace, work: Work) -> tuple[Update, Any]:
        return Update(x.w - down.w), x


def doing(plan: Callable[[Any], tuple[Phase, ...]], **more: Any) -> Traced:
    """FedAvg with these phases."""
    cls = type("Doing", (Traced,), {"plan": plan, "__module__": __name__, **more})
    return cls()


def laid_out(algorithm: Any, executor: Any = "lanes", sizes: Any = SIZES, **more: Any) -> Experiment:
    torch.manual_seed(2)
    net = more.pop("net", None) or nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    return experiment(federation(sizes), net, algorithm, executor=executor, **{"local": LOCAL, **more})


def outcome(exp: Experiment, round_: int = 0, **more: Any) -> Outcome:
    """What every client does in a round from the initial state, in order of clients."""
    state, store, ids, parts = begin(exp), RamStore(exp.federation.clients), [], []
    for group in groups_of(exp, round_, exp.present(round_)):
        with torch.no_grad():
            parts.append(train(exp.algorithm, exp.federation, group, exp.given(state, store, group.ids), **more))
        ids.append(group.ids)
    found: Outcome = tree.take(tree.cat(parts), torch.cat(ids).argsort())
    return found


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def close(a: Any, b: Any) -> None:
    for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def by_client(*numbers: float) -> Callable[[Any, Work], Tensor]:
    """As many passes as these numbers say, client by client."""
    return lambda mine, work: torch.tensor(numbers)[work.client]


# -- loop and lanes ------------------------------------------------------------------------------------
EVERYTHING: dict[str, Callable[[Any], tuple[Phase, ...]]] = {
    "one after another": lambda a: (Phase(a.note, name="first", epochs=2), Phase(a.both), Phase(a.step, epochs=1)),
    "passes by client": lambda a: (
        Phase(a.both, name="some", epochs=1, passes=by_client(0, 1, 3, 2, 0), after=a.end),
        Phase(a.step),
    ),
    "a share, repeated": lambda a: (
        Phase(a.both, name="part", epochs=3, share=0.5, repeat=True, passes=by_client(3, 3, 1, 0, 2), after=a.end),
        Phase(a.step),
    ),
    "a block and steps": lambda a: (
        Phase(a.both, name="block", epochs=2, share=0.3, sampling="block"),
        Phase(a.step),
        Phase(a.both, name="few", steps=4),
    ),
    "a main phase that ends": lambda a: (
        Phase(a.both, look=lambda b, x, down, mine: b.mask.sum(), after=lambda at, n, d, m, w: (at, n > 8)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYTHING)
def test_lanes_and_loop_do_the_same(name: str) -> None:
    lanes, loop, few = (
        outcome(laid_out(doing(EVERYTHING[name]), executor, lanes=count), watched=True)
        for executor, count in (("lanes", 64), ("loop", 64), ("lanes", 2))
    )
    assert float(loop.states.steps.sum()) > 10
    close(lanes, loop)
    close(few, loop)


@pytest.mark.slow
def test_they_do_in_a_network_where_every_node_is_sent_its_own() -> None:
    class Uneven(DPSGD, HasPhases):
        def phases(self) -> tuple[Phase, ...]:
            before = Phase(
                self.step,
                name="before",
                epochs=1,
                passes=by_client(0, 2, 1, 3, 0),
                enter=lambda at, down, mine: at._replace(x=at.x + 0.1 * down.w),
                after=lambda at, seen, down, mine, work: (at._replace(x=at.x - 0.01 * down.w), at.x[0] > 1e9),
            )
            return before, Phase(self.step)

    found = []
    for executor in ("lanes", "loop"):
        exp = laid_out(Uneven(), executor, topology=Ring())
        state, store = begin(exp), RamStore(5)
        for _ in range(2):
            state = advance_watched(exp, state, store).state
        found.append(state.server.w)
    assert not torch.equal(found[0][0], found[0][1])
    close(*found)


# -- how much is done ------------------------------------------------------------------------------------
@EXECUTORS
def test_passes_differ_by_client(executor: Any) -> None:
    passes = (0, 1, 3, 2, 0)
    alg = doing(lambda a: (Phase(a.note, name="some", epochs=1, passes=by_client(*passes), after=a.end), Phase(a.step)))
    found = outcome(laid_out(alg, executor)).states
    assert found.done.tolist() == list(passes)
    assert found.steps.tolist() == [p * n for p, n in zip(passes, PER_EPOCH, strict=True)]
    assert found.examples.tolist() == [p * n for p, n in zip(passes, SIZES, strict=True)]


@EXECUTORS
def test_where_nobody_makes_a_pass_only_enter_and_leave_happen(executor: Any) -> None:
    def plan(a: Any) -> tuple[Phase, ...]:
        never = Phase(
            a.note,
            name="never",
            epochs=1,
            passes=by_client(0, 0, 0, 0, 0),
            enter=lambda at, down, mine: at._replace(x=at.x._replace(steps=at.x.steps + 10)),
            leave=lambda at, down, mine: at._replace(x=at.x._replace(steps=at.x.steps * 2)),
        )
        return Phase(a.step), never

    found = outcome(laid_out(doing(plan), executor))
    assert found.states.steps.tolist() == [20] * 5
    assert same(found.uploads, outcome(laid_out(FedAvg(), executor)).uploads)


@EXECUTORS
@pytest.mark.parametrize("passes", [None, (0, 1, 3, 2, 0)])
def test_enter_comes_before_the_first_pass_and_leave_after_the_last(executor: Any, passes: Any) -> None:
    def plan(a: Any) -> tuple[Phase, ...]:
        noted = Phase(
            a.note,
            name="noted",
            epochs=2,
            passes=by_client(*passes) if passes else None,
            enter=lambda at, down, mine: at._replace(x=at.x._replace(steps=at.x.steps + 100)),
            leave=lambda at, down, mine: at._replace(x=at.x._replace(steps=-at.x.steps)),
        )
        return noted, Phase(a.step)

    each = [2] * 5 if passes is None else passes
    found = outcome(laid_out(doing(plan), executor)).states
    assert found.steps.tolist() == [-(100 + p * n) for p, n in zip(each, PER_EPOCH, strict=True)]


@EXECUTORS
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_steps_are_exactly_so_many_for_everybody(executor: Any, steps: int) -> None:
    alg = doing(lambda a: (Phase(a.note, name="few", steps=steps), Phase(a.step)))
    assert outcome(laid_out(alg, executor)).states.steps.tolist() == [steps] * 5


@EXECUTORS
@pytest.mark.parametrize(("share", "read"), [(1.0, SIZES), (0.5, (4, 11, 1, 6, 5)), (0.01, (4, 5, 1, 5, 5))])
@pytest.mark.parametrize("sampling", ["draw", "block"])
def test_a_share_of_the_examples_but_at_least_a_batch(executor: Any, share: float, read: Any, sampling: Any) -> None:
    alg = doing(lambda a: (Phase(a.note, name="part", epochs=1, share=share, sampling=sampling), Phase(a.step)))
    found = outcome(laid_out(alg, executor)).states
    assert found.examples.tolist() == list(read)
    assert found.steps.tolist() == [-(-n // 5) for n in read]


def test_a_share_of_a_client_that_takes_all_its_data_at_once() -> None:
    alg = doing(lambda a: (Phase(a.note, name="part", epochs=1, share=0.5), Phase(a.step)))
    found = outcome(laid_out(alg, local=Local(batch=0))).states
    assert found.examples.tolist() == [2, 11, 1, 6, 3]
    assert found.steps.tolist() == [1] * 5


@EXECUTORS
@pytest.mark.parametrize("repeat", [True, False])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_repeated_passes_read_the_same_batches_in_the_same_order(executor: Any, repeat: bool, share: float) -> None:
    def plan(a: Any) -> tuple[Phase, ...]:
        read = Phase(
            a.note, name="read", epochs=1, share=share, repeat=repeat, passes=by_client(3, 3, 3, 3, 3), after=a.end
        )
        return read, Phase(a.step)

    found = outcome(laid_out(doing(plan), executor)).states.passes
    assert found[:, :3].all()
    assert not found[:, 3:].any()
    alike = [torch.equal(first, second) for first, second in zip(found[:, 0], found[:, 1], strict=True)]
    assert alike == ([True] * 5 if repeat else [False, False, True, False, False])  # one example has no order


@EXECUTORS
def test_repeated_passes_read_to_the_last_example_whatever_is_dropped_elsewhere(executor: Any) -> None:
    dropping = LOCAL.model_copy(update={"drop_last": True})
    for repeat, read in ((True, SIZES), (False, (4, 20, 1, 10, 5))):
        alg = doing(lambda a, repeat=repeat: (Phase(a.note, name="read", epochs=1, repeat=repeat), Phase(a.step)))
        assert outcome(laid_out(alg, executor, local=dropping)).states.examples.tolist() == list(read)


# -- what stays as it is ------------------------------------------------------------------------------------
NOTHING = {"epochs": 3, "share": 0.5}


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize(
    "before",
    [{}, {"repeat": True}, {"sampling": "block"}, {"passes": by_client(0, 1, 3, 2, 0)}, {"keeps_statistics": False}],
)
def test_other_phases_change_no_batch_of_the_main_one(executor: Any, before: Any) -> None:
    """Nor its dropout: a phase that trains nothing leaves what FedAvg sends as it was, bit for bit."""

    def net() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Dropout(0.4), nn.Linear(12, 3))

    alg = doing(
        lambda a: (
            Phase(a.note, name="other", **NOTHING, **before),
            Phase(a.step),
            Phase(a.note, name="then", epochs=1),
        )
    )
    for round_ in (0, 3):
        ours = outcome(laid_out(alg, executor, net=net()), round_)
        theirs = outcome(laid_out(FedAvg(), executor, net=net()), round_)
        assert torch.equal(ours.uploads.dw, theirs.uploads.dw)
        assert torch.equal(ours.steps, theirs.steps)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.sampled_from([0, 1, 7, 10]),
    st.floats(0.01, 1),
    st.booleans(),
    st.sampled_from(["draw", "block"]),
    st.integers(1, 3),
)
@settings(max_examples=30, deadline=None)
def test_laws_of_another_plan(sizes: Any, batch: int, share: float, repeat: bool, sampling: Any, epochs: int) -> None:
    ids = torch.arange(len(sizes))
    group = next(plans(Local(batch=batch), ranges(sizes), ids, Address(3, 2), lr=0.1, lanes=99))
    before = tuple(x.clone() for x in (group.rows, group.mask, group.keys))
    phase = Phase(lambda *_: None, name="other", epochs=epochs, share=share, repeat=repeat, sampling=sampling)
    plan = again(group, phase)
    assert same(before, (group.rows, group.mask, group.keys))
    assert torch.equal(plan.ids, group.ids)
    start = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
    for k, client in enumerate(group.ids.tolist()):
        want = min(sizes[client], max(int(share * sizes[client]), batch, 1))
        rows = [plan.rows[k, t][plan.mask[k, t] > 0].tolist() for t in range(plan.steps[k])]
        for e in range(epochs):
            read = [r for t in range(plan.per_epoch[k]) for r in rows[e * plan.per_epoch[k] + t]]
            assert len(read) == len(set(read)) == want
            assert all(start[client] <= r < start[client + 1] for r in read)
            if sampling == "block":
                assert read == list(range(read[0], read[0] + want)) == list(range(rows[0][0], rows[0][0] + want))
        assert plan.steps[k] == epochs * plan.per_epoch[k] == len(rows)
    longer = again(group, phase, epochs + 2)  # more passes change no earlier one
    for k in range(len(group.ids)):
        for t in range(plan.steps[k]):
            assert torch.equal(plan.rows[k, t][plan.mask[k, t] > 0], longer.rows[k, t][longer.mask[k, t] > 0])
        assert torch.equal(plan.keys[k, : plan.steps[k]], longer.keys[k, : plan.steps[k]])


def test_the_randomness_of_a_phase_goes_by_its_name() -> None:
    """Phases of other names read in another order; one of the main phase's name reads what that reads."""
    exp = laid_out(FedAvg())
    group = next(groups_of(exp, 0, exp.present(0)))
    plan = {name: again(group, Phase(exp.algorithm.step, name=name, epochs=2)) for name in ("batches", "a", "b")}
    assert same((plan["batches"].rows, plan["batches"].keys), (group.rows, group.keys))
    for one, other in (("batches", "a"), ("a", "b")):
        assert not torch.equal(plan[one].rows, plan[other].rows)
        assert not (plan[one].keys == plan[other].keys).any()
        assert torch.equal(plan[one].mask, plan[other].mask)


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.sampled_from([{"epochs": 3}, {"steps": 7}, {"epochs": 2, "drop_last": True}, {"epochs": 2, "wrap_last": True}]),
    st.sampled_from([0, 1, 7, 10]),
    st.data(),
)
@settings(max_examples=40, deadline=None)
def test_the_passes_of_a_plan_are_the_plan(sizes: Any, amount: Any, batch: int, data: Any) -> None:
    ids = torch.arange(len(sizes))
    group = next(plans(Local(batch=batch, **amount), ranges(sizes), ids, Address(3, 2), lr=0.1, lanes=99))
    lanes = data.draw(st.lists(st.sampled_from(range(len(group.ids))), min_size=1, unique=True))
    taken: dict[int, list[Any]] = {k: [] for k in lanes}
    pass_ = 0
    while here := [k for k in lanes if group.steps[k] > pass_ * group.per_epoch[k]]:
        part = group.pick(here, pass_)
        assert part.ids.tolist() == group.ids[here].tolist()
        assert part.work.steps.tolist() == part.steps
        assert max(part.steps) == len(part.widths) == part.rows.shape[1]
        for row, k in enumerate(here):
            assert 0 < part.steps[row] <= group.per_epoch[k]
            for t in range(part.steps[row]):
                real = part.mask[row, t] > 0
                assert int(real.sum()) <= part.widths[t]
                taken[k].append((part.rows[row, t][real].tolist(), int(part.keys[row, t])))
        pass_ += 1
    for k in lanes:
        whole = [
            (group.rows[k, t][group.mask[k, t] > 0].tolist(), int(group.keys[k, t])) for t in range(group.steps[k])
        ]
        assert taken[k] == whole


@EXECUTORS
@pytest.mark.parametrize("amount", [{"epochs": 2}, {"steps": 7}, {"epochs": 2, "drop_last": True}])
def test_training_pass_by_pass_is_training(executor: Any, amount: Any) -> None:
    """A main phase that could end after each pass and never does is the one that could not."""
    plain = LOCAL.model_dump(include={"batch", "lr", "momentum"}) | amount
    never = doing(lambda a: (Phase(a.step, after=a.end),))
    ours = outcome(laid_out(never, executor, local=Local(**plain)))
    theirs = outcome(laid_out(FedAvg(), executor, local=Local(**plain)))
    if executor == "loop":
        assert torch.equal(ours.uploads.dw, theirs.uploads.dw)
    close(ours.uploads, theirs.uploads)
    assert torch.equal(ours.steps, theirs.steps)
    whole = [max(1, n // 5) if "drop_last" in amount else -(-n // 5) for n in SIZES]  # steps of a pass
    assert ours.states.done.tolist() == [-(-s // n) for s, n in zip(theirs.steps.tolist(), whole, strict=True)]


# -- when it ends ---------------------------------------------------------------------------------------------
def after_passes(*limits: int) -> Any:
    """Stops each client after so many passes."""

    def stop(at: Carry, seen: Any, down: Any, mine: Any, work: Work) -> tuple[Carry, Tensor]:
        done = at.x.done + 1
        return at._replace(x=at.x._replace(done=done)), done >= torch.tensor(limits)[work.client]

    return stop


@pytest.mark.slow
@EXECUTORS
def test_a_phase_that_stops_counts_the_steps_that_were_taken(executor: Any) -> None:
    class Told(Traced):
        plan: ClassVar[Any] = lambda a: (Phase(a.both, after=after_passes(1, 3, 2, 1, 9)),)

        def weight(self, upload: Update, work: Work) -> Tensor:
            return work.steps

    exp = laid_out(Told(), executor, local=LOCAL.model_copy(update={"epochs": 4}))
    found = outcome(exp)
    taken = [1, 15, 2, 3, 8]
    assert found.states.steps.tolist() == taken
    assert found.steps.tolist() == taken
    assert found.weights.tolist() == taken  # it is what finish and weight are told
    done = advance_watched(exp, begin(exp), RamStore(5))
    assert [did.steps for did in sorted(done.work)] == taken
    plain = advance_watched(laid_out(FedAvg(), executor), begin(exp), RamStore(5))
    assert [did.steps for did in sorted(plain.work)] == STEPS


@EXECUTORS
def test_steps_of_other_phases_are_not_counted(executor: Any) -> None:
    def plan(a: Any) -> tuple[Phase, ...]:
        other = {"name": "other", "epochs": 1, "passes": by_client(4, 3, 2, 1, 0)}
        return Phase(a.note, **other, after=after_passes(1, 9, 9, 9, 9)), Phase(a.step)

    found = outcome(laid_out(doing(plan), executor))
    assert found.steps.tolist() == STEPS
    assert found.states.steps.tolist() == [1, 15, 2, 3, 0]


@EXECUTORS
def test_who_has_stopped_is_no_longer_computed(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[int]] = []
    descend = local._descend

    def spy(alg: Any, phase: Phase, fed: Any, group: Group, *args: Any, **more: Any) -> Any:
        calls.append(sorted(group.ids.tolist()))
        return descend(alg, phase, fed, group, *args, **more)

    monkeypatch.setattr(local, "_descend", spy)
    alg = doing(lambda a: (Phase(a.step, after=after_passes(1, 3, 2, 9, 1)),))
    outcome(laid_out(alg, executor, sizes=(6, 7, 8, 7, 6), local=LOCAL.model_copy(update={"epochs": 4})))
    assert calls == [[0, 1, 2, 3, 4], [1, 2, 3], [1, 3], [3]]


def test_lanes_narrow_as_clients_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the level of vmap: how many clients each stretch is computed for, and for how many steps."""
    found: list[tuple[int, int]] = []
    stretches = local.stretches

    def spy(group: Group, features: int) -> Any:
        cut = stretches(group, features)
        found.extend((s.lanes, s.last - s.first) for s in cut)
        return cut

    monkeypatch.setattr(local, "stretches", spy)
    alg = doing(lambda a: (Phase(a.step, after=after_passes(1, 3, 2, 1, 9)),))
    outcome(laid_out(alg, sizes=(5, 5, 5, 5, 5), local=LOCAL.model_copy(update={"epochs": 4})))
    assert found == [(5, 1), (3, 1), (2, 1), (1, 1)]


# -- what is looked at -----------------------------------------------------------------------------------------
@EXECUTORS
def test_look_sees_every_example_once_at_the_model_of_the_moment(executor: Any) -> None:
    sizes = (4, 300, 1, 257, 7)  # more than one batch of a survey

    def plan(a: Any) -> tuple[Phase, ...]:
        def look(batch: Batch, x: Trace, down: Model, mine: Trace) -> Any:
            return (batch.x[:, 0] * batch.mask).sum(), batch.mask.sum(), x.w[0] * batch.mask.sum()

        def after(at: Carry, seen: Any, down: Model, mine: Trace, work: Work) -> tuple[Carry, Tensor]:
            total, count, w = seen
            x = at.x._replace(order=total, examples=count, steps=w / count - at.x.w[0], done=work.examples)
            return at._replace(x=x), count < 0

        return (Phase(a.step, look=look, after=after),)

    exp = laid_out(doing(plan), executor, sizes=sizes, local=Local(batch=100, lr=0.1))
    found = outcome(exp).states
    assert found.examples.tolist() == found.done.tolist() == list(sizes)
    assert found.steps.abs().max() < 1e-6
    for k, rows in enumerate(torch.tensor_split(exp.federation.train.rows, exp.federation.train.start[1:-1])):
        assert float(found.order[k]) == pytest.approx(float(exp.federation.examples(rows)[0][:, 0].sum()), rel=1e-4)


@EXECUTORS
def test_a_survey_is_there_for_all_phases(executor: Any) -> None:
    class Surveyed(Traced, Surveys):
        plan: ClassVar[Any] = lambda a: (
            Phase(a.note, name="n", epochs=1, passes=lambda mine, work: 2 * (work.survey > 5)),
            Phase(a.step),
        )

        def survey(self, batch: Batch, down: Model, mine: Trace) -> Tensor:
            return batch.mask.sum()

    assert outcome(laid_out(Surveyed(), executor)).states.steps.tolist() == [0, 10, 0, 6, 4]


# -- memory, statistics, where training begins --------------------------------------------------------------------
@EXECUTORS
def test_the_optimizers_memory_goes_through_all_phases(executor: Any) -> None:
    """Two phases over the same batches as two epochs: what the second begins with is what the first left."""
    halves = doing(lambda a: (Phase(a.step, name="batches", epochs=1), Phase(a.step)))
    one = LOCAL.model_copy(update={"epochs": 1})
    found = outcome(laid_out(halves, executor, local=one))

    def by_hand(k: int) -> Tensor:
        exp = laid_out(FedAvg(), "loop", local=one)
        group = next(g for g in groups_of(exp, 0, exp.present(0)) if k in g.ids.tolist())
        row = group.ids.tolist().index(k)
        w, memory = exp.task.w0, exp.algorithm.optimizer.init(exp.task.w0)
        for _ in range(2):
            for t in range(group.steps[row]):
                x, y = exp.federation.examples(group.rows[row, t][group.mask[row, t] > 0])
                zero = torch.zeros(())
                g = exp.task.grad(w, Batch(x, y, torch.ones(len(y)), zero.long(), zero, zero, torch.zeros(0)))
                w, memory = exp.algorithm.optimizer.update(g, memory, w, torch.tensor(0.1))
        return w - exp.task.w0

    for k in range(5):
        torch.testing.assert_close(found.uploads.dw[k], by_hand(k), rtol=1e-5, atol=1e-6)


@EXECUTORS
def test_memory_is_kept_from_round_to_round_only_where_it_persists(executor: Any) -> None:
    plan = EVERYTHING["passes by client"]
    for state in ("reset", "persist"):
        exp = laid_out(doing(plan), executor, local=LOCAL.model_copy(update={"state": state}))
        kept = outcome(exp).memory
        assert (kept == ()) == (state == "reset")
        assert state == "reset" or kept.abs().max() > 0


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.norm(self.fc(x))))
        return out


@pytest.mark.parametrize("by_passes", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
def test_running_statistics_move_only_where_a_phase_says_so(keeps: bool, by_passes: bool) -> None:
    passes = {"passes": by_client(2, 2, 2)} if by_passes else {}
    alg = doing(lambda a: (Phase(a.note, name="n", epochs=2, keeps_statistics=keeps, **passes), Phase(a.step)))
    torch.manual_seed(2)
    ours = outcome(laid_out(alg, "loop", sizes=(10, 15, 5), net=Normed()))
    torch.manual_seed(2)
    theirs = outcome(laid_out(FedAvg(), "loop", sizes=(10, 15, 5), net=Normed()))
    assert torch.equal(ours.buffers, theirs.buffers) == (not keeps)
    assert torch.equal(ours.uploads.dw, theirs.uploads.dw)


@pytest.mark.slow
@EXECUTORS
def test_training_begins_after_what_belongs_to_fitting(executor: Any) -> None:
    """And fitting gives the model with which it begins."""
    fitting = lambda a: (Phase(a.step, name="fit", epochs=1),)  # noqa: E731
    alg = doing(lambda a: (*fitting(a), Phase(a.step), Phase(a.step, name="then", epochs=1)), prelude=fitting)
    exp = laid_out(alg, executor)
    found = outcome(exp, watched=True)
    assert (found.begun != exp.task.w0).any(1).all()
    assert torch.equal(found.models, found.states.w)
    state, store = begin(exp), RamStore(5)
    with torch.no_grad():
        judged = list(models_of(exp, state, store, torch.arange(5)))
    order = torch.cat([part.ids for part in judged]).argsort()
    close(torch.cat([part.w for part in judged])[order], found.begun)
    only = doing(fitting)
    close(outcome(laid_out(only, executor), watched=True).models, found.begun)


def test_fitting_writes_into_nothing_that_it_was_given() -> None:
    alg = doing(lambda a: (Phase(a.step),), prelude=lambda a: (Phase(a.both, name="fit", epochs=2),))
    exp = laid_out(alg)
    (group,) = plans(exp.local, exp.federation.train, torch.tensor([1]), Address(3, 0), lr=0.1, lanes=1, epochs=1)
    before: Given = exp.given(begin(exp), RamStore(5), group.ids)
    copies = [x.clone() for x in tree.leaves((before.down, before.mine, before.buffers))]
    with torch.no_grad():
        models, _ = fit(exp.algorithm, exp.federation, group, before)
    assert not torch.equal(models[0], exp.task.w0)
    assert same(copies, tree.leaves((before.down, before.mine, before.buffers)))


# -- time ------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_what_is_done_while_waiting_takes_no_time_of_a_round() -> None:
    def seconds(*extra: Any) -> float:
        exp = laid_out(doing(lambda a: (Phase(a.step), *(make(a) for make in extra))))
        return advance_watched(exp, begin(exp), RamStore(5)).state.seconds

    plain = seconds()
    assert seconds(lambda a: Phase(a.note, name="w", epochs=9, passes=by_client(9, 9, 9, 9, 9), waiting=True)) == plain
    # two more passes of the slowest client, at half the price
    more = seconds(lambda a: Phase(a.note, name="p", epochs=2, cost=0.5))
    assert more - plain == pytest.approx(23 / 1000, rel=1e-6)
