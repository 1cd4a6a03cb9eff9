"""``fedloom watch``: a real server on this machine, read by a real browser where there is one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest
from test_page_in_browser import browser  # noqa: F401  the fixture

from fedloom.core import disk
from support.browser import NEEDS_CHROMIUM, opened
from support.terminal import Quick, started

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def unfinished(hostile_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that is on its way: two of four evaluations, and no summary."""
    folder = tmp_path_factory.mktemp("live") / "run"
    shutil.copytree(hostile_run, folder)
    for name in ("summary.json", "clients.csv"):
        (folder / name).unlink()
    shutil.rmtree(folder / "checkpoints")  # the first has yet to come
    lines = (hostile_run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]) + lines[2][:20])  # a line that is half written
    timings = (hostile_run / "timings.jsonl").read_text().splitlines(keepends=True)
    (folder / "timings.jsonl").write_text(timings[0])
    held = disk.lock(folder / ".lock")
    yield folder
    os.close(held)


@pytest.fixture(scope="module")
def address(unfinished: Path) -> Iterator[str]:
    pytest.importorskip("uvicorn", reason="the server library is not installed: pip install -e '.[watch]'")
    process = started("watch", unfinished, cwd=unfinished.parent)
    assert process.stdout is not None
    yield process.stdout.readline().split()[0]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode in (0, 130)


def answer(url: str, **options: object) -> tuple[int, str]:
    request = urllib.request.Request(url, **options)  # type: ignore[arg-type]
    try:
        with urllib.request.urlopen(request, timeout=600) as found:
            return found.status, found.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_is_for_those_who_know_its_address(address: str, unfinished: Path) -> None:
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", address)
    before = {p: p.stat().st_mtime_ns for p in unfinished.rglob("*")}
    code, text = answer(address)
    assert code == 200
    assert "1 / 3" in text  # rounds
    assert "time left" in text
    assert "heterogeneity" in text  # the partition is known from the start
    assert "connect-src &#39;self&#39;" in text
    root = address.rsplit("/", 2)[0]
    assert answer(root + "/")[0] == 404
    assert answer(f"{root}/guessed-the-token-wrong/")[0] == 404
    assert answer(address, method="POST")[0] == 405
    assert answer(address, headers={"Host": "evil.example"})[0] == 400
    assert {p: p.stat().st_mtime_ns for p in unfinished.rglob("*")} == before  # it only reads


@NEEDS_CHROMIUM
def test_curves_grow_while_the_run_goes_on(
    browser,  # noqa: F811
    address: str,
    unfinished: Path,
    hostile_run: Path,
) -> None:
    page, complaints = opened(browser), []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(address)
    points = """(count) => echarts.getInstanceByDom(document.getElementById("curve"))
        .getOption().series[0].data.length === count"""
    page.wait_for_function(points, arg=2)
    page.get_by_label("Metric").select_option("loss")
    for name in ("clients.csv", "metrics.jsonl", "timings.jsonl", "summary.json"):
        shutil.copy(hostile_run / name, unfinished / name)
    page.wait_for_function(points, arg=4)
    page.wait_for_function("""() => document.querySelector("#results .card.done") !== null""")
    assert page.get_by_label("Metric").input_value() == "loss"  # what was chosen stays
    page.close()
    assert complaints == []


def test_a_folder_must_be_there(tmp_path: Path) -> None:
    done = Quick()("watch", "nowhere", cwd=tmp_path)
    assert (done.code, done.out) == (2, "")
    assert "there is no such folder" in done.err


def test_a_run_serves_its_page_and_takes_the_server_along(tmp_path: Path) -> None:
    small = ("partition.clients=4", "model.kind=logistic", "checkpoint.every=100000", "evaluate.every=1000")
    process = started("run", "rounds=1000000", *small, "--watch", "--out", "r", cwd=tmp_path)
    assert process.stderr is not None
    url = next(line.split()[0] for line in process.stderr if line.startswith("http://"))
    code, text = answer(url)
    assert code == 200
    assert "/ 1,000,000" in text
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=600)
    assert process.returncode == 130
    with pytest.raises(URLError):
        answer(url)


def test_a_comparison_serves_its_page_and_takes_the_server_along(tmp_path: Path) -> None:
    small = ("partition.clients=4", "model.kind=logistic", "checkpoint.every=100000", "evaluate.every=1000")
    words = (
        "compare",
        "fedavg",
        "fedprox",
        "rounds=1000000",
        *small,
        "--seeds",
        1,
        "--jobs",
        1,
        "--watch",
        "--out",
        "c",
    )
    process = started(*words, cwd=tmp_path)
    assert process.stderr is not None
    url = next(line.split()[0] for line in process.stderr if line.startswith("http://"))
    code, text = answer(url)
    while not list((tmp_path / "c").glob("cells/*/metrics.jsonl")):  # until the first one is at work
        assert process.poll() is None, process.communicate()
        code, text = answer(url)
    assert code == 200
    assert "0 / 2" in text
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "stopped and saved with 0 of 2 cells done; repeat the command to continue" in out
    with pytest.raises(URLError):
        answer(url)
