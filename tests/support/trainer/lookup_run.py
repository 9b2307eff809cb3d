"""Whole training runs of seconds: a barely trained lookup model, its configuration, and its processes.

The model is made by the files of ``examples/lookup`` and trained by the library, once for all workers of a test run.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import io
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

from support.processes.warm import WarmPopen, started_by
from support.rollout.record_files import read_records
from turnwise.config import dump_config
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.offline.small_model import make_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "lookup"
SMALL_MODEL = EXAMPLE.parent / "small_model"
DEADLINE_S = 90.0
GROUPS, MEMBERS = 2, 4


def example(name: str) -> ModuleType:
    """Return a module of the example, or of what it shares with others; neither is a package."""
    if str(SMALL_MODEL) not in sys.path:
        sys.path.append(str(SMALL_MODEL))
    file = next(folder / f"{name}.py" for folder in (EXAMPLE, SMALL_MODEL) if (folder / f"{name}.py").exists())
    spec = importlib.util.spec_from_file_location(f"example_lookup_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODEL = Path("sft") / "model"


def build_model(directory: Path) -> None:
    """Make a model that writes calls and answers, mostly wrong ones, in ``directory / MODEL``."""
    teacher = example("teacher")
    rows = list(asyncio.run(teacher.demonstrations(400, seed=0)))
    base = directory / "base"
    make_model(base, rows, seed=0)
    config = Qwen3Config.from_pretrained(base)
    for name, value in {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16,
        "layer_types": ["full_attention"] * 2,
    }.items():  # fmt: skip
        setattr(config, name, value)
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(base)
    train_on_rows(directory, base, rows, schedule={"kind": "wsd", "warmup_steps": 5})


def train_on_rows(directory: Path, base: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> None:
    """Train the model ``base`` on demonstrations, into ``directory / MODEL``; ``settings`` are laid over the others."""
    data = directory / "demonstrations.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_sft(
        SFTConfig.model_validate({
            "name": "sft",
            "runs": directory,
            "data": data,
            "model": {"path": base, "threads": 1},
            "steps": 60,
            "conversations": 16,
            "optim": {"name": "muon", "lr": 4e-3},
            **settings,
        }),
        console=silent(),
    )  # fmt: skip


def warm_start(run: Path) -> None:
    """Make the warm start of the main job at seed 0 in the directory ``run``."""
    demonstrations = example("teacher").demonstrations
    # Not by `example`, which has put it on the path: what it defines is looked up by its module's name.
    job = import_module("job")
    lookup = job.Job("lookup", EXAMPLE, demonstrations, count=4480)
    job.warm_start(lookup, run, 0, silent())


def take_warm(warm: Path, run: Path) -> None:
    """Begin the directory of a run of the main job with a warm start: its own is left out then."""
    for part in ("sft", "initial"):
        shutil.copytree(warm / part, run / part)


def shared(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """Return a directory of this test run that ``build`` fills: by the first worker that asks, the others wait.

    Tests must not change it.
    """
    base = factory.getbasetemp()
    home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"shared-{name}"
    home.mkdir(exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = home / "done"
        if not done.exists():
            build(home / "built")
            done.touch()
    return home / "built"


def silent() -> Console:
    """Return a console whose output is discarded."""
    return Console(file=io.StringIO())


def train_config(model: Path, runs: Path, **changes: Any) -> TrainConfig:
    """Return the configuration of a run of seconds. ``changes`` are laid over it, sections key by key."""
    plain: dict[str, Any] = {
        "name": "run",
        "runs": runs,
        "steps": 2,
        "seed": 3,
        "tasks": "turnwise.envs.basic.lookup:tasks?n=7&split=train",
        "policies": {"main": {"model": {"path": model, "threads": 1}, "optim": {"lr": 1e-3}}},
        "rollout": {
            "env": {"name": "support.envs.run_envs:Graded"},
            "group_size": MEMBERS,
            "max_turns": 3,
            "max_tokens_per_turn": 24,
        },
        "batch": {"groups": GROUPS, "max_tokens_per_micro_batch": 256},
        "checkpoint": {"every": 1, "keep": None},
    }
    return TrainConfig.model_validate(merged(plain, changes))


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return settings with others laid over them, sections key by key."""
    settings = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], dict) and isinstance(above[name], dict):
            settings[name] = merged(below[name], above[name])
    return settings


def held_config(model: Path, runs: Path, hold: int, gate: Path | None = None, **changes: Any) -> TrainConfig:
    """Return a configuration whose episode number ``hold`` waits; the file ``gate`` says that it does."""
    env = {"name": "support.envs.run_envs:Held", "config": {"hold": hold, "gate": str(gate or runs / "gate")}}
    return train_config(model, runs, **merged({"rollout": {"env": env}}, changes))


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines or of trajectories."""
    return read_records(file)


def environment() -> dict[str, str]:
    """Return the environment of a started process: it finds ``support``, and uses one thread."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


class Turnwise(WarmPopen):
    """A ``turnwise`` command in a separate process; a context manager that leaves no process.

    Attributes:
        log: The file that it writes to, standard output and error.
    """

    def __init__(self, log: Path, *arguments: str | Path, before: str = "") -> None:
        """Start it; ``before`` is Python that its process runs first."""
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        words = list(map(str, arguments))
        code = f"{before}; from turnwise.cli import main; main({words!r})"
        with log.open("wb") as file:
            command = [sys.executable, *(["-c", code] if before else ["-m", "turnwise", *words])]
            super().__init__(command, stdout=file, stderr=subprocess.STDOUT, env=environment())

    def __exit__(self, *exception: Any) -> None:
        if self.poll() is None:
            self.kill()
        super().__exit__(*exception)

    def output(self) -> str:
        """Return what it wrote so far."""
        return self.log.read_text()

    def children(self) -> list[psutil.Process]:
        """Return the processes that it started, and those that they did."""
        return started_by(psutil.Process(self.pid))

    def servers(self) -> list[psutil.Process]:
        """Return the inference servers that it started: those that listen, for forked ones have its command line."""
        return [child for child in self.children() if child.net_connections(kind="tcp")]


def training(config: TrainConfig, *, watched: bool = False) -> Turnwise:
    """Start ``turnwise train`` on a configuration; ``watched``, it carries out the kills of ``crash/events.py``."""
    file = config.runs / f"{config.name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(dump_config(config))
    watch = f"from pathlib import Path; from support.crash.events import watch; watch(Path({str(config.runs)!r}))"
    return Turnwise(config.runs / f"{config.name}.log", "train", file, before=watch if watched else "")


def wait_until(
    holds: Callable[[], bool], what: str, process: Turnwise | None = None, *, within: float = DEADLINE_S
) -> None:
    """Wait for what another process does where it gives no signal of it, ``within`` seconds.

    Raises:
        AssertionError: It ended, or the deadline passed.
    """
    deadline = time.monotonic() + within
    while not holds():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"the process ended with {process.returncode} before {what}:\n{process.output()}")
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {within:g} s")
        time.sleep(0.02)


def gone(processes: list[psutil.Process]) -> bool:
    """Return whether none of the processes runs (a zombie has ended too)."""
    return not any(map(_lives, processes))


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        # It ended between the two questions.
        return False


def scramble() -> None:
    """Move this process's random generators away from where they stand."""
    random.seed(12345)
    torch.manual_seed(12345)
