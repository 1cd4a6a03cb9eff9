"""Finding things by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fedloom.algorithms
from fedloom.core.errors import ConfigError
from fedloom.core.schema import module_names
from fedloom.runs.find import algorithms, find_algorithm
from support.terminal import environment


def test_only_the_file_that_is_named_is_imported(tmp_path: Path) -> None:
    code = """
import sys
import fedloom.algorithms
fedloom.algorithms.__path__.append(sys.argv[1])  # a package with one broken file
from fedloom.core.errors import ConfigError
from fedloom.runs.find import find_algorithm
print(find_algorithm("fedprox", "algorithm.kind").__name__)
print(sorted(m for m in sys.modules if m.startswith("fedloom.algorithms.")))
try:
    find_algorithm("fedprx", "algorithm.kind")
except ConfigError as error:
    print(error)
"""
    (tmp_path / "broken.py").write_text("1 / 0\n")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    name, imported, *error = done.stdout.splitlines()
    assert name == "FedProx"
    assert "fedloom.algorithms.fedprox" in imported
    assert "scaffold" not in imported
    assert "did you mean 'fedprox'?" in error[-1]


def test_every_file_of_the_package_is_an_algorithm() -> None:
    files = {path.stem for path in Path(fedloom.algorithms.__path__[0]).glob("[!_]*")}
    assert set(module_names("fedloom.algorithms")) == set(algorithms(own=False)) == files


def test_a_name_that_is_no_algorithm() -> None:
    with pytest.raises(ConfigError, match="there is no algorithm 'nothing'"):
        find_algorithm("nothing", "algorithm.kind")
