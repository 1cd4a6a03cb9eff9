"""Generated input: whatever a configuration, a data file or a run folder holds, the answer is one message.

CI tries a small number of cases, the same ones each time. ``FEDLOOM_FUZZ=N`` tries N new ones of each kind:
``make fuzz N=1000``.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import io
import json
import os
import resource
import shutil
import sys
import tempfile
import typing
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from fedloom.cli import main as cli
from fedloom.compare import worker
from fedloom.compare.crew import Crew, job_of
from fedloom.core import disk
from fedloom.core.schema import kinds
from fedloom.data.partition import Partition
from fedloom.data.sources import Npz
from fedloom.engine import checkpoint
from fedloom.engine.rounds import begin
from fedloom.engine.settings import Diagnostic
from fedloom.engine.topology.network import Topology
from fedloom.models.net import NetSpec
from fedloom.report.comparison import curves
from fedloom.report.comparison.question import Question, Result
from fedloom.runs import resume as resuming
from fedloom.runs import start as starting
from fedloom.runs.find import algorithms
from fedloom.runs.result import History
from fedloom.runs.settings import SECTIONS, Basics
from support.terminal import Done, files

BY_HAND = int(os.environ.get("FEDLOOM_FUZZ") or 0)
ROOM = 6 << 30  # bytes of memory that a case may have on top of what there is


def cases(few: int) -> Any:
    """How many cases are tried: the same ``few`` each time, or as many as were asked for by hand."""
    return settings(
        max_examples=BY_HAND or few,
        derandomize=not BY_HAND,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Memory that ends before the machine's does: a setting may ask for any amount."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    here = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (here + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fedloom(*words: object) -> Done:
    """The command line in this process, and in the working folder."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv, code = ["fedloom", *map(str, words)], 1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), bounded(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        finally:
            sys.argv = before
    return Done(code, out.getvalue(), err.getvalue())


def accepted_or_refused(done: Done, what: object, untouched: bool = True) -> None:
    """No traceback: a success, or one message with an exit code of its own, and nothing written."""
    assert not done.code or untouched, f"refused, but something was written: {what}\n{done.err}"
    assert done.code in (0, 2, 3, 4), f"{what}\n{done.err}"
    assert "Traceback" not in done.err, f"{what}\n{done.err}"
    assert not done.code or done.err.startswith(("error: ", "Usage: ")), f"{what}\n{done.err}"


