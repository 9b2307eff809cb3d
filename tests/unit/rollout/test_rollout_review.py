"""Episodes against agents, environments, models and disks that do what they should not."""

from __future__ import annotations

import asyncio
import contextlib
import gc

import pytest

from support.chat.toy_renderer import CALL, CALL_END, END, ToyRenderer
from turnwise.agents.core import Agent
from turnwise.agents.react import ReActAgent
from turnwise.envs.core import Env, StepResult
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, BudgetExceeded, EnvError, InferenceError, TurnwiseError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.agent_table import AgentTable
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec, RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TrajectoryWriter, read_trajectories
from turnwise.types import StopReason

LOG: list[str] = []


@pytest.fixture(autouse=True)
def _empty_log():
    LOG.clear()


class World(ToolEnv):
    def reset(self, task=None, *, seed=None):
        self._begin(task)
        return "go", {}

    @function_tool
    async def look(self, at: int) -> str:
        return f"saw {at}"

    def score(self, final):
        LOG.append("score")
        return 1.0 if final is not None else 0.0

    def close(self):
        LOG.append("close")


class Nameless(World):
    """Answers without saying which call."""

    async def step(self, action):
        result = await super().step(action)
        return result._replace(observation=[{"role": "tool", "content": m["content"]} for m in result.observation])


class Stepping(Env):
    """Does in its one step what a test says."""

    result: StepResult = StepResult("", 0.0, False, True, {})

    def reset(self, task=None, *, seed=None):
        return "go", {}

    def step(self, action):
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def score(self, final):
        LOG.append("score")
        return 0.0


class Acting(Agent):
    """Acts as a test says."""

    act = None

    async def run(self, episode) -> None:
        assert Acting.act is not None
        await Acting.act(episode)


HERE = f"{__name__}:"


async def run(script, *, act=None, env=World, task: Task | None = None, write=None, **limits):
    renderer = ToyRenderer()
    client = script if isinstance(script, ScriptedClient) else ScriptedClient(renderer, script)
    config = RolloutConfig(
        env=SpecConfig(name=HERE + env.__name__),
        agent=SpecConfig(name="react" if act is None else HERE + "Acting"),
        **limits,
    )
    Acting.act = staticmethod(act) if act is not None else None
    runner = EpisodeRunner(config, client, renderer, context_length=5000, write=write)
    return await runner.run(EpisodeSpec(task or Task("t", "go"), "g"))


# Agents


@pytest.mark.parametrize("name", ["note", "count"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_numbers_that_are_not_finite_are_the_agents_error_and_are_written(tmp_path, name, value) -> None:
    async def act(episode):
        await episode.session.chat(episode.observation)
        if name == "note":
            episode.note("mine", value)
        else:
            episode.count({"mine": value})

    writer = TrajectoryWriter(tmp_path / "trajectories.twz")
    outcome = await run(["42"], act=act, write=writer.write)
    assert isinstance(outcome.error, AgentError)
    assert "'mine'" in str(outcome.error)
    [read] = read_trajectories(tmp_path / "trajectories.twz")
    assert read.stop_reason is StopReason.ERROR
    assert read.rewards == []
    assert len(read.segments) == 2


class Panic(BaseException):
    """What extensions in Rust raise; like the outcomes of pytest it is no Exception."""


@pytest.mark.parametrize("raised", [SystemExit(3), Panic(3), pytest.fail.Exception("3")])
async def test_an_agent_that_raises_no_exception_ends_its_episode_only(raised: BaseException) -> None:
    async def act(episode):
        raise raised

    outcome = await run(["42"], act=act)
    assert str(outcome.error) == f"the agent raised {type(raised).__name__}: 3"
    assert LOG == ["close"]


async def assert_group_of_failures_arrives(act) -> None:
    Acting.act = staticmethod(act)
    renderer = ToyRenderer()
    config = RolloutConfig(env=SpecConfig(name=HERE + "World"), agent=SpecConfig(name=HERE + "Acting"))
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, []), None, RolloutParts(renderer))
    async with asyncio.timeout(10):
        [group] = await producer.gather([RolloutRequest(Task("t", "go"), group_size=2)])
    assert (group.failed, group.trajectories) == (2, [])
    await producer.close()


