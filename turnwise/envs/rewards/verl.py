"""Reward functions written for verl, unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from turnwise.envs.rewards.core import RewardFunction
from turnwise.envs.rewards.loading import describe, load_function
from turnwise.errors import EnvError, shown


class VerlScore(RewardFunction):
    """Calls ``compute_score(data_source, solution_str, ground_truth, extra_info)``, plain or async.

    It may return a number, or a dict whose ``score`` is the value; its other numbers become metrics, and what else it
    holds is for verl's logs and is not read.
    """

    def __init__(self, compute_score: Callable[..., Any] | str, **arguments: Any) -> None:
        """Take the function.

        Args:
            compute_score: The function, or ``pkg.module:function``.
            **arguments: Further keyword arguments of every call.

        Raises:
            ConfigError: It cannot be loaded.
        """
        self._function = load_function(compute_score, arguments, "verl: compute_score")

    def __call__(self, text: str, data: Mapping[str, Any]) -> Any:
        """Call it with verl's columns: ``data_source``, ``extra_info``, and ``ground_truth`` or ``reward_model``'s.

        Raises:
            EnvError: The task has no ground truth, or the function returned a dict without ``score``.
        """
        model = data.get("reward_model")
        truth = data.get("ground_truth", model.get("ground_truth") if isinstance(model, Mapping) else None)
        if truth is None:
            raise EnvError(
                "verl: task.data has neither 'ground_truth' nor 'reward_model' with 'ground_truth'; it has "
                f"{', '.join(map(repr, data)) or 'no entries'}"
            )
        result = self._function(
            data_source=data.get("data_source"),
            solution_str=text,
            ground_truth=truth,
            extra_info=dict(data.get("extra_info") or {}),
        )
        return self._awaited(result) if inspect.isawaitable(result) else self._read(result)

    async def _awaited(self, result: Any) -> Any:
        return self._read(await result)

    def _read(self, result: Any) -> Any:
        if not isinstance(result, Mapping):
            return result
        if "score" not in result:
            raise EnvError(f"verl: {describe(self._function)} returned {shown(dict(result))}: the dict has no 'score'")
        numbers = {str(key): value for key, value in result.items() if isinstance(value, (bool, int, float))}
        return result["score"], {key: float(value) for key, value in numbers.items() if key != "score"}