@contextlib.contextmanager
def folder(**content: bytes) -> Iterator[Path]:
    """A working folder of one case."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            for name, data in content.items():
                Path(name.replace("__", ".")).write_bytes(data)
            yield Path(place)
        finally:
            os.chdir(home)


@pytest.fixture(scope="module")
def prepared_only() -> Iterator[None]:
    """Runs that stop before their first round: a setting may ask for any amount of training."""

    def stop(prepared: Any, run: Any, how: Any, listener: Any) -> History:
        state = begin(prepared.experiment)
        return History("", state.round, 1.0, [{"round": 0}], None, None)

    patch = pytest.MonkeyPatch()
    patch.setattr(starting, "drive", stop)
    patch.setattr(resuming, "drive", stop)
    yield
    patch.undo()


# -- values ----------------------------------------------------------------------------------------
INTS = (0, 1, 2, 3, 5, 17, 100, -1, -(2**63), 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63, 10**30)
FLOATS = (0.0, -0.0, 5e-324, 1e-45, 1e-9, 0.1, 0.5, 1.0, 1.5, 2.0, 1e9, 1e30, 3e38, 1e39, 1e308, -1.0, -1e-9)
ODD = (float("inf"), float("-inf"), float("nan"))
WORDS = (
    *("", " ", "\0", "a\0b", "a" * 300, "/" * 300, "~", "~nosuchuser/x.npz", "..", "/", "/dev/null", "x.npz", "x.csv"),
    *(
        "ä ö ü",
        "名",
        "\x1b[31m",
        "none",
        "all",
        "auto",
        "os:system",
        "nosuch.py",
        "nosuch.py:Thing",
        "a.b:C",
        "1",
        "{}",
    ),
)
numbers = st.one_of(st.sampled_from(INTS), st.sampled_from(FLOATS), st.sampled_from(ODD), st.integers(), st.floats())
simple = st.one_of(
    numbers,
    st.sampled_from(WORDS),
    st.booleans(),
    st.text(max_size=8).filter(lambda text: text.isprintable()),
    st.sampled_from([datetime.date(2000, 1, 1), datetime.time(1, 2), datetime.datetime(2000, 1, 1, 1, 1)]),
)
anything = st.recursive(
    simple,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=2)),
    max_leaves=4,
)


OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.one_of(st.integers(1, 4), st.integers(0, 6), st.sampled_from(INTS)),
    float: st.one_of(st.floats(0, 1), st.floats(0, 2), st.sampled_from(FLOATS)),
    str: st.sampled_from(WORDS),
}


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type, usual and unusual ones."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in OF_TYPE:
        return OF_TYPE[hint]
    if origin is typing.Annotated:
        return of_type(inner[0])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (tuple, list):
        return st.lists(of_type(inner[0]) if inner else anything, max_size=3)
    known = [part for part in inner if part is not type(None)]
    return st.one_of(*map(of_type, known)) if known else anything


def value_of(field: FieldInfo, wild: bool) -> st.SearchStrategy[Any]:
    """What the field is for, or, where it gets wild, anything."""
    usual = st.just(field.default) if isinstance(field.default, str | int | float) else st.nothing()
    return anything if wild else st.one_of(of_type(field.annotation), usual)


def subset(cls: Any, draw: Any, wild: bool, most: int = 3) -> dict[str, Any]:
    """Some settings of a section."""
    if not cls.model_fields:
        return {}
    names = draw(st.lists(st.sampled_from(sorted(cls.model_fields)), max_size=most, unique=True))
    return {name: draw(value_of(cls.model_fields[name], wild)) for name in names}


KINDS: dict[str, list[tuple[str, Any]]] = {
    "partition": sorted(kinds(Partition, "fedloom.data.partition").items()),
    "model": sorted(kinds(NetSpec, "fedloom.models").items()),
    "algorithm": sorted(algorithms(own=False).items()),
    "topology": sorted(kinds(Topology, "fedloom.engine.topology").items()),
}


@st.composite
def experiments(draw: Any) -> dict[str, Any]:
    """A table with some of all sections."""
    wild = st.integers(0, 19).map(lambda n: n == 19)  # one fault is enough to be refused
    table: dict[str, Any] = {"rounds": 1, **subset(Basics, draw, draw(wild), draw(st.integers(0, 1)))}
    table["data"] = {"source": draw(st.sampled_from(["images.npz", "images.npz", "rows.npz"]))}
    if not draw(st.integers(0, 3)):
        table["data"] |= subset(Npz, draw, draw(wild), 1)
    networks = draw(wild)
    for section, each in KINDS.items():
        if section == "topology" and not networks:
            continue
        kind, cls = draw(st.sampled_from(each))
        table[section] = {"kind": kind, **subset(cls, draw, draw(wild), draw(st.integers(0, 2)))}
        networks = networks or getattr(cls, "family", "") == "gossip"
    if "clients" in dict(KINDS["partition"])[table["partition"]["kind"]].model_fields:
        table["partition"].setdefault("clients", 3)
    for section in draw(st.lists(st.sampled_from(sorted(SECTIONS)), max_size=2, unique=True)):
        table[section] = subset(SECTIONS[section], draw, draw(wild), draw(st.integers(0, 2)))
    if draw(wild):
        names = st.one_of(st.sampled_from([*table, *SECTIONS, "compare"]), st.text("abc.-", max_size=5))
        table[draw(names)] = draw(anything)
    return table


def rows(n: int = 60, *shape: int, byte: bool = False) -> dict[str, Any]:
    """Data that is as it should be."""
    chance = np.random.default_rng(0)
    x = chance.integers(0, 256, (n, *shape)).astype(np.uint8) if byte else chance.normal(size=(n, *shape))
    return {"x": x if byte else x.astype(np.float32), "y": np.arange(n) % 3, "client": np.arange(n) % 4}


def packed(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return out.getvalue()


ROWS, IMAGES = packed(**rows(60, 4)), packed(**rows(24, 1, 28, 28, byte=True))


# -- configurations --------------------------------------------------------------------------------
@pytest.mark.usefixtures("prepared_only")
@cases(100)
@given(experiments(), st.booleans())
def test_any_experiment_is_prepared_or_refused(table: dict[str, Any], in_file: bool) -> None:
    with folder(rows__npz=ROWS, images__npz=IMAGES) as place:
        if in_file:
            Path("e.toml").write_bytes(tomli_w.dumps(table).encode("utf-8", "replace"))
            words = ["e.toml"]
        else:
            flat = {k: v for k, v in table.items() if not isinstance(v, dict)}
            flat |= {f"{s}.{k}": v for s, part in table.items() if isinstance(part, dict) for k, v in part.items()}
            words = [f"{k}={_written(v)}".replace("\0", "") for k, v in flat.items()]
        before = files(place)
        done = fedloom("run", *words, "--out", "out")
        accepted_or_refused(done, table, before == files(place))


def _written(value: Any) -> str:
    """A value as somebody might write it on the command line."""
    return tomli_w.dumps({"v": value}).removeprefix("v = ").strip() if not isinstance(value, dict | str) else str(value)


@pytest.mark.parametrize("width", [2**31 - 1, 2**62])
def test_a_net_that_does_not_fit_into_memory_is_refused(width: int) -> None:
    with folder(images__npz=IMAGES) as place:
        before = files(place)
        words = ("data=images.npz", "partition.clients=3", "model.kind=cnn64", f"model.projection={width}")
        done = fedloom("run", *words, "algorithm=analytic", "--out", "out")
        assert done.code == 2
        assert done.err.startswith("error: there is not enough memory (")
        accepted_or_refused(done, words, before == files(place))


EXTREME = (0.0, 5e-324, 1e-45, 1e-30, 1e-9, 0.5, 1.0, 1e9, 1e30, 3e38)


@st.composite
def trainings(draw: Any) -> list[str]:
    """Settings of one round that is trained for real, with numbers that are each allowed somewhere."""
    kind, cls = draw(st.sampled_from(KINDS["algorithm"]))
    words = [f"algorithm.kind={kind}", f"model.kind={draw(st.sampled_from(['logistic', 'mlp']))}"]
    sections = {"algorithm": cls} | {name: SECTIONS[name] for name in ("local", "evaluate", "privacy", "system")}
    for section, spec in sections.items():
        real = sorted(
            name
            for name, field in spec.model_fields.items()
            if float in (field.annotation, *get_args(field.annotation))
        )
        for name in draw(st.lists(st.sampled_from(real), max_size=2, unique=True)) if real else ():
            words.append(f"{section}.{name}={draw(st.sampled_from(EXTREME))}")
    measured = draw(st.lists(st.sampled_from(get_args(Diagnostic)), max_size=2, unique=True))
    return [*words, f"evaluate.diagnostics={json.dumps(measured)}"] if measured else words


@cases(30)
@given(trainings())
def test_extreme_numbers_train_or_are_refused(words: list[str]) -> None:
    with folder(rows__npz=ROWS):
        done = fedloom(
            "run", "data=rows.npz", "rounds=1", "partition.clients=3", "local.epochs=1", *words, "--out", "out"
        )
        accepted_or_refused(done, words)


# -- data files ------------------------------------------------------------------------------------
dtypes = st.sampled_from(
    ["f4", "f8", "f2", "u1", "i1", "i8", "u8", "?", "c8", "U3", "S3", "V5", "M8[s]", "m8[s]", ">f4", "O", "i4,f4"]
)
shapes = st.one_of(
    st.sampled_from([(), (0,), (12,), (12, 1), (12, 4), (12, 0), (0, 4), (12, 1, 4, 4), (12, 4, 4), (12, 2, 2, 3)]),
    st.lists(st.integers(0, 12), max_size=4).map(tuple),
)


@st.composite
def arrays(draw: Any) -> Any:
    """An array of any type and shape, with values that repeat and values that are odd."""
    dtype, shape = np.dtype(draw(dtypes)), draw(shapes)
    odd = draw(st.sampled_from(["0", "1", "-1", "2.5", "nan", "inf", "1e300", "18446744073709551615", "a", "", "\xff"]))
    base = np.arange(int(np.prod(shape))) % draw(st.integers(1, 4))
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            made = base.reshape(shape).astype(dtype)
        except (ValueError, TypeError):
            made = np.zeros(shape, dtype)
        if made.size and draw(st.booleans()):
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                made.reshape(-1)[draw(st.integers(0, made.size - 1))] = odd
    return made


@st.composite
def mutated(draw: Any, whole: bytes) -> bytes:
    """Bytes of which some are others, missing, doubled or new."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at, how = draw(st.integers(0, max(0, len(data) - 1))), draw(st.integers(0, 4))
        if how == 0 and data:
            data[at] = draw(st.integers(0, 255))
        elif how == 1:
            del data[at:]
        elif how == 2:
            del data[at : at + draw(st.integers(1, 40))]
        elif how == 3:
            data[at:at] = draw(st.binary(max_size=8))
        else:
            data[at:at] = data[: draw(st.integers(0, 40))]
    return bytes(data)


