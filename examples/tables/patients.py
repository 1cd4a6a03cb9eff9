"""Write patients.csv: six hospitals, missing values, words, a date, patient numbers, and one patient in ten who is ill.

    python examples/tables/patients.py [FOLDER]

Every row is drawn at random, always the same. In new_patients.csv the diagnosis is not known.
"""

from __future__ import annotations

import csv
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np

HOSPITALS = ("Hospital A", "Hospital B", "Hospital C", "Hospital D", "Hospital E", "Hospital F")
HEADER = ("patient", "hospital", "admitted", "sex", "smoker", "age", "pressure", "marker", "ill")


def patients(count: int, seed: int) -> list[dict[str, Any]]:
    """So many rows; hospitals differ in size, in the age of their patients and in how they measure the marker."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        where = int(rng.choice(6, p=(0.3, 0.2, 0.2, 0.1, 0.1, 0.1)))
        smoker = rng.choice(("never", "former", "current"), p=(0.5, 0.3, 0.2))
        age, sex = rng.normal(50 + 4 * where, 12), rng.choice(("f", "m"))
        pressure, marker = rng.normal(90 + 0.6 * age, 12), rng.normal()
        risk = 0.06 * (age - 60) + 1.6 * marker * (1 if where % 2 else 0.6) + 1.2 * (smoker == "current")
        ill = rng.random() < 1 / (1 + np.exp(3.1 - risk))
        rows.append(
            {
                "patient": 100_000 + 7 * number,
                "hospital": HOSPITALS[where],
                "admitted": date(2023, 1, 1) + timedelta(days=int(rng.integers(0, 700))),
                "sex": sex,
                "smoker": "" if rng.random() < 0.08 else smoker,
                "age": round(age),
                "pressure": "" if rng.random() < 0.12 else round(pressure),
                "marker": "NA" if rng.random() < 0.1 else f"{(1 + 0.3 * where) * (5 + marker):.2f}",
                "ill": "yes" if ill else "no",
            }
        )
    return rows


def write(path: Path, rows: list[dict[str, Any]], header: tuple[str, ...]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, header, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "patients.csv", patients(3000, seed=0), HEADER)
    write(folder / "new_patients.csv", patients(200, seed=1), HEADER[:-1])


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
