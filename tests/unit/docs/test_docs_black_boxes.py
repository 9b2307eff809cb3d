"""docs/external-agents.md, programs as agents: every key, placeholder and recipe, and code that runs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.doc_pages import blocks, section
from turnwise.agents.registry import make_agent
from turnwise.errors import AgentError
from turnwise.ext.programs import Recipe
from turnwise.ext.programs.config import BlackBoxConfig, resolve_recipe
from turnwise.ext.programs.recipes import recipe_of
from turnwise.ext.programs.workdir import PLACEHOLDERS

PAGE = section("external-agents.md", "Programs as agents")


def rows(header: str) -> list[str]:
    """The names in the first column of a table."""
    table = PAGE[PAGE.index(header) :].split("\n\n")[0]
    return [name for line in table.splitlines()[2:] for name in re.findall(r"`\{?(\w+)\}?`", line.split("|")[1])]


def test_every_key_placeholder_and_recipe_is_there() -> None:
    assert sorted(rows("| key | what |")) == sorted(BlackBoxConfig.model_fields)
    assert sorted(rows("| placeholder | what |")) == sorted(PLACEHOLDERS)
    for name in rows("| recipe | how it is run"):
        for variable in recipe_of(name).env:
            prefixes = ("MSWEA_", "IS_SANDBOX", "ANTHROPIC_", "CLAUDE_CODE_SUBAGENT", "OPENCODE_DISABLE_")
            assert variable in PAGE or variable.startswith(prefixes), variable


def test_program_of_the_page_is_found_where_the_run_starts(tmp_path: Path, monkeypatch: Any) -> None:
    config = yaml.safe_load(blocks(PAGE, "yaml")[0])["rollout"]["agent"]["config"]
    monkeypatch.chdir(tmp_path)
    # Debian has no program of the name `python` but in virtual environments.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with pytest.raises(AgentError, match=r"runs 'my_agent\.py', and .* is no file"):
        make_agent("blackbox", **config)
    (tmp_path / "my_agent.py").write_text("")
    make_agent("blackbox", **config)


def test_custom_recipe_of_the_page_runs(tmp_path: Path) -> None:
    (code,) = blocks(PAGE, "python")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert isinstance(namespace["MINE"], Recipe)
    program = tmp_path / "my-agent"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    recipe = resolve_recipe(BlackBoxConfig(recipe=namespace["MINE"], env={"PATH": str(tmp_path)}))
    assert recipe.command == (str(program), "--task", "{prompt}")
