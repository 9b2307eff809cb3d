"""``turnwise reward-model``: training a sequence classifier on preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from rich.console import Console
from safetensors import SafetensorError
from torch import Tensor, nn

from turnwise.engine.accelerator import autocast, require_device
from turnwise.engine.capacity import rope_limit
from turnwise.engine.reward_model import Encoder
from turnwise.errors import RenderError, SessionError, TaskError, TrainError, requires_extra
from turnwise.trainer.algorithms.losses.core import LossSums
from turnwise.trainer.algorithms.losses.preference import bradley_terry_loss, pair_sums
from turnwise.trainer.config.offline import RewardModelConfig
from turnwise.trainer.config.policy import ModelConfig
from turnwise.trainer.core import MicroBatch, TokenScores, TrainRow
from turnwise.trainer.learn.learner import Learner
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trainer.offline.core import (
    OfflineResult,
    branch_messages,
    locked_directory,
    make_pairs,
    print_notice,
    read_recorded,
)
from turnwise.trainer.offline.preferences import (
    Pair,
    Preference,
    load_preferences,
    pack_pairs,
    token_sides,
    train_pairs,
)
from turnwise.trajectory import TrainSample

with requires_extra("transformers", "train", "training a model"):
    from transformers import AutoConfig, AutoModelForSequenceClassification


class ScoringPolicy(Policy):
    """A sequence classifier with one output, trained packed.

    The score of a row is that of the state that predicts its one trained token: a dummy token after the conversation.
    """

    def __init__(self, model: Any, *, source: Path, config: ModelConfig) -> None:
        """Wrap a model whose packed trunk was checked (:func:`load_scoring` does both)."""
        self.lora = None
        self.sequence = None
        self.model = model
        self.source = source
        self.compute_dtype = config.compute_dtype
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.rope_limit = rope_limit(model.config.to_dict())

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        device: torch.device = self.model.score.weight.device
        return device

    def forward(self, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
        """Return the scores of the rows of a micro-batch, shape [rows], as ``logprobs``; no entropy."""
        del entropy
        device = self.device
        with autocast(device, self.compute_dtype):
            hidden = self._hidden(batch, device)
            states = hidden[0].index_select(0, batch.predictors.to(device))
            scores: Tensor = self.model.score(states)[:, 0].float()
        return TokenScores(scores)


def load_scoring(config: ModelConfig, *, seed: int) -> ScoringPolicy:
    """Load a causal language model with a new head, drawn from ``seed``, or an existing reward model.

    Raises:
        TrainError: The model cannot be loaded or trained packed, or its family has no sequence classifier.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    causal = load_model(
        config.path,
        device=require_device(config.device, "model.device"),
        compute_dtype=config.compute_dtype,
        gradient_checkpointing=config.gradient_checkpointing,
        optimizations=config.optimizations,
    )
    settings = AutoConfig.from_pretrained(str(config.path), local_files_only=True)
    judged = any("ForSequenceClassification" in name for name in settings.architectures or ())
    if judged and settings.num_labels != 1:
        raise TrainError(f"model.path is {config.path}, a classifier of {settings.num_labels} labels: a reward is one")
    settings.num_labels = 1
    settings.id2label, settings.label2id = {0: "reward"}, {"reward": 0}
    # A decoder finds the end of a conversation as the last token that is no padding. Conversations may end with what
    # the tokenizer pads with; servers without a padding id take the last token, as training does.
    settings.get_text_config().pad_token_id = settings.pad_token_id = None
    torch.manual_seed(seed)
    try:
        if judged:
            model = AutoModelForSequenceClassification.from_pretrained(
                str(config.path), config=settings, dtype=torch.float32, local_files_only=True
            )
        else:
            model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise TrainError(f"model.path is {config.path}: no reward model can be made of it: {error}") from error
    prefix = model.base_model_prefix
    if not isinstance(model.score, nn.Linear) or causal.model.base_model_prefix != prefix:
        raise TrainError(f"{type(model).__name__} has no linear head on the trunk of {type(causal.model).__name__}")
    # Before the trunk is set: activation checkpointing keeps a flag of its layers in training mode.
    model.eval()
    setattr(model, prefix, causal.model.base_model)
    policy = ScoringPolicy(model.to(causal.device), source=causal.source, config=config)
    policy.optimizations = causal.optimizations
    return policy


@dataclass(frozen=True, slots=True)
class RewardObjective:
    """The Bradley-Terry loss of a step's pairs.

    Attributes:
        center_coef: Weight of the term that keeps rewards around 0.
        sides: int64 of shape [rows], from :func:`~turnwise.trainer.offline.preferences.pack_pairs`.
        margins: float32 of shape [pairs].
    """

    entropy: ClassVar[bool] = False
    center_coef: float
    sides: Tensor
    margins: Tensor

    def __call__(self, batch: MicroBatch, scores: TokenScores) -> LossSums:
        """Return the summed loss of the pairs of a micro-batch."""
        pairs, sides = token_sides(batch, self.sides)
        rewards, _ = pair_sums(scores.logprobs, sides.to(scores.logprobs.device), len(pairs))
        margins = self.margins[pairs].to(rewards.device)
        result = bradley_terry_loss(rewards[:, 0], rewards[:, 1], margins, center_coef=self.center_coef)
        sums = rewards.detach().sum(0)
        result.sums |= {"chosen": sums[0], "rejected": sums[1]}
        return result


