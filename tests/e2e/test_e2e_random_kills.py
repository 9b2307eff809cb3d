"""A run is killed again and again, at random events, and still ends with every step trained once, proven by the audit.

Each kill hits one of the processes that the run needs, wherever they are: the trainer (which carries the gateway and
owns the sandboxes), its inference server, a runner, the process that starts the sandboxes. A dead server is started
again by the run (one that dies once more ends it, with an error that says so); a dead trainer and a dead runner are
started again here, as a person would. What is left of the kills stands in the files that ``turnwise audit`` reads.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from support.crash.checks import Left, left_on_disk, prove
from support.crash.events import EVENTS, KILL, Kill, ran_below, struck
from support.crash.moments import listening
from support.crash.runs import MODES, Boxes, kill_at, killed_config, open_boxes, start_runner
from support.trainer.lookup_run import Turnwise, gone, silent, training, wait_until
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.checkpoint import CheckpointStore
from turnwise.trainer.train import run_train

# How often each victim is drawn, among those that a run has.
SHARES = {"trainer": 1, "server": 1, "runner": 3, "sandboxes": 3}


class RandomKills:
    """Kills processes of one run at events drawn at random, and starts them again.

    Attributes:
        killed: Who was, how often.
        lives: What the processes of the run left that did not end in order.
    """

    def __init__(self, config: TrainConfig, *, boxes: Boxes | None, seed: int) -> None:
        self.config, self.run = config, config.runs / config.name
        self.killed: Counter[str] = Counter()
        self.lives: list[Left] = []
        self._draw = random.Random(seed)
        self._runner: Turnwise | None = None
        self._victims = ["trainer", "server"]
        if config.rollout.remote is not None:
            self._victims.append("runner")
        if boxes is not None:
            self._victims.append("sandboxes")

    def kill_at_random(self, kills: int) -> None:
        """Start the run and kill one of its processes, until enough was killed."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_runner)
            while self.killed.total() < kills:
                with training(self.config, watched=True) as process:
                    _see_the_end_of(self._live(process, kills))
                self.lives.append(left_on_disk(self.run))

    def _live(self, process: Turnwise, kills: int) -> list[psutil.Process]:
        """Kill until the trainer has ended; return the processes below it that were seen last."""
        order, below = self.config.runs / KILL, list[psutil.Process]()
        while self.killed.total() < kills:
            victim = self._draw.choices(self._victims, [SHARES[kind] for kind in self._victims])[0]
            victims: list[psutil.Process] = []
            while not victims and process.poll() is None:
                self._keep_runner(process)
                victims = self._up(victim, process)
                time.sleep(0.01)
            if victims:
                Kill.draw(self._draw, victims[0].pid).order(self.config.runs)
            while order.exists() and process.poll() is None:
                self._keep_runner(process)
                time.sleep(0.01)
            order.unlink(missing_ok=True)
            new = struck(self.config.runs)[self.killed.total() :]
            for kill in new:
                self.killed[victim] += 1
                below = list(ran_below(kill)) if victim == "trainer" else below
            if victim == "trainer" and new:
                assert process.wait() == -signal.SIGKILL, process.output()
                return below
            if process.poll() is not None:
                output = process.output()
                assert "died again after a restart" in output or "did not start: signal 9" in output, output
                return []
        process.kill()
        process.wait()
        return below

    def _up(self, victim: str, process: Turnwise) -> list[psutil.Process]:
        """Return the victim, once it does what it is there for."""
        with contextlib.suppress(psutil.NoSuchProcess):
            if victim == "runner":
                player = self._runner
                up = player is not None and player.poll() is None and "connected to" in player.output()
                return [psutil.Process(player.pid)] if up else []
            below = psutil.Process(process.pid).children(recursive=True)
            if victim == "sandboxes":
                return [process for process in below if any("boot.launcher" in part for part in _command(process))]
            # A forked server has the command line of the trainer.
            servers = [child for child in psutil.Process(process.pid).children() if listening(child)]
            return servers if victim == "server" else [psutil.Process(process.pid)] * bool(servers)
        return []

    def _keep_runner(self, process: Turnwise) -> None:
        if self.config.rollout.remote is None or process.poll() is not None:
            return
        if self._runner is not None and self._runner.poll() is None:
            return
        self._end_runner()
        self._runner = start_runner(self.config)

    def _end_runner(self) -> None:
        if self._runner is not None:
            with self._runner:
                pass

    def check(self) -> None:
        """Let the run end, and prove that each step was trained once."""
        with contextlib.ExitStack() as stack:
            if self.config.rollout.remote is not None:
                self._end_runner()
                stack.enter_context(start_runner(self.config))
            end_and_prove(self.config, self.lives)
        events = Counter(kill["event"] for kill in struck(self.config.runs))
        print(f"killed {dict(self.killed)} at {dict(events)}, {len(self.lives)} did not end in order")


