"""The names of metrics: what each means, which way is better, how it is shown, and which ones represent a run.

A name is a place and a quantity: ``global/test/accuracy`` is the ``accuracy`` of ``global/test``. Algorithms may also
record their own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Measure(NamedTuple):
    """What a number is, by the last part of its name without what it is over clients."""

    name: str  # one that ends with _ is only the beginning
    meaning: str
    lower: bool = False  # whether a smaller value is the better one


MEASURES = (
    Measure("accuracy", "share of rows that are classified correctly"),
    Measure("loss", "mean loss (task.loss)", lower=True),
    Measure("auc_micro_logits", "area under the ROC curve of all classes together, scores as they are"),
    Measure("auc_micro_softmax", "the same, scores after a softmax"),
    Measure("auc_macro_present", "mean of the areas under the ROC curves of the classes that a client has"),
    Measure("auc", "area under the ROC curve, of several classes the mean of each against all others"),
    Measure("balanced_accuracy", "mean over classes of the share of their rows that are recognised"),
    Measure("f1_macro", "mean over classes of the F1 score"),
    Measure("brier", "mean squared distance of the probabilities from the truth", lower=True),
    Measure("ece", "expected calibration error, in 15 bins", lower=True),
    Measure("mae", "mean absolute error, in the unit of the target", lower=True),
    Measure("rmse", "root of the mean squared error, in the unit of the target", lower=True),
    Measure("r2", "share of the target's variance that is explained"),
    Measure("diverged", "clients whose loss is not finite", lower=True),
    Measure("up", "bytes sent to the server, or by nodes to each other, so far", lower=True),
    Measure("down", "bytes sent by the server so far", lower=True),
    Measure("busiest", "bytes through the server or through the busiest node so far", lower=True),
    Measure("gradients", "gradients of a batch computed so far", lower=True),
    Measure("simulated", "simulated seconds so far", lower=True),
    Measure("R0", "how much the training loss rises within the radius of `evaluate.flatness`", lower=True),
    Measure("R1", "how much its gradient grows within this radius", lower=True),
    Measure("distance", "distance of the nodes' models from their average", lower=True),
    Measure("relative", "the same, divided by the length of the average", lower=True),
    Measure("psi", "factor by which gossip brings nodes together at worst", lower=True),
    Measure("contraction", "factor by which gossip brought nodes together in the round", lower=True),
    Measure("epsilon", "epsilon of differential privacy spent so far", lower=True),
    Measure("epsilon_simulated", "the same, if the noise were secret: it is drawn from the seed", lower=True),
    Measure("weight_", "weight that the server gave to bad clients", lower=True),
    Measure("offline", "nodes that were offline in the round"),
    Measure("away", "rounds for which the longest of them has been offline"),
    Measure("dead", "nodes that have died"),
    Measure("mean", "mean over the uploads of a round"),
    Measure("max", "largest over the uploads of a round"),
)

# Diagnostics for which less is better; their last parts alone do not show it.
_LESS = frozenset(
    {"hessian/top", "hessian/weights_top", "gradients/gvar_total", "gradients/gvar_coord", "gradients/gvar_rel"}
)

# How the name of a user's own error begins: with one of these words, and not of a longer one such as "lossless".
_ERRORS = re.compile(r"(loss|mae|rmse|brier|ece)(?![a-zA-Z])")

PLACES: Mapping[str, str] = {
    "global/test": "the server's model on the common test set",
    "global/train": "the server's model on all training rows",
    "global/flatness": "the training loss around the server's model",
    "personal/pre_fit/test": "each client's model on its own held-out rows, before local training",
    "personal/post_fit/test": "each client's model on its own held-out rows, after local training",
    "participants/pre_fit/test": "the clients of a round just before they train, each on its own held-out rows",
    "participants/post_fit/test": "the clients of a round just after they trained, each on its own held-out rows",
    "consensus/test": "the average model of a network on the common test set",
    "consensus/flatness": "the training loss around the average model of a network",
    "consensus": "how far the models of a network are apart after mixing",
    "consensus/pre_mix": "the same, before mixing",
    "consensus/post_mix": "the same, after mixing",
    "nodes/test": "the nodes of a network, each on the common test set",
    "nodes/pre_mix/test": "the same, before mixing",
    "global/validation": "the server's model on the validation rows of all clients",
    "personal/pre_fit/validation": "each client's model on its own validation rows, before local training",
    "personal/post_fit/validation": "each client's model on its own validation rows, after local training",
    "consensus/validation": "the average model of a network on the validation rows of all clients",
    "nodes/validation": "the nodes of a network, each on the validation rows of all clients",
    "network": "nodes of a network that took no part",
    "bytes": "communication",
    "work": "computation",
    "time": "the simulated clock",
    "privacy": "differential privacy",
    "bad_clients": "clients with corrupted data or uploads",
    "staleness": "server steps between what a client received and what it sent",
}

SPREAD = {"_mean": "plain mean over clients", "_std": "standard deviation over clients",
          "_worst10": "mean of the worst tenth of the clients"}  # fmt: skip
_EXTRA = frozenset({"balanced_accuracy", "f1_macro", "auc", "brier", "ece", "mae", "rmse", "r2"})
_ROOTS = frozenset(place.partition("/")[0] for place in PLACES)


def leaf(name: str) -> str:
    """The quantity of a name, without its place."""
    return name.rpartition("/")[2]


def is_test(name: str) -> bool:
    """Whether the name is of a model on test rows."""
    return "/test/" in name


def as_validation(name: str) -> str:
    """The name of the same on the rows for validation."""
    return name.replace("/test/", "/validation/")


def is_ours(name: str) -> bool:
    """Whether the name is of an evaluation, and never of what an algorithm reports about itself."""
    return name.partition("/")[0] in _ROOTS


def lower_is_better(name: str) -> bool:
    """Whether a smaller value of this metric is the better one."""
    end = leaf(name)
    measure = _measure(end)
    lower = measure.lower if measure is not None else _ERRORS.match(end) is not None
    return name in _LESS or end.endswith("_std") or lower


def is_share(name: str) -> bool:
    """Whether a metric is a share of one, and shown in percent."""
    return "accuracy" in leaf(name)


def meaning(name: str) -> str:
    """What a metric measures, in words; empty for names that only an algorithm knows."""
    place, _, end = name.rpartition("/")
    spread = next((words for ending, words in SPREAD.items() if end.endswith(ending)), "")
    measure = _measure(end)
    if place not in PLACES or measure is None:
        return ""
    return f"{PLACES[place]}: {measure.meaning}" + (f", {spread}" if spread else "")


def _measure(end: str) -> Measure | None:
    """The measure that the last part of a name is, if we know it."""
    if (begun := next((m for m in MEASURES if m.name.endswith("_") and end.startswith(m.name)), None)) is not None:
        return begun
    over = next((ending for ending in (*SPREAD, "_min", "_max") if end.endswith(ending)), "")
    return next((m for m in MEASURES if m.name == end.removesuffix(over)), None)


def is_cost(name: str) -> bool:
    """Whether this counts what a run has spent so far: bytes, gradients or simulated seconds."""
    return name.startswith(("bytes/", "work/", "time/"))


def is_privacy(name: str) -> bool:
    """Whether this is what differential privacy has spent so far."""
    return name.startswith("privacy/")


def bytes_exchanged(line: Mapping[str, Any]) -> float:
    """The bytes that an evaluation has counted so far, in both directions."""
    return float(line.get("bytes/up", 0) + line.get("bytes/down", 0))


def first_measure(regression: bool) -> str:
    """What is measured of every model first: accuracy, or in regression the error."""
    return "mae" if regression else "accuracy"


# -- which ones represent a run --------------------------------------------------------------------
def accuracies(names: Iterable[str]) -> list[str]:
    """The accuracies among these names, in order, or in regression the shares of variance explained; the first one
    represents the run."""
    known = [name for name in names if "/" in name]
    found = [name for name in known if leaf(name) == "accuracy"]
    return found or [name for name in known if leaf(name) == "r2"]


def headline(names: Iterable[str]) -> list[str]:
    """The names that represent a run in one line: loss and accuracy of its first place, and the privacy spent."""
    known = list(names)
    places = [name.rpartition("/")[0] for name in known if name.endswith(("/loss", "/accuracy"))]
    spent = [name for name in known if is_privacy(name)]
    first = [f"{places[0]}/{end}" for end in ("loss", "accuracy", "mae", "r2")] if places else []
    wanted = [*first, *spent]
    return [name for name in wanted if name in known]


def is_summarised(name: str) -> bool:
    """Whether the table at the end of a run shows this metric."""
    return name.endswith(("/accuracy", "/loss", "/accuracy_worst10", "/mae_worst10", "/distance")) or is_extra(name)


def is_diagnostic(name: str) -> bool:
    """Whether this describes a round, by the engine's diagnostics or by the method itself: no value is best."""
    return "/" in name and not is_ours(name)


