"""``turnwise audit``: consistency of a run's files, and recomputation of its log-probabilities."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from turnwise.agents.roles import MAIN
from turnwise.config import read_yaml
from turnwise.engine.capacity import serves_float32
from turnwise.errors import AuditError, FormatError, TrainError
from turnwise.rollout.audit import BATCHES, AuditReport, audit_files
from turnwise.rollout.records import Batches, read_batches
from turnwise.trainer.algorithms.teacher_contexts import turn_contexts
from turnwise.trajectory import Segment, TrainSample, Trajectory, path_masks, path_media, path_routes
from turnwise.trajectory_file import TRAJECTORIES, read_trajectories
from turnwise.types import VersionSpan

CHECKPOINTS, CONFIG = "checkpoints", "config.yaml"
# float32 on both sides: what other kernels and another order of sums may differ by (invariant 12), for a likely id,
# and relative to it for an unlikely one.
_TOLERANCE = 1e-4
# With bfloat16 single ids differ by more; over many of them the mean does not.
_MEAN_TOLERANCE_HALF = 0.05
# Scores by which a router's experts may be in another order on the server.
_ROUTE_TOLERANCE = 1e-3
BOUNDS = {
    "float32": _TOLERANCE,
    "mean of bfloat16": _MEAN_TOLERANCE_HALF,
    "experts": _ROUTE_TOLERANCE,
    "exact numerics": 0.0,
}
"""By how much what is recomputed may differ."""
_MOST_SHOWN = 50
_TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class _Weights:
    """Directory of a weight version, and whether it was served in float32, and by the engine of exact numerics."""

    directory: Path
    float32: bool
    exact: bool

    @classmethod
    def served(cls, directory: Path, model: Path, inference: dict[str, Any]) -> _Weights:
        """Return weights that servers of a model held; its dtype is fixed at launch, whatever they receive later."""
        float32 = serves_float32(model, inference.get("dtype", "auto"))
        return cls(directory, float32, inference.get("engine") == "exact")


_Turn: TypeAlias = tuple[TrainSample, float, bool, dict[str, str]]
"""The ids of one weight version within a turn, with their full prefix; the temperature that sampled them; whether
their log-probabilities are equal to the last bit, computed again by this process; if so, the digests of logits by
position."""


def audit_run(run: Path, *, recompute: bool = True, at_most: int = 256, console: Console | None = None) -> AuditReport:
    """Audit a run directory and print the findings.

    Args:
        run: The directory of a training run or an evaluation.
        recompute: Whether log-probabilities are recomputed, if the files are consistent (needs torch).
        at_most: Turns to recompute per weight version, sampled with a fixed seed.
        console: Where to print; by default the terminal.

    Raises:
        AuditError: The directory lacks required files.
    """
    console = console or Console()
    report = audit_files(run)
    # Where the files contradict each other it is not known what to compute again.
    if report.sound and (run / BATCHES).is_file():
        recompute_contexts(run, report)
    if recompute and report.sound:
        recompute_logprobs(run, report, at_most=at_most)
    _show(run, report, console)
    return report


def recompute_contexts(run: Path, report: AuditReport) -> None:
    """Compute the texts of self-distillation again from the trajectories that were trained; add to the report.

    Raises:
        AuditError: The run's configuration cannot be read.
        ConfigError: A function of the configuration cannot be imported.
    """
    batches = read_batches(run / BATCHES)
    if not batches.contexts:
        return
    steps = {
        row.trajectory: (row.step, row.policy) for row in batches.rows if (row.step, row.policy) in batches.contexts
    }
    config = _read_config(run)
    sizes = Counter(steps.values())
    attempts: defaultdict[tuple[int, str], list[Trajectory]] = defaultdict(list)
    for trajectory in read_trajectories(run / TRAJECTORIES):
        step = steps.get(trajectory.id)
        if step is None:
            continue
        attempts[step].append(trajectory)
        if len(attempts[step]) < sizes[step]:
            continue
        turns = turn_contexts(_self_distill(config, step[1])["contexts"], attempts.pop(step), run)
        texts = {(turn.trajectory.id, turn.number): text for turn, text in turns}
        for (trajectory_id, number), text in batches.contexts[step].items():
            report.counts["contexts of self-distillation recomputed"] += 1
            if texts.get((trajectory_id, number)) != text:
                report.contradictions.append(
                    f"{trajectory_id}: the context that taught turn {number} in step {step[0]} is not in the recording"
                )


def _self_distill(config: dict[str, Any], policy: str) -> dict[str, Any]:
    """Return the configuration of a policy's self-distillation: its own, or else the run's."""
    of_policy = (config.get("policies", {}).get(policy) or {}).get("algorithm") or {}
    settings: dict[str, Any] = of_policy.get("self_distill") or config.get("algorithm", {}).get("self_distill") or {}
    return settings


def recompute_logprobs(run: Path, report: AuditReport, *, at_most: int = 256) -> None:
    """Recompute log-probabilities of every weight version on disk; add to the report.

    Raises:
        AuditError: The run's configuration cannot be read.
        CheckpointError: A checkpoint is incomplete.
    """
    config = _read_config(run)
    weights = _weights_on_disk(run, config)
    temperature = float(config.get("rollout", {}).get("temperature", 1.0))
    turns = _turns(run, weights, temperature, at_most, report)
    report.counts["sampled tokens that cannot be recomputed"] += report.unchecked.total()
    for version in sorted(turns):
        _check_version(version, weights[version], turns[version], report)


def _read_config(run: Path) -> dict[str, Any]:
    file = run / CONFIG
    try:
        config = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise AuditError(
            f"{file} cannot be read, so it is not known which weights sampled (--no-recompute leaves that out): {error}"
        ) from error
    if not isinstance(config, dict):
        raise AuditError(f"{file} holds no configuration")
    return config


_OTHERS = "sampled by a frozen policy, whose weights the run does not keep"
_GONE = "sampled by weights that are not on disk (in training, checkpoint.every and checkpoint.keep say which are)"
_KILLED = "sampled by weights of a killed process after its last checkpoint"
_UNKNOWN_TEMPERATURE = "sampled at a temperature that was not recorded"

_Version = tuple[str, int]
"""A policy and its weight version."""


def _weights_on_disk(run: Path, config: dict[str, Any]) -> dict[_Version, _Weights]:
    """Return the weight versions on disk: initial models and checkpoints."""
    inference = config.get("inference", {})
    if "policies" not in config:
        # An evaluation. Which weights an external server served is unknown.
        model = config.get("model") if config.get("url") is None else None
        if model is None or not (Path(model) / "config.json").is_file():
            return {}
        return {(MAIN, 0): _Weights.served(Path(model), Path(model), inference)}
    weights: dict[_Version, _Weights] = {}
    for name, policy in config["policies"].items():
        serving = config["policies"].get(policy.get("served_by"), policy)
        serving = {**inference, **(serving.get("inference") or {})}
        weights |= dict(_versions_of(run, name, policy["model"], serving, config["policies"]))
    return weights


def _versions_of(
    run: Path, name: str, model: dict[str, Any], inference: dict[str, Any], policies: Collection[str]
) -> Iterator[tuple[_Version, _Weights]]:
    """Yield the versions of a trained policy on disk."""
    # It brings torch, which an audit without recomputing does not need.
    from turnwise.trainer.run.checkpoint import CheckpointStore, load_state, policy_folder

    served = partial(_Weights.served, model=Path(model["path"]), inference=inference)
    first = _first_model(model)
    if first is not None and (Path(first) / "config.json").is_file():
        yield (name, 0), served(Path(first))
    store = CheckpointStore(run / CHECKPOINTS)
    for step in store.steps():
        directory = store.path(step)
        # A version is the number of the step that made it. What the servers held when the checkpoint was written
        # (weight_version) is an older one where the run was interrupted before they were given these weights.
        yield (name, load_state(directory).step), served(policy_folder(directory, name, policies))


def _first_model(model: dict[str, Any]) -> str | None:
    """Return the directory of the initial weights; None where an adapter in it names another model."""
    from turnwise.engine.lora import read_settings

    adapter = (model.get("lora") or {}).get("path")
    if adapter is None:
        return str(model["path"])
    try:
        base = read_settings(Path(adapter))[0]
    except FormatError:
        return None
    return str(adapter) if base.resolve() == Path(model["path"]).resolve() else None


def _turns(
    run: Path, weights: dict[_Version, _Weights], temperature: float, at_most: int, report: AuditReport
) -> dict[_Version, list[_Turn]]:
    """Sample turns by version (a reservoir with a fixed seed); report the ids that cannot be checked, by the reason.

    A grammar that allows other ids than those that were sampled from contradicts its record.
    """
    turns_by_version: dict[_Version, list[_Turn]] = {}
    seen: dict[_Version, int] = {}
    unchecked = report.unchecked
    draw = random.Random(0)
    from turnwise.engine.lora import model_under
    from turnwise.engine.numerics.self_check import capability
    from turnwise.trainer.batch.guided_masks import resolve_guided

    batches = read_batches(run / BATCHES) if (run / BATCHES).is_file() else Batches([], 0, 0, (), False)
    parts = {str(part) for part, kernels in batches.kernels.items() if kernels == capability()}
    for trajectory in read_trajectories(run / TRAJECTORIES):
        if trajectory.frozen:
            # Its servers count their own versions, and the run does not keep their weights.
            unchecked[_OTHERS] += 0 if trajectory.recorded == "text" else trajectory.sampled_tokens
            continue
        divisor = _temperature(trajectory, temperature)
        newest = _last_version(trajectory, batches.starts)
        equal = trajectory.id.partition("-")[0] in parts
        for segment in trajectory.segments:
            for span in segment.weight_versions:
                version = trajectory.policy, span[0]
                reason = _GONE if version not in weights else _KILLED if span[0] > newest else _UNKNOWN_TEMPERATURE
                if reason is not _UNKNOWN_TEMPERATURE or divisor is None:
                    unchecked[reason] += span[2] - span[1]
                    continue
                turns = turns_by_version.setdefault(version, [])
                seen[version] = seen.get(version, 0) + 1
                slot = len(turns) if len(turns) < at_most else draw.randrange(seen[version])
                if slot < at_most:
                    exact = equal and weights[version].exact
                    try:
                        guided = resolve_guided(segment, trajectory.id, model_under(weights[version].directory))
                    except TrainError as error:
                        report.contradictions.append(str(error))
                        continue
                    sample = _sample(trajectory, guided, span)
                    # Equal bits come with equal experts; those of earlier turns may be another version's.
                    sample = replace(sample, routes=None) if exact else sample
                    pairs = [pair.partition(":") for pair in (segment.digests or "").split() if exact]
                    digests = {position: digest for position, _, digest in pairs}
                    turns[slot : slot + 1] = [(sample, divisor, exact, digests)]
    return turns_by_version


def _temperature(trajectory: Trajectory, configured: float) -> float | None:
    """Return the sampling temperature, or None where it is unknown."""
    if trajectory.metrics.get("temperatures", 1.0) > 1:
        # An agent behind a gateway chose them, request by request.
        return None
    recorded = trajectory.metrics.get("temperature")
    if recorded is None and trajectory.partition != "train" and configured not in (0.0, 1.0):
        return None
    return (configured if recorded is None else recorded) or 1.0


def _last_version(trajectory: Trajectory, starts: Sequence[tuple[int, int]]) -> float:
    """Return the last version of this trajectory's process whose weights a checkpoint can hold.

    A killed process had versions beyond its last checkpoint; its successor reused their numbers.
    """
    number = trajectory.id.partition("-")[0]
    if not number.isdigit():
        return math.inf
    return min((step for part, step in starts if part > int(number)), default=math.inf)


def _sample(trajectory: Trajectory, segment: Segment, span: VersionSpan) -> TrainSample:
    path = trajectory.path(segment.parent)
    token_ids = np.concatenate([*(ancestor.token_ids for ancestor in path), segment.token_ids])
    start = len(token_ids) - len(segment.token_ids)
    mask = np.zeros(len(token_ids), np.bool_)
    mask[start + span[1] : start + span[2]] = True
    logprobs = np.zeros(len(token_ids), np.float32)
    logprobs[start:] = segment.logprobs
    versions = np.full(len(token_ids), -1, np.int32)
    turns = np.full(len(token_ids), -1, np.int32)
    names = trajectory.id, trajectory.group_id, segment.index
    routes = path_routes([*path, segment])
    # Under the masks that the token was sampled and trained under.
    masks = path_masks([*(replace(ancestor, mask=None) for ancestor in path), segment])
    logprobs = logprobs if masks is None else masks.logprobs
    return TrainSample(token_ids, mask, logprobs, versions, turns, *names, path_media(path), routes, masks)


def _check_version(version: _Version, weights: _Weights, turns: Sequence[_Turn], report: AuditReport) -> None:
    differences: list[float] = []
    policy, number = version
    what = f"version {number}" if policy == MAIN else f"version {number} of {policy}"
    wrong: dict[int, tuple[TrainSample, list[str]]] = {}
    for index, position, reported, computed, shortfall, digest in _recomputed(weights.directory, turns):
        sample, _, exact, digests = turns[index]
        if weights.float32 and shortfall > _ROUTE_TOLERANCE:
            text = f"an expert of position {position} scores {shortfall:.3g} below those that its router chooses"
            wrong.setdefault(id(sample), (sample, []))[1].append(text)
        differences.append(abs(reported - computed))
        tolerance = 0.0 if exact else _TOLERANCE * max(1.0, abs(computed))
        if weights.float32 and not differences[-1] <= tolerance:
            text = f"the logprob of position {position} was {reported:.9g}, computed again it is {computed:.9g}"
            wrong.setdefault(id(sample), (sample, []))[1].append(text)
        elif exact:
            report.counts["logprobs recomputed with difference 0, to the last bit"] += 1
        elif weights.exact:
            report.counts["logprobs of another torch or processor, whose bits are not compared"] += 1
        if digest is not None and digest == digests[str(position)]:
            report.counts["positions whose logits have the recorded digest"] += 1
        elif digest is not None:
            text = f"the logits of position {position} had digest {digests[str(position)]}, computed again {digest}"
            wrong.setdefault(id(sample), (sample, []))[1].append(text)
    for sample, texts in wrong.values():
        more = f" ({len(texts)} such ids in this turn)" if len(texts) > 1 else ""
        report.contradictions.append(
            f"trajectory {sample.trajectory_id}: segment {sample.leaf}, sampled by {what} "
            f"({weights.directory.name}): {texts[0]}{more}"
        )
    mean = float(np.mean(differences)) if differences else 0.0
    if not weights.float32 and mean > _MEAN_TOLERANCE_HALF:
        report.contradictions.append(
            f"{what}: the logprobs of {len(differences)} ids differ from {weights.directory} by {mean:.4f} on average"
        )
    report.counts["weight versions recomputed"] += 1
    report.counts["turns recomputed"] += len(turns)
    report.counts["logprobs recomputed"] += len(differences)
    report.figures["largest difference of a logprob"] = max(
        report.figures.get("largest difference of a logprob", 0.0), max(differences, default=0.0)
    )


def _recomputed(directory: Path, turns: Sequence[_Turn]) -> Iterator[tuple[int, int, float, float, float, str | None]]:
    """Yield (index of the turn, position in its row, reported, computed, shortfall of the experts, digest) of every id.

    The digest is that of the logits, where one was recorded.
    """
    import torch

    from turnwise.engine.accelerator import resolve_device
    from turnwise.engine.numerics.exact import digest_logits
    from turnwise.placement.devices import AUTO, CPU
    from turnwise.trainer.batch.packing import pack
    from turnwise.trainer.core import TrainRow
    from turnwise.trainer.model.policy import load_model

    exact = any(turn[2] for turn in turns)
    policy = load_model(directory, device=CPU if exact else resolve_device(AUTO), exact=exact)
    rows = [TrainRow(sample, temperature=temperature) for sample, temperature, *_ in turns]
    for batch in pack(rows, _TOKENS_AT_ONCE, share_prefixes=True):
        positions = np.concatenate([np.flatnonzero(rows[row].sample.loss_mask) for row in batch.rows]).tolist()
        owners = [batch.rows[number] for number in batch.sequences.tolist()]
        digests: list[str | None] = [None] * batch.trained_tokens
        digested = [token for token, owner in enumerate(owners) if str(positions[token]) in turns[owner][3]]
        with torch.no_grad():
            states = policy.states(batch)
            scores = policy.score(batch, states)
            for token, logits in zip(digested, policy.logits(states[digested]), strict=True):
                digests[token] = digest_logits(logits)
        computed, shortfalls = scores.logprobs.float().cpu().tolist(), [0.0] * batch.trained_tokens
        if batch.routes is not None and policy.routers is not None:
            shortfalls = policy.routers.shortfall[batch.predictors].tolist()
        yield from zip(owners, positions, batch.rollout_logprobs.tolist(), computed, shortfalls, digests, strict=True)


def _show(run: Path, report: AuditReport, console: Console) -> None:
    console.print(Text(f"audit of {run}", style="bold"), soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, count in report.counts.items():
        if count:
            table.add_row(name, f"{count:,}")
    for name, figure in report.figures.items():
        table.add_row(name, f"{figure:.2g}")
    console.print(table)
    for reason, count in (+report.unchecked).items():
        console.print(Text(f"not recomputed: {count:,} tokens {reason}", style="dim"), soft_wrap=True)
    for text in report.contradictions[:_MOST_SHOWN]:
        console.print(Text(f"✗ {text}", style="red"), soft_wrap=True)
    if len(report.contradictions) > _MOST_SHOWN:
        console.print(Text(f"and {len(report.contradictions) - _MOST_SHOWN} more", style="red"))
    if report.sound:
        console.print(Text("✓ no contradictions: what was sampled was recorded and trained exactly", style="green"))
    else:
        console.print(Text(f"{len(report.contradictions)} contradictions", style="bold red"))
