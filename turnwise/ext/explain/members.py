"""What the findings need of trajectories: one small record of each, and counts over all of them."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from turnwise.agents.roles import role_of
from turnwise.trajectory import Segment, Trajectory
from turnwise.types import StopReason, text_of

LIMITS: Final = (StopReason.MAX_TOKENS, StopReason.MAX_TURNS, StopReason.CONTEXT_OVERFLOW, StopReason.TIMEOUT)
"""Stop reasons of episodes that a limit of the configuration cut off."""
TURN_LIMIT: Final = "max_tokens_per_turn"
"""What cut an episode off whose last turn ended at the limit of a turn."""
FORMAT_ERRORS: Final = ("invalid_json", "invalid_arguments", "unusable_call", "unknown_tool")
"""Error words of calls that no tool ran."""
_MOST_TEXT: Final = 300
_CALL_MARKS: Final = ("<tool_call", "<|tool_call", "[TOOL_CALLS]", "<function=", '"arguments"', '"parameters"')


@dataclass(slots=True)
class Member:
    """One trajectory of the trained policy.

    Attributes:
        group: Key of the group in which it is compared.
        step: The train step that took it; None where none did.
        lag: Versions between the weights that the step trained and the oldest that sampled the trajectory.
        cut: The limit that ended it, or an empty text.
        refused: Calls that could not be read as a call of a tool, those cut off at a limit left out.
        answer: The end of its last message.
        last_result: The beginning of the last tool result.
        nll: Sum of the negative log-probabilities that the server reported.
        digest: Checksum of all sampled ids.
    """

    id: str
    task: str
    group: str
    step: int | None
    lag: int
    reward: float
    tokens: int
    turns: int
    calls: int
    errors: int
    refused: int
    cut: str
    answer: str
    last_result: str
    answer_tokens: int
    longest_turn: int
    nll: float
    digest: int
    temperature: float | None

    @property
    def is_flawed(self) -> bool:
        """Whether something went wrong in it that a reward should not pay for."""
        return bool(self.errors or self.refused or self.cut or not self.answer)


@dataclass(slots=True)
class Counts:
    """Counts over all trajectories.

    Attributes:
        calls: Calls by tool, and ``failures`` those of them that were answered by an error.
        messages: Error messages by tool, of those calls.
        refusals: Messages of calls that were refused before a tool ran.
        call_texts: Final messages that look like a call and were not read as one; ``call_text`` shows one.
        cut_turns: Turn numbers, from 1, at which a limit ended an episode.
        longest: What the longest message of such an episode was.
        forks: Forks by reason.
        prompt_tokens: Ids that were not sampled, and ``forked_tokens`` those of them on forks: encoded once more.
    """

    calls: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    messages: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    refusals: Counter[str] = field(default_factory=Counter)
    call_texts: int = 0
    call_text: str = ""
    cut_turns: Counter[int] = field(default_factory=Counter)
    longest: Counter[str] = field(default_factory=Counter)
    forks: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    forked_tokens: int = 0
    rewritten: int = 0
    failed_tokens: int = 0


def read_member(trajectory: Trajectory, step: int | None, counts: Counts) -> Member:
    """Return the record of a trajectory, and add to the counts."""
    sampled = [segment for segment in trajectory.segments if segment.sampled]
    metrics = trajectory.metrics
    cut = _limit(trajectory, sampled)
    if cut:
        counts.cut_turns[len(sampled)] += 1
        counts.longest[_longest_message(trajectory, sampled[-1:] if cut == TURN_LIMIT else trajectory.segments)] += 1
    _count_calls(metrics, counts)
    last_result = _count_contexts(trajectory, counts)
    refused = int(sum(metrics.get(f"tool_errors/{word}", 0) for word in FORMAT_ERRORS))
    if cut == TURN_LIMIT and refused:
        # The end of the call is missing because of the limit.
        refused -= 1
    final = sampled[-1].messages[-1] if sampled and sampled[-1].messages else {}
    answer = "" if final.get("tool_calls") else text_of(final).strip()
    if answer and not cut and any(mark in answer for mark in _CALL_MARKS):
        counts.call_texts += 1
        counts.call_text = counts.call_text or answer[:_MOST_TEXT]
    versions = [version for segment in sampled for version, _, _ in segment.weight_versions]
    oldest = min(versions, default=0)
    step = oldest + 1 if step is None and versions else step
    digest = 0
    for segment in sampled:
        digest = zlib.crc32(segment.token_ids.tobytes(), digest)
    return Member(
        id=trajectory.id, task=trajectory.task_id, group=f"{trajectory.group_id} {role_of(trajectory.agent)}",
        step=step, lag=0 if step is None else max(0, step - 1 - oldest), reward=trajectory.reward,
        tokens=sum(len(segment.token_ids) for segment in sampled), turns=len(sampled),
        calls=int(metrics.get("tool_calls", 0)), errors=int(metrics.get("tool_errors", 0)), refused=max(0, refused),
        cut=cut, answer=answer[-_MOST_TEXT:], last_result=last_result,
        answer_tokens=len(sampled[-1].token_ids) if sampled else 0,
        longest_turn=max((len(segment.token_ids) for segment in sampled), default=0),
        nll=-float(sum(segment.logprobs.sum() for segment in sampled if segment.logprobs is not None)),
        digest=digest, temperature=None if metrics.get("temperatures", 1.0) > 1 else metrics.get("temperature"),
    )  # fmt: skip


def _limit(trajectory: Trajectory, sampled: list[Segment]) -> str:
    if trajectory.stop_reason in LIMITS:
        is_turn = trajectory.stop_reason == StopReason.MAX_TOKENS and bool(sampled)
        return TURN_LIMIT if is_turn and sampled[-1].finish_reason == "length" else str(trajectory.stop_reason)
    return TURN_LIMIT if sampled and sampled[-1].finish_reason == "length" else ""


def _longest_message(trajectory: Trajectory, segments: Sequence[Segment]) -> str:
    longest = max(segments, key=lambda segment: len(segment.token_ids), default=None)
    if longest is None:
        return "no message"
    if longest.sampled:
        number = sum(segment.sampled for segment in trajectory.segments[: longest.index + 1])
        return f"the model's message of turn {number}"
    message = longest.messages[-1] if longest.messages else {}
    role = message.get("role", "context")
    return f"the result of {message.get('name') or 'a tool'}" if role == "tool" else f"the {role} message"


def _count_calls(metrics: Mapping[str, float], counts: Counts) -> None:
    for name, value in metrics.items():
        kind, _, tool = name.partition("/")
        if tool and kind == "tool_calls":
            counts.calls[tool] += int(value)
        elif tool and kind == "tool_failures":
            counts.failures[tool] += int(value)
        elif name == "rewritten_echoes":
            counts.rewritten += int(value)


def _count_contexts(trajectory: Trajectory, counts: Counts) -> str:
    """Count the messages of tools and the forks of a trajectory; return its last tool result."""
    last_result = ""
    for segment in trajectory.segments:
        if segment.fork is not None:
            counts.forks[segment.fork] += 1
        if segment.sampled:
            continue
        counts.prompt_tokens += len(segment.token_ids)
        counts.forked_tokens += len(segment.token_ids) if segment.fork is not None else 0
        for message in segment.messages:
            if message.get("role") != "tool":
                continue
            text = text_of(message)
            last_result = text[:_MOST_TEXT]
            if text.startswith('{"error"'):
                _count_error(str(message.get("name") or ""), text, counts)
    return last_result.strip()


def _count_error(tool: str, text: str, counts: Counts) -> None:
    try:
        error: Any = orjson.loads(text)["error"]
        word, description = str(error["type"]), str(error["message"])[:_MOST_TEXT]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        word, description = "tool_error", text[:_MOST_TEXT]
    if word in FORMAT_ERRORS:
        counts.refusals[f"{word}: {description}"] += 1
    else:
        counts.messages[tool][description] += 1
