"""Which metrics a run can record, known before it runs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from fedloom.algorithm import AnyAlgorithm, Diagnoses
from fedloom.compare.table import Compare
from fedloom.core.errors import Fault, nearest
from fedloom.core.metrics import Auc, measure_name
from fedloom.core.quality import ClassMeasure
from fedloom.core.vocabulary import SPREAD, as_validation, first_measure, is_ours, is_test, leaf, matching
from fedloom.engine.diagnose import RECORDED
from fedloom.runs.settings import Config


def metric_names(config: Config) -> set[str]:
    """Every metric that a run may record, except those that an algorithm reports about itself."""
    alg, evaluate = config.algorithm, config.evaluate
    found = {"bytes": ["up", "down", "busiest"], "work": ["gradients"], "time": ["simulated"]}
    measured = _of_models(config) | _of_clients(config)
    found |= _of_trust(config) | measured | (_of_validation(measured, config) if evaluate.validation else {})
    found |= {} if alg.traits.synchronous else {"staleness": ["mean", "max"]}
    names = {f"{place}/{name}" for place, ends in found.items() for name in ends}
    return names.union(*(RECORDED[name] for name in evaluate.diagnostics if alg.family != "gossip"))


def _of_trust(config: Config) -> dict[str, list[str]]:
    """Metrics of privacy and of corrupted clients."""
    simulated = config.privacy.noise_from == "seed"
    found = {"privacy": ["epsilon_simulated" if simulated else "epsilon"]} if config.privacy.on else {}
    return found | ({"bad_clients": ["weight_mean", "weight_total", "weight_ratio"]} if config.corruption.any else {})


def _of_models(config: Config) -> dict[str, list[str]]:
    """Metrics of the server's model, or of a network's nodes and their average."""
    alg, evaluate = config.algorithm, config.evaluate
    plain = _plain(config)
    tested = plain + _areas(config)
    found: dict[str, list[str]] = {}
    if alg.family == "gossip":
        nodes = [*plain, f"{plain[0]}_{'max' if config.task.is_regression else 'min'}", f"{plain[0]}_std"]
        found |= {"consensus/test": tested, "nodes/test": nodes, "network": ["offline", "away", "dead"]}
        found |= {"consensus": ["distance", "relative", "psi", "contraction"]}
        found |= {"consensus/pre_mix": ["distance"], "consensus/post_mix": ["distance"]}
        found |= {"nodes/pre_mix/test": nodes} if evaluate.pre_mix else {}
    elif has_common_model(alg):
        found |= {"global/test": tested} | ({"global/train": plain} if evaluate.train else {})
    if evaluate.flatness is not None:
        found |= {f"{'consensus' if alg.family == 'gossip' else 'global'}/flatness": ["R0", "R1"]}
    return found


def _of_validation(measured: Mapping[str, list[str]], config: Config) -> dict[str, list[str]]:
    """Metrics on the rows for validation: those of the test, and those of clients also where these have no test."""
    config = config._replace(partition=config.partition.model_copy(update={"holdout": 0.5}))
    tested = {**measured, **_of_clients(config)}
    places = [place for place in tested if not place.startswith("participants/") and "pre_mix" not in place]
    return {as_validation(f"{place}/").rstrip("/"): tested[place] for place in places if is_test(f"{place}/")}


def has_common_model(algorithm: AnyAlgorithm) -> bool:
    """Whether there is a model of the server to evaluate."""
    return algorithm.family != "gossip" and algorithm.traits.common_model


def _of_clients(config: Config) -> dict[str, list[str]]:
    """Metrics of models on clients' own rows."""
    evaluate = config.evaluate
    if not _may_have_own_rows(config):
        return {}
    measured = [*_plain(config), *_areas(config)]
    spread = [f"{name}{end}" for name in measured for end in ("", *SPREAD)] + ["diverged"]
    found = {f"personal/{config.algorithm.traits.served}/test": spread} if evaluate.personal else {}
    if evaluate.participants:
        found |= {"participants/pre_fit/test": spread, "participants/post_fit/test": spread}
    return found


def _plain(config: Config) -> list[str]:
    return [first_measure(config.task.is_regression), "loss"]


