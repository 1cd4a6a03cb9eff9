"""From a table of six hospitals to predictions, on the command line."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import fedloom
from fedloom.data.files import read_digits
from support.patients import patients
from support.terminal import Quick

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


@pytest.mark.parametrize("name", ["model.safetensors", "config.toml", "metrics.jsonl", "clients.csv"])
def test_results_never_replace_a_file_of_a_run(quick: Quick, tmp_path: Path, name: str) -> None:
    patients(tmp_path)
    words = ("data=patients.csv", "data.label=ill", "data.client=hospital", "rounds=1", "model.kind=logistic")
    assert quick("run", *words, "--out", "r", cwd=tmp_path).code == 0
    before = (tmp_path / "r" / name).read_bytes()
    (tmp_path / "link.csv").symlink_to(tmp_path / "r" / name)
    for out in (f"r/{name}", "link.csv"):
        told = quick("predict", "r", "new.csv", "--out", out, cwd=tmp_path)
        assert (told.code, "is a file of a run" in told.err) == (2, True)
    assert quick("export", "r", "--out", f"r/{name}", cwd=tmp_path).code == 2
    assert (tmp_path / "r" / name).read_bytes() == before


def test_clients_that_are_numbers_are_found_however_they_are_written(quick: Quick, tmp_path: Path) -> None:
    rows = "".join(f"{k % 7},0{k % 2 + 1},{'ab'[k * k % 3 % 2]}\n" for k in range(40))
    (tmp_path / "t.csv").write_text("x,site,label\n" + rows)
    words = ("data=t.csv", "data.client=site", "algorithm=local_only", "rounds=1", "model.kind=logistic")
    assert quick("run", *words, "--out", "r", cwd=tmp_path).code == 0
    written = []
    for site in ("01", "1", "1.0"):
        (tmp_path / "new.csv").write_text(f"x,site\n3,{site}\n")
        assert quick("predict", "r", "new.csv", "--by-client", "--out", "p.csv", cwd=tmp_path).code == 0
        assert quick("predict", "r", "new.csv", "--client", site, "--out", "q.csv", cwd=tmp_path).code == 0
        both = [(tmp_path / name).read_text().splitlines()[1].split(",")[2:] for name in ("p.csv", "q.csv")]
        assert both[0] == both[1]
        written.append(both[0])
    assert written[0] == written[1] == written[2]
    assert quick("evaluate", "r", "t.csv", "--by-client", cwd=tmp_path).code == 0
    (tmp_path / "new.csv").write_text("x,site\n3,1\n3,\n")
    told = quick("predict", "r", "new.csv", "--by-client", cwd=tmp_path).err
    assert "clients that the run does not know: '' (first in new.csv, line 3)" in told


def test_from_a_table_to_predictions(quick: Quick, tmp_path: Path) -> None:
    patients(tmp_path)
    words = ("data=patients.csv", "data.label=ill", "data.client=hospital", "data.drop=patient", "algorithm=ditto")
    ran = quick("run", *words, "data.statistics=own", "rounds=1", "model.kind=logistic", "--out", "r", cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "fedloom predict r" in ran.out
    for more in ((), ("--by-client",), ("--client", "Hospital B")):
        told = quick("predict", "r", "new.csv", *more, "--out", "p.csv", cwd=tmp_path)
        assert told.code == 0, told.err
        lines = list(csv.DictReader((tmp_path / "p.csv").open()))
        assert list(lines[0]) == ["row", "patient", "hospital", "prediction", "p(no)", "p(yes)"]
        assert len(lines) == 30
        assert all(float(line["p(no)"]) + float(line["p(yes)"]) == pytest.approx(1, abs=1e-5) for line in lines)
        assert {line["prediction"] for line in lines} <= {"yes", "no"}
    models = fedloom.load(tmp_path / "r")
    mine = models.client("Hospital B")
    assert not np.allclose(models.predict_proba(tmp_path / "new.csv"), mine.predict_proba(tmp_path / "new.csv"))
    raw = mine.rows(tmp_path / "new.csv").x  # words as 0 and 1, gaps as NaN: what an ordinary module takes
    with torch.no_grad():
        said = mine.module(torch.from_numpy(raw)).double().softmax(1).numpy()
    assert np.array_equal(said, mine.predict_proba(tmp_path / "new.csv"))
    told = quick("evaluate", "r", "patients.csv", "--by-client", "--json", cwd=tmp_path)
    assert '"balanced_accuracy"' in told.out
    assert "the run learned from patients.csv" in quick("evaluate", "r", "patients.csv", cwd=tmp_path).out
    # what cannot be written, or is wrong with new rows is told in one message
    text = (tmp_path / "new.csv").read_text()
    (tmp_path / "lacks.csv").write_text(text.replace("marker", "markers").replace(",age", ",years"))
    told = quick("predict", "r", "lacks.csv", cwd=tmp_path)
    assert told.code == 2
    assert "'age'" in told.err
    assert "did you mean 'markers'?" in told.err
    assert quick("predict", "r", "new.csv", "--client", "Hospital X", cwd=tmp_path).code == 2
    assert "nothing to compare with" in quick("evaluate", "r", "new.csv", cwd=tmp_path).err
    strangers = text.replace("Hospital A", "Hospital Z").replace(",f,", ",unknown,")
    (tmp_path / "odd.csv").write_text(strangers)
    known = (tmp_path / "patients.csv").read_text()
    (tmp_path / "odd_patients.csv").write_text(known.replace(",f,", ",unknown,"))
    assert "Hospital Z" in quick("predict", "r", "odd.csv", "--by-client", cwd=tmp_path).err
    assert len(models.predict(tmp_path / "odd.csv")) == 30  # unknown words are no obstacle
    assert quick("predict", "r", "new.csv", cwd=tmp_path).err == ""
    for command in ("predict", "evaluate"):
        told = quick(command, "r", "odd.csv" if command == "predict" else "odd_patients.csv", cwd=tmp_path)
        assert "of its words are unknown, such as 'unknown' (known: f, m)" in told.err
        assert told.err.count("note: ") == 1
    (tmp_path / "empty.csv").touch()
    assert "empty.csv: is empty" in quick("predict", "r", "empty.csv", cwd=tmp_path).err
    exported = quick("export", "r", "--client", "Hospital A", "--out", "a.pt2", cwd=tmp_path).out
    assert "\noutputs: logits (before softmax) of no, yes\n" in exported
    assert "\ndate: days since 1970-01-01\nmissing number or date: NaN\n" in exported
    assert "\nmissing word: set the column of its fill (sex=" in exported
    told = quick("export", "r", "--client", "Hospital A", "--out", "new.csv", cwd=tmp_path)
    assert (told.code, told.err.count("\n"), (tmp_path / "new.csv").read_text()) == (2, 1, text)
    told = quick("predict", "r", "new.csv", "--out", "made/for/it.csv", cwd=tmp_path)
    assert (tmp_path / "made/for/it.csv").is_file()
    told = quick("predict", "r", "new.csv", "--out", "new.csv/p.csv", cwd=tmp_path)
    assert (told.code, told.err.count("\n")) == (2, 1)
    assert "new.csv is a file, not a folder" in told.err


def test_a_rare_class_is_a_note_and_no_repair(quick: Quick, tmp_path: Path) -> None:
    rows = [f"{k},{'yes' if k % 10 == 0 else 'no'}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,ill", *rows]) + "\n")
    words = ("data=t.csv", "data.label=ill", "partition.clients=2")
    done = quick("partition", *words, "--out", "t.png", cwd=tmp_path)
    assert "note: 90% of the rows are 'no', so accuracy hides the rest" in done.out
    run = quick("run", *words, "rounds=1", "model=logistic", "--out", "r", cwd=tmp_path)
    assert "note: 90% of the rows are 'no', so accuracy hides the rest" in run.out
    exported = quick("export", "r", "--out", "r.pt2", cwd=tmp_path)
    assert "input: float32 [rows, 1]: a\n" in exported.out


def test_rows_of_one_class_have_a_note(quick: Quick, tmp_path: Path) -> None:
    rows = [f"{k},{'yes' if k % 2 else 'no'}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,ill", *rows]) + "\n")
    words = ("data=t.csv", "data.label=ill", "partition.clients=2", "model=logistic")
    assert quick("run", *words, "rounds=1", "--out", "r", cwd=tmp_path).code == 0
    assert quick("evaluate", "r", "t.csv", cwd=tmp_path).err == ""
    (tmp_path / "one.csv").write_text("a,ill\n1,yes\n2,yes\n")
    note = "note: all rows are of the class 'yes': auc is not defined, and balanced_accuracy is only the share of them"
    assert note in quick("evaluate", "r", "one.csv", cwd=tmp_path).err
    with pytest.warns(UserWarning, match="all rows are of the class 'yes'"):
        fedloom.load(tmp_path / "r").evaluate(tmp_path / "one.csv")


def test_no_column_of_predictions_occurs_twice(quick: Quick, tmp_path: Path) -> None:
    rows = [f"{k},{'yes' if k % 2 else 'no'}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,ill", *rows]) + "\n")
    words = ("data=t.csv", "data.label=ill", "partition.clients=2", "model=logistic")
    assert quick("run", *words, "rounds=1", "--out", "r", cwd=tmp_path).code == 0
    (tmp_path / "new.csv").write_text("row,a,prediction,p(no),row (input)\n7,1,x,y,z\n")
    told = quick("predict", "r", "new.csv", "--out", "p.csv", cwd=tmp_path)
    assert told.out == "1 row predicted by the common model: p.csv\n"
    header, line = csv.reader((tmp_path / "p.csv").open())
    copied = ["row (input) (input)", "prediction (input)", "p(no) (input)", "row (input)"]
    assert header == ["row", *copied, "prediction", "p(no)", "p(yes)"]
    assert line[:5] == ["1", "7", "x", "y", "z"]


def test_predicted_numbers_are_as_short_as_they_can_be(quick: Quick, tmp_path: Path) -> None:
    rows = [f"{k},{3.7 * k}" for k in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["a,dose", *rows]) + "\n")
    words = ("data=t.csv", "data.label=dose", "partition.clients=2", "model=logistic", "task=regression")
    assert quick("run", *words, "rounds=1", "--out", "r", cwd=tmp_path).code == 0
    told = quick("predict", "r", "t.csv", "--out", "p.csv", cwd=tmp_path)
    assert told.out == "60 rows predicted by the common model: p.csv\n"
    said = [line["prediction"] for line in csv.DictReader((tmp_path / "p.csv").open())]
    exact = fedloom.load(tmp_path / "r").predict(tmp_path / "t.csv")
    assert np.array_equal(np.array(said, dtype=np.float32), exact)
    assert max(map(len, said)) <= 12


def test_pixels_in_another_unit_are_refused_or_noted(quick: Quick, tmp_path: Path) -> None:
    assert quick("run", "rounds=1", "model=logistic", "--out", "r", cwd=tmp_path).code == 0
    digits = read_digits()
    np.savez(tmp_path / "shares.npz", x=digits.x / 255, y=digits.y)
    for command in ("evaluate", "predict"):
        told = quick(command, "r", "shares.npz", cwd=tmp_path)
        assert (told.code, told.err.count("\n")) == (2, 1)
        assert "shares.npz: values are 0 to 1, but those that the model learned from are 0 to 255" in told.err
    np.savez(tmp_path / "dark.npz", x=digits.x // 16, y=digits.y)
    note = "note: dark.npz: values are 0 to 15, but those that the model learned from are 0 to 255"
    assert note in quick("evaluate", "r", "dark.npz", cwd=tmp_path).err
    assert note in quick("predict", "r", "dark.npz", cwd=tmp_path).err
    told = quick("evaluate", "r", "dark.npz", "--json", cwd=tmp_path)
    assert note in told.err
    assert told.json["rows"] == 1797
    assert "float32 [rows, 1, 8, 8], values of 0 to 255\n" in quick("export", "r", cwd=tmp_path).out
