"""Warnings about a step with a remedy, and the diagnostics file of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, TypeAlias

from turnwise.engine.capacity import serves_float32
from turnwise.model.core import Renderer
from turnwise.tools.response import UNKNOWN_TOOL
from turnwise.trainer.algorithms.gap import Gaps, describe_gap, gap_record
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.run_log import JSONLLogger
from turnwise.trajectory import WHY_UNFORKED, TrajectoryGroup

Metrics: TypeAlias = Mapping[str, float]

MOST_DEAD: Final = 0.8
MOST_GAP: Final = 0.05
MOST_GAP_EXACT: Final = 0.01
LEAST_ENTROPY: Final = 0.01
MOST_CLIPPED: Final = 0.3
MOST_KL: Final = 0.1
MOST_TRUNCATED: Final = 0.3
MOST_TOOL_ERRORS: Final = 0.3
MOST_FAILED: Final = 0.2
MOST_CUT: Final = 0.05
MOST_REJECTED: Final = 0.2
LEAST_ESS: Final = 0.3
# Fewer say nothing about a share.
_LEAST_GROUPS = 4
_LEAST_CALLS = 20


@dataclass(frozen=True, slots=True)
class TrainingWarning:
    """A warning.

    Attributes:
        name: Name of its rule.
        text: The finding and its remedy.
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class WarningContext:
    """The facts besides metrics that rules depend on.

    Attributes:
        exact: Whether trainer and server compute in float32, so that they differ by rounding only.
        compares: Whether advantages compare the members of a group.
        worst_gap: Description of the token with the largest gap; may be empty.
        unforked: Why an episode of ``rollout.tree`` has no branches; may be empty.
    """

    exact: bool = False
    compares: bool = True
    worst_gap: str = ""
    unforked: str = ""


def dead_groups(metrics: Metrics, setting: WarningContext) -> str | None:
    """Groups of equal rewards have no gradient."""
    groups, dead = metrics.get("batch/groups", 0.0), metrics.get("batch/dead_groups", 0.0)
    if not setting.compares or groups < _LEAST_GROUPS or dead < MOST_DEAD * groups:
        return None
    mean = metrics.get("reward/mean", 0.0)
    return (
        f"{_share(dead / groups)} of groups have equal rewards (mean reward {mean:.3g}): they have no gradient. If "
        "that is the highest reward, the tasks are learned: stop, or mix in harder ones. Else raise "
        "rollout.temperature or rollout.group_size, mix in easier tasks, or reward partial success"
    )


