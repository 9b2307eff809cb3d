"""Which agent a task gets: by a registered name, a reference, or a name that the run's own file gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnwise.agents.core import Agent, Episode
from turnwise.config import load_config
from turnwise.errors import AgentError, ConfigError, RegistryError, TaskError
from turnwise.rollout.agent_table import AgentTable
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.preflight import check_env_and_agent, check_specs
from turnwise.tasks import Task


class Named(Agent):
    def __init__(self, style: str = "plain", size: int = 1) -> None:
        self.style, self.size = style, size

    async def run(self, episode: Episode) -> None:
        raise NotImplementedError


HERE = f"{__name__}:Named"


def table(tmp_path: Path, text: str, agent: str = "react", **config) -> AgentTable:
    (tmp_path / "agents.yaml").write_text(text)
    plain = {"env": {"name": "lookup"}, "agent": {"name": agent, "config": config}}
    return AgentTable(RolloutConfig(**plain, agent_loop_config_path=tmp_path / "agents.yaml"))


def of(agents: AgentTable, name: str | None, **config) -> tuple[str, int]:
    agent = agents.of(Task("t", "go", agent=name, agent_config=config))
    assert isinstance(agent, Named)
    return agent.style, agent.size


def test_a_file_gives_names_in_all_spellings(tmp_path) -> None:
    agents = table(
        tmp_path,
        f"""
        - name: hydra
          _target_: {HERE.replace(":", ".")}
          style: short
        - {{name: ours, target: "{HERE}", config: {{style: long}}}}
        - {{name: with_class, class: "{HERE}", config: {{size: 3}}}}
        - {{name: react, target: "{HERE}"}}
        """,
    )
    assert of(agents, "hydra") == ("short", 1)
    assert of(agents, "hydra", size=5) == ("short", 5)
    assert of(agents, "ours") == ("long", 1)
    assert of(agents, "with_class") == ("plain", 3)
    # A run's own name hides a registered one, for this run.
    assert of(agents, None) == ("plain", 1)
    assert agents.default() is agents.of(Task("t", "go"))
    assert of(agents, HERE, style="x") == ("x", 1)


def test_the_run_configures_its_own_agent_and_a_row_has_the_last_word(tmp_path) -> None:
    agents = table(
        tmp_path, f"agents:\n- {{name: mine, target: '{HERE}', config: {{style: a, size: 7}}}}", "mine", style="b"
    )
    assert of(agents, None) == ("b", 7)
    assert of(agents, "mine", style="c") == ("c", 7)


def test_relative_paths_are_resolved_beside_the_file_that_names_them(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "from turnwise.agents import rollout\n@rollout\nasync def act(episode):\n    return 1.0\n"
    )
    agents = table(tmp_path, "- {name: act, target: 'own.py:act'}", "act")
    assert type(agents.default()).__name__ == "FunctionAgent"
    (tmp_path / "run.yaml").write_text("env: {name: lookup}\nagent_loop_config_path: agents.yaml\nagent: {name: act}\n")
    check_env_and_agent(load_config(RolloutConfig, tmp_path / "run.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: a, target: 'json:JSONDecoder'}\n- {name: a, target: 'json:JSONDecoder'}", "occurs twice"),
        ("- {name: a, target: nodots}", "agent 'a': no agent is called 'nodots'"),
        ("- {name: a, target: no_such_module.Class}", "no module named 'no_such_module'"),
        ("- {name: a, target: 'json:JSONDecodr'}", "json has no 'JSONDecodr'; did you mean 'JSONDecoder'?"),
        ("- {name: a, target: 'json:JSONDecoder'}", "must be a subclass of turnwise.Agent"),
        ("- {name: a.b, target: 'json:JSONDecoder'}", "agents.0.name"),
        ("- {name: a}", "agents.0.target"),
        ("- {target: 'json:JSONDecoder'}", "agents.0.name"),
        ("- {name: a, target: 'json:JSONDecoder', styl: 1}", "styl"),
        ("just text", "holds 'just text'"),
    ],
)
def test_problems_of_an_agent_file_raise_before_the_start(tmp_path, text, message) -> None:
    with pytest.raises(ConfigError) as raised:
        table(tmp_path, text).check()
    assert "agents.yaml" in str(raised.value)
    assert message in str(raised.value)


async def test_unknown_names_and_configurations(tmp_path) -> None:
    agents = table(tmp_path, f"- {{name: mine, target: '{HERE}'}}")
    with pytest.raises(RegistryError, match=r"no agent is called 'mein'; did you mean 'mine'\?"):
        agents.of(Task("t", "go", agent="mein"))
    with pytest.raises(ConfigError, match=r"agent 'mine': .*rejects its configuration"):
        agents.of(Task("t", "go", agent="mine", agent_config={"colour": 1}))
    config = RolloutConfig(env={"name": "lookup"}, agent={"name": HERE, "config": {"colour": 1}})
    with pytest.raises(AgentError, match="colour"):
        check_env_and_agent(config)
    with pytest.raises(TaskError, match="task 't': its agent cannot be made"):
        await check_specs([Task("t", "go", agent="nobody")], RolloutConfig(env={"name": "lookup"}))
