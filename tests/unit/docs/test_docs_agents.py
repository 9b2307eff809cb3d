"""The pages about agents: their code is agents, their YAML is read, and what they name is there."""

from __future__ import annotations

import pytest
import yaml

from support.doc_pages import blocks, page, section
from turnwise.agents.core import Agent
from turnwise.agents.registry import RolloutFunction, find_agent
from turnwise.rollout.config import AgentFile, RolloutConfig
from turnwise.tasks.config import SourceConfig

# Sessions and environments of several agents have tests of their own.
SECTIONS = [
    ("agents.md", "Choosing the agent"),
    ("agents.md", "Writing an agent as a function"),
    ("coming-from-other-frameworks.md", "verl"),
    ("coming-from-other-frameworks.md", "Agent-Lightning"),
    ("coming-from-other-frameworks.md", "TRL"),
]


@pytest.mark.parametrize(("name", "heading"), SECTIONS)
def test_the_code_runs(name, heading) -> None:
    for code in blocks(section(name, heading), "python"):
        namespace: dict = {}
        exec(code, namespace)
        for function in (candidate for candidate in namespace.values() if isinstance(candidate, RolloutFunction)):
            assert isinstance(function.make_agent(), Agent)


def test_the_yaml_is_read() -> None:
    [names] = [yaml.safe_load(text) for text in blocks(section("agents.md", "Choosing the agent"), "yaml")]
    assert [entry.config for entry in AgentFile(agents=names).agents] == [{"tries": 3}, {"max_calls": 4}]
    text = section("coming-from-other-frameworks.md", "Agent-Lightning")
    [run] = [yaml.safe_load(block) for block in blocks(text, "yaml")]
    assert RolloutConfig.model_validate(run["rollout"]).env.name == "task"
    assert SourceConfig.model_validate(run["tasks"]).columns == {"prompt": "question"}


@pytest.mark.parametrize("name", ["react", "single_turn", "langgraph", "blackbox", "turns"])
def test_the_names_of_the_table_are_registered(name) -> None:
    assert f"| `{name}` |" in page("agents.md")
    assert find_agent(name) is not None
