"""Input that used to end in a traceback, or in a run that meant nothing: one message, an exit code, nothing written."""

from __future__ import annotations

import io
import json
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedloom.cli.console import plain_console
from fedloom.cli.options import file_and_overrides, refuse_twice
from fedloom.core.errors import ConfigError, DataError
from fedloom.data.files import read_npz
from fedloom.data.sources import Csv, Parquet, from_arrays
from fedloom.data.table import ColumnChoice, read_csv, read_parquet
from support.terminal import Quick, files

ROWS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
LONG = "x" * 300


@pytest.fixture(scope="module")
def quick() -> Iterator[Quick]:
    server = Quick()
    yield server
    server.close()


# -- the command line ------------------------------------------------------------------------------
REFUSED = {
    "a rate beyond float32": (["local.lr=1e39"], "local.lr: is out of range"),
    "more threads than there is memory for": (
        ["engine.threads=999999"],
        "engine.threads: should be less than or equal to 1024",
    ),
    "a norm beyond float32": (["local.clip=1e39"], "local.clip: is out of range"),
    "a server's rate": (
        ["algorithm.kind=fedalr", "algorithm.server_lr=1e300", 'evaluate.diagnostics=["hessian"]'],
        "algorithm.server_lr: is out of range",
    ),
    "a long folder": (["--out", LONG], "a name in this path is too long (choose a shorter one)"),
    "a long name": ([f"name={LONG}"], "name: String should have at most 200 characters"),
    "a long source": ([f"data={LONG}"], "data.source: there is no data source"),
    "a spreadsheet": (["data=t.xlsx"], "t.xlsx: files of Excel and other spreadsheets are not read (save the table as"),
    "no spreadsheet": (["data=none.xlsx"], "none.xlsx: no such file or folder"),
    "a file of another type": (["data=deep.toml"], "deep.toml: is not of a supported type"),
    "a long path": ([f"data={LONG}.npz"], "no such file"),
    "nobody's home": (["data=~nosuchuser/x.npz"], "cannot be resolved"),
    "many brackets": (["seed=" + 3000 * "["], "seed: should be a valid integer"),
    "many digits": (["seed=" + 5000 * "9"], "seed: should be a valid integer"),
    "many digits in base 16": (["seed=0x" + 5000 * "f"], "seed: should be a valid integer"),
    "a folder": (["somewhere"], "somewhere: is a folder, not an experiment file"),
    "a run folder": (["earlier"], "earlier: is a folder, not an experiment file (did you mean earlier/config.toml?)"),
    "a file of brackets": (["deep.toml"], "deep.toml: not readable as TOML"),
    "a file of digits": (["digits.toml"], "digits.toml: not readable as TOML"),
    "a file of digits in base 16": (["hex.toml"], "hex.toml: not readable as TOML: an integer has at most 64 bits"),
}


@pytest.mark.parametrize(("words", "told"), REFUSED.values(), ids=list(REFUSED))
def test_a_run_that_cannot_be_is_refused(quick: Quick, tmp_path: Path, words: list[str], told: str) -> None:
    (tmp_path / "deep.toml").write_text("a = " + 3000 * "[" + 3000 * "]")
    (tmp_path / "digits.toml").write_text("seed = " + 5000 * "9")
    (tmp_path / "hex.toml").write_text("seed = 0x" + 5000 * "f")
    (tmp_path / "t.xlsx").write_bytes(b"PK")
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "config.toml").write_text("rounds = 1")
    before = files(tmp_path)
    done = quick("run", "rounds=1", "model.kind=logistic", *words, cwd=tmp_path)
    assert (done.code, done.err.startswith("error: ")) == (2, True), done.err
    assert told in done.err
    assert len(done.err) < 2000
    assert files(tmp_path) == before


