"""The files that a comparison writes agree with each other."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
import pytest

from support.comparisons import THREE


def test_tables_agree_with_each_other(whole: Path) -> None:
    lines = list(csv.DictReader(io.StringIO((whole / "table.csv").read_text())))
    assert [(x["partition.alpha"], x["algorithm"]) for x in lines] == [(a, m) for a in ("0.1", "1.0") for m in THREE]
    cells = list(csv.DictReader(io.StringIO((whole / "cells.csv").read_text())))
    for line in lines:
        own = [c for c in cells if all(c[k] == line[k] for k in ("partition.alpha", "algorithm"))]
        for name in ("last", "best", "mean_last_10"):
            values = [float(c[name]) for c in own]
            assert float(line[name]) == pytest.approx(np.mean(values))
            assert float(line[f"{name}_std"]) == pytest.approx(np.std(values, ddof=1))
    words = [
        [w.strip().strip("*") for w in x.strip("|").split("|")]
        for x in (whole / "table.md").read_text().splitlines()
        if x.startswith("|") and "--:" not in x
    ]
    assert len({len(w) for w in words}) == 1
    shown = [w for w in words if w[0] != "algorithm"]
    assert [w[0] for w in shown] == THREE * 2
    for line, w in zip(lines, shown, strict=True):
        assert w[1] == f"{100 * float(line['last']):.2f} ± {100 * float(line['last_std']):.2f}"
    tex = (whole / "table.tex").read_text()
    body = [x for x in tex.splitlines() if x.endswith("\\\\") and "multicolumn" not in x]
    assert len(body) == 7
    assert len({len(re.findall(r"(?<!\\)&", x)) for x in body}) == 1
    assert all(re.search(r"\$\\pm\$", x) for x in body[1:])


def test_the_papers_value_is_shown_where_it_belongs(whole: Path) -> None:
    lines = list(csv.DictReader(io.StringIO((whole / "table.csv").read_text())))
    papers = {(x["partition.alpha"], x["algorithm"]): x["paper"] for x in lines if x["paper"]}
    assert papers == {("0.1", "fedopt"): "0.7215"}
    text = (whole / "table.md").read_text()
    assert "paper (%)" in text
    assert text.count("72.15") == 1
