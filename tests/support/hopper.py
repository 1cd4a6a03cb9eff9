"""Triton's compiler for a GPU that is not there: kernels become machine code for an H200, and are not started.

    with compiled_for_hopper() as kernels: ...

It replaces Triton's driver for the rest of the process, so use it in a process of its own.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

SHARED = 232_448  # bytes of shared memory that one program may have on an H200


class Kernel(NamedTuple):
    """What the compiler says of one."""

    name: str
    shared: int  # bytes
    registers: int  # of a thread
    stack: int  # bytes of a thread that did not fit into registers
    has_products: bool  # by the matrix units


class _Driver:
    """What the compiler asks about the device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def compiled_for_hopper() -> Iterator[list[Kernel]]:
    """The kernels that are called inside, compiled; what they would write is not written."""
    found: list[Kernel] = []
    start = jit.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, **more: Any) -> Any:
        made = start(self, *args, grid=grid, **(more | {"warmup": True}))
        found.append(_described(self.__name__, made))
        return made

    driver.set_active(_Driver())
    jit.JITFunction.run = compile_only
    try:
        yield found
    finally:
        jit.JITFunction.run = start


def _described(name: str, made: Any) -> Kernel:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _said(str(tools / "cuobjdump"), "--dump-resource-usage", file.name)
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK"))
    return Kernel(name, made.metadata.shared, registers, stack, "mma" in made.asm["ptx"])


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
