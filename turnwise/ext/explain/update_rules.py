"""Rules about updates: the gap between trainer and server, entropy, clipping, divergence, tokens without room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from turnwise.ext.explain.evidence import RunEvidence
from turnwise.ext.explain.findings import Finding, Level, bound

_LEAST_MARK: Final = 4


def find_gap(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield the gap between trainer and server, by turn and by line of the template."""
    gap = evidence.curves.late("gap/mean") or 0.0
    if gap < bound("most_gap") or (evidence.curves.late("lag/max") or 0.0) > 0:
        return
    by_turn = sorted(evidence.gaps.items(), key=lambda entry: -entry[1].mean)[:3]
    token, line = "", ""
    if evidence.largest_gaps:
        worst = max(evidence.largest_gaps, key=lambda gap: gap["gap"])
        preceding, text = str(worst.get("before", "")), str(worst.get("text", worst["token"]))
        token = (
            f"the largest is {worst['gap']:.3g} nats at {text!r} after {preceding!r}, turn {worst['turn'] + 1} of "
            f"trajectory {worst['trajectory']}"
        )
        line = _template_line(evidence, [text.strip(), *reversed(preceding.split())])
    yield Finding.of(
        "gap",
        Level.PROBLEM,
        gap,
        f"trainer and server disagree by {gap:.2g} nats a token with equal weights",
        ", ".join(f"turn {turn + 1}: {turn_gap.mean:.2g} nats, {turn_gap.tokens} tokens" for turn, turn_gap in by_turn),
        token,
        line,
    )


def _template_line(evidence: RunEvidence, words: list[str]) -> str:
    """Return the line of the template that writes the words around a token; empty where none does."""
    marks = [word for word in words if len(word) >= _LEAST_MARK][:2]
    for number, line in enumerate(evidence.prompts.template, 1):
        if any(mark in line for mark in marks):
            return f"line {number} of the chat template writes the text there: {line.strip()[:80]}"
    return ""


def find_entropy(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield a policy that no longer explores although its reward is not at its best."""
    curves = evidence.curves
    early, late, reward = curves.early("train/entropy"), curves.late("train/entropy"), curves.late("reward/mean")
    if early is None or late is None or reward is None:
        return
    low, high = evidence.reward_range
    is_solved = high > low and reward >= high - bound("warning_share") * (high - low)
    if late <= max(bound("least_entropy"), bound("entropy_left") * early):
        yield Finding.of(
            "entropy_collapse",
            Level.NOTE if is_solved else Level.WARNING,
            0.0 if is_solved else 1 - (curves.late("reward/informative") or 0.0),
            f"the policy hardly explores: its entropy went from {early:.2g} to {late:.2g} nats",
            f"{curves.trend('reward/mean')}, of {high:.3g} at most",
        )


_SHARES: Final = {
    "clipped": "train/clip_fraction",
    "divergence": "train/clip_fraction",
    "cut": "dropped/cut_tokens",
    "failed": "dropped/failed_tokens",
    "correction": "correction/rejected",
    "not_finite": "train/non_finite_updates",
    "short": "",
    "empty": "",
    "unforked": "",
}
"""Warnings of a run that no other rule explains, and the metric of what each loses."""


def find_warned(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield what the run itself warned of, again and again or at last: updates, rows, errors."""
    curves = evidence.curves
    for name, steps in evidence.warnings.items():
        if name in _SHARES and (len(steps) > 1 or max(steps) >= curves.last_steps[0]):
            lost = curves.mean(_SHARES[name]) or 0.0
            if _SHARES[name].startswith("dropped/"):
                lost /= max(1.0, lost + (curves.mean("batch/trained_tokens") or 0.0))
            listing = ", ".join(map(str, steps))
            yield Finding.of(
                "warned", Level.WARNING, lost, f"{name}: {steps[max(steps)]}", f"it warned of it at step {listing}"
            )


RULES = (find_gap, find_entropy, find_warned)
