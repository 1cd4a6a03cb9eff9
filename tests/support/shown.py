"""What a page of the documentation shows of a command's output, against what the command printed.

A line ``...`` stands for any number of lines. What depends on the machine (seconds, speed, versions, threads) is not
compared. Decimal numbers, and counts in a line of several such as that of a confusion matrix, may differ a little from
processor to processor. A command under which nothing is shown may print anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

ANY = "..."
NEAR = 0.02  # how far two decimal numbers may be apart, or their ratio from 1
COUNTS = 3  # how far two whole numbers of a line of counts may be apart
_MACHINE = (
    (r"\d+(?:\.\d+)? s\b", "? s"),
    (r"[\d.,]+ clients/s", "? clients/s"),
    (r"\d+ threads?\b", "? threads"),
    (r"(python|torch) \d\S*?(?=,|$)", r"\1 ?"),
    (r"below \S+:", "below ?:"),
    (r"[▁-█]+", "▁"),
)
_PROGRESS = re.compile(r"round (\d+)/(\d+) ")
_NUMBER = re.compile(r"(\d[\d,]*(?:\.\d+)?)")
_OF_COUNTS = re.compile(r"\S+( +[\d,]+){2,}")  # a label and how often it was predicted as each class


def difference(shown: Sequence[str], printed: Sequence[str]) -> str:
    """The first part that is shown and was not printed so; empty where there is none."""
    rest = _steady(printed)
    parts = _parts(_steady(shown))
    for number, part in enumerate(parts):
        first, last = number == 0, number == len(parts) - 1
        places = range(1) if first else range(len(rest) - len(part) + 1)
        if last and not first:
            places = range(max(0, len(rest) - len(part)), len(rest) - len(part) + 1)
        found = next((at for at in places if _are_alike(part, rest[at : at + len(part)])), None)
        if found is None or (first and last and len(rest) != len(part)):
            return "\n".join(part)
        rest = rest[found + len(part) :]
    return ""


def renewed(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """What is shown with each line as it was printed now; a line that nothing resembles is left out."""
    if not difference(shown, printed):
        return list(shown)
    left, lines = _steady(printed), []
    for line in shown:
        found = [line] if line == ANY else difflib.get_close_matches(line, left, 1, 0.5)
        lines += found
        if found and line != ANY:
            left = left[left.index(found[0]) + 1 :]
    return lines


def _parts(lines: Sequence[str]) -> list[list[str]]:
    """The lines between those that stand for any others."""
    parts: list[list[str]] = [[]]
    for line in lines:
        if line == ANY:
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def _steady(lines: Sequence[str]) -> list[str]:
    """The lines without blank ends, and without progress that depends on the clock."""
    kept = [line.rstrip() for line in lines if not _passes_by(line)]
    while kept and not kept[-1]:
        kept.pop()
    return kept


def _passes_by(line: str) -> bool:
    found = _PROGRESS.match(line)
    return found is not None and found[1] not in ("1", found[2])


def _are_alike(shown: Sequence[str], printed: Sequence[str]) -> bool:
    return len(shown) == len(printed) and all(_is_alike(a, b) for a, b in zip(shown, printed, strict=True))


def _is_alike(shown: str, printed: str) -> bool:
    ours, theirs = (_NUMBER.split(_without_machine(line)) for line in (shown, printed))
    if len(ours) != len(theirs):
        return False
    counts = all(_OF_COUNTS.fullmatch(line.strip()) for line in (shown, printed))
    pairs = enumerate(zip(ours, theirs, strict=True))
    return all(a == b or (place % 2 and _is_near(a, b, counts=counts)) for place, (a, b) in pairs)


def _is_near(a: str, b: str, *, counts: bool) -> bool:
    one, other = (float(number.replace(",", "")) for number in (a, b))
    if "." in a and "." in b:
        return abs(one - other) <= NEAR * max(1, one, other)
    return counts and abs(one - other) <= COUNTS


def _without_machine(line: str) -> str:
    for pattern, instead in _MACHINE:
        line = re.sub(pattern, instead, line)
    return re.sub(r" +", " ", line)  # columns are as wide as their numbers
