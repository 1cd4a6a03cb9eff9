"""From settings to objects: load the data, partition it, build the net, choose the executor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.algorithm import Held, Setup
from fedloom.algorithm.capabilities import lane_size, needs_proxy
from fedloom.algorithm.contract import AnyAlgorithm
from fedloom.core import rng, usercode
from fedloom.core.errors import ConfigError, DataError, Fault
from fedloom.core.objective import criterion_of
from fedloom.core.own_function import find_function
from fedloom.core.task import Task
from fedloom.data.arrays import Arrays, Ints
from fedloom.data.federation import Federation, federate
from fedloom.data.partition import Natural, PartitionSummary, fingerprint, held_out_rows, summary, validation_rows
from fedloom.data.proxy import lacking, without
from fedloom.data.targets import looks_like_numbers, with_unit
from fedloom.engine.clock import check_clients
from fedloom.engine.lane_trial import why_apart
from fedloom.engine.local import Executor, capture_for, choose, lane_limit, reuse_memory
from fedloom.engine.plan import amounts
from fedloom.engine.ranks import joined, take_device
from fedloom.engine.rounds import begin
from fedloom.engine.state import Experiment
from fedloom.engine.topology.facts import faults as topology_faults
from fedloom.engine.uploads import example_upload
from fedloom.models.net import Net, NetSpec, refuse_misfit
from fedloom.runs.find import is_packaged
from fedloom.runs.guard import guard_of, noise_of
from fedloom.runs.settings import Config, config_hash
from fedloom.trust import corruption, noise, robust
from fedloom.trust.corruption import ClientRows, Corruption, corrupted
from fedloom.trust.mechanism import Guard
from fedloom.trust.noise import Key
from fedloom.trust.privacy_conflicts import privacy_refusals

_CHUNK = 512  # examples of one forward pass


class Shared(NamedTuple):
    """The data and its partition."""

    arrays: Arrays
    owner: Ints  # [n] the client of each row that is not a test row
    held_out: NDArray[np.bool_]  # [n] whether its client holds it out for its own test
    clients: int
    notes: tuple[str, ...]  # the repairs that the partition needed
    proxy: Arrays  # what the server took before the rest was split among clients
    bad: tuple[int, ...] = ()  # the bad clients, in order
    corruption: str = ""  # the kind of corruption
    validation: NDArray[np.bool_] | None = None  # [n] whether it is for validation, where any is
    elsewhere: bool = False  # whether the clients' rows are on their machines, and only the counts are known here
    called: tuple[str, ...] = ()  # the names of clients that are elsewhere

    @property
    def labels(self) -> Ints:
        return self.arrays.y[~self.arrays.test]

    @property
    def names(self) -> tuple[str, ...]:
        """What the clients are called: by their contract, as the data calls them, or by their numbers."""
        return self.called or self.names_in_data or tuple(str(k) for k in range(self.clients))

    @property
    def names_in_data(self) -> tuple[str, ...]:
        """What the data calls the clients, where each is one of the data's clients; else none."""
        if self.arrays.client is None:
            return ()
        pairs = np.unique(np.stack([self.owner, self.arrays.client[~self.arrays.test]]), axis=1)
        if pairs.shape[1] != self.clients or len(np.unique(pairs[0])) != self.clients:
            return ()
        return tuple(self.arrays.clients[k] if self.arrays.clients else str(k) for k in pairs[1].tolist())

    @property
    def trains(self) -> NDArray[np.bool_]:
        """Whether a row is one to train on.  ``[n]``"""
        return ~self.held_out if self.validation is None else ~self.held_out & ~self.validation

    def rescaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The scale and the shift of inputs, for each channel."""
        unit = 255.0 if self.arrays.x.dtype == np.uint8 else 1.0
        std, mean = np.array(self.arrays.std), np.array(self.arrays.mean)
        return tuple((1.0 / (unit * std)).tolist()), tuple((mean / std).tolist())

    def summary(self) -> PartitionSummary:
        return summary(self.labels, self.owner, self.clients, self.arrays.classes)

    def counts(self) -> Ints:
        """How many rows of each class each client has, without zeros: client, class, rows.  ``[k, 3]``

        The class is -1 where only the client knows it.
        """
        if self.elsewhere:
            clients, rows = np.unique(self.owner, return_counts=True)
            return np.stack([clients, np.full_like(clients, -1), rows], axis=1)
        classes = self.arrays.classes
        cells, rows = np.unique(self.owner * classes + self.labels, return_counts=True)
        return np.stack([cells // classes, cells % classes, rows], axis=1)

    def described(self) -> dict[str, Any]:
        """What a run folder records of its partition."""
        return {
            "sha256": fingerprint(self.owner, self.held_out + 2 * (~self.held_out & ~self.trains)),
            "data_sha256": data_fingerprint(self.arrays),
            "notes": list(self.notes),
            **({"bad_clients": list(self.bad), "corruption": self.corruption} if self.bad else {}),
            **({} if self.validation is None else {"validation_rows": int(self.validation.sum())}),
            **({"clients": self.clients, "rows": len(self.owner)} if self.elsewhere else self.summary()._asdict()),
            "labels": list(self.arrays.labels),
        }


def data_fingerprint(arrays: Arrays) -> str:
    """What identifies the rows of an experiment, and which of them are test rows."""
    return _digest((arrays.x, arrays.y, arrays.test, *([] if arrays.target is None else [arrays.target])))


class Prepared(NamedTuple):
    """An experiment that is ready to run."""

    experiment: Experiment
    shared: Shared
    config: Config
    reason: str  # why the executor is what it is
    root: Path | None = None  # the folder of data sets

    @property
    def net_sha256(self) -> str:
        """Which net the run starts with, frozen parts included."""
        task = self.experiment.task
        return _digest(x.cpu().numpy() for x in task.tensors(task.w0, task.buffers0).values())


def load_data(config: Config, root: Path) -> Arrays:
    """The data, with labels as the task reads them: numbers, or classes."""
    source = config.data.with_numbers() if config.task.is_regression else config.data
    return source.load(root, config.basics.seed)


def share(config: Config, root: Path, arrays: Arrays | None = None) -> Shared:
    """Load the data (unless it is given) and partition it."""
    seed, partition = config.basics.seed, config.partition
    arrays = _of_the_task(config, load_data(config, root) if arrays is None else arrays)
    own = config.proxy.rows(arrays, needs_proxy(config.algorithm), rng.stream(seed, "proxy"))
    proxy, arrays = without(arrays, ~own), without(arrays, own)
    train = ~arrays.test
    client = arrays.client[train] if arrays.client is not None else None
    chance = rng.stream(seed, "partition")
    found = partition.assign(arrays.y[train], arrays.classes, chance, client, lambda: arrays.x[train])
    held_out = held_out_rows(found.owner, found.clients, partition.holdout, seed)
    validates = config.evaluate.validation
    validation = validation_rows(found.owner, found.clients, validates, held_out, seed) if validates else None
    bad = config.corruption.bad(found.clients, seed)
    lacks = lacking(proxy, arrays) if needs_proxy(config.algorithm) else []
    if arrays.clients and not isinstance(partition, Natural):
        lacks.append("the data names its clients, but their rows are split; partition.kind=natural keeps them together")
    lacks += untaught(arrays)
    if not (config.evaluate.metrics or config.task.class_weights != "none"):
        lacks += one_class(arrays, private=config.privacy.on)
    if config.privacy.on:
        lacks += _taken_for_public(arrays)
    return Shared(
        arrays,
        found.owner,
        held_out,
        found.clients,
        (*found.notes, *lacks),
        proxy,
        bad,
        config.corruption.kind if bad else "",
        validation,
    )


def one_class(arrays: Arrays, *, private: bool = False) -> list[str]:
    """A warning if most rows of a table are of one class: accuracy then hides the others."""
    if arrays.recipe is None or arrays.target is not None or arrays.classes < 2:
        return []
    counts = np.bincount(arrays.y, minlength=arrays.classes)
    share = counts.max() / counts.sum()
    if share < 0.8:
        return []
    fix = "measure evaluate.metrics=balanced_accuracy,auc"
    fix += "" if private else ", and weigh classes with task.class_weights=balanced"  # which privacy refuses
    return [f"{share:.0%} of the rows are '{arrays.labels[int(counts.argmax())]}', so accuracy hides the rest: {fix}"]


def _taken_for_public(arrays: Arrays) -> list[str]:
    """A warning if clients' rows are prepared by statistics of all of them, which epsilon does not account for."""
    if arrays.recipe is None or arrays.recipe.statistics == "own":
        return []
    what = "medians, means and deviations of columns are of all clients' rows, without noise"
    return [f"privacy: {what}: epsilon assumes that they are public; with data.statistics=own each client has its own"]


