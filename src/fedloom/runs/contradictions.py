"""Settings that are each valid and cannot hold together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedloom.algorithm.capabilities import gossip_facts
from fedloom.core.errors import Fault
from fedloom.engine.clock import never_trains
from fedloom.trust import corruption, robust
from fedloom.trust.privacy_conflicts import privacy_conflicts

TRUST = ("corruption", "aggregation", "privacy")  # sections that do nothing unless they are asked to


def contradictions(table: Mapping[str, Any], chosen: Mapping[str, Any]) -> list[Fault]:
    """Settings that are each valid and cannot hold together."""
    local, cohort, alg, partition = (chosen.get(k) for k in ("local", "cohort", "algorithm", "partition"))
    faults = _against_the_algorithm(alg, local, cohort)
    if cohort is not None and cohort.size is not None:
        clients = partition.clients if partition is not None else _written(table, "partition", "clients", 20)
        if cohort.sampling in ("uniform", "poisson") and clients is not None and cohort.size > clients:
            fix = f"at most {clients}, or sampling = 'proportional', which draws with replacement"
            faults.append(Fault("cohort.size", f"{cohort.size} of partition.clients = {clients}", fix))
    if alg is not None and cohort is not None:
        if cohort.sampling == "proportional" and alg.traits.weighs_examples and not alg.traits.distinct:
            why = f"counts a client's data twice: once in the draw, once in the mean of {type(alg).__name__}"
            fix = "set algorithm.weighting=uniform" if hasattr(alg, "weighting") else "use uniform or all"
            faults.append(Fault("cohort.sampling", f"'proportional' {why}", fix))
        if alg.family == "gossip" and cohort.model_fields_set:
            why = "a network without a server trains every node in every round"
            faults.append(Fault("cohort", f"{why} (got {table['cohort']!r})", "leave the section out"))
        system = chosen.get("system")
        if alg.family == "gossip" and system is not None:
            what = "is for algorithms with a server, which can be late for it"
            of_a_server = ("stragglers", "dropout", "deadline", "aggregation")
            given = [(key, getattr(system, key)) for key in of_a_server if getattr(system, key)]
            faults += [Fault(f"system.{key}", f"{what} (got {value})", "leave it out") for key, value in given]
        if alg.family != "gossip" and system is not None:
            everybody = cohort.sampling in ("all", "poisson")
            most = getattr(partition, "clients", None) if everybody else cohort.size or 10
            if never_trains(system, most, partial=alg.traits.partial_work):
                what = f"late clients are left out, and so many are late that nobody trains (got {system.stragglers})"
                faults.append(Fault("system.stragglers", what, "lower it, or set system.policy=partial"))
        evaluate = chosen.get("evaluate")
        shares = alg.traits.communicates and alg.traits.has_global_model
        if evaluate is not None and evaluate.diagnostics and not shares:
            what = f"there is no common model with {type(alg).__name__}, which diagnostics are about"
            faults.append(Fault("evaluate.diagnostics", f"{what} (got {list(evaluate.diagnostics)})", "leave them out"))
        if evaluate is not None and evaluate.flatness and not shares:
            what = f"there is no common model with {type(alg).__name__} whose loss could be flat"
            faults.append(Fault("evaluate.flatness", f"{what} (got {evaluate.flatness:g})", "leave it out"))
        faults += _against_arrivals(alg, chosen)
        faults += _against_trust(alg, cohort, chosen) + _against_the_network(alg, chosen.get("topology"))
        if alg.family != "gossip" and "topology" in table:
            faults.append(Fault("topology", "is only for algorithms without a server", "leave the section out"))
        if not shares and getattr(partition, "holdout", None) == 0 and _kind(partition) != "natural":
            why = "there is no common model to judge, and no client holds out rows of its own"
            faults.append(Fault("partition.holdout", why, "set partition.holdout=0.2"))
    return faults


_OF_ROUNDS: dict[str, tuple[tuple[Any, ...], str]] = {
    "system.stragglers": ((0.0,), "nobody is late for it"),
    "system.dropout": ((0.0,), "it would never hear again of a client that is lost"),
    "system.deadline": ((None,), "nobody is late for it"),
    "cohort.sampling": (("uniform", "all"), "clients are drawn one by one, as they are needed"),
    "aggregation.rule": (("mean",), "it mostly hears one client at a time"),
    "privacy.clip": ((None,), "epsilon is counted in rounds, in each of which a client comes once at most"),
    "evaluate.diagnostics": (((),), "they are of a round whose clients begin with one model"),
    "evaluate.participants": ((False,), "a client may come several times in a round, or never"),
}  # what is allowed, and why nothing else is, where the server waits for nobody


def _against_arrivals(alg: Any, chosen: Mapping[str, Any]) -> list[Fault]:
    """What has a meaning only where the server waits for the clients of a round."""
    faults = []
    for key, (allowed, why) in _OF_ROUNDS.items() if not alg.traits.synchronous else ():
        section, _, leaf = key.partition(".")
        value = getattr(chosen.get(section), leaf, allowed[0])
        if value not in allowed:
            what = f"the server of {type(alg).__name__} waits for nobody: {why} (got {value!r})"
            faults.append(
                Fault(key, what, f"set it to {' or '.join(map(str, allowed))}" if allowed[0] else "leave it out")
            )
    return faults


def _against_trust(alg: Any, cohort: Any, chosen: Mapping[str, Any]) -> list[Fault]:
    """What bad clients, robust rules and privacy cannot be combined with."""
    bad, rule, private = (chosen.get(section) for section in TRUST)
    faults = corruption.corruption_conflicts(bad, alg) if bad is not None else []
    faults += robust.rule_conflicts(rule, alg, cohort.sampling) if rule is not None else []
    if private is not None and rule is not None and chosen.get("system") is not None:
        faults += privacy_conflicts(private, alg, cohort.sampling, chosen["system"], rule.rule)
    return faults


def _against_the_network(alg: Any, topology: Any) -> list[Fault]:
    """Networks for which the algorithm's messages are not made."""
    if topology is None:
        return []
    faults, name = [], type(alg).__name__
    if gossip_facts(alg).sends_once and topology.gossip_steps > 1:
        what = f"what {name} sends here cannot be passed on in the same round (got {topology.gossip_steps})"
        faults.append(Fault("topology.gossip_steps", what, "leave it at 1"))
    if gossip_facts(alg).sends_once and topology.mixing == "push_sum":
        what = f"push_sum changes models on their way, and what {name} sends here is none"
        faults.append(Fault("topology.mixing", what, "leave it at average"))
    if gossip_facts(alg).remembers_neighbours and (topology.redrawn or topology.fails):
        how = "has links that fail" if topology.fails else "is not the same in every round"
        why = f"{name} keeps copies of what each neighbour has sent so far, but this network {how}"
        fix = "take a static graph without failures" + (", as with refresh=0" if hasattr(topology, "refresh") else "")
        faults.append(Fault("topology", why, fix))
    return faults


