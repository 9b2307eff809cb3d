"""The core's tests pass in a tree without ``turnwise/ext``: nothing that every run needs is in what plugs in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("agents", "model", "recorder", "tasks")
"""Rooms below ``tests/unit`` whose tests are run; those of all others are collected."""
# An installation for development finds modules in the checkout whatever PYTHONPATH says.
SITE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "_EditableFinder" not in repr(finder)]
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the project in a folder without ``ext``."""
    folder = tmp_path_factory.mktemp("core")
    for name in ("turnwise", "tests", "examples", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".cache"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)
    shutil.rmtree(folder / "turnwise" / "ext")
    shutil.rmtree(folder / "tests" / "ext")
    (folder / "sitecustomize.py").write_text(SITE)
    return folder


def run_tests(tree: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(tree), "TURNWISE_TESTS_SHARE": "0.02", "TURNWISE_TESTS_COLD": "1"}
    selected = ["-m", "not ext and not long and not real and not gpu", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *selected, *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.alike("core without ext")
def test_tests_of_the_core_import_nothing_of_ext(tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import turnwise, importlib; importlib.import_module('turnwise.ext')"],
        cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "No module named 'turnwise.ext'" in done.stderr
    rooms = [f"tests/unit/{folder.name}" for folder in (tree / "tests" / "unit").iterdir() if folder.is_dir()]
    left_out = {"tests/unit/docs", "tests/unit/examples", "tests/unit/__pycache__"}
    run_tests(tree, "--collect-only", "tests/contracts", "tests/compat", *sorted({*rooms} - left_out))


@pytest.mark.long
@pytest.mark.alike("core without ext")
def test_tests_of_the_core_pass_without_ext(tree: Path) -> None:
    output = run_tests(tree, "-x", "tests/contracts", *(f"tests/unit/{room}" for room in ROOMS))
    assert int(output.rpartition(" passed")[0].split()[-1]) > 500
