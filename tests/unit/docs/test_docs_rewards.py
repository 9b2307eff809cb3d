"""docs/tasks-and-rewards.md, its part on rewards: the code runs as it stands there, and the tables are right."""

from __future__ import annotations

import re
import sys
import types

import pytest
import yaml
from typer.testing import CliRunner

from support.doc_pages import page
from turnwise.cli.app import app
from turnwise.config import load_config
from turnwise.envs import SingleTurnEnv, make, reset_env, step_env
from turnwise.envs.rewards import registry as loading
from turnwise.envs.rewards.core import GIVEN
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.producer import GroupRewarder
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory
from turnwise.types import ToolCall

PAGE = page("tasks-and-rewards.md").partition("\n## Reward functions\n")[2]


@pytest.fixture(scope="module")
def code() -> dict:
    names: dict = {"__name__": "docs_rewards"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/tasks-and-rewards.md", "exec"), names)
    return names


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        (r"\boxed{4}", {"format": 0.2, "correct": 1.0, "brief": 0.1}),
        ("4", {"format": 0.0, "correct": 0.0, "brief": 0.1}),
        (r"\boxed{5}" + "!" * 200, {"format": 0.2, "correct": 0.0, "brief": 0.0}),
    ],
)
async def test_the_rubric(code, text, rewards):
    env = SingleTurnEnv(code["rubric"])
    assert isinstance(code["env"], SingleTurnEnv)
    await reset_env(env, Task("t", "2 + 2, please?", {"answer": "4"}))
    result = await step_env(env, {"role": "assistant", "content": text})
    assert result.info["rewards"] == pytest.approx(rewards)
    assert result.info["metrics"]["rubric/polite"] == 1.0


async def test_the_environment_with_a_score_of_its_own(code):
    env = code["Library"]()
    await reset_env(env, Task("t", "Which book?", {"answer": "book 3"}))
    await step_env(env, {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", "look", {"shelf": 3})]})
    result = await step_env(env, {"role": "assistant", "content": "It is book 3."})
    assert result.info["rewards"] == {"found": 1.0, "said": 1.0}


async def test_the_group_reward(code):
    trajectories = [Trajectory("a", "a", "g", "t"), Trajectory("b", "b", "g", "t")]
    assert await code["shorter_is_better"](Task("t", "?"), trajectories) == [0.0, 0.0]


def test_the_configurations(code, monkeypatch, tmp_path):
    module = types.ModuleType("my_rewards")
    module.brief = code["brief"]
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    monkeypatch.setenv("JUDGE_API_KEY", "sk-docs")
    monkeypatch.chdir(tmp_path)
    sections = [yaml.safe_load(block)["rollout"] for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
    assert len(sections) == 5
    for section in sections:
        config = load_config(RolloutConfig, defaults=section)
        make(config.env.name, **config.env.config)
        if config.group_reward is not None:
            GroupRewarder(config.group_reward, write=None, executor=None)


def test_the_tables_name_all_that_there_is():
    first, shipped = re.findall(r"\|---\|---\|(?:---\|)?\n((?:\|.*\n)+)", PAGE)
    assert {name for name in re.findall(r"`(\w+)`", first.split("any other")[0]) if name != "data"} >= set(GIVEN) - {
        "data"
    }
    rows = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", shipped, re.MULTILINE))
    expected = {
        name: reference.partition(":")[2] for name, reference in loading.REWARDS.items() if isinstance(reference, str)
    }
    groups = {name for name in expected if expected[name] in ("RankBy", "PairwiseJudge")}
    assert rows == {name: cls for name, cls in expected.items() if name not in groups}
    assert all(f"`{name}`" in PAGE for name in groups)


def test_the_command_line_has_the_option():
    assert "turnwise serve --reward" in PAGE
    assert "--reward" in CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"}).output