def untaught(arrays: Arrays) -> list[str]:
    """A note if some class has test rows and no training rows: none of them can be predicted."""
    if arrays.target is not None:
        return []
    test, train = (np.bincount(arrays.y[rows], minlength=arrays.classes) for rows in (arrays.test, ~arrays.test))
    only = np.flatnonzero((test > 0) & (train == 0))
    if not len(only):
        return []
    names = ", ".join(f"'{arrays.labels[k]}'" for k in only[:5].tolist()) + (", ..." if len(only) > 5 else "")
    return [f"no model can learn {names}: its {test[only].sum():,} rows are all test rows"]


def _of_the_task(config: Config, arrays: Arrays) -> Arrays:
    """The data as the task needs it: numeric targets in their unit, or classes."""
    if config.task.is_regression:
        if arrays.target is None:
            what = f"'{arrays.name}' has classes; task=regression needs a numeric label"
            raise ConfigError([Fault("task.kind", what, "leave it at classification")])
        return with_unit(arrays)
    why = "" if "kind" in config.task.model_fields_set else looks_like_numbers(arrays)
    if why:
        fix = "to learn numbers: task=regression; if they are classes: task=classification"
        raise ConfigError([Fault("data", f"'{arrays.name}': {why}", fix)])
    return arrays


def prepare(config: Config, root: Path, arrays: Arrays | None = None, key: Key | None = None) -> Prepared:
    """Everything that the first round needs; ``key``: of secret noise, if it exists already."""
    device = run_device(config)
    shared = share(config, root, arrays)
    dealt = (shared.arrays, shared.owner, shared.clients, shared.held_out)
    federation = federate(*dealt, device=device, augment=config.data.augment, validation=shared.validation)
    federation = _corrupted(federation, config.corruption, shared.bad, config.basics.seed)
    _check_fit(config, shared, federation)
    clients = shared.clients
    cohort = clients if config.algorithm.family == "gossip" else config.cohort.size or min(10, clients)
    return assembled(config, shared, federation, device, cohort, key)._replace(root=root)


