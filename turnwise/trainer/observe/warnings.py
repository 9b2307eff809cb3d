"""Warnings about a step with a remedy, and the diagnostics file of a run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self, TypeAlias

from turnwise.engine.capacity import serves_float32
from turnwise.model.core import Renderer
from turnwise.tools.response import UNKNOWN_TOOL
from turnwise.trainer.algorithms.advantages import WITHOUT_GROUPS
from turnwise.trainer.algorithms.gap import Gaps, describe_gap, gap_record
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.run_log import JSONLLogger
from turnwise.trajectory import TrajectoryGroup
from turnwise.types import WHY_UNFORKED

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
        truncations: Keys that truncate the sampled distribution, with their values.
        keeps_masks: Whether the loss is under what truncation kept (``rollout.sampling_mask``).
    """

    exact: bool = False
    compares: bool = True
    worst_gap: str = ""
    unforked: str = ""
    truncations: tuple[str, ...] = ()
    keeps_masks: bool = False


_ROWS: Final = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
TEXTS: Final[Mapping[str, str]] = _ROWS["texts"]
"""Templates of the warnings' texts, by the names of their rules."""
_REASONS: Final[Mapping[str, str]] = _ROWS["reasons"]
_LIMITS: Final[Mapping[str, str]] = _ROWS["limits"]

_Warning: TypeAlias = tuple[str, Mapping[str, str | float]]
"""The name of a rule, and the values of its text."""


def find_warnings(metrics: Metrics, setting: WarningContext) -> list[TrainingWarning]:
    """Return the warnings that a step's metrics trigger: about its batch, its updates and its episodes."""
    rules = (_batch_warnings, _update_warnings, _server_warnings, _episode_warnings)
    warnings = [warning for rule in rules for warning in rule(metrics, setting)]
    return [TrainingWarning(name, TEXTS[name].format(**values)) for name, values in warnings]


def _are_dead(metrics: Metrics, setting: WarningContext) -> bool:
    """Whether most groups have equal rewards, and thereby no gradient."""
    groups, dead = metrics.get("batch/groups", 0.0), metrics.get("batch/dead_groups", 0.0)
    return setting.compares and groups >= _LEAST_GROUPS and dead >= MOST_DEAD * groups


def _batch_warnings(metrics: Metrics, setting: WarningContext) -> Iterator[_Warning]:
    if _are_dead(metrics, setting):
        share = _share(metrics["batch/dead_groups"] / metrics["batch/groups"])
        yield "dead_groups", {"share": share, "mean": metrics.get("reward/mean", 0.0)}
    # A critic that warms up explains it.
    if metrics.get("train/tokens", 1.0) <= 0 and metrics.get("batch/rows", 0.0) and "critic/loss" not in metrics:
        reason = "equal"
        if any(value > 0 for name, value in metrics.items() if name.startswith("dropped/")):
            reason = "dropped"
        elif metrics.get("correction/rejected", 0.0) >= 1.0:
            reason = "rejected"
        yield "nothing_trained", {"reason": _REASONS[reason]}
    if missing := metrics.get("replay/short", 0.0):
        yield "short", {"missing": missing}
    lost, trained = metrics.get("dropped/cut_tokens", 0.0), metrics.get("batch/trained_tokens", 0.0)
    if lost > MOST_CUT * (lost + trained):
        yield "cut", {"share": _share(lost / (lost + trained))}


def _update_warnings(metrics: Metrics, setting: WarningContext) -> Iterator[_Warning]:
    nats = metrics.get("train/entropy")
    if nats is not None and nats < LEAST_ENTROPY and not _are_dead(metrics, setting):
        yield "entropy", {"nats": nats}
    if (clipped := metrics.get("train/clip_fraction", 0.0)) > MOST_CLIPPED:
        yield "clipped", {"share": _share(clipped)}
    if (kl := metrics.get("train/approx_kl", 0.0)) > MOST_KL:
        yield "divergence", {"kl": kl}
    if skipped := metrics.get("train/non_finite_updates", 0.0):
        yield "not_finite", {"skipped": skipped}


