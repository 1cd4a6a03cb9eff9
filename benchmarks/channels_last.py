"""A step and an evaluation of one net on a CPU: as the net is written, and channels last with pooling before the ReLU.

    python -m benchmarks.channels_last [--repeats 15]

``plain`` is the net on images with their channels first, ``inputs`` the same net on images that are channels last, and
``fedloom`` what the executor ``loop`` and the servers that learn use. One thread; processor time, in turns, so that
other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from statistics import median

import torch

from benchmarks.machine import write
from fedloom.core.task import Batch, Task
from fedloom.runs.settings import parse

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
NETS = [
    *[(kind, MNIST, batch) for kind, batch in (("lenet5", 64), ("cnn_fedavg", 10), ("cnn_law", 64), ("cnn64", 64))],
    *[(kind, CIFAR, batch) for kind, batch in (("lenet5", 64), ("cnn_fedavg", 10), ("cnn64", 64), ("resnet20", 64))],
]
TEST = 256  # rows of one forward pass in an evaluation
LEAST = 0.1  # seconds of a turn


def random_batch(shape: tuple[int, ...], count: int, task: Task) -> Batch:
    one = torch.ones(())
    x, y = torch.randn(count, *shape), torch.randint(0, 10, (count,))
    return Batch(x, y, torch.ones(count), one.long(), one, one, task.buffers0)


def turned(batch: Batch) -> Batch:
    return batch._replace(x=batch.x.contiguous(memory_format=torch.channels_last))


def milliseconds(work: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Processor time of one call of each, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for run in work.values():
        run()
    for _ in range(repeats):
        for name, run in work.items():
            began, calls = time.process_time(), 0
            while time.process_time() - began < LEAST:
                run()
                calls += 1
            taken[name].append((time.process_time() - began) / calls)
    return {name: round(1e3 * median(each), 3) for name, each in taken.items()}


def measured(kind: str, shape: tuple[int, ...], size: int, repeats: int) -> dict[str, dict[str, float]]:
    plain = Task(parse({"model": {"kind": kind}}).model.build(shape, 10))
    own = plain.to(torch.device("cpu"), lanes=False)
    batch, test = random_batch(shape, size, plain), random_batch(shape, TEST, plain)

    def predict(task: Task, b: Batch) -> torch.Tensor:
        with torch.no_grad():
            return task.apply(task.w0, b.x, b.buffers)

    step = {
        "plain": lambda: plain.grad(plain.w0, batch),
        "inputs": lambda: plain.grad(plain.w0, turned(batch)),
        "fedloom": lambda: own.grad(own.w0, batch),
    }
    evaluation = {
        "plain": lambda: predict(plain, test),
        "inputs": lambda: predict(plain, turned(test)),
        "fedloom": lambda: predict(own, test),
    }
    return {"step": milliseconds(step, repeats), "evaluation": milliseconds(evaluation, repeats)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for kind, shape, size in NETS:
        name = f"{kind} {'x'.join(map(str, shape))}, batch {size}"
        found[name] = measured(kind, shape, size, chosen.repeats)
        print(name, found[name], flush=True)
    print(write("channels_last", found))


if __name__ == "__main__":
    main()