def _written(table: Mapping[str, Any], section: str, key: str, default: int) -> int | None:
    """A whole number as it was written, or the default; None where something else stands there."""
    given = table.get(section)
    value = given.get(key, default) if isinstance(given, Mapping) else default
    return value if isinstance(value, int) else None


def _against_the_algorithm(alg: Any, local: Any, cohort: Any) -> list[Fault]:
    """Settings that the algorithm's definition excludes."""
    faults = []
    if alg is not None and local is not None and alg.traits.plain_sgd:
        if local.optimizer != "sgd":
            what = f"{type(alg).__name__} is defined for plain SGD steps (got '{local.optimizer}')"
            faults.append(Fault("local.optimizer", what, "leave optimizer at sgd"))
        for key in ("momentum", "weight_decay", "clip"):
            if getattr(local, key):
                what = f"{type(alg).__name__} is defined for plain SGD steps (got {getattr(local, key)})"
                faults.append(Fault(f"local.{key}", what, f"leave {key} at 0"))
    if alg is not None and cohort is not None and alg.traits.distinct and cohort.sampling == "proportional":
        what = f"{type(alg).__name__} keeps a state for each client, which a second draw in a round would break"
        faults.append(Fault("cohort.sampling", what, "use uniform or all"))
    return faults


def _kind(spec: Any) -> str:
    return getattr(type(spec), "kind", "")
