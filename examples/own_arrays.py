"""FedAvg, fine-tuning and no communication on the same arrays, compared by the worst tenth of the clients.

python examples/own_arrays.py
"""

from __future__ import annotations

import numpy as np

import fedloom
from fedloom.data.sources import from_arrays


def main(rounds: int = 20) -> dict[str, float]:
    """Twelve hospitals, each with a preference for one of three diagnoses."""
    rng = np.random.default_rng(0)
    hospital = rng.integers(0, 12, 1200)
    y = np.where(rng.random(1200) < 0.7, hospital % 3, rng.integers(0, 3, 1200))
    x = rng.normal(size=(1200, 8)) + 1.5 * np.eye(3, 8)[y]
    data = from_arrays(x, y, client=hospital, name="patients")
    found = {}
    for method in ("fedavg", "fedavg_ft", "local_only"):
        history = fedloom.run(method, data=data, rounds=rounds, partition={"kind": "natural"}, evaluate={"every": 5})
        name = next(n for n in history.summary if n.startswith("personal/") and n.endswith("accuracy_worst10"))
        found[method] = history.summary[name].last
        print(f"{method:12} {name} {found[method]:.3f}")
    return found


if __name__ == "__main__":
    main()
