"""FedRep and its variants: a part of the model is shared, the rest stays with each client.

    model of client k = (phi, h_k):  phi is sent, h_k never is
    client k, schedule
        alternate:  h_k <- SGD on h_k, `head_epochs` passes with phi frozen;   then  phi_k <- SGD on phi, h_k frozen
        together:   (phi_k, h_k) <- SGD on both
        body:       phi_k <- SGD on phi, with the initial h_k;
                    before it predicts, the client trains h_k on a throw-away copy, `head_epochs` passes
               upload  phi_k - phi;   keep h_k
    server:    phi <- phi + server_lr mean_k (phi_k - phi), weighted as in FedAvg
    served:    (phi, h_k), with the phi just received

``preset``
    fedrep   the head is private, alternate. Collins et al., Exploiting Shared Representations for Personalized
             Federated Learning, ICML 2021; its theory minimises over h_k exactly, as many head_epochs nearly do.
    fedper   the head is private, together. Arivazhagan et al., Federated Learning with Personalization Layers, 2019.
    fedbabu  the head is private, body, with head_epochs = 5. Oh, Kim and Yun, FedBABU: Toward Enhanced
             Representation for Federated Image Classification, ICLR 2022.
    fedbn    normalisation is private, together. Li et al., FedBN: Federated Learning on Non-IID Features via Local
             Batch Normalization, ICLR 2021. Running statistics then belong to the client, too: ``model.buffers=local``.

The settings of ``fedrep`` may be changed; ``private`` and ``schedule`` of the others may not, since that would be
another method under their name. Every client starts from the common initial model. phi and h_k have separate
optimizers, unless they are trained together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, PositiveFloat, PositiveInt, PrivateAttr, model_validator
from torch import Tensor

from fedloom.algorithm import (
    Adapts,
    Algorithm,
    Carry,
    Configures,
    HasPhases,
    Model,
    Phase,
    Setup,
    TrainsParts,
    Traits,
    Update,
    Weighting,
    Work,
)
from fedloom.core.errors import ConfigError, Fault, nearest
from fedloom.core.schema import when
from fedloom.core.task import Batch, Task, normalisation

PRESETS: dict[str, dict[str, Any]] = {
    "fedrep": {"private": "head", "schedule": "alternate"},
    "fedper": {"private": "head", "schedule": "together"},
    "fedbabu": {"private": "head", "schedule": "body", "head_epochs": 5},
    "fedbn": {"private": "norm", "schedule": "together"},
}
_LACKS = {
    "head": ("the net has no part called 'head' with parameters", "name its last layer so, or use algorithm.names"),
    "norm": ("the net has no normalisation layers with parameters", "use one that has, such as model.kind=resnet20"),
}


class Mine(NamedTuple):
    h: Tensor  # [R]


class Parts(NamedTuple):
    """The two parts of a model, or the optimizer state of each."""

    phi: Any  # [S]
    h: Any  # [R]


class Layout(NamedTuple):
    """The indices of the two parts in the vector of the whole model."""

    phi: Tensor  # [S]
    h: Tensor  # [R]
    whole: Tensor  # [P] the index of each parameter in the concatenated parts


class FedRep(Algorithm[Model, Mine, Update], HasPhases, Adapts, TrainsParts, Configures):
    family = "personal"
    presets = {"preset": PRESETS}

    preset: Literal["fedrep", "fedper", "fedbabu", "fedbn"] = Field("fedrep", description="a named method: see above")
    private: Literal["head", "norm", "named"] = Field(
        "head", description="what stays with each client: the net's head, normalisation layers, or only `names`"
    )
    names: tuple[str, ...] = Field((), description="parameters whose names begin with one of these stay, too")
    schedule: Literal["alternate", "together", "body"] = Field(
        "alternate", description="how a client trains: see above"
    )
    head_epochs: Annotated[PositiveInt, when(schedule=("alternate", "body"))] = Field(
        1, description="passes over the data in which only the private part is trained"
    )
    server_lr: PositiveFloat = Field(1.0, description="the server's learning rate for the mean update")
    weighting: Weighting = "samples"

    _layout: Layout | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _names_are_named(self) -> FedRep:
        if self.private == "named" and not self.names:
            raise ValueError("private = 'named' needs names, such as names = ['head.']")
        return self

    @model_validator(mode="after")
    def _is_that_method(self) -> FedRep:
        for name in ("private", "schedule") if self.preset != "fedrep" else ():
            stands_for, value = PRESETS[self.preset][name], getattr(self, name)
            if value != stands_for:
                fix = f"leave {name} out, or use preset = 'fedrep', whose settings may be changed"
                raise ValueError(f"preset = '{self.preset}' is {name} = '{stands_for}' (got '{value}'): {fix}")
        return self

    @property
    def traits(self) -> Traits:
        return super().traits.weighted_by(
            self.weighting,
            has_global_model=False,
            distinct=True,
            served="post_fit" if self.schedule == "body" else "pre_fit",
            server_lr=self.server_lr,
        )

    def defaults(self) -> Mapping[str, Mapping[str, Any]]:
        # Private normalisation layers include their running statistics.
        return {"model": {"buffers": "local"}} if self.private == "norm" else {}

    def memory(self, x: Any) -> Any:
        """The two parts have separate optimizer states if they are trained separately."""
        return self.optimizer.init(x) if self.schedule == "together" else Parts(*map(self.optimizer.init, x))

    @property
    def layout(self) -> Layout:
        assert self._layout is not None, "bind() first"
        return self._layout

    def bind(self, setup: Setup) -> Self:
        bound = super().bind(setup)
        bound._layout = lay_out(setup.task, self.private, self.names)
        return bound

    def init(self, w: Tensor) -> Model:
        return Model(w[self.layout.phi])

    def join(self, down: Model) -> Mine:
        return Mine(self.task.w0[self.layout.h])

    def start(self, down: Model, mine: Mine, work: Work) -> Parts:
        return Parts(down.w, mine.h)

    def model(self, x: Parts) -> Tensor:
        return torch.cat([x.phi, x.h])[self.layout.whole]

    def phases(self) -> tuple[Phase, ...]:
        main = Phase(self.step)
        return (self.head_phase, main) if self.schedule == "alternate" else (main,)

    def adaptation(self) -> tuple[Phase, ...]:
        return (self.head_phase,) if self.schedule == "body" else ()

    @property
    def head_phase(self) -> Phase:
        # Running statistics belong to the body, which is frozen.
        return Phase(self.head_step, name="head", epochs=self.head_epochs, keeps_statistics=False)

    def gradient(self, x: Parts, batch: Batch, down: Model, mine: Mine) -> Parts:
        g = self.task.grad(self.model(x), batch)
        return Parts(g[self.layout.phi], g[self.layout.h])

    def step(self, at: Carry, batch: Batch, down: Model, mine: Mine) -> Carry:
        """A step of phi, or of both parts."""
        if self.schedule == "together":
            return super().step(at, batch, down, mine)
        g = self.gradient(at.x, batch, down, mine)
        phi, memory = self.optimizer.update(g.phi, at.memory.phi, at.x.phi, batch.lr)
        return Carry(at.x._replace(phi=phi), at.memory._replace(phi=memory))

    def head_step(self, at: Carry, batch: Batch, down: Model, mine: Mine) -> Carry:
        """A step of h."""
        g = self.gradient(at.x, batch, down, mine)
        h, memory = self.optimizer.update(g.h, at.memory.h, at.x.h, batch.lr)
        return Carry(at.x._replace(h=h), at.memory._replace(h=memory))

    def finish(self, x: Parts, down: Model, mine: Mine, work: Work) -> tuple[Update, Mine]:
        return Update(x.phi - down.w), Mine(x.h)

    def serve(self, down: Model, mine: Mine) -> Tensor:
        return self.model(Parts(down.w, mine.h))


def lay_out(task: Task, private: str, names: tuple[str, ...]) -> Layout:
    """The indices of the private parameters and of the others; an empty part is a fault."""
    faults = [
        Fault("algorithm.names", f"no parameter has a name that begins with '{name}'", nearest(name, task.names))
        for name in names
        if not task.mask(name).any()
    ]
    prefixes = ("head.",) if private == "head" else normalisation(task) if private == "norm" else names
    stays = task.mask(*prefixes, *names) > 0
    if private in _LACKS and not task.mask(*prefixes).any():
        faults.append(Fault("algorithm.private", *_LACKS[private]))
    elif bool(stays.all()):
        what = f"all {task.size} parameters would stay with the clients, so nothing would be shared"
        faults.append(Fault("algorithm.private", what, "use a net with more layers, such as mlp"))
    if faults:
        raise ConfigError(faults)
    phi, h = (~stays).nonzero().squeeze(1), stays.nonzero().squeeze(1)
    return Layout(phi, h, torch.cat([phi, h]).argsort())
