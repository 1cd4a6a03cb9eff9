"""Which metrics the cells of a comparison can record."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedloom.compare.foreseen import metric_names, reports_itself
from fedloom.compare.plan import plan
from fedloom.core.errors import ConfigError
from fedloom.core.vocabulary import is_ours, meaning
from fedloom.runs import catalogue
from fedloom.runs.overrides import without_idle
from fedloom.runs.settings import parse
from fedloom.runs.start import start
from support.comparisons import table
from support.terminal import fedloom, files

EVERYTHING = {
    "train": True,
    "validation": 0.2,
    "metrics": ["balanced_accuracy"],
    "participants": True,
    "auc": ["micro_logits", "macro_present"],
    "diagnostics": ["updates", "gamma", "dissimilarity"],
}
COSTLY = ["rho"]  # diagnostics that take a second; what they record does not depend on the method, so one shows it


@pytest.mark.parametrize("kind", sorted(entry.name for entry in catalogue.entries("algorithms")))
def test_every_metric_of_a_run_was_foreseen(kind: str) -> None:
    """With everything evaluated; tests/golden looks at the metrics of a plain run."""
    given = {"rounds": 2, "partition": {"clients": 4}, "model": "mlp", "local": {"batch": 128}, "algorithm": kind}
    given = without_idle(given)[0]
    evaluate: dict[str, Any] = dict(EVERYTHING)
    evaluate["diagnostics"] = EVERYTHING["diagnostics"] + (COSTLY if kind == "fedprox" else [])
    if not parse(given).algorithm.traits.has_global_model or kind == "local_only":  # there is no global model
        evaluate = {key: value for key, value in evaluate.items() if key != "diagnostics"}
    if not parse(given).algorithm.traits.synchronous:  # who waits for nobody has no round of clients to look at
        evaluate = {key: value for key, value in evaluate.items() if key not in ("diagnostics", "participants")}
    config = parse(without_idle(given | {"evaluate": evaluate})[0])
    history = start(config, out=None, root=Path("unused"))
    recorded = {name for line in history.records for name in line} - {"round", "excluded"}
    foreseen = metric_names(config)
    own = {name for name in recorded - foreseen if reports_itself(config) and not is_ours(name)}
    assert recorded - own <= foreseen
    assert all(meaning(name) for name in foreseen if is_ours(name))


@pytest.mark.parametrize(
    ("metric", "more", "says"),
    [
        ("global/test/acuracy", {}, "no method records 'global/test/acuracy' (did you mean 'global/test/accuracy'?)"),
        ("global/test/f1", {}, "did you mean 'global/test/f1_macro'?"),
        ("acuracy", {}, "(did you mean 'global/test/accuracy' or 'personal/pre_fit/test/accuracy'?)"),
        ("accuracy", {}, "(did you mean 'global/test/accuracy' or 'personal/pre_fit/test/accuracy'?)"),
        ("consensus/test/accuracy", {}, "no method records"),
        ("personal/post_fit/test/accuracy", {}, "did you mean 'personal/pre_fit/test/accuracy'"),
        ("personal/*/test/acuracy", {}, "no method records"),
        ("global/train/loss", {}, "it needs evaluate.train=true"),
        ("personal/pre_fit/test/loss", {"evaluate": {"personal": False}}, "it needs evaluate.personal=true"),
        ("personal/pre_fit/test/loss", {"partition": {"kind": "iid", "holdout": 0.0}}, "no method records"),
        ("participants/post_fit/test/accuracy_std", {}, "it needs evaluate.participants=true"),
        ("global/test/auc_micro_softmax", {}, 'it needs evaluate.auc=["micro_softmax"]'),
        ("gamma/max", {}, 'it needs evaluate.diagnostics=["gamma"]'),
        ("fedalr/eta_mean", {"evaluate": {"diagnostics": ["updates"]}}, "no method records"),
    ],
)
def test_a_metric_that_no_method_can_record_is_refused_before_any_runs(
    metric: str, more: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        plan(table(metric=metric) | more)


@pytest.mark.parametrize(
    ("metric", "algorithms", "more"),
    [
        ("global/test/loss", ["fedavg", "local_only"], {}),
        ("consensus/distance", ["fedavg", "dpsgd"], {}),
        ("nodes/test/accuracy", ["dpsgd"], {}),
        ("personal/pre_fit/test/accuracy_worst10", ["fedavg"], {}),
        ("personal/*/test/accuracy", ["fedavg", "local_only"], {}),
        ("personal/pre_fit/test/accuracy", ["fedavg"], {"partition": {"kind": "natural", "holdout": 0.0}}),
        ("bytes/up", ["fedavg"], {}),
        ("theory/rho", ["fedprox"], {"evaluate": {"diagnostics": ["rho"]}}),
        ("fedalr/eta_mean", ["fedalr"], {"evaluate": {"diagnostics": ["updates"]}}),  # only a run can tell
    ],
)
def test_a_metric_that_some_method_may_record_is_taken(
    metric: str, algorithms: list[str], more: dict[str, Any]
) -> None:
    assert plan(table(metric=metric, algorithms=algorithms) | more).spec.metric == metric


def test_a_mistyped_metric_costs_nothing(tmp_path: Path) -> None:
    done = fedloom("compare", "fedavg", "--metric", "global/test/acuracy", "--out", "c", cwd=tmp_path)
    assert done.code == 2
    assert "compare.metric: no method records 'global/test/acuracy' (did you mean 'global/test/accuracy'?)" in done.err
    assert files(tmp_path) == set()
