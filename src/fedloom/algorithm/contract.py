"""What a federated algorithm is: a frozen record of hyper-parameters and a dozen pure functions.

Client functions are written for *one* client and the engine maps them over a cohort, so they must
not branch on the value of a tensor, write into an argument, draw randomness or do I/O. Override the
smallest thing that differs: ``loss`` before ``gradient`` before ``step``.

A round, in the order in which the functions are called::

    server   down = send(server)
    client   mine = join(down), once; then  x = start(down, mine, work)
             x, memory = step(...)  for each batch  -- by default the optimizer along gradient(...) of loss(...)
             upload, mine = finish(x, down, mine, work);  a = weight(upload, work)
    server   server = update(server, inbox)           -- inbox.total = sum of a * upload, inbox.mean = total / sum of a
    users    w = serve(down, mine)                    -- the model that a client predicts with
             w = global_model(server)                 -- the model that is evaluated on common test data, and saved

Without a server every node is its own: ``update`` runs at each node on what it received from its neighbours.

What they are given (see ``fedloom.algorithm.values``)::

    down     what the server sent: ``w``, and whatever else ``init`` returned
    mine     what this client has kept since its last round; ``join`` returns its first value
    batch    x, y, mask (1 for real examples), key (randomness of this step), progress (from 0 to 1), lr, buffers
    work     steps, examples, lr, round, client, and if an algorithm requests them survey, extra, staleness
    inbox    total, weight, mean, senders, population, examples, clients, address, and uploads and weights if requested

``traits`` are facts about the method that settings are checked against. A method declares what else it can do, such as
a pass over all data first or training in phases, by inheriting from a class of ``fedloom.algorithm.capabilities``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeAlias, cast

import torch
from pydantic import ConfigDict, PrivateAttr, ValidationError, model_validator
from torch import Tensor

from fedloom.algorithm import own_class, renamed
from fedloom.algorithm.capabilities import CAPABILITIES
from fedloom.algorithm.returned import check_returned
from fedloom.algorithm.traits import Family, Traits
from fedloom.algorithm.values import C, Carry, Inbox, Model, S, Setup, U, Update, Work, like
from fedloom.core.errors import ConfigError, Fault, OwnCodeError
from fedloom.core.optim import Optimizer
from fedloom.core.schema import Spec, read
from fedloom.core.task import Batch, Task

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(Spec)


class _Reports(ModelMetaclass):
    """How a method is made in Python: wrong settings are reported as those of a configuration are."""

    if not TYPE_CHECKING:

        def __call__(self, *given: Any, **settings: Any) -> Any:
            try:
                return super().__call__(*given, **settings)
            except ValidationError as error:
                faults = read(self, settings, self.__name__)[1]
                raise ConfigError(faults) from error


class Algorithm(Spec, Generic[S, C, U], metaclass=_Reports):
    """The base of all methods; functions that a method does not override are those of FedAvg."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    family: ClassVar[Family] = "server"
    fedavg_when: ClassVar[Mapping[str, Any] | None] = None  # the settings under which it is FedAvg, if any
    fedavg_as: ClassVar[Mapping[str, Any]] = {}  # the equivalent settings of FedAvg

    _setup: Setup | None = PrivateAttr(None)

    @property
    def traits(self) -> Traits:
        """Facts that settings are checked against."""
        return Traits()

    # -- at the server, or at each node of a network without one ------------------------------------
    def init(self, w: Tensor) -> S:
        """The state before the first round, from the initial model ``w`` [P]."""
        return cast(S, Model(w))

    def send(self, server: S) -> S:
        """The part of the state that clients are sent."""
        return server

    def update(self, server: S, inbox: Inbox[U]) -> S:
        """The state after the round; by default w plus ``server_lr`` times the clients' mean update."""
        mean = self.traits.server_lr * cast(Update, inbox.mean).dw
        return cast(S, cast(Any, server)._replace(w=server.w + like(mean, server.w)))

    def global_model(self, server: S) -> Tensor:
        """The server's model that is evaluated and saved, if it is not the one that is sent.  ``[P]``"""
        return self.send(server).w

    # -- at one client --------------------------------------------------------------------------
    def join(self, down: S) -> C:
        """The state of a client that takes part for the first time; by default it keeps nothing."""
        return cast(C, ())

    def start(self, down: S, mine: C, work: Work) -> Any:
        """Where local training starts."""
        return down.w

    def loss(self, x: Any, batch: Batch, down: S, mine: C) -> Tensor:
        """What local training minimises."""
        return self.task.loss(x, batch)

    def gradient(self, x: Any, batch: Batch, down: S, mine: C) -> Any:
        """The gradient that the local optimizer is given."""
        return self.task.differentiate(lambda at: self.loss(at, batch, down, mine), x)

    def step(self, at: Carry, batch: Batch, down: S, mine: C) -> Carry:
        """One local step."""
        g = self.gradient(at.x, batch, down, mine)
        return Carry(*self.optimizer.update(g, at.memory, at.x, batch.lr))

    def finish(self, x: Any, down: S, mine: C, work: Work) -> tuple[U, C]:
        """What is uploaded, and what the client keeps; by default its model update, and its unchanged state."""
        return cast(U, Update(x - down.w)), mine

    def weight(self, upload: U, work: Work) -> Tensor:
        """The weight of this upload: the client's number of examples, or equal for all, as set in the traits."""
        return work.examples if self.traits.weighs_examples else torch.ones_like(work.examples)

    def serve(self, down: S, mine: C) -> Tensor:
        """The model with which this client predicts.  ``[P]``"""
        return down.w

    # -- binding ----------------------------------------------------------------------------------
    def bind(self, setup: Setup) -> Self:
        """The same algorithm, bound to a task, a local optimizer and the rest of a setup."""
        bound = self.model_copy()
        bound._setup = setup
        return bound

    @property
    def setup(self) -> Setup:
        """What it was bound to."""
        assert self._setup is not None, "bind() first"
        return self._setup

    @property
    def task(self) -> Task:
        return self.setup.task

    @property
    def optimizer(self) -> Optimizer:
        return self.setup.optimizer

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Refuse a setting that hides a function of the same name, and functions with names of an earlier contract."""
        super().__pydantic_init_subclass__()
        hidden = [name for name in cls.model_fields if any(callable(getattr(c, name, None)) for c in _CALLED)]
        if hidden:
            raise TypeError(f"{cls.__name__}: the setting '{hidden[0]}' hides the function of that name; rename it")
        renamed.check(cls)
        check_returned(cls)

    @model_validator(mode="before")
    @classmethod
    def _is_written_well(cls, given: Any) -> Any:
        """Here and not where the class is made: a mistake in one class of a file leaves the others usable."""
        own_class.refuse_mistakes(cls, Algorithm)
        return given

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                super().__setattr__(name, value)
                return
            if settings := own_class.settings_instead(type(self)):
                fix = f"leave out __init__, and write in the class: {settings}"
            else:
                fix = (
                    "what the server remembers is a field of its state: a NamedTuple that init returns, and update "
                    "changes by server._replace; what a client remembers is returned by join and finish"
                )
            caller = inspect.stack(context=0)[1]
            where = f"{caller.filename}, line {caller.lineno}, in {type(self).__name__}.{caller.function}"
            what = f"sets self.{name}, but a method cannot change itself: a resumed run would have forgotten it"
            raise OwnCodeError([Fault(where, what, fix)])

        def __getattr__(self, name: str) -> Any:
            if name in renamed.MEMBERS:
                raise AttributeError(f"{type(self).__name__} no longer has '{name}': {renamed.MEMBERS[name]}")
            return super().__getattr__(name)


AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any]
# Otherwise pydantic would treat them as settings before they are checked.
Algorithm.__class_vars__.update(renamed.CONSTANTS)
_CALLED = (Algorithm, *CAPABILITIES)
