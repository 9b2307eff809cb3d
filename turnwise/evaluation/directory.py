"""The output directory of an evaluation: a new one, or that of an unfinished evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import yaml
from pydantic import TypeAdapter

from turnwise.append_file import lock_directory
from turnwise.config import differences, dump_config, read_yaml
from turnwise.envs.registration import run_name
from turnwise.errors import ConfigError
from turnwise.evaluation.config import EvalConfig
from turnwise.rollout.journal.finished import FINISHED
from turnwise.tasks.config import TasksConfig
from turnwise.trajectory_file import TRAJECTORIES


@contextmanager
def output_directory(config: EvalConfig) -> Iterator[Path]:
    """Lock the directory to write to: a new one, or that of an unfinished evaluation with the same configuration.

    Raises:
        ConfigError: ``out`` holds a complete evaluation, or one that this configuration cannot continue, or that
            another process writes.
    """
    folder = config.out or new_directory(f"eval-{run_name(config.rollout.env.name)}")
    with lock_directory(folder, ConfigError, "the evaluation in"):
        _check_unfinished(folder, config)
        yield folder


def new_directory(name: str) -> Path:
    """Create a directory in ``runs``, named by the time; with a number where another process was faster."""
    folder = Path.cwd() / "runs" / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while True:
        try:
            folder.mkdir(mode=0o700, parents=True)
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{folder.name.partition('.')[0]}.{number}")
        else:
            return folder


def _check_unfinished(folder: Path, config: EvalConfig) -> None:
    existing = [name for name in (TRAJECTORIES, "ledger.jsonl", "summary.json") if (folder / name).exists()]
    if not existing:
        return
    if not (folder / FINISHED).exists() or is_complete(folder / "summary.json"):
        raise ConfigError(f"out is {folder}, which holds {', '.join(existing)} already: choose another directory")
    if config.rollout.agent_loop_manager_class is not None:
        raise ConfigError(
            f"out is {folder}, an unfinished evaluation by rollout.agent_loop_manager_class "
            f"{config.rollout.agent_loop_manager_class!r}, which cannot be continued: choose another directory"
        )
    check_continues(folder, config)


def check_continues(folder: Path, config: EvalConfig) -> None:
    """Check that a configuration is that of the evaluation in a directory, apart from keys that decide the speed only.

    Raises:
        ConfigError: It is another one; the message names the keys.
    """
    if differing := _differing_keys(folder / "config.yaml", config):
        state = "a complete" if is_complete(folder / "summary.json") else "an unfinished"
        raise ConfigError(
            f"out is {folder}, {state} evaluation with another {', '.join(differing)}: give the command that "
            f"began it (its configuration is {folder / 'config.yaml'}), or choose another directory"
        )


def is_complete(summary: Path) -> bool:
    """Whether an evaluation left no episode unfinished or failed."""
    try:
        figures = orjson.loads(summary.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return False
    return not figures.get("unfinished") and not any(figures.get(part, {}).get("failed") for part in _PARTS)


_PARTS = ("sampled", "greedy")

# What decides how fast episodes are, or how many of them there are, and not what they are.
_FREE = (
    ("inference",),
    ("url",),
    ("budget",),
    ("prices",),
    ("concurrency",),
    ("rollout", "concurrency"),
    ("rollout", "retries"),
    ("out",),
)


def _differing_keys(file: Path, config: EvalConfig) -> list[str]:
    """Return the keys in which an evaluation's configuration differs from the one in its directory."""
    try:
        recorded = read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the configuration of the evaluation in {file.parent}: {error}") from error
    configs = [recorded if isinstance(recorded, dict) else {}, read_yaml(dump_config(config))]
    for *sections, key in _FREE:
        for config_copy in configs:
            for section in sections:
                config_copy = config_copy.get(section) or {}
            config_copy.pop(key, None)
    return sorted(key for key, _, _ in differences("", *configs))


def success_rule(folder: Path) -> tuple[float, str | None]:
    """Return the minimum reward of a success in a run's directory, and the role whose reward counts.

    They are those of its ``config.yaml``, else 1 and None. A training run names them for its evaluations only: its
    minimum holds for all of its episodes, its role for none.
    """
    try:
        content = read_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ConfigError):
        return 1.0, None
    plan = content if isinstance(content, dict) else {}
    role, section = plan.get("role"), plan.get("eval")
    in_section = section.get("success_reward") if isinstance(section, dict) else None
    for minimum in (plan.get("success_reward"), in_section):
        if isinstance(minimum, (int, float)):
            return float(minimum), role if isinstance(role, str) else None
    return 1.0, None


def recorded_sources(config: Mapping[str, Any]) -> list[TasksConfig]:
    """Return the task sources of training and evaluation that a run's ``config.yaml`` names."""
    sources = (config.get("tasks"), (config.get("eval") or {}).get("tasks"))
    return [TypeAdapter(TasksConfig).validate_python(source) for source in sources if source]
