"""The example configurations of other objectives, one after the other, on what a tiny model sampled."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.engine.classifiers import make_classifier
from support.trainer.lookup_run import lines, silent, train_config
from turnwise.config import load_config
from turnwise.engine.reward_model import Classifier, Encoder
from turnwise.evaluation.config import EvalConfig
from turnwise.evaluation.runner import run_eval
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.dry_run import dry_run
from turnwise.trainer.train import run_train
from turnwise.trajectory import messages_of
from turnwise.trajectory_file import read_trajectories

EXAMPLES = Path(__file__).parents[2] / "examples" / "objectives"


@pytest.fixture(scope="module")
def sampled(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the model of a few demonstrations says, and what that is worth to an environment that grades."""
    out = tmp_path_factory.mktemp("objectives") / "sampled"
    settings = {
        "model": lookup_model,
        "out": out,
        "tasks": "turnwise.envs.basic.lookup:tasks?n=6&split=train",
        "samples": 4,
        "greedy": False,
        "rollout": {"env": {"name": "support.envs.run_envs:Graded"}, "max_turns": 3, "max_tokens_per_turn": 24},
        "inference": {"threads": 1},
    }
    run_eval(EvalConfig.model_validate(settings), console=silent())
    return out


def example(kind: Any, name: str, model: Path, runs: Path, *overrides: str) -> Any:
    paths = [f"model.path={model}", f"runs={runs}"]
    return load_config(kind, EXAMPLES / name, [*paths, "epochs=1", *overrides])


def test_offline_training_learns_from_sampled_trajectories(lookup_model: Path, sampled: Path, tmp_path: Path) -> None:
    rewards = sorted({trajectory.reward for trajectory in read_trajectories(sampled / "trajectories.twz")})
    assert len(rewards) > 1, "the test wants episodes that differ"
    where = f"trajectories.path={sampled}"
    min_reward = f"trajectories.min_reward={rewards[-1]}"
    tuned = run_sft(example(SFTConfig, "rft.yaml", lookup_model, tmp_path, where, min_reward), console=silent())
    assert (tuned.model / "tokenizer.json").exists()


def test_a_reward_model_is_the_reward_of_an_environment(lookup_model: Path, tmp_path: Path) -> None:
    judge = tmp_path / "judge"
    judge.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(lookup_model / name, judge)
    make_classifier(judge, 1, max_position_embeddings=512)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"id": str(n), "prompt": f"Who is number {n}?"}) + "\n" for n in range(2)))
    scorer = {"liked": {"function": "reward_model", "arguments": {"model_dir": str(judge), "server": {"threads": 1}}}}
    run_train(
        train_config(
            lookup_model,
            tmp_path,
            tasks=str(tasks),
            steps=1,
            rollout={"env": {"name": "single_turn", "config": {"scorer": scorer}}, "group_size": 2, "top_k": 20},
        ),
        console=silent(),
    )
    encoder = Encoder(judge)
    alone = Classifier(judge, dtype="float32", device="cpu", max_context=None)
    trajectories = list(read_trajectories(tmp_path / "run" / "trajectories.twz"))
    assert len(trajectories) == 4
    for trajectory in trajectories:
        path = trajectory.path(trajectory.leaves()[-1])
        messages = [message for segment in path for message in messages_of(segment)]
        ((score,),) = alone.forward([encoder.chat(messages, arguments={})])
        assert trajectory.reward == pytest.approx(score, abs=1e-4)
    records = lines(tmp_path / "run" / "metrics.jsonl")
    [step] = [record for record in records if record["kind"] == "train"]
    assert step["reward/by_name/liked"]
    assert step["sampling/truncated"] == 1
    assert 0 < step["sampling/cut_mass"] < 1
    # The loss is under what top-k kept, as the audit recomputes it.
    assert [record for record in records if record.get("name") == "truncation"] == []
    masks = [segment.mask for trajectory in trajectories for segment in trajectory.segments if segment.sampled]
    assert all(mask is not None and mask.sizes.all() for mask in masks)
    assert step["gap/max"] < 1e-4
    report = audit_run(tmp_path / "run", console=silent())
    assert report.sound
    assert report.counts["logprobs recomputed"] == sum(trajectory.sampled_tokens for trajectory in trajectories)


def test_the_example_of_distillation_can_start(lookup_model: Path, tmp_path: Path) -> None:
    overrides = [f"policies.main.model.path={lookup_model}", f"rollout.frozen.expert.model={lookup_model}"]
    config = load_config(TrainConfig, EXAMPLES / "distill.yaml", [*overrides, f"runs={tmp_path}"])
    report = asyncio.run(dry_run(config))
    assert [check for check in report.checks if check.outcome != "ok"] == []
