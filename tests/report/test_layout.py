"""The table of a paper: the same numbers as the ordinary one, in rows and columns of one's choice."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedloom.compare.look import look_at
from fedloom.compare.plan import plan
from fedloom.core.errors import ConfigError
from fedloom.report.comparison import curves, latex, numbers, sheet_latex, sheet_numbers, sheet_text, statistics
from fedloom.report.comparison import notes as table_notes
from fedloom.report.comparison import text as text_table
from fedloom.report.comparison.layout import TableLayout
from fedloom.report.comparison.question import Caveat, Question, Result, Versus
from fedloom.report.comparison.sheet import Sheet, sheet_of
from fedloom.report.page.paper_table import paper_tables
from fedloom.report.page.render import page
from fedloom.runs.folder import read_metrics
from support.terminal import fedloom

RECIPE = """
rounds = 2
data = { source = "digits", pool = true, normalise = "half" }
model = "logistic"
local = { lr = 0.01 }
cohort = { sampling = "all" }
evaluate = { auc = ["micro_logits"] }

[compare]
algorithms = [{ kind = "fedavg", label = "FedAvg" }, { kind = "local_only", label = "Alone" }]
seeds = 2
metric = "personal/*/test/accuracy"
x = "seconds"
notes = ["One rate for both is a confounder."]

[compare.grid]
"local.optimizer" = ["sgd", { value = "adam", label = "Adam", with = { "local.lr" = 0.001 } }]
partition = [
  { kind = "pathological", clients = 5, holdout = 0.25, label = "two classes" },
  { kind = "dirichlet", alpha = 0.1, clients = 5, holdout = 0.25, label = "d_0.1", with = { rounds = 3 } },
]

[compare.layout]
rows = "local.optimizer"
columns = ["partition"]
cell = [
  { metric = "personal/*/test/accuracy", label = "ACC" },
  { metric = "personal/*/test/auc_micro_logits", statistic = "last", label = "AUC" },
]

[[compare.caveats]]
algorithm = "FedAvg"
metric = "personal/*/test/auc_micro_logits"
why = "a coin has 0.5."

[[compare.paper]]
algorithm = "FedAvg"
where = { "local.optimizer" = "sgd", partition = "two classes" }
value = [99.5, 0.001]
"""
ACC, AUC = "personal/{}/test/accuracy", "personal/{}/test/auc_micro_logits"


class Made:
    """A comparison through the command line, and what it left."""

    def __init__(self, folder: Path) -> None:
        (folder / "recipe.toml").write_text(RECIPE)
        done = fedloom("compare", "recipe.toml", "--out", "out", cwd=folder)
        assert done.code == 0, done.err
        self.folder, self.text = folder / "out", done.out
        self.csv = list(csv.DictReader(io.StringIO((self.folder / "layout.csv").read_text())))
        self.markdown, self.tex = ((self.folder / f"layout.{end}").read_text() for end in ("md", "tex"))
        self.cells = list(csv.DictReader(io.StringIO((self.folder / "cells.csv").read_text())))

    def runs(self, line: dict[str, str]) -> list[list[dict[str, Any]]]:
        """The metrics of the runs that a line of the table is about."""
        keys = ("algorithm", "local.optimizer", "partition")
        return [read_metrics(self.folder / c["folder"]) for c in self.cells if all(c[k] == line[k] for k in keys)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two methods x two optimisers x two partitions x two seeds."""
    return Made(tmp_path_factory.mktemp("layout"))


def shown(line: dict[str, str], mark: str = "") -> str:
    scale, digits = (100, 2) if "accuracy" in line["metric"] else (1, 4)
    return f"{scale * float(line['mean']):.{digits}f} ± {scale * float(line['std']):.{digits}f}{mark}"