async def test_groups_whose_members_raise_no_exception_arrive() -> None:
    async def act(episode):
        raise Panic(3)

    await assert_group_of_failures_arrives(act)


async def test_a_cancellation_that_nobody_asked_for_is_an_error_and_the_group_arrives() -> None:
    async def act(episode):
        inner = asyncio.create_task(asyncio.Event().wait())
        inner.cancel()
        await inner

    await assert_group_of_failures_arrives(act)


@pytest.mark.parametrize("how", ["as it is", "from", "group", "caught"])
async def test_a_spent_budget_is_known_through_an_agent_framework(how) -> None:
    async def act(episode):
        messages = list(episode.observation)
        messages += [await episode.session.chat(messages), {"role": "user", "content": "more"}]
        if how == "group":
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(episode.session.chat(messages))
            return
        try:
            await episode.session.chat(messages)
        except BudgetExceeded as spent:
            if how == "from":
                raise RuntimeError("the framework's own words") from spent
            if how == "as it is":
                raise

    outcome = await run(["a", "b"], act=act, max_turns=1)
    assert outcome.error is None
    [trajectory] = outcome.trajectories
    # An agent that handles it has ended on its own terms.
    assert trajectory.stop_reason == (StopReason.COMPLETED if how == "caught" else StopReason.MAX_TURNS)
    assert LOG == ["score", "close"]


async def test_a_spent_budget_beside_a_bug_is_a_bug() -> None:
    async def act(episode):
        raise ExceptionGroup("both", [BudgetExceeded("max_turns", "spent"), ValueError("bug")])

    assert isinstance((await run([], act=act)).error, AgentError)


async def test_an_end_that_a_step_gave_stays() -> None:
    async def act(episode):
        message = await episode.session.chat(episode.observation)
        result = await episode.step(message)
        assert result.terminated
        await episode.session.chat([*episode.observation, message, {"role": "user", "content": "bye"}])

    outcome = await run(["42", "bye"], act=act, max_turns=1)
    assert outcome.trajectories[0].stop_reason is StopReason.COMPLETED
    assert outcome.trajectories[0].reward == 1.0
    assert LOG == ["score", "close"]


async def test_a_timeout_after_the_end_changes_nothing() -> None:
    async def act(episode):
        await episode.step(await episode.session.chat(episode.observation))
        await asyncio.Event().wait()

    outcome = await run(["42"], act=act, episode_timeout=0.5)
    assert outcome.trajectories[0].stop_reason is StopReason.COMPLETED
    assert LOG == ["score", "close"]


async def test_a_server_failure_that_the_agent_swallows_is_never_a_reward() -> None:
    async def act(episode):
        try:
            await episode.session.chat(episode.observation)
        except InferenceError:
            return

    outcome = await run([InferenceError("gone")], act=act)
    assert isinstance(outcome.error, InferenceError)
    assert outcome.trajectories[0].stop_reason is StopReason.ERROR
    assert outcome.trajectories[0].rewards == []
    assert LOG == ["close"]


async def test_a_server_failure_that_the_agent_overcomes_is_none() -> None:
    async def act(episode):
        for _ in range(2):
            try:
                await episode.session.chat(episode.observation)
            except InferenceError:
                LOG.append("again")

    outcome = await run([InferenceError("gone"), "42"], act=act)
    assert outcome.error is None
    assert outcome.trajectories[0].reward == 1.0
    assert LOG == ["again", "score", "close"]


async def test_an_environment_failure_that_the_agent_swallows_is_never_a_reward(monkeypatch) -> None:
    async def act(episode):
        message = await episode.session.chat(episode.observation)
        try:
            await episode.step(message)
        except EnvError:
            return

    monkeypatch.setattr(Stepping, "result", RuntimeError("broke"))
    outcome = await run(["42"], act=act, env=Stepping)
    assert "broke" in str(outcome.error)
    assert outcome.trajectories[0].rewards == []
    assert LOG == []


async def test_a_message_edited_by_the_agent_is_scored_as_sampled(monkeypatch) -> None:
    seen = []

    def score(self, final):
        seen.append(final["content"])
        return 0.0

    async def act(episode):
        message = await episode.session.chat(episode.observation)
        message["content"] = "edited"

    monkeypatch.setattr(World, "score", score)
    await run(["said"], act=act)
    assert seen == ["said"]


