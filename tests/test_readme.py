"""The documentation, executed: every command and every snippet, in order, from an empty folder.

What a command is shown to print is compared with what it prints. ``FEDLOOM_RENEW=1`` writes into the pages what is
printed now instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from fedloom.algorithm.capabilities import CAPABILITIES
from fedloom.cli import main as cli
from fedloom.engine import laws
from fedloom.runs.catalogue import entries
from fedloom.runs.result import History
from fedloom.runs.settings import SECTIONS, parse, read_toml
from support import shown, warm

ROOT = Path(__file__).parent.parent
# Discussions are parts of generated pages, and their links are seen from these.
PAGES = [
    page
    for page in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
    if page.parent.name != "discussion"
]
# They need a network, or make the environment that this test already runs in.
SKIPPED = ("make ", "git clone ", "source ", "cd fedloom", "fedloom data get ")


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str:
        """The path in a first line such as ``# algorithms/mine.py``: then the block is that file's content."""
        found = re.match(r"# ([\w./-]+\.(?:py|toml))\n", self.text)
        return found[1] if found else ""

    @property
    def is_run(self) -> bool:
        return not self.file and self.language in ("console", "bash")

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """The commands of a console, each with the lines that it is shown to print."""
        lines = self.text.splitlines()
        if self.language != "console":
            return [(line, []) for line in lines]
        starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
        return [(lines[at][2:], lines[at + 1 : end]) for at, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


class Ran(NamedTuple):
    """A command, how it ended and what it printed."""

    command: str
    code: int
    out: str


def follow(path: Path) -> list[Ran]:
    """Do what the page says, and compare what is printed with what it shows, or renew that."""
    page = path.read_text(encoding="utf-8")
    done = execute(page)
    now = renewed_page(page, done)
    if os.environ.get("FEDLOOM_RENEW"):
        path.write_text(now, encoding="utf-8")
        return done
    wrong = [f"{command}\n{part}" for command, part in differences(page, done)]
    assert not wrong, "\n\n".join(["not printed any more (FEDLOOM_RENEW=1 renews the page):", *wrong])
    return done


def differences(page: str, done: list[Ran]) -> list[tuple[str, str]]:
    """Each command whose output is not as shown, with the lines that are not."""
    found = [(one.command, shown.difference(lines, one.out.splitlines())) for one, lines in zipped(page, done)]
    return [(command, part) for command, part in found if part]


def renewed_page(page: str, done: list[Ran]) -> str:
    for one, lines in zipped(page, done):
        old = "\n".join([f"$ {one.command}", *lines])
        page = page.replace(old, "\n".join([f"$ {one.command}", *shown.renewed(lines, one.out.splitlines())]), 1)
    return page


def zipped(page: str, done: list[Ran]) -> list[tuple[Ran, list[str]]]:
    """The commands that were run, each with the lines that the page shows, where it shows any."""
    steps = [step for block in blocks(page) if block.is_run for step in block.commands if is_run(step[0])]
    return [(one, lines) for one, (_, lines) in zip(done, steps, strict=True) if lines]


def is_run(command: str) -> bool:
    return bool(command) and not command.startswith(SKIPPED)


def blocks(page: str) -> Iterator[Block]:
    for found in re.finditer(r"^```(\w+)[^\n]*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        yield Block(found[1], found[2])


def execute(page: str) -> list[Ran]:
    """Do what a page says, in the working folder; whatever fails where the page does not say so, raises."""
    done: list[Ran] = []
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page):
        if block.file:
            path = Path(block.file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, "snippet", "exec"), names)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.is_run:
            done += [ran(command) for command, _ in block.commands if is_run(command)]
    return done


DONE: dict[str, tuple[Ran, Path]] = {}  # what a comparison printed, and a copy of the folder that it left


