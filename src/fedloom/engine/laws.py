"""The laws that every algorithm obeys, as functions that check an algorithm.

Each law takes an algorithm class and raises ``BrokenLawError`` if it does not hold. They run on a small
federation with very unequal clients; ``fedloom check my_method.py`` runs them all.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.algorithm import AnyAlgorithm, Carry, Held, Inbox, Noise, Setup, Work
from fedloom.algorithm.capabilities import defaults_of, memory_of, private_sums, survey_of
from fedloom.algorithms.fedavg import FedAvg
from fedloom.core import tree
from fedloom.core.errors import ConfigError, FedloomError, OwnCodeError
from fedloom.core.optim import Local
from fedloom.core.own_line import own_line, remedy
from fedloom.core.task import Batch, Capture, Task
from fedloom.data.arrays import Arrays
from fedloom.data.federation import federate
from fedloom.engine import checkpoint, variation
from fedloom.engine.clock import System
from fedloom.engine.evaluate import evaluate, models_of
from fedloom.engine.exchange import Tally, add, inbox, keep_finite
from fedloom.engine.lateness import foresee_lateness
from fedloom.engine.local import Executor, train
from fedloom.engine.plan import Address, Cohort, Group, plans
from fedloom.engine.rounds import advance, advance_watched, begin
from fedloom.engine.settings import Evaluate
from fedloom.engine.state import Experiment, RunState
from fedloom.engine.store import ClientStore, DiskStore, RamStore
from fedloom.engine.topology.kinds import Full
from fedloom.engine.training import groups_of
from fedloom.models.net import Net
from fedloom.trust.corruption import Corruption

_SIZES = (3, 17, 1, 40, 9, 26)  # training rows of each client
_ALIKE = (18, 20, 17, 40, 19, 26)  # so that all train side by side, where many runs are compared
_TOLERANCE = 1e-5
# Every client reads its data in a tenth of a second, except the one with the most.
_LATE = System(speeds=tuple(n * (0.25 if n == max(_SIZES) else 10.0) for n in _SIZES), deadline=3.5)


class BrokenLawError(Exception):
    """A law that does not hold, and how."""


def batched_is_alone(cls: type[AnyAlgorithm]) -> None:
    """Clients trained side by side do what each does alone."""
    _agree(_after(_world(cls, executor="lanes"), 3), _after(_world(cls, executor="loop"), 3), "lanes and loop")


def replayed_is_alone(cls: type[AnyAlgorithm]) -> None:
    """Clients whose steps are packed onto a few lanes and replayed, as on a GPU, do what each does alone."""
    _agree(_after(_world(cls, capture="graph"), 2), _after(_world(cls, executor="loop"), 2), "replayed steps and loop")


def lane_count_is_irrelevant(cls: type[AnyAlgorithm]) -> None:
    """How many clients train side by side changes nothing."""
    _agree(_after(_world(cls, lanes=6), 2), _after(_world(cls, lanes=2), 2), "6 lanes and 2 lanes")


def client_order_is_irrelevant(cls: type[AnyAlgorithm]) -> None:
    """The order in which the uploads of a round arrive changes nothing."""
    world = _world(cls, executor="loop")
    if world.is_network or world.is_asynchronous:
        return  # a node knows its neighbours by name, and an asynchronous server applies uploads as they arrive
    state, store = begin(world), _store(world)
    groups = _groups(world, state)
    ends = [_first_round(world, state, store, order) for order in (groups, groups[::-1])]
    _agree(ends[0], ends[1], "uploads in one order and in the other")


def late_uploads_are_ignored(cls: type[AnyAlgorithm]) -> None:
    """The upload of a late client is not used; the client keeps what it learned, unless the server mirrors it."""
    if cls.family == "gossip" or not cls().traits.synchronous:
        return  # without a server, or with an asynchronous one, there is no deadline
    world = _world(cls, executor="loop", system=_LATE, cohort=Cohort(sampling="all"))
    state, store, present = begin(world), _store(world), world.present(0)
    ahead = foresee_lateness(world, state, present, 0)
    groups = [group for group in groups_of(world, 0, present, ahead.extra) if len(ahead.on_time(group.ids))]
    expected = _first_round(world, state, store, groups)
    before = _everything(world, state, store).clients
    after = _everything(world, advance(world, state, store)[0], store)
    _agree(
        expected,
        after.server,
        "the server that received all uploads but the late ones, and the one that had a deadline",
    )
    late = tree.tmap(lambda x: x[ahead.late], (before, after.clients))
    if not len(ahead.late) or not tree.leaves(late):
        return
    if world.algorithm.traits.mirrored:
        _agree(*late, "the states of late clients before and after the round", exactly=True)
    elif _alike(*late) and not _alike(
        before, _after(_world(cls, executor="loop", cohort=Cohort(sampling="all")), 1)[1]
    ):
        raise BrokenLawError("a late client has forgotten what it learned, although the class is not mirrored")


def _alike(old: Any, new: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(*map(tree.leaves, (old, new)), strict=True))


def mirrors_are_declared(cls: type[AnyAlgorithm]) -> None:
    """A class whose server keeps the mean of its clients' states says so by `mirrored`."""
    if cls.family == "gossip" or cls().traits.mirrored:
        return
    world = _world(cls, cohort=Cohort(sampling="all"))
    server, clients, _ = _after(world, 2)
    sizes = world.federation.train.sizes.double()
    for (name, kept), (_, first) in zip(tree.named_leaves(server), tree.named_leaves(begin(world).server), strict=True):
        for theirs, states in tree.named_leaves(clients):
            if name == "w" or states.shape[1:] != kept.shape or torch.equal(kept, first):
                continue
            means = (states.double().mean(0), torch.tensordot(sizes / sizes.sum(), states.double(), 1))
            if any(torch.allclose(kept.double(), mean, rtol=1e-4, atol=1e-6) for mean in means):
                what = f"the server's '{name}' is the mean of the clients' '{theirs}'"
                raise BrokenLawError(f"{what}: an unused upload would break that (set the trait mirrored=True)")