# Environments


async def test_a_truncation_without_a_reason_is_the_environments(monkeypatch) -> None:
    monkeypatch.setattr(Stepping, "result", StepResult("", 0.5, False, True, {"stop_reason": None}))
    outcome = await run(["42"], env=Stepping)
    assert outcome.error is None
    assert outcome.trajectories[0].stop_reason is StopReason.ENV_TRUNCATED
    assert outcome.trajectories[0].rewards == [("t0", "step", 0.5), (None, "score", 0.0)]


async def test_tool_messages_without_an_id_answer_the_calls_in_order() -> None:
    renderer = ToyRenderer()
    body = '{"name": "look", "arguments": {"at": %d}}'
    line = [i for at in (1, 2) for i in (CALL, *renderer.text(body % at), CALL_END)] + [END]
    client = ScriptedClient(renderer, [line, "done"])
    outcome = await run(client, env=Nameless)
    assert outcome.error is None
    assert "c00000000=look:saw 1" in client.requests[1].text
    assert "c00000001=look:saw 2" in client.requests[1].text
    assert not outcome.trajectories[0].forks()


@pytest.mark.parametrize("stubborn", [False, True])
async def test_closing_is_bounded_where_cleanup_hangs(monkeypatch, stubborn) -> None:
    let_go = asyncio.Event()

    async def close(self):
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                if not stubborn:
                    raise

    async def release(self):
        await let_go.wait()

    monkeypatch.setattr(World, "close", close)
    monkeypatch.setattr(World, "release", release)
    async with asyncio.timeout(10):
        monkeypatch.setattr("turnwise.rollout.runner.CLOSE_TIMEOUT_S", 0.02)
        outcome = await run(["42"])
    assert outcome.error is None
    assert outcome.trajectories[0].metrics["close_errors"] == 1.0
    let_go.set()


# Models and files


async def test_any_sampled_text_can_be_written(tmp_path, monkeypatch) -> None:
    renderer = ToyRenderer()

    def line(arguments: str) -> list[int]:
        return [CALL, *renderer.text(f'{{"name": "look", "arguments": {arguments}}}'), CALL_END, END]

    script = [
        line('{"at": 123456789012345678901234567890}'),
        line('{"at": "\\ud800"}'),
        line('{"at": ' + "[" * 400 + "]" * 400 + "}"),
        line('{"\\ud800": NaN}'),
        line('{"at": 1e999}'),
        line('{"at": 1}'),
        "done",
    ]
    writer = TrajectoryWriter(tmp_path / "trajectories.twz")
    # So many calls in a row do not reach the tool: the environment must not end the episode for it.
    monkeypatch.setattr(World, "max_invalid_calls", 0)
    outcome = await run(script, write=writer.write)
    assert outcome.error is None
    [read] = read_trajectories(tmp_path / "trajectories.twz")
    assert read.reward == 1.0
    assert read.metrics["turns"] == 7
    assert not read.forks()
    assert [s.messages for s in read.segments] == [s.messages for s in outcome.trajectories[0].segments]


async def test_a_task_id_may_hold_anything() -> None:
    ids = ["a/0.0", "a\nb", "a%0Ab", "a\r\nX-Evil: 1", "ä/€", " ", "a-e0", "a"]
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, lambda request: "42")
    config = RolloutConfig(env=SpecConfig(name=HERE + "World"))
    written: list = []
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer, write=written.append))
    requests = [RolloutRequest(Task(name, "go"), epoch=epoch, group_size=2) for name in ids for epoch in (0, 1)]
    groups = await producer.gather(requests)
    await producer.close()
    assert [group.task_id for group in groups] == [name for name in ids for _ in (0, 1)]
    sessions = [request.session_id for request in client.requests]
    assert len(set(sessions)) == len(sessions) == 4 * len(ids)
    assert len({group.id for group in groups}) == 2 * len(ids)
    assert all(character >= " " for name in sessions for character in name)
    assert {t.id for t in written} == set(sessions)


