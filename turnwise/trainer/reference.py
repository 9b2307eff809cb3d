"""The reference that a KL penalty holds the policy to: a model that scores and never changes.

Owns: :class:`Reference`, :class:`FrozenReference` and :func:`open_reference`. Refuses: estimators and coefficients
(``kl.py``), and training anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import orjson
import torch
from torch import Tensor

from turnwise.errors import ConfigError
from turnwise.trainer.config import ModelConfig
from turnwise.trainer.kl import KLConfig
from turnwise.trainer.learner import pick_device
from turnwise.trainer.packing import MicroBatch
from turnwise.trainer.policy import Policy, load_model

KEY = "algorithm.kl.reference"


class Reference(Protocol):
    """Scores rows as a learner does, with weights that stay what they are."""

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, one [N] tensor per micro-batch, without gradients."""


class FrozenReference:
    """A second model in memory: no gradients, no optimizer.

    Args:
        policy: The model.
        offload: Whether it lies in main memory except while it scores.
    """

    def __init__(self, policy: Policy, *, offload: bool = False) -> None:
        self._policy = policy
        self._device = policy.device
        self._offload = offload
        for parameter in policy.model.parameters():
            parameter.requires_grad_(requires_grad=False)
        if offload:
            policy.model.to("cpu")

    def logprobs(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the log-probabilities of the trained tokens, one [N] tensor per micro-batch, in main memory."""
        if self._offload:
            self._policy.model.to(self._device)
        try:
            with torch.no_grad():
                return [self._policy.forward(batch).logprobs.cpu() for batch in batches]
        finally:
            if self._offload:
                self._policy.model.to("cpu")


def reference_path(config: KLConfig, model: ModelConfig) -> Path:
    """Return the directory of the reference: the model that the run began with, or the one that is named.

    Raises:
        ConfigError: There is no such model, or it has another tokenizer than the trained one.
    """
    if not isinstance(config.reference, Path):
        return model.path
    found = config.reference
    if not (found / "config.json").is_file():
        what = "no config.json is in it" if found.is_dir() else "there is no such folder"
        raise ConfigError(f"{KEY} is {found}: {what}: name the directory of a Hugging Face model, or initial")
    mine, theirs = _vocabulary(model.path), _vocabulary(found)
    if mine is not None and theirs is not None and mine != theirs:
        raise ConfigError(
            f"{KEY} is {found}, whose tokenizer.json has another vocabulary than that of {model.path}: it would score "
            "other words; name a model with the same tokenizer"
        )
    return found


def open_reference(config: KLConfig, model: ModelConfig) -> Reference:
    """Load the reference of a run; also of a resumed one it is what the configuration names, never a checkpoint.

    Args:
        config: Which one.
        model: The trained model's section: device and precision are those of the policy.

    Raises:
        ConfigError: There is no such model, or it has another tokenizer.
        TrainError: It cannot be loaded, or cannot score packed rows.
    """
    policy = load_model(
        reference_path(config, model), device=pick_device(model.device), compute_dtype=model.compute_dtype
    )
    return FrozenReference(policy, offload=config.offload)


def _vocabulary(directory: Path) -> object:
    """Return what a tokenizer's ids stand for, or None where no tokenizer.json says it."""
    file = directory / "tokenizer.json"
    try:
        record = orjson.loads(file.read_bytes())
        added = {each["content"]: each["id"] for each in record.get("added_tokens", ())}
        return record["model"]["vocab"], added
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return None
