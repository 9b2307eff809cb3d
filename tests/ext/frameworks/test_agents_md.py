"""The part of AGENTS.md that a project's files say: what it names, and what it leaves alone."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from turnwise.cli import app
from turnwise.errors import ConfigError

ENV = """
raise RuntimeError("nothing is imported")
import turnwise
from turnwise import function_tool

@function_tool
def convert(amount: float) -> float: ...

class Dice(turnwise.ToolEnv):
    @turnwise.function_tool(timeout=3)
    async def look(self, die: int) -> int: ...
    def score(self, final): ...

class Other: ...
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "env.py").write_text(ENV)
    (tmp_path / "src" / "broken.py").write_text("def (")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "env.py").write_text(ENV)
    (tmp_path / "train.yaml").write_text("name: x\npolicies:\n  main: {}\n")
    (tmp_path / "other.yaml").write_text("name: x\n")
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "metrics.jsonl").touch()
    (tmp_path / "runs" / "x" / "config.yaml").write_text("policies: {}\n")
    return tmp_path


def write(folder: Path) -> str:
    result = CliRunner().invoke(app, ["agents-md", str(folder)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return (folder / "AGENTS.md").read_text()


def test_environments_tools_configurations_and_runs_are_named_without_an_import(project: Path) -> None:
    result = CliRunner().invoke(app, ["agents-md", str(project), "--json"], catch_exceptions=False)
    assert json.loads(result.output) == {
        "environments": {"src/env.py:Dice": ["look"]},
        "tools": ["src/env.py:convert"],
        "configs": ["train.yaml"],
        "runs": ["runs"],
    }
    assert not (project / "AGENTS.md").exists()
    text = write(project)
    assert "| `src/env.py:Dice` | look |" in text
    assert "turnwise train train.yaml --dry-run" in text


def test_text_of_the_user_stays_and_the_part_is_written_once(project: Path) -> None:
    (project / "AGENTS.md").write_text("# Mine\n\nBe brief.\n")
    first = write(project)
    assert first.startswith("# Mine\n\nBe brief.\n\n<!-- turnwise: begin")
    (project / "AGENTS.md").write_text(first + "\nMore of mine.\n")
    (project / "more.yaml").write_text("policies: {}\n")
    second = write(project)
    assert second.endswith("<!-- turnwise: end -->\n\nMore of mine.\n")
    assert second.count("turnwise: begin") == 1
    assert "more.yaml, train.yaml" in second
    assert write(project) == second


def test_half_a_part_is_refused(project: Path) -> None:
    (project / "AGENTS.md").write_text("<!-- turnwise: begin -->\n")
    with pytest.raises(ConfigError, match="has 1 marks of turnwise, not one begin and one end: remove them"):
        write(project)


def test_commands_and_options_that_it_names_exist(tmp_path: Path) -> None:
    text = write(tmp_path)
    assert "There is no environment here yet" in text
    commands = get_command(app).commands
    lines = re.findall(r"^turnwise (.*?)(?: +#.*)?$", text, re.MULTILINE)
    assert len(lines) > 8
    for line in lines:
        name, *words = shlex.split(line)
        options = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options, line
