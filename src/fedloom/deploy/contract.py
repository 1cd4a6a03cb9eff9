"""The contract of a deployment: the experiment, the form of its data, and the nodes that take part.

Server and nodes have the same two files, and the user's own code and weights that these name. With every message they
compare hashes of all of it, of the code of the method and the versions of packages that affect numbers, and stop if
something differs.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from fedloom.core import disk, usercode
from fedloom.core.errors import ConfigError, DataError, Fault
from fedloom.core.schema import dotted
from fedloom.data.arrays import Arrays
from fedloom.data.sources import File
from fedloom.deploy.own_files import OwnFiles, files_here, own_files, placed, put_files
from fedloom.engine.clock import System
from fedloom.engine.settings import Evaluate
from fedloom.runs.environment import versions
from fedloom.runs.settings import Config, as_hashed, as_table, hash_of, parse, toml_of
from fedloom.trust.corruption import Corruption

EXPERIMENT, FEDERATION = "experiment.toml", "federation.json"
Sides = tuple[str, str]  # what messages call our side and the other
_VERSIONS = ("fedloom", "torch", "numpy")
_NAMED = 3  # settings that differ, at most, in one message


class Form(NamedTuple):
    """The form of an example of the federation."""

    labels: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    mean: tuple[float, ...]  # per channel, subtracted on use
    std: tuple[float, ...]
    recipe: Any = None  # how a table became numbers: data.columns.Recipe as plain values
    unit: tuple[float, float] | None = None  # mean and deviation of a regression target; None: classification

    @classmethod
    def of(cls, arrays: Arrays) -> Form:
        recipe = None if arrays.recipe is None else arrays.recipe.agreed.model_dump(mode="json")
        scale = tuple(arrays.mean), tuple(arrays.std)
        labels, unit = (arrays.labels, None) if arrays.target is None else ((), arrays.unit)
        return cls(labels, arrays.shape, str(arrays.x.dtype), *scale, recipe, unit)


class Contract(NamedTuple):
    """What server and nodes have agreed on."""

    config: Config
    form: Form
    nodes: tuple[str, ...]  # their names, in the order of their numbers
    campaign: str  # a unique name of this federation
    own: OwnFiles = OwnFiles()  # the user's code and weights

    @property
    def parts(self) -> dict[str, str]:
        """What must be the same on both sides, by name."""
        now = versions()
        return {
            "experiment": hash_of(self.own.named(as_hashed(without_folder(self.config)))),
            "data": _sha256(self.form._asdict()),
            "nodes": _sha256([self.campaign, *self.nodes]),
            "algorithm": code_sha256(type(self.config.algorithm)),
            "files": _sha256(self.own.hashes()),
            **{name: now[name].partition("+")[0] for name in _VERSIONS},
        }

    @property
    def settings(self) -> dict[str, str]:
        """The settings of the experiment as JSON, by dotted name: they say what differs where its hash does."""
        table = dotted(self.own.named(as_hashed(without_folder(self.config))))
        return {name: json.dumps(value, sort_keys=True) for name, value in table.items()}


class AgreedTerms(NamedTuple):
    """What one side has agreed to, as it is sent to the other."""

    parts: dict[str, str]
    settings: dict[str, str]

    @classmethod
    def of(cls, contract: Contract) -> AgreedTerms:
        return cls(contract.parts, contract.settings)


def differences(ours: AgreedTerms, facts: Mapping[str, Any], sides: Sides = ("here", "there")) -> list[str]:
    """What differs on the other side, in words; ``facts``: what it has sent; ``sides``: what to call ours and it.

    What is also read on the other side must name both: "here" would be the wrong one there.
    """
    theirs, settings = _table(facts.get("parts")), _table(facts.get("settings"))
    return [
        f"{name} differs ({_details(name, ours, AgreedTerms(theirs, settings), sides)})"
        for name in ours.parts
        if theirs.get(name) != ours.parts[name]
    ]


def _details(name: str, ours: AgreedTerms, theirs: AgreedTerms, sides: Sides) -> str:
    """Which settings differ if the experiment does, and otherwise both hashes."""
    changed = _changed(ours.settings, theirs.settings) if name == "experiment" else []
    if not changed:
        return _both(sides, ours.parts[name], theirs.parts.get(name, "nothing"))
    pairs = [(key, *(side.settings.get(key, "not set") for side in (ours, theirs))) for key in changed[:_NAMED]]
    words = [f"{key[:60]}: {_both(sides, mine, other)}" for key, mine, other in pairs]
    more = [f"{len(changed) - _NAMED} more settings"] if len(changed) > _NAMED else []
    return f"{', '.join(words + more)}; all sides need the {EXPERIMENT} that `init` made"


def _both(sides: Sides, mine: str, other: str) -> str:
    """Two values, with the side of each."""
    return ", ".join(f"{side} {_short(str(value))}" for side, value in zip(sides, (mine, other), strict=True))


def _changed(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """The names of settings that differ; none where the other side has sent none."""
    return [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)] if theirs else []


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def code_sha256(cls: type) -> str:
    """The SHA-256 of the source files of a class and of those that it inherits from."""
    foreign = ("builtins", "typing", "abc", "pydantic")
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in foreign]
    files = {Path(file) for base in bases if (file := inspect.getsourcefile(base))}
    return _sha256([[file.name, disk.digest(file)] for file in sorted(files)])


def without_folder(config: Config) -> Config:
    """The experiment with the bare name of its data: where the coordinator keeps the file concerns nobody else."""
    if not isinstance(config.data, File):
        return config
    return config._replace(data=config.data.model_copy(update={"path": config.data.place.name}))


def write_contract(folder: Path, contract: Contract) -> None:
    """Write the two files, and the user's own, into a folder."""
    own = contract.own if contract.own.files else own_files(contract.config)
    table = {
        "campaign": contract.campaign,
        "nodes": list(contract.nodes),
        "data": contract.form._asdict(),
        "files": own.hashes(),
    }
    put_files(folder, own)
    disk.write_bytes(folder / EXPERIMENT, tomli_w.dumps(own.named(as_table(contract.config))).encode())
    disk.write_bytes(folder / FEDERATION, json.dumps(table, indent=1).encode() + b"\n")