def run_reward_model(config: RewardModelConfig, *, console: Console | None = None) -> OfflineResult:
    """Train a reward model and save it to ``runs/name/model``, for ``turnwise serve --reward``.

    Raises:
        TaskError: The data cannot be read or rendered by the model's chat template, or has no pair.
        TrainError: The model cannot be loaded or trained, or a model of this name exists.
        RenderError: The model has no tokenizer.
    """
    if config.model.lora is not None:
        raise TrainError("model.lora is given, but a reward model is trained as a whole: remove it")
    with locked_directory(config, console):
        encoder = Encoder(config.model.path)
        pairs = _drop_long_pairs(config, _pairs(config, encoder, console), console)
        if not pairs:
            raise TrainError("max_tokens_per_row leaves no pair: raise it")
        held_out = []
        if config.held_out is not None:
            held_out = _drop_long_pairs(
                config, _read_pairs(load_preferences(config.held_out), encoder, console), console
            )
        scoring = load_scoring(config.model, seed=config.seed)
        learner = TorchLearner(scoring, config.policy, config.steps_over(len(pairs), config.pairs))

        def objective(indices: list[int], sides: Tensor) -> RewardObjective:
            return RewardObjective(config.center_coef, sides, torch.tensor([pairs[index].margin for index in indices]))

        result = train_pairs(config, learner, pairs, objective, "reward model", console)
        if held_out:
            right = accuracy(learner, held_out, config.max_tokens_per_micro_batch)
            result.metrics["preference/held_out_accuracy"] = right
            print_notice(console, f"held out: {right:.3f} of {len(held_out)} preferences are right")
        return result


def accuracy(learner: Learner, pairs: Sequence[Pair], max_tokens: int) -> float:
    """Return the share of pairs whose chosen side has the larger reward."""
    micro, sides = pack_pairs(pairs, max_tokens)
    right = 0
    for batch, scores in zip(micro, learner.logprobs(micro), strict=True):
        present, of_row = token_sides(batch, sides)
        rewards, _ = pair_sums(scores.cpu(), of_row, len(present))
        right += int((rewards[:, 0] > rewards[:, 1]).sum())
    return right / len(pairs)


def _pairs(config: RewardModelConfig, encoder: Encoder, console: Console | None) -> list[Pair]:
    if config.trajectories is None:
        assert config.data is not None, "a configuration has data or trajectories"
        return _read_pairs(load_preferences(config.data, config.limit), encoder, console)
    # What the reward's server will be asked about is messages: they are encoded as it encodes them.
    renderer = config.renderer.load(config.model.path)
    recorded = make_pairs(read_recorded(config.trajectories, renderer), config.trajectories)[: config.limit]
    return [
        Pair(
            [_row(encoder, branch_messages(better), better.id, f"{number}-chosen")],
            [_row(encoder, branch_messages(worse), worse.id, f"{number}-rejected")],
        )
        for number, (better, worse) in enumerate(recorded)
    ]


def _read_pairs(preferences: Sequence[Preference], encoder: Encoder, console: Console | None) -> list[Pair]:
    if tools := sum(1 for preference in preferences if preference.tools):
        print_notice(
            console, f"{tools} rows name tools: a reward's server shows its model none, so neither does training"
        )
    pairs = []
    for number, preference in enumerate(preferences):
        prompt, label = preference.prompt, preference.id
        chosen = _row(encoder, [*prompt, *preference.chosen], f"{label}: chosen", f"{number}-chosen")
        rejected = _row(encoder, [*prompt, *preference.rejected], f"{label}: rejected", f"{number}-rejected")
        pairs.append(Pair([chosen], [rejected], preference.margin))
    return pairs


def _row(encoder: Encoder, messages: Sequence[Mapping[str, Any]], where: str, name: str) -> TrainRow:
    """Return the row of a conversation, with a dummy token as the trained one."""
    try:
        token_ids = encoder.chat([dict(message) for message in messages], arguments={})
    except (RenderError, SessionError) as error:
        raise TaskError(f"{where}: {error}") from error
    if not token_ids:
        raise TaskError(f"{where}: the chat template renders nothing of it")
    length = len(token_ids) + 1
    mask = np.arange(length) == length - 1
    sample = TrainSample(
        input_ids=np.array([*token_ids, token_ids[-1]], np.int32),
        loss_mask=mask,
        rollout_logprobs=np.zeros(length, np.float32),
        weight_versions=np.full(length, -1, np.int32),
        turn_ids=np.where(mask, 0, -1).astype(np.int32),
        trajectory_id=name,
        group_id=name,
        leaf=0,
    )
    return TrainRow(sample)


def _drop_long_pairs(config: RewardModelConfig, pairs: list[Pair], console: Console | None) -> list[Pair]:
    """Drop pairs that are too long: truncation would remove the judged end."""
    max_tokens = config.max_tokens_per_row
    fitting = [
        pair
        for pair in pairs
        if max_tokens is None
        or all(len(row.sample.input_ids) <= max_tokens + 1 for row in (*pair.chosen, *pair.rejected))
    ]
    if len(fitting) < len(pairs):
        print_notice(console, f"max_tokens_per_row {max_tokens} leaves {len(pairs) - len(fitting)} pairs out")
    return fitting