def _npz(found: dict[str, Any], plain: bool) -> bytes:
    out = io.BytesIO()
    if plain:
        with zipfile.ZipFile(out, "w") as archive:
            for name, array in found.items():
                archive.writestr(name, array.tobytes() if array.dtype != object else b"x")
    else:
        np.savez(out, **found)
    return out.getvalue()


def _csv(cells: list[list[str]]) -> bytes:
    return "\n".join(",".join(row) for row in cells).encode("utf-8", "surrogatepass")


def _parquet(table: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(table, out)
    return out.getvalue()


_COLUMNS: list[Any] = [
    pa.array(np.arange(12) % 3),
    pa.array(np.arange(12) / 7),
    pa.array(np.uint64(2**64 - 12) + np.arange(12, dtype=np.uint64)),
    pa.array(["a", "b", "c"] * 4),
    pa.array(["a", "a\0", "\0"] * 4),
    pa.array([b"\xff", b"\xfe", b"a"] * 4),
    pa.array(["a", None, "c"] * 4),
    pa.array([[1], [1, 2], []] * 4),
    pa.array([{"a": 1}] * 12),
    pa.array([datetime.date(2000, 1, day) for day in range(1, 13)]),
    pa.array([float("nan"), float("inf"), 1e300] * 4),
    pa.array(["a", "b", "c"] * 4).dictionary_encode(),
    pa.array([None] * 12),
    pa.array([True, False, True] * 4),
    pa.array(np.arange(12).astype(np.float16)),
]
_CELLS = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "1.5", "", " ", "nan", "inf", "1e400", "9" * 5000, "a", '"', '"a"', "a\0", "\0", "ä", "\r"]
    ),
    st.text(max_size=4),
)
_HEADS = st.sampled_from(["label", "label", "a", "b", "client", "split", "", "label ", "ä", '"'])
_NAMES = ("x", "y", "client", "test", "labels", "x_train", "y_train", "x_test", "y_test", "z")
_TABLE = {"a": _COLUMNS[1], "b": _COLUMNS[0], "label": _COLUMNS[3]}