def ran(command: str) -> Ran:
    """Run one command line; a comparison that another page has, too, is not computed again."""
    found = re.fullmatch(r"fedloom compare [\w.= -]+ --out (\w+)", command)  # it reads no file
    if found is None or Path("algorithms").exists():
        return ran_now(command)
    if command in DONE:
        shutil.copytree(DONE[command][1], found[1])
    else:
        kept = Path(tempfile.mkdtemp(dir=Path.cwd().parent), found[1])
        DONE[command] = ran_now(command), kept
        shutil.copytree(found[1], kept)
    return DONE[command][0]


def ran_now(command: str) -> Ran:
    """Run one command line, and insist on the exit code that its comment promises, or on 0."""
    promised = re.search(r"# exit code (\d+)", command)
    words = shlex.split(command, comments=True)
    words[0] = sys.executable if words[0] == "python" else words[0]
    out = io.StringIO()
    if words[0] == "fedloom":
        code = in_process(words, out)
    else:
        process = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
        code = process.returncode
        out.write(process.stdout + process.stderr)
    assert code == (int(promised[1]) if promised else 0), f"{command} ended with {code}\n{out.getvalue()}"
    return Ran(command, code, out.getvalue())


def in_process(words: list[str], out: io.StringIO) -> int:
    """The installed command without a new Python: ``main`` is what the script calls."""
    before, sys.argv = sys.argv, words
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        sys.argv = before
    return int(ended.value.code or 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_laws: None) -> Iterator[Path]:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "data"))
    # Pages show the curves of their first run; those of all others would take longer than the runs.
    pictures: list[bytes] = []
    picture = History.picture

    def first_picture(result: History) -> bytes:
        if not pictures:
            pictures.append(picture(result))
        return pictures[0]

    monkeypatch.setattr(History, "picture", first_picture)
    with warm.processes():
        yield tmp_path
    for name in [n for n in sys.modules if n.startswith("fedloom_user_")]:
        del sys.modules[name]


def printed(done: list[Ran], start: str) -> str:
    """What the last command that starts so printed."""
    return next(one.out for one in reversed(done) if one.command.startswith(start))


