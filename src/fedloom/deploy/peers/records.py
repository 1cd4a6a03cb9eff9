"""What a node has recorded in its folder, besides its checkpoints: its state, the rows of all nodes, its rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, NonNegativeInt, ValidationError

from fedloom.core.errors import DataError
from fedloom.deploy.messages import MessageError
from fedloom.deploy.site import STATE

LOCK, NODE_ROUNDS, POPULATION = ".node.lock", "rounds.jsonl", "population.json"
Rows = dict[int, tuple[int, int]]  # training and test rows of nodes


class Recorded(BaseModel):
    """The state of a node."""

    state: str = "idle"
    why: str = ""
    rounds: NonNegativeInt | None = None
    neighbours: dict[str, str] = {}
    doubts: NonNegativeInt = 0
    skipped: NonNegativeInt = 0


def read_recorded(folder: Path) -> Recorded:
    """What a node has last recorded about itself."""
    path = folder / STATE
    try:
        return Recorded.model_validate_json(path.read_bytes()) if path.exists() else Recorded()
    except ValidationError as error:
        fix = f"delete it, and the node continues from its last checkpoint: fedloom peers start {folder}"
        raise DataError(f"{path}: is damaged; {fix}") from error


def read_row_counts(folder: Path, count: int) -> Rows:
    """The numbers of rows with which a run began; empty before."""
    path = folder / POPULATION
    if not path.exists():
        return {}
    try:
        found = rows_in(dict(enumerate(json.loads(path.read_bytes()))), count)
        if len(found) == count:
            return found
        why = f"it has {len(found)} of {count} nodes"
    except (ValueError, TypeError, MessageError) as error:
        why = str(error)
    fix = "delete it, and the next start waits until all nodes are connected, which know its content"
    raise DataError(f"{path}: is damaged ({why}); {fix}")


def rows_in(given: Any, count: int) -> Rows:
    """The numbers of rows that were read or received; refused if they cannot be."""
    try:
        found = {int(k): (int(train), int(test)) for k, (train, test) in dict(given).items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise MessageError("'rows' should have two whole numbers for each node") from error
    if any(not 0 <= k < count or min(pair) < 0 or max(pair) >= 1 << 40 for k, pair in found.items()):
        raise MessageError("'rows' has a node that does not exist, or a number that cannot be")
    return found


def read_node_rounds(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a node's log of rounds; one that a crash cut short is left out."""
    path = folder / NODE_ROUNDS
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], 1):
        try:
            found: dict[str, Any] = json.loads(line)
            found["round"], found["down"]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}: line {number} is damaged; delete this line") from error
        yield found
