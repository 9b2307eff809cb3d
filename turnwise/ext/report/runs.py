"""What the files of one run hold for its report: curves, warnings, figures and configuration."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import yaml

from turnwise.chat.model_dir import read_model_dir
from turnwise.config import read_yaml, write_yaml
from turnwise.errors import ConfigError, FormatError, MissingExtraError, RenderError
from turnwise.evaluation.directory import success_rule
from turnwise.trainer.observe.metrics import METRICS_FILE, figures, meaning, read_metrics
from turnwise.trainer.run.certificate import certificate_notes
from turnwise.trajectory_file import TRAJECTORIES

REDACTED: Final = "***"
MOST_TEXT: Final = 400
"""Characters of an error or a warning that are kept."""
MOST_CONFIG: Final = 100_000
"""Characters of a configuration that is shown."""

_SECRET = re.compile(
    r"(?:^|[_-])(?:api[_-]?key|key|secrets?|pass(?:word|wd|phrase)?|token|auth\w*|credentials?)$", re.I
)
"""Keys whose texts are not shown. Those of variables' names (``key_env``) and files (``key_file``) end differently."""
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")

Series = tuple[list[int], list[float]]
"""Steps and values of one metric, in order."""


@dataclass(slots=True)
class RunWarning:
    """A warning that a run showed, once or more.

    Attributes:
        first: Step at which it was first shown.
        last: Step at which it was last shown, with ``text``.
    """

    name: str
    first: int
    last: int
    text: str
    count: int = 1