# -- what the command leaves -----------------------------------------------------------------------
def test_every_number_is_the_statistic_of_its_runs(made: Made) -> None:
    assert len(made.csv) == 2 * 2 * 2 * 2
    for line in made.csv:
        moment = {"FedAvg": "pre_fit", "Alone": "post_fit"}[line["algorithm"]]
        series = [[r[line["metric"].replace("*", moment)] for r in run] for run in made.runs(line)]
        values = [max(s) if line["statistic"] == "best" else s[-1] for s in series]
        assert len(values) == 2 == int(line["seeds"])
        assert float(line["mean"]) == pytest.approx(np.mean(values))
        assert float(line["std"]) == pytest.approx(np.std(values, ddof=1))
    assert [line["statistic"] for line in made.csv[:2]] == ["best", "last"]


def test_what_goes_with_a_value_goes_into_its_cells_alone(made: Made) -> None:
    assert {len(run) for line in made.csv if line["partition"] == "d_0.1" for run in made.runs(line)} == {4}
    assert {len(run) for line in made.csv if line["partition"] == "two classes" for run in made.runs(line)} == {3}
    cells = {(c.place[0], c.config.local.optimizer, c.config.local.lr) for c in plan(tables()).cells}
    assert cells == {("sgd", "sgd", 0.01), ("Adam", "adam", 0.001)}


def test_the_papers_values_and_the_marks(made: Made) -> None:
    claimed = [line for line in made.csv if line["paper"]]
    assert [(x["algorithm"], x["local.optimizer"], x["partition"]) for x in claimed] == [
        ("FedAvg", "sgd", "two classes")
    ] * 2
    assert [float(x["paper"]) for x in claimed] == [0.995, 0.001]
    assert [x["missed"] for x in claimed] == ["below", "above"]
    assert float(claimed[0]["difference"]) == pytest.approx(float(claimed[0]["mean"]) - 0.995)
    for text in (made.text, made.markdown, made.tex):
        assert text.count("99.50 / 0.0010 ?1") == 1
    ordinary = list(csv.DictReader(io.StringIO((made.folder / "table.csv").read_text())))
    assert [x["paper"] for x in ordinary if x["paper"]] == ["0.995"]  # there it is of the metric of the comparison


def test_a_value_with_a_caveat_has_a_mark_and_the_reason_stands_below(made: Made) -> None:
    assert [x["caveats"] for x in made.csv if x["paper"]] == ["", "a coin has 0.5."]
    assert json.loads((made.folder / "summary.json").read_text())["notes"][-1] == "?1: a coin has 0.5."
    for text in (made.text, made.markdown, made.tex):
        assert "?1: a coin has 0.5." in " ".join(text.split())
    question = asked(("a", "b"), paper={(("x", "1"), "a"): 0.5, (("x", "2"), "a"): 0.25})
    spots = frozenset({(("x", "1"), "a"), (("x", "1"), "b")})
    caveats = (Caveat(spots, "", "first."), Caveat(spots, "a/loss", "of another metric."))
    question = question._replace(caveats=(*caveats, Caveat(spots, "a/accuracy", "third.")))
    table = statistics.rows(question, everywhere("a", 0.5) + everywhere("b", 0.5))
    shown = [line[-1] for section in text_table.sections(question, table) for line in section.lines]
    assert shown == ["50.00 ?1,3", "-", "25.00", "-", "-", "-", "-", "-"]
    assert [note for note in table_notes.notes(question, table) if note.startswith("?")] == ["?1: first.", "?3: third."]
    assert [numbers.as_dict(question, row)["caveats"] for row in table[:2]] == ["first. third.", ""]


def test_all_forms_show_the_same(made: Made) -> None:
    by_cell = {}
    for line in made.csv:
        mark = {"below": "↓", "above": "↑", "": ""}[line["missed"]]
        at = (line["algorithm"], line["local.optimizer"], line["partition"])
        by_cell.setdefault(at, []).append((shown(line, mark), line["best"] == "True"))
    for (method, optimizer, partition), words_of in by_cell.items():
        column = ["two classes", "d_0.1"].index(partition) + 1
        plain = " / ".join(text for text, _ in words_of)
        bold = " / ".join(f"**{text}**" if best else text for text, best in words_of)
        block = made.markdown.split(f"### algorithm = {method}\n")[1].split("###")[0]
        row = next(x for x in block.splitlines() if x.startswith(f"| {optimizer} |"))
        assert row.strip("| ").split(" | ")[column] == bold
        assert plain in made.text.split(f"\nalgorithm = {method}\n")[1]
        words = " / ".join(f"\\textbf{{{latex.tex(x)}}}" if best else latex.tex(x) for x, best in words_of)
        assert words in made.tex.split(f"{{algorithm = {method}}}")[1]
    assert made.markdown.count("| *paper* |") == made.tex.count("\\emph{paper}") == 1
    assert "d\\_0.1" in made.tex
    assert "$\\downarrow$" in made.tex


