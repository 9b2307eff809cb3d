"""Training runs that are killed at chosen moments and restarted.

The moments are in ``moments.py``, what has to hold afterwards in ``checks.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from support.agents.blackbox_episodes import CHAT_LOOP
from support.crash.checks import Left, left_on_disk
from support.crash.events import KILL, Kill, ran_below
from support.crash.events import struck as event_kills
from support.crash.moments import ITSELF, MOMENTS
from support.rollout.remote_runs import make_key, remote_rollout, runner
from support.trainer.lookup_run import Turnwise, gone, lines, train_config, training, wait_until
from turnwise.errors import SandboxUnavailable
from turnwise.sandboxes.local import LocalBackend
from turnwise.trainer.config.train import TrainConfig

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "colocated": {"layout": "colocated"},
    "colocate_async": {"mode": "colocate_async"},
    "separate_async": {"mode": "separate_async", "replay": {"max_staleness": 2, "ahead": 2}, "overlap": {"stream": 2}},
}
# No member runs out of attempts, however often what it needs is killed.
_RETRIES = 50
_ENDLESS = 100_000


class Boxes:
    """A folder that sandboxes can reach, and what of them is left there.

    Attributes:
        config: ``rollout.sandbox`` that uses it, on the strongest rung that this machine has.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = {"config": {"directory": str(folder), **asyncio.run(self._rung())}}

    async def _rung(self) -> dict[str, Any]:
        for config in ({}, {"isolation": "plain", "unsafe": True}):
            backend = LocalBackend(directory=self.folder, **config)
            try:
                await backend.probe()
            except SandboxUnavailable:
                continue
            finally:
                await backend.close()
            return config
        raise AssertionError("no sandbox of any kind can be started here")

    def empty(self) -> bool:
        """Return whether no folder and no mount of a sandbox is left."""
        return not any(self.folder.iterdir()) and str(self.folder) not in Path("/proc/self/mountinfo").read_text()


@contextlib.contextmanager
def open_boxes() -> Iterator[Boxes]:
    """Make a folder for sandboxes, and remove it."""
    with tempfile.TemporaryDirectory(prefix="crash-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o755)
        yield Boxes(Path(folder))


def killed_config(
    model: Path, runs: Path, victim: str, mode: str, boxes: Boxes | None = None, **changes: Any
) -> TrainConfig:
    """Return the configuration of a run that has what is to be killed, and does not end by itself."""
    rollout: dict[str, Any] = {"concurrency": 2, "retries": _RETRIES}
    if victim == "runner":
        make_key(runs)
        rollout |= remote_rollout(runs)
    if victim == "gateway":
        rollout["agent"] = {"name": "blackbox", "config": {"command": f"{CHAT_LOOP} {{prompt}}"}}
    if boxes is not None:
        rollout |= {"sandbox": boxes.config, "env": {"name": "support.crash.moments:Boxed"}}
    return train_config(
        model,
        runs,
        **{
            "steps": _ENDLESS,
            "rollout": {"env": {"name": "support.crash.moments:Struck"}} | rollout,
            "checkpoint": {"every": 1, "keep": 2},
            **MODES[mode],
            **changes,
        },
    )


def struck_config(model: Path, runs: Path, victim: str, mode: str, boxes: Boxes | None = None) -> TrainConfig:
    """Return the configuration of a run whose victim dies at all moments, and which then ends."""
    crash = {"victim": victim, "folder": str(runs)}
    return killed_config(
        model,
        runs,
        victim,
        mode,
        boxes,
        policies={"main": {"engine": "support.crash.moments:StruckLearner"}},
        hooks="support.crash.moments:CrashSchedule",
        custom={"crash": crash},
    )


def train_through(config: TrainConfig) -> list[Left]:
    """Train, and start again what dies, until the run ends in order.

    Returns:
        What each process of the run left that did not end in order.
    """
    victim, folder = config.custom["crash"]["victim"], config.runs
    lives: list[Left] = []
    while len(lives) <= len(MOMENTS):
        with training(config) as process:
            if victim == "runner":
                _play_through(config, process)
            code = process.wait()
            output = process.output()
        for blow in struck(folder):
            wait_until(
                lambda processes=blow["below"]: not any(map(_lives, processes)), f"the end of what {blow} had started"
            )
        if code == 0:
            return lives
        if victim in ITSELF:
            assert code == -signal.SIGKILL, output
        else:
            # A run starts a server again once within an hour.
            assert (victim, code) == ("engine", 1), output
            assert "died again after a restart" in output, output
        lives.append(left_on_disk(folder / config.name))
    raise AssertionError(f"the run was started {len(lives)} times:\n{output}")


def struck(folder: Path) -> list[dict[str, Any]]:
    """Return what was struck: the moment, the victim's process, and those below it."""
    file = folder / "struck.jsonl"
    return lines(file) if file.exists() else []


def weights_left(folder: Path) -> list[Path]:
    """Return the folders of weights in shared memory that killed trainers of a run left."""
    pids = {blow["pid"] for blow in struck(folder)}
    return [path for pid in pids for path in Path("/dev/shm").glob(f"turnwise-weights-{pid}-*")]


def _lives(noted: list[float]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(int(noted[0]))
        return process.create_time() == noted[1] and not gone([process])
    return False


def start_runner(config: TrainConfig) -> Turnwise:
    """Start a runner that notes its process when it plays, and waits for runs."""
    agent = ("--agent", "support.crash.moments:NotedAgent", "-c", f"folder={json.dumps(str(config.runs))}")
    return runner(config, "runner", *agent, "-n", "2", "--stay")


def _play_through(config: TrainConfig, process: Turnwise) -> None:
    """Have a runner play, and another one in its place when it dies, until the run has ended."""
    while process.poll() is None:
        with start_runner(config) as player:
            while process.poll() is None and player.poll() is None:
                time.sleep(0.02)


def kill_at_random_events(config: TrainConfig, kills: int, *, seed: int) -> list[Left]:
    """Start a run so often, and kill its trainer at drawn events; see :func:`kill_at`."""
    draw = random.Random(seed)
    return kill_at(config, [Kill.draw(draw) for _ in range(kills)])


def kill_at(config: TrainConfig, kills: Sequence[Kill]) -> list[Left]:
    """Start a run for each kill of its trainer, until it ends in order; return what the killed processes left."""
    lives: list[Left] = []
    for number, kill in enumerate(kills, 1):
        with training(config, watched=True) as process:
            kill.order(config.runs)
            code, output = process.wait(), process.output()
        if code == 0:
            break
        assert code == -signal.SIGKILL, output
        [*_, last] = events = event_kills(config.runs)
        assert len(events) == number, output
        below = list(ran_below(last))
        wait_until(partial(gone, below), f"the end of what {last} had started")
        lives.append(left_on_disk(config.runs / config.name))
    (config.runs / KILL).unlink(missing_ok=True)
    return lives
