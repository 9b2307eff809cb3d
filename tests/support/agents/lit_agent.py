"""An agent as Agent-Lightning's users write it."""

from __future__ import annotations

from typing import Any

from turnwise.ext.frameworks.compat.lightning import LLM, LitAgent, Rollout


class Silent(LitAgent[dict[str, Any]]):
    """Never asks the model; what it is worth depends on the attempt."""

    async def rollout_async(self, task: dict[str, Any], resources: dict[str, LLM], rollout: Rollout) -> float:
        """Return half a point."""
        return 0.5
