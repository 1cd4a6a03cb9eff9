"""The page of results as text: what it says, what it escapes, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tomllib
from contextlib import nullcontext
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedloom.compare.look import look_at
from fedloom.core.errors import CheckpointError, ConfigError
from fedloom.data.arrays import Arrays
from fedloom.engine.topology.facts import facts
from fedloom.engine.topology.kinds import Ring
from fedloom.report.comparison import claims, notes, statistics
from fedloom.report.comparison.question import Versus
from fedloom.report.page import language
from fedloom.report.page.content import content_of
from fedloom.report.page.render import page
from fedloom.report.view import ComparisonView, FolderView, RunView
from fedloom.runs.prepare import one_class
from support.comparisons import question, result
from support.markup import EVIL
from support.terminal import Quick

HOME = Path(language.__file__).parent
# dist/echarts.min.js of the npm package echarts 6.1.0, unchanged
ECHARTS = "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0"


class Parsed(HTMLParser):
    """The elements of a page, its visible text, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._raw, self.json = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._raw = (dict(attrs).get("id") or tag) if tag in ("script", "style") else ""

    def handle_endtag(self, tag: str) -> None:
        self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw == "data":
            self.json += data
        elif not self._raw:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.mark.slow
def test_names_from_files_are_never_markup(hostile_run: Path) -> None:
    found = Parsed(page(look_at([hostile_run])))
    assert "img" not in {tag for tag, _ in found.tags}
    assert [tag for tag, _ in found.tags].count("script") == 3  # data, charts, glue
    assert found.text.count(EVIL) >= 2  # the class and the client, as words
    data = json.loads(found.json)
    assert EVIL in data["splits"][0]["labels"]
    assert data["splits"][0]["clients"] == [EVIL, "B & C"]
    assert "<b>run" in found.text
    assert "Confusion matrix" in found.text


