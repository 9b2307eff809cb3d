"""Rules about the setup of a run: the size of steps, the weights that sample, the temperature, what prompts show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from turnwise.ext.explain.evidence import RunEvidence
from turnwise.ext.explain.findings import Finding, Level, bound, percent
from turnwise.ext.explain.members import Member


def find_step_size(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield a step size that changes nothing, or that turns the weights over."""
    curves = evidence.curves
    ratios = curves.all("train/update_ratio")
    if not ratios or max(curves.all("train/grad_norm"), default=0.0) <= 0:
        return
    typical = statistics.median(ratios)
    rates = ", ".join(f"{name} {max(curves.all(name)):.3g} at most" for name in curves.names("lr/"))
    seen = f"train/update_ratio is {typical:.2g} in the median, {max(ratios):.2g} at most ({rates})"
    if typical < bound("least_update"):
        still = sum(value == 0 for value in curves.all("sync/bytes"))
        yield Finding.of(
            "step_too_small",
            Level.PROBLEM,
            1.0,
            f"the weights do not move: an optimizer step changes them by {typical:.2g} of their norm",
            seen,
            f"in {still} of {len(curves.steps)} steps no changed weights were sent to servers",
        )
    early, late = curves.early("reward/mean") or 0.0, curves.late("reward/mean") or 0.0
    low, high = evidence.reward_range
    fell = early - late > bound("reward_rise") * (high - low)
    if typical > bound("most_update") or (typical > bound("harmful_update") and fell):
        yield Finding.of(
            "step_too_large",
            Level.PROBLEM,
            1.0,
            f"steps are too large: each changes the weights by {percent(typical)} of their norm",
            seen,
            curves.trend("reward/mean"),
            curves.trend("train/entropy"),
        )