def test_the_best_of_a_column_is_bold(made: Made) -> None:
    for method in ("FedAvg", "Alone"):
        for partition in ("two classes", "d_0.1"):
            for metric in (ACC.format("*"), AUC.format("*")):
                keys = (method, partition, metric)
                here = [x for x in made.csv if (x["algorithm"], x["partition"], x["metric"]) == keys]
                best = max(float(x["mean"]) for x in here)
                assert [x["best"] == "True" for x in here] == [float(x["mean"]) == best for x in here]


def test_the_notes_say_how_to_read_it(made: Made) -> None:
    for text in (made.text, made.markdown, made.tex):
        assert "One rate for both is a confounder." in text
        assert "best ACC (%) / last AUC: mean ± sample standard deviation over 2 seeds" in text
        assert "↓ and ↑: more than 0.01 (1 points of accuracy) below or above it" in text
        assert f"{ACC.format('pre_fit')}, {ACC.format('post_fit')}" in text
    assert "evaluated at different moments" in made.text


def test_the_pictures_are_drawn(made: Made) -> None:
    for name in ("layout.png", "layout.svg", "curves.png"):
        assert (made.folder / name).stat().st_size > 5000
    assert "simulated seconds" in (made.folder / "layout.svg").read_text()


def test_the_page_has_the_table_with_the_paper_s_values_below_ours(made: Made) -> None:
    (fedavg, alone) = paper_tables(look_at([made.folder]), lambda phrase: phrase)
    assert fedavg.caption == "in the paper's layout, algorithm = FedAvg"
    assert [column.label for column in fedavg.columns] == ["local.optimizer", "two classes", "d_0.1"]
    assert [line.cells[0].text for line in fedavg.lines] == ["sgd", "paper", "Adam"]
    assert fedavg.lines[1].cells[1].text == "99.50 % / 0.001"
    assert [line.cells[0].text for line in alone.lines] == ["sgd", "Adam"]
    line = next(
        c for c in made.csv if (c["algorithm"], c["local.optimizer"], c["partition"]) == ("Alone", "sgd", "d_0.1")
    )
    assert alone.lines[0].cells[2].text.startswith(f"{100 * float(line['mean']):.2f} ± ")
    assert "in the paper&#39;s layout" in page(look_at([made.folder]))


@pytest.mark.slow
def test_a_second_time_nothing_runs_and_nothing_changes(made: Made) -> None:
    before = {p.name: p.read_bytes() for p in made.folder.iterdir() if p.is_file() and p.name != "summary.json"}
    again = fedloom("compare", "out/compare.toml", "--out", "out", "--json", cwd=made.folder.parent)
    assert again.code == 0, again.err
    assert "16 of 16 cells are done already" in again.err
    assert {p.name: p.read_bytes() for p in made.folder.iterdir() if p.name in before} == before
    assert len(again.json["layout"]) == 16
    assert again.json["layout"][0]["paper"] == 0.995


# -- the tables themselves -------------------------------------------------------------------------
def tables(**changes: Any) -> dict[str, Any]:
    import tomllib

    table = tomllib.loads(RECIPE)
    return table | {"compare": table["compare"] | changes}


def result(place: tuple[str, ...], method: str, seed: int, values: list[float], state: str = "done") -> Result:
    lines = [
        {"round": i, "a/accuracy": v, "a/loss": 1 - v, "bytes/up": i, "bytes/down": 2 * i, "time/simulated": seed + i}
        for i, v in enumerate(values)
    ]
    return Result(place, method, method, seed, "", state, lines, "")


