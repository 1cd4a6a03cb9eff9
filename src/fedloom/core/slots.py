"""Safetensors files that are written row by row, so that the rows of very many clients need not be in memory at once.

The file is ordinary: a header with the offset of each tensor, then the tensors. Their sizes are known in advance, so
each row can be written at its offset before the rows around it exist.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fedloom.core import disk

_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8", torch.bool: "BOOL"}


class Slots:
    """A safetensors file under construction."""

    def __init__(self, file: int, places: Mapping[str, tuple[int, int]]) -> None:
        self._file, self._places = file, places  # where each tensor begins, and the bytes of a row of it

    def put(self, name: str, row: int, values: Tensor) -> None:
        """Write consecutive rows of a tensor, the first of them at ``row``."""
        start, width = self._places[name]
        plain = values.detach().cpu().contiguous()
        disk.write_at(self._file, plain.reshape(-1).view(torch.uint8).numpy().tobytes(), start + row * width)


@contextmanager
def slots(path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], notes: str) -> Iterator[Slots]:
    """A safetensors file with tensors of these types and shapes, written atomically at the end of the block."""
    header: dict[str, object] = {"__metadata__": {"fedloom": notes}}
    places, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        places[name] = (at, size // shape[0] if shape and shape[0] else size)
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    part = disk.new_part(path)
    file = disk.open_own(part, os.O_RDWR)
    try:
        os.pwrite(file, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(file, first + at)
        yield Slots(file, {name: (first + start, width) for name, (start, width) in places.items()})
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(part, path)
