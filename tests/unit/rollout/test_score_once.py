"""A scoring that a time limit interrupts inside a step goes on: ``score`` runs once, and what it says counts."""

from __future__ import annotations

import asyncio
import gc

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.event_loop import pass_time
from turnwise.agents.core import Episode
from turnwise.envs.core import Env, StepResult, close_env, reset_env, score_env, step_env
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.types import Message, StopReason

LOG: list[str] = []
# Longer than any episode here takes; it passes when the judge is asked.
EPISODE_S = 60.0


class Judge:
    """What a slow judge does in the test that runs: takes its time, waits until it may speak, gives its verdict."""

    may_speak: asyncio.Event
    asked: asyncio.Event
    verdict: float | Exception


@pytest.fixture(autouse=True)
def judge() -> type[Judge]:
    LOG.clear()
    Judge.may_speak, Judge.asked, Judge.verdict = asyncio.Event(), asyncio.Event(), 1.0
    return Judge


class Judged(ToolEnv):
    """Answers at once and is scored slowly."""

    def reset(self, task=None, *, seed=None):
        return "go", {}

    async def score(self, final):
        LOG.append(f"score {final and final['content']}")
        Judge.asked.set()
        pass_time(EPISODE_S)
        try:
            await Judge.may_speak.wait()
        except asyncio.CancelledError:
            LOG.append("given up")
            raise
        if isinstance(Judge.verdict, Exception):
            raise Judge.verdict
        return Judge.verdict

    def close(self):
        LOG.append("close")


class JudgedByStep(Env):
    """The same without tools: its own step scores."""

    score = Judged.score
    close = Judged.close

    def reset(self, task=None, *, seed=None):
        return "go", {}

    async def step(self, action):
        parts = await score_env(self, action)
        return StepResult([], sum(parts.values()), True, False, {"rewards": parts})


async def run(env: type[Env] = Judged, **limits) -> EpisodeOutcome:
    renderer = ToyRenderer()
    config = RolloutConfig(
        env=SpecConfig(name=f"{__name__}:{env.__name__}"),
        agent=SpecConfig(name="react" if env is Judged else "single_turn"),
        **limits,
    )
    runner = EpisodeRunner(config, ScriptedClient(renderer, ["42"]), renderer, context_length=5000)
    return await runner.run(EpisodeSpec(Task("t", "go"), "g"))


def speak_when_the_runner_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Episode.score

    async def score(self: Episode) -> None:
        Judge.may_speak.set()
        await real(self)

    monkeypatch.setattr(Episode, "score", score)


@pytest.mark.parametrize("env", [Judged, JudgedByStep])
async def test_a_score_that_outlasts_the_episode_is_waited_for_and_counts(monkeypatch, env) -> None:
    speak_when_the_runner_scores(monkeypatch)
    outcome = await run(env, episode_timeout=EPISODE_S)
    assert outcome.error is None
    assert LOG == ["score 42", "close"]
    # The answer came in time; only its judge was slow.
    (trajectory,) = outcome.trajectories
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, StopReason.COMPLETED)


async def test_a_verdict_that_came_before_the_runner_asks_is_taken(monkeypatch) -> None:
    real = Episode.score

    async def score(self: Episode) -> None:
        Judge.may_speak.set()
        assert self._env.pending_score is not None
        await asyncio.wait([self._env.pending_score])
        await real(self)

    monkeypatch.setattr(Episode, "score", score)
    outcome = await run(episode_timeout=EPISODE_S)
    assert (LOG, outcome.trajectories[0].reward) == (["score 42", "close"], 1.0)


async def test_a_score_that_never_ends_is_an_error_and_given_up_before_the_environment_closes() -> None:
    outcome = await run(episode_timeout=EPISODE_S, score_timeout=0.05)
    assert isinstance(outcome.error, EnvError)
    assert "scoring did not end within 0.05 s" in str(outcome.error)
    assert LOG == ["score 42", "given up", "close"]
    assert outcome.trajectories[0].rewards == []


async def test_a_score_that_fails_late_is_the_environments_error(monkeypatch) -> None:
    Judge.verdict = ValueError("no verdict")
    speak_when_the_runner_scores(monkeypatch)
    outcome = await run(episode_timeout=EPISODE_S)
    assert "Judged.score raised ValueError: no verdict" in str(outcome.error)
    assert LOG == ["score 42", "close"]


async def test_a_cancelled_run_gives_its_scoring_up_before_the_environment_closes() -> None:
    task = asyncio.create_task(run())
    await Judge.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert LOG == ["score 42", "given up", "close"]


FINAL: Message = {"role": "assistant", "content": "42"}


async def interrupted(env: Env) -> None:
    """Begin to score, and stop waiting."""
    waiting = asyncio.create_task(step_env(env, FINAL))
    await Judge.asked.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


@pytest.mark.parametrize("how", ["reset", "reset_env"])
async def test_a_new_episode_is_scored_anew(how: str) -> None:
    env = Judged()
    await reset_env(env)
    await interrupted(env)
    if how == "reset":
        env.reset()
    else:
        await reset_env(env)
    Judge.may_speak.set()
    result = await step_env(env, {"role": "assistant", "content": "43"})
    assert result.reward == 1.0
    assert [entry for entry in LOG if entry.startswith("score")] == ["score 42", "score 43"]


async def test_two_episodes_in_a_row_are_each_scored() -> None:
    Judge.may_speak.set()
    env = Judged()
    for _ in range(2):
        await reset_env(env)
        await step_env(env, FINAL)
    assert LOG == ["score 42", "score 42"]
    assert env.pending_score is None


@pytest.mark.parametrize("end", ["running", "failed"])
async def test_closing_leaves_nothing_behind(end: str) -> None:
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    env = Judged()
    await reset_env(env)
    await interrupted(env)
    assert env.pending_score is not None
    if end == "failed":
        Judge.verdict = ValueError("nobody asked")
        Judge.may_speak.set()
        await asyncio.wait([env.pending_score])
    await close_env(env)
    assert env.pending_score is None
    assert LOG[-1] == "close"
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    gc.collect()
    assert complaints == []