def assembled(
    config: Config, shared: Shared, federation: Federation, device: torch.device, cohort: int, key: Key | None = None
) -> Prepared:
    """The experiment on data that has been split; ``cohort``: how many clients train side by side at most."""
    check_functions(config)
    world = _world(config, shared, federation)
    placed = _placed(config, world, device, cohort)
    guard = guard_of(config, world.federation, key)
    algorithm = _bound(config, placed.task, world, guard)
    experiment = Experiment(
        algorithm=algorithm,
        task=placed.task,
        federation=world.federation,
        local=config.local,
        cohort=config.cohort,
        evaluate=config.evaluate,
        rounds=config.basics.rounds,
        seed=config.basics.seed,
        device=device,
        executor=placed.executor,
        lanes=config.engine.lanes or lane_limit(placed.task, device, lane_size(algorithm)),
        topology=config.topology,
        starts=_starts(config, shared, device),
        system=config.system,
        corruption=config.corruption,
        bad=shared.bad,
        aggregation=config.aggregation,
        guard=guard,
        # If nothing is sent, running statistics are not sent either.
        buffers=getattr(config.model, "buffers", "average") if config.algorithm.traits.communicates else "local",
    )
    _check_statistics(experiment)
    _check_uploads(config, experiment)
    notes = (*config.notes, *world.notes, *placed.notes)
    return Prepared(experiment, shared, config._replace(notes=notes), placed.reason)


class World(NamedTuple):
    """The clients' data on the device, the server's own examples, and the initial net."""

    task: Task
    federation: Federation
    held: Held | None
    notes: list[str]


class Placed(NamedTuple):
    """The net on its device and in its precision."""

    task: Task
    executor: Executor
    reason: str  # why this executor
    notes: list[str]


def run_device(config: Config) -> torch.device:
    """The device of the run; threads are set for it."""
    if torch.get_default_dtype() != torch.float32:
        what = f"is {torch.get_default_dtype()}, but fedloom computes in torch.float32"
        raise ConfigError([Fault("torch's default dtype", what, "call torch.set_default_dtype(torch.float32) first")])
    reuse_memory()
    device, threads = pick_device(config.engine.device), config.engine.threads
    if threads is None and device.type == "cuda":
        threads = 1  # the CPU only plans, in steps so short that waking threads takes longer
    if threads is not None:
        torch.set_num_threads(threads)
    return device


