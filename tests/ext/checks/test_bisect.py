"""Bisections: the turn that decided an episode, found by continuations from each of its turns."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.rollout.audited import write_trajectories
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, FormatError, ReplayError
from turnwise.ext.checks.bisect import Bisection, BisectSettings, TurnOdds, bisect, chosen_model, sessions_of_one_branch
from turnwise.ext.checks.recorded import RecordedRun
from turnwise.ext.checks.replay import replay
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.recorder.branches import branch_trajectories
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trajectory import Search, Trajectory
from turnwise.types import Message, ToolCall

TASK = Task("t", "Open the doors.")
PLAYED: list[int] = []


class Doors(ToolEnv):
    """Three doors; behind a red one there is no way back, and the key lies behind the third."""

    def __init__(self, moody: bool = False) -> None:
        self.moody = moody

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.opened, self.lost = 0, False
        PLAYED.append(len(PLAYED))
        return "Open the doors.", {}

    @function_tool
    def open(self, colour: str) -> str:
        """Open a door."""
        self.opened += 1
        self.lost |= colour == "red"
        # What it answers says nothing of how it stands.
        return f"door {self.opened}"

    def score(self, final: Message | None) -> float:
        return float(self.opened >= 3 and not self.lost and not (self.moody and len(PLAYED) > 1))


register("test-doors", Doors)


def open_door(colour: str) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "open", {"colour": colour})]}


def well(request: ScriptedRequest) -> Message | str:
    """Open green doors, mostly, and answer when there were three."""
    if request.text.count("door 3"):
        return "done"
    return open_door(random.Random(request.params.seed).choice(["green", "green", "green", "blue"]))


async def recorded(
    *colours: str, config: dict[str, Any] | None = None, **changes: Any
) -> tuple[RecordedRun, Trajectory]:
    PLAYED.clear()
    renderer = ToyRenderer()
    rollout = RolloutConfig.model_validate({"env": {"name": "test-doors", "config": config or {}}, **changes})
    script = [*(open_door(colour) for colour in colours), "done"]
    runner = EpisodeRunner(
        rollout, ScriptedClient(renderer, script if not changes else well), renderer, context_length=5000
    )
    outcome = await runner.run(EpisodeSpec(TASK, "g", env_seed=3, sampling_seed=4))
    await runner.close()
    run = RecordedRun(
        Path("trajectories.twz"), {}, rollout.model_copy(update={"tree": None}), "main", Path("model"), renderer, {}
    )
    return run, outcome.trajectories[0]


@pytest.fixture(autouse=True)
def _context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordedRun, "context_length", property(lambda self: 5000))


async def bisected(run: RecordedRun, trajectory: Trajectory, **options: Any) -> Bisection:
    client = ScriptedClient(ToyRenderer(), well)
    return await bisect(run, [trajectory], {"t": TASK}, client, **options)


async def test_the_turn_that_lost_the_episode_is_found() -> None:
    run, trajectory = await recorded("green", "red", "green")
    bisection = await bisected(run, trajectory, samples=3)
    # From before the red door every continuation succeeds, from after it none.
    assert bisection.odds == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert bisection.decisive == 1
    assert [turn.text for turn in bisection.turns] == [
        "open({'colour': 'green'})", "open({'colour': 'red'})", "open({'colour': 'green'})", "done",
    ]  # fmt: skip
    assert [len(turn.rewards) for turn in bisection.turns] == [3] * 4
    assert bisection.verdict() == (
        "The episode was lost at turn 1: before it 100% of the continuations succeed, after it 0%."
    )
    assert bisection.table().row_count == 5
    assert bisection.to_json()["decisive"] == 1


async def test_an_episode_that_was_won_is_not_lost_anywhere() -> None:
    run, trajectory = await recorded("green", "blue", "green")
    bisection = await bisected(run, trajectory)
    assert bisection.decisive is None
    assert "continuations always succeed: no turn decided it" in bisection.verdict()


def test_the_last_turn_may_decide() -> None:
    turns = [TurnOdds("main", "t0", "a", (1.0, 0.0)), TurnOdds("main", "t1", "b", (1.0, 1.0))]
    lost = Bisection("e", "t", 0.0, 1.0, turns)
    assert lost.verdict().endswith("at turn 1: before it 100% of the continuations succeed, with it the episode ended.")
    won = Bisection("e", "t", 1.0, 1.0, turns)
    assert (won.decisive, won.odds) == (0, [0.5, 1.0, 1.0])


def test_difference_within_chance_is_reported_as_such() -> None:
    def verdict(wins_before: int, wins_after: int, of: int) -> str:
        rewards = [tuple(float(number < won) for number in range(of)) for won in (wins_before, wins_after)]
        turns = [TurnOdds("main", f"t{number}", "a", branch_rewards) for number, branch_rewards in enumerate(rewards)]
        return Bisection("e", "t", 0.0, 1.0, [*turns, TurnOdds("main", "t2", "b", (0.0,) * of)]).verdict()

    assert verdict(1, 0, 8).endswith("after it 0%. So few may differ by chance: take more (--samples).")
    assert verdict(6, 0, 8).endswith("before it 75% of the continuations succeed, after it 0%.")


def test_reward_below_success_by_rounding_counts_as_success() -> None:
    [turn] = turns = [TurnOdds("main", "t0", "a", (0.1 * 3, 0.7 + 0.1, 0.8))]
    assert turn.success(0.8) == pytest.approx(2 / 3)
    assert Bisection("e", "t", 0.7 + 0.1, 0.8, turns).odds[-1] == 1.0


async def test_a_way_of_a_forked_episode_is_named_by_its_number(tmp_path: Path) -> None:
    run, trajectory = await recorded(tree={"branches": 2})
    searched = replace(
        trajectory, id="s/0.0", episode_id="s/0.0", search=Search("tree", "environment", 1, (0.0, 1.0, 0.5))
    )
    write_trajectories(tmp_path, [trajectory, searched])
    run = replace(run, path=tmp_path / "trajectories.twz")
    [branch] = sessions_of_one_branch(run.episodes(episode="g~1/0.0"))
    assert (branch.episode_id, branch.reward) == ("g~1/0.0", trajectory.returns()[1])
    bisection = await bisected(run, branch, samples=2)
    assert [len(turn.rewards) for turn in bisection.turns] == [2] * len(list(branch.turns()))
    with pytest.raises(FormatError, match=r"forked into 3 branches: name one of g~0/0\.0 \(reward \S+\), g~1/0\.0"):
        sessions_of_one_branch(run.episodes(episode="g/0.0"))
    with pytest.raises(FormatError, match=r"no episode 'g~7/0\.0'; it was forked into g~0/0\.0, g~1/0\.0, g~2/0\.0"):
        run.episodes(episode="g~7/0.0")
    assert [session.episode_id for session in sessions_of_one_branch(run.episodes(episode="s/0.0"))] == ["s~1/0.0"]


async def test_an_environment_that_does_not_repeat_itself_is_named() -> None:
    run, trajectory = await recorded("green", "green", "green", config={"moody": True})
    with pytest.raises(ReplayError, match="had the reward 1 and has 0 when it is played again"):
        await bisected(run, trajectory)


async def test_episode_that_cannot_be_bisected_raises(tmp_path: Path) -> None:
    run, trajectory = await recorded("green")
    with pytest.raises(FormatError, match="its task 't' is not among those of the run"):
        await bisect(run, [trajectory], {}, ScriptedClient(ToyRenderer(), well))
    newest = tmp_path / "checkpoints/step_000020"
    for step in (newest, tmp_path / "checkpoints/step_000010"):
        step.mkdir(parents=True)
        (step / "config.json").touch()
    with pytest.raises(ConfigError, match=f"is a training run: name the model .* with --model, such as {newest}"):
        chosen_model(BisectSettings(Path("runs/x"), "e"), replace(run, path=tmp_path / "trajectories.twz"))
    with pytest.raises(
        ConfigError, match=r"is gone, which holds no config\.json: name a model's directory with --model"
    ):
        chosen_model(BisectSettings(Path("runs/x"), "e", Path("gone")), run)
    assert chosen_model(BisectSettings(Path("runs/x"), "e", Path("gone"), ("http://127.0.0.1:1",)), run) == Path("gone")


async def test_forked_episodes_are_replayed_branch_by_branch() -> None:
    run, trajectory = await recorded(tree={"branches": 4, "rounds": 2})
    assert len(trajectory.branches) == 5
    branches = branch_trajectories(trajectory)
    assert [branch.reward for branch in branches] == trajectory.returns()
    assert len({branch.id for branch in branches}) == 5
    report = await replay(branches, {"t": TASK}, run.rollout, run.renderer)
    assert (report.episodes, report.divergences) == (5, [])
