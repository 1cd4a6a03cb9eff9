"""Laws for tests: several of them compare with the same run of an algorithm, which is computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import pytest

from fedloom.algorithm import AnyAlgorithm
from fedloom.engine import laws
from fedloom.engine.rounds import advance, begin
from fedloom.engine.state import Experiment

Law = Callable[[type[AnyAlgorithm]], None]

_ALL_BUT_SETTINGS: tuple[Law, ...] = laws.LAWS[:-1]
# Each setting alone, and beside two choices of the others: `fedloom check` tries more.
settings_have_an_effect: Law = partial(laws.settings_have_an_effect, most=2)
update_wrapper(settings_have_an_effect, laws.settings_have_an_effect)

BUT_SETTINGS = pytest.mark.parametrize("law", _ALL_BUT_SETTINGS, ids=lambda law: law.__name__)
EVERY = pytest.mark.parametrize("law", [*_ALL_BUT_SETTINGS, settings_have_an_effect], ids=lambda law: law.__name__)

_worlds: dict[Any, Experiment] = {}
_runs: dict[int, list[Any]] = {}  # by world: the state and the store so far, and all there was after each round


def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let laws take worlds and plain runs that another law has made, until the test ends."""
    world, after = laws._world, laws._after

    def shared_world(cls: type[AnyAlgorithm], **how: Any) -> Experiment:
        usual = {"executor": "lanes", "lanes": 6}
        how = {name: value for name, value in how.items() if usual.get(name) != value}
        key = (cls, repr(sorted(how.items())))
        if key not in _worlds:
            _worlds[key] = world(cls, **how)
        return _worlds[key]

    def shared_run(exp: Experiment, rounds: int, **more: Any) -> Any:
        if more or all(exp is not other for other in _worlds.values()):
            return after(exp, rounds, **more)
        state, store, seen = _runs.pop(id(exp), None) or (begin(exp), laws._store(exp), [])
        while len(seen) < rounds:
            state, _ = advance(exp, state, store)
            seen.append(laws._everything(exp, state, store))
        _runs[id(exp)] = [state, store, seen]
        return seen[rounds - 1]

    monkeypatch.setattr(laws, "_world", shared_world)
    monkeypatch.setattr(laws, "_after", shared_run)