def end_and_prove(config: TrainConfig, lives: Sequence[Left]) -> None:
    """Train two more steps than the last checkpoint has, and prove that each step was trained once."""
    steps = max([0, *CheckpointStore(config.runs / config.name / "checkpoints").steps()]) + 2
    assert run_train(config.model_copy(update={"steps": steps}), console=silent()).steps == steps
    proof = prove(config.runs / config.name, lives, short=config.overlap.stream > 1)
    assert proof.steps == steps
    assert proof.trained > 0
    print(proof)


def _command(process: psutil.Process) -> list[str]:
    """Return a process's command line: empty after its end, also while its parent has not waited for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def _see_the_end_of(below: list[psutil.Process]) -> None:
    """Wait for the end of what a dead trainer had started."""
    try:
        wait_until(lambda: gone(below), "the end of what a dead trainer had started")
    except AssertionError as error:
        remaining = [(process, _command(process)) for process in below if not gone([process])]
        raise AssertionError(f"{error}: {remaining}") from None


@contextlib.contextmanager
def random_kills(model: Path, runs: Path, victim: str, mode: str, seed: int) -> Iterator[RandomKills]:
    """Make a run that has what is to be killed besides trainer and server, and see that nothing is left of it."""
    with contextlib.ExitStack() as stack:
        boxes = stack.enter_context(open_boxes()) if victim == "sandboxes" else None
        yield RandomKills(killed_config(model, runs, victim, mode, boxes), boxes=boxes, seed=seed)
        if boxes is not None:
            wait_until(boxes.empty, "the end of all sandboxes")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_kills_at_each_kind_of_event_lose_no_step(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    """In an order that is drawn, each at one of the first events of its kind, and some in the middle of a line."""
    draw = random.Random(mode)
    config = killed_config(lookup_model, tmp_path, "trainer", mode)
    events = draw.sample(list(EVENTS), len(EVENTS))
    kills = [Kill(event, draw.randint(1, EVENTS[event][2]), draw.random() < 0.3) for event in events]
    lives = kill_at(config, kills)
    assert [kill["event"] for kill in struck(tmp_path)] == events
    end_and_prove(config, lives)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_few_kills_at_random_events_lose_no_step(lookup_model: Path, tmp_path: Path) -> None:
    with random_kills(lookup_model, tmp_path, "sandboxes", "sync", seed=1) as run:
        run.kill_at_random(4)
        run.check()


@pytest.mark.real
@pytest.mark.alike("random kills")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("victim", "mode", "kills"),
    [("runner", "sync", 80), ("gateway", "colocate_async", 40), ("sandboxes", "separate_async", 80)],
)
def test_two_hundred_kills_at_random_events_lose_no_step(
    victim: str, mode: str, kills: int, lookup_model: Path, tmp_path: Path
) -> None:
    """In three runs, each with other things around it."""
    with random_kills(lookup_model, tmp_path, victim, mode, seed=2) as run:
        run.kill_at_random(kills)
        assert run.killed.total() == kills
        run.check()
