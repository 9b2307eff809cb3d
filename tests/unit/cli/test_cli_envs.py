"""``turnwise envs``: what is registered, and what one environment begins with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from turnwise.cli.app import app
from turnwise.envs import EnvSpec, ToolEnv
from turnwise.envs.catalogue import count_tasks, describe, first_observation
from turnwise.envs.registration import env_names, register
from turnwise.errors import RegistryError
from turnwise.tools.core import function_tool

OWN = '''
from turnwise import Task, ToolEnv, function_tool

closed = []

class Own(ToolEnv):
    """An environment of one's own: it counts.

    More is said here.
    """

    def __init__(self, start: int, step=2):
        self.start = start

    @function_tool
    def add(self, number: int) -> int:
        """Add a number."""
        return self.start + number

    def reset(self, task=None, *, seed=None):
        return [{"role": "user", "content": f"Count from {self.start} [bold]to[/bold] {task.prompt}."}], {}

    def close(self):
        closed.append(self.start)

def tasks():
    yield Task("first", "nine")
    yield Task("second", "ten")
'''


@pytest.fixture
def env_file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


def test_every_registered_environment_is_listed_with_its_summary() -> None:
    rows = {row["name"]: row for row in json.loads(run("envs", "--json"))}
    assert sorted(rows) == env_names()
    # Tests register environments, too.
    shipped = {name: row for name, row in rows.items() if row["reference"].startswith("turnwise.")}
    assert len(shipped) >= 8
    assert [name for name, row in shipped.items() if row["problem"] or not row["summary"]] == []
    assert rows["lookup"]["tools"] == ["team_of", "manager_of"]
    assert rows["lookup"]["tasks"] == "turnwise.envs.basic.lookup:tasks"
    text = run("envs")
    assert all(name in text for name in env_names())


@pytest.mark.ext
def test_environments_that_plug_in_are_listed_with_their_first_tools() -> None:
    assert "list_tables, describe_table, query" in run("envs")


def test_list_names_four_tools_and_counts_the_others() -> None:
    def note(self: ToolEnv, text: str) -> str:
        """Note a text."""
        return text

    tools = {f"note_{number}": function_tool(name=f"note_{number}")(note) for number in range(6)}
    register("many_tools", type("ManyTools", (ToolEnv,), {"__doc__": "Notes texts.", **tools}))
    assert "note_0, note_1, note_2, note_3 and 2 more" in run("envs")


def test_environment_is_shown_with_its_first_observation(env_file: str) -> None:
    text = run("envs", "show", f"{env_file}:Own", "start=7", "--tasks", f"{env_file}:tasks", "--no-check")
    for line in (
        "An environment of one's own: it counts.", "configuration: start, step=2", ":tasks (2)", "task first",
        "Count from 7 [bold]to[/bold] nine.", "add(number)  Add a number.",
    ):  # fmt: skip
        assert line in text, line
    assert "More is said here" not in text
    # Its module has a name that nobody wrote.
    assert "turnwise_file" not in text


@pytest.mark.ext
def test_findings_of_the_checker_are_shown(env_file: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["envs", "show", "guess_number"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "I hide a whole number" in done.output
    assert "0 errors" in done.output, done.output
    (tmp_path / "own.py").write_text(
        OWN.replace("    def close", "    def score(self, final):\n        return float('nan')\n\n    def close")
    )
    done = CliRunner().invoke(app, ["envs", "show", f"{env_file}:Own", "start=7", "-t", f"{env_file}:tasks"])
    assert done.exit_code == 1
    assert "Count from 7" in done.output
    assert "nan" in done.output


async def test_episode_of_first_observation_is_closed(env_file: str) -> None:
    first = await first_observation(EnvSpec(f"{env_file}:Own", {"start": 3}), f"{env_file}:tasks")
    assert first.task is not None
    assert (first.task.id, [tool.name for tool in first.tools]) == ("first", ["add"])
    assert describe(f"{env_file}:Own").reference.endswith(":Own")
    module = next(loaded for loaded in sys.modules.values() if getattr(loaded, "__file__", None) == env_file)
    assert module.closed == [3]


def test_an_endless_source_is_counted_up_to_a_limit() -> None:
    assert count_tasks("turnwise.envs.basic.lookup:tasks?n=5") == 5
    assert count_tasks("turnwise.envs.basic.lookup:tasks?n=5000") == 1000


def test_unknown_environment_raises_with_the_nearest_name() -> None:
    with pytest.raises(RegistryError, match="there is no environment 'lokup'; did you mean 'lookup'"):
        run("envs", "show", "lokup")
    assert "nowhere" in describe("nowhere:Env").problem
    with pytest.raises(RegistryError, match="missing a required argument: 'env_id'"):
        run("envs", "show", "gymnasium")