def find_hidden_tools(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield tools that the prompt does not name, by its tokens."""
    prompts = evidence.prompts
    for prompt in prompts.first.values() if prompts.model is not None else ():
        text = prompts.text(prompt)
        missing = [name for name in prompt.tools if name not in text]
        if missing:
            lines = [str(number) for number, line in enumerate(prompts.template, 1) if "tools" in line]
            yield Finding.of(
                "hidden_tools",
                Level.PROBLEM,
                len(missing) / len(prompt.tools),
                f"the prompt does not name {len(missing)} of {len(prompt.tools)} tools: the model cannot know of them",
                f"trajectory {prompt.trajectory}: the {len(prompt.token_ids)} tokens before turn 1 lack "
                f"{', '.join(missing)}",
                f"lines of the chat template that read tools: {', '.join(lines) or 'none'} of {len(prompts.template)}",
            )
            return
    if prompts.unread:
        evidence.unread.append(f"the model's prompts: {prompts.unread}")


def find_staleness(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield tokens older than the configuration allows, and servers whose weights are not those that they name."""
    curves = evidence.curves
    ages = curves.all("lag/max")
    configured = evidence.setting("replay.max_staleness")
    is_bounded = configured is not None or evidence.setting("mode") == "sync"
    allowed = float(configured or 0) if is_bounded else bound("most_lag")
    late = curves.late("lag/max") or 0.0
    if late > allowed:
        yield Finding.of(
            "stale",
            Level.PROBLEM,
            evidence.share(lambda member: member.lag > allowed),
            f"what is trained was sampled by weights up to {late:.3g} steps older; {allowed:g} are allowed",
            curves.trend("lag/mean"),
            curves.trend("replay/staleness_max"),
        )
    gaps = curves.all("gap/mean") or [0.0]
    if max(ages, default=0.0) <= 0 and gaps[0] < bound("equal_gap") and _late_gap(evidence) > bound("most_gap"):
        steps = ", ".join(f"{gap:.2g}" for gap in gaps[:4])
        yield Finding.of(
            "stale",
            Level.PROBLEM,
            1.0,
            "servers sample with older weights than they name: trainer and server agreed at first and drift apart",
            f"gap/mean in nats by step: {steps} ... {_late_gap(evidence):.2g}, while each token is named as fresh",
        )


def _late_gap(evidence: RunEvidence) -> float:
    return evidence.curves.late("gap/mean") or 0.0


def find_temperature(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield another temperature than the trainer's: as recorded, or as the sampled tokens show."""
    configured = evidence.setting("rollout.temperature")
    expected = 1.0 if configured is None else float(configured)
    recorded = {member.temperature for member in evidence.members if member.temperature is not None} - {expected}
    if recorded:
        yield Finding.of(
            "temperature",
            Level.PROBLEM,
            evidence.share(lambda member: member.temperature in recorded),
            f"tokens are sampled at temperature {min(recorded):g}, and the loss assumes {expected:g}",
        )
    elif difference := _sharpness(evidence) or _surprise(evidence):
        yield Finding.of(
            "temperature",
            Level.PROBLEM,
            1.0,
            "servers sample at another temperature than the trainer assumes, or from another distribution",
            difference,
            f"rollout.temperature is {expected:g}; {evidence.curves.trend('gap/mean')}",
        )


def _sharpness(evidence: RunEvidence) -> str:
    """Return how log-probabilities of both sides depend on each other where they differ most; empty at a slope of 1.

    Those at temperature t are 1 / t times those at 1, up to a constant of the position.
    """
    pairs = [(token["trainer"], token["rollout"]) for token in evidence.largest_gaps]
    if len(pairs) < bound("least_count") or max(evidence.curves.all("lag/max"), default=0.0) > 0:
        return ""
    trainer, rollout = zip(*pairs, strict=True)
    if _late_gap(evidence) < bound("most_gap") or min(max(trainer) - min(trainer), max(rollout) - min(rollout)) <= 0:
        return ""
    slope, correlation = statistics.linear_regression(trainer, rollout).slope, statistics.correlation(trainer, rollout)
    if correlation < bound("least_fit") or abs(slope - 1) < bound("distribution"):
        return ""
    return (
        f"at the {len(pairs)} tokens that differ most the server's log-probabilities are {slope:.2f} times the "
        f"trainer's (correlation {correlation:.2f}): the server's temperature is {1 / slope:.2g} of the trainer's"
    )


def _surprise(evidence: RunEvidence) -> str:
    """Return the mean surprise of sampled tokens where it is not the entropy of the trainer's distribution."""
    curves = evidence.curves
    weights, entropies = curves.at("train/tokens"), curves.at("train/entropy")
    trained = sum(weights.get(step, 0.0) for step in entropies)
    members = _trained_members(evidence)
    is_truncated = (curves.mean("sampling/truncated") or 0.0) > 0
    # Old weights explain a gap that grows.
    drifts = _late_gap(evidence) > bound("most_gap") > (curves.all("gap/mean") or [0.0])[0]
    is_old = drifts or max(curves.all("lag/max"), default=0.0) > 0
    # Groups with a difference are chosen by what was sampled: where they are few, by rare tokens that cost more.
    is_biased = len(members) < bound("problem_share") * len(evidence.members)
    if not trained or len(members) < bound("least_count") or is_truncated or is_old or is_biased:
        return ""
    tokens = sum(member.tokens for member in members)
    entropy = sum(entropy * weights.get(step, 0.0) for step, entropy in entropies.items()) / trained
    surprise = sum(member.nll for member in members) / tokens
    error = math.sqrt(sum((member.nll - surprise * member.tokens) ** 2 for member in members)) / tokens
    if abs(surprise - entropy) < max(bound("distribution") * entropy, bound("standard_errors") * error):
        return ""
    return (
        f"by the server's numbers a sampled token costs {surprise:.3g} nats (error {error:.2g}), and the entropy of "
        f"the trainer's distribution there is {entropy:.3g}: of one distribution both agree"
    )


def _trained_members(evidence: RunEvidence) -> list[Member]:
    """Return the members whose tokens are in the means of ``train/``: not dead groups, unless another term trains."""
    keys = ("algorithm.kl", "algorithm.entropy_coef", f"{evidence.policy}.critic")
    if any(map(evidence.setting, keys)) and not evidence.setting("algorithm.drop_zero_variance"):
        return evidence.members
    groups = [members for members in evidence.groups.values() if len({member.reward for member in members}) > 1]
    return [member for members in groups for member in members]


def find_truncation(evidence: RunEvidence) -> Iterator[Finding]:
    """Yield sampling from a truncated distribution."""
    share, mass = evidence.curves.mean("sampling/truncated") or 0.0, evidence.curves.mean("sampling/cut_mass") or 0.0
    if share > 0:
        names = ("top_p", "top_k", "min_p")
        settings = ", ".join(f"{name} {evidence.setting(f'rollout.{name}')}" for name in names)
        yield Finding.of(
            "truncated_sampling",
            Level.WARNING if mass * share > bound("cut_mass") else Level.NOTE,
            share * mass,
            f"{percent(share)} of tokens are sampled from a truncated distribution, which the loss does not know",
            f"sampling/cut_mass: {mass:.2g} of the probability was cut off, on average of these tokens ({settings})",
        )


RULES = (find_step_size, find_hidden_tools, find_staleness, find_temperature, find_truncation)
