"""Trees: episodes that are forked at their turns; what was sampled is recorded once and trained once."""

from __future__ import annotations

import asyncio
import io
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from support.agents.plain_loop import PlainLoop
from support.chat.toy_renderer import ToyRenderer
from support.rollout.audited import assert_sound, write_trajectories
from turnwise.agents import forks
from turnwise.agents.core import Agent, Episode
from turnwise.agents.registry import register_agent
from turnwise.envs.core import Env
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, ConfigError, EnvError, InferenceError
from turnwise.evaluation.export import branches, conversations
from turnwise.evaluation.view import render
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.audit import audit_files
from turnwise.rollout.branching.tree import CHOOSERS, TreeConfig, TreeTurn
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.sandboxes import SandboxProcess
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trajectory import Trajectory, branch_paths, to_samples
from turnwise.types import Branch, Message, ToolCall

TASK = Task("t", "Count to ten.")
OPEN: list[int] = []


class Tally(ToolEnv):
    """Adds up; some additions fail. What it answers depends on all that was done before."""

    def __init__(self, breaks: int = 0) -> None:
        self.breaks = breaks
        self.total, self.said = 0, ["start"]

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        OPEN.append(1)
        self.random = random.Random(seed)
        return "Count to ten.", {"state": 0}

    @function_tool
    def add(self, n: int) -> str:
        """Add."""
        if n == self.breaks:
            raise EnvError("the tally broke")
        if n == 3:
            raise ValueError("three is too much")
        self.total += n
        self.said.append(f"{self.total}.{self.random.randrange(100)}")
        return " ".join(self.said)

    def score(self, final: Message | None) -> float:
        return float(self.total)

    async def fork(self) -> Env:
        OPEN.append(1)
        return await super().fork()

    def close(self) -> None:
        OPEN.append(-1)


class Fixed(Tally):
    """The same, but cannot be forked."""

    forks = None


register("test-tally", Tally)
register("test-tally-fixed", Fixed)


def drawn(request: ScriptedRequest) -> Message | str:
    """Add 1, 2 or 3, or stop, as the request's seed says."""
    number = random.Random(request.params.seed).randrange(5)
    if number == 4 or request.text.count("add") > 6:
        return f"done {number}"
    calls = [ToolCall("", "add", {"n": min(number, 2) + 1})]
    return {"role": "assistant", "content": "", "tool_calls": calls}


@register_agent("test-two-minds")
class TwoMinds(Agent):
    """Asks a second session before each turn; notes rewards and metrics of its own."""

    async def run(self, episode: Episode) -> None:
        messages = list(episode.observation)
        for turn in range(4):
            plan = await episode.session_for("planner").chat(
                [*episode.observation, {"role": "user", "content": f"{turn}"}]
            )
            message = await episode.session.chat([*messages, {"role": "user", "content": str(plan.get("content"))}])
            episode.note("planned", 0.5, plan["turn_id"], agent="planner")
            episode.count({"asked": 1.0})
            result = await episode.step(message)
            if result.terminated or result.truncated:
                return
            messages += [{"role": "user", "content": str(plan.get("content"))}, message, *result.observation]


@register_agent("test-two-parts")
class TwoParts(Agent):
    """Two parts talk and call tools at the same time, then one of them ends the episode."""

    sessions = ("main", "main")

    async def run(self, episode: Episode) -> None:
        async def part(name: str, number: int) -> list[Message]:
            messages: list[Message] = [*episode.observation, {"role": "user", "content": f"part {number}"}]
            for _ in range(3):
                message = await episode.session_for(name).chat(messages, episode.tools)
                messages.append(message)
                if not message.get("tool_calls"):
                    break
                for call in message["tool_calls"]:
                    response = await episode.call(call, agent=name)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": response.content()})
            return messages

        messages, other = await asyncio.gather(*(part(name, number) for number, name in enumerate(self.sessions)))
        note = {"role": "user", "content": f"the other said {len(other)} messages"}
        await episode.step(await episode.session.chat([*messages, note], episode.tools))