def resumed_is_never_crashed(cls: type[AnyAlgorithm]) -> None:
    """A run saved and loaded after every round is the run that never stopped, bit for bit."""
    world = _world(cls)
    whole = _after(world, 3)
    with tempfile.TemporaryDirectory() as folder:
        state, store = begin(world), _store(world)
        for _ in range(3):
            state, _ = advance(world, state, store)
            checkpoint.save(Path(folder), state, store, {})
            store = _store(world)
            state = checkpoint.load_state(Path(folder), begin(world), store).state
    _agree(whole, _everything(world, state, store), "the whole run and the resumed one", exactly=True)


def ram_is_disk(cls: type[AnyAlgorithm]) -> None:
    """Clients' states kept in memory and on disk give the same run, bit for bit."""
    world = _world(cls)
    with tempfile.TemporaryDirectory() as folder:
        on_disk = _after(world, 3, store=DiskStore(Path(folder), len(_SIZES)))
    _agree(_after(world, 3), on_disk, "the store in memory and the one on disk", exactly=True)


def arguments_are_unchanged(cls: type[AnyAlgorithm]) -> None:
    """No function of the algorithm writes into what it is given."""
    world = _world(cls, executor="loop")
    alg, batch = world.algorithm, _batch(world)
    down = _untouched("send", alg.send, _untouched("init", alg.init, world.task.w0))
    mine = _untouched("join", alg.join, down)
    _untouched("survey", partial(survey_of, alg), batch, down, mine)
    work = _work(alg, batch, down, mine)
    x = _untouched("start", alg.start, down, mine, work)
    moved = _untouched("step", alg.step, Carry(x, memory_of(alg, x)), batch, down, mine).x
    upload, _ = _untouched("finish", alg.finish, moved, down, mine, work)
    _untouched("weight", alg.weight, upload, work)
    _untouched("serve", alg.serve, down, mine)
    world = _world(cls)
    state, store = begin(world), _store(world)
    before = tree.tmap(torch.clone, state.server)
    advance(world, state, store)
    _agree(before, state.server, "the server's state before and after a round was computed from it", exactly=True)
    if not (world.is_network or world.is_asynchronous):
        alg, box = world.algorithm, _received(world, state, store, _groups(world, state))
        _untouched(
            "update",
            lambda at, read: alg.update(at, read._replace(address=box.address)),
            state.server,
            box._replace(address=()),
        )


def state_keeps_its_shape(cls: type[AnyAlgorithm]) -> None:
    """The states of server and clients keep their structure, shapes and data types."""
    alg, down, mine, batch = _one_client(cls)
    work = _work(alg, batch, down, mine)
    x = alg.start(down, mine, work)
    moved = alg.step(Carry(x, memory_of(alg, x)), batch, down, mine).x
    _, kept = alg.finish(moved, down, mine, work)
    _same_form(mine, kept, "a client's state")
    world = _world(cls)
    first = begin(world)
    second, _ = advance(world, first, _store(world))
    _same_form(first.server, second.server, "the server's state")


