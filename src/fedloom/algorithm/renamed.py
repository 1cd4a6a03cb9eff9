"""Names of an earlier contract, and their current names: a user's algorithm must not be ignored silently."""

from __future__ import annotations

import inspect
from typing import Any

from fedloom.algorithm.capabilities import CAPABILITIES


def _trait(name: str, value: str = "...") -> str:
    return f"return super().traits._replace({name}={value}) from the property traits"


def _function(name: str, base: str) -> str:
    return f"it is {name} now, of fedloom.algorithm.{base}"


MEMBERS: dict[str, str] = {
    "linear": _trait("each_upload", "True") + " instead of linear = False",
    "hears_each": _trait("each_upload"),
    "waits": _trait("synchronous"),
    "common": _trait("has_global_model"),
    "bears_noise": _trait("tolerates_noise"),
    "weighs_examples": _trait("weighs_examples"),
    **{
        name: _trait(name)
        for name in (
            "communicates",
            "served",
            "partial_work",
            "plain_sgd",
            "distinct",
            "mirrored",
            "unit_uploads",
            "proximal",
            "sends_to_all",
            "gradients_per_step",
        )
    },
    "doubts": _function("warnings(lr, rounds)", "Configures"),
    "told": _function("diagnostics(before, inbox, after)", "Diagnoses"),
    "counted": _function("contributions(before, inbox, after)", "Contributes"),
    "judged": "it is global_model(server) now",
    "unheard": _function("after_empty_round(server)", "CountsRounds"),
    "fitting": _function("adaptation()", "Adapts"),
    "needs_proxy": "inherit from fedloom.algorithm.UsesProxy instead",
    "needs_counts": _function("the property sends_counts", "PrivateSums"),
    "own_rows": "it is setup.proxy now",
    "told_of_noise": "bind(setup) takes the noise as setup.noise now",
    "paced": "bind(setup) takes the learning rate as setup.first_lr now",
    "seeded": "bind(setup) takes the seed as setup.seed now",
    "sizes": "it is setup.sizes now",
    "first_lr": "it is setup.first_lr now",
    "seed": "it is setup.seed now",
}
_FREE = frozenset({"sizes", "first_lr", "seed"})  # names that a setting, or a user's function, may have
CONSTANTS = frozenset(MEMBERS) - _FREE | {"columnwise"}  # that a class may have set without an annotation
_GIVEN = {"start": ("down", "mine", "work"), "bind": ("setup",)}  # functions that take other arguments than before


def check(cls: type[Any]) -> None:
    """Refuse a class that was written for an earlier contract, with what to change."""
    defined = {**inspect.get_annotations(cls), **cls.__dict__}
    for name, now in MEMBERS.items():
        if name in defined and name not in _FREE:
            raise TypeError(f"{cls.__name__} defines '{name}', which is no longer part of an algorithm: {now}")
    for capability in CAPABILITIES:
        names = [name for name in vars(capability) if not name.startswith("_") and name in defined]
        if names and not issubclass(cls, capability):
            base = capability.__name__
            fix = f"let it inherit from {base} as well: from fedloom.algorithm import {base}"
            raise TypeError(f"{cls.__name__} defines '{names[0]}', which only algorithms that are {base} have: {fix}")
    for name, arguments in _GIVEN.items():
        if inspect.isfunction(defined.get(name)) and not _takes(defined[name], 1 + len(arguments)):
            raise TypeError(
                f"{cls.__name__}.{name} is called as {name}({', '.join(arguments)}) now: add what is missing"
            )


def _takes(function: Any, count: int) -> bool:
    """Whether it can be called with this many positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    return True