@register_agent("test-two-parts-apart")
class TwoPartsApart(TwoParts):
    """The same, each in a session of its own."""

    sessions = ("main", "scout")


@register_agent("test-forgetful")
class Forgetful(PlainLoop):
    """Says something else each time it runs."""

    runs = 0

    async def run(self, episode: Episode) -> None:
        Forgetful.runs += 1
        episode.observation.append({"role": "user", "content": f"run {Forgetful.runs}"})
        await super().run(episode)


@register_agent("test-hands-on")
class HandsOn(PlainLoop):
    """Reaches into the environment."""

    async def run(self, episode: Episode) -> None:
        assert episode.env is not None
        await super().run(episode)


class Program(PlainLoop):
    """Stands for a program that runs outside."""

    forkable = False


async def play(
    agent: str = "react",
    *,
    script: Any = drawn,
    env: str = "test-tally",
    config: dict[str, Any] | None = None,
    seed: int = 5,
    ledger: Path | None = None,
    **tree: Any,
) -> tuple[EpisodeOutcome, ScriptedClient]:
    """Play one tree; nothing is left open."""
    OPEN.clear()
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, script)
    rollout = RolloutConfig.model_validate(
        {
            "env": {"name": env, "config": config or {}},
            "agent": {"name": agent},
            "tree": {"branches": 5} | tree,
            "retries": 1,
        }
    )
    recorded_client = client if ledger is None else LedgerClient(client, ledger / "ledger.jsonl")
    runner = EpisodeRunner(rollout, recorded_client, renderer, context_length=5000)
    await runner.prepare()
    outcome = await runner.run(EpisodeSpec(TASK, "g", sampling_seed=seed))
    await runner.close()
    return outcome, client


def check_tree(trajectory: Trajectory) -> list[tuple[str, ...]]:
    """Check that each turn was sampled in one branch, and that siblings begin after the same turn; return the paths."""
    paths = branch_paths(trajectory.branches)
    turns = {turn.turn_id: turn for turn in trajectory.turns()}
    branch_turns = [turn for branch in trajectory.branches for turn in branch.turns]
    assert sorted(branch_turns) == sorted(turns)
    for branch, path in zip(trajectory.branches, paths, strict=True):
        ids = [turns[turn].sampled.index for turn in path]
        # Each turn of a branch saw all turns before it, and none of another branch.
        for number, turn in enumerate(path):
            seen = [index for index in turns[turn].path if trajectory.segments[index].sampled]
            assert seen == ids[:number]
        if branch.parent >= 0:
            first = trajectory.segments[ids[path.index(branch.turns[0])]]
            parent = paths[branch.parent]
            assert branch.again == parent[0 if branch.after is None else parent.index(branch.after) + 1]
            assert first.parent == turns[branch.again].sampled.parent
            assert first.fork in ("branch", "concurrent")
    return paths


@pytest.mark.parametrize("where", sorted(CHOOSERS))
@pytest.mark.parametrize("agent", ["react", "test-plain-loop"])
async def test_a_tree_is_recorded_once_and_trained_once(agent: str, where: str, tmp_path: Path) -> None:
    outcome, client = await play(agent, where=where, rounds=2, seed=0, ledger=tmp_path)
    [trajectory] = outcome.trajectories
    assert outcome.error is None
    assert len(trajectory.branches) == 6
    paths = check_tree(trajectory)
    # What was sampled is asked for once: the turns before a fork are not sampled again.
    assert len(client.requests) == sum(len(branch.turns) for branch in trajectory.branches)
    # The reward of each branch is that of its own additions, those before its fork included.
    messages_by_turn = {turn.turn_id: turn.sampled.messages[0] for turn in trajectory.turns()}
    for path, reward in zip(paths, trajectory.returns(), strict=True):
        calls = [
            call["function"]["arguments"] for turn in path for call in messages_by_turn[turn].get("tool_calls") or ()
        ]
        added = [call["n"] for call in calls if call["n"] != 3]
        assert reward == sum(added)
    assert trajectory.reward == pytest.approx(sum(trajectory.returns()) / 6)
    samples = to_samples(trajectory)
    assert sum(row.trained_tokens for row in samples.rows) == trajectory.sampled_tokens
    assert Trajectory.from_bytes(trajectory.to_bytes()).branches == trajectory.branches
    assert_sound(tmp_path, trajectory)
    assert sum(OPEN) == 0


