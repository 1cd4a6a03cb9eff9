"""Errors in the user's code: the line that raised them, and what to write instead if torch does not say."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_BRANCHES = (
    "this reads the value of a tensor, or branches on it, but clients train side by side: write "
    "torch.where(condition, a, b) instead, or train one client after another with engine.executor=loop"
)
_ONE_HOT = (
    "one_hot looks at the values of y, but clients train side by side: write "
    "(y[:, None] == torch.arange(C)).float() for C classes, or train one client after another with engine.executor=loop"
)
_ONE_BY_ONE = "this works only where clients train one after another: set engine.executor=loop"
# What torch says where it cannot map what it does itself, so that the user's line may be missing from the traceback.
_UNMAPPED = (
    "Batching rule not implemented",
    "torch.utils.checkpoint: A different number of tensors",
    "with different metadata than during the forward pass",
)
# What torch says, and what to do about it.
_REMEDIES = {
    "data-dependent control flow": _BRANCHES,
    "calling .item() on a Tensor": _BRANCHES,
    "Tensor.requires_grad_()": "clients train side by side, where a gradient is a function: override loss, or write "
    "return self.task.differentiate(lambda v: the loss at v, x), or train one client after another with "
    "engine.executor=loop",
    "called random operation": "this draws random numbers that would differ when the run is repeated: use "
    "rng.unit(rng.fold(batch.key, torch.arange(n))) of fedloom.core.rng instead, n numbers from 0 to 1",
}
# What is empty unless a method asks for it, and how it does.
_NOT_ASKED_FOR = {
    "inbox.uploads": "uploads are kept one by one only for a method that says so: write traits as "
    "super().traits._replace(each_upload=True)",
    "work.survey": "there is a survey only in a class that also inherits from Surveys of fedloom.algorithm",
}


def own_line(error: BaseException) -> str:
    """The last line of the user's code in a traceback, as ``file.py, line 6, in loss: if x > 1:``."""
    return lines[-1] if (lines := own_lines(error)) else ""


def own_lines(error: BaseException) -> list[str]:
    """All lines of the user's code in a traceback, the one that raised the error last."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return [f"{frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames]


def undecorated(thing: Any) -> Any:
    """The function as it was written, under its decorators, or the class."""
    function: Any = thing.fget if isinstance(thing, property) else thing
    return inspect.unwrap(function)


def written_at(thing: Any) -> str:
    """Where a function or class of the user is written, as ``file.py, line 6, in Mine.update``."""
    thing = undecorated(thing)
    try:
        file, line = inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):  # written at a prompt
        return str(thing.__qualname__)
    return f"{file}, line {line}, in {thing.__qualname__}"


def said(error: BaseException) -> str:
    """The first line of an error in the user's code, and the line that raised it."""
    first = (str(error).splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{what}, at {line}" if (line := own_line(error)) else what


def remedy(error: BaseException) -> str:
    """What an error of torch means in code that is mapped over clients, with the line and the fix; or empty."""
    line, text = own_line(error), str(error)
    for sign, fix in _REMEDIES.items():
        if sign in text and line:
            return f"{line}\n{_ONE_HOT if 'one_hot(' in line else fix}"
    for name, fix in _NOT_ASKED_FOR.items():
        if "'tuple' object" in text and name in line:
            return f"{line}\n{fix}"
    if any(sign in text for sign in _UNMAPPED) or (line and "vmap" in text):
        first = next(iter(text.splitlines()), "")
        return f"{line or type(error).__name__}\n{_ONE_BY_ONE} ({first})"
    return ""


def _is_own(file: str) -> bool:
    path = Path(file)
    installed = file.startswith(_INSTALLED) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return path.is_file() and not path.is_relative_to(_ROOT) and not installed
