"""Evaluation over several sources of tasks, whose rows name their own environments and agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.errors import ConfigError, RegistryError, TaskError
from turnwise.evaluation import EvalPlan, evaluate, result_table
from turnwise.evaluation.metrics import EvalResult, summarize
from turnwise.evaluation.runner import load_eval_tasks
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutParts
from turnwise.rollout.producer import RolloutProducer
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.types import StopReason

PAID = "support.envs.task_envs:Paid"


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def run(plan: dict[str, Any], **env: Any) -> tuple[EvalResult, list[Trajectory]]:
    renderer, seen = ToyRenderer(), []
    config = RolloutConfig.model_validate({"env": {"name": PAID, **env}, "max_turns": 4, "retries": 0})
    client = ScriptedClient(renderer, lambda request: "an answer")
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer, write=seen.append))
    try:
        result = await evaluate(producer, EvalPlan.model_validate({"samples": 0, "success_reward": 0.5, **plan}))
        return result, seen
    finally:
        await producer.close()


async def test_rows_and_sources_choose_environment_agent_and_configuration(tmp_path: Path) -> None:
    rows = write(
        tmp_path / "rows.jsonl",
        {"id": "run's", "prompt": "p"},
        {"id": "row's", "prompt": "p", "env": {"config": {"pays": 0.75}}},
        {"id": "other", "prompt": "p", "env": "support.envs.task_envs:Closing"},
        {"id": "both", "prompt": "p", "env": {"name": "support.envs.task_envs:Closing", "config": {"pays": 1.0}}},
        {
            "id": "agent",
            "prompt": "p",
            "agent": {"name": "support.envs.task_envs:Greeting", "config": {"greeting": "yo"}},
        },
    )
    more = {"source": write(tmp_path / "more.jsonl", {"id": "source's", "prompt": "p"}), "env": {"config": {"pays": 2}}}
    result, trajectories = await run({"tasks": [rows, more]}, config={"pays": 0.5})
    assert {trajectory.task_id: trajectory.reward for trajectory in trajectories} == {
        "run's": 0.5,
        "row's": 0.75,
        # The configuration of the run is that of its own environment, not of others.
        "other": 0.25,
        "both": 1.0,
        "agent": 0.5,
        "source's": 2.0,
    }
    assert all(trajectory.error is None for trajectory in trajectories)
    offered = {trajectory.task_id: len(trajectory.segments[0].tools or ()) for trajectory in trajectories}
    assert (offered["run's"], offered["agent"]) == (1, 0)
    assert result.greedy is not None
    assert (result.greedy.success.mean, result.greedy.tasks) == (pytest.approx(5 / 6), 6)
    by_source = result.greedy.by_source
    assert {name: (one.success.mean, one.reward.mean, one.tasks) for name, one in by_source.items()} == {
        "rows": (pytest.approx(4 / 5), pytest.approx(0.6), 5),
        "more": (1.0, 2.0, 1),
    }
    result.write(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())["greedy"]["by_source"]
    assert summary["more"]["reward"]["mean"] == 2.0
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert {row["task_id"]: row["source"] for row in episodes}["source's"] == "more"
    names = [str(cell) for cell in result_table(result).columns[0].cells]
    assert names[2:8] == ["success", "reward", "success, more", "reward, more", "success, rows", "reward, rows"]


async def test_single_source_has_no_separate_figures(tmp_path: Path) -> None:
    result, _ = await run({"tasks": write(tmp_path / "rows.jsonl", {"prompt": "p"})})
    assert "by_source" not in result.to_json()["greedy"]


async def test_tasks_that_nobody_names_are_those_of_the_environment() -> None:
    result, trajectories = await run({})
    assert {trajectory.task_id for trajectory in trajectories} == {"f0", "f1", "f2"}
    assert result.greedy is not None
    assert result.greedy.tasks == 3
    with pytest.raises(ConfigError, match="tasks: missing, and the environment 'single_turn' has no default_tasks"):
        await run({}, name="single_turn", config={"scorer": "support.envs.task_rows:finite"})


async def test_long_prompts_are_left_out_before_the_limit_counts(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": "x" * (2000 if n % 2 else 10)} for n in range(8)]
    plan = {"tasks": write(tmp_path / "rows.jsonl", *rows), "max_prompt_tokens": 1500, "limit": 3}
    _, trajectories = await run(plan)
    assert {trajectory.task_id for trajectory in trajectories} == {"0", "2", "4"}
    with pytest.raises(
        TaskError, match=r"rows\.jsonl holds no task: all of its rows were left out: 8 \(more than 3 tok"
    ):
        await run({**plan, "max_prompt_tokens": 3})


async def test_unknown_environment_of_a_row_fails_before_the_start(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", {"id": "a", "prompt": "p"}, {"id": "b", "prompt": "p", "env": "lokup"})
    with pytest.raises(TaskError, match="task 'b': its environment cannot be made: there is no environment 'lokup'"):
        await run({"tasks": rows})


async def test_unknown_agent_fails_before_the_start(tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", {"id": "a", "prompt": "p"})
    rollout = RolloutConfig.model_validate({"env": {"name": PAID}, "agent": {"name": "raect"}})
    with pytest.raises(RegistryError, match="no agent is called 'raect'"):
        await load_eval_tasks(EvalPlan.model_validate({"tasks": rows}), rollout, ToyRenderer())


def test_failures_count_for_their_source() -> None:
    def group(name: str, reward: float, error: str | None, failed: int = 0) -> TrajectoryGroup:
        stop = StopReason.COMPLETED if error is None else StopReason.ERROR
        trajectory = Trajectory(
            name, name, name, name, stop_reason=stop, error=error, rewards=[(None, "score", reward)]
        )
        return TrajectoryGroup(name, name, [trajectory], "val", failed, source=name[0])

    summary = summarize([group("a1", 1.0, None), group("a2", 0.0, "gone", 2), group("b1", 0.0, "gone")])
    assert (summary.failed, summary.success.episodes) == (4, 1)
    assert {name: (one.failed, one.success.episodes) for name, one in summary.by_source.items()} == {
        "a": (3, 1),
        "b": (1, 0),
    }
