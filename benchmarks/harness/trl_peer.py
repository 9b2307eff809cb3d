"""TRL's side of the step benchmark: GRPOTrainer over an environment, stopped at a gate after every step."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer, chat_template_utils

from harness.trl_config import grpo_config
from harness.trl_gate import Gate


def configuration(directory: Path, steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GRPOConfig that corresponds to ours, with what is fastest on a CPU where TRL leaves a choice."""
    return grpo_config(
        directory,
        steps,
        settings,
        seed=0,
        max_completion_length=settings["max_tokens_per_turn"] * settings["max_turns"],
        max_tool_calling_iterations=settings["max_turns"] - 1,
        # TRL's own limit is that of a whole episode; ours is that of a turn.
        generation_kwargs={"max_new_tokens": settings["max_tokens_per_turn"]},
    )


@dataclass
class Notes:
    """What was asked, answered and generated, noted while TRL works."""

    said: Callable[[Sequence[Any]], dict[str, str]]
    prompts: dict[str, list[int]] = field(default_factory=dict)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)

    def generated(self, prompt_ids: list[list[int]], masks: list[list[int]]) -> None:
        """Take the prompts of a step, and of each episode which of its later tokens were sampled."""
        # A turn is a run of sampled tokens: what a tool answered stands between two.
        begins = sum(one and not before for row in masks for before, one in zip([0, *row], row, strict=False))
        self.asked = prompt_ids
        self.step = {"episodes": len(masks), "sampled": sum(map(sum, masks)), "turns": begins, "updates": 1}

    def reward(self, completions: Any, environments: Any, task: Any, **_: Any) -> list[float]:
        """Score the episodes of a step: TRL's reward function."""
        rewards = [each._reward(said) for each, said in zip(environments, completions, strict=True)]
        self.step["reward"] = sum(rewards) / len(rewards)
        for name, said, ids in zip(task, completions, self.asked, strict=True):
            if self.prompts.setdefault(name, ids) != ids:
                raise ValueError(f"task {name} was asked in two ways")
            self.answers.setdefault(name, {}).update(self.said(said))
        return rewards


class NotedTrainer(GRPOTrainer):
    """GRPOTrainer that tells what it generated."""

    notes: Notes

    def _generate(self, prompts: list[Any]) -> Any:
        found = super()._generate(prompts)
        self.notes.generated(found[0], found[2])
        return found


class AtGate(TrainerCallback):
    """Stops at the gate before the first step and after every one."""

    def __init__(self, gate: Gate, notes: Notes) -> None:
        self._gate = gate
        self._notes = notes

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._gate.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._gate.wait(**self._notes.step)


def _tokenizer(model: Path, settings: Mapping[str, Any]) -> Any:
    """Return the tokenizer; of a template that is not TRL's, the settings say as which one's its calls are parsed."""
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if "calls_like" in settings:
        tokenizer.response_template = getattr(chat_template_utils, settings["calls_like"])
    return tokenizer


def run(gate: Gate, model: Path, directory: Path, steps: int, settings: Mapping[str, Any]) -> None:
    """Train for so many steps, and report what was done."""
    torch.set_num_threads(1)
    disable_progress_bars()
    logging.disable_progress_bar()
    game = importlib.import_module(settings["game"])
    given = configuration(directory, steps, settings)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # What optim="adamw_torch_fused" makes, but with the schedule of our side: TRL's warm-up would begin with a step of
    # rate 0, and from then on the policies, and with them the work of a step, would differ.
    rates = {"lr": settings["lr"], "betas": tuple(settings["betas"]), "eps": settings["eps"], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(loaded.parameters(), **rates, fused=True)
    warmup = settings["warmup_steps"]
    notes = Notes(game.answers)
    trainer = NotedTrainer(
        model=loaded,
        args=GRPOConfig(**given),
        processing_class=_tokenizer(model, settings),
        train_dataset=Dataset.from_list(game.rows(steps * settings["groups"])),
        reward_funcs=notes.reward,
        environment_factory=game.Peer,
        callbacks=[AtGate(gate, notes)],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / warmup))),
    )
    trainer.notes = notes
    trainer.train()
    config = {
        "trainer": given,
        "optimizer": {"name": "AdamW, fused", **rates, "warmup_steps": warmup},
        "attention": loaded.config._attn_implementation,
    }
    gate.finish(config=config, prompts=notes.prompts, answers=notes.answers)
