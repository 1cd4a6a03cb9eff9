"""A notebook shows a bar that moves, in a real kernel."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_run_shows_a_bar_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no Jupyter kernel here: pip install ipykernel nbclient ipywidgets"
    nbclient = pytest.importorskip("nbclient", reason=reason)
    nbformat = pytest.importorskip("nbformat", reason=reason)
    for module in ("ipykernel", "ipywidgets"):
        pytest.importorskip(module, reason=reason)
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    code = "import fedloom\nfedloom.run(rounds=3, partition={'clients': 4}, model='logistic')"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    patient = {"timeout": 600, "startup_timeout": 600}
    nbclient.NotebookClient(
        book, **patient, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    (bar,) = [
        each for each in book.cells[0].outputs if "application/vnd.jupyter.widget-view+json" in each.get("data", {})
    ]
    model = bar["data"]["application/vnd.jupyter.widget-view+json"]["model_id"]
    drawn = json.dumps(book.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"][model])
    assert "/3 " in drawn
    assert "round" in drawn
    assert not [each for each in book.cells[0].outputs if each.output_type in ("error", "stream")]