def read_contract(folder: Path, *, trust: bool = False, made_by: str = "deploy") -> Contract:
    """The contract in a folder; ``trust``: the code in it may run; ``made_by``: the command whose `init` makes one."""
    with _damaged(folder, made_by):
        written, table = _files_of(folder)
        own = files_here(folder, dict(table.get("files", {})))
        settings = placed(written, own)
        if trust:
            usercode.vouch(settings)
        form = Form(**{name: _frozen(value) for name, value in table["data"].items()})
        return Contract(parse(settings), form, tuple(map(str, table["nodes"])), str(table["campaign"]), own)


class Outline(NamedTuple):
    """What is known of a contract without running any code."""

    nodes: tuple[str, ...]
    rounds: int


def read_outline(folder: Path, *, made_by: str = "deploy") -> Outline:
    with _damaged(folder, made_by):
        written, table = _files_of(folder)
        return Outline(tuple(map(str, table["nodes"])), int(written["rounds"]))


def _files_of(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return toml_of((folder / EXPERIMENT).read_text(encoding="utf-8")), json.loads((folder / FEDERATION).read_bytes())


@contextmanager
def _damaged(folder: Path, made_by: str) -> Iterator[None]:
    """Report what is wrong with the files of a contract."""
    try:
        yield
    except FileNotFoundError as error:
        where = "a deployment" if made_by == "deploy" else "a network"
        what = f"{error.filename}: is missing, so this is not a folder of {where}"
        if not folder.exists():
            what = f"{folder}: there is no such folder"
        raise DataError(f"{what} (make one with: fedloom {made_by} init)") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: its contract is damaged ({type(error).__name__}: {error})") from error


def undeployable(config: Config) -> list[Fault]:
    """Settings without a meaning between a server and real machines."""
    faults = []
    if config.algorithm.family == "gossip":
        faults.append(
            Fault(
                "algorithm.kind",
                "is a method without a server, which `fedloom deploy` does not start",
                "use fedloom peers",
            )
        )
    elif not config.algorithm.traits.synchronous:
        faults.append(
            Fault("algorithm.kind", "has an asynchronous server, of which only simulations exist", "use fedloom run")
        )
    if not config.algorithm.traits.communicates:
        faults.append(Fault("algorithm.kind", "sends nothing, so there is nothing to deploy", "use fedloom run"))
    return faults + only_simulated(config)


def only_simulated(config: Config) -> list[Fault]:
    """Settings without a meaning between real machines, with a server or without."""
    faults = []
    if config.task.class_weights != "none":
        what = "counts the classes of all nodes, which are not known"
        faults.append(Fault("task.class_weights", what, "leave it out, or weight classes in your own loss"))
    if config.system != System():
        faults.append(Fault("system", "describes simulated devices; real ones have a real clock", "leave it out"))
    if config.corruption != Corruption():
        faults.append(Fault("corruption", "simulates bad clients", "leave it out"))
    if config.privacy.noise_from == "seed" and (config.privacy.clip or config.privacy.feature_clip):
        faults.append(Fault("privacy.noise_from", "reproducible noise hides nothing (got 'seed')", "leave it out"))
    if config.privacy.asks_for_labels:
        faults.append(Fault("privacy", "needs each node's number of examples of each class", "leave that out"))
    default, asked = Evaluate(), config.evaluate
    if own := [name for name in asked.metrics if usercode.is_reference(name)]:
        what = f"'{own[0]}' is your own code, and a node cannot be asked for what it computes"
        faults.append(Fault("evaluate.metrics", what, "leave it out, or take one of fedloom's"))
    for name in ("validation", "diagnostics", "participants", "train", "flatness"):
        if getattr(asked, name) != getattr(default, name):
            faults.append(
                Fault(f"evaluate.{name}", "needs the rows, or the models, of all clients in one place", "leave it out")
            )
    return faults


def unsummable(config: Config) -> list[Fault]:
    """Why the server of an experiment needs more than the sum of uploads."""
    faults, traits = [], config.algorithm.traits
    only, leave = "but a secure sum shows only their sum", "leave out rules.secure_sum (--secure-sum)"
    if traits.each_upload:
        fix = f"{leave}, or choose a method whose uploads are summed"
        faults.append(Fault("algorithm.kind", f"its server needs every upload, {only}", fix))
    if config.aggregation.rule != "mean":
        what = f"this rule needs every upload, {only} (got '{config.aggregation.rule}')"
        faults.append(Fault("aggregation.rule", what, f"set aggregation.rule=mean, or {leave}"))
    if traits.size_varies:
        what = "the size of its uploads reveals something about a node's data, even with masks"
        faults.append(Fault("algorithm.kind", what, "choose a method whose uploads all have one size"))
    if config.cohort.sampling == "proportional":
        what = "may draw a node twice, but a secure sum counts each once"
        faults.append(Fault("cohort.sampling", f"{what} (got 'proportional')", "set cohort.sampling=uniform"))
    if config.cohort.size == 1 and config.cohort.sampling != "all":
        faults.append(Fault("cohort.size", "the sum of one node is its upload (got 1)", "set 2 or more"))
    return faults


def refuse_undeployable(config: Config, *, secure_sum: bool = False) -> None:
    faults = undeployable(config) + (unsummable(config) if secure_sum else [])
    if faults:
        raise ConfigError(faults)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _short(value: str) -> str:
    return value[:12] if len(value) == 64 else value[:60]


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
