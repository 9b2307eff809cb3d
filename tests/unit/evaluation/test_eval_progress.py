"""How far an evaluation is: episodes are counted as they end, and the time left follows from them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from turnwise.config import dump_config, load_config
from turnwise.errors import ConfigError
from turnwise.evaluation import EvalConfig, EvalPlan
from turnwise.evaluation.config import EVAL_MAX_TOKENS_PER_TURN
from turnwise.evaluation.runner import EvalProgress, eval_requests
from turnwise.rollout.core import RolloutRequest
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

PLAN = EvalPlan(samples=2, pass_k=[1, 2])
REQUESTS = eval_requests(PLAN, [Task("a-1", "?"), Task("b~2", "?", source="books")])
SAMPLED_A, SAMPLED_B, GREEDY_A, GREEDY_B = REQUESTS


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> EvalProgress:
    return EvalProgress(PLAN, REQUESTS, clock=clock)


def episode(request: RolloutRequest, member: int = 0, reward: float = 1.0, attempt: int = 0, **changes) -> Trajectory:
    group = f"0-{request.key}"
    name = f"{group}/{member}.{attempt}"
    rewards = [(None, "score", reward)]
    recorded = Trajectory(name, name, group, request.task.id, rewards=rewards, partition="val", attempt=attempt)
    for key, value in changes.items():
        setattr(recorded, key, value)
    return recorded


def group(request: RolloutRequest, *members: Trajectory, failed: int = 0) -> TrajectoryGroup:
    return TrajectoryGroup(f"0-{request.key}", request.task.id, list(members), "val", failed, request.task.source)


def test_episodes_count_when_they_end_and_once(progress: EvalProgress, clock: Clock) -> None:
    assert (progress.total, progress.ended, progress.time_left) == (6, 0, None)
    clock.now += 10
    first, second = episode(SAMPLED_A, 0), episode(SAMPLED_A, 1, reward=0.0)
    progress.wrote(first)
    assert (progress.ended, progress.time_left) == (1, 50.0)
    progress.wrote(second)
    clock.now += 10
    progress.arrived(group(SAMPLED_A, first, second))
    assert (progress.ended, progress.time_left) == (2, 40.0)
    assert str(progress) == "2 of 6 episodes, success 0.50, reward 0.50, 0:00:20 elapsed, about 0:00:40 left"


def test_failed_attempts_and_cancelled_episodes_have_not_ended(progress: EvalProgress) -> None:
    progress.wrote(episode(SAMPLED_A, error="EnvError: no", stop_reason=StopReason.ERROR))
    progress.wrote(episode(SAMPLED_A, 1, stop_reason=StopReason.CANCELLED))
    assert progress.ended == 0
    retried = episode(SAMPLED_A, attempt=1)
    progress.wrote(retried)
    assert progress.ended == 1
    # A member that failed in all its attempts has ended too: nothing more comes of it.
    progress.arrived(group(SAMPLED_A, retried, failed=1))
    assert progress.ended == 2


def test_partial_result_has_figures_of_finished_episodes(progress: EvalProgress) -> None:
    progress.wrote(episode(SAMPLED_B, error="EnvError: no", stop_reason=StopReason.ERROR))
    progress.wrote(episode(SAMPLED_B, 0, reward=0.0, attempt=1))
    progress.wrote(episode(SAMPLED_B, 1, stop_reason=StopReason.CANCELLED))
    progress.arrived(group(GREEDY_A, episode(GREEDY_A)))
    progress.arrived(group(SAMPLED_A, episode(SAMPLED_A), failed=1))
    result = progress.partial()
    assert result.unfinished == 6 - 4
    assert result.sampled is not None
    assert result.greedy is not None
    assert (result.sampled.success.mean, result.sampled.success.episodes, result.sampled.failed) == (0.5, 2, 1)
    assert (result.greedy.success.mean, result.greedy.success.episodes) == (1.0, 1)
    # pass@2 needs two episodes of a task.
    assert list(result.sampled.pass_at) == [1]
    assert list(result.sampled.by_source) == ["books"]
    assert result.to_json()["unfinished"] == 2


def test_groups_with_custom_names_belong_to_their_task(progress: EvalProgress) -> None:
    for number, (request, reward) in enumerate(((SAMPLED_A, 1.0), (SAMPLED_B, 1.0), (GREEDY_A, 0.0))):
        member = episode(request, reward=reward, group_id=f"own {number}")
        progress.wrote(member)
        progress.arrived(TrajectoryGroup(f"own {number}", request.task.id, [member], "val"))
    result = progress.partial()
    assert (result.sampled.success.episodes, result.greedy.success.mean, result.unfinished) == (2, 0.0, 3)


def test_progress_without_terminal_is_printed_periodically(progress: EvalProgress, clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=200)
    with progress.shown(console):
        for member, seconds in enumerate((29, 2, 3)):
            clock.now += seconds
            progress.wrote(episode((SAMPLED_A, SAMPLED_B)[member // 2], member % 2))
    lines = console.file.getvalue().splitlines()
    assert lines == ["evaluating: 2 of 6 episodes, success 1.00, reward 1.00, 0:00:31 elapsed, about 0:01:02 left"]


def test_a_terminal_shows_a_line_with_the_time_left(progress: EvalProgress, clock: Clock) -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True)
    with progress.shown(console):
        clock.now += 4
        progress.wrote(episode(SAMPLED_A))
    output = console.file.getvalue()
    assert "1 of 6 episodes" in output
    assert "success 1.00" in output
    assert "0:00:20 left" in output


def config(*overrides: str) -> EvalConfig:
    return load_config(EvalConfig, overrides=["model=m", "rollout.env.name=lookup", *overrides])


def test_a_completion_has_a_ceiling_unless_another_or_none_is_named(tmp_path) -> None:
    assert config().rollout.max_tokens_per_turn == EVAL_MAX_TOKENS_PER_TURN == 4096
    assert config("rollout.max_tokens_per_turn=7").rollout.max_tokens_per_turn == 7
    assert config("rollout.max_tokens_per_turn=null").rollout.max_tokens_per_turn is None
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 50}')
    assert config(f"model={tmp_path}").rollout.max_tokens_per_turn == 50
    assert config(f"model={tmp_path}", "rollout.max_tokens_per_turn=7").rollout.max_tokens_per_turn == 7
    for wrong in ("0", '"50"', "true"):
        (tmp_path / "generation_config.json").write_text(f'{{"max_new_tokens": {wrong}}}')
        with pytest.raises(ConfigError, match=r"max_new_tokens in .*json is .*: it must be a positive integer"):
            config(f"model={tmp_path}")
    # A hosted endpoint has a limit of its own, and may refuse the parameter.
    hosted = ["url=http://h", "hosted.model=x", "greedy=false", "rollout.env.name=lookup"]
    assert load_config(EvalConfig, overrides=hosted).rollout.max_tokens_per_turn is None
    for ceiling in ("null", "5"):
        file = tmp_path / f"{ceiling}.yaml"
        loaded = config(f"rollout.max_tokens_per_turn={ceiling}")
        file.write_text(dump_config(loaded))
        assert load_config(EvalConfig, file) == loaded
