"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from turnwise.errors import MissingExtraError
from turnwise.trainer.observe.loggers.core import LoggedRun, Logger


class WandbLogger(Logger):
    """Logs to a project of Weights & Biases; offline, to the run's directory, for ``wandb sync``.

    Args:
        run: What is logged.
        project: The project.
        entity: The team or user; None is the account's own.
        mode: None is what ``WANDB_MODE`` says, else online.
        group: Groups runs in the workspace.
        tags: Tags of the run.
    """

    def __init__(
        self,
        run: LoggedRun,
        *,
        project: str = "turnwise",
        entity: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
    ) -> None:
        wandb = _package()
        self._run: Any = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            group=group,
            tags=tags,
            name=run.name,
            id=run.id,
            # The same run goes on, whichever process logs.
            resume="allow",
            dir=str(run.directory),
            config=dict(run.config),
            settings=wandb.Settings(console="off"),
        )
        # wandb's own step only grows; a resumed run logs some of its steps again.
        self._run.define_metric("*", step_metric="step")

    @classmethod
    def check(cls) -> None:
        """See that wandb is installed. Raises MissingExtraError."""
        _package()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        """Finish the run there."""
        self._run.finish()


def _package() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("wandb", "wandb", "the logger wandb") from error
    return wandb
