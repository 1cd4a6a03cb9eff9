"""Errors in the user's code: the line that raised them, and what to write instead if torch does not say."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_BRANCHES = (
    "this reads the value of a tensor, or branches on it, but clients train side by side: write "
    "torch.where(condition, a, b) instead, or train one client after another with engine.executor=loop"
)
# What torch says, and what to do about it.
_REMEDIES = {
    "data-dependent control flow": _BRANCHES,
    "calling .item() on a Tensor": _BRANCHES,
    "called random operation": "this draws random numbers that would differ when the run is repeated: use "
    "rng.unit(rng.fold(batch.key, torch.arange(n))) of fedloom.core.rng instead, n numbers from 0 to 1",
}


def own_line(error: BaseException) -> str:
    """The last line of the user's code in a traceback, as ``file.py, line 6, in loss: if x > 1:``."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}, line {last.lineno}, in {last.name}: {last.line}"


def said(error: BaseException) -> str:
    """The first line of an error in the user's code, and the line that raised it."""
    first = (str(error).splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{what}, at {line}" if (line := own_line(error)) else what


def remedy(error: BaseException) -> str:
    """What an error of torch means in code that is mapped over clients, with the line and the fix; or empty."""
    for sign, fix in _REMEDIES.items():
        if sign in str(error) and (line := own_line(error)):
            return f"{line}\n{fix}"
    return ""


def _is_own(file: str) -> bool:
    path = Path(file)
    installed = file.startswith(_INSTALLED) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
    return path.is_file() and not path.is_relative_to(_ROOT) and not installed