def asked(methods: tuple[str, ...], **more: Any) -> Question:
    places = (("x", "1"), ("x", "2"), ("y", "1"), ("y", "2"))
    metrics = dict.fromkeys(methods, "a/accuracy")
    return Question(("data", "lr"), places, methods, (0, 1), methods[0], metrics, None, {})._replace(**more)


def sheet(rows: str, columns: list[str], runs: list[Result], *parts: dict[str, Any], **more: Any) -> Sheet:
    methods = tuple(dict.fromkeys(r.method for r in runs))
    layout = TableLayout.model_validate({"rows": rows, "columns": columns, "cell": list(parts), **more})
    return sheet_of(asked(methods), layout, runs, {(("x", "1"), "a"): [0.5]})


def everywhere(method: str, value: float) -> list[Result]:
    return [
        result((data, lr), method, seed, [0.0, value + 0.01 * (lr == "2") + 0.1 * (data == "y"), 0.1])
        for data in "xy"
        for lr in "12"
        for seed in (0, 1)
    ]


def test_any_key_can_go_down_or_across() -> None:
    runs = everywhere("a", 0.5) + everywhere("b", 0.6)
    acc = {"metric": "a/accuracy"}
    found = sheet("algorithm", ["data", "lr"], runs, acc)
    assert found.rows == ("a", "b")
    assert found.columns == (("x", "1"), ("x", "2"), ("y", "1"), ("y", "2"))
    assert [block.where for block in found.blocks] == [{}]
    values = [[cell[0].value.mean for cell in line if cell[0].value] for line in found.blocks[0].cells]
    assert values == pytest.approx(np.array([[0.5, 0.51, 0.6, 0.61], [0.6, 0.61, 0.7, 0.71]]))
    turned = sheet("lr", ["algorithm"], runs, acc)
    assert [block.title for block in turned.blocks] == ["data = x", "data = y"]
    assert [n.best for n in (turned.blocks[0].cells[0][1][0], turned.blocks[0].cells[1][1][0])] == [False, True]
    head = sheet_latex.latex(found).splitlines()
    assert " & \\multicolumn{2}{c}{x} & \\multicolumn{2}{c}{y} \\\\" in head
    assert "algorithm & 1 & 2 & 1 & 2 \\\\" in head


@pytest.mark.parametrize(("statistic", "value"), [("best", 0.5), ("last", 0.1), ("mean_last_10", 0.3)])
def test_statistics(statistic: str, value: float) -> None:
    found = sheet("lr", ["data"], everywhere("a", 0.5), {"metric": "a/accuracy", "statistic": statistic})
    assert found.blocks[0].cells[0][0][0].value == pytest.approx((value, 0.0))


def test_of_a_loss_the_lowest_is_best_and_tolerance_decides_what_misses() -> None:
    runs = everywhere("a", 0.5)
    low = sheet("lr", ["data"], runs, {"metric": "a/loss"}, tolerance=0.0)
    assert [low.blocks[0].cells[i][0][0].best for i in (0, 1)] == [False, True]
    same = sheet("lr", ["data"], runs, {"metric": "a/accuracy"}, tolerance=0.0)
    assert same.blocks[0].cells[0][0][0].missed == ""  # rounding is no miss
    assert same.blocks[0].cells[1][0][0].paper is None


def test_lost_seeds_are_reported_and_do_not_compete() -> None:
    runs = everywhere("a", 0.5)
    runs[2] = result(("x", "2"), "a", 0, [0.9], "diverged")
    runs[4], runs[5] = (result(("y", "1"), "a", seed, [], "failed") for seed in (0, 1))
    found = sheet("lr", ["data"], runs, {"metric": "a/accuracy"})
    lines = sheet_text.lines(found, found.blocks[0])
    assert [sheet_text.joined_words(line.cells[0]) for line in lines] == ["50.00 ± 0.00", "50.00", "51.00 (1 diverged)"]
    assert [lines[i].cells[0][0].best for i in (0, 2)] == [True, False]
    assert sheet_text.joined_words(lines[0].cells[1]) == "failed"
    assert "never bold" in " ".join(sheet_text.legend(found))