@st.composite
def tables(draw: Any) -> list[list[str]]:
    """A table of text, some cells of which are others."""
    cells = [["a", "b", "label", "client", "split"]]
    cells += [[str(i), str(i / 7), "xyz"[i % 3], str(i % 2), ("train", "test")[i % 2]] for i in range(12)]
    for _ in range(draw(st.integers(0, 3))):
        row, column = draw(st.integers(0, 12)), draw(st.integers(0, 4))
        if draw(st.integers(0, 5)):
            cells[row][column : column + 1] = [draw(_CELLS if row else _HEADS)]
        else:
            cells[row][column:] = draw(st.lists(_CELLS, max_size=6))
    return cells


data_files: st.SearchStrategy[tuple[str, bytes]] = st.one_of(
    st.tuples(
        st.just("npz"),
        st.builds(
            lambda other, plain: _npz(rows(12, 4) | other, plain),
            st.dictionaries(st.sampled_from(_NAMES), arrays(), min_size=1, max_size=2),
            st.integers(0, 9).map(lambda n: n == 9),
        ),
    ),
    st.tuples(
        st.just("npz"),
        st.builds(_npz, st.dictionaries(st.sampled_from(_NAMES), arrays(), min_size=1, max_size=5), st.just(False)),
    ),
    st.tuples(st.just("npz"), mutated(ROWS)),
    st.tuples(st.just("npz"), mutated(_npz(rows(12, 4), plain=False))),
    st.tuples(st.just("csv"), tables().map(_csv)),
    st.tuples(st.just("csv"), mutated(_csv([["a", "label"], *[[str(i), "xyz"[i % 3]] for i in range(12)]]))),
    st.tuples(
        st.just("parquet"),
        st.dictionaries(_HEADS, st.sampled_from(_COLUMNS), max_size=2).map(
            lambda other: _parquet(pa.table(_TABLE | other))
        ),
    ),
    st.tuples(st.just("parquet"), mutated(_parquet(pa.table(_TABLE)))),
)


