"""The messages of a secure sum: what a node seals, its masked upload, its word for others, and shares to remove masks.

seal       server: the members                node: Sealed
train      server: Order, and all boxes       node: its weighted upload under masks, and how much work it did
agree      server: whose uploads arrived     node: a code for each other node that shows it what was said here
unmask     server: all codes                 node: one share of each node's seeds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.core import tree
from fedloom.deploy.messages import Envelope, MessageError, most_bytes, named, packed, tree_of
from fedloom.deploy.secure_sum import BOX, CODE, PUBLIC, SEED, Parties, Sealed, Session, Words
from fedloom.deploy.talk import expected
from fedloom.engine.fleet import Order
from fedloom.engine.local import Outcome
from fedloom.engine.state import Experiment
from fedloom.engine.uploads import example_outcome


class Masked(NamedTuple):
    """What the server has of one node's upload."""

    words: Words
    steps: Tensor
    gradients: Tensor


# -- sealing --------------------------------------------------------------------------------------
def packed_sealed(parties: Parties, sealed: Sealed, facts: dict[str, Any]) -> bytes:
    boxes = [sealed.boxes.get(member, bytes(BOX)) for member in parties.members]
    parts = {"boxes": _bytes(boxes), "public": _bytes([sealed.public]), "commitments": _bytes(sealed.commitments)}
    return packed(Envelope("sealed", facts, parts))


def sealed_of(parties: Parties, client: int, data: bytes) -> tuple[Sealed, dict[str, Any]]:
    count = len(parties.members)
    form = {"boxes": (count, BOX), "public": (1, PUBLIC), "commitments": (2, 32)}
    message = expected(data, "sealed", most_bytes() + count * BOX)
    boxes, public, commitments = (_rows(message.tensors, name, shape) for name, shape in form.items())
    others = {member: box for member, box in zip(parties.members, boxes, strict=True) if member != client}
    return Sealed(public[0], (commitments[0], commitments[1]), others), message.facts


def table_of_all(parties: Parties, given: Mapping[int, Mapping[int, bytes]], size: int) -> Tensor:
    """What members have for each other, by sender and receiver.  ``[S, K, size]``"""
    rows = [given[one].get(member, bytes(size)) for one in sorted(given) for member in parties.members]
    return _bytes(rows).view(len(given), len(parties.members), size)


def column_for(parties: Parties, client: int, message: Envelope, names: str, table: str, size: int) -> dict[int, bytes]:
    """What others have for one node in such a table of a message, by sender; ``names``: the fact that lists senders."""
    senders, found = message.facts.get(names), message.tensors.get(table)
    members = parties.members
    if not isinstance(senders, list) or not set(senders) <= set(members) or len(set(senders)) != len(senders):
        raise MessageError(f"'{names}' should name nodes of this sum, each of them once")
    if client not in senders or len(senders) < parties.threshold:
        what = f"'{names}' should name {parties.threshold} nodes or more, this one included (got {senders})"
        raise MessageError(f"{what}: with fewer, the server could remove all masks")
    if found is None or found.shape != (len(senders), len(members), size) or found.dtype != torch.uint8:
        raise MessageError(f"'{table}' should have {size} bytes for each pair of nodes")
    mine = members.index(client)
    return {one: found[at, mine].numpy().tobytes() for at, one in enumerate(senders) if one != client}


# -- uploads --------------------------------------------------------------------------------------
def packed_masked(
    exp: Experiment, outcome: Outcome, session: Session, boxes: Mapping[int, bytes], facts: dict[str, Any]
) -> bytes:
    """One client's upload and statistics, times their weight, and the weight, under masks."""
    if not bool(tree.finite_rows((outcome.states, outcome.uploads, outcome.weights), 1)):
        raise MessageError("its numbers are not finite")
    row = tree.take(outcome, 0)
    weight = row.weights.double().reshape(1)
    leaves = tree.leaves((row.uploads, exp.travelling(row.buffers)))
    vector = torch.cat([*(leaf.double().reshape(-1) * weight for leaf in leaves), weight])
    words = session.masked(vector.cpu().numpy(), boxes)
    work = named("work", (row.steps, row.gradients))
    return packed(Envelope("masked", facts, {"masked": torch.from_numpy(words.view(np.int64)), **work}))


