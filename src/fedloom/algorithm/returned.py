"""What the functions of a user's method return: checked where it is returned, since torch reports it much later."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fedloom.algorithm.own_class import is_own
from fedloom.core import tree
from fedloom.core.errors import Fault, OwnCodeError
from fedloom.core.own_line import written_at


def check_returned(cls: type[Any]) -> None:
    """Let each function of the contract that a user's class defines check what it returns."""
    for name, check in _CHECKS.items():
        function = vars(cls).get(name)
        if is_own(cls) and inspect.isfunction(function):
            reader = _READS_W.get(name, "")
            reads_no_w = any(is_own(each) and reader in vars(each) for each in cls.__mro__)
            setattr(cls, name, _checked(function, _is_tree if reads_no_w else check))


def _checked(function: Callable[..., Any], check: Callable[..., tuple[str, str]]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        found = function(*given, **named)
        what, fix = check(found, *given[1:])
        if what:
            raise OwnCodeError([Fault(written_at(function), what, fix)])
        return found

    return call


# -- what is wrong with a result, and the fix; both are empty if nothing is ---------------------------
def _is_state(found: Any, *_: Any) -> tuple[str, str]:
    if what := _no_tree(found):
        return f"returned {what}", _named_tuple(found)
    if not hasattr(found, "w"):
        fix = "return Model(w), or a NamedTuple of your own with the model as its field w"
        return f"returned {_described(found)}, which has no field 'w'", fix
    return "", ""


def _is_tree(found: Any, *_: Any) -> tuple[str, str]:
    return (f"returned {what}", _named_tuple(found)) if (what := _no_tree(found)) else ("", "")


def _is_next_state(found: Any, server: Any = None, *_: Any) -> tuple[str, str]:
    if what := _no_tree(found):
        return f"returned {what}", "return the new state, such as server._replace(w=...)"
    if server is None or _no_tree(server):
        return "", ""
    old, new = (dict(tree.named_leaves(state)) for state in (server, found))
    if list(old) != list(new):
        return f"returned a state of {_listed(new)}; it was one of {_listed(old)}", "return server._replace(...)"
    for name, x in new.items():
        if x.shape != old[name].shape:
            was = list(old[name].shape)
            return f"returned '{name}' of the shape {list(x.shape)}; it was {was}", "a state keeps its shapes"
        if x.dtype != old[name].dtype:
            fix = f"sums are float64: write like(..., server.{name}), from fedloom.algorithm import like"
            return f"returned '{name}' in {_kind(x)}; the server's state has {_kind(old[name])}", fix
    return "", ""


def _is_gradient(found: Any, x: Any = None, *_: Any) -> tuple[str, str]:
    if found is None:
        return "returned nothing", "return the gradient, which has the shape of x"
    if isinstance(found, Tensor) and isinstance(x, Tensor) and found.shape != x.shape:
        return f"returned the shape {list(found.shape)}; x has {list(x.shape)}", "a gradient has the shape of x"
    return "", ""


def _is_loss(found: Any, *_: Any) -> tuple[str, str]:
    if found is None:
        return "returned nothing", "return the loss of the batch, one number"
    if isinstance(found, Tensor) and found.dim():
        fix = "return (each * batch.mask).sum() / batch.mask.sum().clamp(min=1)"
        return f"returned the shape {list(found.shape)}; a loss is one number", fix
    return "", ""


def _is_carry(found: Any, *_: Any) -> tuple[str, str]:
    if hasattr(found, "x") and hasattr(found, "memory"):
        return "", ""
    return f"returned {_described(found)}", "return Carry(x, memory), from fedloom.algorithm import Carry"


def _is_upload_and_state(found: Any, *_: Any) -> tuple[str, str]:
    if not isinstance(found, tuple) or len(found) != 2:
        fix = "return the upload and what the client keeps, as in: return Update(x - down.w), mine"
        return f"returned {_described(found)}", fix
    for part, whose in zip(found, ("the upload", "the client's state"), strict=True):
        if what := _no_tree(part):
            return f"returned {what} as {whose}", _named_tuple(part)
    return "", ""


def _is_tensor(found: Any, *_: Any) -> tuple[str, str]:
    return ("", "") if isinstance(found, Tensor) else (f"returned {_described(found)}", "return a tensor")


_CHECKS: dict[str, Callable[..., tuple[str, str]]] = {
    "init": _is_state,
    "send": _is_state,
    "join": _is_tree,
    "start": _is_tree,
    "loss": _is_loss,
    "gradient": _is_gradient,
    "step": _is_carry,
    "finish": _is_upload_and_state,
    "weight": _is_tensor,
    "update": _is_next_state,
    "serve": _is_tensor,
    "global_model": _is_tensor,
}


# Where a field ``w`` is read, unless the method has a function of its own for that.
_READS_W = {"init": "global_model", "send": "start"}


def _no_tree(found: Any) -> str:
    """What a value is, or has inside, that is neither a tensor nor a tuple; empty if there is nothing."""
    if isinstance(found, Tensor):
        return ""
    if isinstance(found, tuple):
        inside = next((what for each in found if (what := _no_tree(each))), "")
        return inside if not inside or inside.startswith("a tuple") else f"a tuple with {inside}"
    return _described(found)


def _named_tuple(found: Any) -> str:
    """How to write a value as a tree."""
    if found is None:
        return "return a tensor, a NamedTuple of tensors, or () for nothing"
    if isinstance(found, dict) and found and all(isinstance(name, str) for name in found):
        return f"write a NamedTuple: class Own(NamedTuple): {'; '.join(f'{name}: Tensor' for name in found)}"
    return "write a NamedTuple of tensors: class Own(NamedTuple): w: Tensor"


def _described(found: Any) -> str:
    if found is None:
        return "nothing"
    if isinstance(found, dict):
        return f"a dict of {_listed(found)}"
    return "a tensor" if isinstance(found, Tensor) else f"a {type(found).__name__}"


def _listed(names: Any) -> str:
    return ", ".join(f"'{name}'" for name in names) or "nothing"


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
