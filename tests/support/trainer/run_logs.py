"""Opens the log of a run with loggers, without the run."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.loggers import LoggedRun
from turnwise.trainer.observe.run_log import RunLog
from turnwise.trainer.run.directory import RunDirectory, config_digest

ESTIMATE = {"mean": 0.25, "stderr": None, "episodes": 4, "tasks": 4}
EVAL = {
    "kind": "eval", "step": 2, "label": "step-2", "seconds": 1.5,
    "sampled": {
        "success": ESTIMATE, "reward": {**ESTIMATE, "mean": None}, "pass_at": {"4": ESTIMATE}, "turns": 2.0,
        "tool_calls": 3, "tool_errors": {"all": 1}, "sampled_tokens": 9.5, "failed": 0,
        "by_source": {"a": {"success": ESTIMATE, "reward": ESTIMATE, "turns": 1.0}},
    },
}  # fmt: skip
"""The record of an evaluation."""


def config(tmp_path: Path, loggers: list[Any]) -> TrainConfig:
    """Return the configuration of a run with these loggers."""
    return TrainConfig.model_validate({
        "name": "run", "runs": tmp_path, "steps": 5, "loggers": loggers,
        "policies": {"main": {"model": {"path": tmp_path}}}, "rollout": {"env": {"name": "lookup"}},
    })  # fmt: skip


def opened(tmp_path: Path, loggers: list[Any], step: int = 0, out: io.StringIO | None = None) -> RunLog:
    """Open the log of a process that resumes after a step."""
    settings = config(tmp_path, loggers)
    directory = tmp_path / "run"
    directory.mkdir(exist_ok=True)
    RunDirectory(directory).begin(settings, config_digest(settings), fresh=False)
    notes = RunDirectory(directory).read()
    logged = LoggedRun("run", notes["id"], directory, settings.model_dump(mode="json"), step)
    console = Console(file=out or io.StringIO(), width=300)
    return RunLog.open(logged, settings.loggers, console, part=notes["parts"] - 1)