async def test_a_tree_is_the_same_for_the_same_seed() -> None:
    runs = []
    for _ in range(2):
        outcome, _ = await play(seed=3, rounds=5)
        [trajectory] = outcome.trajectories
        runs.append((trajectory.branches, [segment.token_ids.tolist() for segment in trajectory.segments]))
    assert runs[0] == runs[1]


async def test_sessions_of_one_episode_fork_together(tmp_path: Path) -> None:
    outcome, client = await play("test-two-minds", script=talk, branches=6, ledger=tmp_path)
    assert outcome.error is None
    main, planner = outcome.trajectories
    assert len(main.branches) == len(planner.branches) == 7
    branches = [*main.branches, *planner.branches]
    assert len(client.requests) == sum(len(branch.turns) for branch in branches)
    assert [branch.parent for branch in main.branches] == [branch.parent for branch in planner.branches]
    assert main.metrics["asked"] == sum(len(branch.turns) for branch in main.branches)
    # Each branch noted its plans, those before its fork included, once.
    planned = [rewards["planned"] for rewards in planner.branch_rewards()]
    assert planned == [0.5 * len(path) for path in branch_paths(main.branches)]
    assert_sound(tmp_path, main, planner)


def talk(request: ScriptedRequest) -> Message | str:
    number = random.Random(request.params.seed).randrange(9)
    if request.session_id.endswith("planner"):
        return f"plan {number}"
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "add", {"n": number % 3 + 1})]}


@pytest.mark.parametrize("agent", ["test-two-parts", "test-two-parts-apart"])
async def test_parts_that_act_at_the_same_time_fork(agent: str, tmp_path: Path) -> None:
    latency = random.Random(agent)

    async def late(request: ScriptedRequest) -> Message | str:
        await asyncio.sleep(latency.random() / 200)
        return drawn(request)

    for seed in range(6):
        outcome, client = await play(agent, script=late, seed=seed, rounds=3, ledger=tmp_path / f"{seed}")
        assert outcome.error is None
        for trajectory in outcome.trajectories:
            assert trajectory.metrics.get("tree/failures", 0) == 0, trajectory.turn_notes
            branch_turns = [turn for branch in trajectory.branches for turn in branch.turns]
            assert sorted(branch_turns) == sorted(str(turn.turn_id) for turn in trajectory.turns())
            assert len(trajectory.branches) == 6
        assert len(client.requests) == sum(1 for trajectory in outcome.trajectories for _ in trajectory.turns())
        assert_sound(tmp_path / f"{seed}", *outcome.trajectories)
    assert sum(OPEN) == 0


async def test_an_agent_that_does_not_repeat_itself_is_refused_and_its_chain_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing is left that could still come.
    monkeypatch.setattr(forks, "STILL_S", 0.1)
    for agent in ("test-forgetful", "test-hands-on"):
        outcome, client = await play(agent)
        [trajectory] = outcome.trajectories
        assert outcome.error is None
        [chain] = trajectory.branches
        assert set(chain.turns) == {turn.turn_id for turn in trajectory.turns()}
        assert trajectory.metrics["tree/branches"] == 1
        assert trajectory.metrics["tree/failures"] == 5
        assert len(client.requests) == sum(1 for _ in trajectory.turns())
        assert sum(OPEN) == 0


