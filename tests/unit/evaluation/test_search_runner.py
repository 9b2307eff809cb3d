"""Searches: several ways through an episode of an evaluation, one of which a scorer chooses."""

from __future__ import annotations

import asyncio
import io
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from support.agents.plain_loop import PlainLoop
from support.chat.toy_renderer import ToyRenderer
from support.rollout.audited import write_trajectories
from turnwise.agents.core import Agent, Episode
from turnwise.agents.registry import register_agent
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, EnvError, InferenceError, ScorerError
from turnwise.evaluation.metrics import summarize
from turnwise.evaluation.searched import search_row
from turnwise.evaluation.view import render
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.recorder.branches import branch_trajectories
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.audit import audit_files
from turnwise.rollout.branching.search import SearchConfig
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trajectory import Trajectory, TrajectoryGroup, branch_paths
from turnwise.types import Message, StopReason, ToolCall

TASK = Task("t", "Count to ten.", {"goal": 10})
OPEN: list[int] = []


class Counter(ToolEnv):
    """Adds up; what is said at the end is rewarded by the total."""

    def __init__(self) -> None:
        self.total = 0

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        OPEN.append(1)
        return "Count to ten.", {}

    @function_tool
    def add(self, n: int) -> str:
        """Add."""
        self.total += n
        return f"total {self.total}"

    def score(self, final: Message | None) -> float:
        return float(self.total)

    async def fork(self) -> Any:
        OPEN.append(1)
        return await super().fork()

    def close(self) -> None:
        OPEN.append(-1)


class FixedCounter(Counter):
    """The same, but cannot be forked."""

    forks = None


class StuckCounter(Counter):
    """The same, with a connection."""

    async def fork(self) -> Any:
        raise EnvError("its connection has no copy")


register("test-search-counter", Counter)
register("test-search-stuck", StuckCounter)
register("test-search-fixed", FixedCounter)


@register_agent("test-search-program")
class Program(PlainLoop):
    """Stands for a program that runs outside."""

    forkable = False


def drawn(request: ScriptedRequest) -> Message | str:
    """Add 1, 2 or 3, or stop, as the request's seed says."""
    number = random.Random(request.params.seed).randrange(5)
    if number == 4 or request.text.count("total") > 4:
        return f"done {number}"
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "add", {"n": min(number, 2) + 1})]}


def last_total(text: str) -> float:
    """Score an answer by its number."""
    return float(text.rpartition(" ")[2] or 0)


def length_of(trajectory: Trajectory) -> float:
    """Score a way by its turns."""
    return float(sum(segment.sampled for segment in trajectory.segments))


def seen(messages: list[Message]) -> float:
    """Score a way by the last total that the environment named."""
    totals = [str(message["content"]) for message in messages if "total" in str(message.get("content"))]
    return float(totals[-1].rpartition(" ")[2]) if totals else 0.0


def nothing(text: str) -> float:
    """Score by no number."""
    return float("nan") if text else 0.0


HERE = f"{Path(__file__)}:"
GRAPH = Path(__file__).parents[3] / "examples" / "langgraph_agent" / "graph.py"
AGENTS = {"graph": {"name": "langgraph", "config": {"graph": f"{GRAPH}:make_graph"}}}


async def search(
    *,
    scorer: Any = "environment",
    agent: str = "react",
    env: str = "test-search-counter",
    script: Any = drawn,
    seed: int = 5,
    ledger: Path | None = None,
    rollout: dict[str, Any] | None = None,
    greedy: bool = False,
    plain: bool = False,
    **keys: Any,
) -> tuple[EpisodeOutcome, ScriptedClient]:
    """Play one search; nothing is left open."""
    OPEN.clear()
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, script)
    config = RolloutConfig.model_validate(
        {"env": {"name": env}, "agent": AGENTS.get(agent, {"name": agent}), "retries": 1, **(rollout or {})}
    )
    recording_client = client if ledger is None else LedgerClient(client, ledger / "ledger.jsonl")
    search_config = None if plain else SearchConfig.model_validate({"kind": "best_of_n", "scorer": scorer, **keys})
    with ThreadPoolExecutor(2) as executor:
        runner = EpisodeRunner(
            config, recording_client, renderer, context_length=5000, search=search_config, executor=executor
        )
        await runner.prepare()
        outcome = await runner.run(
            EpisodeSpec(TASK, "g", partition="val", sampling_seed=seed, temperature=0.0 if greedy else None)
        )
        await runner.close()
    assert sum(OPEN) == 0
    return outcome, client


