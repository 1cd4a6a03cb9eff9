"""What is published: the sdist, the wheel that is built from it, and the wheel in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import torch
import yaml

import fedloom

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "fedloom"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"fedloom-{fedloom.__version__}-py3-none-any.whl"


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    """Also what is no Python: the template, style and charts of the page of results, and the mark of types."""
    here = {p.relative_to(SOURCES.parent).as_posix() for p in SOURCES.rglob("*") if p.is_file() and p.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        there = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if "/licenses/" in name]
    assert there == here
    assert {"page.html", "page.css", "glue.js", "echarts.min.js", "py.typed"} <= {PurePosixPath(n).name for n in there}
    assert {PurePosixPath(name).name for name in licences} == {"LICENSE", "echarts.LICENSE.txt"}


@pytest.mark.slow
def test_the_sdist_has_what_git_has_and_nothing_else(dist: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    there = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    with tarfile.open(dist / f"fedloom-{fedloom.__version__}.tar.gz") as archive:
        packed = {"/".join(PurePosixPath(name).parts[1:]) for name in archive.getnames()}
    assert packed == there | {"PKG-INFO"}


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Only fedloom is installed there; of its dependencies the environment sees those that are here."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    (place,) = (tmp_path / "env/lib").glob("python*/site-packages")
    (place / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")

    def run(*words: str) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        done = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run(str(tmp_path / "env/bin/fedloom"), "run", "rounds=2", "checkpoint.curves=false", "--out", "first")
    report = "import fedloom, fedloom.cli.main; print(fedloom.__file__); fedloom.cli.main.main()"
    used = run(str(python), "-c", report, "report", "first", "--out", "first.html").splitlines()[0]
    assert Path(used).is_relative_to(place)
    page = (tmp_path / "first.html").read_text(encoding="utf-8")
    assert (SOURCES / "report/page/echarts.min.js").read_text(encoding="utf-8")[-1000:].strip() in page
    assert "global/test/accuracy" in page


def test_the_citation_is_complete_and_of_this_version() -> None:
    """The required keys of the Citation File Format 1.2.0, and only keys that it has."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert set(cited) <= {
        "abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi", "identifiers", "keywords",
        "license", "license-url", "message", "preferred-citation", "references", "repository", "repository-artifact",
        "repository-code", "title", "type", "url", "version",
    }  # fmt: skip
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] in ("software", "dataset")
    assert str(cited["version"]) == fedloom.__version__
    assert all(author.get("name") or author.get("family-names") for author in cited["authors"])
    assert all(isinstance(word, str) for word in cited["keywords"])


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    steps = workflow["jobs"]["test"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)
    supported = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert supported is not None
    assert supported[1] in workflow["jobs"]["test"]["strategy"]["matrix"]["python"]