def test_nobody_is_the_best_of_a_column_while_the_others_are_still_to_be_run() -> None:
    runs = [each for k, each in enumerate(everywhere("a", 0.5)) if k % 2 == 0 or k == 1]
    found = sheet("lr", ["data"], runs, {"metric": "a/accuracy"})
    best = [[cell[0].best for cell in line] for line in found.blocks[0].cells]
    assert best == [[False, False], [False, True]]  # of the second column both have one seed


def test_columns_are_printed_in_groups_that_fit() -> None:
    found = sheet("lr", ["algorithm", "data"], everywhere("a", 0.5) + everywhere("b", 0.6), {"metric": "a/accuracy"})
    lines = sheet_text.lines(found, found.blocks[0])
    header = ["\n".join(column) for column in found.columns]
    assert sheet_text.across(header, lines, 200) == [range(4)]
    assert sheet_text.across(header, lines, 40) == [range(2), range(2, 4)]
    assert sheet_text.across(header, lines, 1) == [range(i, i + 1) for i in range(4)]


# -- faults ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layout": {"rows": "local.lr", "columns": ["data"], "cell": []}}, r"compare\.layout\.cell"),
        (
            {"layout": {"rows": "local.optimiser", "columns": ["partition"], "cell": [{"metric": "bytes/up"}] * 2}},
            r"compare\.layout\.rows: 'local.optimiser' is not an axis .*did you mean 'local.optimizer'",
        ),
        (
            {"layout": {"rows": "partition", "columns": ["partition"], "cell": [{"metric": "bytes/up"}] * 2}},
            r"compare\.layout: 'partition' is named twice",
        ),
        (
            {
                "layout": {
                    "rows": "partition",
                    "columns": ["algorithm"],
                    "cell": [{"metric": "personal/*/test/auc"}] * 2,
                }
            },
            r"compare\.layout\.cell: no method records 'personal/\*/test/auc'",
        ),
        ({"x": "days"}, r"compare\.x: "),
        ({"metric": "personal/*/test/acuracy"}, r"compare\.metric: no method records"),
        ({"paper": [{"algorithm": "FedAvg", "value": [1.0]}]}, r"compare\.paper\.0\.value: a list has one number"),
        ({"caveats": [{"algorithm": "FedAvgg", "why": "x"}]}, r"compare\.caveats\.0\.algorithm: there is no method"),
        (
            {"caveats": [{"where": {"local.lr": 1}, "why": "x"}]},
            r"compare\.caveats\.0\.where\.local\.lr: is not an axis",
        ),
        (
            {"caveats": [{"metric": "loss", "why": "x"}]},
            r"compare\.caveats\.0\.metric: no value of a paper is of 'loss'",
        ),
        ({"caveats": [{}]}, r"compare\.caveats\.0\.why"),
        ({"caveats": [{"why": "x"}]}, r"compare\.caveats\.0: no paper value matches this caveat"),
        (
            {"algorithms": [{"kind": "fedavg", "with": {"local.lr": 1.0}}]},
            r"compare\.algorithms\.with\.local\.lr: is also set by another axis",
        ),
        ({"algorithms": [{"kind": "fedprox", "with": {"algorithm.mu": 1.0}}]}, r"algorithm\.mu: cannot be set here"),
        ({"algorithms": [{"kind": "fedavg", "with": {"local.lrr": 1.0}}]}, r"local\.lrr: unknown key"),
    ],
)
def test_faults(changes: dict[str, Any], says: str) -> None:
    given = tables(**changes)
    if "paper" not in changes:
        del given["compare"]["paper"]
    with pytest.raises(ConfigError) as caught:
        plan(given)
    assert re.search(says, "\n".join(map(str, caught.value.faults)) + str(caught.value)), str(caught.value)


