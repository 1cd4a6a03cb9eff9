"""The catalogue: every algorithm, data set, model and so on by name, and a page for each, generated from its class."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fedloom.algorithm import AnyAlgorithm, Carry, Held, Phase, Setup, Work
from fedloom.algorithm.capabilities import has_survey, memory_of, phases_of, sent_bytes, survey_of, upload_bytes
from fedloom.core import tree
from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.core.fields import default_words, type_words
from fedloom.core.optim import Local, optimizers, takes
from fedloom.core.schema import explained, kinds
from fedloom.core.task import Batch, Task
from fedloom.data.partition import Partition
from fedloom.data.sources import Source
from fedloom.engine.topology.network import Topology
from fedloom.models.net import Net, NetSpec
from fedloom.runs.find import algorithms, find_algorithm, user_algorithms
from fedloom.runs.settings import SECTIONS, full_name


class Entry(NamedTuple):
    """One line of a list."""

    name: str
    summary: str
    origin: str  # "fedloom", or its file


class Setting(NamedTuple):
    """A setting, as it is shown."""

    name: str
    kind: str  # with its bounds
    default: str
    meaning: str


class Page(NamedTuple):
    """The page of one entry."""

    name: str
    family: str
    text: str
    settings: list[Setting]
    costs: list[str]

    def as_json(self) -> dict[str, Any]:
        return self._asdict() | {"settings": [s._asdict() for s in self.settings]}


_FAMILIES: dict[str, tuple[type[Any], str]] = {
    "datasets": (Source, "fedloom.data.sources"),
    "partitions": (Partition, "fedloom.data.partition"),
    "models": (NetSpec, "fedloom.models"),
    "topologies": (Topology, "fedloom.engine.topology"),
}


_SINGULAR = {"datasets": "data set", "partitions": "partition", "models": "model", "topologies": "topology"}


def entries(family: str) -> list[Entry]:
    """All entries of one family; the user's own algorithm files are read, not run."""
    if family == "optimizers":
        return [Entry(name, _first(inspect.getdoc(make) or ""), "fedloom") for name, make in optimizers().items()]
    if family != "algorithms":
        found = kinds(*_FAMILIES[family])
        return [Entry(name, _first(inspect.getdoc(cls) or ""), "fedloom") for name, cls in sorted(found.items())]
    packaged = algorithms(own=False)
    listed = [Entry(name, _first(_module_doc(cls)), "fedloom") for name, cls in packaged.items()]
    for path in user_algorithms():
        try:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        except (SyntaxError, UnicodeDecodeError) as error:
            text = f"cannot be read: {error}"
        listed.append(Entry(path.stem, _first(text), str(path)))
    return listed


def describe(name: str) -> Page:
    """The page of the entry with this name, in any family."""
    for family, (base, package) in _FAMILIES.items():
        found = kinds(base, package)
        if name in found:
            cls = found[name]
            return Page(name, _SINGULAR[family], (inspect.getdoc(cls) or "").replace("``", "`"), settings_of(cls), [])
    if name in optimizers():
        make = optimizers()[name]
        own = [s for s in settings_of(Local) if s.name in takes(make)]
        return Page(name, "optimizer", (inspect.getdoc(make) or "").replace("``", "`"), own, [])
    if name in SECTIONS:
        section = SECTIONS[name]
        return Page(name, "section", inspect.getdoc(section) or "", settings_of(section), [])
    try:
        algorithm = find_algorithm(name, "describe")
    except ConfigError as error:
        known = [e.name for family in ("algorithms", "optimizers", *_FAMILIES) for e in entries(family)]
        if name in known or ":" in name or name.endswith(".py"):  # it exists, but cannot be used
            raise
        raise ConfigError([_unknown(name, known)]) from error
    return Page(name, "algorithm", _module_doc(algorithm), settings_of(algorithm), costs(algorithm))


