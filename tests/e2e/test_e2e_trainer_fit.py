"""``trainer.fit`` with an agent function, rows in memory, and an algorithm or a training loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypedDict

import pytest
from openai import AsyncOpenAI

import turnwise
from support.trainer.lookup_run import MODEL, build_model, lines, shared, silent
from turnwise.agents.registry import LLM, rollout
from turnwise.config import load_config
from turnwise.errors import ConfigError
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.directory import config_digest
from turnwise.trainer.training import Training


class Question(TypedDict):
    question: str
    answer: str


ROWS: list[Question] = [{"question": f"Who is person {n}?", "answer": str(n)} for n in range(5)]


@rollout
async def short_answers(task: Question, llm: LLM) -> float:
    client = AsyncOpenAI(base_url=llm.endpoint, api_key="dummy")
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    response = await client.chat.completions.create(model=llm.model, messages=messages, **llm.sampling_parameters)
    text = response.choices[0].message.content or ""
    # Something in which the members of a group differ.
    return (len(text) * 37 % 11) / 11 + float(task["answer"] in text)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    return {
        "steps": 1,
        "policies": {"main": {"model": {"path": str(model), "threads": 1}, "optim": {"lr": 1e-3}}},
        "rollout": {"group_size": 4, "max_tokens_per_turn": 12},
        "batch": {"groups": 2, "max_tokens_per_micro_batch": 256},
        "eval": {"samples": 1, "greedy": False, "limit": 2},
    }


@pytest.mark.long
def test_fit_trains_an_agent_on_rows_with_an_algorithm(settings: dict[str, Any], tmp_path: Path) -> None:
    algorithm = turnwise.AlgorithmConfig(loss="gspo", loss_options={"clip_low": 3e-4, "clip_high": 4e-4}, minibatches=2)
    trainer = turnwise.Trainer({**settings, "runs": tmp_path}, algorithm=algorithm, n_runners=4, console=silent())
    summary = trainer.fit(short_answers, ROWS, val_dataset=ROWS[:2])
    assert (summary.steps, summary.ended_by, summary.directory) == (1, "steps", tmp_path / "short-answers")
    assert summary.before is not None
    assert summary.after is not None
    records = lines(summary.directory / "metrics.jsonl")
    [step] = [record for record in records if record["kind"] == "train"]
    assert step["batch/trajectories"] == 8
    assert step["train/updates"] == 2

    # What was given is a configuration like any other: the command line goes on with it.
    config = load_config(TrainConfig, summary.directory / "config.yaml")
    assert config.rollout.agent.name == f"{__name__}:short_answers"
    assert (config.rollout.env.name, config.rollout.concurrency) == ("task", 4)
    assert (config.algorithm.loss, config.algorithm.loss_options["clip_high"]) == ("gspo", 4e-4)
    assert str(config.tasks).startswith(str(tmp_path / "datasets" / "train-"))
    same = trainer.plan(short_answers, iter(ROWS), ROWS[:2]).config
    assert config_digest(same) == config_digest(config)
    assert config_digest(trainer.plan(short_answers, ROWS[:4], ROWS[:2]).config) != config_digest(config)


class BestOf:
    """Rolls out every task of a step twice, and learns from the groups that paid more."""

    def __init__(self) -> None:
        self.trajectories: list[int] = []

    async def run(self, training: Training) -> None:
        tasks = training.train_tasks
        assert training.val_tasks == []
        assert sorted(task.data["answer"] for task in tasks) == [str(n) for n in range(5)]
        while not training.finished:
            groups = await training.rollouts(tasks[:2])
            groups += await training.rollouts(tasks[:2])
            assert len({trajectory.id for group in groups for trajectory in group.trajectories}) == 16
            groups.sort(key=lambda group: -sum(trajectory.reward for trajectory in group.trajectories))
            metrics = await training.learn(groups[:2])
            self.trajectories.append(int(metrics["batch/trajectories"]))


@pytest.mark.long
async def test_custom_training_loop_trains_in_a_running_event_loop(settings: dict[str, Any], tmp_path: Path) -> None:
    best_of = BestOf()
    config = {**settings, "runs": tmp_path, "name": "own", "eval": None, "algorithm": {"drop_zero_variance": False}}
    trainer = turnwise.Trainer(config, agent=short_answers, console=silent())
    with pytest.raises(ConfigError, match=r"await trainer\.fit_async"):
        trainer.fit(best_of.run, ROWS)
    summary = await trainer.fit_async(best_of.run, ROWS)
    assert (summary.steps, best_of.trajectories) == (1, [8])
    assert summary.spent["sampled_tokens"] > 0
    assert (summary.directory / "checkpoints" / "step_000001").is_dir()
    report = await asyncio.to_thread(turnwise_audit, summary.directory)
    assert report.contradictions == []


def turnwise_audit(run: Path) -> Any:
    from turnwise.trainer.run.audit import audit_run

    return audit_run(run, recompute=False, console=silent())
