"""Group rewards: ``f(task, trajectories)``, plain or async, gives each trajectory a number or named numbers."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from turnwise.envs.results import transcript
from turnwise.envs.rewards.judge import Question, Verdict, Verdicts, read_statement
from turnwise.errors import EnvError
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory, messages_of
from turnwise.types import Message, ToolCall, text_of

_TEMPLATE: Final = Path(__file__).with_name("comparison.jinja").read_text("utf-8")
_CRITERIA: Final = "The better answer does more of what was asked, and says less that is not so."
_SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"reasoning": {"type": "string"}, "winner": {"type": "string", "enum": ["A", "B", "tie"]}},
    "required": ["reasoning", "winner"],
    "additionalProperties": False,
}
_WINNER: Final = re.compile(r"[\"']?\bwinner\b[\"']?\s*[:=]\s*[\"']?(a|b|tie)\b", re.IGNORECASE)
_WORTH: Final = {"a": 1.0, "tie": 0.5, "b": 0.0}


def centred_ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of values in [-0.5, 0.5], with mean ranks for ties.

    Ranks sum to 0. A single value has rank 0.
    """
    if len(values) < 2:
        return [0.0] * len(values)
    ordered = sorted(values)
    positions: dict[float, tuple[int, int]] = {}
    for position, value in enumerate(ordered):
        first, _ = positions.get(value, (position, position))
        positions[value] = first, position
    return [sum(positions[value]) / 2 / (len(values) - 1) - 0.5 for value in values]


def conversation_of(trajectory: Trajectory) -> list[Message]:
    """Return the messages of a trajectory's last branch."""
    path = trajectory.path(len(trajectory.segments) - 1) if trajectory.segments else ()
    return [_message(message) for segment in path for message in messages_of(segment)]


def answer_of(trajectory: Trajectory) -> str:
    """Return the text of a trajectory's last message, or ""."""
    answers = [message for message in conversation_of(trajectory) if message["role"] == "assistant"]
    return text_of(answers[-1]) if answers else ""


def _message(record: Mapping[str, Any]) -> Message:
    calls = record.get("tool_calls")
    return cast("Message", {**record, "tool_calls": [_call(call) for call in calls]} if calls else record)


def _call(record: Mapping[str, Any]) -> ToolCall:
    function = record["function"]
    arguments = function["arguments"]
    parsed = isinstance(arguments, dict)
    return ToolCall(record["id"], function["name"], arguments if parsed else {}, "" if parsed else str(arguments))


class RankBy:
    """Centred ranks by a number of each trajectory."""

    def __init__(self, metric: str = "reward", *, least_is_best: bool = False, name: str = "rank") -> None:
        """Set the number.

        Args:
            metric: ``reward`` (the sum so far), ``answer_length`` (characters of the last message), or a metric of the
                trajectory, such as ``sampled_tokens``, ``turns`` or ``rubric/<name>``.
            least_is_best: Whether less is better.
            name: The reward's name.
        """
        self._metric, self._sign, self._name = metric, -1.0 if least_is_best else 1.0, name

    def __call__(self, task: Task, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:  # noqa: ARG002
        """Rank the trajectories."""
        ranks = centred_ranks([self._sign * self._value(trajectory) for trajectory in trajectories])
        return [{self._name: rank} for rank in ranks]

    def _value(self, trajectory: Trajectory) -> float:
        if self._metric == "reward":
            return trajectory.reward
        if self._metric == "answer_length":
            return float(len(answer_of(trajectory)))
        if self._metric not in trajectory.metrics:
            names = ", ".join(["reward", "answer_length", *sorted(trajectory.metrics)])
            raise EnvError(f"rank_by: trajectory {trajectory.id} has no metric {self._metric!r}; it has {names}")
        return float(trajectory.metrics[self._metric])


class PairwiseJudge:
    """Centred ranks by the share of pairwise comparisons won, as a chat model judges.

    Each pair is judged in both orders, against position bias. Equal answers tie without a request.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        criteria: str = _CRITERIA,
        template: str | None = None,
        template_file: str | None = None,
        name: str = "rank",
        **options: Any,
    ) -> None:
        """Configure the judge.

        Args:
            base_url: Of an OpenAI-compatible API: ``/chat/completions`` is appended.
            model: Name of the model.
            criteria: Criteria of a better answer, for the template.
            template: A jinja template that sees ``task``, ``conversation``, ``first``, ``second`` and ``criteria``; the
                verdict's ``winner`` is ``A`` (the first), ``B`` or ``tie``.
            template_file: A file with the template.
            name: The reward's name.
            **options: Key, tries, rate and cache: the fields of
                :class:`~turnwise.envs.rewards.judge.AskOptions`.
        """
        self._question = Question(template, template_file, _TEMPLATE)
        self._criteria, self._name = criteria, name
        self._verdicts = Verdicts(base_url, model, _SCHEMA, _read, options)

    async def __call__(self, task: Task, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        """Compare the answers and rank them."""
        answers = [answer_of(trajectory) for trajectory in trajectories]
        pairs = list(itertools.combinations(range(len(answers)), 2))
        outcomes = await asyncio.gather(*(self._compare(task, answers[one], answers[other]) for one, other in pairs))
        won: list[list[float]] = [[] for _ in answers]
        for (one, other), share in zip(pairs, outcomes, strict=True):
            won[one].append(share)
            won[other].append(1.0 - share)
        shares = [sum(points) / len(points) if points else 0.5 for points in won]
        return [{self._name: rank} for rank in centred_ranks([round(share, 9) for share in shares])]

    async def close(self) -> None:
        """Close this event loop's connections."""
        await self._verdicts.close()

    async def _compare(self, task: Task, one: str, other: str) -> float:
        if one.strip() == other.strip():
            return 0.5
        there, back = await asyncio.gather(self._winner(task, one, other), self._winner(task, other, one))
        return (there + 1.0 - back) / 2

    async def _winner(self, task: Task, first: str, second: str) -> float:
        values = {"task": task, "conversation": transcript(task.messages()), "criteria": self._criteria}
        question = self._question.render({**values, "first": first, "second": second})
        verdict, _ = await self._verdicts.ask(question, f"{first}\n{second}")
        return _WORTH[verdict["winner"]]


def _read(text: str, material: str) -> Verdict:
    winner = read_statement(text, "winner", _WINNER, material)
    winner = winner.strip().casefold() if isinstance(winner, str) else None
    if winner not in _WORTH:
        raise ValueError('it has no "winner" of "A", "B" or "tie"')
    return {"winner": winner}