@pytest.mark.usefixtures("prepared_only")
@cases(150)
@given(data_files, st.sampled_from([("client", "split"), (), ("client",), ("split",)]))
def test_any_data_file_is_read_or_refused(file: tuple[str, bytes], columns: tuple[str, ...]) -> None:
    suffix, content = file
    named = [f"data.{column}={column}" for column in columns if suffix == "csv"]
    with folder(**{f"d__{suffix}": content}) as place:
        before = files(place)
        done = fedloom(
            "run",
            f"data=d.{suffix}",
            *named,
            "partition.kind=iid",
            "partition.clients=2",
            "model.kind=logistic",
            "--out",
            "o",
        )
        accepted_or_refused(done, content, before == files(place))


# -- run folders -----------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all files that a run can have."""
    with folder(rows__npz=ROWS):
        words = [
            "data=rows.npz",
            "rounds=2",
            "partition.clients=3",
            "cohort.sampling=all",
            "model.kind=logistic",
            "checkpoint.every=1",
        ]
        private = ["privacy.clip=1.0", "privacy.noise=1.0", "algorithm.weighting=uniform", "evaluate.work=true"]
        done = fedloom("run", *words, *private, "--out", "run")
        assert done.code == 0, done.err
        kept = tmp_path_factory.mktemp("finished")
        shutil.copytree("run", kept / "run")
        shutil.copy("rows.npz", kept)
    return kept


@st.composite
def other_json(draw: Any, text: str) -> str:
    """A JSON text of which one value is another."""
    try:
        whole = json.loads(text)
    except ValueError:
        return text
    home, key = None, None
    node = whole
    while isinstance(node, dict | list) and node and (home is None or draw(st.integers(0, 3))):
        home, key = node, draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node = home[key]
    new = draw(
        st.one_of(
            st.none(),
            simple.filter(lambda v: not isinstance(v, datetime.date | datetime.time)),
            st.just([]),
            st.just({}),
        )
    )
    if home is None or not draw(st.integers(0, 5)):
        return json.dumps(new)
    if draw(st.booleans()):
        home[key] = new
    else:
        del home[key]
    return json.dumps(whole)


def vouched_for(meta: str) -> str:
    """The record of a checkpoint with the checksum that belongs to it, as somebody would forge it."""
    with contextlib.suppress(ValueError):  # what was spoiled before may be no JSON any more
        table = json.loads(meta)
        return json.dumps(table | {"self": checkpoint._sum(table)}) if isinstance(table, dict) else meta
    return meta


def spoil(draw: Any, home: Path, but: tuple[str, ...]) -> str:
    """Delete, replace or change one file below a folder; which one."""
    found = sorted(p for p in home.rglob("*") if p.is_file() and p.name not in but)
    victim = found[draw(st.integers(0, len(found) - 1))]
    content, how = victim.read_bytes(), draw(st.integers(0, 9))
    if how == 0:
        victim.unlink()
    elif how == 1:
        victim.unlink()
        victim.mkdir()
    elif how <= 5 and victim.suffix in (".json", ".jsonl"):
        text = content.decode("utf-8", "replace")
        lines = text.splitlines(keepends=True) if victim.suffix == ".jsonl" else [text]
        at = draw(st.integers(0, max(0, len(lines) - 1)))
        new = draw(other_json(lines[at] if lines else ""))
        lines[at : at + 1] = [(vouched_for(new) if victim.name == "meta.json" else new) + "\n"]
        victim.write_text("".join(lines))
    else:
        victim.write_bytes(draw(mutated(content)))
    return str(victim)


