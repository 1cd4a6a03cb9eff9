"""The kernels of lanes as machine code for an H200, without one: they compile, fit, and use the matrix units."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.core.lanes import ops
from fedloom.core.lanes.ops import Geometry, Tile

# Lanes, images, channels, outputs, sides, kernel, stride, padding.
SHAPES = {
    "cnn_fedavg on MNIST": (10, 10, 1, 32, (28, 28), 5, 1, 0),
    "its second layer": (10, 10, 32, 64, (12, 12), 5, 1, 0),
    "ResNet-18": (10, 64, 128, 256, (16, 16), 3, 2, 1),
}


def runs(
    shape: tuple[int, int, int, int, tuple[int, int], int, int, int], dtype: torch.dtype
) -> Iterator[tuple[str, Tile, Callable[[Tile], Any]]]:
    """Every kernel of a convolution with some tiles that are tried for it."""
    from fedloom.core.lanes import kernels

    lanes, images, channels, outputs, sides, kernel, stride, padding = shape
    how = Geometry((kernel, kernel), (stride, stride), (padding, padding), False)

    def room(*last: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(lanes, *last, dtype=kind)

    windows = (images, *how.windows(sides), outputs)
    x, g, w = (
        room(images, *sides, channels),
        room(images, *how.out(sides), outputs),
        room(outputs, *how.kernel, channels),
    )
    turned, index, bias = room(channels, *how.kernel, outputs), room(*windows, kind=torch.int8), room(outputs)
    work: dict[str, tuple[tuple[torch.Tensor, ...], int, Callable[[Tile], Any]]] = {
        "forward": ((x, w), outputs, lambda tile: kernels.forward(x, w, how, tile)),
        "inputs": ((g, turned), channels, lambda tile: kernels.inputs(g, turned, how, sides, tile)),
        "weights": ((x, g), outputs, lambda tile: kernels.weights(x, g, how, tile)),
    }
    if not padding:
        of = room(*windows)
        work["pooled"] = ((x, w, bias), outputs, lambda tile: kernels.pooled(x, w, bias, how, tile))
        work["pooled_weights"] = (
            (x, of, index), outputs, lambda tile: kernels.pooled_weights(x, of, index, how, tile)
        )  # fmt: skip
    for what, (given, columns, run) in work.items():
        tiles = {tile[:5]: tile for tile in ops._tiles(what, given, how, columns)}  # one number of parts of each
        for tile in list(tiles.values())[::2]:
            yield what, tile, run


def report() -> None:
    """A line for each kernel: what it is, whether it fits, whether it uses the matrix units, bytes that spilled."""
    from fedloom.core.lanes import kernels
    from support.hopper import SHARED, compiled_for_hopper

    for name, shape in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            for what, tile, run in runs(shape, dtype):
                with compiled_for_hopper() as made:
                    run(tile)
                for each in made:
                    fits = each.shared <= SHARED
                    print(name, what, dtype, each.name, fits, each.has_products, each.stack, sep=";")
    with compiled_for_hopper() as made:
        y = torch.empty(2, 3, 7, 7, 5)
        best, index = kernels.window_maxima(y, torch.empty(2, 5))
        kernels.spread_windows(best, index, (7, 7))
    for each in made:
        print("windows", "", "", each.name, True, True, each.stack, sep=";")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton, the kernels' compiler, is not installed")
def test_every_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    code = "import test_lane_kernels_compile; test_lane_kernels_compile.report()"
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1]), *sys.path]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found = [line.split(";") for line in done.stdout.splitlines()]
    assert {line[3] for line in found} == {"_taps", "_pooled_taps", "_pixels", "_parts", "_largest", "_unpooled"}
    products = [line for line in found if line[3] in ("_taps", "_pooled_taps", "_pixels")]
    assert [line for line in products if line[5] != "True"] == []  # all of them use the matrix units
    assert [line for line in found if line[4] != "True"] == []  # all of them fit
    for key in {(line[0], line[1], line[2]) for line in products}:  # of each, some tile stays in registers
        assert "0" in {line[6] for line in products if (line[0], line[1], line[2]) == key}, key
