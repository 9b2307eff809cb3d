"""What a train step takes, what is remembered of it, and what its figures say of the sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.errors import ConfigError, TaskError
from turnwise.tasks import InMemoryOrder, Task
from turnwise.tasks.order import TaskOrder
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.experience import build_experience, collect
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.metrics import meaning
from turnwise.trainer.run.checkpoint import TrainerState
from turnwise.trainer.run.task_scheduler import open_tasks, task_metrics
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.types import StopReason, as_ids


def config(tasks: Any, **more: Any) -> TrainConfig:
    plain = {
        "name": "run",
        "steps": 5,
        "policies": {"main": {"model": {"path": "models/start"}}},
        "rollout": {"env": {"name": "support.envs.task_envs:Paid"}},
        "seed": 3,
    }
    return TrainConfig.model_validate({**plain, **({} if tasks is None else {"tasks": tasks}), **more})


def rows(path: Path, count: int, length: int = 3) -> str:
    path.write_text("".join(json.dumps({"prompt": f"{n}" + "x" * length}) + "\n" for n in range(count)))
    return str(path)


def ids(order: TaskOrder, groups: int) -> list[tuple[str, int]]:
    return [(task.id, epoch) for task, epoch in (order.next() for _ in range(groups))]


def test_tasks_of_a_step_continue_over_the_end_of_an_epoch() -> None:
    order = InMemoryOrder([Task(name, "p") for name in "abc"], shuffle=False)
    assert ids(order, 2) + ids(order, 2) == [("a", 0), ("b", 0), ("c", 0), ("a", 1)]
    assert (order.epoch, order.position, task_metrics(order, None)) == (1, 1, {})


@pytest.mark.parametrize("form", ["one", "streamed", "mix"])
async def test_tasks_resume_at_their_state(tmp_path: Path, form: str) -> None:
    text = rows(tmp_path / "a.jsonl", 11)
    streamed = {"source": text, "stream": True, "name": "b", "id_prefix": "b/", "weight": 2}
    settings = config({"one": text, "streamed": streamed, "mix": [text, streamed]}[form])
    straight, _ = await open_tasks(settings, ToyRenderer(), TrainerState(0))
    ids(straight, 9)
    state = TrainerState(3, straight.epoch, straight.position, tasks=json.loads(json.dumps(straight.state())))
    resumed, _ = await open_tasks(settings, ToyRenderer(), state)
    assert ids(resumed, 30) == ids(straight, 30)
    # Another seed is another order.
    other, _ = await open_tasks(settings.model_copy(update={"seed": 4}), ToyRenderer(), TrainerState(0))
    reopened, _ = await open_tasks(settings, ToyRenderer(), TrainerState(0))
    assert ids(other, 9) != ids(reopened, 9)


async def test_epoch_and_position_alone_are_a_state_of_tasks_in_memory(tmp_path: Path) -> None:
    """As a checkpoint has them that was written before sources could be streamed."""
    settings = config(rows(tmp_path / "a.jsonl", 11))
    straight, _ = await open_tasks(settings, ToyRenderer(), TrainerState(0))
    ids(straight, 15)
    resumed, _ = await open_tasks(settings, ToyRenderer(), TrainerState(3, 1, 4))
    assert ids(resumed, 9) == ids(straight, 9)


async def test_long_prompts_are_left_out_counted_and_logged(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text("".join(json.dumps({"prompt": "x" * (2000 if n % 3 else 5)}) + "\n" for n in range(9)))
    stream, [report] = await open_tasks(config(str(text), max_prompt_tokens=1500), ToyRenderer(), TrainerState(0))
    assert str(report) == "a: 3 tasks; 6 left out: more than 1500 tokens"
    assert {name for name, _ in ids(stream, 6)} == {"a-0", "a-3", "a-6"}
    assert task_metrics(stream, None) == {"tasks/left_out": 6.0}
    assert meaning("tasks/left_out")
    with pytest.raises(TaskError, match="all of its rows were left out: 9"):
        await open_tasks(config(str(text), max_prompt_tokens=2), ToyRenderer(), TrainerState(0))


async def test_default_tasks_are_those_of_the_environment() -> None:
    stream, _ = await open_tasks(config(None), ToyRenderer(), TrainerState(0))
    assert {name for name, _ in ids(stream, 3)} == {"f0", "f1", "f2"}
    nothing = config(None, rollout={"env": {"name": "single_turn"}})
    with pytest.raises(ConfigError, match="tasks: missing, and the environment 'single_turn' has no default_tasks"):
        await open_tasks(nothing, ToyRenderer(), TrainerState(0))


def test_held_out_tasks_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="held-out tasks"):
        config("a.jsonl", eval={"samples": 1})


async def test_streamed_row_may_name_an_unknown_environment(tmp_path: Path) -> None:
    text = tmp_path / "a.jsonl"
    text.write_text('{"prompt": "p"}\n{"prompt": "p", "env": "nope"}\n')
    with pytest.raises(TaskError, match="task 'a-1': its environment cannot be made: there is no environment 'nope'"):
        await open_tasks(config({"source": str(text), "stream": True}), ToyRenderer(), TrainerState(0))


def test_rewards_are_logged_by_source() -> None:
    def group(name: str, source: str | None, *rewards: float) -> TrajectoryGroup:
        members = [
            Trajectory(
                f"{name}/{n}", f"{name}/{n}", name, name, stop_reason=StopReason.COMPLETED,
                segments=[Segment(0, -1, "context", as_ids([1]))], rewards=[(None, "score", reward)],
            )
            for n, reward in enumerate(rewards)
        ]  # fmt: skip
        return TrajectoryGroup(name, name, members, source=source)

    groups = [group("a", "openai/gsm8k", 1.0, 0.0), group("b", "sql", 0.5, 0.5), group("c", "sql", 0.0, 0.0)]
    metrics = build_experience(collect(groups), AlgorithmConfig(), temperature=1.0).metrics
    assert metrics["reward/by_source/openai_gsm8k"] == 0.5
    assert metrics["reward/by_source/sql"] == 0.25
    assert meaning("reward/by_source/sql")
    plain = build_experience(collect([group("d", None, 1.0, 0.0)]), AlgorithmConfig(), temperature=1.0).metrics
    assert not [name for name in plain if name.startswith("reward/by_source")]