@pytest.mark.slow
def test_readme(folder: Path) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    done = follow(ROOT / "README.md")
    rounds = [json.loads(line)["round"] for line in (folder / "first/metrics.jsonl").read_text().splitlines()]
    assert rounds == list(range(31))  # the resumed run has every round once
    assert (folder / "shards.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads(printed(done, "fedloom run first/config.toml").splitlines()[-1])
    assert result["algorithm"] == "fedopt"
    assert result["metrics"]["global/test/accuracy"]["last"] > 0.5
    assert tomllib.loads(printed(done, "fedloom run local.lr=0.05 --print-config"))["local"]["lr"] == 0.05
    assert "fedleash" in printed(done, "fedloom list algorithms")
    assert "strength of the pull" in " ".join(printed(done, "fedloom describe fedleash").split())
    verdict = printed(done, "fedloom check fedleash")
    assert f"{len(laws.LAWS)} of {len(laws.LAWS)} laws hold" in verdict
    assert read_toml(folder / "leash/config.toml")["algorithm"]["mu"] == 0.5


@pytest.mark.slow
def test_tutorial(folder: Path) -> None:
    page = ROOT / "docs/tutorial.md"
    done = follow(page)
    assert f"{len(laws.LAWS)} of {len(laws.LAWS)} laws hold" in printed(done, "fedloom check fedblend")
    text = page.read_text(encoding="utf-8")
    for name in ("fedavg", "fedavg_ft", "local_only"):  # the table that compares them
        cells = re.search(rf"^\| `{name}` \|(.+)\|$", text, re.MULTILINE)
        assert cells is not None
        assert sorted(map(float, re.findall(r"0\.\d{4}", cells[1]))) == pytest.approx(last_accuracies(name), abs=0.01)
    for value in last_accuracies("first"):  # and the sentence about the first run
        assert any(abs(float(said) - 100 * value) < 1 for said in re.findall(r"([\d.]+) %", text))


def last_accuracies(name: str) -> list[float]:
    """The last accuracies of a run: of the common model, the personal ones, and the worst tenth of these."""
    found = json.loads(Path(f"runs/{name}/summary.json").read_text())["metrics"]
    shown_there = re.compile(r"(global|personal/\w+)/test/accuracy(_worst10)?")
    return sorted(value["last"] for metric, value in found.items() if shown_there.fullmatch(metric))


@pytest.mark.slow
@pytest.mark.parametrize("page", ["researcher", "hospital"])
def test_first_steps(folder: Path, page: str) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    done = follow(ROOT / f"docs/first-steps/{page}.md")
    assert printed(done, "fedloom report").split()[0].endswith("report.html")


@pytest.mark.slow
def test_tables(folder: Path) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")
    done = follow(ROOT / "docs/tables.md")
    assert "each client's model" in printed(done, "fedloom predict")
    assert len((folder / "predictions.csv").read_text().splitlines()) == 201
    assert "balanced_accuracy" in printed(done, "fedloom evaluate")
    assert (folder / "hospital-a.pt2").is_file()


@pytest.mark.slow
def test_networks(folder: Path) -> None:
    done = follow(ROOT / "docs/networks.md")
    assert "psi" in printed(done, "fedloom describe topology torus")


@pytest.mark.slow
def test_write_a_method(folder: Path) -> None:
    done = follow(ROOT / "docs/write-a-method.md")
    assert f"{len(laws.LAWS)} of {len(laws.LAWS)} laws hold" in printed(done, "fedloom check gossip_ball")
    assert "global/test/top3" in printed(done, "fedloom run rounds=5")


def test_write_a_method_has_every_capability() -> None:
    page = (ROOT / "docs/write-a-method.md").read_text(encoding="utf-8")
    assert [cls.__name__ for cls in CAPABILITIES if f"\n| `{cls.__name__}` |" not in page] == []


@pytest.mark.parametrize(
    ("translation", "originals"),
    [
        ("README.zh-CN.md", ["README.md"]),
        ("docs/first-steps/zh-CN.md", ["docs/first-steps/researcher.md", "docs/first-steps/hospital.md"]),
    ],
)
def test_a_translation_says_what_is_tested(translation: str, originals: list[str]) -> None:
    """Its commands, what they print, and its snippets are those of pages that are executed; comments are translated."""
    tested = "".join((ROOT / name).read_text(encoding="utf-8") for name in originals)
    commands = {command: lines for block in blocks(tested) if block.is_run for command, lines in block.commands}
    snippets = {uncommented(block.text) for block in blocks(tested)}
    said = list(blocks((ROOT / translation).read_text(encoding="utf-8")))
    assert len(said) > 8
    for block in said:
        if block.is_run:
            for command, lines in block.commands:
                assert command in commands
                assert not lines or lines == commands[command]
        else:
            assert uncommented(block.text) in snippets


def uncommented(code: str) -> str:
    return re.sub(r"(?<=\S)\s+# .*$", "", code, flags=re.MULTILINE)


def test_pages_name_settings_that_exist() -> None:
    tables = "".join((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("configuration", "algorithms"))
    known = {"kind", *re.findall(r"^\| `([\w.]+)` \|", tables, re.MULTILINE)}
    wrong_on_purpose = {"local.lrr"}
    sections = "|".join([*SECTIONS, "algorithm", "data", "model", "partition", "topology"])
    for page in PAGES:
        named = re.findall(rf"\b((?:{sections})\.(\w+))=", page.read_text(encoding="utf-8"))
        assert {full for full, key in named if key not in known} - wrong_on_purpose == set(), page


def test_a_command_that_fails_is_noticed(folder: Path) -> None:
    with pytest.raises(AssertionError, match="ended with 2"):
        execute("```console\n$ fedloom describe nothing_of_the_kind\n```\n")
    assert execute("```console\n$ fedloom describe nothing_of_the_kind   # exit code 2\n```\n")[0].code == 2
    with pytest.raises(AssertionError, match="ended with 0"):
        execute("```console\n$ fedloom list topologies   # exit code 2\n```\n")


@pytest.mark.slow
def test_an_output_that_is_stale_is_noticed(folder: Path) -> None:
    page = "```console\n$ fedloom partition shards --out a.png\nclients                       20\n...\n{}\n...\n```\n"
    right, stale = (page.format(f"heterogeneity                 {value} of at most 0.90") for value in ("0.80", "0.99"))
    done = execute(right)
    assert differences(right, done) == []
    assert differences(stale, done) == [(done[0].command, "heterogeneity                 0.99 of at most 0.90")]
    assert renewed_page(stale, done) == right
    assert differences(right.replace("...\n", ""), done)  # lines are missing
    assert differences(right.replace("20\n", "21\n"), done)


def test_a_snippet_that_fails_is_noticed(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        execute("```python\n1 / 0\n```\n")
    execute("```python\n# later/used.py\n1 / 0\n```\n")
    assert (folder / "later/used.py").is_file()


@pytest.mark.slow
def test_an_algorithm_that_breaks_a_law_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "LAWS", (laws.training_changes_something,))  # one is enough
    lazy = (
        "```python\n# algorithms/lazy.py\nfrom fedloom import FedAvg\n\n\n"
        "class Lazy(FedAvg):\n    def update(self, server, inbox):\n        return server\n```\n"
    )
    with pytest.raises(AssertionError, match="BROKEN"):
        execute(lazy + "```console\n$ fedloom check lazy\n```\n")


@pytest.mark.slow
def test_generated_pages_are_up_to_date() -> None:
    """Those of classes and those of results: what is kept below results/ is what the pages of reproduction say."""
    pages = module_at(ROOT / "docs/generate.py").PAGES
    assert {"configuration.md", "algorithms.md", "reproduction.md", "reproduction/law-afl.md"} <= set(pages)
    stale = [name for name, page in pages.items() if (ROOT / "docs" / name).read_text(encoding="utf-8") != page()]
    assert not stale, "run python docs/generate.py"


@pytest.mark.parametrize(
    ("bullet", "family"),
    [("Algorithms", "algorithms"), ("Nets", "models"), ("Data", "datasets"), ("Partitions", "partitions")],
)
def test_readme_names_nothing_that_is_not_there(bullet: str, family: str) -> None:
    listed = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"- **{bullet}**")[2].partition("\n- ")[0]
    named = set(re.findall(r"`(\w+)`", listed))
    assert len(named) > 3
    assert named <= {entry.name for entry in entries(family)}


def test_readme_counts_the_laws() -> None:
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    words += ["eleven", "twelve", "thirteen", "fourteen"]
    assert f"the {words[len(laws.LAWS)]} laws" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in (t for t in targets if "://" not in t):
        place, _, anchor = target.partition("#")
        file = (page.parent / place).resolve() if place else page
        assert file.exists(), target
        if anchor:
            assert anchor in headings(file), target


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    found = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_pictures_are_small() -> None:
    pictures = sorted((ROOT / "docs/images").iterdir())
    assert pictures
    assert [p.name for p in pictures if p.stat().st_size > 200_000] == []


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_example_experiments_are_valid(path: Path) -> None:
    assert parse(read_toml(path)).basics.rounds > 0


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_scripts_run(path: Path, folder: Path) -> None:
    found = module_at(path).main(rounds=2)
    assert all(0 <= value <= 1 for value in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(path: Path, folder: Path) -> None:
    pytest.importorskip("pandas")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)  # what a reader sees is made anew
    space: dict[str, Any] = {"__name__": f"notebook_{path.stem}"}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(path), "exec"), space)
    assert [number for number, _ in space["curve"]] == list(range(1, 11))
    assert space["predictions"]["p_ill"].between(0, 1).all()


def module_at(path: Path) -> Any:
    """The Python file as a module that nobody else sees."""
    spec = importlib.util.spec_from_file_location(f"page_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
