"""The errors a user can meet: each names the place, the value and the fix, and carries the exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NamedTuple


class Fault(NamedTuple):
    """One fault: ``where: what (got ...) (fix)``."""

    where: str
    what: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}" + (f" ({self.fix})" if self.fix else "")


class FedloomError(Exception):
    """The base of every error that fedloom raises on purpose."""

    exit_code = 2


class ConfigError(FedloomError):
    """An experiment that cannot be run as written; lists every fault at once."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = list(faults)
        if len(self.faults) == 1:
            super().__init__(str(self.faults[0]))
        else:
            count = f"the configuration has {len(self.faults)} faults\n"
            super().__init__(count + "\n".join(f"  {fault}" for fault in self.faults))


class OwnCodeError(ConfigError):
    """The user's own code does something with which no run is possible."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        super().__init__(faults)
        self.args = ("your code cannot be used\n" + "\n".join(f"  {fault}" for fault in self.faults),)


class NothingToRunError(FedloomError):
    """Everything that was asked for has a result already."""

    exit_code = 0


class DataError(FedloomError):
    """Data that is missing, damaged or not as described."""


class CheckpointError(FedloomError):
    """A run folder or checkpoint that cannot be used."""


class DivergedError(FedloomError):
    """Training produced numbers that are not finite."""

    exit_code = 3


class SplitError(DivergedError):
    """A network became disconnected because nodes died, and was set to stop then."""


class StorageError(FedloomError):
    """The disk refused a write; what was saved before stays readable."""

    exit_code = 4


class LostRankError(FedloomError):
    """Another process of the run is gone; what was saved before stays readable."""

    exit_code = 5


def outside(where: str, word: str, numbers: Iterable[int], count: int) -> list[Fault]:
    """A fault if one of these numbers is not that of a client, or node (``word``), among ``count``."""
    strangers = [number for number in numbers if number >= count]
    fix = f"{word}s are numbered 0 to {count - 1}"
    return [Fault(where, f"there is no {word} {min(strangers)} among {count}", fix)] if strangers else []


# The names of fedloom's settings and values in other tools.
SYNONYMS = {
    "batch_size": "batch",
    "gpu": "cuda",
    "label_column": "label",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "method": "algorithm",
    "net": "model",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "strategy": "algorithm",
    "target": "label",
    "target_column": "label",
}


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the closest valid word, or all of them when none is close."""
    names = sorted(known)
    meant = SYNONYMS.get(word, word)
    same = [name for name in names if name.lower() == word.lower()]
    begun = [name for name in names if len(word) > 2 and name.startswith(word.lower())]
    close = [meant] if meant in names else same or begun or difflib.get_close_matches(word, names, 1, cutoff=0.65)
    if close:
        return f"did you mean {' or '.join(repr(name) for name in close[:4])}?"
    return f"known: {', '.join(names)}" if names else "none is known"
