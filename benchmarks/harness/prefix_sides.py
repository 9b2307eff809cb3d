"""The sides of the shared-prefix benchmark: ours, our own learner with padded rows, and TRL's GRPOTrainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harness.prefix_samples import Group, groups
from harness.trl_config import grpo_config
from harness.trl_gate import Gate
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.losses.core import weigh
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.learn.objectives import PolicyObjective
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.model.policy import Policy
from turnwise.trajectory import TrainSample


def rows_of(made: Sequence[Group]) -> list[TrainRow]:
    """Return the rows of a step with their advantages."""
    rows = []
    for group in made:
        for number, (completion, advantage) in enumerate(zip(group.completions, group.advantages(), strict=True)):
            ids = np.asarray([*group.prompt, *completion], np.int32)
            mask = np.arange(len(ids)) >= len(group.prompt)
            sampled = np.where(mask, 0, -1).astype(np.int32)
            name = f"{group.name}-{number}"
            sample = TrainSample(ids, mask, np.zeros(len(ids), np.float32), sampled, sampled, name, group.name, 0)
            rows.append(TrainRow(sample, advantage))
    return rows


def _learner(model: Path, steps: int, settings: Mapping[str, Any]) -> TorchLearner:
    optim = OptimConfig(lr=settings["lr"], betas=settings["betas"], max_grad_norm=settings["max_grad_norm"])
    config = PolicyConfig(model=ModelConfig(path=model, device="cpu", threads=1), optim=optim)
    return TorchLearner.create(config, steps)


def ours(gate: Gate, model: Path, steps: int, settings: Mapping[str, Any]) -> None:
    """What ``turnwise train`` does between rows and weights."""
    learner = _learner(model, steps, settings)
    batch = BatchConfig(
        max_tokens_per_micro_batch=settings["our_micro_batch_tokens"], share_prefixes=settings["share_prefixes"]
    )
    algorithm = AlgorithmConfig(
        loss_options={"clip_low": settings["clip_low"], "clip_high": settings["clip_high"]}, old_logprobs="recompute"
    )
    gate.wait()
    for step in range(steps):
        found = update_policy(learner, rows_of(groups(step, settings)), algorithm, batch, seed=step)
        gate.wait(
            tokens=found["batch/packed_tokens"], trained=found["train/tokens"], grad_norm=found["train/grad_norm"]
        )
    gate.finish()


class PaddedPolicy(Policy):
    """Rows as a padded matrix through the model's own attention; everything else as ours.

    Padding stands behind the rows, so causal attention needs no mask.
    """

    def _hidden(self, batch: MicroBatch, device: torch.device) -> Tensor:
        longest = max(length for _, length, _ in batch.segments)
        ids = torch.zeros(len(batch.segments), longest, dtype=torch.int64)
        valid = torch.zeros(len(batch.segments), longest, dtype=torch.bool)
        for number, (start, length, _) in enumerate(batch.segments):
            ids[number, :length] = batch.input_ids[0, start : start + length]
            valid[number, :length] = True
        states: Tensor = self.model.get_decoder()(input_ids=ids.to(device), use_cache=False).last_hidden_state
        return states.flatten(0, 1).index_select(0, torch.nonzero(valid.flatten()).flatten())[None]


def padded(gate: Gate, model: Path, steps: int, settings: Mapping[str, Any]) -> None:
    """The same learner, loss and optimizer over padded rows, those of similar length together."""
    learner = _learner(model, steps, settings)
    learner.policy.model.set_attn_implementation("sdpa")
    learner.policy = PaddedPolicy(learner.policy.model, source=model)
    objective = PolicyObjective.of(
        AlgorithmConfig(loss_options={"clip_low": settings["clip_low"], "clip_high": settings["clip_high"]})
    )
    at_once = settings["padded_micro_batch"]
    gate.wait()
    for step in range(steps):
        rows, normalizer = weigh(rows_of(groups(step, settings)), "token_mean")
        rows.sort(key=lambda row: -len(row.sample.input_ids))
        batches = [pack(rows[n : n + at_once], 10**9)[0] for n in range(0, len(rows), at_once)]
        tokens = sum(len(b.segments) * max(length for _, length, _ in b.segments) for b in batches)
        stats = learner.forward_backward(batches, objective, normalizer)
        gate.wait(tokens=tokens, trained=stats.tokens, grad_norm=learner.optim_step().grad_norm)
    gate.finish()


def trl_configuration(directory: Path, steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GRPOConfig that corresponds to ours, with what is fastest on a CPU where TRL leaves a choice."""
    return grpo_config(directory, steps, settings, max_completion_length=settings["completion_tokens"][1])


def trl(gate: Gate, model: Path, steps: int, settings: Mapping[str, Any], directory: Path) -> None:
    """TRL's GRPOTrainer, handed the samples by its ``rollout_func``: it generates nothing."""
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    disable_progress_bars()
    logging.disable_progress_bar()
    named = {group.name: group for step in range(steps) for group in groups(step, settings)}
    rewards = {tuple(c): r for group in named.values() for c, r in zip(group.completions, group.rewards, strict=True)}

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        del trainer
        size = settings["group_size"]
        whole = [named[name] for name in prompts[::size]]
        completions = [completion for group in whole for completion in group.completions]
        return {
            "prompt_ids": [named[name].prompt for name in prompts],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(completion) for completion in completions],
        }

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [rewards[tuple(completion)] for completion in completion_ids]

    class AtGate(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.wait(grad_norm=trainer.last_norm)

    class Watched(GRPOTrainer):
        last_norm = 0.0

        def _clip_grad_norm(self, model: Any) -> Any:
            norm = super()._clip_grad_norm(model)
            Watched.last_norm = float(norm)
            return norm

    given = trl_configuration(directory, steps, settings)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rates = {"lr": settings["lr"], "betas": tuple(settings["betas"]), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(loaded.parameters(), **rates, fused=True)
    trainer = Watched(
        model=loaded,
        args=GRPOConfig(**given),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        train_dataset=Dataset.from_list([{"prompt": name} for name in named]),
        reward_funcs=reward,
        rollout_func=rollout,
        callbacks=[AtGate()],
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)),
    )
    trainer.train()
    gate.finish(config=given, attention=loaded.config._attn_implementation)
