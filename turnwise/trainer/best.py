"""Which checkpoints have the best figures.

Owns: :class:`Ratings`: the figures of a run's checkpoints in ``best.json``, and the link ``best``. Refuses: removing
checkpoints (``checkpoint.py``), and which figure counts (``checkpoint.best`` of the configuration).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import orjson

from turnwise.errors import CheckpointError
from turnwise.trainer.checkpoint_config import BestConfig

BEST = "best"
"""The link to the best checkpoint, beside the checkpoints."""

_FILE = "best.json"


class Ratings:
    """The figures of checkpoints, by step.

    ``best.json`` holds ``{"metric": ..., "steps": {"10": 0.5}}``; figures of another metric than the configured one
    are forgotten.

    Args:
        directory: Where the checkpoints lie.
        config: Which figure, and how many remain.
    """

    def __init__(self, directory: Path, config: BestConfig) -> None:
        self._directory = directory
        self._config = config
        self._steps: dict[int, float] | None = None

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        """Write down the figure of a step; none of it where there is none, whatever an earlier process found."""
        known = {**self._known()}
        value = figures.get(self._config.metric)
        if value is None or not math.isfinite(value):
            known.pop(step, None)
        else:
            known[step] = value
        if known == self._known():
            return
        record = {"metric": self._config.metric, "steps": {str(each): known[each] for each in sorted(known)}}
        draft = self._directory / f".{_FILE}.draft"
        with draft.open("wb") as file:
            file.write(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        draft.rename(self._directory / _FILE)
        self._steps = known

    def kept(self, steps: Collection[int]) -> list[int]:
        """Return which of the steps that have a checkpoint remain for their figures, the best first; of equal ones the
        newest.
        """
        known = self._known()
        sign = 1 if self._config.mode == "max" else -1
        rated = sorted((step for step in steps if step in known), key=lambda each: (sign * known[each], each))
        return rated[::-1][: self._config.keep]

    def improves(self, figures: Mapping[str, float], steps: Collection[int]) -> bool:
        """Return whether a new checkpoint with these figures would be the best."""
        value = figures.get(self._config.metric)
        if value is None or not math.isfinite(value):
            return False
        best = [self._known()[step] for step in self.kept(steps)[:1]]
        return not best or (value > best[0] if self._config.mode == "max" else value < best[0])

    def link(self, steps: Collection[int]) -> None:
        """Let ``best`` lead to the best checkpoint, from one moment to the next; remove it where there is none."""
        link = self._directory / BEST
        best = self.kept(steps)[:1]
        if not best:
            link.unlink(missing_ok=True)
            return
        target = f"step_{best[0]:06d}"
        if link.is_symlink() and os.readlink(link) == target:
            return
        draft = self._directory / f".{BEST}.draft"
        draft.unlink(missing_ok=True)
        draft.symlink_to(target)
        draft.rename(link)

    def _known(self) -> dict[int, float]:
        if self._steps is None:
            self._steps = self._read()
        return self._steps

    def _read(self) -> dict[int, float]:
        file = self._directory / _FILE
        if not file.is_file():
            return {}
        try:
            record = orjson.loads(file.read_bytes())
            if record["metric"] != self._config.metric:
                return {}
            return {int(step): float(value) for step, value in record["steps"].items()}
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{file} is malformed: {error!r}; remove it, and only later checkpoints have figures"
            ) from error
