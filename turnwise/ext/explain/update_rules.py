"""Rules about updates: the gap between trainer and server, entropy, clipping, divergence, tokens without room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from turnwise.ext.explain.evidence import RunEvidence
from turnwise.ext.explain.findings import Finding, Level, level_of, percent
from turnwise.ext.explain.thresholds import bound

_LEAST_MARK: Final = 4


def find_gap(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield the gap between trainer and server, by turn and by line of the template."""
    gap = evidence.curves.late("gap/mean") or 0.0
    if gap < bound("most_gap") or (evidence.curves.late("lag/max") or 0.0) > 0:
        return
    by_turn = sorted(evidence.gaps.items(), key=lambda entry: -entry[1].mean)[:3]
    token, line = "", ""
    if worst := evidence.worst_gap:
        before, text = str(worst.get("before", "")), str(worst.get("text", worst["token"]))
        token = (
            f"the largest is {worst['gap']:.3g} nats at {text!r} after {before!r}, turn {worst['turn'] + 1} of "
            f"trajectory {worst['trajectory']}"
        )
        line = _template_line(evidence, [text.strip(), *reversed(before.split())])
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
    for number, line in enumerate(evidence.template.splitlines(), 1):
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


def find_divergence(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield steps that move the policy too far, and a penalty that outweighs the reward."""
    curves = evidence.curves
    clipped, kl = curves.late("train/clip_fraction") or 0.0, curves.late("train/approx_kl") or 0.0
    if clipped > bound("most_clipped") or kl > bound("most_kl"):
        yield Finding.of(
            "divergence",
            Level.WARNING,
            clipped,
            f"within a step the policy moves by {kl:.2g} nats, and {percent(clipped)} of tokens are clipped",
            f"train/ratio_max is {max(curves.all('train/ratio_max'), default=1):.3g} at most",
        )
    penalty, spread = curves.late("kl/penalty") or 0.0, curves.late("reward/std") or 0.0
    if penalty > spread > 0:
        yield Finding.of(
            "kl_penalty",
            Level.WARNING,
            penalty / (penalty + spread),
            "the KL penalty outweighs the rewards' differences",
            f"kl/penalty {penalty:.2g}, reward/std {spread:.2g}, kl/coef {curves.late('kl/coef') or 0:.2g}",
        )


def find_lost_tokens(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield tokens for which rows had no room, updates that were not finite, and tokens that a correction rejected."""
    curves = evidence.curves
    lost, trained = curves.mean("dropped/cut_tokens") or 0.0, curves.mean("batch/trained_tokens") or 0.0
    if (share := lost / max(1.0, lost + trained)) > bound("cut_rows"):
        text, shown = f"{percent(share)} of the tokens to train had no room", f"dropped/cut_tokens is {lost:.0f} a step"
        yield Finding.of("cut_rows", max(Level.WARNING, level_of(share)), share, text, shown)
    if broken := sum(curves.all("train/non_finite_updates")):
        share = broken / (broken + sum(curves.all("train/updates")))
        yield Finding.of("non_finite", level_of(share), share, f"{broken:.0f} updates had no finite gradient")
    if (share := curves.late("correction/rejected") or 0.0) > bound("warning_share"):
        text = f"algorithm.correction rejects {percent(share)} of tokens"
        yield Finding.of("rejected", level_of(share), share, text, curves.trend("correction/ess"))


RULES = (find_gap, find_entropy, find_divergence, find_lost_tokens)
