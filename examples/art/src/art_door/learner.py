"""The learner of a run whose program chooses the learning rate of each step."""

from __future__ import annotations

from turnwise.trainer.config.policy import OptimConfig
from turnwise.trainer.learn.torch_learner import TorchLearner


class StepRateLearner(TorchLearner):
    """A learner whose learning rate may change with each step."""

    def configure(self, optim: OptimConfig) -> None:
        """Have AdamW update by other settings from the next step on."""
        self._optimizers.configure(optim.lr, optim.betas, optim.eps, optim.weight_decay)