def _world(config: Config, shared: Shared, federation: Federation) -> World:
    """Data and net; if the body is frozen, only the head, and features instead of examples."""
    arrays = shared.arrays
    loss = criterion_of(config.task, shared.labels, arrays.outputs, arrays.unit[1])
    task = initial_task(config.model, arrays, config.basics.seed).learning(loss)
    notes: list[str] = []
    if not is_packaged("model", config.model):  # fedloom's own nets fit all data that they are built for
        alone = task.to(federation.x.device, lanes=False, precision=config.engine.precision)
        refuse_misfit(alone, arrays.shape, arrays.outputs, descends=config.algorithm.family != "closed_form")
        if task.mixes_rows_in_evaluation:
            what = "in evaluation, too, what the net computes for a row depends on the other rows"
            notes.append(f"{what}: does a layer lack batch_first=True?")
    held = _held(shared.proxy, federation)
    if not has_fixed_features(task, federation):
        return World(task, federation, held, notes)
    wide = task.linear_head.in_features
    notes.append(f"the body is frozen: its {wide:,} features are computed once for all {len(federation.x):,} rows")
    return World(*on_features(task, federation, held), notes)


def _placed(config: Config, world: World, device: torch.device, cohort: int) -> Placed:
    """Choose the executor, and whether its steps are captured or compiled."""
    engine = config.engine
    executor, reason, notes = _executor(config, world.task, device, cohort)
    steps = amounts(config.local, world.federation.train.sizes).steps.double().mean()
    ticks = config.basics.rounds * float(steps)
    capture = capture_for(engine.compile, device, executor == "lanes", ticks, config.alike)
    task = world.task.to(device, lanes=executor == "lanes", precision=engine.precision, capture=capture)
    if engine.compile == "on" and capture != "compiled":
        lacks = "clients train one by one" if executor == "loop" else "there is no C++ compiler (g++, clang++ or $CXX)"
        notes.append(f"engine.compile = 'on' does nothing here: {lacks}")
    return Placed(task, executor, reason, notes)


def _bound(config: Config, task: Task, world: World, guard: Guard | None) -> AnyAlgorithm:
    """The algorithm, bound to what it may know of the run."""
    hidden = None if guard is None or guard.sums is None else noise_of(guard, guard.sums)
    optimizer, sizes = config.local.make_optimizer(), world.federation.train.sizes
    local, basics = config.local, config.basics
    return config.algorithm.bind(
        Setup(task, optimizer, sizes, world.held, hidden, local.lr, basics.seed, basics.rounds, local)
    )


def _starts(config: Config, shared: Shared, device: torch.device) -> Tensor | None:
    """The initial models of the nodes of a network, if they differ; frozen parts are common to all and not
    included.  ``[N, P]``"""
    if config.topology is None or config.topology.start == "common":
        return None
    seed, nodes = config.basics.seed, range(shared.clients)
    return torch.stack([initial_task(config.model, shared.arrays, seed, node).w0 for node in nodes]).to(device)


def _held(proxy: Arrays, federation: Federation) -> Held | None:
    """The server's own examples, prepared like those of clients: normalised, on the device."""
    if not len(proxy.y):
        return None
    device, truth = federation.x.device, proxy.y if proxy.target is None else proxy.target
    x, y = torch.from_numpy(proxy.x).to(device), torch.from_numpy(truth).to(device)
    return Held(*federation._replace(x=x, y=y).examples(torch.arange(len(y), device=x.device)))


def has_fixed_features(task: Task, fed: Federation) -> bool:
    """Whether the body computes the same features of an example each time."""
    if not task.is_headed or fed.augment != "none":
        return False
    return task.net_class.forward is Net.forward


def on_features(task: Task, fed: Federation, held: Held | None) -> tuple[Task, Federation, Held | None]:
    """The task of the head alone, and the features of all examples instead of these."""
    body, rows = task.to(fed.x.device, lanes=False), torch.arange(len(fed.x), device=fed.x.device)

    def features(x: Tensor) -> Tensor:
        return body.features(body.w0, x, body.buffers0)

    with torch.no_grad():
        seen = torch.cat([features(fed.examples(some)[0]) for some in torch.split(rows, _CHUNK)])
        if held is not None:
            held = held._replace(x=torch.cat([features(x) for x in torch.split(held.x, _CHUNK)]))
    one = torch.ones(1, device=seen.device)
    return task.on_features(), fed._replace(x=seen, scale=one, shift=0 * one), held