async def test_requests_that_would_share_ids_are_refused_before_anything_starts() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, lambda request: "42")
    config = RolloutConfig(env=SpecConfig(name=HERE + "World"))
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer))
    try:
        twice = [RolloutRequest(Task("t", "go"), tag="a"), RolloutRequest(Task("t", "go"), tag="a")]
        with pytest.raises(
            TurnwiseError, match=r"task 't' was requested before .*epoch 0, tag 'a'.* another epoch or tag"
        ):
            await producer.gather(twice)
        assert client.requests == []
        await producer.gather(twice[:1])
        with pytest.raises(TurnwiseError, match="was requested before"):
            await producer.gather(twice[1:])
        # Other names never meet, whatever stands in them.
        alike = [("t", 0, "e1"), ("t-e0", 1, ""), ("t~a", 0, ""), ("t", 0, "a~b"), ("t~a", 0, "b"), ("t%7Ea", 0, "b")]
        groups = await producer.gather([RolloutRequest(Task(i, "go"), epoch=e, tag=tag) for i, e, tag in alike])
        assert len({group.id for group in groups}) == len(alike)
    finally:
        await producer.close()


async def test_words_of_an_error_that_are_no_text_are_written(tmp_path) -> None:
    async def act(episode):
        raise ValueError("no file \udcff")

    writer = TrajectoryWriter(tmp_path / "trajectories.twz")
    await run([], act=act, write=writer.write)
    [read] = read_trajectories(tmp_path / "trajectories.twz")
    assert read.error == "AgentError: the agent raised ValueError: no file ?"


async def test_a_full_disk_ends_the_work_with_its_words_and_closes_first() -> None:
    def full(trajectory) -> None:
        LOG.append("write")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await run(["42"], write=full)
    assert LOG == ["score", "close", "write"]


async def test_a_line_that_a_kill_cut_off_is_passed_over_and_swallows_nothing(tmp_path) -> None:
    path = tmp_path / "trajectories.twz"
    first, second = (Trajectory(name, name, "g", "t") for name in "ab")
    for trajectory in (first, second):
        writer = TrajectoryWriter(path)
        writer.write(trajectory)
        writer.close()
        with path.open("ab") as file:
            file.write(path.read_bytes()[:40])
    assert [read.id for read in read_trajectories(path)] == ["a", "b"]


# What reaches the environment and the model


async def test_cancelling_while_an_ended_episode_closes_is_a_cancellation(monkeypatch) -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()
    written: list[Trajectory] = []

    async def close(self):
        closing.set()
        await may_close.wait()
        LOG.append("close")

    monkeypatch.setattr(World, "close", close)
    task = asyncio.create_task(run(["42"], write=written.append))
    await closing.wait()
    task.cancel()
    may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert LOG == ["score", "close"]
    assert [t.stop_reason for t in written] == [StopReason.CANCELLED]


@pytest.mark.parametrize("spent", ["turns", "truncated"])
async def test_an_episode_without_an_answer_is_scored_with_none(monkeypatch, spent) -> None:
    seen = []

    def score(self, final):
        seen.append(final)
        return 0.0

    async def act(episode):
        message = await episode.session.chat(episode.observation)
        if spent == "truncated":
            await episode.step(message)
        else:
            await episode.session.chat([*episode.observation, message, {"role": "user", "content": "more"}])

    env = World if spent == "turns" else Stepping
    monkeypatch.setattr(env, "score", score)
    await run(["42", "43"], act=act, env=env, max_turns=1)
    assert seen == [None]


async def test_the_smaller_context_holds() -> None:
    for configured, expected in ((9000, 5000), (300, 300), (None, 5000)):
        client = ScriptedClient(ToyRenderer(), ["42"])
        await run(client, context_length=configured)
        [request] = client.requests
        assert request.params.max_tokens == expected - len(request.prompt)


async def test_a_greedy_request_is_greedy_and_sessions_sample_apart() -> None:
    client = ScriptedClient(ToyRenderer(), ["42"])

    async def act(episode):
        for name in ("main", "critic"):
            await episode.session_for(name).chat(episode.observation)

    Acting.act = staticmethod(act)
    renderer = ToyRenderer()
    config = RolloutConfig(env=SpecConfig(name=HERE + "World"), agent=SpecConfig(name=HERE + "Acting"))
    runner = EpisodeRunner(config, client, renderer, context_length=500)
    outcome = await runner.run(EpisodeSpec(Task("t", "go"), "g", temperature=0.0))
    assert {request.params.temperature for request in client.requests} == {0.0}
    assert len({request.params.seed for request in client.requests}) == 2
    assert [t.metrics["temperature"] for t in outcome.trajectories] == [0.0, 0.0]


