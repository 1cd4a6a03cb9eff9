"""Tables as people have them: what is read, what becomes of each column, and what is refused at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedloom
from fedloom.core.errors import ConfigError, DataError
from fedloom.data.column_check import checked_columns, suspicions
from fedloom.data.columns import Recipe, encoded, filled_and_scaled, listed
from fedloom.data.sources import Csv
from fedloom.data.table import ColumnChoice, read_csv, read_parquet, table_of_frame
from fedloom.runs.settings import parse

MESSY = """patient;site;seen;sex;weight;label
1;Köln;01.02.2024;f;70,5;no
2;Köln;02.02.2024;m;NA;no
3;Bonn;;;80,5;yes
4;Bonn;04.02.2024;m;90;no
5;Bonn;05.02.2024;m;60;yes
6;Köln;06.02.2024;x;1000;no
"""


def messy(folder: Path, text: str = MESSY, encoding: str = "cp1252") -> Path:
    path = folder / "messy.csv"
    path.write_bytes(text.encode(encoding))
    return path


def test_a_table_as_a_spreadsheet_saves_it(tmp_path: Path) -> None:
    split = MESSY.replace("label\n", "label;split\n").replace("no\n", "no;train\n").replace("yes\n", "yes;train\n")
    split = split.replace("1000;no;train", "1000;no;test")
    source = Csv(path=str(messy(tmp_path, split)), client="site", split="split", drop=("patient",), standardise=False)
    a = source.load(tmp_path, 0)
    assert a.clients == ("Bonn", "Köln")
    assert a.recipe.names == ("seen", "sex=f", "sex=m", "weight")
    day = (np.datetime64("2024-02-01") - np.datetime64("1970-01-01")).astype(int)
    third = (day + (day + 1) + (day + 3) + (day + 4)) / 4  # the median of the four training days that are there
    assert a.x[:, 0].tolist() == [day, day + 1, third, day + 3, day + 4, day + 5]
    # a missing word is the most frequent of training, a word that training has not seen is none of them
    assert a.x[:, 1:3].tolist() == [[1, 0], [0, 1], [0, 1], [0, 1], [0, 1], [0, 0]]
    assert a.x[:, 3].tolist() == [70.5, 75.5, 80.5, 90.0, 60.0, 1000.0]  # 75.5: the median without the test row
    assert any("cp1252" in note for note in a.notes)
    assert any("semicolons" in note for note in a.notes)
    told = "\n".join(listed(a.recipe))
    assert "weight [1 missing]" in told
    assert "left out: patient" in told
    again = Recipe.model_validate_json(a.recipe.model_dump_json())
    raw = read_csv(tmp_path / "messy.csv", source.wanted)
    assert np.array_equal(filled_and_scaled(encoded(raw, again.features), again, None), a.x)


def test_each_client_may_have_its_own_statistics(tmp_path: Path) -> None:
    path = str(messy(tmp_path, MESSY.replace("1000", "50")))
    kept = {"client": "site", "drop": ("patient", "seen", "sex"), "test": 0}
    own = Csv(path=path, statistics="own", **kept).load(tmp_path, 0)
    bonn, cologne = own.x[2:5, 0], own.x[[0, 1, 5], 0]
    assert np.allclose([bonn.mean(), bonn.std(), cologne.mean(), cologne.std()], [0, 1, 0, 1], atol=1e-6)
    assert cologne[1] == pytest.approx(0)  # the median of 70.5 and 50 is their mean
    sums = Csv(path=path, statistics="sums", standardise=False, **kept).load(tmp_path, 0)
    assert sums.x[1, 0] == pytest.approx(np.mean([70.5, 80.5, 90, 60, 50]))
    with pytest.raises(ConfigError, match=r"needs data\.client"):
        parse({"data": {"source": "csv", "path": path, "statistics": "own"}})


def test_all_bad_columns_are_reported_at_once(tmp_path: Path) -> None:
    rows = "".join(f"{i},{'x' if i == 3 else i % 12},0{i % 9 + 1}/05/2024,p{i},{i % 2}\n" for i in range(30))
    path = messy(tmp_path, f"id,height,day,name,label\n{rows}")
    with pytest.raises(DataError) as error:
        Csv(path=str(path)).load(tmp_path, 0)
    assert "3 columns cannot be used" in str(error.value)
    assert "column 'name': a different word in every row" in str(error.value)
    assert "data.drop=height,day,name)" in str(error.value)
    assert "data.words=height,day)" in str(error.value)
    assert "column 'height'" in str(error.value)
    assert "line 5: is not a number (got 'x')" in str(error.value)
    assert "data.day_first" in str(error.value)
    with pytest.raises(DataError, match=r"(?s)'name': a different word in every row.*data\.drop=name"):
        Csv(path=str(path), drop=("height", "day")).load(tmp_path, 0)
    a = Csv(path=str(path), drop=("name",), words=("height",), day_first=True, most_words=5).load(tmp_path, 0)
    assert any("column 'id'" in note and "data.drop=id" in note for note in a.notes)
    height = next(f for f in a.recipe.features if f.name == "height")
    assert (len(height.words), height.words[0] != "", height.rare > 0) == (4, True, True)


def test_a_frame_is_the_same_table(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    path = messy(tmp_path, MESSY, "utf-8")
    frame = pd.read_csv(path, sep=";", decimal=",", parse_dates=["seen"], dayfirst=True)
    wanted = ColumnChoice(("label",), drop=("patient", "site"))
    a, b = read_csv(path, wanted), table_of_frame(frame, wanted)
    assert {name: c.kind for name, c in a.columns.items()} == {"seen": "date", "sex": "words", "weight": "number"}
    for name, column in a.columns.items():
        assert b.columns[name].kind == column.kind
        assert b.columns[name].values.tolist() == pytest.approx(column.values.tolist(), nan_ok=True)


def test_numbers_to_learn_may_have_decimal_commas(tmp_path: Path) -> None:
    places = {mark: tmp_path / name for mark, name in ((",", "comma.csv"), (".", "point.csv"))}
    rows = "".join(f"{k / 8:.3f};{3 * k / 8 - 1:.3f}\n" for k in range(80))
    scores = []
    for mark, place in places.items():
        place.write_text("size;price\n" + rows.replace(".", mark))
        few = {"rounds": 1, "partition": {"clients": 4}, "model": "logistic", "checkpoint": {"curves": False}}
        data = {"source": "csv", "path": str(place), "label": "price"}
        with pytest.raises((ConfigError, DataError), match="to learn numbers: task=regression"):
            fedloom.run(data=data, **few)
        fedloom.run(data=data, task="regression", out=tmp_path / place.stem, **few)
    for folder in ("comma", "point"):
        scores += [fedloom.load(tmp_path / folder).evaluate(place) for place in places.values()]
    assert scores[0]["rows"] == 80
    assert scores == scores[:1] * 4
    for wrong in ("1,234,5", "1,", "x"):
        places[","].write_text("size;price\n" + rows.replace("28.625", wrong))
        with pytest.raises(DataError, match=f"must be a number .got '{wrong}'"):
            Csv(path=str(places[","]), label="price").with_numbers().load(tmp_path, 0)


def test_a_class_that_is_called_like_a_number_with_a_comma_keeps_its_name(tmp_path: Path) -> None:
    path = messy(tmp_path, "size;label\n" + "".join(f"{k};{k % 2},5\n" for k in range(40)))
    assert Csv(path=str(path)).load(tmp_path, 0).labels == ("0,5", "1,5")


def test_data_that_names_its_clients_keeps_them_by_default(tmp_path: Path) -> None:
    data = {"source": "csv", "path": str(messy(tmp_path)), "client": "site"}
    assert parse({"data": data}).kinds["partition"] == "natural"
    assert parse({"data": data, "partition": {"clients": 2}}).kinds["partition"] == "natural"
    assert parse({"data": data, "partition": "iid"}).kinds["partition"] == "iid"


def test_a_gap_where_training_had_none_is_filled_with_the_median_too(tmp_path: Path) -> None:
    rows = "".join(
        f"{age},2024-02-{day:02d},{'no' if age < 60 else 'yes'}\n" for day, age in enumerate((50, 70, 58, 90), 1)
    )
    (tmp_path / "whole.csv").write_text("age,seen,label\n" + rows)
    for statistics, fill in (("all", 64.0), ("sums", 67.0)):
        source = Csv(path=str(tmp_path / "whole.csv"), test=0, statistics=statistics)  # type: ignore[arg-type]
        recipe = source.load(tmp_path, 0).recipe
        days = (np.datetime64("2024-02-01") - np.datetime64("1970-01-01")).astype(int) + 1.5
        assert recipe.scaling.fill == (fill, days)
        (tmp_path / "gaps.csv").write_text("age,seen,label\n,2024-02-02,a\n60,,a\n")
        table = read_csv(tmp_path / "gaps.csv", source.wanted)
        x = filled_and_scaled(encoded(table, recipe.features), recipe, None)
        mean, std = recipe.scaling.mean, recipe.scaling.std
        assert x[0, 0] == pytest.approx((fill - mean[0]) / std[0], abs=1e-6)
        assert x[1, 1] == pytest.approx(0, abs=1e-3)
        age, _ = suspicions(checked_columns(table, recipe))
        assert age == "column 'age': 50% of its values are missing, of which none was missing before"


def column(tmp_path: Path, cells: list[str], beside: str = "1.5", mark: str = ";") -> str:
    """What is said of a column with these cells, next to one with another number; empty if nothing is."""
    lines = [mark.join((beside, cell, "ab"[k % 2])) for k, cell in enumerate(cells)]
    (tmp_path / "c.csv").write_text("\n".join([mark.join(("x", "v", "label")), *lines]))
    try:
        Csv(path=str(tmp_path / "c.csv"), features=("x", "v")).load(tmp_path, 0)
    except DataError as error:
        return str(error).partition("column 'v': ")[2].partition("\n")[0].replace(f"{tmp_path}/", "")
    return ""


def test_numbers_with_thousands_separators_are_refused(tmp_path: Path) -> None:
    mixed = ["728", "1.753", "2.141", "808"] * 8
    assert column(tmp_path, mixed, "1,5") == (
        "a point may separate thousands where other columns have decimal commas (got '1.753'); write 1753 or 1,753"
    )
    assert column(tmp_path, mixed, "1.5") == ""  # a decimal point, as elsewhere in the file
    assert column(tmp_path, [*mixed, "0.5"], "1,5") == ""
    german = [f"{k}.280,5" for k in range(1, 40)]
    assert column(tmp_path, german) == "c.csv, line 2: has numbers with thousands separators (got '1.280,5')"
    english = [f'"{k},234"' for k in range(1, 40)]
    assert column(tmp_path, english, mark=",").endswith("with thousands separators (got '1,234')")


def test_many_numbers_with_a_unit_and_dates_without_a_century_are_refused(tmp_path: Path) -> None:
    assert column(tmp_path, [f"{k} mg" for k in range(40)]).endswith("has numbers with a unit (got '0 mg')")
    short = [f"{k % 28 + 1:02d}.03.{20 + k % 5}" for k in range(40)]
    assert column(tmp_path, short).endswith("has dates with years of two digits (got '01.03.20')")
    slashed = [f"{k % 12 + 1}/{k % 28 + 1}/{20 + k % 5}" for k in range(40)]
    assert column(tmp_path, slashed).endswith("has dates with years of two digits (got '1/1/20')")
    doses, rooms = [f"{k % 4}0 mg" for k in range(40)], [f"{k % 30}{'ABC'[k % 3]}" for k in range(60)]
    lots, sorts = [f"{k}-{60 - k}-{k % 30}791" for k in range(60)] * 2, [f"40-{k % 30}-99" for k in range(60)]
    houses = [f"{k % 40} Elm 54" for k in range(80)]
    for words in (doses, rooms, lots, sorts, houses):
        assert column(tmp_path, words) == ""  # doses and codes are categories


@pytest.mark.parametrize("mark", [",", "\t", "|"])
def test_decimal_commas_where_no_semicolons_separate_cells_do_not_become_words(tmp_path: Path, mark: str) -> None:
    cells = [f'"{k},{k % 7}"' for k in range(30)]
    what = "numbers with decimal commas, which are read only where semicolons separate cells"
    assert column(tmp_path, cells, mark=mark) == f"c.csv, line 2: has {what} (got '0,0')"


def test_dates_in_other_forms_do_not_become_words(tmp_path: Path) -> None:
    days = range(1, 26)
    for form in ("{:02d}-12-2024", "{:02d}/12/2024 08:30", "2024-12-{:02d}T08:30:00+01:00", "{:02d}-Dec-2024"):
        cells = [form.format(day) for day in days] * 2
        what = f"c.csv, line 2: has dates in a form other than 2024-03-31 (got '{cells[0]}')"
        assert column(tmp_path, cells) == what
    # most of these can only begin with the day, and one is no date: nothing is guessed from the others
    mostly = [*(f"{day}/06/2024" for day in range(13, 29)), "01/06/2024", "02/06/2024", "soon"]
    assert column(tmp_path, mostly) == "c.csv, line 20: is not a date (got 'soon')"


def test_ambiguous_dates_among_others_are_refused(tmp_path: Path) -> None:
    cells = [f"2024-06-{k + 1:02d}" if k % 2 else f"{k % 12 + 1:02d}/06/2024" for k in range(28)]
    what = "may mean day/month or month/day (got 01/06/2024); set data.day_first to true or false"
    assert column(tmp_path, cells) == what
    assert column(tmp_path, [*cells, "13/06/2024"]) == ""


def test_new_dates_are_read_as_those_of_training_were(tmp_path: Path) -> None:
    rows = "".join(f"{day:02d}/01/2024,{'ab'[day % 2]}\n" for day in range(1, 29))
    (tmp_path / "days.csv").write_text("seen,label\n" + rows)
    settings = {"rounds": 1, "partition": {"clients": 2}, "model": "logistic", "checkpoint": {"curves": False}}
    fedloom.run(data=str(tmp_path / "days.csv"), out=tmp_path / "run", **settings)
    models = fedloom.load(tmp_path / "run")
    (tmp_path / "one.csv").write_text("seen\n03/01/2024\n")  # 3 January, which alone could be 1 March
    (tmp_path / "same.csv").write_text("seen\n2024-01-03\n")
    one, same = (models.predict_proba(tmp_path / name).tolist() for name in ("one.csv", "same.csv"))
    assert one == same
    (tmp_path / "other.csv").write_text("seen\n01/31/2024\n")
    with pytest.raises(DataError, match=r"'seen': has words, but had date in training \(.*line 2: got '01/31/2024'\)"):
        models.predict(tmp_path / "other.csv")


def test_columns_and_numbers_that_look_like_mistakes_are_pointed_out(tmp_path: Path) -> None:
    rows = "".join(f"{k % 3 - 1},{-999 if k % 10 == 0 else k % 50},0{k % 4}7,DE,,{k % 2}\n" for k in range(60))
    source = Csv(path=str(messy(tmp_path, "level,age,code,country,note,label\n" + rows)))
    assert source.load(tmp_path, 0).notes == (
        "nothing can be learned from columns with one value, or none, in training rows: set data.drop=country,note",
        "column 'age' has -999 in 6 rows, far from all its other values: if it stands for a missing value, leave these "
        "cells empty",
        "column 'code' has numbers that begin with zeros, such as 007, and is read without them: if they are codes, "
        "set data.words=code",
    )


def test_a_target_that_may_stand_for_a_missing_value_is_pointed_out(tmp_path: Path) -> None:
    rows = "".join(f"{k % 9},{-99 if k == 7 else 100 + k % 40}\n" for k in range(60))
    notes = Csv(path=str(messy(tmp_path, "x,label\n" + rows))).with_numbers().load(tmp_path, 0).notes
    what = "has -99 in 1 row, far from all its other values: if it stands for a missing value, remove these rows"
    assert notes == (f"column 'label' {what}",)


def test_gaps_are_found_in_parquet_as_in_csv(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    cells = [" NA ", "x", " y", "?", None]
    pq.write_table(pa.table({"ward": cells, "label": list("ababa")}), tmp_path / "t.parquet")
    assert read_parquet(tmp_path / "t.parquet", ColumnChoice(("label",))).columns["ward"].values.tolist() == [
        *("", "x", "y", "", ""),
    ]