NETS = """
from torch import nn

class Head(nn.Module):
    def __init__(self, inputs=64, outputs=10):
        super().__init__()
        self.head = nn.Linear(inputs, outputs)
    def forward(self, x):
        return self.head(x.flatten(1))

class Pair(Head):
    def forward(self, x):
        return super().forward(x), x

class Helped(Pair):
    def forward(self, x):
        return super().forward(x) if self.training else self.head(x.flatten(1))

class Choice(Head):
    def forward(self, x):
        return super().forward(x).argmax(1, keepdim=True).expand(-1, 10)

class Broken(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.head = nn.Linear(shape[3], 10)

class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyConv1d(10, 3)
    def forward(self, x):
        return self.head(x)
"""
GIVEN = r"for inputs of shape \[2, 1, 8, 8\]"
WRONG_NETS = {
    "of another width": (
        ["model=nets.py:Head", "model.inputs=99"],
        rf"model: the net fails {GIVEN}: RuntimeError: mat1 .* \(2x64 and 99x10\), at .*nets.py, line 9, in forward: ",
    ),
    "of too few outputs": (["model=nets.py:Head", "model.outputs=7"], rf"model: the net returns \[2, 7\] {GIVEN} \("),
    "of too many outputs": (["model=nets.py:Head", "model.outputs=11"], rf"the net returns \[2, 11\] {GIVEN} \("),
    "that returns a pair": (["model=nets.py:Pair"], rf"returns a tuple of \[2, 10\], \[2, 1, 8, 8\] {GIVEN} \("),
    "that returns a pair in training": (["model=nets.py:Helped"], rf"returns a tuple of .* in training {GIVEN} \("),
    "that returns integers": (["model=nets.py:Choice"], rf"the net returns \[2, 10\] of torch.int64 {GIVEN} \("),
    "that returns its inputs": (["model=torch.nn:Identity"], rf"model: the net returns \[2, 1, 8, 8\] {GIVEN} \("),
    "without a size, on images": (["model=nets.py:Lazy"], rf"model: the net fails {GIVEN}: "),
    "with an error in its constructor": (
        ["model=nets.py:Broken"],
        r"model.kind: 'nets.py:Broken' cannot be made for inputs of shape \[1, 8, 8\] and 10 outputs: IndexError: "
        r"tuple index out of range, at .*nets.py, line 26, in __init__: ",
    ),
    "of other arguments": (["model=torch.nn:LSTM"], r"model.kind: 'torch.nn:LSTM' cannot be made .* argument 'shape'"),
}


@pytest.mark.parametrize(("words", "told"), WRONG_NETS.values(), ids=list(WRONG_NETS))
def test_a_net_that_does_not_fit_the_data_is_one_error(
    quick: Quick, tmp_path: Path, words: list[str], told: str
) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    done = quick("run", "rounds=1", *words, cwd=tmp_path)
    assert (done.code, done.err.startswith("error: ")) == (2, True), done.err
    assert re.search(told, done.err), done.err
    if "the net returns" in told:
        assert "(it should return [batch, 10], one output for each of the 10 classes)" in done.err
    assert files(tmp_path) == {"nets.py"}


NAMED = [  # every place of the command line, and of a configuration, that takes a path
    ("show", LONG),
    ("report", LONG),
    ("watch", LONG),
    ("predict", LONG, "rows.csv"),
    ("export", LONG),
    ("compare", LONG),
    ("compare", "fedavg", "--seeds", "1", "--out", LONG),
    ("compare", "fedavg", "--seeds", "1", "--kept", LONG),
    ("compare", "fedavg", "--seeds", "1", f"compare.cells={LONG}"),
    ("collect", LONG),
    ("tune", LONG),
    ("check", f"{LONG}.py"),
    ("describe", f"{LONG}.py:Net"),
    ("describe", "topology", "--out", f"{LONG}.pdf"),
    ("data", "import", "mnist", LONG),
    ("deploy", "init", LONG),
    ("run", f"algorithm={LONG}.py"),
    ("run", f"task.loss={LONG}.py:loss"),
    ("run", "data=mnist", "--data-root", LONG),
    ("run", "algorithm=loop/own.py"),
    ("predict", "loop", "loop"),
]