def is_extra(name: str) -> bool:
    """Whether this is a measure over all clients that was requested in addition to accuracy and loss."""
    place, _, end = name.rpartition("/")
    if end.endswith(tuple(SPREAD)):
        return False
    own = place.endswith(("/test", "/validation")) and place in PLACES and end not in ("accuracy", "loss", "diverged")
    return own or (bool(place) and (end in _EXTRA or end.startswith("auc_")))


def is_evaluation(line: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is an evaluation: all of them count the bytes sent, other lines never do."""
    return "bytes/up" in line


# -- by pattern ------------------------------------------------------------------------------------
def matching(wanted: str, names: Iterable[str]) -> Iterator[str]:
    """The names that match a pattern; a * matches one part of a name."""
    pattern = re.compile(re.escape(wanted).replace(r"\*", "[^/]+"))
    return (name for name in names if pattern.fullmatch(name))


def last_ten(counts: Iterable[int]) -> tuple[str, int]:
    """What to call ``mean_last_10`` of runs with so many evaluations, and the number that belongs into it."""
    found = {min(10, count) for count in counts if count} or {10}
    if len(found) > 1:
        return "mean of at most 10", 10
    (count,) = found
    return {1: "mean of one", 10: "mean of last 10"}.get(count, "mean of all {}"), count