def audit(folder: Path, *trajectories: Trajectory) -> None:
    """Hold what is recorded against the ledger."""
    write_trajectories(folder, trajectories)
    report = audit_files(folder)
    assert report.contradictions == [], report.contradictions


def row_of(*trajectories: Trajectory) -> Any:
    """Return the row that a summary holds of one episode."""
    [row] = summarize([TrajectoryGroup("g", "t", list(trajectories))], success_reward=6.0).rows
    return row


@pytest.mark.parametrize("agent", ["react", "test-search-program"])
async def test_the_best_of_several_episodes_is_the_episode(agent: str, tmp_path: Path) -> None:
    outcome, client = await search(samples=4, agent=agent, env="test-search-fixed", ledger=tmp_path)
    [trajectory] = outcome.trajectories
    assert outcome.error is None
    assert trajectory.search is not None
    assert [branch.parent for branch in trajectory.branches] == [-1, 0, 0, 0]
    assert list(trajectory.search.scores) == trajectory.returns()
    assert len(set(trajectory.returns())) > 1
    assert trajectory.reward == max(trajectory.returns())
    assert len(client.requests) == sum(len(branch.turns) for branch in trajectory.branches)
    audit(tmp_path, trajectory)
    assert Trajectory.from_bytes(trajectory.to_bytes()).search == trajectory.search
    # The episode is the chosen way, the search's cost that of all.
    row, path = row_of(trajectory), branch_paths(trajectory.branches)[trajectory.search.chosen]
    assert (row.reward, row.turns, row.tool_calls) == (trajectory.reward, len(path), len(path) - 1)
    assert row.search.ways == 4
    assert row.search.tool_calls == len(client.requests) - 4
    assert row.search.rewards == tuple(trajectory.returns())
    assert row.sampled_tokens < row.search.sampled_tokens == trajectory.sampled_tokens


async def test_a_tree_is_searched_at_its_turns(tmp_path: Path) -> None:
    outcome, client = await search(kind="tree", branches=5, rounds=2, seed=1, ledger=tmp_path)
    [trajectory] = outcome.trajectories
    assert outcome.error is None
    assert len(trajectory.branches) == 6
    assert trajectory.reward == max(trajectory.returns()) > min(trajectory.returns())
    assert all(branch.again is not None for branch in trajectory.branches[1:])
    # The turns before a fork are not sampled again.
    assert len(client.requests) == sum(len(branch.turns) for branch in trajectory.branches)
    audit(tmp_path, trajectory)
    assert row_of(trajectory).search.sampled_tokens == trajectory.sampled_tokens


@pytest.mark.parametrize("agent", ["graph", "test-plain-loop", "test-search-minds"])
async def test_a_searched_tree_holds_every_request_of_any_agent(agent: str, tmp_path: Path) -> None:
    outcome, client = await search(kind="tree", branches=4, agent=agent, scorer=f"{HERE}seen", seed=2, ledger=tmp_path)
    assert outcome.error is None
    first = outcome.trajectories[0].search
    assert first is not None
    assert first.scores[first.chosen] == max(first.scores)
    branches = [branch for trajectory in outcome.trajectories for branch in trajectory.branches]
    assert len(client.requests) == sum(len(branch.turns) for branch in branches)
    audit(tmp_path, *outcome.trajectories)
    assert row_of(*outcome.trajectories).search.ways == len(outcome.trajectories[0].branches) == 5


@register_agent("test-search-minds")
class TwoMinds(Agent):
    """Asks a second session before each turn."""

    async def run(self, episode: Episode) -> None:
        messages = list(episode.observation)
        while True:
            plan = await episode.session_for("planner").chat([{"role": "user", "content": f"{len(messages)}"}])
            messages.append({"role": "user", "content": str(plan.get("content"))})
            message = await episode.session.chat(messages, episode.tools)
            result = await episode.step(message)
            messages += [message, *result.observation]
            if result.terminated or result.truncated:
                return


