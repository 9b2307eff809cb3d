"""Episodes that their agent forks: several ways through one episode, each turn recorded once and trained once."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.doc_pages import blocks, section
from support.rollout.audited import assert_sound
from turnwise.agents import Episode, rollout, within_budget
from turnwise.envs.core import Env
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, BudgetExceeded, EnvError, SessionError
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trajectory import Trajectory, branch_paths, to_samples
from turnwise.types import Message, ToolCall

OPEN: list[int] = []


class Sum(ToolEnv):
    """Adds up, and says what was added."""

    def __init__(self) -> None:
        self.added: list[int] = []

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        OPEN.append(1)
        return "Add.", {}

    @function_tool
    async def add(self, n: int) -> str:
        """Add."""
        await asyncio.sleep(0)
        self.added.append(n)
        return str(self.added)

    def score(self, final: Message | None) -> float:
        return float(sum(self.added))

    async def fork(self) -> Env:
        copy = await super().fork()
        OPEN.append(1)
        return copy

    def close(self) -> None:
        OPEN.append(-1)


class Unforkable(Sum):
    forks = None


register("test-sum", Sum)
register("test-sum-unforkable", Unforkable)


def adds(request: ScriptedRequest) -> Message | str:
    """Add a number that the request's seed draws; after three additions stop."""
    if request.text.count("add") > 6:
        return "done"
    number = random.Random(request.params.seed).randrange(1, 1000)
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "add", {"n": number})]}


async def go_on(episode: Episode, messages: list[Message], turns: int = 9) -> list[Message]:
    """Play on as ReAct does, at most so many turns."""
    for _ in range(turns):
        message = await episode.session.chat(messages, episode.tools)
        messages.append(message)
        result = await episode.step(message)
        messages.extend(result.observation)
        if result.terminated or result.truncated:
            break
    return messages


async def play(agent: Any, path: Path | None = None, **config: Any) -> tuple[EpisodeOutcome, ScriptedClient]:
    """Run one episode; nothing is left open."""
    OPEN.clear()
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, adds)
    settings = {"env": {"name": "test-sum"}, "agent": {"name": "react"}} | config
    recorded_client = client if path is None else LedgerClient(client, path / "ledger.jsonl")
    runner = EpisodeRunner(RolloutConfig.model_validate(settings), recorded_client, renderer, context_length=5000)
    await runner.prepare()
    outcome = await runner.run(EpisodeSpec(Task("t", "Add."), "g", sampling_seed=3), agent.make_agent())
    await runner.close()
    assert sum(OPEN) == 0
    return outcome, client


def check_rewards(trajectory: Trajectory) -> None:
    """Check that the reward of each way is what it added itself, shared turns included."""
    messages_by_turn = {turn.turn_id: turn.sampled.messages[0] for turn in trajectory.turns()}
    for path, reward in zip(branch_paths(trajectory.branches), trajectory.returns(), strict=True):
        calls = [
            call["function"]["arguments"] for turn in path for call in messages_by_turn[turn].get("tool_calls") or ()
        ]
        assert reward == sum(call["n"] for call in calls)


@rollout
async def explores(episode: Episode) -> None:
    messages = await go_on(episode, list(episode.observation), 1)
    other = await episode.fork()
    third = await other.fork()
    branches = await asyncio.gather(*(go_on(branch, list(messages)) for branch in (episode, other, third)))
    assert len({str(branch[3]["tool_calls"][0].arguments) for branch in branches}) == 3, (
        "each samples with seeds of its own"
    )
    # What one way noted stands in that alone.
    other.note("liked", 0.5)


@rollout
async def explores_in_turn(episode: Episode) -> None:
    messages = await go_on(episode, list(episode.observation), 1)
    other = await episode.fork()
    answered = await go_on(other, list(messages), 1)
    below = await other.fork()
    await go_on(below, list(answered))
    await go_on(episode, messages)
    await episode.fork() if not episode.ended else None