@cases(40)
@given(st.data())
def test_any_run_folder_is_resumed_or_refused(finished: Path, data: st.DataObject) -> None:
    draw = data.draw
    with folder() as place:
        shutil.copytree(finished, place, dirs_exist_ok=True)
        run = place / "run"
        # not config.toml, in which one more digit can mean a million rounds: experiments have a test of their own
        victims = [spoil(draw, run, (".lock", "config.toml")) for _ in range(draw(st.integers(1, 2)))]
        if draw(st.booleans()) and (run / "manifest.json").is_file():
            (run / "manifest.json").unlink()
        how_to = draw(
            st.sampled_from([["--rounds", "3"], [], ["--repair"], ["--from", "1"], ["--from", "1", "--repair"]])
        )
        done = fedloom("resume", "run", *how_to)
        accepted_or_refused(done, [victims, how_to])


@cases(20)
@given(st.data())
def test_any_run_folder_is_shown_or_refused(finished: Path, data: st.DataObject) -> None:
    """Whoever looks at a run of somebody else sees it, or reads which file is not what a run writes."""
    draw = data.draw
    with folder() as place:
        shutil.copytree(finished, place, dirs_exist_ok=True)
        victims = [spoil(draw, place / "run", (".lock",)) for _ in range(draw(st.integers(1, 2)))]
        if draw(st.booleans()):
            (place / "run" / "manifest.json").unlink(missing_ok=True)
        for words in (("show", "run"), ("report", "run", "--out", "page.html")):
            done = fedloom(*words)
            if not (words[0] == "show" and done.code == 1 and "has changed since the run wrote it" in done.out):
                accepted_or_refused(done, [victims, words])


# -- folders of comparisons ------------------------------------------------------------------------
COMPARED = (
    *("compare", "fedavg", "fedprox", "--seeds", "1", "--out", "both", "data=rows.npz", "rounds=2"),
    *("partition.clients=3", "cohort.sampling=all", "model.kind=logistic", "privacy.clip=1.0", "privacy.noise=1.0"),
    "algorithm.weighting=uniform",
)


class OneProcess(Crew):
    """The cells one after another in this process: a worker of its own for each case would take minutes."""

    def work(self, jobs: int, environment: Mapping[str, str]) -> dict[str, str]:
        with open(os.devnull, "w") as nowhere:
            for cell in self._waiting:
                job = job_of(cell, self._cells / cell.hash, self._root)
                ended = worker._outcome(job, worker.Reporter(nowhere, cell.hash))
                assert ended is not None
                if ended["state"] == "failed":
                    self._failures[cell.name] = ended["message"]
        return self._failures


class DrawnOnce:
    """Curves of numbers that were drawn before are not drawn again: three pictures take longer than all else."""

    def __init__(self) -> None:
        self._pictures: dict[str, bytes] = {}
        self._draw = curves.draw

    def __call__(self, question: Question, results: Sequence[Result], path: Path) -> None:
        key = f"{path.suffix} {question} {results}"
        if key in self._pictures:
            disk.write_bytes(path, self._pictures[key])
        else:
            self._draw(question, results, path)
            self._pictures[key] = path.read_bytes()


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished comparison; its workers stay in this process."""
    kept = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch, folder(rows__npz=ROWS) as place:
        patch.setattr(importlib.import_module("fedloom.compare.run"), "Crew", OneProcess)
        patch.setattr(curves, "draw", DrawnOnce())
        done = fedloom(*COMPARED)
        assert done.code == 0, done.err
        shutil.copytree(place, kept, dirs_exist_ok=True)
        yield kept


@cases(15)
@given(st.data())
def test_any_folder_of_a_comparison_is_used_computed_again_or_refused(compared: Path, data: st.DataObject) -> None:
    """A cell that is damaged has failed, and is named with what to do; the others keep their numbers."""
    draw = data.draw
    with folder() as place:
        shutil.copytree(compared, place, dirs_exist_ok=True)
        victims = [spoil(draw, place / "both", (".lock", "config.toml")) for _ in range(draw(st.integers(1, 2)))]
        for manifest in sorted((place / "both").rglob("manifest.json")) if draw(st.booleans()) else ():
            if manifest.is_file():
                manifest.unlink()
        done = fedloom(*COMPARED)
        assert "Traceback" not in done.err + done.out, f"{victims}\n{done.err}"
        if done.code == 1:
            assert "failed: " in done.out, f"{victims}\n{done.out}{done.err}"
            assert "Error: " not in done.out, f"{victims}\n{done.out}"
        else:
            accepted_or_refused(done, victims)