# -- what curves are drawn against -----------------------------------------------------------------
def test_curves_against_rounds_seconds_and_bytes(tmp_path: Path) -> None:
    runs = [result((), "a", seed, [0.1, 0.3 + seed]) for seed in (0, 1)]
    for x, where in (("rounds", [0, 1]), ("seconds", [0.5, 1.5]), ("bytes", [0, 3e-6])):
        found, mean, deviation = curves.band(runs, "a/accuracy", x)  # type: ignore[arg-type]
        assert found == pytest.approx(where)
        assert mean == pytest.approx([0.1, 0.8])
        assert deviation == pytest.approx([0.0, np.std([0.3, 1.3], ddof=1)])
    assert [len(part) for part in curves.band([], "a/accuracy", "bytes")] == [0, 0, 0]
    words = {"rounds": "round", "seconds": "simulated seconds", "bytes": "MB sent"}
    for x, word in words.items():
        curves.draw(asked(("a",), axes=(), places=((),), x=x), runs, tmp_path / "c.svg")
        assert f"<!-- {word} -->" in (tmp_path / "c.svg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("x", ["seconds", "bytes"])
def test_every_algorithm_has_curves_against_seconds_and_bytes(x: str, tmp_path: Path) -> None:
    words = ("compare", "fedavg", "dpsgd", "local_only", "--seeds", "1", "rounds=1", "partition.clients=3", "--x", x)
    done = fedloom(*words, "--out", "out", "--json", "model=logistic", cwd=tmp_path)
    assert done.code == 0, done.err
    for home in (tmp_path / "out" / "cells").iterdir():
        lines = read_metrics(home)
        assert lines[-1]["time/simulated"] > lines[0]["time/simulated"] == 0
    assert ("simulated seconds" if x == "seconds" else "MB sent") in (tmp_path / "out" / "curves.svg").read_text()
    assert f'x = "{x}"' in (tmp_path / "out" / "compare.toml").read_text()


@pytest.mark.slow
def test_an_unknown_x_is_refused(tmp_path: Path) -> None:
    done = fedloom("compare", "fedavg", "--x", "days", cwd=tmp_path)
    assert done.code == 2
    assert "seconds" in done.err


def test_the_row_of_gains_is_that_of_the_papers_table() -> None:
    """FedALR's Table 1, CIFAR-10: 72.15 over 63.91 and 68.68 over 52.53, printed as 12.89 and 30.74 %."""
    runs = everywhere("a", 0.5) + everywhere("b", 0.6)
    layout = TableLayout.model_validate(
        {"rows": "algorithm", "columns": ["data", "lr"], "cell": [{"metric": "a/accuracy"}]}
    )
    papers = {(("x", "1"), "a"): [0.6391], (("x", "1"), "b"): [0.7215], (("x", "2"), "a"): [0.5253]}
    papers |= {(("x", "2"), "b"): [0.6868]}
    found = sheet_of(asked(("a", "b"), gain=Versus("b", ("a",))), layout, runs, papers)
    *_, ours, theirs = sheet_text.lines(found, found.blocks[0])
    assert (ours.label, sheet_text.joined_words(ours.cells[0])) == ("gain of b", "+20.00%")
    assert [sheet_text.joined_words(words) for words in theirs.cells] == ["+12.89%", "+30.74%", "-", "-"]
    assert "| gain of b | +20.00% |" in sheet_text.markdown(found)
    assert "gain of b & +20.00\\% &" in sheet_latex.latex(found)
    rows = sheet_numbers.as_dicts(found)[-4:]
    assert [row["algorithm"] for row in rows] == ["gain of b"] * 4
    assert rows[0]["mean"] == pytest.approx(0.2)
    assert sheet_numbers.table_csv(found).count("gain of b") == 4
    assert "gain of b: relative to the best of a in the same column." in sheet_text.legend(found)
    across = layout.model_copy(update={"rows": "lr", "columns": ["data", "algorithm"]})
    assert not sheet_of(asked(("a", "b"), gain=Versus("b", ("a",))), across, runs, papers).blocks[0].gains