@pytest.mark.slow
def test_a_page_needs_nothing_from_elsewhere(compared: Path) -> None:
    found = Parsed(page(look_at([compared])))
    assert not [attrs for _, attrs in found.tags if "src" in attrs]
    assert {str(attrs["href"])[0] for _, attrs in found.tags if "href" in attrs} == {"#"}
    policy = next(
        a["content"] for t, a in found.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "'unsafe-inline'" not in policy.partition("script-src")[2].partition(";")[0]
    assert hashlib.sha256((HOME / "echarts.min.js").read_bytes()).hexdigest() == ECHARTS
    assert "Apache License" in found.text
    assert "Mike Bostock" in found.text  # whose licence is part of it


@pytest.mark.slow
def test_verdicts_and_ranks_come_first(compared: Path) -> None:
    found = Parsed(page(look_at([compared]))).text
    assert found.index("FedProx is <better>") < found.index("partition.alpha = 0.1 method") < found.index("Smoothing")
    summary = json.loads((compared / "summary.json").read_text())
    for row in summary["table"]:
        assert f"{100 * row['mean_last_10']:.2f} ± {100 * row['mean_last_10_std']:.2f} %" in found
    data = json.loads(Parsed(page(look_at([compared]))).json)
    line = next(x for x in data["lines"] if x["name"] == "fedprox" and x["place"] == "partition.alpha = 1.0")
    assert (len(line["y"]), len(line["sd"]), line["runs"]) == (4, 4, 2)
    ends = [
        json.loads((compared / row["folder"] / "metrics.jsonl").read_text().splitlines()[-1]) for row in cells(compared)
    ]
    mean = sum(end["global/test/accuracy"] for end in ends) / len(ends)
    assert line["y"][-1] == pytest.approx(mean, rel=1e-5)


def cells(folder: Path) -> list[dict[str, str]]:
    """The cells of FedProx at alpha 1."""
    head, *lines = [line.split(",") for line in (folder / "cells.csv").read_text().splitlines()]
    found = [dict(zip(head, line, strict=True)) for line in lines]
    return [line for line in found if line["algorithm"] == "fedprox" and line["partition.alpha"] == "1.0"]


@pytest.mark.slow
def test_the_worst_client_is_the_first(hostile_run: Path) -> None:
    run = look_at([hostile_run])
    rows = re.findall(r'<tr class="worst">.*?</tr>', page(run), re.DOTALL)
    lines = (hostile_run / "clients.csv").read_text().splitlines()
    place = lines[0].split(",").index("accuracy")
    worst = min(float(line.rsplit(",", len(lines[0].split(",")) - place)[1]) for line in lines[1:])
    assert len(rows) == 1
    assert f"{100 * worst:.2f} %" in rows[0]


def test_every_phrase_is_said_in_chinese(compared: Path) -> None:
    say = language.speaker("zh")
    sources = [(HOME / name).read_text() for name in ("page.html", "content.py", "apart.py")]
    used = {phrase for source in sources for phrase in re.findall(r'say\("([^"]+)"\)', source)}
    assert len(used) > 50
    assert [phrase for phrase in used if say(phrase) == phrase] == []
    text = page(look_at([compared]), "zh")
    assert '<html lang="zh-Hans">' in text
    assert any(verdict in text for verdict in ("无法判定", "不成立", "成立"))


def test_notes_of_comparisons_are_said_in_chinese(compared: Path) -> None:
    """Those of a real page, and each kind that there is; words of a recipe stay as they are."""
    text = page(look_at([compared]), "zh")
    assert "rank by the mean" not in text
    assert "按最后十次评估的均值排名" in text
    runs = [result(m, s, [0.1, 0.5], work_gradients=g) for m, g in (("a", 5), ("b", 9)) for s in (0, 1)]
    lost = [*runs[:3], result("b", 1, [0.1], "diverged")]
    metrics = {"a": "global/test/accuracy", "b": "personal/pre_fit/test/accuracy"}
    asked = [
        question(("a", "b"), seeds, **more)
        for seeds in (1, 2)
        for more in (
            {"target": 0.4, "paper": {((), "a"): 0.5}, "selected_by": {"a": "global/validation/accuracy"}},
            {"gain": Versus("a", ("b",)), "equal": "gradients", "budgets": {(): 5.0}},
            {"equal": "bytes", "budgets": {(): 1e-6}},
            {"equal": "busiest", "budgets": {(): 1.0}},
            {"metrics": metrics},
            {"metrics": metrics, "wanted": "personal/*/test/accuracy"},
        )
    ]
    said = {n for q in asked for cells in (runs, lost) for n in notes.notes(q, statistics.rows(q, cells))}
    assert len(said) > 12
    assert [note for note in said if language.sentence_in("zh", note) == note] == []
    assert language.sentence_in("zh", "my own words") == "my own words"
    assert language.sentence_in("zh", "fedala - paper (alpha=0.1)") == "fedala - 论文数值（alpha=0.1）"


def test_differences_of_a_claim_are_in_the_unit_of_what_it_is_about(compared: Path) -> None:
    """Points of accuracy, rounds as they are, and the same numbers as in the terminal."""
    accuracy: dict[str, Any] = {
        "says": "so", "source": "", "test": "above", "method": "a", "others": ("b",), "places": ((),), "paths": (),
        "rises": True, "by": 0.0, "reported": {}, "metric": "", "statistic": "mean_last_10",
    }  # fmt: skip
    made = [result("a", s, [0.1, 0.7]) for s in (0, 1)]
    made += [result("b", s, [0.1, 0.4, 0.5, 0.6]) for s in (0, 1)]
    asked = question(("a", "b"), 2)
    rounds = accuracy | {"statistic": "rounds_to", "target": 0.55}
    decided = claims.decide(asked, made, [claims.Claim(**each) for each in (accuracy, rounds)])
    view = look_at([compared])
    assert isinstance(view, ComparisonView)
    view = view._replace(summary={**view.summary, "claims": claims.as_dicts(asked, decided)})
    text = Parsed(page(view)).text
    for said, ending in zip(claims.sentences(asked, decided), ("a - b: +20 [", "a - b: +2 ["), strict=True):
        assert ending in said
        assert ending in text


def test_claims_of_every_recipe_are_said_in_chinese() -> None:
    recipes = (Path(__file__).parents[2] / "experiments").rglob("*.toml")
    tables = [tomllib.loads(path.read_text("utf-8")).get("compare", {}) for path in recipes]
    claimed = {claim["says"] for table in tables for claim in table.get("claims", [])}
    assert len(claimed) > 300
    said = {claim: language.sentence_in("zh", claim) for claim in claimed}
    assert [claim for claim, chinese in said.items() if chinese == claim] == []
    for word in (" than ", " other ", " better ", " within ", " with ", " on ", " at ", " is ", " read as "):
        assert [chinese for chinese in said.values() if word in chinese] == []


def test_several_runs_are_listed_side_by_side(compared: Path, hostile_run: Path) -> None:
    found = Parsed(page(look_at([compared.parent, hostile_run, *sorted((compared / "cells").iterdir())[:2]]))).text
    assert "Overview of runs" in found
    assert "two methods" in found
    assert "data.label" in found  # what differs


@pytest.mark.slow
def test_bad_input_is_one_clear_error(hostile_run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, expected in {
        ("nowhere",): "there is no such folder",
        ("empty",): "contains neither a run nor a comparison",
        (str(hostile_run), "--out", "page.pdf"): "a page ends in .html",
        (str(hostile_run), "--out", "empty"): "a page ends in .html",
    }.items():
        done = Quick()("report", *words, cwd=tmp_path)
        assert (done.code, done.out) == (2, "")
        assert expected in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["empty"]


@pytest.mark.slow
def test_changed_numbers_are_reported(compared: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(compared, tmp_path / "c"))
    assert Quick()("show", "c", cwd=tmp_path).code == 0
    cell = sorted((folder / "cells").iterdir())[0]
    lines = (cell / "metrics.jsonl").read_text()
    assert '"round": 1,' in lines
    (cell / "metrics.jsonl").write_text(lines.replace('"round": 1,', '"round":  1,'))
    assert "metrics.jsonl: is damaged" in Quick()("show", "c", cwd=tmp_path).err  # the checkpoint knows
    shutil.rmtree(cell / "checkpoints")
    told = "metrics.jsonl has changed since the run wrote it: its SHA-256 differs from manifest.json."
    for shown in ("c", str(cell), "."):
        done = Quick()("show", shown, cwd=tmp_path)
        assert (done.code, done.out.count(told)) == (1, 1), done.out + done.err
    done = Quick()("show", str(cell), "--json", cwd=tmp_path)
    assert (done.code, json.loads(done.out)["runs"][0]["changed"]) == (1, ["metrics.jsonl"])
    done = Quick()("report", "c", "--lang", "zh", cwd=tmp_path)
    assert done.code == 0
    assert done.out.count(told) == 1
    assert "metrics.jsonl 不是运行时写入的内容" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_a_page_is_not_written_through_a_link(hostile_run: Path, tmp_path: Path) -> None:
    run, outside = Path(shutil.copytree(hostile_run, tmp_path / "run")), tmp_path / "outside"
    outside.write_text("mine")
    (run / "report.html").unlink(missing_ok=True)
    (run / "report.html").symlink_to(outside)
    done = Quick()("report", "run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert outside.read_text() == "mine"
    assert not (run / "report.html").is_symlink()
    assert ((run / "report.html").stat().st_mode & 0o777) == 0o600


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", "{}\n"),
        ("partition.json", "[1]"),
        ("partition.json", '{"labels": 5}'),
        ("partition.json", '{"clients": []}'),
        ("topology.json", '{"nodes": 3, "first_round": 5}'),
        ("clients.csv", "a\n1\n"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(hostile_run: Path, tmp_path: Path, name: str, text: str) -> None:
    for file in hostile_run.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).write_text(text)
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(name)):
        look_at([tmp_path])


@pytest.mark.parametrize(("cell", "fits"), [((7, 1, 5), True), ((1 << 24, 1, 5), False), ((7, 1 << 16, 5), False)])
def test_counts_of_more_clients_or_classes_than_a_page_can_have_are_refused(
    hostile_run: Path, tmp_path: Path, cell: tuple[int, int, int], fits: bool
) -> None:
    """A page would make a line for each number up to them: memory for as many as a stranger's file asks for."""
    shutil.copytree(hostile_run, tmp_path / "run")
    save_file({"counts": np.array([cell])}, tmp_path / "run" / "partition.safetensors")
    with nullcontext() if fits else pytest.raises(CheckpointError, match=r"partition\.safetensors.*see 'counts'"):
        look_at([tmp_path / "run"])


# -- what a reader sees at first -------------------------------------------------------------------
def seen_run(name: str = "first", rounds: int = 3, **settings: Any) -> RunView:
    """A run of this many evaluations, as read from a folder."""
    end = "r2" if settings.get("task.kind") == "regression" else "accuracy"
    names = ("global/test/mae", "personal/pre_fit/test/mae") if end == "r2" else ()
    lines = [
        {"round": k, "bytes/up": 10 * k, "bytes/down": 0, f"global/test/{end}": k / 100, **dict.fromkeys(names, 2.0)}
        for k in range(rounds + 1)
    ]
    known = {"algorithm.kind": "ditto", "model.kind": "mlp", "partition.kind": "natural", "rounds": rounds}
    clients = [
        {"client": "0", "rows": "5", "classes": "2", "largest_class": "x", "largest_share": "0.5", end: "0.5"}
    ] * 2
    partition = {"clients": 2, "rows": 10, "classes": 2, "size_min": 5, "size_max": 5, "size_median": 5.0}
    return RunView(name, name, "done", known | settings, lines, partition=partition, clients=clients)


def test_a_run_names_its_method_and_its_file() -> None:
    found = content_of(seen_run(**{"data.source": "csv", "data.path": "/data/patients.csv"}), "en")
    assert found.facts[:2] == ("algorithm: ditto", "data: patients.csv")
    assert content_of(seen_run(**{"data.source": "digits"}), "en").facts[1] == "data: digits"


@pytest.mark.parametrize(("rounds", "said"), [(1, "mean of one"), (3, "mean of all 3"), (10, "mean of last 10")])
def test_a_mean_of_few_evaluations_is_called_so(rounds: int, said: str) -> None:
    found = content_of(seen_run(rounds=rounds), "en")
    assert found.results[0].columns[-1].label == said
    assert f"{said}: " in found.cards[1].hint


@pytest.mark.parametrize(
    ("rounds", "said"),
    [((3, 3), "mean of all 3"), ((3, 4), "mean of at most 10"), ((10, 12), "mean of last 10")],
)
def test_a_mean_of_few_evaluations_is_called_so_for_several_runs(rounds: tuple[int, int], said: str) -> None:
    runs = tuple(seen_run(str(k), count) for k, count in enumerate(rounds))
    table = [{"algorithm": "ditto", "metric": "global/test/accuracy", "rank": 1, "mean_last_10": 0.02}]
    for view in (FolderView("runs", runs, ()), ComparisonView("both", "both", (), runs, 2, {"table": table})):
        assert said in [column.label for column in content_of(view, "en").results[0].columns]
    assert said in content_of(view, "en").cards[0].hint


def test_a_run_that_diverged_does_not_change_what_the_mean_is_called() -> None:
    runs = (seen_run("a", 3), seen_run("b", 1)._replace(state="diverged"))
    view = ComparisonView("c", "c", (), runs, 2, {"table": [{"algorithm": "a", "metric": "m", "rank": 1}]})
    assert "mean of all 3" in [column.label for column in content_of(view, "en").results[0].columns]


def test_a_value_of_a_paper_has_the_marks_of_its_caveats() -> None:
    row = {"algorithm": "a", "metric": "global/test/loss", "paper": 0.4567, "caveats": "it is a typo."}
    spot = {"algorithm": "a", "data": "x", "mean": 0.4, **row}
    summary = {"table": [row], "layout": [spot], "notes": ["?1: no.", "?2: it is a typo."]}
    layout = {"rows": "algorithm", "columns": ["data"]}
    paper, table = content_of(ComparisonView("c", "c", (), (seen_run(),), 1, summary, layout), "en").results
    at = [column.label for column in table.columns].index("paper")
    assert table.lines[0].cells[at][::4] == paper.lines[1].cells[1][::4] == ("0.4567", "?2")


def test_lost_seeds_and_gains_of_a_loss_are_in_the_layout_of_the_paper() -> None:
    loss = {"metric": "global/test/loss", "data": "x"}
    spots = [
        {"algorithm": "a", "mean": 0.4, "seeds": 2, "diverged": 1, "failed": 0, **loss},
        {"algorithm": "gain of a", "data": "x", "metric": "relative gain, global/test/loss", "mean": 0.0632},
    ]
    layout = {"rows": "algorithm", "columns": ["data"]}
    view = ComparisonView("c", "c", (), (seen_run(),), 1, {"layout": spots}, layout)
    own, gain = content_of(view, "en").results[0].lines
    assert (own.cells[1].text, own.cells[1].tag, gain.cells[1].text) == ("0.4", "1 diverged", "+6.32 %")


def test_the_page_says_how_it_marks_a_choice() -> None:
    """A star marks it in the tables of files; the page has a tag."""
    rows = [{"algorithm": "ditto", "metric": "global/test/accuracy", "validation": 0.5, "chosen": True}]
    summary = {"table": rows, "notes": [notes.STARRED]}
    found = content_of(ComparisonView("both", "both", (), (seen_run(),), 1, summary), "en")
    assert found.notes == (notes.TAGGED,)
    assert "chosen" in [cell.tag for cell in found.results[0].lines[0].cells]
    assert '"chosen" marks the choice' in notes.TAGGED
    assert "“选定”" in language.sentence_in("zh", notes.TAGGED)


def test_a_regression_has_bins_and_no_classes() -> None:
    run = seen_run(**{"task.kind": "regression"})
    for said in ("classes", "largest class"):
        assert f">{said}<" not in page(run)
        assert f">{said}<" in page(seen_run())
    assert "colours are bins of the target" in page(run)
    assert "colours are classes" in page(seen_run())
    assert "5 to 5, median 5" in page(run)


def test_errors_of_all_models_are_in_one_chart() -> None:
    """As accuracies are: a choice of one line each would compare nothing."""
    lines = content_of(seen_run(**{"task.kind": "regression"}), "en").lines
    assert [line["name"] for line in lines if line["choice"] == "mae"] == [
        "global/test/mae",
        "personal/pre_fit/test/mae",
    ]


def test_one_chart_does_not_mix_units() -> None:
    """Runs of a folder are drawn together where they measured the same."""
    runs = (seen_run("a"), seen_run("b", **{"task.kind": "regression"}))
    lines = content_of(FolderView("runs", runs, ()), "en").lines
    together = {line["choice"]: line["share"] for line in lines if line["name"].endswith(")")}
    assert together == {"accuracy": True, "r2": False}


def test_a_network_downloads_nothing() -> None:
    said = [card.label for card in content_of(seen_run()._replace(topology=facts(Ring(), 2)._asdict()), "en").cards]
    assert "sent by nodes" in said
    assert "uploaded" not in said
    assert "uploaded" in [card.label for card in content_of(seen_run(), "en").cards]


def test_a_note_on_rare_classes_is_said_in_chinese() -> None:
    y, test = np.array([0] * 9 + [1]), np.zeros(10, bool)
    table = Arrays("t", np.zeros((10, 1), np.float32), y, test, ("no", "yes"), recipe="a table")
    for private in (False, True):
        [note] = one_class(table, private=private)
        assert "no" in language.sentence_in("zh", note)
        assert "accuracy hides" not in language.sentence_in("zh", note)


def test_a_private_run_is_not_advised_to_weigh_classes() -> None:
    """Weights of classes count the classes of all clients, and are refused where privacy hides them."""
    y, test = np.array([0] * 9 + [1]), np.zeros(10, bool)
    table = Arrays("t", np.zeros((10, 1), np.float32), y, test, ("no", "yes"), recipe="a table")
    assert "class_weights" in one_class(table)[0]
    assert "class_weights" not in one_class(table, private=True)[0]


def test_each_method_has_its_own_lowest_tenth() -> None:
    """Of twenty clients two: one method is worst for the first ones, the other for the last ones."""
    first, other = seen_run("a"), seen_run("b")

    def measured(run: RunView, method: str, values: list[float]) -> RunView:
        clients = [{**run.clients[0], "client": str(k), "accuracy": str(v)} for k, v in enumerate(values)]
        return run._replace(method=method, clients=clients)

    rising = [k / 20 for k in range(20)]
    runs = (measured(first, "a", rising), measured(other, "b", rising[::-1]))
    (split,) = content_of(ComparisonView("both", "both", (), runs, 2, {}), "en").splits
    marked = {
        column.label: [line.cells[0].text for line in split.table.lines if line.cells[k].mark == "worst"]
        for k, column in enumerate(split.table.columns)
    }
    assert {name: sorted(clients) for name, clients in marked.items() if clients} == {
        "a": ["0", "1"],
        "b": ["18", "19"],
    }
    assert not any(line.mark or line.cells[0].tag for line in split.table.lines)


def test_an_overview_names_the_best_of_the_chosen_settings() -> None:
    rows = [{"algorithm": name, "metric": "global/test/accuracy", "rank": rank} for name, rank in (("a", 1), ("b", 2))]
    swapped = [{**row, "rank": 3 - row["rank"]} for row in rows]
    for summary, best in (({"table": rows}, "a"), ({"table": rows, "selected": {"table": swapped}}, "b")):
        view = ComparisonView("c", "c", (), (seen_run()._replace(method="a"),), 1, summary)
        listed = content_of(FolderView("runs", (), (view, view)), "en").results[-1]
        assert [line.cells[-1].text for line in listed.lines] == [best, best]
        assert content_of(view, "en").cards[0].value == best


@pytest.mark.parametrize(
    ("reached", "shown"), [(0, ("–", "0/3 seeds")), (1, ("–", "1/3 seeds")), (3, ("6.0 ± 1.0", ""))]
)
def test_rounds_to_a_target_that_some_seeds_never_reach_are_no_mean(reached: int, shown: tuple[str, str]) -> None:
    """The mean of those that reached it would make the worst method look fast; a lost seed did not reach it either."""
    took = {"rounds_to_target": 6.0, "rounds_to_target_std": 1.0} if reached else {}
    row = {"algorithm": "a", "metric": "m", "seeds": 2, "failed": 1, "reached_target": reached, **took}
    view = ComparisonView("c", "c", (), (seen_run()._replace(method="a"),), 1, {"table": [row]})
    (table,) = content_of(view, "en").results
    at = [column.label for column in table.columns].index("rounds to target")
    cell = table.lines[0].cells[at]
    assert (cell.text, cell.tag) == shown
    assert (cell.value is None) == (reached < 3)


def test_what_differs_in_a_comparison_is_what_its_titles_do_not_say() -> None:
    def cell(method: str, kind: str, alpha: str, seed: int, **own: str) -> RunView:
        known = {"algorithm.kind": kind, "partition.alpha": float(alpha), "seed": seed, **own}
        return seen_run(**known)._replace(method=method, place=(alpha,))

    mus = {"a": ("fedavg", {}), "b (mu=2)": ("b", {"algorithm.mu": "2"}), "c": ("b", {"algorithm.mu": "3"})}
    cells = tuple(
        cell(method, kind, alpha, seed, **own)
        for method, (kind, own) in mus.items()
        for alpha in ("0.1", "1.0")
        for seed in (0, 1)
    )
    view = ComparisonView("c", "c", ("partition.alpha",), cells, 12, {})
    found = content_of(view, "en")
    assert found.settings_differ is not None
    assert [[cell.text for cell in line.cells] for line in found.settings_differ.lines] == [
        ["algorithm.kind", "fedavg", "a"],
        ["algorithm.kind", "b", "b (mu=2), c"],
        ["algorithm.mu", "3", "c"],
    ]
    assert {line["place"] for line in found.lines} == {"partition.alpha = 0.1", "partition.alpha = 1.0"}
    assert found.splits[0].label == "partition.alpha = 0.1, seed 0"
    plain = view._replace(cells=tuple(each for each in cells if each.method == "b (mu=2)"))
    assert content_of(plain, "en").settings_differ is None
