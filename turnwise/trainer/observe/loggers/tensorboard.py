"""Event files for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.errors import MissingExtraError
from turnwise.trainer.observe.loggers.core import LoggedRun, Logger


class TensorBoardLogger(Logger):
    """Writes to a folder: ``tensorboard --logdir runs`` shows all runs below it.

    Args:
        run: What is logged.
        directory: Where to; by default ``tensorboard`` in the run's directory.
    """

    def __init__(self, run: LoggedRun, *, directory: str | None = None) -> None:
        folder = run.directory / "tensorboard" if directory is None else Path(directory)
        # What an earlier process logged of later steps is hidden: these are logged again.
        self._writer = _writer()(log_dir=str(folder), purge_step=run.step + 1 if run.step else None)
        if not run.step:
            rows = "".join(f"| {key} | {value} |\n" for key, value in run.settings().items())
            self._writer.add_text("config", f"| key | value |\n|---|---|\n{rows}", 0)

    @classmethod
    def check(cls) -> None:
        """See that tensorboard is installed. Raises MissingExtraError."""
        _writer()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tensorboard", "tensorboard", "the logger tensorboard") from error
    return SummaryWriter
