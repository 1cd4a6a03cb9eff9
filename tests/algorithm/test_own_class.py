"""Mistakes in a user's method: one error with its line and the fix, before or where it is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fedloom
from fedloom import FedAvg
from fedloom.algorithm import Algorithm, Carry, Update, like, returned
from fedloom.algorithm.own_class import refuse_mistakes
from fedloom.core.errors import OwnCodeError

SMALL: dict[str, Any] = {"rounds": 1, "partition": {"clients": 3}}


def own(**body: Any) -> type[FedAvg]:
    """A class of the user's with these functions."""
    for name, function in body.items():
        if callable(function):
            function.__name__, function.__qualname__ = name, f"Own.{name}"
    made: type[FedAvg] = type("Own", (FedAvg,), {"__module__": __name__, **body})
    return made


# -- the class ---------------------------------------------------------------------------------------
def test_a_misspelt_function_is_named_with_the_one_that_was_meant() -> None:
    name = "gradient"[:4] + "eint"  # in parts: a file that reads the name of an object may call it
    with pytest.raises(OwnCodeError, match=rf"{__file__}, line \d+, in Own.{name}: nothing calls.* mean 'gradient'"):
        own(**{name: lambda self, x, batch, down, mine: x})()


def test_a_function_that_the_class_uses_may_have_a_similar_name() -> None:
    class Own(FedAvg):
        def losses(self, x: Any, batch: Any) -> Any:
            return self.task.loss(x, batch)

        def loss(self, x: Any, batch: Any, down: Any, mine: Any) -> Any:
            return sum(self.losses(x, each) for each in (batch,))

        def end(self, at: Any, seen: Any, down: Any) -> Any:
            """Its name resembles send, but it takes other arguments."""
            return at

    Own()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"gradient": lambda self, x, batch: x},
            r"\(self, x, batch\) \(write def gradient\(self, x, batch, down, mine",
        ),
        ({"traits": lambda self: None}, "'traits' is a property"),
        ({"loss": property(lambda self: None)}, "'loss' is a function"),
        ({"__init__": lambda self, mu=0.5: None}, "write in the class: mu: float = 0.5"),
    ],
)
def test_a_function_that_cannot_be_called_as_it_is_written(body: dict[str, Any], said: str) -> None:
    with pytest.raises(OwnCodeError, match=said):
        refuse_mistakes(own(**body), Algorithm)


def test_fedloom_itself_makes_no_such_mistake() -> None:
    refuse_mistakes(FedAvg, Algorithm)
    FedAvg()


def test_a_method_cannot_change_itself() -> None:
    def update(self: Any, server: Any, inbox: Any) -> Any:
        self.momentum = 0
        return server

    with pytest.raises(OwnCodeError, match=r"in Own.update: sets self.momentum.*a field of its state"):
        fedloom.run(own(update=update)(), **SMALL)


# -- what its functions return -------------------------------------------------------------------------
Function = Callable[..., Any]
WRONG: dict[str, tuple[str, Function, str]] = {
    "an upload that is a dict": (
        "finish",
        lambda self, x, *_: ({"dw": x}, ()),
        "dict of 'dw'.*NamedTuple.*dw: ",
    ),
    "no state": ("finish", lambda self, x, *_: Update(x), "returned a Update.*return the upload and"),
    "a state that is a dict": ("init", lambda self, w: {"w": w}, "dict of 'w'"),
    "a state without a model": ("init", lambda self, w: (w,), "has no field 'w'"),
    "no gradient": ("gradient", lambda self, *_: None, "returned nothing"),
    "a gradient of another shape": ("gradient", lambda self, x, *_: x.sum(), r"the shape \[\]; x has"),
    "no loss": ("loss", lambda self, *_: None, "returned nothing"),
    "losses of rows": ("loss", lambda self, x, batch, *_: batch.mask, "a loss is one number"),
    "a step without memory": ("step", lambda self, at, *_: at.x, r"return Carry\(x, memory\)"),
    "a weight that is a number": ("weight", lambda self, *_: 1.0, "returned a float"),
    "sums as the model": ("update", lambda self, s, inbox: s._replace(w=s.w + inbox.mean.dw), r"write like\("),
    "a longer model": ("update", lambda self, s, _: s._replace(w=torch.cat([s.w, s.w])), "a state keeps its shapes"),
    "another state": ("update", lambda self, s, _: Update(s.w), "returned a state of 'dw'; it was one of 'w'"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_what_a_function_returns_is_checked_there(what: str, executor: str) -> None:
    name, function, said = WRONG[what]
    with pytest.raises(OwnCodeError, match=rf"{__file__}, line \d+, in Own.{name}: .*{said}"):
        fedloom.run(own(**{name: function})(), engine={"executor": executor}, **SMALL)


def test_right_results_pass() -> None:
    class Own(FedAvg):
        def update(self, server: Any, inbox: Any) -> Any:
            return server._replace(w=server.w + like(inbox.mean.dw, server.w))

        def step(self, at: Carry, batch: Any, down: Any, mine: Any) -> Carry:
            return super().step(at, batch, down, mine)

        def gradient(self, x: Any, batch: Any, down: Any, mine: Any) -> Any:
            return self.task.grad(x, batch)

    ours, theirs = (fedloom.run(alg, **SMALL).records for alg in (Own(), FedAvg()))
    assert ours == theirs


def test_fedloom_pays_nothing_for_it() -> None:
    assert not hasattr(FedAvg.update, "__wrapped__")
    assert returned._CHECKS.keys() <= vars(Algorithm).keys()


def test_a_state_without_w_is_right_where_the_method_reads_it_itself() -> None:
    class Stack(NamedTuple):
        models: Tensor

    class Two(FedAvg):
        def init(self, w: Tensor) -> Any:
            return Stack(torch.stack([w, w]))

        def send(self, server: Any) -> Any:
            return Stack(server.models[:1])

        def start(self, down: Any, mine: Any, work: Any) -> Tensor:
            first: Tensor = down.models[0]
            return first

        def finish(self, x: Tensor, down: Any, mine: Any, work: Any) -> Any:
            return Update(x - down.models[0]), mine

        def update(self, server: Any, inbox: Any) -> Any:
            return Stack(server.models + like(inbox.mean.dw, server.models))

        def global_model(self, server: Any) -> Tensor:
            first: Tensor = server.models[0]
            return first

    ours, theirs = (fedloom.run(method, **SMALL).records[-1] for method in (Two(), "fedavg"))
    assert ours["global/test/loss"] == theirs["global/test/loss"]
