"""Tasks of Inspect by its own solver, tools and scorers: rewards equal to those of its evaluations, actions alike."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from turnwise.envs.core import Env, close_env, reset_env, schemas, score_env, step_env
from turnwise.envs.registration import make
from turnwise.errors import ConfigError, EnvError
from turnwise.ext.frameworks.foreign import tasks
from turnwise.tasks import Task
from turnwise.types import ToolCall

pytestmark = [pytest.mark.real, pytest.mark.alike("foreign plays", "inspect")]

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "tests" / "support" / "envs" / "inspect_tasks.py"
PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
ADD = [{"id": "c1", "name": "add", "arguments": {"x": 2, "y": 40}}]
WRONG = [{"id": "c1", "name": "add", "arguments": {"x": "two"}}]
PLAYS: list[tuple[str, int, list[dict[str, Any]]]] = [
    ("capitals", 0, [{"text": "Paris", "calls": []}]),
    ("capitals", 1, [{"text": "It is Paris.", "calls": []}]),
    ("capitals", 2, [{"text": "It is Tokyo", "calls": []}]),
    ("sums", 0, [{"text": "", "calls": ADD}, {"text": "It is 42.", "calls": []}]),
    ("sums", 0, [{"text": "42", "calls": []}]),
    ("sums", 1, [{"text": "", "calls": WRONG}, {"text": "I do not know.", "calls": []}]),
]


@pytest.fixture(autouse=True)
def installed() -> None:
    if not PYTHON.exists():
        pytest.skip("inspect-ai is not installed: make test-real installs it into .venv-frameworks")


def environment(name: str, **kwargs: Any) -> Env:
    return make(f"inspect:{TASKS}@{name}", python=str(PYTHON), kwargs=kwargs)


def message(action: dict[str, Any]) -> dict[str, Any]:
    calls = [ToolCall(call["id"], call["name"], call["arguments"]) for call in action["calls"]]
    return {"role": "assistant", "content": action["text"], **({"tool_calls": calls} if calls else {})}


@pytest.fixture
def expected(installed: None) -> list[dict[str, float]]:
    command = [str(PYTHON), str(TASKS), json.dumps(PLAYS)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300, text=True)
    scores: list[dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return scores


async def test_rewards_are_those_of_its_own_evaluation(expected) -> None:
    rewards = []
    # All at a time: an evaluation holds the episodes of a task.
    envs = [environment(name, **({"scorer": "tooled"} if name == "sums" else {})) for name, _, _ in PLAYS]
    for env, (_, sample, _) in zip(envs, PLAYS, strict=True):
        await reset_env(env, Task("t", "", {"sample": sample}), seed=1)
    for env, (_, _, actions) in zip(envs, PLAYS, strict=True):
        for action in actions:
            result = await step_env(env, message(action))
        assert (result.terminated, result.truncated) == (True, False)
        rewards.append({**result.info["rewards"], **result.info.get("metrics", {})})
        assert result.reward == sum(result.info["rewards"].values())
        await close_env(env)
    assert rewards == expected
    assert [metrics.get("tooled") for metrics in expected[3:]] == [1.0, 0.5, 0.0]


async def test_an_episode_has_its_messages_tools_and_answers_of_tools() -> None:
    env = environment("sums", scorer="includes")
    messages, _ = await reset_env(env, Task("t", "", {"sample": 0}), seed=1)
    assert messages == [{"role": "user", "content": "Add 2 and 40."}]
    [schema] = schemas(env)
    assert (schema.name, schema.description, sorted(schema.parameters["properties"])) == (
        "add",
        "Add two numbers.",
        ["x", "y"],
    )
    answered = await step_env(env, message({"text": "", "calls": ADD}))
    assert answered.observation == [{"role": "tool", "tool_call_id": "c1", "name": "add", "content": "42"}]
    # What a limit of the run cuts off, the scorer still sees.
    assert await score_env(env, None) == {"includes": 0.0}
    await close_env(env)
    await reset_env(env, Task("t", "", {"sample": 0}), seed=1)
    await close_env(env)


@pytest.mark.parametrize("value", ["very good", [1, 0]])
async def test_score_that_inspect_has_no_number_for_is_an_error(value) -> None:
    env = environment("judged", value=value)
    await reset_env(env, None, seed=1)
    with pytest.raises(EnvError, match="it must be one number, or a word that Inspect has one for"):
        await step_env(env, message({"text": "x", "calls": []}))
    await close_env(env)


async def test_ended_sample_answers_nothing_more() -> None:
    env = environment("judged")
    await reset_env(env, None, seed=1)
    assert (await step_env(env, message({"text": "x", "calls": []}))).reward == 0.0
    with pytest.raises(EnvError, match="the sample is over"):
        await score_env(env, message({"text": "x", "calls": []}))
    await close_env(env)


async def test_a_solver_that_rewrites_the_conversation_is_an_error_of_the_episode() -> None:
    env = environment("rewritten")
    await reset_env(env, None, seed=1)
    with pytest.raises(EnvError, match="its solver changed the conversation at message 1"):
        await step_env(env, {"role": "assistant", "content": "x"})
    await close_env(env)


def test_samples_become_tasks_and_wrong_names_are_config_errors() -> None:
    rows = list(tasks(f"inspect:{TASKS}@capitals", python=str(PYTHON)))
    assert [row.prompt for row in rows] == [f"The capital of {land}?" for land in ("France", "Italy", "Japan")]
    assert [row.data for row in rows] == [{"sample": 0}, {"sample": 1}, {"sample": 2}]
    with pytest.raises(ConfigError, match=r"has the scorers tooled, includes: name the reward: kwargs\.scorer"):
        environment("sums")
    with pytest.raises(ConfigError, match=r"has no task 'capitls'; it has .*capitals"):
        environment("capitls")
    with pytest.raises(ConfigError, match="inspect needs a separate process"):
        make(f"inspect:{TASKS}@capitals")
