"""Federated learning for unequal data."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "run": "fedloom.cli.python",
    "compare": "fedloom.cli.python",
    "resume": "fedloom.cli.python",
    "load": "fedloom.cli.python",
    "Predictor": "fedloom.runs.load",
    "History": "fedloom.runs.result",
    "Algorithm": "fedloom.algorithm",
    "Inbox": "fedloom.algorithm",
    "Model": "fedloom.algorithm",
    "Update": "fedloom.algorithm",
    "Work": "fedloom.algorithm",
    "Batch": "fedloom.core.task",
    "FedAvg": "fedloom.algorithms.fedavg",
}
__all__ = [*_PUBLIC, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: ``fedloom --help`` need not wait for torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fedloom' has no attribute '{name}'")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Comparisons(ModuleType):
    """The package fedloom.compare, which is also what is called: ``fedloom.compare("fedavg", "fedprox")``."""

    def __call__(self, *algorithms: str, **settings: Any) -> Any:
        from fedloom.cli.python import compare

        return compare(*algorithms, **settings)


class _Fedloom(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "compare" and isinstance(value, ModuleType):
            value.__class__ = _Comparisons
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Fedloom
