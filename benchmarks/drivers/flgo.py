"""FLGo: its FedAvg and its own local training, on a benchmark that its generator makes from the shared data.

    python -m benchmarks.drivers.flgo FOLDER [--rounds 3] [--threads 1] [--processes 1]

Unless told otherwise it lets PyTorch have one thread. With ``--processes`` above 1 so many clients are trained at once,
each by a thread of Python (``parallel_type`` t).
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import flgo
import flgo.algorithm.fedavg
from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
from flgo.benchmark.toolkits.partition import IIDPartitioner

from benchmarks.drivers.work import Count, Task, asked, inside, tell

CONFIG = """
from pathlib import Path
from torch.utils.data import TensorDataset
from benchmarks.drivers.work import CNN64, everything

train_data = TensorDataset(*everything(Path({folder!r})))
get_model = CNN64
"""


def items(self: Any, indices: list[int]) -> list[Any]:
    """What a current PyTorch asks of every subset that has a ``__getitem__`` of its own, in the words of its error."""
    return [self[i] for i in indices]


def main(task: Task) -> None:
    work = task.work
    assert not task.bf16, "it has no setting for it"
    FromDatasetPipe.TaskDataset.__getitems__ = items
    option = {
        "gpu": [],
        "num_rounds": 1 + task.rounds,
        "num_epochs": 1,
        "batch_size": work.batch,
        "learning_rate": work.lr,
        "proportion": work.cohort / work.clients,
        "sample": "uniform",
        "aggregate": "other",
        "train_holdout": 0.0,
        "eval_interval": -1,
        "num_workers": 0,
        "num_parallels": task.processes,
        "parallel_type": "t",
        "torch_num_threads": task.threads or 1,  # 1 is its own choice
        "no_log_console": True,
        "no_tqdm": True,
    }
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as scratch, inside(Path(scratch)):
        config = Path("config.py")
        config.write_text(CONFIG.format(folder=str(task.folder)))
        sys.path.insert(0, scratch)
        made: Any = importlib.import_module(flgo.gen_benchmark_from_file("shared", str(config)))
        made.visualize = None  # no picture of the partition
        flgo.gen_task_by_(made, IIDPartitioner(num_clients=work.clients), "task")
        server = flgo.init("task", flgo.algorithm.fedavg, option)
        iterate = server.iterate

        def round_() -> Any:
            began = time.perf_counter()
            done = iterate()
            seconds.append(time.perf_counter() - began)
            if len(seconds) == 1:
                Count.steps = Count.examples = 0
            return done

        server.iterate = round_
        server.run()
    settings = {
        **{name: value for name, value in option.items() if name != "num_rounds"},
        "local_training": "its own, with a DataLoader over a TensorDataset",
        "data": "float32 in memory, normalised beforehand",
        "patched": "__getitems__ of its TaskDataset, without which a current PyTorch refuses it",
    }
    tell(server.model, seconds[1:], ("flgo",), settings)


if __name__ == "__main__":
    given = asked(__doc__)
    sys.argv[1:] = []  # it reads the command line by itself
    main(given)
