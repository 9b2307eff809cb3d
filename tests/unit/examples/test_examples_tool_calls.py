"""``format: bfcl``, by the entry point of its package: rows as published are played, or say why they are not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tool_calls_env.matching import same_call

from support.envs.published_rows import BFCL, write_bfcl
from support.envs.rewarded_rows import reward_of, says
from turnwise.errors import TaskError
from turnwise.tasks import SourceConfig, Task, load_tasks
from turnwise.tasks.formats import find_row_format, row_format_references
from turnwise.types import ToolCall

EXAMPLE = Path(__file__).parents[3] / "examples" / "tool_calls"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as an installer leaves it: its entry points in a folder of the path."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    information = tmp_path / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, references in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {reference}" for name, reference in references.items()))
    ]
    (information / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(information.parent)
    forget_formats()
    yield
    monkeypatch.undo()
    forget_formats()


def forget_formats() -> None:
    row_format_references.cache_clear()
    find_row_format.cache_clear()


def load(tmp_path: Path, *rows: Any) -> list[Task]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(SourceConfig(source=str(file), format="bfcl"))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (BFCL, "column 'ground_truth' is missing"),
        ({**BFCL, "involved_classes": ["TicketAPI"], "ground_truth": []}, "several turns"),
        ({**BFCL, "question": [[], []], "ground_truth": []}, "has 2 turns"),
        (
            {**BFCL, "function": [{"name": "f", "parameters": {"type": "HashMap"}}], "ground_truth": []},
            "f has the type 'HashMap'",
        ),
        ({"id": "a", "question": []}, "column 'function' is missing, which rows of format bfcl have"),
    ],
)
def test_rows_that_cannot_be_played_say_why(row: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=match):
        load(tmp_path, row)


async def test_rows_of_bfcl_are_played(tmp_path: Path) -> None:
    source = write_bfcl(tmp_path / "bfcl")
    called, uncalled = load_tasks(SourceConfig(source=str(source), format="bfcl"))
    assert (called.id, called.env, uncalled.id) == ("simple_python_0", "tool_calls", "irrelevance_0")
    [schema] = called.data["functions"]
    assert schema["name"] == "geometry_triangle_area"
    types = {key: parameter.get("type") for key, parameter in schema["parameters"]["properties"].items()}
    assert types == {"base": "integer", "height": "number", "unit": "string", "marks": "array"}
    right = ToolCall("a", "geometry_triangle_area", {"base": 10, "height": 5.0, "unit": "Units"})
    wrong = ToolCall("a", "geometry_triangle_area", {"base": 10, "height": 6})
    assert await reward_of(called) == await reward_of(called, says("", right)) == 1.0
    assert await reward_of(called, says("", wrong)) == await reward_of(called, says("25")) == 0.0
    assert await reward_of(called, says("", right, right)) == 0.0
    assert await reward_of(uncalled) == await reward_of(uncalled, says("I cannot see it.")) == 1.0
    assert await reward_of(uncalled, says("", right)) == 0.0


async def test_rows_of_relevance_take_any_call(tmp_path: Path) -> None:
    [task] = load(tmp_path, {**BFCL, "id": "live_relevance_0-0-0"})
    assert await reward_of(task, says("", ToolCall("a", "geometry_triangle_area", {"base": 1}))) == 1.0
    assert await reward_of(task, says("no")) == await reward_of(task, says("", ToolCall("a", "other", {}))) == 0.0


@pytest.mark.parametrize(
    ("arguments", "allowed", "same"),
    [
        ({"a": "New-York, NY"}, {"a": ["new york ny"]}, True),
        ({"a": True}, {"a": [1]}, False),
        ({"a": [1, "x"]}, {"a": [[1, "X"], [2]]}, True),
        ({"a": {"b": 2}}, {"a": [{"b": [1, 2], "c": ["", 3]}]}, True),
        ({"a": {"b": 2}}, {"a": [{"b": [1, 2], "c": [3]}]}, False),
        ({"a": {"d": 2}}, {"a": [{"b": ["", 1]}]}, False),
        ({}, {"a": ["", 1]}, True),
        ({}, {"a": [1]}, False),
        ({"z": 1}, {}, False),
        ({"a": None}, {"a": [None]}, True),
    ],
)
def test_arguments_are_compared_as_the_leaderboard_does(
    arguments: dict[str, Any], allowed: dict[str, list[Any]], same: bool
) -> None:
    assert same_call(ToolCall("c", "f", arguments), "f", allowed) is same


async def test_calls_are_matched_in_any_order(tmp_path: Path) -> None:
    functions = [{"name": "f", "description": "", "parameters": {"type": "dict", "properties": {"x": {"type": "any"}}}}]
    answers = [{"f": {"x": [1, 2]}}, {"f": {"x": [1]}}]
    row = {"id": "parallel_0", "question": [[{"role": "user", "content": "Both"}]], "function": functions}
    [task] = load(tmp_path, {**row, "ground_truth": answers})
    one, two = ToolCall("a", "f", {"x": 1}), ToolCall("b", "f", {"x": 2})
    assert await reward_of(task, says("", one, two)) == await reward_of(task, says("", two, one)) == 1.0
    assert await reward_of(task, says("", two, two)) == 0.0


@pytest.mark.long
def test_command_evaluates_rows_of_the_installed_package(tmp_path: Path) -> None:
    """A build of the package holds its data, and the commands of its page take its names."""
    source, site = tmp_path / "source", tmp_path / "packages"
    shutil.copytree(EXAMPLE, source)
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-build-isolation", "--target"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, site, source], check=True, timeout=100)
    rows = write_bfcl(tmp_path / "bfcl")
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from turnwise import SourceConfig, load_tasks, make\n"
        f"print([task.id for task in load_tasks(SourceConfig(source={str(rows)!r}, format='bfcl'))])\n"
        "print(sys.modules[type(make('tool_calls')).__module__].__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    tasks, file = done.stdout.splitlines()
    assert tasks == "['simple_python_0', 'irrelevance_0']"
    assert file.startswith(str(site))
