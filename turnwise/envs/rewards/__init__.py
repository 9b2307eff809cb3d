"""Reward functions and rubrics.

Names are loaded lazily: a rubric imports neither an HTTP client nor a judge's dependencies.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turnwise.envs.rewards.core import Part, RewardFunction, Rubric, VerlScore, as_rubric
    from turnwise.envs.rewards.groups import PairwiseJudge, RankBy, answer_of, centred_ranks, conversation_of
    from turnwise.envs.rewards.judge import Judge
    from turnwise.envs.rewards.matching import (
        ExactMatch,
        JSONSchema,
        Numeric,
        Regex,
        extract_answer,
        normalize,
        parse_number,
    )
    from turnwise.envs.rewards.model import RewardModel
    from turnwise.envs.rewards.registry import register_reward
    from turnwise.envs.rewards.symbolic import Symbolic

_HOMES = {
    "core": ("Part", "RewardFunction", "Rubric", "VerlScore", "as_rubric"),
    "groups": ("PairwiseJudge", "RankBy", "answer_of", "centred_ranks", "conversation_of"),
    "judge": ("Judge",),
    "matching": ("ExactMatch", "JSONSchema", "Numeric", "Regex", "extract_answer", "normalize", "parse_number"),
    "model": ("RewardModel",),
    "registry": ("register_reward",),
    "symbolic": ("Symbolic",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "ExactMatch",
    "JSONSchema",
    "Judge",
    "Numeric",
    "PairwiseJudge",
    "Part",
    "RankBy",
    "Regex",
    "RewardFunction",
    "RewardModel",
    "Rubric",
    "Symbolic",
    "VerlScore",
    "answer_of",
    "as_rubric",
    "centred_ranks",
    "conversation_of",
    "extract_answer",
    "normalize",
    "parse_number",
    "register_reward",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'turnwise.envs.rewards' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"turnwise.envs.rewards.{home}"), name)
    return value