class Configured(World):
    def __init__(self, word: str) -> None:
        self.word = word

    def reset(self, task=None, *, seed=None):
        self._begin(task)
        return self.word, {}


class Talking(Agent):
    def __init__(self, word: str) -> None:
        self.word = word

    async def run(self, episode) -> None:
        await episode.session.chat([*episode.observation, {"role": "user", "content": self.word}])


async def test_the_configuration_is_that_of_the_named_environment_and_agent_only() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, lambda request: "42")
    config = RolloutConfig(
        env=SpecConfig(name=HERE + "Configured", config={"word": "env"}),
        agent=SpecConfig(name=HERE + "Talking", config={"word": "agent"}),
    )
    runner = EpisodeRunner(config, client, renderer, context_length=500)
    named_task = Task("u", "go", env=HERE + "World", agent="react")
    outcomes = [await runner.run(EpisodeSpec(task, f"g{task.id}")) for task in (Task("t", "go"), named_task)]
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert "env<1><11>agent" in client.requests[0].text


async def test_tags_partitions_and_run_seeds_decide_the_seeds() -> None:
    renderer = ToyRenderer()
    seeds: dict[tuple[int, str, str], tuple[int, int | None]] = {}
    for run_seed in (1, 2):
        for partition, tag in (("train", ""), ("val", "sampled"), ("val", "other")):
            client = ScriptedClient(renderer, ["42"])
            config = RolloutConfig(env=SpecConfig(name=HERE + "World"))
            parts = RolloutParts(renderer, run_seed=run_seed)
            producer = await RolloutProducer.create(config, client, None, parts)
            [group] = await producer.gather([RolloutRequest(Task("t", "go"), partition=partition, tag=tag)])
            await producer.close()
            assert (group.partition, group.trajectories[0].partition) == (partition, partition)
            assert group.id.endswith(f"~{tag}" if tag else "-e0")
            seeds[run_seed, partition, tag] = (group.trajectories[0].seed, client.requests[0].params.seed)
    # Evaluation is the same in every run; training is not; tags sample apart from equal beginnings.
    assert seeds[1, "val", "sampled"] == seeds[2, "val", "sampled"]
    assert seeds[1, "train", ""][0] != seeds[2, "train", ""][0]
    assert seeds[1, "val", "sampled"][0] == seeds[1, "val", "other"][0]
    assert seeds[1, "val", "sampled"][1] != seeds[1, "val", "other"][1]


async def test_epochs_have_different_sampling_seeds() -> None:
    renderer, seeds = ToyRenderer(), []
    for epoch in (0, 1):
        client = ScriptedClient(renderer, ["42"])
        config = RolloutConfig(env=SpecConfig(name=HERE + "World"))
        producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer, run_seed=1))
        [group] = await producer.gather([RolloutRequest(Task("t", "go"), epoch)])
        await producer.close()
        seeds.append((group.trajectories[0].seed, client.requests[0].params.seed))
    (first, sampled), (second, sampled_later) = seeds
    assert first != second
    assert sampled != sampled_later


async def test_closing_a_producer_cancels_and_writes_running_episodes() -> None:
    requested = asyncio.Event()

    async def never(request):
        requested.set()
        await asyncio.Event().wait()

    renderer = ToyRenderer()
    written: list[Trajectory] = []
    config = RolloutConfig(env=SpecConfig(name=HERE + "World"))
    parts = RolloutParts(renderer, write=written.append)
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, never), LocalReplayBuffer(), parts)
    producer.generate_sequences([RolloutRequest(Task("t", "go"), group_size=2)])
    await requested.wait()
    async with asyncio.timeout(10):
        await producer.close()
    assert {t.stop_reason for t in written} == {StopReason.CANCELLED}
    assert LOG.count("close") == len(written)


async def test_a_step_after_the_end_is_the_agents_error() -> None:
    async def act(episode):
        message = await episode.session.chat(episode.observation)
        await episode.step(message)
        await episode.step(message)

    outcome = await run(["42"], act=act)
    assert isinstance(outcome.error, AgentError)
    assert "after the episode ended" in str(outcome.error)