KINDS: dict[str, dict[str, Any]] = {"best_of_n": {"samples": 3}, "tree": {"branches": 3}}


@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_the_environment_as_scorer_chooses_the_most_rewarded_way(kind: str, seed: int) -> None:
    outcome, _ = asyncio.run(search(kind=kind, seed=seed, **KINDS[kind]))
    [trajectory] = outcome.trajectories
    assert trajectory.reward == max(trajectory.returns())


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_a_search_is_the_same_for_the_same_seed(kind: str) -> None:
    first, second = [(await search(kind=kind, seed=3, **KINDS[kind]))[0].trajectories[0] for _ in range(2)]
    assert first.search == second.search
    assert first.returns() == second.returns()
    paths = [[branch_paths(trajectory.branches) for trajectory in (first, second)]]
    assert all(one == other for one, other in paths)


async def test_a_tree_without_forks_is_the_plain_episode() -> None:
    searched, _ = await search(kind="tree", branches=3, where="tool_error")
    plain, _ = await search(plain=True)
    [one], [other] = searched.trajectories, plain.trajectories
    assert one.search is not None
    assert (one.search.chosen, one.search.scores, one.branches) == (0, (one.reward,), [])
    plain_ids, searched_ids = ([segment.token_ids.tolist() for segment in row.segments] for row in (one, other))
    assert plain_ids == searched_ids
    assert (one.rewards, one.stop_reason) == (other.rewards, other.stop_reason)
    rows = [replace(row_of(trajectory), search=None) for trajectory in (one, other)]
    assert rows[0] == rows[1]


async def test_greedy_episodes_are_not_searched() -> None:
    outcome, client = await search(samples=4, greedy=True)
    [trajectory] = outcome.trajectories
    assert trajectory.search is None
    assert len(client.requests) == len(list(trajectory.turns()))


async def test_likelihood_is_the_mean_log_probability_of_a_way() -> None:
    outcome, _ = await search(samples=4, scorer="likelihood")
    [trajectory] = outcome.trajectories
    assert trajectory.search is not None
    turns = {turn.turn_id: turn.sampled.logprobs for turn in trajectory.turns()}
    means = [np.concatenate([turns[turn] for turn in path]).mean() for path in branch_paths(trajectory.branches)]
    assert list(trajectory.search.scores) == pytest.approx(means)
    assert trajectory.search.chosen == int(np.argmax(means))


async def test_functions_score_ways() -> None:
    for scorer, keys in (
        (f"{HERE}length_of", KINDS["tree"] | {"kind": "tree"}),
        ({"function": f"{HERE}last_total"}, {"samples": 3}),
        ({"function": "regex", "arguments": {"pattern": "done [0-2]"}}, {"samples": 3}),
    ):
        outcome, _ = await search(scorer=scorer, **keys)
        assert outcome.error is None, outcome.error
        [trajectory] = outcome.trajectories
        assert trajectory.search is not None
        assert all(score is not None for score in trajectory.search.scores)


async def test_a_scorer_that_fails_is_an_error_of_its_episode() -> None:
    for kind, keys in KINDS.items():
        outcome, _ = await search(kind=kind, scorer=f"{HERE}nothing", **keys)
        assert isinstance(outcome.error, ScorerError)
        assert "finite number" in str(outcome.error)
        [trajectory] = outcome.trajectories
        assert trajectory.stop_reason is StopReason.ERROR
        assert trajectory.search is None


async def test_a_way_that_fails_is_played_again_or_left_out() -> None:
    failures = [0]

    def fails(request: ScriptedRequest) -> Any:
        if request.number == 2 and not failures[0]:
            failures[0] += 1
            return InferenceError("the server is gone")
        return drawn(request)

    async def recover(error: InferenceError) -> None:
        del error

    renderer = ToyRenderer()
    config = RolloutConfig.model_validate({"env": {"name": "test-search-counter"}, "retries": 1})
    search_config = SearchConfig.model_validate({"kind": "best_of_n", "scorer": "environment", "samples": 4})
    client = ScriptedClient(renderer, fails)
    runner = EpisodeRunner(config, client, renderer, context_length=5000, search=search_config, recover=recover)
    await runner.prepare()
    outcome = await runner.run(EpisodeSpec(TASK, "g", partition="val", sampling_seed=15))
    await runner.close()
    assert outcome.error is None
    [trajectory] = outcome.trajectories
    assert len(trajectory.branches) == 4
    assert trajectory.metrics["tree/failures"] == 1


