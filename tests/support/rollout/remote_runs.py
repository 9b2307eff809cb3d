"""Training runs whose episodes are played by ``turnwise runner`` processes."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from support.trainer.lookup_run import Turnwise
from turnwise.trainer.config.train import TrainConfig


def remote_rollout(runs: Path) -> dict[str, Any]:
    """Return the part of ``rollout`` that lets runners in, at a port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"remote": {"key_file": str(runs / "run.key")}, "gateway": {"port": port}}


def make_key(runs: Path) -> None:
    """Make the key before a run or a runner does, which may begin in any order then."""
    key = runs / "run.key"
    key.touch(0o600)
    key.write_text("a key that was made before any of them\n")


def runner(config: TrainConfig, name: str, *more: str) -> Turnwise:
    """Start a runner of a run."""
    assert config.rollout.remote is not None
    url = f"http://127.0.0.1:{config.rollout.gateway.port}"
    key = config.rollout.remote.key_file
    return Turnwise(config.runs / f"{name}.log", "runner", "--connect", url, "--key-file", key, *more)
