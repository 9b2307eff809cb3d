"""The rollout manager of ``examples/extensions``, and two of its kind that fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turnwise.plugins import load_class_from_fqn
from turnwise.rollout import RolloutRequest
from turnwise.rollout.managers import MANAGERS

EXAMPLE = f"{Path(__file__).parents[3] / 'examples' / 'extensions' / 'rollout_manager.py'}:WholeGroups"
WholeGroups: Any = load_class_from_fqn(EXAMPLE, "rollout manager")
# Tests of a registry without names run in the same process.
MANAGERS.pop("whole_groups", None)


class Dying(WholeGroups):
    """Starts, and dies with the third group."""

    groups = 0

    async def _group(self, request: RolloutRequest) -> None:
        self.groups += 1
        if self.groups == 3:
            raise RuntimeError("the scheduler lost its cluster")
        await super()._group(request)