@pytest.mark.parametrize("words", NAMED, ids=lambda words: " ".join(words).replace(LONG, "LONG"))
def test_a_path_that_no_file_can_have_is_one_error(quick: Quick, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = quick(*words, cwd=tmp_path)
    assert (done.code, done.err.startswith("error: ")) == (2, True), done.err
    assert next(name for name in (LONG, "loop") if any(name in word for word in words)) in done.err
    assert len(done.err) < 2000


@pytest.mark.parametrize(
    "text",
    ['data = "a\\u0000.py:load"', 'algorithm = "a\\u0000.py"', '[compare]\ncells = "\\u0000"', '"a\\u0000" = 1'],
)
def test_a_zero_byte_in_a_configuration_is_one_error(quick: Quick, tmp_path: Path, text: str) -> None:
    (tmp_path / "zero.toml").write_text(text)
    done = quick("compare", "zero.toml", "fedavg", "--seeds", "1", cwd=tmp_path)
    assert (done.code, "zero.toml: not readable as TOML: a text has no zero bytes" in done.err) == (2, True), done.err


@pytest.mark.parametrize("words", [["compare.seeds=" + 19 * "9"], ["--seeds", 19 * "9"], ["compare.seeds=1000000000"]])
def test_more_seeds_than_anybody_waits_for_are_refused(quick: Quick, tmp_path: Path, words: list[str]) -> None:
    done = quick("compare", "fedavg", *words, cwd=tmp_path)
    assert done.code == 2, done.err
    assert "compare.seeds: " in done.err
    assert files(tmp_path) == set()


def test_text_of_others_gives_no_commands_to_the_terminal(quick: Quick, tmp_path: Path) -> None:
    """A label that clears the screen or sets its title, or that turns the words around it."""
    said = quick("run", "algorithm=\x1b[2J\x07\u202e", cwd=tmp_path)
    assert "there is no algorithm '\ufffd[2J\ufffd\ufffd'" in said.err
    out = io.StringIO()
    console = plain_console(file=out, force_terminal=True, color_system="standard", width=99)
    console.print("联邦\u00a0[b]\x9b2J \x1b]0;title:heart:", style="bold")
    assert out.getvalue() == "\x1b[1m联邦\u00a0[b]\ufffd2J \ufffd]0;title:heart:\x1b[0m\n"


def test_a_file_in_the_way_of_all_runs_is_reported(quick: Quick, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    done = quick("run", "rounds=1", "model.kind=logistic", cwd=tmp_path)
    assert (done.code, "runs is a file, not a folder (" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "rounds=1", "model=logistic", "--out"),
        ("compare", "fedavg", "--seeds", "1", "rounds=1", "model=logistic", "--out"),
        ("describe", "topology", "--out"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.parametrize(
    ("out", "told"),
    [
        ("file/a/b.pdf", "file is a file, not a folder (choose another path, or rename it)"),
        ("loop/b.pdf", "loop is a link that leads to no folder (choose another path, or rename it)"),
    ],
)
def test_a_file_or_a_link_to_itself_in_the_path_of_a_result_is_bad_input(
    quick: Quick, tmp_path: Path, words: tuple[str, ...], out: str, told: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    done = quick(*words, out, cwd=tmp_path)
    assert (done.code, done.err.startswith("error: ")) == (2, True), done.err
    assert f"{Path(out).parent}" in done.err
    assert told in done.err
    assert files(tmp_path) == {"file", "loop"}


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm=law_afl", "model=logistic", "partition.clients=1"],
        ["algorithm=dfedavg", "topology=exp", "partition.clients=2", "model=logistic"],
        ["algorithm=fedalr", "algorithm.server_lr=1e30", 'evaluate.diagnostics=["hessian"]', "model=logistic"],
    ],
)
def test_small_and_extreme_worlds_end_as_documented(quick: Quick, tmp_path: Path, words: list[str]) -> None:
    done = quick("run", "rounds=1", "checkpoint.curves=false", *words, cwd=tmp_path)
    assert done.code in (0, 3), done.err
    assert done.code == 0 or done.err.startswith("error: round 1: ")


def test_a_folder_that_holds_everything_is_not_searched_to_its_depths(quick: Quick, tmp_path: Path) -> None:
    deep = tmp_path.joinpath("data", *"abcdefgh")
    deep.mkdir(parents=True)
    (deep / "image.png").write_bytes(b"")
    done = quick("run", "rounds=1", f"data={tmp_path / 'data'}", cwd=tmp_path)
    assert (done.code, "contains no images" in done.err) == (2, True), done.err


# -- data files ------------------------------------------------------------------------------------
def saved(path: Path, **arrays: Any) -> Path:
    np.savez_compressed(path, **arrays)
    return path


def parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def told(quick: Quick, path: Path, *words: str) -> str:
    """What is said of a data file that cannot be used."""
    before = files(path.parent)
    done = quick("run", "rounds=1", f"data={path.name}", "partition.clients=2", *words, cwd=path.parent)
    assert (done.code, done.err.startswith("error: ")) == (2, True), done.err
    assert files(path.parent) == before
    return done.err


def test_files_without_rows_features_or_classes_are_refused(quick: Quick, tmp_path: Path) -> None:
    at, y = tmp_path / "d.npz", np.arange(60) % 2
    assert "x must have at least two dimensions" in told(quick, saved(at, x=np.float32(1), y=y))
    assert "x must be numeric (got |V5)" in told(quick, saved(at, x=np.zeros((60, 3), "V5"), y=y))
    assert "its rows have no features (x has shape (60, 0))" in told(quick, saved(at, x=ROWS[:, :0], y=y))
    assert "are of one class, '7', so there is nothing to learn" in told(quick, saved(at, x=ROWS, y=0 * y + 7))
    with zipfile.ZipFile(at, "w") as archive:
        archive.writestr("x", b"no array")
        archive.writestr("y", b"no array either")
    assert "array 'x' cannot be read" in told(quick, at)


def test_lists_are_no_labels(quick: Quick, tmp_path: Path) -> None:
    path = parquet(tmp_path / "d.parquet", a=[1.0, 2.0, 3.0], label=[[1], [1, 2], []])
    assert "column 'label': must contain one value in each row (got list<" in told(quick, path)


def test_labels_that_differ_stay_apart(tmp_path: Path) -> None:
    large = read_npz(saved(tmp_path / "f.npz", x=ROWS, y=np.array([1e19, 2e19] * 30)))
    assert large.labels == ("10000000000000000000", "20000000000000000000")
    assert large.y.tolist() == [0, 1] * 30
    unsigned = read_npz(saved(tmp_path / "u.npz", x=ROWS, y=np.array([2**63, 2**64 - 1] * 30, np.uint64)))
    assert unsigned.labels == (str(2**63), str(2**64 - 1))
    with pytest.raises(DataError, match=r"row 0: the label is not UTF-8 text \(got b'\\xff'\)"):
        read_npz(saved(tmp_path / "b.npz", x=ROWS, y=np.array([b"\xff", b"\xfe"] * 30)))
    columns, zero = ColumnChoice(("label",)), r"row 1: the word in column 'label' ends in a zero byte"
    with pytest.raises(DataError, match=zero):
        read_parquet(parquet(tmp_path / "z.parquet", a=[1.0, 2.0], label=["a", "a\0"]), columns)
    with pytest.raises(DataError, match="not UTF-8 text"):
        Parquet(path=str(parquet(tmp_path / "b.parquet", a=[1.0, 2.0], label=[b"\xff", b"\xfe"]))).load(tmp_path, 0)
    (tmp_path / "z.csv").write_bytes(b"a,label\n1,a\n2,a\0\n")
    with pytest.raises(DataError, match="line 3: the word in column 'label' ends in a zero byte"):
        read_csv(tmp_path / "z.csv", columns)
    with pytest.raises(DataError, match="row 1: the label ends in a zero byte"):
        from_arrays(ROWS[:2], ["a", "a\0"])


@pytest.mark.parametrize(("one", "other"), [("01", "1"), ("+1", "1"), ("1e1", "10")])
@pytest.mark.parametrize("column", ["label", "client"])
def test_two_words_for_one_number_are_not_taken_for_one_thing(
    tmp_path: Path, column: str, one: str, other: str
) -> None:
    lines = [
        {"a": str(i), "label": str(i % 2), "client": str(i % 3)} | {column: (one, other, "2")[i % 3]} for i in range(9)
    ]
    (tmp_path / "d.csv").write_text("a,label,client\n" + "".join(",".join(line.values()) + "\n" for line in lines))
    with pytest.raises(DataError, match=rf"line \d: the {column} .*'{re.escape(one)}'.* the same number \(write it in"):
        Csv(path=str(tmp_path / "d.csv"), client="client").load(tmp_path, 0)


def test_whole_numbers_with_and_without_a_point_are_the_same_label(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,label\n" + "".join(f"{i},{('0', '0.0', '1.', '1')[i % 4]}\n" for i in range(8)))
    assert Csv(path=str(tmp_path / "d.csv")).load(tmp_path, 0).y.tolist() == [0, 0, 1, 1] * 2


def test_a_label_beyond_the_named_classes_is_reported_as_it_is(tmp_path: Path) -> None:
    y = np.array([0, 1] * 29 + [0, 2**64 - 1], np.uint64)
    with pytest.raises(DataError, match=f"row 59: the label must be in 0..1 \\(got {2**64 - 1}\\)"):
        read_npz(saved(tmp_path / "d.npz", x=ROWS, y=y, labels=np.array(["a", "b"])))


# -- limits ----------------------------------------------------------------------------------------
def test_what_unpacks_to_more_than_the_limit_is_refused(quick: Quick, tmp_path: Path) -> None:
    many = np.zeros((60, 20_000), np.float32)
    many[:, 0] = np.arange(60)
    bomb = saved(tmp_path / "d.npz", x=many, y=np.arange(60) % 2)
    assert bomb.stat().st_size < 50_000
    message = told(quick, bomb, "data.limit_gb=0.001")
    assert "d.npz: unpacks to 0.0 GB or more, but data.limit_gb = 0.001" in message
    words = ("rounds=1", "data=d.npz", "model.kind=logistic", "partition.clients=2", "data.limit_gb=0.01")
    assert quick("run", *words, cwd=tmp_path).code == 0
    columns = ColumnChoice(("label",))
    flat = parquet(tmp_path / "d.parquet", a=np.zeros(100_000), label=np.arange(100_000) % 2)
    assert flat.stat().st_size < 300_000
    with pytest.raises(DataError, match=r"unpacks to .* \(if that is right, set data.limit_gb="):
        read_parquet(flat, columns, limit=500_000)
    assert read_parquet(flat, columns, limit=5_000_000).rows == 100_000
    (tmp_path / "d.csv").write_text("a,label\n" + "".join(f"{i},{i % 2}\n" for i in range(100)))
    with pytest.raises(DataError, match="unpacks to"):
        read_csv(tmp_path / "d.csv", columns, limit=400)


def test_no_memory_is_taken_for_an_array_that_only_its_header_promises(tmp_path: Path) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 64)})
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x.npy", head.getvalue() + bytes(64))
    with pytest.raises(DataError, match=r"its header claims 281474976710656 bytes, but it has 64"):
        read_npz(tmp_path / "d.npz")