@pytest.mark.parametrize("agent", [explores, explores_in_turn], ids=["together", "in turn"])
async def test_each_fork_continues_and_each_turn_is_trained_once(agent: Any, tmp_path: Path) -> None:
    outcome, client = await play(agent, tmp_path)
    assert outcome.error is None
    [trajectory] = outcome.trajectories
    assert len(trajectory.branches) == 3
    turns = [turn for branch in trajectory.branches for turn in branch.turns]
    assert sorted(turns) == sorted(turn.turn_id for turn in trajectory.turns())
    assert len(client.requests) == len(turns)
    seeds = [request.params.seed for request in client.requests]
    assert len(set(seeds)) == len(seeds)
    samples = to_samples(trajectory)
    assert sum(row.trained_tokens for row in samples.rows) == trajectory.sampled_tokens
    assert [branch.parent for branch in trajectory.branches] == [-1, 0, 1]
    first = trajectory.branches[0].turns[0]
    assert trajectory.branches[1].after == first
    # The original and its fork sampled from one prompt.
    assert trajectory.branches[1].again == trajectory.branches[0].turns[1]
    if agent is explores:
        assert [parts.pop("liked", 0) for parts in trajectory.branch_rewards()] == [0, 0.5, 0]
        assert trajectory.branches[2].again == trajectory.branches[1].turns[0]
    else:
        check_rewards(trajectory)
    assert Trajectory.from_bytes(trajectory.to_bytes()).branches == trajectory.branches
    assert_sound(tmp_path, trajectory)


async def test_two_sessions_fork_together_and_a_fork_may_open_its_own(tmp_path: Path) -> None:
    async def asked(episode: Episode, name: str, text: str) -> None:
        await episode.session_for(name).chat([{"role": "user", "content": text}])

    @rollout
    async def agent(episode: Episode) -> None:
        messages = await go_on(episode, list(episode.observation), 1)
        await asked(episode, "planner", "one")
        other = await episode.fork()
        await asked(other, "planner", "two")
        await asked(other, "critic", "three")
        await asked(episode, "critic", "four")
        for branch in (episode, other):
            await go_on(branch, list(messages))

    outcome, _ = await play(agent, tmp_path)
    assert outcome.error is None
    assert sorted(trajectory.agent for trajectory in outcome.trajectories) == ["critic", "main", "planner"]
    for trajectory in outcome.trajectories:
        assert len(trajectory.branches) == 2
    by_agent = {trajectory.agent: trajectory for trajectory in outcome.trajectories}
    assert [len(branch.turns) for branch in by_agent["planner"].branches] == [1, 1]
    assert by_agent["planner"].branches[1].after == by_agent["planner"].branches[0].turns[0]
    assert [len(branch.turns) for branch in by_agent["critic"].branches] == [1, 1]
    assert by_agent["critic"].branches[1].after is None
    assert_sound(tmp_path, *outcome.trajectories)


async def test_a_fork_that_is_not_used_is_left_out_and_closed() -> None:
    @rollout
    async def agent(episode: Episode) -> None:
        messages = await go_on(episode, list(episode.observation), 1)
        assert (await episode.fork()).id == episode.id
        await go_on(episode, messages)

    outcome, _ = await play(agent)
    assert outcome.error is None
    [trajectory] = outcome.trajectories
    assert not trajectory.branches
    assert len(trajectory.returns()) == 1


async def test_a_spent_budget_ends_only_its_fork() -> None:
    @rollout
    async def agent(episode: Episode) -> None:
        messages = await go_on(episode, list(episode.observation), 1)
        other = await episode.fork()
        with within_budget(other):
            conversation = list(messages)
            while True:
                conversation.append({"role": "user", "content": "more"})
                conversation.append(await other.session.chat(conversation))
        await go_on(episode, messages)
        assert episode.ended
        with pytest.raises(AgentError, match="fork it before the step that ends it"):
            await episode.fork()
        with pytest.raises(BudgetExceeded):
            await other.session.chat([*conversation, {"role": "user", "content": "one more"}])

    outcome, _ = await play(agent, max_turns=6)
    assert outcome.error is None, outcome.error
    [trajectory] = outcome.trajectories
    assert [branch.stop_reason for branch in trajectory.branches] == ["completed", "max_turns"]
    # The turns before the fork count in both.
    assert [len(path) for path in branch_paths(trajectory.branches)] == [4, 6]


