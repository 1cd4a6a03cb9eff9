"""Numbers in words: bytes, spans of time, metrics."""

from __future__ import annotations


def as_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def plural(count: int, thing: str) -> str:
    """``1 seed``, ``2 seeds``."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def brief(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.2e}"


def short(name: str) -> str:
    return name.rpartition("/")[2]


def span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
