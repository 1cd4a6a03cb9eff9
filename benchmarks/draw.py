"""Pictures of what the other benchmarks measured, for the documentation.

    python -m benchmarks.draw

Reads ``benchmarks/results`` and writes ``docs/images/performance-*.png``; what was not measured is not drawn.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

from benchmarks.machine import RESULTS

IMAGES = Path(__file__).parents[1] / "docs" / "images"
INK, BEST, REST = "#222222", "#1b6ca8", "#9aa5b1"
WORKS = {
    "fedalr": "FedALR's round\n20 clients, cnn64",
    "ragged": "Dirichlet 0.1\n20 clients, cnn64",
    "pfl": "pfl's round\n50 clients, batch 10",
}


def results(name: str) -> Any:
    """What a benchmark found, or None."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["results"] if path.is_file() else None


def bars(ax: Any, names: list[str], values: list[float], own: set[str], unit: str) -> None:
    """Horizontal bars, the first on top, each with its value."""
    places = range(len(names))
    ax.barh(places, values, color=[BEST if name in own else REST for name in names], height=0.62)
    for place, value in zip(places, values, strict=True):
        ax.text(value + 0.01 * max(values), place, f"{value:.3g} {unit}", va="center", fontsize=9, color=INK)
    ax.set_yticks(list(places), names, fontsize=9)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.18 * max(values))
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.tick_params(length=0, labelbottom=False)


def floors(found: Any) -> None:
    """Rounds on a GPU, against one central model on the same examples."""
    works = [work for work in WORKS if work in found]
    figure, axes = plt.subplots(1, len(works), figsize=(3.1 * len(works), 2.7), constrained_layout=True)
    for ax, work in zip(axes, works, strict=True):
        plain = {"graph": "recorded", "central": "central, eager", "best": "central, compiled"}
        later = found.get(f"{work}/compiled", {"seconds": {}})  # measured by itself since
        taken = found[work]["seconds"] | later["seconds"]
        words = {name: name.split("/") for name in taken}
        named = {name: f"{word}, {plain.get(how, how)}" for name, (word, how) in words.items()}
        seconds = {named[name]: 1000 * value for name, value in taken.items()}
        own = {named[name] for name, (_, how) in words.items() if how == "compiled"}
        bars(ax, list(seconds), list(seconds.values()), own, "ms")
        ax.set_title(WORKS[work], fontsize=10, loc="left")
    figure.suptitle("One round on an H200; central: one model on the same examples", fontsize=11, x=0.01, ha="left")
    figure.savefig(IMAGES / "performance-gpu.png", dpi=120)
    plt.close(figure)


def peers(found: Any) -> None:
    """A round of fedloom and of others, on two cores."""
    rows = {name: row["seconds"] for name, row in found["rows"].items() if "seconds" in row}
    rows = dict(sorted(rows.items(), key=lambda row: row[1]))
    figure, ax = plt.subplots(figsize=(8, 0.6 + 0.36 * len(rows)), constrained_layout=True)
    bars(ax, list(rows), list(rows.values()), {name for name in rows if name.startswith("fedloom")}, "s")
    ax.set_title("FedALR's round on two cores: 20 of 100 clients, cnn64, batch 64", fontsize=11, loc="left")
    figure.savefig(IMAGES / "performance-peers.png", dpi=120)
    plt.close(figure)


def clients(found: Any) -> None:
    """Rounds per second and memory against the number of clients."""
    figure, (speed, memory) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    kinds = sorted({(row["algorithm"], row["cohort"]) for row in found}, key=lambda kind: (kind[1], kind[0]))
    for (algorithm, cohort), style in zip(kinds, ("o-", "s-", "o--", "s--"), strict=False):
        rows = [row for row in found if (row["algorithm"], row["cohort"]) == (algorithm, cohort)]
        across = [row["clients"] for row in rows]
        label = f"{'FedAvg' if algorithm == 'fedavg' else 'a model for each, on disk'}, {cohort:,} in a round"
        speed.plot(across, [row["clients_per_second"] for row in rows], style, label=label, markersize=4)
        memory.plot(across, [row["peak_memory_mb"] / 1000 for row in rows], style, markersize=4)
    data = {row["clients"]: row["data_mb"] / 1000 for row in found}
    memory.plot(list(data), list(data.values()), ":", color=REST, label="the data alone")
    speed.set_title("clients trained in a second", fontsize=10, loc="left")
    memory.set_title("peak memory, GB", fontsize=10, loc="left")
    for ax in (speed, memory):
        ax.set_xscale("log")
        ax.set_ylim(0)
        ax.set_xlabel("clients", fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
    speed.yaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(IMAGES / "performance-clients.png", dpi=120)
    plt.close(figure)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for draw, name in ((floors, "lanes-cuda"), (peers, "peers-cpu"), (clients, "clients-cpu")):
        found = results(name)
        if found is not None:
            draw(found)
            print(IMAGES / f"performance-{ {'floors': 'gpu'}.get(draw.__name__, draw.__name__) }.png")


if __name__ == "__main__":
    main()
