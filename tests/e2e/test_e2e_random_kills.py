"""A run is killed again and again, at random moments, and still ends with every step trained once, proven by the audit.

Each kill hits the trainer or its inference server, wherever they are: starting, rolling out, updating, syncing weights,
saving. A dead server is started again by the run (one that dies while it is started again ends it, with an error that
says so); a dead trainer is started again here, as a person would. What is left of the kills stands in the files that
``turnwise audit`` reads.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from support.lookup_run import GROUPS, MEMBERS, Turnwise, gone, silent, train_config, training, wait_until
from turnwise.rollout.batches import read_batches
from turnwise.rollout.writer import read_trajectories
from turnwise.trainer.audit import audit_run
from turnwise.trainer.checkpoint import CheckpointStore
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.train import run_train

MORE_STEPS = 10_000


def servers_of(process: Turnwise) -> list[psutil.Process]:
    try:
        return process.servers()
    except psutil.NoSuchProcess:
        return []


def kill_at_random(config: TrainConfig, kills: int, seconds: float, seed: int) -> Counter[str]:
    """Start the run and kill one of its processes, until enough was killed or the time is over; return who was."""
    draw, killed, ends = random.Random(seed), Counter[str](), time.monotonic() + seconds
    while killed.total() < kills and time.monotonic() < ends:
        with training(config) as process:
            while killed.total() < kills and time.monotonic() < ends:
                wait_until(lambda p=process: p.poll() is not None or servers_of(p), "a server")
                # No synchronisation: which moment it is, is what is drawn.
                time.sleep(draw.uniform(0, 3))
                servers = servers_of(process)
                if process.poll() is not None:
                    # On a busy machine a server may be killed before it has started.
                    said = process.output()
                    assert "died" in said or "did not start: signal 9" in said, said
                    break
                victim = draw.choice(["trainer", *["server"] * bool(servers)])
                os.kill(process.pid if victim == "trainer" else servers[0].pid, signal.SIGKILL)
                killed[victim] += 1
                if victim == "trainer":
                    assert process.wait() == -signal.SIGKILL
                    wait_until(lambda left=servers: gone(left), "the end of the servers without their trainer")
                    break
                wait_until(lambda left=servers[:1]: gone(left), "the end of the killed server")
    return killed


def check(config: TrainConfig, killed: Counter[str]) -> None:
    """Let the run end, and prove that each step was trained once."""
    run = config.runs / config.name
    steps = max([0, *CheckpointStore(run / "checkpoints").steps()]) + 2
    assert run_train(config.model_copy(update={"steps": steps}), console=silent()).steps == steps
    report = audit_run(run, at_most=4, console=silent())
    assert report.contradictions == [], killed
    batches = read_batches(run / "batches.jsonl")
    assert batches.steps == steps
    by_step = {step: {row.trajectory for row in batches.rows if row.step == step} for step in range(1, steps + 1)}
    assert all(0 < len(trained) <= GROUPS * MEMBERS for trained in by_step.values())
    # None in two steps: the sets of the steps have nothing in common.
    assert sum(map(len, by_step.values())) == len(set().union(*by_step.values()))
    known = {trajectory.id for trajectory in read_trajectories(run / "trajectories.jsonl")}
    assert set().union(*by_step.values()) <= known
    print(f"killed {dict(killed)}, {steps} steps, {report.counts['train steps undone by a kill']} of them done again")


def config_of(model: Path, runs: Path) -> TrainConfig:
    return train_config(model, runs, steps=MORE_STEPS, checkpoint={"every": 1, "keep": 2})


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_few_random_kills_lose_no_step(lookup_model: Path, tmp_path: Path) -> None:
    config = config_of(lookup_model, tmp_path)
    killed = kill_at_random(config, kills=4, seconds=60, seed=1)
    assert killed.total() >= 1
    check(config, killed)


@pytest.mark.real
@pytest.mark.timeout(900)
def test_many_random_kills_lose_no_step(lookup_model: Path, tmp_path: Path) -> None:
    """As many of 200 kills as five minutes hold; the figure is printed."""
    config = config_of(lookup_model, tmp_path)
    killed = kill_at_random(config, kills=200, seconds=300, seed=2)
    assert killed.total() >= 5
    check(config, killed)