def neutral_is_fedavg(cls: type[AnyAlgorithm]) -> None:
    """Under its neutral settings, where it names any, the algorithm is FedAvg, bit for bit."""
    if cls.fedavg_when is None:
        return
    ours = _after(_world(cls, settings=dict(cls.fedavg_when)), 3).server.w
    theirs = _after(_world(FedAvg, settings=dict(cls.fedavg_as)), 3).server.w
    try:
        _agree(ours, theirs, f"{cls.__name__} with {dict(cls.fedavg_when)} and FedAvg", exactly=True)
    except BrokenLawError as broken:
        if "fedavg_when" in vars(cls):
            raise
        fix = "set fedavg_when = None in the class if it is not FedAvg under any settings"
        raise BrokenLawError(f"{broken}; it inherits fedavg_when: {fix}") from broken


def training_changes_something(cls: type[AnyAlgorithm]) -> None:
    """After a round the models that clients are served are no longer the initial ones, and all is finite."""
    world = _world(cls)
    state, store = begin(world), _store(world)
    before = evaluate(world, state, store)
    state, excluded = advance(world, state, store)
    after = evaluate(world, state, store)
    if excluded:
        raise BrokenLawError(f"clients {list(excluded)} returned numbers that are not finite")
    if before == after:
        raise BrokenLawError("no metric moved in a whole round of training")


def frozen_parts_stay(cls: type[AnyAlgorithm]) -> None:
    """With a frozen body the algorithm trains the rest of the net, and only that; or it says that it cannot."""
    try:
        world = _world(cls, frozen=("body",))
    except OwnCodeError:
        raise
    except ConfigError:
        return
    state, store = begin(world), _store(world)
    before, metrics = tuple(x.clone() for x in world.task.fixed), evaluate(world, state, store)
    for _ in range(2):
        state, _ = advance(world, state, store)
    _agree(before, tuple(world.task.fixed), "the frozen body before and after training", exactly=True)
    if metrics == evaluate(world, state, store):
        raise BrokenLawError("no metric moved in two rounds of training with a frozen body")


def settings_have_an_effect(cls: type[AnyAlgorithm], most: int | None = 6) -> None:
    """Every setting, changed alone, changes a result, a record or the bytes sent, or is refused.

    It is changed together with the settings that it needs, and with each choice of another setting; of the latter
    ``most`` are tried, evenly spaced, so that the law takes seconds.
    """
    for name, where in idle_settings(cls, most):
        fix = "give it one, or declare with fedloom.core.schema.when() under which settings it has one"
        raise BrokenLawError(f"the setting '{name}' has no effect{where}, whatever its value: {fix}")


