"""Messages between a server and its nodes: named arrays as raw bytes, and a small table of plain values.

A message is a safetensors file: a header of names, shapes and types, then the bytes of the arrays. Nothing in it can
run. What arrives is checked before it is used: its size, the names, shapes and types of its arrays, and that each
number is finite.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fedloom.core import tree
from fedloom.core.errors import FedloomError

T = TypeVar("T")

HEADER = 1 << 20  # bytes that the header of a message may take
SEALED_BYTES = 92  # of what one node seals for another in a secure sum
_TABLE = "fedloom"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"} | {
    f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)
}


class MessageError(FedloomError):
    """A message that is not what it should be."""


class Envelope(NamedTuple):
    """What one side sends to the other."""

    kind: str
    facts: dict[str, Any]  # plain values
    tensors: dict[str, Tensor]


def packed(message: Envelope) -> bytes:
    """A message as bytes."""
    table = json.dumps({"kind": message.kind, **message.facts})
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, x in message.tensors.items():
        own = x.detach().cpu().contiguous()
        at = own.untyped_storage().data_ptr()
        shares = at in seen or own.untyped_storage().nbytes() != own.nbytes  # which safetensors refuses
        seen.add(at)
        plain[name] = own.clone() if shares else own
    return save(plain, {_TABLE: table})


def unpacked(data: bytes, limit: int) -> Envelope:
    """The message that these bytes are; refused where they are more than ``limit``, or not a message."""
    if len(data) > limit:
        raise MessageError(f"has {len(data):,} bytes where {limit:,} are expected at most")
    try:
        table = json.loads(_header(data)["__metadata__"][_TABLE])
        return Envelope(str(table.pop("kind")), table, load(data))
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MessageError(f"is not a fedloom message ({type(error).__name__})") from error


def _header(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:8], "little")
    found: dict[str, Any] = json.loads(data[8 : 8 + min(size, HEADER)])
    return found


def outline(data: bytes) -> tuple[str, dict[str, Any], dict[str, tuple[list[int], str]]]:
    """Kind, facts, and the shape and type of each array of a message that was packed here; no array is copied."""
    header = _header(data)
    table = json.loads(header.pop("__metadata__")[_TABLE])
    arrays = {name: (list(one["shape"]), _DTYPES.get(one["dtype"], one["dtype"])) for name, one in header.items()}
    return str(table.pop("kind")), table, dict(sorted(arrays.items()))


def named(prefix: str, value: Any) -> dict[str, Tensor]:
    """The arrays of a tree under names that begin with ``prefix``."""
    return {f"{prefix}.{name}": x for name, x in tree.named_leaves(value)}


def tree_of(like: T, prefix: str, tensors: Mapping[str, Tensor], *, shapes: bool = True) -> T:
    """The tree that arrived under ``prefix``; it must have the form of ``like``, and be finite.

    ``shapes``: False where only the number of dimensions is known.
    """
    expected = named(prefix, like)
    found = {name: x for name, x in tensors.items() if name == prefix or name.startswith(f"{prefix}.")}
    if set(found) != set(expected):
        lacks, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        raise MessageError(f"lacks {_words(lacks)}; unexpected {_words(extra)}")
    for name, x in expected.items():
        fits = found[name].shape == x.shape or (not shapes and found[name].dim() == x.dim())
        if not fits or found[name].dtype != x.dtype:
            raise MessageError(f"'{name}' should be {_form(x)} (got {_form(found[name])})")
        if not bool(tree.finite_rows(found[name][None], 1)):
            raise MessageError(f"'{name}' has numbers that are not finite")
    leaves = [found[name].to(x.device) for name, x in expected.items()]
    return tree.unflatten(like, leaves)


def most_bytes(*parts: Any) -> int:
    """How many bytes a message of these trees may take."""
    return HEADER + sum(tree.nbytes(part) for part in parts)


def _form(x: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _words(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + ("" if len(names) < 4 else ", ...") if names else "nothing"
