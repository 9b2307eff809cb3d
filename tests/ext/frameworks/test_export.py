"""Exported environments: what Gymnasium and MCP's client make of their folders, and what cannot be exported."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from pathlib import Path

import gymnasium
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from typer.testing import CliRunner

from support.envs.exported import NAMES, SEED, Play, plays_of
from turnwise.cli.app import app
from turnwise.envs.core import reset_env, step_env
from turnwise.envs.registration import EnvSpec
from turnwise.errors import ConfigError, RegistryError
from turnwise.ext.frameworks.export import export_env, load_exported

DICE = '''
import json
from pathlib import Path

import turnwise


class HiddenDice(turnwise.ToolEnv):
    """Two dice that only a tool shows."""

    def __init__(self, faces: str):
        self.faces = json.loads(Path(faces).read_text())

    def reset(self, task=None, *, seed=None):
        return "What do they add up to?", {}

    @turnwise.function_tool
    def look(self, die: int) -> int:
        """Look at one."""
        return self.faces[die - 1]

    def score(self, final):
        return float(final is not None and final["content"] == str(sum(self.faces)))
'''


@pytest.mark.parametrize("name", NAMES)
async def test_gymnasium_makes_an_exported_environment(name, tmp_path, monkeypatch) -> None:
    plays = await plays_of(name, tmp_path / "out", "gymnasium")
    monkeypatch.syspath_prepend(tmp_path / "out")
    importlib.import_module(f"turnwise_{name}")
    env = gymnasium.make(f"turnwise_{name}/{name}-v0")
    for play in plays:
        messages, info = env.reset(seed=SEED, options={"task": play.task})
        assert messages[-1]["role"] == "user"
        assert info["task_id"] == play.task
        rewards = []
        for action in play.actions:
            assert env.action_space.contains(action)
            _, reward, terminated, truncated, _ = env.step(action)
            rewards.append(reward)
        assert terminated or truncated
        assert rewards == play.rewards
    env.close()
    gymnasium.registry.pop(f"turnwise_{name}/{name}-v0")


async def over_mcp(folder: Path, play: Play) -> float:
    """Return the reward that an episode ends with, played by the tools of a server in its own process."""
    arguments = ["server.py", "--task", play.task, "--seed", str(SEED)]
    parameters = StdioServerParameters(command=sys.executable, args=arguments, cwd=folder)
    async with Client(stdio_client(parameters)) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        ends = "finish" if "finish" in names else "reply"
        result = None
        for action in play.actions:
            calls = [(call["name"], call["arguments"]) for call in action.get("tool_calls") or ()]
            key = "answer" if ends == "finish" else "text"
            for tool, tool_arguments in calls or [(ends, {key: action["content"]})]:
                result = await client.call_tool(tool, tool_arguments)
        assert result is not None
        assert result.structured_content is not None
        return float(result.structured_content["reward"])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
async def test_mcp_client_plays_an_exported_environment(name, tmp_path) -> None:
    folder = tmp_path / "out"
    right, wrong = await plays_of(name, folder, "mcp")
    assert await over_mcp(folder, right) == sum(right.rewards)
    assert await over_mcp(folder, wrong) == sum(wrong.rewards)
    [server] = json.loads((folder / "mcp.json").read_text())["mcpServers"].values()
    assert server == {"command": "python", "args": ["server.py"]}


def test_files_that_an_environment_names_come_along(tmp_path, monkeypatch) -> None:
    (tmp_path / "env.py").write_text(DICE)
    (tmp_path / "faces.json").write_text("[2, 5]")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["export-env", f"{tmp_path}/env.py:HiddenDice", "faces=faces.json", "--as", "mcp", "-o", "out"]
    )
    assert done.exit_code == 0, done.output
    assert "out/README.md" in done.stdout.replace("\n", "")
    record = json.loads((tmp_path / "out" / "env.json").read_text())
    assert (record["env"], record["config"]) == ("{folder}/env.py:HiddenDice", {"faces": "{folder}/faces.json"})
    written = [path.read_text() for path in (tmp_path / "out").iterdir() if path.name != "env.py"]
    assert not any(str(tmp_path) in text for text in written)
    assert "Two dice that only a tool shows." in (tmp_path / "out" / "README.md").read_text()
    (tmp_path / "env.py").unlink()
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    exported = load_exported(moved)
    assert (exported.name, exported.tasks) == ("hidden_dice", ())
    env = exported.gymnasium()
    env.reset(seed=1)
    assert env.step("7")[1] == 1.0
    env.close()


async def test_package_for_openenv_shadows_no_module_of_python(tmp_path) -> None:
    await export_env(EnvSpec("math"), "openenv", tmp_path, limit=1)
    packages = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert packages == ["turnwise_math", "turnwise_math.server"]
    assert "from turnwise_math import MathAction, MathEnv" in (tmp_path / "README.md").read_text()


async def test_files_of_equal_names_get_different_copies(tmp_path) -> None:
    for folder, value in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(f"def worth():\n    return {value}\n")
    (tmp_path / "t.jsonl").write_text('{"id": "a", "prompt": "Say."}\n')
    spec = EnvSpec("single_turn", {"scorer": {folder: f"{tmp_path}/{folder}/own.py:worth" for folder in "ab"}})
    await export_env(spec, "openenv", tmp_path / "out", tasks=str(tmp_path / "t.jsonl"))
    exported = load_exported(tmp_path / "out")
    assert [task.id for task in exported.tasks] == ["a"]
    env = exported.make()
    await reset_env(env, exported.tasks[0], seed=1)
    assert (await step_env(env, {"role": "assistant", "content": "x"})).info["rewards"] == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    ("spec", "form", "match"),
    [
        (EnvSpec("calculator"), "gem", "as is 'gem': .* exported as gymnasium, inspect, mcp, openenv, verifiers"),
        (EnvSpec("nim"), "mcp", "'nim' has several agents, and mcp one"),
        (EnvSpec("lookup", tools={"function_tool_path": "a.py"}), "mcp", "loaded tools and wrappers are not exported"),
    ],
)
async def test_unexportable_environments_raise_with_the_reason(spec, form, match, tmp_path) -> None:
    with pytest.raises(ConfigError, match=match):
        await export_env(spec, form, tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_an_environment_that_cannot_be_made_leaves_no_folder(tmp_path) -> None:
    with pytest.raises(RegistryError, match="does not take"):
        await export_env(EnvSpec("calculator", {"colour": 3}), "mcp", tmp_path / "out")
    assert not (tmp_path / "out").exists()


async def test_a_folder_with_files_is_not_written_into(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not an empty folder: name another one"):
        await export_env(EnvSpec("calculator"), "mcp", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_folder_that_was_not_exported_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"env\.json: cannot be read as an exported environment"):
        load_exported(tmp_path)
    (tmp_path / "env.json").write_text('{"version": 9}')
    with pytest.raises(ConfigError, match=r"env\.json: version is not 1"):
        load_exported(tmp_path)
