"""Ranks for tests: processes that run many small experiments, because starting Python takes seconds."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

import fedloom
from fedloom.core.errors import FedloomError
from fedloom.data.arrays import Arrays
from fedloom.runs import launch
from support import warm

Job = dict[str, Any]  # the arguments of fedloom.run, ``shape`` of an example, and whether a run folder is ``written``

CLIENTS = 7


class Normed(nn.Module):
    """A small net with running statistics."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * (shape[1] - 2) * (shape[2] - 2), classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def world(shape: tuple[int, ...]) -> Arrays:
    """Seven clients with 5 to 41 rows of three overlapping classes, and 40 rows for the common test."""
    rng, sizes = np.random.default_rng(3), (9, 41, 5, 26, 13, 33, 18)
    client = np.repeat(np.arange(CLIENTS), sizes)
    n = len(client) + 40
    y = rng.integers(0, 3, n)
    if len(shape) == 3:
        x: Any = (rng.integers(0, 128, (n, *shape)) + 40 * y[:, None, None, None]).astype(np.uint8)
    else:
        x = (rng.normal(size=(n, *shape)) + 2 * np.eye(3, *shape)[y]).astype(np.float32)
    owner = np.concatenate([client, np.zeros(40, dtype=np.int64)])
    test = np.arange(n) >= len(client)
    return Arrays("crew", x, y, test, ("a", "b", "c"), (0.4,), (0.3,), client=owner)


def done(job: Job, folder: Path) -> Job:
    """All numbers of one experiment, and what rank 0 wrote of it, or how it failed."""
    settings = {key: value for key, value in job.items() if key not in ("shape", "written")}
    out = folder if job.get("written") else None
    try:
        history = fedloom.run(data=world(tuple(job.get("shape", (5,)))), out=out, **settings)
    except FedloomError as error:
        return {"error": str(error)}
    model = [] if history.model is None else [x.double().tolist() for x in history.model.state_dict().values()]
    wrote = sorted(folder.glob("*.safetensors")) if os.environ.get("RANK", "0") == "0" else []
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in wrote}
    return {"records": history.records, "model": model, "files": files}


def together(size: int, jobs: dict[str, Job], folder: Path) -> list[dict[str, Job]]:
    """What each of so many ranks makes of these experiments."""
    folder.mkdir(parents=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    meeting = launch.meeting()
    crew = []
    for rank in range(size):
        env = launch.rank_environment(rank, size, meeting)
        crew.append(warm.Popen([sys.executable, "-m", "support.crew", str(folder)], env=env))
    try:
        codes = [process.wait(timeout=600) for process in crew]
        assert not meeting.exists()  # the last to leave takes it along
    finally:
        for process in crew:
            process.kill()
        shutil.rmtree(meeting, ignore_errors=True)
    assert codes == [0] * size
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)]


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    found = {name: done(job, folder / name) for name, job in jobs.items()}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