async def test_a_branch_that_fails_is_grown_again_from_its_turn() -> None:
    failed: set[int] = set()

    def fails_once(request: ScriptedRequest) -> Any:
        if request.number in (4, 9):
            failed.add(request.number)
            return EnvError("the server answered nonsense")
        return drawn(request)

    outcome, _ = await play(script=fails_once, seed=9, rounds=5)
    [trajectory] = outcome.trajectories
    assert failed
    assert outcome.error is None
    assert len(trajectory.branches) == 6
    assert trajectory.metrics["tree/failures"] == 2


async def test_turns_of_a_branch_that_failed_for_good_are_not_trained(tmp_path: Path) -> None:
    outcome, _ = await play(script=drawn, config={"breaks": 2}, seed=1, branches=8, ledger=tmp_path)
    [trajectory] = outcome.trajectories
    assert outcome.error is None
    assert trajectory.metrics["tree/failures"] > 0
    branch_turns = {turn for branch in trajectory.branches for turn in branch.turns}
    lost = [turn.sampled for turn in trajectory.turns() if turn.turn_id not in branch_turns]
    assert lost
    assert not any(segment.trained.any() for segment in lost)
    assert all(turn.sampled.trained.all() for turn in trajectory.turns() if turn.turn_id in branch_turns)
    assert_sound(tmp_path, trajectory)
    assert sum(OPEN) == 0


async def test_server_failure_ends_the_episode() -> None:
    def broken(request: ScriptedRequest) -> Any:
        return InferenceError("gone") if request.number > 5 else drawn(request)

    outcome, _ = await play(script=broken, seed=9)
    assert isinstance(outcome.error, InferenceError)
    assert sum(OPEN) == 0


