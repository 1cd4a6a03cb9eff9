"""``fedloom.load``: the models of a finished run, ready to predict."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fedloom.core import usercode
from fedloom.core.errors import CheckpointError, ConfigError, DataError, Fault, nearest
from fedloom.core.quality import class_measures, confusion, number_measures
from fedloom.data.columns import Feature, Recipe
from fedloom.data.files import coded_as, known_as
from fedloom.data.new_rows import NewRows, ValueRange, new_rows
from fedloom.data.table import with_points
from fedloom.data.targets import numbers_in
from fedloom.models.net import NetSpec
from fedloom.models.ready import FillAndScale, ReadyNet, Rescale
from fedloom.runs.folder import verify
from fedloom.runs.models import COLUMNS, COMMON, PERSONAL, RECORD, ModelRecord
from fedloom.runs.origin import beside_its_code
from fedloom.runs.settings import net_spec_of

_CHUNK = 1024  # rows of one forward pass
_SEARCHED, _LISTED = 5000, 20  # most clients that an unknown name is compared with and that a message lists


OnNote: TypeAlias = Callable[[str], object]


def _unheard(note: str) -> None: ...


class ModelFiles(NamedTuple):
    """Where the tensors of each model are."""

    common: Mapping[str, Tensor] | None
    personal: Path | None


class Predictor:
    """The models of a run: the common one, or that of one client.

    ``predict`` and ``predict_proba`` take a path, a DataFrame, an array or a tensor of rows as they were before any
    preparation; ``module`` is the same as an ordinary ``nn.Module``.
    """

    def __init__(
        self,
        record: ModelRecord,
        recipe: Recipe | None,
        net: nn.Module,
        weights: ModelFiles,
        on_note: OnNote,
        chosen: str | None = None,
    ) -> None:
        self._record, self._recipe, self._net, self._weights = record, recipe, net, weights
        self._on_note, self._chosen = on_note, chosen
        self._made: dict[str | None, ReadyNet] = {}

    # -- what there is ---------------------------------------------------------------------------
    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, in the order of the probabilities."""
        return self._record.labels

    @property
    def is_regression(self) -> bool:
        """Whether the run learned a number."""
        return self._record.task == "regression"

    @property
    def clients(self) -> tuple[str, ...]:
        """The names of the clients."""
        return self._record.clients

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return tuple(f.name for f in self.features)

    @property
    def features(self) -> tuple[Feature, ...]:
        """How each of these columns becomes inputs of ``module``."""
        return () if self._recipe is None else self._recipe.features

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the inputs of ``module``, if the run learned from a table."""
        return () if self._recipe is None else self._recipe.names

    @property
    def values(self) -> ValueRange | None:
        """The smallest and the largest value that arrays should have; None for tables, and where it is not known."""
        found = self._record.values or ((0.0, 255.0) if self._record.images else None)
        return None if found is None else ValueRange(*found)

    @property
    def record(self) -> ModelRecord:
        """What the models are."""
        return self._record

    @property
    def has_common_model(self) -> bool:
        return self._weights.common is not None

    @property
    def owner(self) -> str | None:
        """The client, or the node, whose model this is; None if it is the common one."""
        return self.clients[0] if self._chosen is None and self._record.origin is not None else self._chosen

    def client(self, name: str | int) -> Predictor:
        """The model of the client of this name."""
        called = known_as(str(name), self.clients)
        if called not in self.clients:
            raise DataError(f"there is no client '{called}' ({_meant(called, self.clients)})")
        if self._record.personal and self._weights.personal is None:
            what = "the clients' own models were not saved (set checkpoint.personal=all)"
            raise CheckpointError(f"client '{called}': {what}")
        return Predictor(self._record, self._recipe, self._net, self._weights, self._on_note, called)

    @property
    def module(self) -> ReadyNet:
        """The model as an ordinary net in evaluation mode; numbers are filled and scaled inside it."""
        return copy.deepcopy(self._ready(self._default()))

    def __repr__(self) -> str:
        whose = f"client '{self.owner}'" if self.owner is not None else "the common model"
        what = f"{'a number' if self.is_regression else f'{len(self.labels)} classes'}, {len(self.clients)} clients"
        return f"<Predictor of {whose}: {self._record.algorithm} on {self._record.data}, {what}>"

    # -- predicting ------------------------------------------------------------------------------
    def predict(self, data: Any, *, by_client: bool = False) -> NDArray[Any]:
        """The class of each row; numbers where all classes are whole numbers. ``by_client``: as the table says.

        Where the run learned a number, that number.
        """
        if self.is_regression:
            values: NDArray[np.float64] = (
                self.outputs(self._given(data), by_client=by_client).squeeze(1).double().numpy()
            )
            return values
        best = self.outputs(self._given(data), by_client=by_client).argmax(1).numpy()
        return _as_values(self.labels).take(best)

    def predict_proba(self, data: Any, *, by_client: bool = False) -> NDArray[np.float64]:
        """The probability of each class in each row.  ``[rows, classes]``"""
        if self.is_regression:
            raise DataError("the run learned a number, which has no probabilities (use predict)")
        chances: NDArray[np.float64] = self.outputs(self._given(data), by_client=by_client).double().softmax(1).numpy()
        return chances

    def evaluate(self, data: Any, y: Any = None, *, by_client: bool = False) -> dict[str, Any]:
        """Accuracy and more on rows whose classes are known: in the table's own column, or in ``y``."""
        rows = self._given(data)
        truth = self._truth(rows, y)
        logits = self.outputs(rows, by_client=by_client)
        if self.is_regression:
            return {"rows": len(truth), **number_measures(logits.squeeze(1), truth)}
        predicted = logits.argmax(1)
        found: dict[str, Any] = {
            "rows": len(truth),
            "accuracy": float((predicted == truth).double().mean()),
            "loss": float(nn.functional.cross_entropy(logits.double(), truth)),
            **class_measures(logits, truth),
        }
        found["confusion"] = confusion(truth, predicted, len(self.labels)).tolist()
        if note := note_of_one_class(self.labels, found["confusion"]):
            self._on_note(note)
        return found

    def rows(self, data: Any) -> NewRows:
        """Data as the models take it."""
        record = self._record
        return new_rows(data, self._recipe, record.shape, images=record.images, trained=self.values)

    def _given(self, data: Any) -> NewRows:
        """The same, with a word on each doubt, unless the caller has the rows, and their notes, already."""
        rows = self.rows(data)
        for note in () if rows is data else rows.notes:
            self._on_note(note)
        return rows

    def outputs(self, rows: NewRows, *, by_client: bool = False) -> Tensor:
        """The outputs of the nets for each row.  ``[rows, classes]``"""
        x = torch.from_numpy(np.ascontiguousarray(rows.x))
        if not by_client:
            return self._forward(self._ready(self._default()), x)
        if rows.clients is None:
            column = self._recipe.client if self._recipe is not None else None
            fix = f"no column '{column}' is in it" if column else "the run's data did not name them"
            raise DataError(f"{rows.at}: does not name the client of each row ({fix})")
        if not self._record.named:
            what = "names the client of each row, but the clients of the run are other ones, which have only numbers"
            raise DataError(f"{rows.at}: {what} (partition=natural without partition.clients keeps the data's)")
        names = {name: known_as(name, self.clients) for name in dict.fromkeys(rows.clients)}
        strangers = sorted(name for name, known in names.items() if known not in self.clients)
        if strangers:
            row = rows.clients.index(strangers[0])
            listed = ", ".join(repr(name) for name in strangers[:10])
            raise DataError(f"{rows.at}: clients that the run does not know: {listed} (first in {rows.where(row)})")
        out = torch.empty(len(x), len(self.labels) or 1)
        holders = np.array(rows.clients, dtype=object)
        for name, known in names.items():
            mine = torch.from_numpy(holders == name)
            out[mine] = self._forward(self.client(known)._ready(known), x[mine])
        return out

    def _default(self) -> str | None:
        if self._chosen is None and not self.has_common_model:
            what = f"with {self._record.algorithm} every client has its own model, and there is no common one"
            raise DataError(f"{what}: choose a client ({', '.join(self.clients[:10])}), or predict by client")
        return self._chosen

    def _forward(self, net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            parts = [net(part) for part in torch.split(x, _CHUNK)]
        return torch.cat(parts) if parts else torch.zeros(0, len(self.labels) or 1)

    def _truth(self, rows: NewRows, y: Any) -> Tensor:
        given = np.asarray(y) if y is not None else rows.y
        if given is None:
            column = f"no column '{self._recipe.label}'" if self._recipe is not None else "no array 'y'"
            raise DataError(f"{rows.at}: has {column}, so there is nothing to compare with")
        if self.is_regression:
            given = with_points(given) if y is None and rows.comma else given
            return torch.from_numpy(numbers_in(given.reshape(-1), "label", rows.where))
        return torch.from_numpy(coded_as(given, self.labels, "label", rows.where))

    # -- nets ------------------------------------------------------------------------------------
    def _ready(self, name: str | None) -> ReadyNet:
        if name not in self._made:
            net = copy.deepcopy(self._net)
            _fill(net, self._tensors(name))
            # One at a time: there may be many.
            self._made = {name: ReadyNet(self._preparation(name), net, self._record.unit).eval()}
        return self._made[name]

    def _preparation(self, name: str | None) -> nn.Module:
        if self._recipe is None:
            trailing = [1] * (len(self._record.shape) - 1)
            scale, shift = (torch.tensor(v).view(-1, *trailing) for v in (self._record.scale, self._record.shift))
            return Rescale(scale, shift)
        own = self._recipe.own if self._record.named else {}  # by the data's clients
        chosen = own.get(name or "", self._recipe.scaling)
        return FillAndScale(chosen.fill, chosen.mean, chosen.std)

    def _tensors(self, name: str | None) -> Mapping[str, Tensor]:
        if name is None or not self._record.personal:
            assert self._weights.common is not None
            return self._weights.common
        assert self._weights.personal is not None
        return _personal(self._weights.personal, self.clients.index(name), self._record)


def note_of_one_class(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """What measures of rows of a single class do not say; empty if there are several, from the confusion matrix."""
    there = [label for label, line in zip(labels, counts, strict=True) if any(line)]
    if len(there) != 1:
        return ""
    recall = "balanced_accuracy is only the share of them that is recognised"
    return f"all rows are of the class '{there[0]}': auc is not defined, and {recall}"


def _as_values(labels: Sequence[str]) -> NDArray[Any]:
    try:
        return np.array([int(label) for label in labels])
    except ValueError:
        return np.array(labels)


def _fill(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load these tensors into a net; buffers that are not saved with a net are filled, too."""
    known = net.state_dict()
    net.load_state_dict({name: x for name, x in tensors.items() if name in known}, strict=False)
    hidden = {name: x for name, x in net.named_buffers() if name not in known}
    for name, x in tensors.items():
        if name in hidden:
            hidden[name].copy_(x)


def _personal(path: Path, row: int, record: ModelRecord) -> dict[str, Tensor]:
    """The tensors of one client's model; the rest of the file is not read."""
    try:
        with safe_open(path, framework="pt") as file:
            w, buffers = (file.get_slice(part)[row : row + 1].squeeze(0) for part in ("w", "buffers"))
            names = [name for name in file.keys() if name.startswith("fixed.")]  # noqa: SIM118
            fixed = {name.removeprefix("fixed."): file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return fixed | _named_parts(w, record.layout) | _named_parts(buffers, record.buffer_layout)


def _named_parts(flat: Tensor, layout: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    parts = torch.split(flat, [prod(shape) for shape in layout.values()]) if layout else ()
    return {name: part.view(shape) for (name, shape), part in zip(layout.items(), parts, strict=True)}


# -- from a run folder ---------------------------------------------------------------------------
def load(
    run_dir: str | Path, *, model: nn.Module | None = None, trust: bool = False, on_note: OnNote = _unheard
) -> Predictor:
    """The models of a finished run, as ``fedloom.load`` gives them; ``on_note`` hears doubts about new rows."""
    path = Path(run_dir)
    if not (path / RECORD).is_file():
        raise CheckpointError(f"{path}: {_not_loadable(path)}")
    verify(path, (RECORD, COLUMNS, COMMON, PERSONAL))
    record = _read(path / RECORD, ModelRecord)
    recipe = _read(path / COLUMNS, Recipe) if (path / COLUMNS).is_file() else None
    net = model if model is not None else _net(record, path, trust=trust)
    common = _tensors_at(path / COMMON) if (path / COMMON).is_file() else None
    personal = path / PERSONAL if (path / PERSONAL).is_file() else None
    return Predictor(record, recipe, net, ModelFiles(common, personal), on_note)


def _meant(called: str, clients: Sequence[str]) -> str:
    """A hint at the client that was meant; long lists are shortened."""
    hint = nearest(called, clients[:_SEARCHED])
    many = len(clients) > _LISTED and hint.startswith("known")
    return f"there are {len(clients):,}: {', '.join(clients[:5])}, ..." if many else hint


def _not_loadable(path: Path) -> str:
    if not (path / "config.toml").is_file():
        return "is not a run folder (it has no config.toml)"
    if (path / "summary.json").is_file():
        return f"was written by an earlier version, which kept no {RECORD} (fedloom resume {path} writes it)"
    return f"the run has not ended (fedloom resume {path})"


def _read(path: Path, cls: Any) -> Any:
    try:
        return cls.model_validate_json(path.read_bytes())
    except (OSError, ValidationError, json.JSONDecodeError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be read: {first}") from error


def _tensors_at(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _net(record: ModelRecord, run: Path, *, trust: bool) -> nn.Module:
    if not record.labels and record.task == "classification":
        raise ConfigError([Fault(RECORD, "names no classes")])
    table = dict(record.model)
    with beside_its_code(run):
        if trust:
            usercode.vouch(table)
        model: NetSpec = net_spec_of(table)
        return model.model_copy(update={"weights": ""}).net(record.shape, len(record.labels) or 1)