def _server_warnings(metrics: Metrics, setting: WarningContext) -> Iterator[_Warning]:
    """Yield what is wrong where trainer and server disagree; by other weights, in asynchronous modes, they must."""
    mean, largest = metrics.get("gap/mean", 0.0), metrics.get("gap/max", 0.0)
    is_far = mean > MOST_GAP or (setting.exact and largest > MOST_GAP_EXACT)
    if is_far and metrics.get("lag/max", 0.0) <= 0:
        where = f"; {setting.worst_gap}" if setting.worst_gap else ""
        yield "gap", {"mean": mean, "largest": largest, "where": where}
    share, cut = metrics.get("sampling/truncated", 0.0), metrics.get("sampling/cut_mass", 0.0)
    if (share > 0 or setting.truncations) and not setting.keeps_masks:
        causes = ", ".join(setting.truncations) or "sampling parameters of requests, grammars or forced calls"
        extent = f"; {_share(share)} of the tokens lost {cut:.2g} of the probability, on average" if share > 0 else ""
        yield "truncation", {"causes": causes, "extent": extent}
    rejected, ess = metrics.get("correction/rejected", 0.0), metrics.get("correction/ess", 1.0)
    if rejected > MOST_REJECTED or ess < LEAST_ESS:
        yield "correction", {"rejected": _share(rejected), "ess": _share(ess)}


_ERROR_RATE: Final = "tools/error_rate_by/"


def _episode_warnings(metrics: Metrics, setting: WarningContext) -> Iterator[_Warning]:
    ends = {name: metrics.get(f"stop/{name}", 0.0) for name in _LIMITS}
    if (total := sum(ends.values())) > MOST_TRUNCATED:
        worst = max(ends, key=lambda name: ends[name])
        shares = {"share": _share(total), "worst_share": _share(ends[worst])}
        yield "truncated", {**shares, "worst": worst, "key": _LIMITS[worst]}
    # One that was cut after its first token is truncated.
    if total == 0 and 0 < metrics.get("rollout/sampled_tokens", 0.0) <= metrics.get("rollout/turns", 0.0):
        yield "empty", {}
    trained, rate = metrics.get("batch/trajectories", 0.0), metrics.get("tools/error_rate", 0.0)
    if rate > MOST_TOOL_ERRORS and metrics.get("tools/calls", 0.0) * trained >= _LEAST_CALLS:
        by_tool = {
            name.removeprefix(_ERROR_RATE): value for name, value in metrics.items() if name.startswith(_ERROR_RATE)
        }
        worst = max(by_tool, key=lambda name: by_tool[name], default="")
        what = "text that is no call of a known tool" if worst == UNKNOWN_TOOL else worst
        worst_tool = f" (the worst is {what}: {_share(by_tool[worst])})" if worst else ""
        yield "tool_errors", {"share": _share(rate), "worst_tool": worst_tool}
    failed = metrics.get("batch/failed", 0.0)
    if failed > MOST_FAILED * (failed + trained):
        yield "failed", {"share": _share(failed / (failed + trained))}
    refused = metrics.get("tree/refusals", 0.0) + metrics.get("tree/failures", 0.0)
    if refused and metrics.get("tree/branches", 2.0) <= 1:
        yield "unforked", {"why": f": {setting.unforked}" if setting.unforked else ""}


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


@dataclass(frozen=True, slots=True)
class _PolicyDiagnostics:
    """What the diagnostics of one policy depend on."""

    renderer: Renderer
    warner: Warner
    setting: WarningContext

    @classmethod
    def of(cls, config: TrainConfig, renderer: Renderer) -> Self:
        model = config.policy.model
        exact = model.compute_dtype == "float32" and serves_float32(model.path, config.inference.dtype)
        rollout = config.rollout
        settings = (("top_p", rollout.top_p, 1), ("top_k", rollout.top_k, 0), ("min_p", rollout.min_p, 0))
        truncations = tuple(f"rollout.{name} {value:g}" for name, value, off in settings if value != off)
        compares = config.algorithm.advantage not in WITHOUT_GROUPS
        keeps = rollout.sampling_mask == "keep"
        setting = WarningContext(exact=exact, compares=compares, truncations=truncations, keeps_masks=keeps)
        return cls(renderer, Warner(), setting)


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
        shared = {key: value for key, value in metrics.items() if key.startswith(("replay/", "sampling/"))}
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
            trajectory_ids = {token["trajectory"] for token in gaps.largest}
            trajectories = {member.id: member for member in members if member.id in trajectory_ids}
            record = gap_record(gaps, trajectories, policy.renderer)
            self._log.log({"kind": "gap", "step": step, **fields, **record})
            words = describe_gap(record)
        notes = (member.turn_notes.get("", {}).get(WHY_UNFORKED) for member in members)
        why = next((note for note in notes if note), "")
        setting = replace(policy.setting, worst_gap=words, unforked=why)
        return policy.warner.due(step, find_warnings(metrics, setting))

    def close(self) -> None:
        """Close the file."""
        self._log.close()
