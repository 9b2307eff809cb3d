"""docs/tools.md, sandbox tools: the environment runs, and the tables are those of the tools."""

from __future__ import annotations

import re
from typing import Any

import yaml

from support.doc_pages import blocks, section
from support.envs.sandboxed_episodes import called, some_boxes
from turnwise.envs.core import close_env, reset_env
from turnwise.tools.config import ToolsConfig
from turnwise.tools.core import SHIPPED
from turnwise.tools.sandboxed.editor import EditorConfig
from turnwise.tools.sandboxed.patches import ApplyPatchConfig
from turnwise.tools.sandboxed.python import PythonConfig
from turnwise.tools.sandboxed.shell import ShellConfig

TEXT = section("tools.md", "Sandbox tools")
CONFIGS: dict[str, Any] = {
    "shell": ShellConfig,
    "python": PythonConfig,
    "editor": EditorConfig,
    "apply_patch": ApplyPatchConfig,
}


def test_the_tables_name_the_tools_and_their_keys() -> None:
    table = TEXT.partition("| Tool | What it does |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == sorted(SHIPPED)
    rows = TEXT.partition("| Tool | Key | Meaning | Default |")[2].partition("\n\n")[0].strip().splitlines()[1:]
    described: dict[str, dict[str, str]] = {name: {} for name in CONFIGS}
    for row in rows:
        tools, keys, _, default = (cell.strip() for cell in row.strip("|").split("|"))
        for tool in re.findall(r"`(\w+)`", tools):
            described[tool] |= dict(zip(re.findall(r"`(\w+)`", keys), default.split(", "), strict=True))
    for name, model in CONFIGS.items():
        assert set(described[name]) == set(model.model_fields)
        for key, default in described[name].items():
            if default.isdigit():
                assert model.model_fields[key].default == int(default), (name, key)


async def test_the_environment_runs_with_the_tools_of_its_configuration() -> None:
    [block] = blocks(TEXT, "python")
    names: dict[str, Any] = {"__name__": "docs_code_agents"}
    exec(compile(block, "docs/tools.md", "exec"), names)
    first = yaml.safe_load(blocks(TEXT, "yaml")[0])
    assert [str(tool) for tool in ToolsConfig.model_validate(first["env"]["tools"]).named][::2] == ["shell", "submit"]
    async with some_boxes() as manager:
        env = names["Workshop"]()
        env.sandboxes = manager
        await reset_env(env, None, seed=0)
        command = "echo $(( $(paste -sd+ notes.txt) )) > sum.txt"
        result = await called(env, ("shell", {"command": command}), ("submit", {}))
        assert (result.terminated, result.reward) == (True, 1.0)
        await close_env(env)