async def test_a_reward_that_the_agent_sets_is_that_of_its_way() -> None:
    @rollout
    async def agent(episode: Episode) -> None:
        messages = list(episode.observation)
        first = await episode.session.chat(messages, episode.tools)
        episode.note("shared", 1.0, first["turn_id"])
        other = await episode.fork()
        for branch, value in ((episode, 2.0), (other, 5.0)):
            await branch.session.chat([*messages, first, {"role": "user", "content": "on"}], branch.tools)
            branch.reward(value)

    outcome, _ = await play(agent)
    assert outcome.error is None
    [trajectory] = outcome.trajectories
    assert trajectory.branch_rewards() == [{"shared": 1.0, "reward": 2.0}, {"shared": 1.0, "reward": 5.0}]


async def test_unforkable_episodes_raise_agent_error() -> None:
    @rollout
    async def agent(episode: Episode) -> None:
        await episode.fork()

    outcome, _ = await play(agent, env={"name": "test-sum-unforkable"})
    assert isinstance(outcome.error, EnvError)
    assert "forks = None" in str(outcome.error)
    outcome, _ = await play(agent, tree={"branches": 2})
    assert isinstance(outcome.error, AgentError)
    assert "with rollout.tree or a search the run does that (leave it out)" in str(outcome.error)

    @rollout
    async def busy(episode: Episode) -> None:
        message = await episode.session.chat(episode.observation, episode.tools)
        async with asyncio.TaskGroup() as group:
            group.create_task(episode.step(message))
            await asyncio.sleep(0)
            with pytest.raises(AgentError, match=r"while episode\.step or episode\.call runs: await that first"):
                await episode.fork()

    outcome, _ = await play(busy)
    assert outcome.error is None


class WithoutIds(Session):
    recorded_as = "text"


async def test_a_session_forks_by_itself() -> None:
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, adds)
    session = Session(client, renderer, id="s", limits=SessionLimits(4000, 50, max_turns=3), seed=7)
    head: list[Message] = [{"role": "user", "content": "Add."}]
    first = await session.chat(head)
    one, two = session.fork(), session.fork()
    on: list[Message] = [*head, first, {"role": "user", "content": "again"}]
    for forked in (session, one, two):
        await forked.chat(on)
        assert forked.last is not None
    assert len({request.params.seed for request in client.requests}) == 4
    below = one.fork()
    assert below.last == one.last
    await below.chat([*on, one.last, {"role": "user", "content": "more"}])
    with pytest.raises(BudgetExceeded):
        await below.chat([*on, one.last, {"role": "user", "content": "too much"}])
    segments = session.segments()
    assert [len(forked.sampled_turns) for forked in (session, one, two, below)] == [2, 1, 1, 1]
    assert sum(segment.sampled for segment in segments) == 5
    with pytest.raises(SessionError, match="cannot fork after 't99'"):
        session.fork(["t99"])
    text = WithoutIds(client, renderer, id="text", limits=SessionLimits(4000, 50))
    with pytest.raises(SessionError, match="session text is recorded as text: it cannot be forked"):
        text.fork()


async def test_the_agent_of_the_guide_explores_two_ways(tmp_path: Path) -> None:
    [block] = blocks(section("branching.md", "Forks that an agent makes"), "python")
    names: dict[str, Any] = {"__name__": "docs_branching"}
    exec(compile(block, "docs/branching.md", "exec"), names)
    outcome, _ = await play(names["explorer"], tmp_path)
    assert outcome.error is None
    [trajectory] = outcome.trajectories
    assert [branch.parent for branch in trajectory.branches] == [-1, 0]
    check_rewards(trajectory)
    assert_sound(tmp_path, trajectory)
