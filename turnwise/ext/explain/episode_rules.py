"""Rules about episodes: limits that cut, tools that fail, calls that were refused, drift, repeated seeds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from turnwise.ext.explain.evidence import RunEvidence
from turnwise.ext.explain.findings import Finding, Level, bound, counted, level_of, listed, percent
from turnwise.ext.explain.members import TURN_LIMIT, Member
from turnwise.tools.response import UNKNOWN_TOOL

_LIMIT_KEYS: Final = {
    TURN_LIMIT: ("rollout.max_tokens_per_turn",),
    "max_tokens": ("rollout.max_total_tokens",),
    "max_turns": ("rollout.max_turns",),
    "context_overflow": ("rollout.context_length", "inference.max_context"),
    "timeout": ("rollout.episode_timeout",),
}


def _level(evidence: RunEvidence, share: float, has: Callable[[Member], bool]) -> Level:
    """Return the level of a property of members: a note where it costs no reward, or is being unlearned."""
    early, late = evidence.share(has, evidence.early), evidence.share(has, evidence.late)
    is_falling = late < min(bound("problem_share"), bound("falling") * early)
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for member in evidence.members:
        rewards[has(member)].append(member.reward)
    unflawed, minimum = rewards[False], max(bound("least_count"), len(evidence.members) / 10)
    is_harmless = len(unflawed) >= minimum and statistics.fmean(rewards[True]) >= statistics.fmean(unflawed)
    return Level.NOTE if is_falling or is_harmless else level_of(max(share, late))


def find_limits(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield the limit that ends most episodes."""
    ends = Counter(member.cut for member in evidence.members if member.cut)
    share = evidence.share(lambda member: bool(member.cut))
    if ends.total() < bound("least_count") or share < bound("warning_share") / 2:
        return
    limit, count = ends.most_common(1)[0]
    keys = _LIMIT_KEYS[limit]
    level = _level(evidence, share, lambda member: bool(member.cut))
    nearness = _nearness(evidence, limit, evidence.setting(keys[0]))
    turns = [(f"turn {turn}", episodes) for turn, episodes in evidence.counts.cut_turns.most_common()]
    yield Finding.of(
        "limits",
        level if nearness >= bound("near_limit") else Level.NOTE,
        share,
        f"{percent(share)} of the sampled tokens are in episodes that a limit cut off, most often {limit}",
        f"{count} episodes ended at {limit} ({', '.join(f'{key} {evidence.setting(key)}' for key in keys)})",
        f"a tenth of what was not cut off came to {percent(nearness)} of the limit, or nearer",
        f"at which turn: {', '.join(counted(turns))}",
        f"what grew: {', '.join(counted(evidence.counts.longest.most_common()))}",
        keys=keys,
    )


_SIZES: Final[Mapping[str, Callable[[Member], int]]] = {
    TURN_LIMIT: lambda member: member.longest_turn,
    "max_tokens": lambda member: member.tokens,
    "max_turns": lambda member: member.turns,
}


def _nearness(evidence: RunEvidence, limit: str, largest: float | None) -> float:
    """Return how near to a limit a tenth of the episodes came that were not cut off; 1 where that is unknown."""
    size = _SIZES.get(limit)
    sizes = sorted(size(member) for member in evidence.members if not member.cut) if size else []
    if not largest or len(sizes) < bound("least_count"):
        return 1.0
    return sizes[-1 - len(sizes) // 10] / largest


def find_failing_tools(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield tools of which every call fails; without any, errors of tools by message."""
    counts = evidence.counts
    messages = Counter(
        {
            f"{tool or 'a tool'}: {text}": count
            for tool, texts in counts.messages.items()
            for text, count in texts.items()
        }
    )
    broken = [tool for tool, calls in counts.calls.items() if _is_broken(evidence, tool, calls)]
    calls, failures = counts.calls.total(), counts.failures.total()
    if broken:
        share = evidence.share(lambda member: member.errors > 0)
        yield Finding.of(
            "broken_tool",
            Level.PROBLEM if share > bound("warning_share") / 2 else Level.WARNING,
            share,
            f"the tool {listed(broken)} always fails",
            *(f"{tool}: {counts.failures[tool]} of {counts.calls[tool]} calls failed" for tool in broken[:3]),
            *(text for tool in broken[:2] for text in counted(counts.messages[tool].most_common(), 2)),
        )
    elif calls >= bound("least_count") and messages.total() >= bound("warning_share") * calls:
        share = evidence.share(lambda member: member.errors > member.refused)
        yield Finding.of(
            "tool_errors",
            min(Level.WARNING, _level(evidence, share, lambda member: member.errors > 0)),
            share,
            f"{percent(failures / calls)} of tool calls were answered by an error",
            *counted(messages.most_common()),
        )


def _is_broken(evidence: RunEvidence, tool: str, calls: int) -> bool:
    """Whether no call of a tool succeeds, also where the tool itself answered."""
    counts = evidence.counts
    ran = counts.messages[tool].total() if counts.refusals else counts.failures[tool]
    is_failing = counts.failures[tool] >= bound("always_fails") * calls
    return tool != UNKNOWN_TOOL and is_failing and ran >= bound("least_count")


def find_refused_calls(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield calls that the chat format refused, and texts that look like calls."""
    counts = evidence.counts
    texts = counts.call_texts / max(1, len(evidence.members))
    if texts > bound("warning_share"):
        yield Finding.of(
            "unread_calls",
            level_of(texts),
            texts,
            f"{percent(texts)} of final messages look like a call and were read as text",
            repr(counts.call_text[:160]),
        )
    refused = evidence.share(lambda member: member.refused > 0)
    if refused >= bound("warning_share") and counts.refusals.total() >= bound("least_count"):
        yield Finding.of(
            "refused_calls",
            _level(evidence, refused, lambda member: member.refused > 0),
            refused,
            f"{percent(refused)} of the sampled tokens are in episodes with calls that no tool could run",
            *counted(counts.refusals.most_common()),
        )


def find_drift(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield histories that were rewritten: prompts that were encoded, and computed, once more."""
    counts = evidence.counts
    share = counts.forked_tokens / max(1, counts.prompt_tokens)
    if share >= bound("warning_share"):
        yield Finding.of(
            "forked_histories",
            min(Level.WARNING, level_of(share - bound("warning_share"))),
            share,
            f"{percent(share)} of the tokens that were not sampled were encoded again after a fork",
            *counted(counts.forks.most_common()),
            f"{counts.rewritten} turns came back rewritten by their agent",
        )


def find_copies(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield equal members that chance does not explain."""
    copied: list[Sequence[Member]] = []
    for members in evidence.groups.values():
        digests = Counter(member.digest for member in members if member.nll > bound("copies"))
        if max(digests.values(), default=0) > 1:
            copied.append(members)
    share = sum(member.tokens for members in copied for member in members) / evidence.tokens
    if len(copied) >= bound("least_count") / 3 and share >= bound("warning_share") / 2:
        yield Finding.of(
            "repeated_seeds",
            level_of(share),
            share,
            f"members of {len(copied)} groups sampled the same tokens, which chance does not explain: seeds repeat",
            *(f"group {members[0].group}, task {members[0].task}" for members in copied[:3]),
        )


RULES = (find_limits, find_failing_tools, find_refused_calls, find_drift, find_copies)