def initial_task(model: NetSpec, arrays: Arrays, seed: int, *node: int) -> Task:
    """The net with the initial parameters of this seed, or of a node; the caller's random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(rng.stream(seed, "init", *node).integers(1 << 62)))
        return model.task(arrays.shape, arrays.outputs)


def pick_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError([Fault("engine.device", f"torch sees no GPU here (got '{name}')", "use cpu or auto")])
    return torch.device(name)


def _executor(config: Config, task: Task, device: torch.device, cohort: int) -> tuple[Executor, str, list[str]]:
    """The executor, the reason in words, and notes for the user."""
    wanted = config.engine.executor
    executor, reason = choose(task, device, cohort) if wanted == "auto" else (wanted, "as configured")
    if executor == "loop":
        return executor, reason, []
    if task.has_statistics or task.criterion.mixes_rows:
        where = "the statistics of BatchNorm" if task.has_batch_norm else "what is computed from a whole batch"
        fix = "use loop" + (', or a net with norm = "group"' if task.has_batch_norm else "")
        raise ConfigError([Fault("engine.executor", f"lanes pads batches, which would enter {where}", fix)])
    what = _own_words(config)
    why = why_apart(task, device) if what else ""
    if not why:
        return executor, reason, []
    if wanted == "lanes":
        raise ConfigError([Fault("engine.executor", f"side by side {what} {why}", "use loop")])
    return "loop", f"{what} does not work side by side", [f"clients train one by one: side by side {what} {why}"]


def _own_words(config: Config) -> str:
    """What local training computes of the user's own, in words; empty if nothing."""
    own_net, own_loss = not is_packaged("model", config.model), config.task.is_own
    return "the net" * own_net + " with " * (own_net and own_loss) + "the loss" * own_loss


def _check_fit(config: Config, shared: Shared, federation: Federation) -> None:
    """What can only be checked once the data is loaded."""
    check_clients(config.system, shared.clients)
    faults = []
    size = config.cohort.size
    if config.cohort.sampling in ("uniform", "poisson") and size is not None and size > shared.clients:
        faults.append(
            Fault("cohort.size", f"{size}, but the data has {shared.clients} clients", f"at most {shared.clients}")
        )
    senders = shared.clients if config.cohort.sampling == "all" else min(size or 10, shared.clients)
    faults += robust.rule_refusals(config.aggregation, senders)
    if config.algorithm.family == "gossip" and shared.clients < 2:
        what = "a network needs at least two nodes (got 1)"
        faults.append(Fault("partition.clients", what, "set it to 2 or more, or choose a method with a server"))
    elif config.topology is not None:
        sizes = np.bincount(shared.owner[shared.trains], minlength=shared.clients)
        faults += topology_faults(config.topology, shared.clients, config.basics.seed, sizes)
    if not len(federation.common) and config.algorithm.traits.common_model:
        fix = "set partition.holdout=0.2, or data.test=0.2"
        faults.append(Fault("data", f"'{shared.arrays.name}' has no test rows, and no client holds any out", fix))
    if config.evaluate.validation and not len(federation.validation.rows):
        what = f"no client has enough rows for validation (got {config.evaluate.validation:g})"
        faults.append(Fault("evaluate.validation", what, "use fewer clients, or a smaller partition.holdout"))
    if faults:
        raise ConfigError(faults)


def check_functions(config: Config) -> None:
    """The user's own functions can be found and have the arguments that are set, before anything is trained."""
    for section in (config.aggregation, config.cohort, config.task):
        if section.is_own:
            section.own_function()
    for name in filter(usercode.is_reference, config.evaluate.metrics):
        find_function(name, "evaluate.metrics")


def refuse_wrong_functions(configs: Iterable[Config]) -> None:
    """The same of several experiments, whose runs may not ask for consent any more; every fault is reported once."""
    differing = {repr((c.task, c.aggregation, c.cohort, c.evaluate.metrics)): c for c in configs}
    faults: dict[Fault, None] = {}
    for config in differing.values():
        try:
            check_functions(config)
        except ConfigError as error:
            faults |= dict.fromkeys(error.faults)
    if faults:
        raise ConfigError(faults)


