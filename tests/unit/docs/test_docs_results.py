"""The published results of docs/benchmarks.md are those of the runs, as examples/published wrote them down."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from support.doc_pages import DOCS, ROOT

HOME = ROOT / "examples" / "published"
NAMES = sorted(file.parent.name for file in HOME.glob("*/results.json"))


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The scripts of the folder, imported as they are when they run."""
    monkeypatch.syspath_prepend(HOME)
    for name in ("run", "plot"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return {name: importlib.import_module(name) for name in ("run", "plot")}


@pytest.mark.parametrize("name", NAMES)
def test_the_table_has_what_each_side_reached(name: str, scripts: dict[str, ModuleType]) -> None:
    run, page = scripts["run"], (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    (result,) = (result for result in run.RESULTS if result.name == name)
    (row,) = (line for line in page.splitlines() if f"`run.py {name}`" in line)
    for arm in result.arms:
        assert run.reached(name, arm.name) in row
    assert f"images/results-{name}.svg" in page


def test_pictures_are_those_that_the_script_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, ModuleType]
) -> None:
    plot = scripts["plot"]
    monkeypatch.setattr(plot, "IMAGES", tmp_path)
    plot.main()
    pictures = {file.name: file.read_text() for file in tmp_path.glob("*.svg")}
    assert set(pictures) == {f"results-{name}.svg" for name in NAMES}
    for name, picture in pictures.items():
        assert picture == (DOCS / "images" / name).read_text()
