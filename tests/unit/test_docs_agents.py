"""The pages about agents: their code is agents, their YAML is read, and what they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from turnwise.agents.core import Agent
from turnwise.agents.functions import RolloutFunction
from turnwise.agents.registry import find_agent
from turnwise.rollout.config import AgentFile, RolloutConfig
from turnwise.tasks.config import SourceConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ["agents.md", "coming-from-verl.md", "coming-from-agent-lightning.md"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_runs(page) -> None:
    for code in blocks(page, "python"):
        found: dict = {}
        exec(code, found)
        for made in (each for each in found.values() if isinstance(each, RolloutFunction)):
            assert isinstance(made.make_agent(), Agent)


def test_the_yaml_is_read() -> None:
    [names] = [yaml.safe_load(text) for text in blocks("agents.md", "yaml")]
    assert [entry.config for entry in AgentFile(agents=names).agents] == [{"tries": 3}, {"max_calls": 4}]
    [run] = [yaml.safe_load(text) for text in blocks("coming-from-agent-lightning.md", "yaml")]
    assert RolloutConfig.model_validate(run["rollout"]).env.name == "task"
    assert SourceConfig.model_validate(run["tasks"]).columns == {"prompt": "question"}


@pytest.mark.parametrize("name", ["react", "single_turn", "langgraph", "blackbox", "turns"])
def test_the_names_of_the_table_are_registered(name) -> None:
    assert f"| `{name}` |" in (DOCS / "agents.md").read_text()
    assert find_agent(name) is not None


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text()):
        assert (DOCS / target).exists(), target
