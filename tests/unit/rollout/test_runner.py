"""One episode: every end has its stop reason, every error is data, nothing is scored twice."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.chat.toy_renderer import CALL, ToyRenderer
from support.event_loop import pass_time
from turnwise.agents.core import Agent
from turnwise.agents.registry import register_agent
from turnwise.envs.core import Env, StepResult
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import EnvError, InferenceError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec, RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.types import StopReason, ToolCall

TASK = Task("t", "go")
LOG: list[str] = []
# A limit that passes when something hangs, and not before.
LIMIT_S = 60.0


class Recording(ToolEnv):
    """Notes what is called on it; where it hangs, time passes."""

    fail = ""
    hang = ""

    def __init__(self, fail: str = "", hang: str = "") -> None:
        self.fail, self.hang = fail, hang

    async def visit(self, hook: str) -> None:
        LOG.append(hook)
        if self.fail == hook:
            raise RuntimeError(f"{hook} broke")
        if self.hang == hook:
            pass_time(LIMIT_S)
            await asyncio.Event().wait()

    async def reset(self, task=None, *, seed=None):
        await self.visit("reset")
        return f"seed {seed}", {}

    @function_tool
    async def look(self, at: int) -> str:
        """Look."""
        await self.visit("look")
        return f"saw {at}"

    @function_tool
    async def paid(self) -> tuple[str, float]:
        return "thanks", 0.5

    async def score(self, final):
        await self.visit("score")
        return {"right": 1.0 if final is not None and final["content"] == "42" else 0.0, "bonus": 0.25}

    async def close(self) -> None:
        await self.visit("close")


register("test-recording", Recording)


@pytest.fixture(autouse=True)
def _empty_log():
    LOG.clear()


def say(text: str = "", *calls: tuple[str, dict]):
    return {"role": "assistant", "content": text, "tool_calls": [ToolCall("", name, args) for name, args in calls]}


async def run(script, *, env: dict | None = None, spec: EpisodeSpec | None = None, written=None, **limits):
    renderer = ToyRenderer()
    client = script if isinstance(script, ScriptedClient) else ScriptedClient(renderer, script)
    config = RolloutConfig(env=SpecConfig(name="test-recording", config=env or {}), **limits)
    write = None if written is None else written.append
    runner = EpisodeRunner(config, client, renderer, context_length=5000, write=write)
    outcome = await runner.run(spec or EpisodeSpec(TASK, "g"))
    return outcome.trajectories[0], outcome


async def test_a_whole_episode_with_rewards_on_their_turns() -> None:
    script = [say("", ("look", {"at": 1}), ("paid", {})), say("", ("paid", {})), "42"]
    trajectory, outcome = await run(script)
    assert outcome.error is None
    assert trajectory.stop_reason is StopReason.COMPLETED
    assert trajectory.rewards == [
        ("t0", "tool/paid", 0.5),
        ("t1", "tool/paid", 0.5),
        ("t2", "right", 1.0),
        ("t2", "bonus", 0.25),
    ]
    assert trajectory.reward == 2.25
    assert LOG == ["reset", "look", "score", "close"]
    assert trajectory.metrics["tool_calls"] == 3
    assert trajectory.metrics["turns"] == 3
    assert [s.kind for s in trajectory.segments] == ["context", "sampled"] * 3


@pytest.mark.parametrize(
    ("script", "limits", "reason", "reward", "log"),
    [
        ([say("", ("look", {"at": 1}))] * 9, {"max_turns": 2}, "max_turns", 0.25, ["look", "look", "score"]),
        (["a very long answer"], {"max_tokens_per_turn": 3}, "max_tokens", 0.25, ["score"]),
        (["42 and more"], {"max_tokens_per_turn": 2}, "max_tokens", 1.25, ["score"]),
        ([say("", ("look", {"at": 1}))] * 9, {"max_total_tokens": 60}, "max_tokens", 0.25, ["look", "score"]),
        ([say("", ("look", {"at": 1}))] * 9, {"context_length": 80}, "context_overflow", 0.25, ["look", "score"]),
        ([say("", ("none", {}))] * 9, {}, "invalid_calls", 0.25, ["score"]),
    ],
)
async def test_every_limit_is_a_stop_reason_and_is_scored_once(script, limits, reason, reward, log) -> None:
    trajectory, outcome = await run(script, **limits)
    assert (outcome.error, trajectory.error) == (None, None)
    assert trajectory.stop_reason == reason
    assert trajectory.reward == reward
    assert [entry for entry in LOG if entry not in ("reset", "close")] == log
    assert LOG[-1] == "close"


async def test_a_call_that_a_limit_cut_off_is_no_call() -> None:
    trajectory, _ = await run([say("x", ("look", {"at": 1}))], max_tokens_per_turn=6)
    assert CALL in trajectory.segments[1].token_ids
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert "look" not in LOG


@pytest.mark.parametrize("hook", ["reset", "score"])
async def test_an_environment_that_raises_is_an_error_and_never_a_reward(hook) -> None:
    trajectory, outcome = await run([say("", ("look", {"at": 1})), "42"], env={"fail": hook})
    assert trajectory.stop_reason is StopReason.ERROR
    assert isinstance(outcome.error, EnvError)
    assert f"{hook} broke" in (trajectory.error or "")
    assert trajectory.rewards == []
    assert LOG.count("close") == 1


async def test_a_tool_that_raises_is_answered_and_the_episode_goes_on() -> None:
    trajectory, outcome = await run([say("", ("look", {"at": 1})), "42"], env={"fail": "look"})
    assert outcome.error is None
    assert trajectory.reward == 1.25
    [answer] = trajectory.segments[2].messages
    assert "look broke" in answer["content"]


async def test_closing_that_fails_is_counted_and_costs_nothing() -> None:
    trajectory, outcome = await run(["42"], env={"fail": "close"})
    assert outcome.error is None
    assert trajectory.reward == 1.25
    assert trajectory.metrics["close_errors"] == 1


async def test_closing_that_hangs_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr("turnwise.rollout.runner.CLOSE_TIMEOUT_S", 0.01)
    trajectory, _ = await run(["42"], env={"hang": "close"})
    assert trajectory.metrics["close_errors"] == 1


async def test_a_server_that_fails_is_an_error() -> None:
    trajectory, outcome = await run([say("", ("look", {"at": 1})), InferenceError("gone")])
    assert isinstance(outcome.error, InferenceError)
    assert trajectory.stop_reason is StopReason.ERROR
    assert trajectory.rewards == []
    assert len(trajectory.segments) == 2
    assert LOG == ["reset", "look", "close"]


async def test_a_timeout_is_a_stop_reason() -> None:
    async def never(request):
        pass_time(LIMIT_S)
        await asyncio.Event().wait()

    trajectory, outcome = await run(ScriptedClient(ToyRenderer(), never), episode_timeout=LIMIT_S)
    assert outcome.error is None
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert LOG == ["reset", "score", "close"]


async def test_a_reset_that_hangs_is_an_error() -> None:
    trajectory, outcome = await run(["42"], env={"hang": "reset"}, episode_timeout=LIMIT_S)
    assert isinstance(outcome.error, EnvError)
    assert trajectory.stop_reason is StopReason.ERROR
    assert LOG == ["reset", "close"]


async def test_a_score_that_hangs_is_an_error() -> None:
    script = [say("", ("look", {"at": 1}))] * 2
    _, outcome = await run(script, env={"hang": "score"}, score_timeout=LIMIT_S, max_turns=1)
    assert "scoring did not end" in str(outcome.error)


async def test_cancellation_is_raised_after_closing_and_writing() -> None:
    requested = asyncio.Event()
    written: list = []

    async def never(request):
        requested.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run(ScriptedClient(ToyRenderer(), never), written=written))
    await requested.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert LOG == ["reset", "close"]
    assert [t.stop_reason for t in written] == [StopReason.CANCELLED]
    assert written[0].rewards == []


async def test_cancelling_twice_still_closes() -> None:
    requested = asyncio.Event()

    class Slow(Recording):
        async def close(self) -> None:
            closing.set()
            await may_close.wait()
            await super().close()

    closing, may_close = asyncio.Event(), asyncio.Event()
    register("test-slow-close", Slow)

    async def never(request):
        requested.set()
        await asyncio.Event().wait()

    spec = EpisodeSpec(Task("t", "go", env="test-slow-close"), "g")
    task = asyncio.create_task(run(ScriptedClient(ToyRenderer(), never), spec=spec))
    await requested.wait()
    task.cancel()
    await closing.wait()
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert LOG == ["reset", "close"]


class Crashing(Agent):
    async def run(self, episode) -> None:
        await episode.session.chat(episode.observation)
        raise ZeroDivisionError("a bug")


class TwoSessions(Agent):
    async def run(self, episode) -> None:
        critic = episode.session_for("critic")
        opinion = await critic.chat([{"role": "user", "content": "think"}])
        episode.note("brevity", -0.1, opinion["turn_id"], agent="critic")
        message = await episode.session.chat(episode.observation)
        await episode.step(message)


class Caller(Agent):
    async def run(self, episode) -> None:
        message = await episode.session.chat(episode.observation, episode.tools)
        for call in message["tool_calls"]:
            await episode.call(call)
        answers = [{"role": "tool", "tool_call_id": c.id, "content": "x"} for c in message["tool_calls"]]
        await episode.session.chat([*episode.observation, message, *answers], episode.tools)


register_agent("test-crashing")(Crashing)
register_agent("test-two")(TwoSessions)
register_agent("test-caller")(Caller)


def by(agent: str) -> EpisodeSpec:
    return EpisodeSpec(Task("t", "go", agent=agent), "g")


async def test_an_agent_that_raises_is_an_error_with_its_words() -> None:
    trajectory, outcome = await run(["42"], spec=by("test-crashing"))
    assert trajectory.error == "AgentError: the agent raised ZeroDivisionError: a bug"
    assert outcome.error is not None
    assert not outcome.error.retryable
    assert trajectory.rewards == []


async def test_each_session_is_a_trajectory_with_its_own_rewards() -> None:
    _, outcome = await run(["42"], spec=by("test-two"))
    main, critic = outcome.trajectories
    assert (main.agent, critic.agent) == ("main", "critic")
    assert main.group_id != critic.group_id
    assert main.episode_id == critic.episode_id
    assert main.reward == 1.25
    assert critic.rewards == [("t0", "brevity", -0.1)]


async def test_single_calls_note_rewards_on_the_turn_and_the_runner_scores_the_last_message() -> None:
    trajectory, _ = await run([say("", ("paid", {}), ("look", {"at": 2})), "42"], spec=by("test-caller"))
    assert trajectory.rewards == [("t0", "tool/paid", 0.5), (None, "right", 1.0), (None, "bonus", 0.25)]


class Blocking(Env):
    blocking = True

    def reset(self, task=None, *, seed=None):
        return "go", {}

    def step(self, action):
        return StepResult("", 1.0, True, False, {})


register("test-blocking", Blocking)


async def test_blocking_environments_run_in_the_executor() -> None:
    renderer = ToyRenderer()
    config = RolloutConfig(env=SpecConfig(name="test-blocking"))
    with ThreadPoolExecutor(1) as executor:
        runner = EpisodeRunner(config, ScriptedClient(renderer, ["x"]), renderer, context_length=500, executor=executor)
        outcome = await runner.run(EpisodeSpec(TASK, "g"))
    assert outcome.trajectories[0].rewards == [("t0", "step", 1.0)]


# Groups


async def produce(script, requests, **config):
    renderer = ToyRenderer()
    written: list = []
    recover = config.pop("recover", None)
    producer = await RolloutProducer.create(
        RolloutConfig(env=SpecConfig(name="test-recording"), **config),
        ScriptedClient(renderer, script),
        None,
        RolloutParts(renderer, run_seed=3, write=written.append, recover=recover),
    )
    try:
        return await producer.gather(requests), written
    finally:
        await producer.close()


async def test_members_of_a_group_start_equal_and_sample_differently() -> None:
    seeds = []

    def script(request):
        seeds.append((request.text, request.params.seed))
        return "42"

    [group], _ = await produce(script, [RolloutRequest(TASK, group_size=4)])
    assert len({text for text, _ in seeds}) == 1
    assert len({seed for _, seed in seeds}) == 4
    assert [t.id for t in group.trajectories] == [f"{group.id}/{n}.0" for n in range(4)]
    assert {t.group_id for t in group.trajectories} == {group.id}
    [later], _ = await produce(script, [RolloutRequest(TASK, epoch=1)])
    assert later.trajectories[0].seed != group.trajectories[0].seed


async def test_an_infrastructure_failure_is_tried_again_and_every_attempt_is_written() -> None:
    failures = {"left": 2}
    recovered = []

    def script(request):
        if failures["left"]:
            failures["left"] -= 1
            return InferenceError("gone")
        return "42"

    async def recover(error):
        recovered.append(str(error))

    [group], written = await produce(script, [RolloutRequest(TASK)], retries=2, recover=recover)
    assert (len(group.trajectories), group.failed) == (1, 0)
    assert [t.id.rsplit(".", 1)[1] for t in written] == ["0", "1", "2"]
    assert [t.error is None for t in written] == [False, False, True]
    assert recovered == ["gone", "gone"]


async def test_a_failed_member_never_discards_its_group() -> None:
    def script(request):
        return InferenceError("gone") if "/1." in request.session_id else "42"

    [group], written = await produce(script, [RolloutRequest(TASK, group_size=3)], retries=1)
    assert (len(group.trajectories), group.failed) == (2, 1)
    assert len(written) == 4


async def test_an_error_of_recover_ends_the_gathering() -> None:
    async def recover(error):
        raise InferenceError("dead for good")

    with pytest.raises(InferenceError, match="for good"):
        await produce([InferenceError("gone")] * 9, [RolloutRequest(TASK, group_size=3)], recover=recover)


async def test_concurrency_is_bounded() -> None:
    running, peak = 0, 0
    full = asyncio.Event()

    async def script(request):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 3:
            full.set()
        await full.wait()
        running -= 1
        return "42"

    groups, _ = await produce(script, [RolloutRequest(TASK, group_size=9)], concurrency=3)
    assert peak == 3
    assert len(groups[0].trajectories) == 9


class Rooms(Env):
    """Names the room that the next move is made in."""

    def reset(self, task=None, *, seed=None):
        return "go", {"state": "hall"}

    def step(self, action):
        went_left = action["content"] == "left"
        return StepResult("on", 0.0, not went_left, False, {"state": 7, "metrics": {"moves": 1.0}})


register("test-rooms", Rooms)


async def test_states_of_an_environment_are_recorded_after_their_turns() -> None:
    config = RolloutConfig(env=SpecConfig(name="test-rooms"), agent=SpecConfig(name="turns"))
    renderer = ToyRenderer()
    runner = EpisodeRunner(config, ScriptedClient(renderer, ["left", "right"]), renderer, context_length=5000)
    [trajectory] = (await runner.run(EpisodeSpec(TASK, "g"))).trajectories
    assert trajectory.states == {"": "hall", "t0": "7", "t1": "7"}
    assert type(trajectory).from_bytes(trajectory.to_bytes()).states == trajectory.states