def nothing_trained(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """No token was trained, and no critic warm-up explains it."""
    if metrics.get("train/tokens", 1.0) > 0 or metrics.get("batch/rows", 0.0) == 0 or "critic/loss" in metrics:
        return None
    if any(value > 0 for name, value in metrics.items() if name.startswith("dropped/")):
        return "no token of this step was trained: they were dropped: dropped/* in metrics.jsonl has the counts"
    if metrics.get("correction/rejected", 0.0) >= 1.0:
        return "no token of this step was trained: the rollout correction rejected all; widen its bounds"
    return (
        "no token of this step was trained: no row has an advantage, since rewards are equal within each group. If "
        "they are the highest, stop or mix in harder tasks; else raise rollout.group_size, or reward partial success"
    )


def short(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """The batch could not be filled."""
    missing = metrics.get("replay/short", 0.0)
    if not missing:
        return None
    return (
        f"the step lacks {missing:.0f} groups: so many were dropped (replay/dropped/*) that no more were requested. "
        "Mix in tasks of other difficulty (curriculum), or raise replay.filter_groups.max_refills"
    )


def gap(metrics: Metrics, setting: WarningContext) -> str | None:
    """Trainer and server disagree on equal weights; in asynchronous modes they must."""
    if metrics.get("lag/max", 0.0) > 0:
        return None
    mean, largest = metrics.get("gap/mean", 0.0), metrics.get("gap/max", 0.0)
    far = setting.exact and largest > MOST_GAP_EXACT
    if mean <= MOST_GAP and not far:
        return None
    where = f"; {setting.worst_gap}" if setting.worst_gap else ""
    return (
        f"trainer and server disagree about sampled tokens by {mean:.3g} nats on average, {largest:.3g} at most{where}"
        ". With equal weights that is rounding: check inference.dtype, model.compute_dtype, rollout.temperature "
        "and what the server truncates; turnwise audit verifies the ids. algorithm.correction bounds the effect"
    )


def entropy(metrics: Metrics, setting: WarningContext) -> str | None:
    """Entropy has collapsed; where groups have equal rewards, that is said instead."""
    nats = metrics.get("train/entropy")
    if nats is None or nats >= LEAST_ENTROPY or dead_groups(metrics, setting) is not None:
        return None
    return (
        f"the policy's entropy is {nats:.2g} nats: it hardly explores. If the reward is not what it should "
        "be, raise algorithm.entropy_coef, rollout.temperature or algorithm.loss_options.clip_high, or lower optim.lr"
    )


def clipped(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """Most tokens of the step are clipped."""
    clip_fraction = metrics.get("train/clip_fraction", 0.0)
    if clip_fraction <= MOST_CLIPPED:
        return None
    return (
        f"{_share(clip_fraction)} of tokens are clipped: the updates of a step are too large. Lower optim.lr, "
        "algorithm.epochs or algorithm.minibatches, or widen clip_low and clip_high of algorithm.loss_options"
    )


def divergence(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """The policy diverges within a step."""
    kl = metrics.get("train/approx_kl", 0.0)
    if kl <= MOST_KL:
        return None
    return (
        f"within a step the policy moved by {kl:.3g} nats (KL to the one that sampled): lower optim.lr or "
        "optim.max_grad_norm, or take fewer algorithm.epochs and minibatches"
    )


_TRUNCATIONS: Final = {
    "max_turns": "rollout.max_turns",
    "max_tokens": "rollout.max_tokens_per_turn or rollout.max_total_tokens",
    "context_overflow": "rollout.context_length or the model's context, or have the agent drop or summarise old turns",
    "timeout": "rollout.episode_timeout, or find what is slow",
}


def truncated(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """Episodes are truncated by a limit."""
    ends = {name: metrics.get(f"stop/{name}", 0.0) for name in _TRUNCATIONS}
    total = sum(ends.values())
    if total <= MOST_TRUNCATED:
        return None
    worst = max(ends, key=lambda name: ends[name])
    return (
        f"{_share(total)} of trajectories ended at a limit, most of them ({_share(ends[worst])}) at {worst}: raise "
        f"{_TRUNCATIONS[worst]}"
    )


def tool_errors(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """Tool calls fail."""
    rate, calls = metrics.get("tools/error_rate", 0.0), metrics.get("tools/calls", 0.0)
    if rate <= MOST_TOOL_ERRORS or calls * metrics.get("batch/trajectories", 0.0) < _LEAST_CALLS:
        return None
    prefix = "tools/error_rate_by/"
    by_tool = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
    worst = max(by_tool, key=lambda name: by_tool[name], default="")
    what = "text that is no call of a known tool" if worst == UNKNOWN_TOOL else worst
    named = f" (the worst is {what}: {_share(by_tool[worst])})" if worst else ""
    return (
        f"{_share(rate)} of tool calls were answered by an error{named}. turnwise view shows them; look at the tools' "
        "descriptions and schemas, show calls in a warm start (turnwise sft), or use guided decoding"
    )


def failed(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """Episodes fail in the infrastructure."""
    count, trained = metrics.get("batch/failed", 0.0), metrics.get("batch/trajectories", 0.0)
    if not count or count <= MOST_FAILED * (count + trained):
        return None
    return (
        f"{_share(count / (count + trained))} of trajectories ended in an error and are not trained: see "
        "trajectories.twz (turnwise view) for the errors, logs/ for those of servers"
    )


def unforked(metrics: Metrics, setting: WarningContext) -> str | None:
    """No episode of rollout.tree could be forked."""
    tried = metrics.get("tree/refusals", 0.0) + metrics.get("tree/failures", 0.0)
    if metrics.get("tree/branches", 2.0) > 1 or not tried:
        return None
    why = f": {setting.unforked}" if setting.unforked else ""
    return f"rollout.tree forked no episode, so each is trained as a chain (tree/branches is 1){why}"


def cut(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """Rows are truncated."""
    lost, trained = metrics.get("dropped/cut_tokens", 0.0), metrics.get("batch/trained_tokens", 0.0)
    if not lost or lost <= MOST_CUT * (lost + trained):
        return None
    return (
        f"{_share(lost / (lost + trained))} of the tokens to train were cut off: raise batch.max_tokens_per_row, or "
        "have agents keep their context shorter"
    )


def correction(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """Off-policy correction rejects most of the batch."""
    rejected, ess = metrics.get("correction/rejected", 0.0), metrics.get("correction/ess", 1.0)
    if rejected <= MOST_REJECTED and ess >= LEAST_ESS:
        return None
    return (
        f"algorithm.correction rejects {_share(rejected)} of tokens, and the importance weights are worth "
        f"{_share(ess)} of the batch: trainer and server are too far apart to be corrected; find out why (gap/*, "
        "diagnostics.jsonl) before anything else"
    )


def not_finite(metrics: Metrics, setting: WarningContext) -> str | None:  # noqa: ARG001 - rules have one signature
    """Updates were skipped for non-finite gradients."""
    skipped = metrics.get("train/non_finite_updates", 0.0)
    if not skipped:
        return None
    return (
        f"{skipped:.0f} optimizer steps were skipped because their gradient was not finite: lower optim.lr, set "
        "optim.max_grad_norm, or look for rewards and log-probabilities that are far off"
    )


Rule: TypeAlias = Callable[[Metrics, WarningContext], "str | None"]

RULES: Final[dict[str, Rule]] = {
    "dead_groups": dead_groups,
    "nothing_trained": nothing_trained,
    "short": short,
    "gap": gap,
    "entropy": entropy,
    "clipped": clipped,
    "divergence": divergence,
    "truncated": truncated,
    "tool_errors": tool_errors,
    "failed": failed,
    "unforked": unforked,
    "cut": cut,
    "correction": correction,
    "not_finite": not_finite,
}
"""The rules by name."""


def find_warnings(metrics: Metrics, setting: WarningContext) -> list[TrainingWarning]:
    """Return the warnings that a step's metrics trigger, in the order of :data:`RULES`."""
    texts = ((name, rule(metrics, setting)) for name, rule in RULES.items())
    return [TrainingWarning(name, text) for name, text in texts if text is not None]


class Warner:
    """Repeats a warning with exponential back-off: ``quiet`` silent steps after the first, doubled each time."""

    def __init__(self, quiet: int = 10) -> None:
        self._quiet = quiet
        self._next: dict[str, tuple[int, int]] = {}

    def due(self, step: int, warnings: list[TrainingWarning]) -> list[TrainingWarning]:
        """Return the warnings of a step that are due."""
        due: list[TrainingWarning] = []
        for warning in warnings:
            next_step, pause = self._next.get(warning.name, (step, self._quiet))
            if step >= next_step:
                self._next[warning.name] = (step + pause, pause * 2)
                due.append(warning)
        return due


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


# Estimators that do not compare the members of a group.
_NO_GROUPS: Final = frozenset(("gae", "reinforce_plus_plus", "remax"))


@dataclass(frozen=True, slots=True)
class _PolicyDiagnostics:
    """What the diagnostics of one policy depend on."""

    renderer: Renderer
    warner: Warner
    exact: bool
    compares: bool

    @classmethod
    def of(cls, config: TrainConfig, renderer: Renderer) -> Self:
        model = config.policy.model
        exact = model.compute_dtype == "float32" and serves_float32(model.path, config.inference.dtype)
        return cls(renderer, Warner(), exact, config.algorithm.advantage not in _NO_GROUPS)


class Diagnostics:
    """The diagnostics of one run, in ``diagnostics.jsonl`` (docs/metrics.md).

    One JSON object a line: ``{"kind": "gap", "step": ..., "turns": [...], "largest": [...]}``, with the ``policy``
    where a run trains several; warnings then begin with its name.
    """

    def __init__(self, directory: Path, policies: Mapping[str, tuple[TrainConfig, Renderer]]) -> None:
        """Open the file.

        Args:
            directory: The run directory.
            policies: Configuration (``TrainConfig.of_policy``) and renderer of each trained policy.
        """
        self._log = JSONLLogger(directory / "diagnostics.jsonl")
        self._policies = {
            name: _PolicyDiagnostics.of(config, renderer) for name, (config, renderer) in policies.items()
        }

    def step(
        self, step: int, metrics: Mapping[str, float], gaps: Mapping[str, Gaps], groups: Sequence[TrajectoryGroup]
    ) -> list[TrainingWarning]:
        """Record the gaps of a step by policy, and return the warnings that are due.

        Of several policies ``metrics`` holds those of each under ``policy/NAME/``.
        """
        if len(self._policies) == 1:
            [(name, policy)] = self._policies.items()
            return self._diagnose_policy(policy, step, metrics, gaps.get(name, Gaps()), groups, {})
        due: list[TrainingWarning] = []
        shared = {key: value for key, value in metrics.items() if key.startswith("replay/")}
        for name, policy in self._policies.items():
            head = f"policy/{name}/"
            policy_metrics = {key.removeprefix(head): value for key, value in metrics.items() if key.startswith(head)}
            if name in gaps:
                warnings = self._diagnose_policy(
                    policy, step, policy_metrics | shared, gaps[name], groups, {"policy": name}
                )
                shared = {}
                due += [replace(warning, text=f"policy {name}: {warning.text}") for warning in warnings]
        return due

    def _diagnose_policy(
        self,
        policy: _PolicyDiagnostics,
        step: int,
        metrics: Mapping[str, float],
        gaps: Gaps,
        groups: Sequence[TrajectoryGroup],
        fields: Mapping[str, str],
    ) -> list[TrainingWarning]:
        words = ""
        members = [trajectory for group in groups for trajectory in group.trajectories]
        if gaps.turns:
            trajectory_ids = {token_gap.trajectory for token_gap in gaps.largest}
            trajectories = {member.id: member for member in members if member.id in trajectory_ids}
            record = gap_record(gaps, trajectories, policy.renderer)
            self._log.log({"kind": "gap", "step": step, **fields, **record})
            words = describe_gap(record)
        notes = (member.turn_notes.get("", {}).get(WHY_UNFORKED) for member in members)
        why = next((note for note in notes if note), "")
        setting = WarningContext(exact=policy.exact, compares=policy.compares, worst_gap=words, unforked=why)
        return policy.warner.due(step, find_warnings(metrics, setting))

    def close(self) -> None:
        """Close the file."""
        self._log.close()