# -- run folders -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(quick: Quick, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    words = ("rounds=1", "model.kind=logistic", "partition.clients=3", "evaluate.work=true", "checkpoint.curves=false")
    assert quick("run", *words, "--out", "run", cwd=place).code == 0
    (place / "run" / "manifest.json").unlink()  # as in runs of earlier versions, whose files nothing vouches for
    return place / "run"


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("environment.json", "[]", 0),
        ("environment.json", "5", 0),
        ("environment.json", 3000 * "[", 0),
        ("partition.json", json.dumps({"data_sha256": 5, "sha256": 5}), 2),
        ("partition.json", 100_000 * "[", 2),
        ("timings.jsonl", "5\n", 0),
        ("timings.jsonl", '{"round": 1, "train": "long"}\n', 0),
        ("work.jsonl", "[]\n", 0),
        ("config.toml", "a = " + 3000 * "[", 2),
    ],
)
def test_files_of_a_run_that_hold_something_else(
    quick: Quick, finished: Path, tmp_path: Path, name: str, text: str, code: int
) -> None:
    """What only tells is left aside; what decides numbers is refused by name."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    done = quick("resume", "run", "--rounds", "2", cwd=tmp_path)
    assert done.code == code, done.err
    assert code == 0 or done.err.startswith("error: ")


ADVISED = {
    ("compare", "fedavg", "seed=3"): "seed: is set by compare.seeds (write --seed 3)",
    ("compare", "fedavg", "seed=[1,2]"): "seed: is set by compare.seeds (write --seed 1 --seed 2)",
    ("compare", "fedavg", "--seeds", "1,2"): "--seeds: is one number (got '1,2') (name each: --seed 1 --seed 2)",
    ("compare", "fedavg", "--seed", "1,2"): "--seed: is one number (got '1,2') (name each: --seed 1 --seed 2)",
    ("tune", "fedprox", "algorithm=ditto", "local.lr=0.1,1"): "algorithm: is given twice (name it once)",
    ("tune", "fedprx", "local.lr=0.1,1"): "fedprx: no such experiment file (did you mean algorithm=fedprox?)",
    ("describe", "model", "mlp"): "mlp: a second name (name one: fedloom describe mlp)",
    ("describe", "mlp", "nodes=3"): "nodes=3: is only for networks (as in fedloom describe topology ring nodes=16",
    ("list", "algorithm"): "algorithm: there is no such list (did you mean 'algorithms'?)",
    ("resume", "nowhere"): "nowhere: there is no such folder (see fedloom show runs/)",
    ("resume", "."): ".: is not a run folder",
}


@pytest.mark.parametrize("words", ADVISED, ids=" ".join)
def test_a_command_that_was_mistyped_is_answered_with_the_right_one(
    words: tuple[str, ...], quick: Quick, tmp_path: Path
) -> None:
    done = quick(*words, cwd=tmp_path)
    assert done.code == 2 or words[-1] == "."
    assert ADVISED[words] in done.err
    assert files(tmp_path) == set()


def test_the_last_of_two_settings_counts_but_not_in_a_search() -> None:
    """As in a script that adds a setting to others; a range and a number for one setting contradict each other."""
    words = ["rounds=2", "local.lr=1", "rounds=3"]
    assert file_and_overrides(words) == (None, words)
    with pytest.raises(ConfigError, match=r"^rounds: is given twice \(name it once\)$"):
        refuse_twice(words)


def test_a_search_takes_the_bare_name_of_an_algorithm(quick: Quick, tmp_path: Path) -> None:
    done = quick("tune", "fedprox", "algorithm.mu=0.1,1", "rounds=1", "--trials", "1", cwd=tmp_path)
    assert "evaluate.validation" in done.err  # the algorithm was understood, and so was what is searched


def test_doctor_does_not_say_that_data_is_right(quick: Quick, tmp_path: Path) -> None:
    said = next(line for line in quick("doctor", cwd=tmp_path).out.splitlines() if " data: " in line)
    assert "found, but not verified: " in said or said.endswith("nothing yet")
