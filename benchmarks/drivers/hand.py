"""A loop over clients as people write it in plain PyTorch: a copy of the net and an optimiser for each client.

python -m benchmarks.drivers.hand FOLDER [--rounds 3]
"""

from __future__ import annotations

import copy

import torch

from benchmarks.drivers.work import CNN64, Task, asked, epoch, tell, timed


def main(task: Task) -> None:
    work, net = task.work, CNN64().train()
    x, y = task.everything()

    def round_() -> None:
        total = {name: torch.zeros_like(p) for name, p in net.state_dict().items()}
        for client in torch.randperm(work.clients)[: work.cohort].tolist():
            local, rows = copy.deepcopy(net), task.rows(client)
            epoch(local, x[rows], y[rows], task)
            for name, p in local.state_dict().items():
                total[name] += p / work.cohort
        net.load_state_dict(total)

    seconds = timed(round_, task.rounds)
    tell(net, seconds, (), {"bf16": task.bf16, "data": "float32 in memory, normalised beforehand"})


if __name__ == "__main__":
    main(asked(__doc__))