@dataclass(slots=True)
class RunFacts:
    """One run, without its trajectories.

    Attributes:
        name: Unique among the runs of a report.
        kind: ``training``, ``evaluation`` or ``trajectories`` (of a gateway, or a file alone).
        series: Metrics of train steps and evaluations by name.
        meanings: What a metric means, by name; for those of docs/metrics.md.
        warnings: Those that were shown, one entry for each name.
        config: ``config.yaml`` without secrets.
        success_reward: Minimum reward of a success.
        role: Role whose reward counts in an evaluation; None for all sessions of the trained policy.
        gaps: The tokens on which trainer and server differed most, by trajectory id: (segment, place, server's and
            trainer's log-probability, step).
        notes: What could not be read, and is missing in the report.
        models: Folders that may hold the run's tokenizer, the best first.
        model: What ``config.yaml`` names as the evaluated model, or as those to train.
    """

    name: str
    kind: str
    trajectories: Path | None = None
    series: dict[str, Series] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)
    warnings: list[RunWarning] = field(default_factory=list)
    config: str | None = None
    success_reward: float = 1.0
    role: str | None = None
    gaps: dict[str, list[tuple[int, int, float, float, int]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    models: list[Path] = field(default_factory=list)
    model: str | None = None

    def add_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add records of ``metrics.jsonl``; a later value of the same step counts. Notes how many cannot be read."""
        unreadable = 0
        for record in records:
            try:
                if record.get("kind") == "warning":
                    self._add_warning(int(record["step"]), str(record["name"]), str(record["text"]))
                elif record.get("kind") in ("train", "eval"):
                    step = int(record["step"])
                    for name, value in _points(record).items():
                        self._add_point(name, step, value)
            except (AttributeError, KeyError, TypeError, ValueError):
                unreadable += 1
        if unreadable:
            self.notes.append(f"{unreadable} records of {METRICS_FILE} lack what their kind has, and are left out")

    def _add_point(self, name: str, step: int, value: float) -> None:
        if name not in self.series:
            self.series[name] = [], []
            if explanation := meaning(name):
                self.meanings[name] = explanation
        steps, values = self.series[name]
        index = bisect.bisect_left(steps, step)
        if index < len(steps) and steps[index] == step:
            values[index] = value
        else:
            steps.insert(index, step)
            values.insert(index, value)

    def head(self, total: int, listed: int, readable: int) -> dict[str, Any]:
        """Return a run's entry in the head of a page, with the numbers of its trajectories, as JSON values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "total": total,
            "listed": listed,
            "kept": readable,
            "success_reward": self.success_reward,
            "notes": [shortened(note) for note in self.notes],
        }

    def _add_warning(self, step: int, name: str, text: str) -> None:
        text = shortened(text)
        previous = next((warning for warning in self.warnings if warning.name == name), None)
        if previous is None:
            self.warnings.append(RunWarning(name, step, step, text))
        else:
            previous.last, previous.text, previous.count = step, text, previous.count + 1

    def to_json(self, max_points: int) -> dict[str, Any]:
        """Return what the page shows of the run besides its trajectories, as JSON values.

        Args:
            max_points: Most points of a curve: of a longer one, the least and the largest value of each stretch.
        """
        return {
            "series": {name: thinned(*points, max_points) for name, points in sorted(self.series.items())},
            "meanings": self.meanings,
            "warnings": [asdict(warning) for warning in self.warnings],
            "config": self.config,
            "model": self.model,
            "thinned": max((len(steps) for steps, _ in self.series.values()), default=0) > max_points,
        }


def shortened(text: str) -> str:
    """Return the beginning of a long text."""
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."


def thinned(steps: Sequence[int], values: Sequence[float], max_points: int) -> Series:
    """Return at most ``max_points`` points of a curve: its ends, and the extremes of equal stretches."""
    count = len(steps)
    if count <= max_points:
        return list(steps), [float(f"{value:.6g}") for value in values]
    indices = {0, count - 1}
    stretches = max(1, (max_points - 2) // 2)
    for number in range(stretches):
        stretch = range(number * count // stretches, (number + 1) * count // stretches)
        indices |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return [steps[index] for index in sorted(indices)], [float(f"{values[index]:.6g}") for index in sorted(indices)]


def read_facts(source: Path, name: str) -> RunFacts:
    """Read a run's directory, or a file of trajectories; what a killed process left half-written is skipped.

    Args:
        source: The directory or file.
        name: Unique among the runs of a report.

    Raises:
        FormatError: There is no run, or a file of it is damaged in a way that no kill explains.
    """
    if not source.exists():
        raise FormatError(f"no such run: {source}: give the directory of a run, or a file of trajectories")
    if source.is_file():
        return RunFacts(name, "trajectories", source)
    file, curves = source / TRAJECTORIES, source / METRICS_FILE
    if not file.is_file() and not curves.is_file():
        raise FormatError(
            f"{source} is no run: it holds neither {TRAJECTORIES} nor {METRICS_FILE}; give the directory that "
            "turnwise train, eval or gateway wrote"
        )
    facts = RunFacts(name, "trajectories", file if file.is_file() else None)
    _read_config(facts, source / "config.yaml")
    facts.success_reward, facts.role = success_rule(source)
    initial_models = (source / "initial", source / "sft" / "model")
    facts.models = [*_checkpoints(source), *facts.models, *(folder for folder in initial_models if folder.is_dir())]
    if curves.is_file():
        facts.kind = "training"
        facts.notes += certificate_notes(source)
        facts.add_records(read_metrics(curves))
        facts.gaps = read_gaps(source / "diagnostics.jsonl", facts.notes)
    elif any((source / file_name).is_file() for file_name in ("summary.json", "episodes.jsonl", "finished.jsonl")):
        facts.kind = "evaluation"
        _note_unfinished(facts, source / "summary.json")
    return facts


def _checkpoints(run: Path) -> list[Path]:
    # All have the run's tokenizer, so the newest will do, and the one before where that is half-written.
    newest = sorted((run / "checkpoints").glob("step_*"), reverse=True)[:2]
    return [path for folder in newest for path in (folder, folder / "model")]


def _note_unfinished(facts: RunFacts, file: Path) -> None:
    try:
        summary = orjson.loads(file.read_bytes())
        unfinished = summary.get("unfinished")
    except FileNotFoundError:
        facts.notes.append(f"{file.name} is missing: the evaluation has not ended, or was killed")
    except (AttributeError, orjson.JSONDecodeError) as error:
        facts.notes.append(f"{file.name} cannot be read: {error}")
    else:
        if unfinished:
            facts.notes.append(f"{unfinished} episodes are unfinished: the same turnwise eval command plays them")


def _points(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite figures of a train step or an evaluation."""
    values = figures({key: figure for key, figure in record.items() if figure is not None})
    return {name: value for name, value in values.items() if math.isfinite(value)}


Gaps = dict[str, list[tuple[int, int, float, float, int]]]
"""As :attr:`RunFacts.gaps`."""


def read_gaps(file: Path, notes: list[str]) -> Gaps:
    """Return the tokens that differ most; the last line may be cut off. Notes how many lines cannot be read."""
    gaps: Gaps = {}
    if not file.is_file():
        return gaps
    unreadable = 0
    for line in file.read_bytes().split(b"\n"):
        if not line.endswith(b"}"):
            continue
        try:
            record = orjson.loads(line)
            for gap in record["largest"] if record.get("kind") == "gap" else ():
                if "segment" in gap:
                    position = (gap["segment"], gap["place"], gap["rollout"], gap["trainer"], record["step"])
                    gaps.setdefault(gap["trajectory"], []).append(position)
        except (AttributeError, KeyError, TypeError, orjson.JSONDecodeError):
            unreadable += 1
    if unreadable:
        notes.append(f"{unreadable} lines of {file.name} cannot be read, and are left out")
    return gaps


def _read_config(facts: RunFacts, file: Path) -> None:
    """Read the configuration: its text without secrets, and the model's folder."""
    if not file.is_file():
        return
    try:
        config = read_yaml(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, ConfigError) as error:
        # Not even as text: what cannot be parsed cannot be searched for secrets.
        facts.notes.append(f"{file.name} is not YAML and is left out: {type(error).__name__}")
        return
    if not isinstance(config, dict):
        facts.notes.append(f"{file.name} holds no mapping and is left out")
        return
    text = write_yaml(without_secrets(config))
    if len(text) <= MOST_CONFIG:
        facts.config = text
    else:
        facts.notes.append(f"{file.name} has {len(text)} characters and is left out")
    policies = config.get("policies")
    trained = [_at(policy, "model.path") for policy in policies.values()] if isinstance(policies, dict) else []
    folders = [path for path in (*trained, config.get("model")) if isinstance(path, str)]
    facts.models += map(Path, folders)
    hosted = _at(config, "hosted.model")
    facts.model = hosted if isinstance(hosted, str) else ", ".join(folders) or None


def _at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def without_secrets(value: Any, key: str = "") -> Any:
    """Return configuration values with :data:`REDACTED` for texts under keys of secrets and for users in URLs."""
    if isinstance(value, dict):
        # Headers and environments name their entries as they like, so none of their values is shown.
        hidden = key in ("headers", "env") and all(isinstance(entry, str) for entry in value.values())
        return {name: REDACTED if hidden else without_secrets(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, list):
        return [without_secrets(entry, key) for entry in value]
    if isinstance(value, str):
        return REDACTED if value and _SECRET.search(key) else _USER_INFO.sub(f"{REDACTED}@", value)
    return value


def token_texts(models: Sequence[Path], token_ids: Sequence[int]) -> tuple[dict[int, str], str]:
    """Return the text of each id by the first tokenizer that can be read, and why there is none, or an empty text."""
    if not token_ids:
        return {}, ""
    reasons: list[str] = []
    for folder in models:
        if not folder.is_dir():
            continue
        try:
            tokenizer = read_model_dir(folder).tokenizer
        except (ConfigError, MissingExtraError, RenderError) as error:
            reasons.append(str(error))
            continue
        names = {number: name for name, number in tokenizer.get_vocab().items()}
        decode = partial(tokenizer.decode, skip_special_tokens=False)
        return {token: _token_text(names.get(token, ""), decode([token])) for token in token_ids}, ""
    return {}, "; ".join(reasons) or f"none of its models is on this machine: {', '.join(map(str, models)) or 'none'}"


def _token_text(name: str, text: str) -> str:
    """Return what an id adds to a text: alone it loses its leading space in some tokenizers, or is half a character."""
    if "\ufffd" in text:
        return name or text
    return f" {text}" if name.startswith("\u2581") and not text.startswith(" ") else text
