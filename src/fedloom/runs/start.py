"""Starting a run: ``fedloom.run``, and ``start`` for the command line and comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.algorithm import Algorithm, AnyAlgorithm
from fedloom.core import usercode
from fedloom.core.errors import ConfigError, Fault
from fedloom.data.arrays import Arrays
from fedloom.data.files import default_root
from fedloom.engine.ranks import joined
from fedloom.runs.callbacks import Calling, OnEvaluate, OnRound
from fedloom.runs.entry import write_first_files
from fedloom.runs.find import KEYS, name_of
from fedloom.runs.folder import RunFolder, create, held, storage, unused
from fedloom.runs.in_memory import GivenNet, as_arrays, is_handed_over, section_of
from fedloom.runs.loop import Listener, SilentListener, drive
from fedloom.runs.overrides import override
from fedloom.runs.prepare import prepare_on_ranks
from fedloom.runs.result import History
from fedloom.runs.settings import SECTIONS, Basics, Config, as_toml, full_name, parse, read_toml
from fedloom.runs.tracking import refuse_missing_trackers


def run(
    algorithm: str | Mapping[str, Any] | AnyAlgorithm | type[AnyAlgorithm] = "fedavg",
    *,
    data: Any = "digits",
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    listener: Listener | None = None,
    on_round: OnRound | None = None,
    on_evaluate: OnEvaluate | None = None,
    on_end: Callable[[History], object] | None = None,
    **settings: Any,
) -> History:
    """Run one experiment and return its history; ``fedloom.run`` is this with a display."""
    table: dict[str, Any] = dict(settings)
    table |= section_of(data, settings.get("partition")) if is_handed_over(data) else {"data": data}
    if "model" in table:
        table["model"] = handed_net(table["model"])
    table["algorithm"] = algorithm() if isinstance(algorithm, type) else algorithm
    usercode.vouch(table)
    if isinstance(table["algorithm"], Algorithm):
        usercode.adopt(name_of(type(table["algorithm"])))
    _refuse_bare_settings(settings, table["algorithm"])
    config, folder = parse(table), Path(out) if out is not None else None
    arrays = as_arrays(data, config.basics.seed, numbers=config.task.is_regression)
    history = start(
        config,
        out=folder,
        root=Path(data_root) if data_root is not None else default_root(),
        arrays=arrays,
        listener=Calling(listener or SilentListener(), on_round, on_evaluate),
    )
    if on_end is not None:
        on_end(history)
    return history


def _refuse_bare_settings(settings: Mapping[str, Any], algorithm: Any) -> None:
    """Refuse keywords that are settings of a section, with what to write in Python."""
    known = (*Basics.model_fields, *SECTIONS, *KEYS)
    meant = {key: full_name(key) for key in settings if key not in known}
    faults = [
        Fault(key, f"unknown key (got {settings[key]!r})", f"write {_in_python(name, settings[key], algorithm)}")
        for key, name in meant.items()
        if "." in name
    ]
    if faults:
        raise ConfigError(faults)


def _in_python(name: str, value: Any, algorithm: Any) -> str:
    """How to give ``fedloom.run`` a setting of a section."""
    section, _, key = name.partition(".")
    if section != "algorithm":
        return f"{section}={{'{key}': {value!r}}}"
    if isinstance(algorithm, Algorithm):
        return f"{type(algorithm).__name__}({key}={value!r})"
    kind = algorithm.get("kind", "fedavg") if isinstance(algorithm, Mapping) else algorithm
    return f"fedloom.run({{'kind': {kind!r}, '{key}': {value!r}}})"


def handed_net(model: Any) -> Any:
    """A net that was passed in Python: a class by the name under which it is found again, or the net itself."""
    if isinstance(model, nn.Module):
        return GivenNet.of(model)
    if isinstance(model, type) and issubclass(model, nn.Module):
        reference = f"{model.__module__}:{model.__qualname__}"
        usercode.adopt(reference)
        return reference
    return model


def load_config(path: Path | None, overrides: Iterable[str] = (), *, trust: bool = False) -> Config:
    """The experiment in a file (or the default one), with overrides; ``trust``: code that the file names may run."""
    given = read_toml(path) if path is not None else {}
    if "compare" in given:
        raise ConfigError([Fault(str(path), "is a comparison (it has a section [compare])", f"fedloom compare {path}")])
    if trust:
        usercode.vouch(given)
    table, notes = override(given, overrides)
    return parse(table, notes)


def start(
    config: Config,
    *,
    out: Path | None,
    root: Path,
    numbered: bool = False,
    arrays: Arrays | None = None,
    listener: Listener | None = None,
) -> History:
    """Run a new experiment from its first round; ``numbered``: if ``out`` is taken, in ``out-2`` and so on."""
    refuse_missing_trackers(config)
    prepared, ranks = prepare_on_ranks(config, root, arrays), joined()

    def new(path: Path) -> RunFolder:
        return create(unused(path) if numbered else path, as_toml(config))

    with held(out, new, ranks) as folder:
        with ranks.agreed(), storage(out):
            if folder is not None:
                write_first_files(folder, prepared)
                folder.seal()
        try:
            return drive(prepared, folder, None, listener or SilentListener())
        except ConfigError:  # such as one of the user's own function
            if folder is not None:
                folder.withdraw()
            raise