def masked_of(exp: Experiment, order: Order, data: bytes) -> tuple[Masked, dict[str, Any]]:
    like = example_outcome(exp, order)
    size = _numbers(exp, order, like)
    message = expected(data, "masked", most_bytes() + 8 * size)
    words = message.tensors.get("masked")
    if words is None or words.shape != (size,) or words.dtype != torch.int64:
        raise MessageError(f"'masked' should be [{size}] int64")
    steps, gradients = tree_of((like.steps, like.gradients), "work", message.tensors)
    return Masked(words.numpy().view(np.uint64), steps, gradients), message.facts


def _numbers(exp: Experiment, order: Order, like: Outcome) -> int:
    """How many numbers a node masks: its upload, its statistics, and their weight."""
    return sum(leaf.numel() for leaf in tree.leaves((like.uploads, exp.travelling(order.buffers)))) + 1


def secure_limit(exp: Experiment, order: Order, members: int) -> int:
    """How many bytes any answer of a node in a secure sum may have."""
    return most_bytes() + 8 * _numbers(exp, order, example_outcome(exp, order)) + members * BOX


def outcomes_of(
    exp: Experiment, order: Order, total: NDArray[np.float64], masked: Mapping[int, Masked]
) -> dict[int, Outcome]:
    """What the server knows of each node whose upload arrived: the mean upload, and an equal share of the weight."""
    like = example_outcome(exp, order)
    numbers = torch.from_numpy(total).to(exp.device)
    weight = numbers[-1]
    if not float(weight) > 0:
        raise MessageError(f"the weights of all nodes sum up to {float(weight):g}")
    parts = (like.uploads, exp.travelling(order.buffers))
    sizes = [leaf.numel() for leaf in tree.leaves(parts)]
    means = torch.split(numbers[:-1] / weight, sizes)
    leaves = [mean.view(leaf.shape) for mean, leaf in zip(means, tree.leaves(parts), strict=True)]
    uploads, buffers = tree.unflatten(parts, leaves)
    buffers = buffers if isinstance(buffers, Tensor) else order.buffers
    each = weight / len(masked)
    rows = {
        client: Outcome(uploads, torch.zeros(()), each, buffers, found.steps, (), (), (), found.gradients)
        for client, found in masked.items()
    }
    return {client: tree.tmap(lambda x: x[None], row) for client, row in rows.items()}


# -- agreement ------------------------------------------------------------------------------------
def packed_codes(parties: Parties, codes: Mapping[int, bytes], facts: dict[str, Any]) -> bytes:
    rows = [codes.get(member, bytes(CODE)) for member in parties.members]
    return packed(Envelope("agreed", facts, {"codes": _bytes(rows)}))


def codes_of(parties: Parties, data: bytes) -> tuple[dict[int, bytes], dict[str, Any]]:
    message = expected(data, "agreed", most_bytes() + len(parties.members) * CODE)
    rows = _rows(message.tensors, "codes", (len(parties.members), CODE))
    return dict(zip(parties.members, rows, strict=True)), message.facts


# -- shares ---------------------------------------------------------------------------------------
def packed_shares(shares: Mapping[int, bytes], facts: dict[str, Any]) -> bytes:
    return packed(
        Envelope("unmasked", facts | {"of": sorted(shares)}, {"shares": _bytes([shares[k] for k in sorted(shares)])})
    )


def shares_of(sealed: Sequence[int], data: bytes) -> tuple[dict[int, bytes], dict[str, Any]]:
    message = expected(data, "unmasked", most_bytes() + len(sealed) * SEED)
    if message.facts.get("of") != sorted(sealed):
        raise MessageError("should have a share of each node that has sealed its seeds")
    rows = _rows(message.tensors, "shares", (len(sealed), SEED))
    return dict(zip(sorted(sealed), rows, strict=True)), message.facts


def _bytes(rows: Sequence[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(rows), -1)


def _rows(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, int]) -> list[bytes]:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape or found.dtype != torch.uint8:
        raise MessageError(f"'{name}' should be bytes of the shape {list(shape)}")
    return [row.numpy().tobytes() for row in found]