def refuse_wrong_data(configs: Iterable[Config], root: Path) -> None:
    """Read and split the data of several experiments: what all of their runs would refuse is refused once.

    Each data set is read once, and each way to split it is tried with the first seed.
    """
    by_data: dict[str, dict[str, Config]] = {}
    for c in configs:
        split = repr((c.partition, c.proxy, needs_proxy(c.algorithm), c.corruption, c.evaluate.validation))
        by_data.setdefault(repr((c.data, c.task)), {}).setdefault(split, c)
    faults: dict[Fault, None] = {}
    for differing in by_data.values():
        arrays = load_data(next(iter(differing.values())), root)
        for config in differing.values():
            try:
                share(config, root, arrays)
            except ConfigError as error:
                faults |= dict.fromkeys(error.faults)
    if faults:
        raise ConfigError(faults)


def _check_statistics(exp: Experiment) -> None:
    """A mean of running statistics needs uploads that arrive together."""
    if exp.is_asynchronous and exp.task.has_running_statistics and not exp.keeps_buffers:
        name = type(exp.algorithm).__name__
        what = f"the server of {name} does not wait for clients, so it cannot average running statistics"
        raise ConfigError([Fault("model.buffers", what, "set model.buffers=local, or use a net with norm = 'group'")])


def _check_uploads(config: Config, experiment: Experiment) -> None:
    """What can only be checked once the net is built: the parts of an upload."""
    poisons = bool(experiment.bad) and bool(config.corruption.changes)
    if not poisons and experiment.guard is None:
        return
    upload, fed = example_upload(experiment, begin(experiment)), experiment.federation
    faults = corruption.corruption_refusals(config.corruption, upload) if poisons else []
    travelling = 0 if experiment.keeps_buffers else experiment.task.buffers0.numel()
    faults += privacy_refusals(config.privacy, upload, travelling, fed.clients, len(fed.train.rows))
    if faults:
        raise ConfigError(faults)


def _corrupted(fed: Federation, how: Corruption, bad: tuple[int, ...], seed: int) -> Federation:
    """The federation with the corrupted training rows of bad clients; the input arrays are not changed."""
    if not bad or not how.spoils:
        return fed
    x = fed.x.float() if how.kind == "feature_noise" else fed.x
    x, y = (x.clone(), fed.y) if how.spoils == "x" else (x, fed.y.clone())
    for client in bad:
        rows = fed.train.rows[fed.train.start[client] : fed.train.start[client + 1]].to(fed.x.device)
        theirs = corrupted(how, ClientRows(fed.x[rows], fed.y[rows]), fed.scale, fed.classes, seed, client)
        if how.spoils == "x":
            x[rows] = theirs.x
        else:
            y[rows] = theirs.y
    return fed._replace(x=x, y=y)


def _digest(arrays: Iterable[NDArray[Any]]) -> str:
    sha = hashlib.sha256()
    for part in arrays:
        sha.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def prepare_on_ranks(config: Config, root: Path, arrays: Arrays | None, key: Key | None = None) -> Prepared:
    """The experiment, ready to run, on this rank of any number; ``key``: of its noise, if it has one."""
    ranks = joined()
    if ranks.size == 1:
        return prepare(config, root, arrays, key)
    key = noise.from_text(ranks.broadcast(noise.as_text(key or noise.fresh_key())))
    with ranks.agreed():
        take_device(pick_device(config.engine.device))
        prepared = prepare(config, root, arrays, key)
        exp = replace(prepared.experiment, ranks=ranks)
        if config.engine.store == "disk" and exp.keeps_state(begin(exp)):
            what = f"'disk' is for one process: each of {ranks.size} ranks keeps the states of its own clients"
            raise ConfigError([Fault("engine.store", what, "set engine.store=ram, or run without ranks")])
        shared = prepared.shared.described()
        here = [config_hash(config), shared["data_sha256"], shared["sha256"], prepared.net_sha256]
    there = ranks.broadcast(here)
    with ranks.agreed():
        for mine, first, what in zip(here, there, ("experiment", "data", "partition", "net"), strict=True):
            if mine != first:
                raise DataError(f"the {what} is not that of rank 0 ({mine[:12]}, there {first[:12]})")
    return prepared._replace(experiment=exp)