def _areas(config: Config) -> list[str]:
    """What is measured in addition to accuracy (or error) and loss."""
    always = ("rmse", "r2") if config.task.is_regression else ()
    return [*map(measure_name, (*config.evaluate.auc, *always, *config.evaluate.metrics))]


def _may_have_own_rows(config: Config) -> bool:
    """Whether clients may have their own test rows: held out, or marked by data that names clients."""
    kind = config.kinds["partition"]
    return config.partition.holdout > 0 or kind == "natural" or ":" in kind


def unrecorded(spec: Compare, configs: Sequence[Config]) -> list[Fault]:
    """The metrics that a comparison requests and no cell can record."""
    lacking = _without_validation(spec, configs)
    if lacking:
        return lacking
    wanted = [("compare.metric", spec.metric), ("compare.select", spec.select.metric if spec.select else "")]
    wanted += [("compare.layout.cell", part.metric) for part in (spec.layout.cell if spec.layout else ())]
    wanted += [(f"compare.claims.{number}.metric", claim.metric) for number, claim in enumerate(spec.claims)]
    # Seeds and most of a grid change nothing here: each kind of evaluation is checked once.
    alike = {repr((c.algorithm, c.task, c.evaluate, c.privacy, c.corruption, c.partition, c.kinds)): c for c in configs}
    distinct = list(alike.values())
    names = {name for config in distinct for name in metric_names(config)}
    return [fault for at, metric in wanted if metric for fault in _unrecorded(metric, distinct, names, at)]


def _without_validation(spec: Compare, configs: Sequence[Config]) -> list[Fault]:
    """A fault if settings are to be chosen on validation rows, but there are none."""
    if spec.select is None or all(config.evaluate.validation for config in configs):
        return []
    fix = "set evaluate.validation=0.2: a fifth of each client's training rows"
    return [Fault("compare.select", "choosing needs validation rows, but evaluate.validation is 0", fix)]


def _unrecorded(metric: str, configs: Sequence[Config], names: set[str], at: str) -> list[Fault]:
    if not configs or any(matching(metric, names)):
        return []
    if at == "compare.select" and any(matching(metric, (leaf(name) for name in names if "/validation/" in name))):
        return []
    if any(map(reports_itself, configs)) and not is_ours(metric):
        return []
    asked = (f"it needs evaluate.{key}={json.dumps(value)}" for key, value in _switches(metric, configs))
    place = metric.rpartition("/")[0]
    begun = (f"{place}/{name}" for name in get_args(ClassMeasure) if is_test(metric) and name.startswith(leaf(metric)))
    meant = [f"did you mean '{name}'?" for name in begun]
    return [Fault(at, f"no method records '{metric}'", next(asked, meant[0] if meant else _closest(metric, names)))]


def _closest(metric: str, names: set[str]) -> str:
    """The closest name; where none is close, those that end alike, such as ``accuracy`` without its place."""
    hint, ends = nearest(metric, names), {leaf(name) for name in names}
    alike = difflib.get_close_matches(leaf(metric), sorted(ends), 1, cutoff=0.65)
    if hint.startswith("did you mean") or not alike:
        return hint
    full = sorted((name for name in names if leaf(name) == alike[0]), key=lambda name: (not is_test(name), name))
    return f"did you mean {' or '.join(repr(name) for name in full[:3])}?"


def reports_itself(config: Config) -> bool:
    """Whether the algorithm also records its own values, under names that only a run shows."""
    return "updates" in config.evaluate.diagnostics and isinstance(config.algorithm, Diagnoses)


def _switches(metric: str, configs: Sequence[Config]) -> Iterator[tuple[str, Any]]:
    """Settings of ``evaluate`` with which the metric would be recorded."""
    switches: list[tuple[str, Any]] = [(key, True) for key in ("train", "personal", "participants")]
    switches += [("validation", 0.1)] + [("metrics", [name]) for name in get_args(ClassMeasure)]
    switches += [("auc", [variant]) for variant in get_args(Auc)] + [("diagnostics", [name]) for name in RECORDED]
    for key, value in switches:
        given = {key: tuple(value) if isinstance(value, list) else value}
        others = (c._replace(evaluate=c.evaluate.model_copy(update=given)) for c in configs)
        if any(any(matching(metric, metric_names(other))) for other in others):
            yield key, value
