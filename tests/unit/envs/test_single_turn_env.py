"""SingleTurnEnv: a prompt, an answer, a score."""

import pytest

from turnwise.envs import SingleTurnEnv, make, reset_env, score_env, step_env
from turnwise.errors import EnvError
from turnwise.tasks import Task
from turnwise.types import ToolCall, text_of


def exact(task, final):
    return float(final is not None and text_of(final) == task.data["gold"])


async def parts(task, final):
    return {"exact": exact(task, final), "short": 0.5}


TASK = Task("a", "2 + 2?", {"gold": "4"})


@pytest.mark.parametrize(
    ("scorer", "rewards"),
    [(exact, {"score": 1.0}), (parts, {"exact": 1.0, "short": 0.5}), (f"{__name__}:exact", {"score": 1.0})],
)
async def test_scorer_function_or_reference_scores_the_answer(scorer, rewards):
    env = make("single_turn", scorer=scorer)
    messages, _ = await reset_env(env, TASK, seed=0)
    assert messages == [{"role": "user", "content": "2 + 2?"}]
    result = await step_env(env, {"role": "assistant", "content": "4"})
    assert (result.observation, result.reward, result.terminated) == ([], sum(rewards.values()), True)
    assert result.info["rewards"] == rewards
    assert (await score_env(env, None)) == {name: 0.0 if value == 1.0 else value for name, value in rewards.items()}


async def test_a_subclass_scores_itself():
    class Own(SingleTurnEnv):
        def score(self, final):
            return 2.0 * (text_of(final) == self.task.data["gold"])

    env = Own()
    await reset_env(env, TASK)
    assert (await step_env(env, {"role": "assistant", "content": "4"})).reward == 2.0


async def test_calls_are_answered_though_no_tool_was_offered():
    env = SingleTurnEnv(exact)
    await reset_env(env, TASK)
    result = await step_env(env, {"role": "assistant", "content": "", "tool_calls": [ToolCall("x", "f", {})]})
    assert result.terminated
    assert [message["tool_call_id"] for message in result.observation] == ["x"]
    assert "unknown_tool" in result.observation[0]["content"]


async def test_missing_scorer_or_task_is_named():
    with pytest.raises(EnvError, match="scorer=function"):
        SingleTurnEnv()
    with pytest.raises(EnvError, match="got no task"):
        await reset_env(SingleTurnEnv(exact))
