r"""Hooks that end a run whose reward has stopped rising.

    hooks: [hooks.py:Plateau]
    custom: {plateau: {patience: 20, least: 0.01}}

What they have seen is in ``plateau.json`` of the run, so that a resumed run goes on counting.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

import turnwise
from turnwise.config import load_config
from turnwise.trainer.run.hooks import register_hooks


class Settings(BaseModel):
    """``custom.plateau``.

    Attributes:
        metric: The metric that should rise.
        patience: Steps without a rise after which the run ends.
        least: How far above the best value so far counts as a rise.
    """

    model_config = ConfigDict(extra="forbid")

    metric: str = "reward/mean"
    patience: Annotated[int, Field(ge=1)] = 20
    least: Annotated[float, Field(ge=0)] = 0.0


class Seen(BaseModel):
    """The best value of each step's metric so far: that value by the step in which it was reached."""

    best: dict[int, float] = {}


@register_hooks("plateau")
class Plateau(turnwise.Hooks):
    """Ends the run after ``patience`` steps without a rise; logs their number as ``plateau/steps``."""

    def on_init_end(self) -> None:
        self.settings = load_config(Settings, defaults=self.config.custom.get("plateau", {}))
        self.file = Path(self.config.runs) / self.config.name / "plateau.json"
        seen = Seen.model_validate_json(self.file.read_text()) if self.file.is_file() else Seen()
        # Steps after the checkpoint are taken again.
        self.best = {step: value for step, value in seen.best.items() if step <= self.global_steps}

    def on_step_end(self) -> None:
        value = self.metrics.get(self.settings.metric)
        if value is not None and (not self.best or value > max(self.best.values()) + self.settings.least):
            self.best[self.global_steps] = value
            self.file.write_text(json.dumps({"best": self.best}))
        waited = self.global_steps - max(self.best, default=0)
        self.metrics["plateau/steps"] = float(waited)
        if waited >= self.settings.patience:
            self.stop(f"{self.settings.metric} has not risen for {waited} steps")
