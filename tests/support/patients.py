"""The table of examples/tables/patients.py, smaller."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def patients(folder: Path, count: int = 240) -> Path:
    """Write patients.csv, and new.csv without diagnoses; returns where the first is."""
    spec = importlib.util.spec_from_file_location("patients", ROOT / "examples" / "tables" / "patients.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.write(folder / "patients.csv", made.patients(count, 0), made.HEADER)
    made.write(folder / "new.csv", made.patients(30, 1), made.HEADER[:-1])
    return folder / "patients.csv"
