"""Trackio, a local tracker that shows its figures by Gradio."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from turnwise.errors import MissingExtraError
from turnwise.trainer.observe.loggers.core import LoggedRun, Logger


class TrackioLogger(Logger):
    """Logs to trackio's own folder (``TRACKIO_DIR``), or to a Space; ``trackio show`` shows it.

    Args:
        run: What is logged.
        project: The project.
        space_id: A Hugging Face Space to log to; None stays on this machine.
    """

    def __init__(self, run: LoggedRun, *, project: str = "turnwise", space_id: str | None = None) -> None:
        # It tells how to look at the figures; standard output belongs to results.
        with contextlib.redirect_stdout(sys.stderr):
            self._run: Any = _package().init(
                project=project,
                # Runs go on by their name.
                name=f"{run.name}-{run.id}",
                resume="allow",
                space_id=space_id,
                config=dict(run.config),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    @classmethod
    def check(cls) -> None:
        """See that trackio is installed. Raises MissingExtraError."""
        _package()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Send what is left."""
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


def _package() -> Any:
    try:
        import trackio
    except ImportError as error:
        raise MissingExtraError("trackio", "trackio", "the logger trackio") from error
    return trackio