def _unknown(name: str, known: list[str]) -> Fault:
    """What is wrong with a name that nothing has; a setting is on the page of its section."""
    section, dot, _ = (full_name(name) or name).partition(".")
    if dot and section in SECTIONS:
        return Fault(name, "is a setting", f"see fedloom describe {section}")
    near = nearest(name, known)
    return Fault(name, "nothing of this name", near if near.startswith("did") else "fedloom list shows what there is")


def settings_of(cls: type[BaseModel]) -> list[Setting]:
    """The fields of a spec with their bounds, defaults and meaning."""
    return [
        Setting(name, type_words(field), default_words(field), explained(field))
        for name, field in cls.model_fields.items()
    ]


@functools.cache  # it traces every step
def costs(cls: type[AnyAlgorithm]) -> list[str]:
    """What a round of this algorithm keeps and sends, in units of one model, measured on a small one."""
    task = Task(Net(nn.Linear(30, 5), 5, 4), lanes=True)
    proxy = Held(torch.ones(8, 30), torch.arange(8) % 4)
    alg = cls().bind(Setup(task, Local().make_optimizer(), torch.full((10,), 10), proxy, first_lr=Local().lr))
    server = alg.init(task.w0)
    down = alg.send(server)
    mine = alg.join(down)
    one = torch.ones(())
    batch = Batch(torch.ones(2, 30), torch.zeros(2).long(), torch.ones(2), one.long(), 0 * one, one, torch.zeros(0))
    survey = survey_of(alg, batch, down, mine)
    work = Work(one, one, one, one, survey, one.long(), one)
    with torch.no_grad():
        upload, kept = alg.finish(alg.start(down, mine, work), down, mine, work)

    def times(count: float) -> str:
        return f"{count:.3g} x model" if count else "nothing"

    def models(value: Any) -> str:
        return times(sum(x.numel() for x in tree.leaves(value)) / task.size)

    def traced(phase: Phase) -> str:
        """Why the steps of a phase cannot run side by side, as far as a CPU can tell; mostly empty."""
        x = alg.start(down, mine, work)

        def lane(x: Any, *b: Tensor) -> list[Tensor]:
            return tree.leaves(phase.step(Carry(x, memory_of(alg, x)), Batch(*b), down, mine))

        try:
            make_fx(torch.func.vmap(lane))(*tree.tmap(lambda leaf: leaf[None], (x, *batch)))
        except Exception as error:  # whatever a user's own step does
            return str(error).split("\n")[0].partition(". ")[0]
        return ""

    phases = phases_of(alg)
    refused = [why for phase in phases if (why := traced(phase))]
    replayed = "are captured once and replayed, in lanes"
    if refused:
        replayed = f"cannot run side by side; set engine.executor=loop ({refused[0]})"
    keeper = "each node" if alg.family == "gossip" else "the server"
    lines = [
        "",
        f"family: {alg.family}; uploads are {'needed one by one' if alg.traits.each_upload else 'summed'}"
        + ("; each client first passes over all of its data once" if has_survey(alg) else ""),
        f"state: {keeper} keeps {models(server)}, each client {models(kept)}",
        f"on a GPU: local steps {replayed}" if phases else "on a GPU: there are no local steps",
    ]
    if not alg.traits.communicates:
        return [*lines, "bytes: nothing is sent"]
    if alg.family == "gossip":
        return [*lines, f"bytes: {models(upload)} over each link in each direction and round"]
    one_model = tree.nbytes(task.w0)
    if alg.family == "closed_form":
        lines.append("for a net with 5 features and 4 classes; sums grow with the square of the features")
    received = times(sent_bytes(alg, down) / one_model)
    sent = times(upload_bytes(alg, tree.tmap(lambda x: x[None], upload)) / one_model)
    return [*lines, f"bytes: {received} down and {sent} up for each client and round"]


def _module_doc(cls: type[Any]) -> str:
    """The docstring of the class's file, with the paper and the pseudo-code."""
    module = sys.modules[cls.__module__]
    return (inspect.getdoc(module) or inspect.getdoc(cls) or "").replace("``", "`")


def _first(text: str) -> str:
    """The first sentence or line."""
    return text.strip().split("\n")[0]
