"""A run of seconds whose reward is given by a judge that it hosts: both models say colours, one grades them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.trainer.lookup_run import train_on_rows
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.small_model import make_model

MODEL = Path("sft") / "model"
COLOURS = ("red", "blue")
QUESTION = "Is it red? {{ answer }}"


def tasks() -> list[dict[str, Any]]:
    """Return rows that ask for a colour."""
    return [{"id": f"colour-{number}", "prompt": f"Name a colour, number {number}."} for number in range(8)]


def build_judge(directory: Path) -> None:
    """Make a model that names either colour as often, and grades red with 10 and blue with 0."""
    build_colours(directory, [
        (task["prompt"], colour) for task in tasks() for colour in COLOURS
    ] + [
        (QUESTION.replace("{{ answer }}", colour), json.dumps({"reasoning": "", "score": 10 if colour == "red" else 0}))
        for colour in COLOURS for _ in range(8)
    ])  # fmt: skip


def build_colours(directory: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Make a model that answers prompts as the rows do, in ``directory / MODEL``."""
    conversations = [
        {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}], "tools": []}
        for prompt, answer in rows
    ]
    base = directory / "base"
    make_model(base, conversations, seed=0, width=64, layers=2, words="red|blue")
    config = Qwen3Config.from_pretrained(base)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(base)
    train_on_rows(directory, base, conversations)


def rollout(model: Path, scorer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Return the section ``rollout`` of episodes of one answer, with the judge ``grader``."""
    return {
        "env": {"name": "single_turn", "config": {"scorer": scorer}},
        "agent": {"name": "single_turn"},
        "frozen": {"grader": {"model": str(model), "inference": {"threads": 1}}},
        "group_size": 4,
        "max_tokens_per_turn": 4,
        **changes,
    }


def judge(**arguments: Any) -> dict[str, Any]:
    """Return the part of a rubric that asks the policy ``grader``."""
    return {"function": "judge", "arguments": {"policy": "grader", "template": QUESTION, "max_tokens": 32, **arguments}}


def judged_config(model: Path, runs: Path, scorer: dict[str, Any], **changes: Any) -> TrainConfig:
    """Return the configuration of a run whose answers a scorer grades; ``changes`` are top-level keys."""
    return TrainConfig.model_validate({
        "name": "run",
        "runs": runs,
        "steps": 4,
        "seed": 3,
        "tasks": "support.trainer.judged_run:tasks",
        "policies": {"main": {"model": {"path": model, "threads": 1}, "optim": {"lr": 3e-3}}},
        "rollout": rollout(model, scorer),
        "batch": {"groups": 4, "max_tokens_per_micro_batch": 512},
        **changes,
    })  # fmt: skip
