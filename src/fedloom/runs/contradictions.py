"""Settings that are valid alone but contradict each other: a list of small rules.

A rule is a function of sections, by their names. It is asked only where all of them could be read, except for those
with a default, and returns what is wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, get_args

from fedloom.algorithm import AnyAlgorithm
from fedloom.algorithm.capabilities import Adapts, HasPhases, TrainsWhileWaiting, defaults_of, gossip_facts, takes_steps
from fedloom.core import usercode
from fedloom.core.errors import Fault
from fedloom.core.objective import Objective, loss_faults
from fedloom.core.optim import Local
from fedloom.core.quality import NumberMeasure
from fedloom.core.schema import Spec
from fedloom.data.partition import Natural, Partition
from fedloom.engine.clock import System, never_trains
from fedloom.engine.plan import Cohort
from fedloom.engine.settings import Evaluate
from fedloom.engine.topology.network import Redrawn, Topology
from fedloom.trust.corruption import Corruption, corruption_conflicts
from fedloom.trust.privacy import Privacy
from fedloom.trust.privacy_conflicts import privacy_conflicts
from fedloom.trust.robust import Aggregation, rule_conflicts

Table = Mapping[str, Any]


def contradictions(table: Table, chosen: Mapping[str, Any]) -> list[Fault]:
    """What is wrong between the sections of an experiment; None is a section that could not be read."""
    known = {"table": table} | {section: spec for section, spec in chosen.items() if spec is not None}
    return [fault for rule in RULES for fault in _asked(rule, known)]


@cache
def _parameters(rule: Callable[..., Iterable[Fault]]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(rule).parameters


def _asked(rule: Callable[..., Iterable[Fault]], known: Mapping[str, Any]) -> Iterable[Fault]:
    parameters = _parameters(rule)
    if any(name not in known and parameter.default is parameter.empty for name, parameter in parameters.items()):
        return ()
    return rule(**{name: known[name] for name in parameters if name in known})


def _called(algorithm: AnyAlgorithm) -> str:
    return type(algorithm).__name__


# -- local training and the cohort -----------------------------------------------------------------
def plain_sgd(algorithm: AnyAlgorithm, local: Local) -> Iterator[Fault]:
    if not algorithm.traits.plain_sgd:
        return
    what = f"{_called(algorithm)} is defined for plain SGD steps"
    if local.optimizer != "sgd":
        yield Fault("local.optimizer", f"{what} (got '{local.optimizer}')", "leave optimizer at sgd")
    for key in ("momentum", "weight_decay", "clip"):
        if getattr(local, key):
            yield Fault(f"local.{key}", f"{what} (got {getattr(local, key)})", f"leave {key} at 0")


def momentum_of_one_step(algorithm: AnyAlgorithm, local: Local) -> Iterator[Fault]:
    """Methods with parts of a round that ``local.steps`` does not count may take more steps than one.

    A method's own default is not checked: the user did not set it.
    """
    counted = not isinstance(algorithm, HasPhases | Adapts | TrainsWhileWaiting)
    asked = local.momentum != defaults_of(algorithm).get("local", {}).get("momentum", 0.0)
    if counted and asked and local.steps == 1 and not local.nesterov and local.state == "reset":
        what = f"has no effect on the one step of a round, since momentum starts at zero (got {local.momentum:g})"
        yield Fault("local.momentum", what, "set local.state=persist, or take more steps")


def one_state_for_each_client(algorithm: AnyAlgorithm, cohort: Cohort) -> Iterator[Fault]:
    if algorithm.traits.distinct and cohort.sampling == "proportional":
        what = f"{_called(algorithm)} keeps a state for each client, which a second draw in a round would break"
        yield Fault("cohort.sampling", what, "use uniform or all")


def data_counts_once(algorithm: AnyAlgorithm, cohort: Cohort) -> Iterator[Fault]:
    traits = algorithm.traits
    if cohort.sampling == "proportional" and traits.weighs_examples and not traits.distinct:
        why = f"counts a client's data twice: once in the draw, once in the mean of {_called(algorithm)}"
        fix = "set algorithm.weighting=uniform" if traits.has_weighting else "use uniform or all"
        yield Fault("cohort.sampling", f"'proportional' {why}", fix)


def cohort_fits(table: Table, cohort: Cohort, partition: Partition | None = None) -> Iterator[Fault]:
    if cohort.size is None or cohort.sampling not in ("uniform", "poisson"):
        return
    clients = partition.clients if partition is not None else _written_clients(table)
    if clients is not None and cohort.size > clients:
        fix = f"at most {clients}, or sampling = 'proportional', which draws with replacement"
        yield Fault("cohort.size", f"{cohort.size} of partition.clients = {clients}", fix)


def _written_clients(table: Table) -> int | None:
    """The number of clients as written, or the default; None if it is not a number."""
    given, default = table.get("partition"), 20
    value = given.get("clients", default) if isinstance(given, Mapping) else default
    return value if isinstance(value, int) else None


# -- with and without a server ---------------------------------------------------------------------
def no_cohort_in_a_network(table: Table, algorithm: AnyAlgorithm, cohort: Cohort) -> Iterator[Fault]:
    if algorithm.family == "gossip" and cohort.model_fields_set:
        why = "a network without a server trains every node in every round"
        yield Fault("cohort", f"{why} (got {table['cohort']!r})", "leave the section out")


def no_deadline_in_a_network(algorithm: AnyAlgorithm, system: System) -> Iterator[Fault]:
    for key in ("stragglers", "dropout", "deadline", "aggregation") if algorithm.family == "gossip" else ():
        if getattr(system, key):
            what = f"needs a server: nodes of a network have no deadline to miss (got {getattr(system, key)})"
            yield Fault(f"system.{key}", what, "leave it out")


def no_topology_with_a_server(table: Table, algorithm: AnyAlgorithm) -> Iterator[Fault]:
    if algorithm.family != "gossip" and "topology" in table:
        yield Fault("topology", "is only for algorithms without a server", "leave the section out")


def some_client_trains(
    algorithm: AnyAlgorithm, cohort: Cohort, system: System, partition: Partition | None = None
) -> Iterator[Fault]:
    if algorithm.family == "gossip":
        return
    everybody = cohort.sampling in ("all", "poisson")
    most = getattr(partition, "clients", None) if everybody else cohort.size or 10
    if never_trains(system, most, partial=algorithm.traits.partial_work):
        what = f"stragglers are left out, and all clients are stragglers (got {system.stragglers})"
        yield Fault("system.stragglers", what, f"lower it{', or set system.policy=partial' * takes_steps(algorithm)}")


# What is allowed if the server does not wait for the clients of a round, and why nothing else is.
_ASYNCHRONOUS: dict[str, tuple[tuple[Any, ...], str]] = {
    "system.stragglers": ((0.0,), "no client is late"),
    "system.dropout": ((0.0,), "a client that is lost would never be drawn again"),
    "system.deadline": ((None,), "no client is late"),
    "cohort.sampling": (("uniform", "all"), "clients are drawn one by one, as they are needed"),
    "aggregation.rule": (("mean",), "it mostly receives one upload at a time"),
    "privacy.clip": ((None,), "epsilon is counted in rounds in which a client takes part at most once"),
    "evaluate.diagnostics": (((),), "they assume that the clients of a round start from the same model"),
    "evaluate.participants": ((False,), "a client may take part several times in a round, or never"),
}


def nothing_of_rounds_without_them(
    algorithm: AnyAlgorithm,
    system: System | None = None,
    cohort: Cohort | None = None,
    aggregation: Aggregation | None = None,
    privacy: Privacy | None = None,
    evaluate: Evaluate | None = None,
) -> Iterator[Fault]:
    sections: dict[str, Spec | None] = {"system": system, "cohort": cohort, "aggregation": aggregation}
    sections |= {"privacy": privacy, "evaluate": evaluate}
    for key, (allowed, why) in _ASYNCHRONOUS.items() if not algorithm.traits.synchronous else ():
        section, _, leaf = key.partition(".")
        value = getattr(sections[section], leaf, allowed[0])
        if value not in allowed:
            what = f"the server of {_called(algorithm)} does not wait for clients: {why} (got {value!r})"
            yield Fault(key, what, f"set it to {' or '.join(map(str, allowed))}" if allowed[0] else "leave it out")


# -- evaluation ------------------------------------------------------------------------------------
def nothing_of_a_global_model_without_one(algorithm: AnyAlgorithm, evaluate: Evaluate) -> Iterator[Fault]:
    if algorithm.traits.common_model:
        return
    none = f"there is no common model with {_called(algorithm)}"
    if evaluate.diagnostics:
        what = f"{none}, which diagnostics measure (got {list(evaluate.diagnostics)})"
        yield Fault("evaluate.diagnostics", what, "leave them out")
    if evaluate.flatness:
        what = f"{none} whose loss could be flat (got {evaluate.flatness:g})"
        yield Fault("evaluate.flatness", what, "leave it out")


def some_model_is_evaluated(algorithm: AnyAlgorithm, partition: Partition) -> Iterator[Fault]:
    if not algorithm.traits.common_model and partition.holdout == 0 and not isinstance(partition, Natural):
        why = "there is no common model to evaluate, and no client has held-out rows"
        yield Fault("partition.holdout", why, "set partition.holdout=0.2")


def loss_fits(task: Objective) -> Iterable[Fault]:
    return loss_faults(task)


def numbers_can_be_learned(
    task: Objective, algorithm: AnyAlgorithm, evaluate: Evaluate, corruption: Corruption, privacy: Privacy
) -> Iterator[Fault]:
    known = [name for name in evaluate.metrics if not usercode.is_reference(name)]
    wrong = [name for name in known if (name in get_args(NumberMeasure)) != task.is_regression]
    if wrong:
        yield Fault("evaluate.metrics", f"'{wrong[0]}' is not a measure of {task.kind}", "leave it out")
    if not task.is_regression:
        return
    if algorithm.traits.classes_only:
        yield Fault("task.kind", f"{_called(algorithm)} {algorithm.traits.classes_only}", "choose another algorithm")
    if evaluate.auc:
        yield Fault("evaluate.auc", "is a measure of classes, but the target is a number", "leave it out")
    if {"rho", "hessian", "hessian_weights"} & {*evaluate.diagnostics}:
        yield Fault(
            "evaluate.diagnostics", f"are defined for cross-entropy (got {list(evaluate.diagnostics)})", "leave it out"
        )
    if corruption != Corruption() and corruption.spoils == "y":
        yield Fault(
            "corruption.kind", f"'{corruption.kind}' changes classes, but the target is a number", "take another"
        )
    if privacy.asks_for_labels:
        what = f"'{privacy.heterogeneity}' counts the classes of clients, but the target is a number"
        yield Fault("privacy.heterogeneity", what, "leave it out")
    if privacy.feature_clip is not None:
        yield Fault("privacy.feature_clip", "bounds sums over classes, but the target is a number", "leave it out")


# -- trust -----------------------------------------------------------------------------------------
def corruption_fits(algorithm: AnyAlgorithm, corruption: Corruption) -> Iterable[Fault]:
    return corruption_conflicts(corruption, algorithm)


def aggregation_fits(algorithm: AnyAlgorithm, cohort: Cohort, aggregation: Aggregation) -> Iterable[Fault]:
    return rule_conflicts(aggregation, algorithm, cohort.sampling)


def privacy_fits(
    algorithm: AnyAlgorithm, cohort: Cohort, privacy: Privacy, aggregation: Aggregation, system: System
) -> Iterable[Fault]:
    return privacy_conflicts(privacy, algorithm, cohort.sampling, system, aggregation.rule)


def no_class_counts_beside_noise(task: Objective, privacy: Privacy) -> Iterator[Fault]:
    if privacy.on and task.class_weights != "none":
        what = f"counts the classes of all clients, which no noise hides (got '{task.class_weights}')"
        yield Fault("task.class_weights", what, "leave it out, or weight classes in your own loss")


# -- networks --------------------------------------------------------------------------------------
def messages_fit_the_network(algorithm: AnyAlgorithm, topology: Topology) -> Iterator[Fault]:
    name, facts = _called(algorithm), gossip_facts(algorithm)
    if facts.sends_once and topology.gossip_steps > 1:
        what = f"what {name} sends here cannot be passed on in the same round (got {topology.gossip_steps})"
        yield Fault("topology.gossip_steps", what, "leave it at 1")
    if facts.sends_once and topology.mixing == "push_sum":
        what = f"push_sum rescales models, but {name} does not send a model here"
        yield Fault("topology.mixing", what, "leave it at average")
    if facts.remembers_neighbours and (topology.redrawn or topology.fails):
        how = "has links that fail" if topology.fails else "is not the same in every round"
        why = f"{name} keeps copies of what each neighbour has sent so far, but this network {how}"
        fix = "take a static graph without failures" + (", as with refresh=0" if isinstance(topology, Redrawn) else "")
        yield Fault("topology", why, fix)


RULES: tuple[Callable[..., Iterable[Fault]], ...] = (
    plain_sgd,
    momentum_of_one_step,
    one_state_for_each_client,
    cohort_fits,
    data_counts_once,
    no_cohort_in_a_network,
    no_deadline_in_a_network,
    some_client_trains,
    nothing_of_a_global_model_without_one,
    nothing_of_rounds_without_them,
    corruption_fits,
    aggregation_fits,
    privacy_fits,
    no_class_counts_beside_noise,
    messages_fit_the_network,
    no_topology_with_a_server,
    some_model_is_evaluated,
    loss_fits,
    numbers_can_be_learned,
)