async def test_a_search_that_is_cancelled_leaves_nothing_open() -> None:
    for kind, keys in KINDS.items():
        reached = asyncio.Event()

        async def waits(request: ScriptedRequest, reached: asyncio.Event = reached) -> Any:
            if request.text.count("total") == 1:
                reached.set()
                await asyncio.Event().wait()
            return drawn(request) if request.text.count("total") else adds(2)

        playing = asyncio.create_task(search(kind=kind, script=waits, **keys))
        await reached.wait()
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert sum(OPEN) == 0


def adds(n: int) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "add", {"n": n})]}


async def test_unforkable_episode_is_its_only_branch() -> None:
    outcome, _ = await search(kind="tree", env="test-search-stuck", **KINDS["tree"])
    [trajectory] = outcome.trajectories
    assert outcome.error is None
    assert trajectory.search is not None
    assert (trajectory.branches, trajectory.search.scores) == ([], (trajectory.reward,))
    assert trajectory.metrics["tree/refusals"] > 0
    assert "its connection has no copy" in trajectory.turn_notes[""]["tree/failed"]
    row = search_row([trajectory], lambda branch: branch[0].reward, bool)
    assert row is not None
    assert "its connection has no copy" in (row.unforked or "")
    console = Console(width=200, file=io.StringIO())
    console.print(render(trajectory))
    assert "not forked: " in console.file.getvalue()  # type: ignore[attr-defined]


async def test_unforkable_environment_is_refused_before_the_first_episode() -> None:
    for wrong, message in (
        ({"env": "test-search-fixed"}, "cannot be forked (FixedCounter.forks is None)"),
        ({"agent": "test-search-program"}, "is an external program"),
    ):
        with pytest.raises(ConfigError, match=r"search\.kind tree") as raised:
            await search(kind="tree", **KINDS["tree"], **wrong)
        assert message in str(raised.value)
        assert "best_of_n" in str(raised.value)


@pytest.mark.ext
@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_the_ways_of_a_search_are_replayed(kind: str) -> None:
    from turnwise.ext.checks.replay import replay

    outcome, _ = await search(kind=kind, **KINDS[kind])
    [trajectory] = outcome.trajectories
    branches = branch_trajectories(replace(trajectory, group_id="0-val-t-e0"))
    config = RolloutConfig.model_validate({"env": {"name": "test-search-counter"}})
    report = await replay(branches, {"t": TASK}, config, ToyRenderer())
    assert [str(divergence) for divergence in report.divergences] == []
    assert report.episodes == len(branches)
    # What is said of a way's turns has their names there.
    for branch in branches:
        assert {turn.turn_id for turn in branch.turns()} == branch.turn_times.keys()
        assert sum(metrics.get("tool_calls", 0) for metrics in branch.turn_metrics.values()) == sum(
            len(turn.sampled.messages[0].get("tool_calls") or ()) for turn in branch.turns()
        )


async def test_the_audit_finds_a_choice_that_is_none(tmp_path: Path) -> None:
    outcome, _ = await search(samples=4, ledger=tmp_path)
    [trajectory] = outcome.trajectories
    assert trajectory.search is not None
    worse = replace(trajectory.search, chosen=(trajectory.search.chosen + 1) % 4)
    write_trajectories(tmp_path, [replace(trajectory, search=worse)])
    [contradiction] = audit_files(tmp_path).contradictions
    assert f"its search chose branch {worse.chosen}" in contradiction
    assert f"although another has {max(trajectory.returns())}" in contradiction


async def test_a_searched_episode_is_shown_with_its_choice() -> None:
    outcome, _ = await search(samples=3)
    [trajectory] = outcome.trajectories
    console = Console(file=io.StringIO(), width=200)
    console.print(render(trajectory))
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert trajectory.search is not None
    assert f"best_of_n: way {trajectory.search.chosen} of 3" in output
    assert f"way {trajectory.search.chosen}  chosen  environment {trajectory.reward:g}" in output