async def test_a_budget_bounds_the_tree() -> None:
    full_tree, _ = await play(seed=9)
    [trajectory] = full_tree.trajectories
    chain = sum(
        len(turn.sampled.token_ids) for turn in trajectory.turns() if turn.turn_id in trajectory.branches[0].turns
    )
    none, _ = await play(seed=9, max_tokens=chain)
    assert none.trajectories[0].branches == []
    assert none.trajectories[0].metrics["tree/over_budget"] == 5
    assert trajectory.metrics["tree/over_budget"] == 0
    few, _ = await play(seed=9, rounds=5, max_tokens=2 * chain)
    assert 1 < len(few.trajectories[0].branches) < 6
    # The first choice, the whole episode again, does not fit; the second, its last turn, does.
    turn_tokens = len(next(iter(trajectory.turns())).sampled.token_ids)
    short, _ = await play(seed=9, where=f"{__name__}:first_and_last", max_tokens=chain + turn_tokens)
    assert [branch.again for branch in short.trajectories[0].branches] == [None, trajectory.branches[0].turns[-1]]
    assert short.trajectories[0].metrics["tree/over_budget"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": "test-tally-fixed"}, "environment 'test-tally-fixed' cannot be forked .*forks = \"replay\""),
        ({"agent": f"{__name__}:Program"}, "is an external program, which cannot be forked"),
        ({"where": "nowhere"}, "where is 'nowhere'; allowed: random, every_turn"),
        ({"where": "turnwise.types:text_of"}, "cannot be called as f\\(turns, count, random\\)"),
        ({"branches": 2, "rounds": 3}, "rounds is 3, but there are only 2 branches"),
    ],
)
async def test_unforkable_trees_are_refused_before_the_rollout(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        await play(**options)


def test_a_group_reward_and_agents_elsewhere_know_no_branches() -> None:
    for other in ({"group_reward": "rank_by"}, {"remote": {"key_file": "key"}}):
        with pytest.raises(ValueError, match="tree, but"):
            RolloutConfig.model_validate({"env": {"name": "test-tally"}, "tree": {"branches": 2}, **other})


class Holding(Tally):
    """Holds what no fork may have a copy of."""

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.process = HeldProcess()
        return super().reset(task, seed=seed)


class HeldProcess(SandboxProcess):
    write = read = close_stdin = interrupt = kill = wait = None  # type: ignore[assignment]


register("test-tally-holding", Holding)


async def test_the_reason_for_a_tree_without_branches_is_noted() -> None:
    outcome, _ = await play(env="test-tally-holding")
    assert outcome.error is None
    [trajectory] = outcome.trajectories
    assert trajectory.metrics["tree/refusals"] > 0
    notes = [note["tree/failed"] for note in trajectory.turn_notes.values() if "tree/failed" in note]
    assert len(notes) == 1
    assert "'process' holds" in notes[0]
    assert "a process of a sandbox cannot be copied" in notes[0]


def picks_too_many(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
    return [len(turns)]


def first_and_last(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> Any:
    return np.argsort([turn.number for turn in turns])[[0, -1]]


async def later(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
    return [0]


async def test_a_custom_choice_is_checked() -> None:
    with pytest.raises(ConfigError, match="later' is async: write a plain function"):
        await play(where=f"{__name__}:later")
    outcome, _ = await play(where=f"{__name__}:picks_too_many")
    assert isinstance(outcome.error, AgentError)
    assert "must return at most as many indices" in str(outcome.error)


def turn(
    number: int, *, entropy: float = 0.0, errors: int = 0, forks: int = 0, rewards: tuple[float, ...] = ()
) -> TreeTurn:
    return TreeTurn(0, f"t{number}", "main", number, 1, entropy, 0, errors, forks, rewards)


def test_choices() -> None:
    draw = random.Random(0)
    turns = [turn(0, entropy=0.1), turn(1, entropy=0.9, errors=1), turn(2, entropy=0.5, forks=1)]
    assert sorted(CHOOSERS["random"](turns, 3, draw)) == [0, 1, 2]
    assert sorted(CHOOSERS["random"](turns, 5, draw))[:1] == [0]
    assert CHOOSERS["every_turn"](turns, 4, draw) == [0, 1, 0, 1]
    # 0.9, then 0.45 and 0.25: the second fork of a turn has half its claim.
    assert CHOOSERS["entropy"](turns, 3, draw) == [1, 1, 2]
    assert CHOOSERS["tool_error"](turns, 2, draw) == [1, 1]
    assert CHOOSERS["tool_error"](turns[:1], 2, draw) == []
    assert all(CHOOSERS[name]([], 3, draw) == [] for name in CHOOSERS)


def test_the_value_that_is_least_certain_is_sampled_next() -> None:
    draw = random.Random(0)
    # Squared standard errors: 0, 0.25 / 2, (2 / 9) / 3; a fork of the second makes it 0.25 / 3, and another 0.25 / 4.
    turns = [turn(0, rewards=(1.0, 1.0)), turn(1, rewards=(0.0, 1.0)), turn(2, rewards=(0.0, 0.0, 1.0))]
    assert [turn.value for turn in turns] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert CHOOSERS["value"](turns, 4, draw) == [1, 1, 2, 1]
    # Nothing is known of the differences: drawn.
    alike = [turn(0, rewards=(1.0,)), turn(1, rewards=(1.0,)), turn(2)]
    assert sorted(CHOOSERS["value"](alike, 3, draw)) == [0, 1, 2]


SEEN: list[list[TreeTurn]] = []


def looks(turns: Sequence[TreeTurn], count: int, draw: random.Random) -> list[int]:
    SEEN.append(list(turns))
    return CHOOSERS["value"](turns, count, draw)


async def test_tree_turns_hold_the_rewards_of_branches_that_pass_them() -> None:
    SEEN.clear()
    outcome, _ = await play(branches=9, rounds=3, where=f"{__name__}:looks")
    assert outcome.error is None
    [trajectory] = outcome.trajectories
    paths = branch_paths(trajectory.branches)
    totals = [sum(rewards.values()) for rewards in trajectory.branch_rewards()]
    assert len(SEEN) == 3
    for turns, count in zip(SEEN, (1, 4, 7), strict=True):
        for turn in turns:
            earlier = paths[turn.branch][: paths[turn.branch].index(turn.turn_id)]
            passing = [
                total for path, total in zip(paths[:count], totals, strict=False) if path[: len(earlier)] == earlier
            ]
            assert sorted(turn.rewards) == sorted(passing)
    assert any(turn.uncertainty() > 0 for turn in SEEN[-1])


def test_a_fork_of_a_session_that_has_no_such_turn() -> None:
    with pytest.raises(ValueError, match="branches"):
        TreeConfig(branches=0)


async def test_a_cancelled_tree_closes_everything() -> None:
    started = asyncio.Event()

    async def waits(request: ScriptedRequest) -> Any:
        if request.number > 6:
            started.set()
            await asyncio.Event().wait()
        return drawn(request)

    task = asyncio.create_task(play(script=waits, seed=9))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sum(OPEN) == 0


def planted(trajectory: Trajectory, number: int, **changes: Any) -> Trajectory:
    branches = list(trajectory.branches)
    branches[number] = replace(branches[number], **changes)
    return replace(trajectory, branches=branches)


async def test_the_audit_finds_corrupt_branches(tmp_path: Path) -> None:
    outcome, _ = await play(seed=0, ledger=tmp_path)
    [trajectory] = outcome.trajectories
    last_branch = trajectory.branches[-1]
    assert trajectory.branches[1].parent == 0
    other = next(turn for turn in trajectory.branches[0].turns if turn != trajectory.branches[1].again)
    wrong = {
        "trained, but in no branch": planted(trajectory, -1, turns=last_branch.turns[1:]),
        "is in 2 branches": planted(trajectory, -1, turns=(*last_branch.turns, trajectory.branches[0].turns[0])),
        "names turn t99, not there": planted(trajectory, -1, turns=(*last_branch.turns, "t99")),
        "does not begin where turn": planted(trajectory, 1, again=other),
        "which its parent does not have": planted(trajectory, 1, again=last_branch.turns[0]),
    }
    assert_sound(tmp_path, trajectory)
    for number, (finding, broken) in enumerate(wrong.items()):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        shutil.copy(tmp_path / "ledger.jsonl", folder)
        write_trajectories(folder, [broken])
        problems = [text for text in audit_files(folder).contradictions if finding in text]
        assert problems, (finding, audit_files(folder).contradictions)


async def test_a_tree_is_viewed_and_exported_by_branch(tmp_path: Path) -> None:
    outcome, _ = await play(seed=0)
    [trajectory] = outcome.trajectories
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(trajectory))
    page = console.export_text()
    for number, (branch, reward) in enumerate(zip(trajectory.branches, trajectory.returns(), strict=True)):
        assert f"way {number}  reward {reward:g}" in page
        assert branch.again is None or f"{branch.again} sampled again" in page
    write_trajectories(tmp_path, [trajectory])
    rows = list(conversations(branches(tmp_path / "trajectories.twz")))
    assert [row["reward"] for row in rows] == trajectory.returns()
    assert len({row["episode_id"] for row in rows}) == len(trajectory.branches)


async def test_where_every_branch_fails_the_chain_alone_is_trained(tmp_path: Path) -> None:
    one = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "add", {"n": 1})]}

    def fails(request: ScriptedRequest) -> Any:
        return "done" if request.number == 1 else one if request.number % 2 == 0 else EnvError("gone")

    outcome, client = await play(script=fails, branches=1, where="every_turn", ledger=tmp_path)
    [trajectory] = outcome.trajectories
    assert outcome.error is None
    assert len(client.requests) == 6
    assert trajectory.branches == [Branch(turns=("t0", "t1"))]
    trained = {turn.turn_id for turn in trajectory.turns() if turn.sampled.trained.any()}
    assert trained == {"t0", "t1"}
    assert trajectory.reward == 1.0
    assert trajectory.turn_notes[""]["tree/failed"] == "EnvError: gone"
    assert_sound(tmp_path, trajectory)
