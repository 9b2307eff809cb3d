r"""Reward functions for answers that are numbers: partial credit for being close, and some for being brief.

scorer:
  close: {function: reward.py:closeness}
  brief: {function: reward.py:brevity, weight: 0.1, arguments: {limit: 40}}
"""

from __future__ import annotations

import re

from turnwise.envs.rewards import register_reward

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@register_reward("closeness")
def closeness(text: str, answer: str) -> tuple[float, dict[str, float]]:
    """Return ``1 / (1 + |number - answer| / max(1, |answer|))`` of the last number in the text, 0 without one."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return 0.0, {"answered": 0.0}
    wanted = float(answer)
    return 1.0 / (1.0 + abs(float(numbers[-1]) - wanted) / max(1.0, abs(wanted))), {"answered": 1.0}


@register_reward("brevity")
def brevity(text: str, limit: int = 200) -> float:
    """Return how much of ``limit`` characters was left, from 0 to 1; nothing for an empty text."""
    return max(0.0, 1.0 - len(text) / limit) if text else 0.0