async def test_closed_calls_of_a_cut_turn_are_executed() -> None:
    renderer = ToyRenderer()
    body = '{"name": "look", "arguments": {"at": 7}}'
    client = ScriptedClient(renderer, [[CALL, *renderer.text(body), CALL_END, CALL, *renderer.text(body[:9])], "done"])
    outcome = await run(client)
    assert "saw 7" in client.requests[1].text
    assert outcome.trajectories[0].stop_reason is StopReason.COMPLETED


async def test_an_observation_is_not_changed_by_the_loop(monkeypatch) -> None:
    observations = []
    real = ReActAgent.run

    async def watched(self, episode):
        await real(self, episode)
        observations.append(list(episode.observation))

    monkeypatch.setattr(ReActAgent, "run", watched)
    renderer = ToyRenderer()
    body = '{"name": "look", "arguments": {"at": 7}}'
    await run([[CALL, *renderer.text(body), CALL_END, END], "done"])
    assert observations == [[{"role": "user", "content": "go"}]]


@pytest.mark.parametrize(("limit", "reason"), [(3, StopReason.MAX_TOKENS), (None, StopReason.COMPLETED)])
async def test_a_single_turn_that_was_cut_says_so(limit, reason) -> None:
    task = Task("t", "go", agent="single_turn")
    outcome = await run(["a long answer"], task=task, max_tokens_per_turn=limit)
    [trajectory] = outcome.trajectories
    assert (trajectory.stop_reason, trajectory.reward, LOG.count("score")) == (reason, 1.0, 1)


async def test_cleanup_of_a_cancelled_close_is_awaited(monkeypatch) -> None:
    async def close(self):
        await asyncio.Event().wait()

    async def release(self):
        for _ in range(5):
            await asyncio.sleep(0)
        LOG.append("released")

    monkeypatch.setattr(World, "close", close)
    monkeypatch.setattr(World, "release", release)
    monkeypatch.setattr("turnwise.rollout.runner.CLOSE_TIMEOUT_S", 0.05)
    outcome = await run(["42"])
    assert LOG == ["score", "released"]
    assert outcome.trajectories[0].metrics["close_errors"] == 1.0


async def swallow_cancellations(started: asyncio.Event) -> None:
    """Run for ever, as code does that catches all exceptions in a loop."""
    started.set()
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


# What is abandoned is destroyed with its loop, and may complain of that.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_an_agent_that_swallows_its_cancellation_is_abandoned_after_the_time_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("turnwise.tools.cancellation.CANCEL_GRACE_S", 0.05)

    async def act(episode):
        await swallow_cancellations(asyncio.Event())

    async with asyncio.timeout(20):
        outcome = await run(["42"], act=act, episode_timeout=0.05)
    assert "swallowed its cancellation" in str(outcome.error)
    [trajectory] = outcome.trajectories
    assert (trajectory.stop_reason, trajectory.metrics["abandoned"]) == (StopReason.TIMEOUT, 1.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_event_loop_ends_beside_code_that_swallows_its_cancellation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.tools.cancellation.CANCEL_GRACE_S", 0.05)

    async def interrupt() -> None:
        started = asyncio.Event()

        async def act(episode):
            await swallow_cancellations(started)

        episode = asyncio.ensure_future(run(["42"], act=act))
        await started.wait()
        episode.cancel()
        await episode

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupt())
    gc.collect()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_event_loop_ends_beside_environments_and_agents_that_never_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnwise.tools.cancellation.CANCEL_GRACE_S", 0.05)
    for module in ("runner", "agent_table"):
        monkeypatch.setattr(f"turnwise.rollout.{module}.CLOSE_TIMEOUT_S", 0.05)

    async def close(self):
        await swallow_cancellations(asyncio.Event())

    monkeypatch.setattr(World, "close", close)
    monkeypatch.setattr(ReActAgent, "close", close)

    async def play_and_close() -> None:
        outcome = await run(["42"])
        assert outcome.trajectories[0].metrics["close_errors"] == 1.0
        agents = AgentTable(RolloutConfig.model_validate({"env": {"name": "lookup"}}))
        agents.default()
        await agents.close()

    asyncio.run(play_and_close())
    gc.collect()
    assert "agent react did not close within 0.05 s: it is abandoned" in caplog.text
