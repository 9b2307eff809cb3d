"""A model with one number for a conversation, in place of a distribution over the next token.

Owns: :class:`ScoringPolicy` and :func:`load_scoring`. Refuses: serving it (``inference/reward_server.py``), and the
chat template, which decides what a conversation's ids are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from turnwise.errors import MissingExtraError, TrainError
from turnwise.trainer.config import ModelConfig
from turnwise.trainer.engines.torch import pick_device
from turnwise.trainer.packing import MicroBatch
from turnwise.trainer.policy import Policy, TokenScores, load_model

try:
    from transformers import AutoConfig, AutoModelForSequenceClassification
except ImportError as error:
    raise MissingExtraError("transformers", "train", "training a model") from error


class ScoringPolicy(Policy):
    """A sequence classifier of one output that is trained packed.

    The score of a row is that of the state that predicts its one trained token: rows end with a token more than the
    conversation has, which no state that counts ever sees.
    """

    def __init__(self, model: Any, *, source: Path, config: ModelConfig) -> None:
        """Wrap a model whose trunk was proven to run packed (:func:`load_scoring` does both)."""
        self.lora = None
        self.model = model
        self.source = source
        self.compute_dtype = config.compute_dtype
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        device: torch.device = self.model.score.weight.device
        return device

    def forward(self, batch: MicroBatch, *, entropy: bool = False) -> TokenScores:
        """Return the scores of the rows of a micro-batch, shape [rows], as ``logprobs``; there is no entropy."""
        del entropy
        device = self.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.compute_dtype == "bfloat16"):
            hidden = self._hidden(batch, device)
            states = hidden[0].index_select(0, batch.predictors.to(device))
            scores: Tensor = self.model.score(states)[:, 0].float()
        return TokenScores(scores)


def load_scoring(config: ModelConfig, *, seed: int) -> ScoringPolicy:
    """Load a causal language model and put a new head on its trunk, or go on with a reward model.

    Args:
        config: The model: a causal one, or a sequence classifier of one output.
        seed: Decides the new head's first weights.

    Raises:
        TrainError: The model cannot be loaded or trained packed, or its family has no sequence classifier.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    causal = load_model(
        config.path,
        device=pick_device(config.device),
        compute_dtype=config.compute_dtype,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    settings = AutoConfig.from_pretrained(str(config.path), local_files_only=True)
    judged = any("ForSequenceClassification" in name for name in settings.architectures or ())
    if judged and settings.num_labels != 1:
        raise TrainError(f"model.path is {config.path}, a classifier of {settings.num_labels} labels: a reward is one")
    settings.num_labels = 1
    settings.id2label, settings.label2id = {0: "reward"}, {"reward": 0}
    # A decoder finds the end of a conversation as the last token that is no padding. Conversations may end with what
    # the tokenizer pads with; servers that are told no padding id take the last token, as training does.
    settings.get_text_config().pad_token_id = settings.pad_token_id = None
    torch.manual_seed(seed)
    try:
        if judged:
            model = AutoModelForSequenceClassification.from_pretrained(
                str(config.path), config=settings, dtype=torch.float32, local_files_only=True
            )
        else:
            model = AutoModelForSequenceClassification.from_config(settings, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise TrainError(f"model.path is {config.path}: no reward model can be made of it: {error}") from error
    prefix = model.base_model_prefix
    if not isinstance(model.score, nn.Linear) or causal.model.base_model_prefix != prefix:
        raise TrainError(f"{type(model).__name__} has no linear head on the trunk of {type(causal.model).__name__}")
    setattr(model, prefix, causal.model.base_model)
    if causal.model.training:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.eval()
    return ScoringPolicy(model.to(causal.device), source=causal.source, config=config)