def idle_settings(cls: type[AnyAlgorithm], most: int | None) -> Iterator[tuple[str, str]]:
    """Settings without effect that do not declare it, each with the other settings under which this was found."""
    names = list(cls.model_fields)
    ways = None if most is None else 1  # ways to have the settings that it needs
    alone = [(name, needed) for name in names for needed in islice(variation.needed(cls, name, _WORDS), ways)]
    pairs = [(name, around) for name, needed in alone for around in variation.beside(cls, name, needed, _WORDS)]
    every = 1 if most is None else max(1, -(-len(pairs) // most))
    trials: dict[str, _Observed] = {}
    for name, around in (*alone, *pairs[::every]):
        if not _is_felt(cls, name, around, trials):
            yield name, f" with {_shown(around)}" if around else ""


LAWS: tuple[Callable[[type[AnyAlgorithm]], None], ...] = (
    batched_is_alone,
    replayed_is_alone,
    lane_count_is_irrelevant,
    client_order_is_irrelevant,
    late_uploads_are_ignored,
    mirrors_are_declared,
    resumed_is_never_crashed,
    ram_is_disk,
    arguments_are_unchanged,
    state_keeps_its_shape,
    neutral_is_fedavg,
    training_changes_something,
    frozen_parts_stay,
    settings_have_an_effect,
)


def verdict(law: Callable[[type[AnyAlgorithm]], None], cls: type[AnyAlgorithm]) -> str:
    """How the law is broken, or an empty string if it holds."""
    try:
        law(cls)
    except BrokenLawError as broken:
        return str(broken)
    except OwnCodeError as error:
        return "\n".join(map(str, error.faults))
    except Exception as error:  # an algorithm that raises is as broken as one with wrong results
        line = f" ({where})" if (where := own_line(error)) else ""
        return remedy(error) or f"raised {type(error).__name__}: {error}{line}"
    return ""


def title(law: Callable[[type[AnyAlgorithm]], None]) -> str:
    """The law in words."""
    return (law.__doc__ or law.__name__).strip().split("\n")[0]


# -- a small world -------------------------------------------------------------------------------
def _world(
    cls: type[AnyAlgorithm],
    *,
    executor: Executor = "lanes",
    capture: Capture = "eager",
    lanes: int = 6,
    settings: dict[str, Any] | None = None,
    system: System | None = None,
    cohort: Cohort | None = None,
    frozen: tuple[str, ...] = (),
    local: Local | None = None,
    layers: Sequence[Callable[[], nn.Module]] = (),
    sizes: tuple[int, ...] = _SIZES,
) -> Experiment:
    """Six clients with 1 to 40 examples of three overlapping classes, and a net with a hidden layer."""
    rng = np.random.default_rng(5)
    owner = np.repeat(np.arange(len(sizes)), [n + 2 for n in sizes])
    n = len(owner) + 30
    y = rng.integers(0, 3, n)
    x = rng.normal(size=(n, 5)).astype(np.float32) + 2 * np.eye(3, 5, dtype=np.float32)[y]
    test = np.arange(n) >= len(owner)
    held_out = np.concatenate([np.arange(k + 2) < 2 for k in sizes])
    arrays = Arrays("law", x, y, test, ("a", "b", "c"))
    device = torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        net = Net(nn.Sequential(nn.Linear(5, 6), *(layer() for layer in layers), nn.Tanh()), 6, 3)
    task = Task(net, frozen=frozen).to(device, lanes=executor == "lanes", capture=capture)
    local = local or Local(batch=8, epochs=2, lr=0.05, momentum=0.5)
    federation = federate(arrays, owner, len(sizes), held_out, device=device)
    proxy = Held(*federation.examples(federation.common[:12]))  # any one will do for the laws
    setup = Setup(task, local.make_optimizer(), federation.train.sizes, proxy, first_lr=local.lr, rounds=4, local=local)
    return Experiment(
        algorithm=cls(**(settings or {})).bind(setup),
        task=task,
        federation=federation,
        local=local,
        cohort=cohort or Cohort(size=4),
        evaluate=Evaluate(),
        rounds=4,
        seed=3,
        device=device,
        executor=executor,
        lanes=lanes if executor == "lanes" else 1,
        topology=Full() if cls.family == "gossip" else None,
        system=system or System(),
    )


def _groups(world: Experiment, state: RunState) -> list[Group]:
    """The clients of the first round."""
    present = world.present(0)
    return list(groups_of(world, 0, present, foresee_lateness(world, state, present, 0).extra))


def _received(world: Experiment, state: RunState, store: ClientStore, groups: Sequence[Group]) -> Inbox[Any]:
    """The uploads of these groups, in this order."""
    tally = Tally()
    for group in groups:
        outcome = train(world.algorithm, world.federation, group, world.given(state, store, group.ids))
        tally = add(tally, keep_finite(group.ids, outcome, torch.ones(1)), keep=world.algorithm.traits.each_upload)
    return inbox(tally, world.federation.train.sizes, (world.seed, 0))


def _first_round(world: Experiment, state: RunState, store: ClientStore, groups: Sequence[Group]) -> Any:
    """The server after it received the uploads of these groups, in this order."""
    return world.algorithm.update(state.server, _received(world, state, store, groups))


def _store(world: Experiment) -> ClientStore:
    return RamStore(world.federation.clients)


# -- whether a setting has an effect ---------------------------------------------------------------
_WORDS = ("bias", "bn", "head.", "body.", "body.0.bias")  # texts of settings, which name parts of the net
_SEEN = 9  # parts of a run that is observed: records, metrics and models of three rounds


class _Observed:
    """All that a user can see of a run, part by part; a part is computed when it is first needed.

    There are fewer than ``_SEEN`` if the settings were refused, or the run failed.
    """

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._seen: list[bytes] = []

    def __iter__(self) -> Iterator[bytes]:
        for k in range(_SEEN):
            if k == len(self._seen):
                self._seen += islice(self._parts, 1)
            if k == len(self._seen):
                return
            yield self._seen[k]


def _differ(a: _Observed, b: _Observed) -> bool | None:
    """Whether two runs differ; None if unknown, since one of them failed before they did."""
    both = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            return True
        both += 1
    return False if both == _SEEN else None


def _is_felt(cls: type[AnyAlgorithm], name: str, around: variation.Settings, trials: dict[str, _Observed]) -> bool:
    """Whether a change of this setting is seen, or refused, together with the settings ``around``."""
    values = list(variation.others(cls, name, around, _WORDS))
    # Of the combinations: worlds are few, other numbers are many.
    worlds, others = (0, len(_TRIALS)), (len(_TRIALS), None)
    compared = False  # a class that cannot run here is not checked
    for span, some in ((worlds, values[:2]), (worlds, values[2:]), (others, values[:2]), (others, values[2:])):
        for world, beside in islice(_places(cls, name, around), *span) if some else ():
            before = _tried(cls, {**around, **beside}, world, trials)
            for value in some if next(iter(before), None) is not None else ():
                found = _differ(before, _tried(cls, {**around, **beside, name: value}, world, trials))
                if found:
                    return True
                compared = compared or found is False
    return not compared


def _places(cls: type[AnyAlgorithm], name: str, around: variation.Settings) -> Iterator[tuple[str, variation.Settings]]:
    """Where a setting may have an effect: mostly at once, else in another world, or with other numbers."""
    yield from ((world, {}) for world in _TRIALS)
    for other, field in cls.model_fields.items():
        if other != name and other not in around and not variation.is_choice(field):
            few = islice(variation.others(cls, other, around, _WORDS), 3)
            yield from ((next(iter(_TRIALS)), {other: value}) for value in few)


def _tried(
    cls: type[AnyAlgorithm], settings: variation.Settings, world: str, trials: dict[str, _Observed]
) -> _Observed:
    key = f"{world} {sorted(settings.items(), key=str)}"
    if key not in trials:
        trials[key] = _Observed(_observe(cls, settings, world))
    return trials[key]


def _observe(cls: type[AnyAlgorithm], settings: variation.Settings, world: str) -> Iterator[bytes]:
    """All that a user can see of each round: diagnostics, bytes and time; metrics; every client's model.

    In this order, since most changes are seen in the first part, and the others take longer to compute.
    """
    if not variation.accepted(cls, settings):
        return
    try:
        exp = _TRIALS[world](cls, dict(settings))
        state, store, everybody = begin(exp), _store(exp), torch.arange(exp.federation.clients)
        while True:
            done = advance_watched(exp, state, store)
            state = done.state
            records: list[Any] = [defaults_of(exp.algorithm), done.found, done.work]
            yield repr([*records, state.up, state.down, state.busiest, state.seconds, state.gradients]).encode()
            yield repr(evaluate(exp, state, store)).encode()
            yield torch.cat([part.w for part in models_of(exp, state, store, everybody)]).numpy().tobytes()
    except (FedloomError, ValueError, RuntimeError):  # for example numbers that are too large for it
        return


def _shown(settings: variation.Settings) -> str:
    return ", ".join(f"{name} = {value}" for name, value in settings.items())


def _trial(
    cls: type[AnyAlgorithm],
    settings: dict[str, Any],
    *,
    lr: float = 0.1,
    state: Literal["reset", "persist"] = "reset",
    **how: Any,
) -> Experiment:
    """A world in which little is computed and much is measured; a decaying rate, and clients of unequal speed."""
    local = Local(batch=32, epochs=2, lr=lr, momentum=0.5, state=state, schedule="exponential", decay=0.7)
    system = System(speed=100.0, speed_spread=1.0, latency=0.1)
    world = _world(cls, settings=settings, local=local, system=system, **{"sizes": _ALIKE, **how})
    common = world.algorithm.traits.common_model
    return replace(world, evaluate=Evaluate(diagnostics=("updates", "weights") if common else ()))


def _private(cls: type[AnyAlgorithm], settings: dict[str, Any]) -> Experiment:
    world = _trial(cls, settings)
    sums = private_sums(world.algorithm)
    if sums is None or sums.against_noise(local=True):
        raise ConfigError([])
    alg = world.algorithm
    return replace(world, algorithm=alg.bind(alg.setup._replace(noise=Noise(1.0, 0.5, 0.5))))


def _lying(cls: type[AnyAlgorithm], settings: dict[str, Any]) -> Experiment:
    """A client sends sums that cannot come from examples."""
    world = _trial(cls, settings)
    if private_sums(world.algorithm) is None:
        raise ConfigError([])
    return replace(world, corruption=Corruption(clients=(1,), kind="stat_scale"), bad=(1,))


def _normalised(cls: type[AnyAlgorithm], settings: dict[str, Any]) -> Experiment:
    layers, sizes = (partial(nn.BatchNorm1d, 6), nn.Dropout), tuple(n + 1 for n in _SIZES)  # one cannot be normalised
    return _trial(cls, settings, layers=layers, executor="loop", sizes=sizes)


# Worlds in which a setting may have an effect; the first is enough for most.
_TRIALS: dict[str, Callable[[type[AnyAlgorithm], dict[str, Any]], Experiment]] = {
    "plain": _trial,
    "with BatchNorm": _normalised,
    "with a rate that is too large": partial(_trial, lr=3.0, sizes=_SIZES),  # also for what is felt by small clients
    "with optimizers that keep their state": partial(_trial, state="persist"),
    "with noise in sums": _private,
    "with a client that sends impossible sums": _lying,
}


class _Whole(NamedTuple):
    """Everything after some rounds."""

    server: Any
    clients: Any
    served: Tensor  # [N, P] the models that clients are served


def _after(world: Experiment, rounds: int, store: ClientStore | None = None) -> _Whole:
    store = _store(world) if store is None else store
    state = begin(world)
    for _ in range(rounds):
        state, _ = advance(world, state, store)
    return _everything(world, state, store)


def _everything(world: Experiment, state: RunState, store: ClientStore) -> _Whole:
    everyone = torch.arange(world.federation.clients)
    with torch.no_grad():
        models = tree.cat(list(models_of(world, state, store, everyone)))
    return _Whole(state.server, world.given(state, store, everyone).mine, models.w[models.ids.argsort()])


def _one_client(cls: type[AnyAlgorithm]) -> tuple[AnyAlgorithm, Any, Any, Batch]:
    """An algorithm, and what its client functions are given in a first step."""
    world = _world(cls, executor="loop")
    alg = world.algorithm
    down = alg.send(alg.init(world.task.w0))
    return alg, down, alg.join(down), _batch(world)


def _batch(world: Experiment) -> Batch:
    """The first batch of a client."""
    group = next(iter(plans(world.local, world.federation.train, torch.tensor([3]), Address(3, 0), lr=0.05, lanes=1)))
    x, y = world.federation.examples(group.rows[0, 0])
    one = torch.ones(())
    return Batch(x, y, torch.ones(len(y)), group.keys[0, 0], 0 * one, 0.05 * one, x[0, :0])


def _work(alg: AnyAlgorithm, batch: Batch, down: Any, mine: Any) -> Work:
    """The work of a client that has this one batch."""
    survey = survey_of(alg, batch, down, mine)
    zero, one = torch.tensor(0.0), torch.tensor(1.0)
    return Work(2 * one, batch.mask.sum(), 0.1 * one, zero, survey, torch.tensor(3), one, staleness=one)


def _agree(a: Any, b: Any, what: str, *, exactly: bool = False) -> None:
    for (name, left), (_, right) in zip(tree.named_leaves(a), tree.named_leaves(b), strict=True):
        if exactly and not torch.equal(left, right):
            raise BrokenLawError(f"{what} differ in '{name}' by up to {_gap(left, right):.3g}")
        if not torch.allclose(left, right, rtol=_TOLERANCE, atol=_TOLERANCE):
            raise BrokenLawError(f"{what} differ in '{name}' by up to {_gap(left, right):.3g}")


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape and a.numel() else float("nan")


def _untouched(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function returns."""
    before = [tree.tmap(torch.clone, argument) for argument in arguments]
    found = function(*arguments)
    for place, (old, new) in enumerate(zip(before, arguments, strict=True)):
        for (leaf, a), (_, b) in zip(tree.named_leaves(old), tree.named_leaves(new), strict=True):
            if not torch.equal(a, b):
                raise BrokenLawError(f"{name}() wrote into its argument {place + 1} ('{leaf}')")
    return found


def _same_form(a: Any, b: Any, what: str) -> None:
    old = [(name, tuple(x.shape), x.dtype) for name, x in tree.named_leaves(a)]
    new = [(name, tuple(x.shape), x.dtype) for name, x in tree.named_leaves(b)]
    if old != new:
        raise BrokenLawError(f"{what} changed its structure: {old} became {new}")
