"""What a run says of each step besides its metrics: a record of the gap, and warnings.

Owns: :class:`Diagnostics`, which writes ``diagnostics.jsonl`` and decides which warnings are said. Refuses: the rules
(``warnings.py``) and the figures (``gap.py``, ``counts.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from turnwise.inference.core import Renderer
from turnwise.trainer.audit import is_float32
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.diagnostics.gap import Gaps, gap_record, gap_words
from turnwise.trainer.diagnostics.warnings import Setting, Warned, Warner, find_warnings
from turnwise.trainer.loggers.jsonl import JSONLLogger
from turnwise.trajectory import TrajectoryGroup

# Estimators that compare nobody with the other members of a group.
_NO_GROUPS: Final = frozenset(("gae", "reinforce_plus_plus", "remax"))


class Diagnostics:
    """The diagnostics of one run.

    Args:
        directory: The run's; ``diagnostics.jsonl`` in it has one JSON object a line: ``{"kind": "gap", "step": ...,
            "turns": [...], "largest": [...]}`` (docs/metrics.md).
        config: What the run was asked for.
        renderer: Reads ids.
    """

    def __init__(self, directory: Path, config: TrainConfig, renderer: Renderer) -> None:
        self._log = JSONLLogger(directory / "diagnostics.jsonl")
        self._renderer = renderer
        self._warner = Warner()
        self._compares = config.algorithm.advantage not in _NO_GROUPS
        model = config.policy.model
        self._exact = model.compute_dtype == "float32" and is_float32(model.path, config.inference.dtype)

    def step(
        self, step: int, metrics: Mapping[str, float], gaps: Gaps, groups: Sequence[TrajectoryGroup]
    ) -> list[Warned]:
        """Write what was found in a step, and return the warnings that are to be said now.

        Args:
            step: The step.
            metrics: What was logged of it.
            gaps: Where trainer and server differ.
            groups: Its trajectories.
        """
        words = ""
        if gaps.turns:
            named = {each.trajectory for each in gaps.largest}
            held = {each.id: each for group in groups for each in group.trajectories if each.id in named}
            record = gap_record(gaps, held, self._renderer)
            self._log.log({"kind": "gap", "step": step, **record})
            words = gap_words(record)
        setting = Setting(exact=self._exact, compares=self._compares, worst_gap=words)
        return self._warner.due(step, find_warnings(metrics, setting))

    def close(self) -> None:
        """Close the file."""
        self._log.close()
