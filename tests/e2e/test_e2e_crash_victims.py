"""Each process that a run needs is killed at each moment: the run resumes, loses nothing and trains nothing twice.

One run per victim and mode walks through all moments. What is recognised, and who is killed then, stands in
``support/crash/moments.py``; what has to hold, in ``support/crash/checks.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.crash.checks import prove
from support.crash.moments import ITSELF, MOMENTS
from support.crash.runs import open_boxes, struck, struck_config, train_through, weights_left
from support.trainer.lookup_run import wait_until
from turnwise.trainer.config.train import TrainConfig

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def walk(config: TrainConfig, name: str) -> None:
    """Train through all moments, and prove what is left."""
    lives = train_through(config)
    kills = struck(config.runs)
    victim = config.custom["crash"]["victim"]
    assert [(kill["moment"], kill["victim"]) for kill in kills] == [(moment, victim) for moment in MOMENTS]
    assert len({kill["pid"] for kill in kills}) == len(MOMENTS)
    run = config.runs / config.name
    proof = prove(run, lives, short=config.overlap.stream > 1)
    assert proof.trained > 0
    assert weights_left(config.runs) == []
    assert list((run / "checkpoints").glob(".*")) == []
    if victim in ITSELF:
        assert len(lives) == len(MOMENTS)
        # The update that was under way counts for nothing.
        assert proof.redone > 0
    print(f"{name}: {len(lives)} processes did not end in order; {proof}")


@pytest.mark.alike("victims")
@pytest.mark.parametrize("mode", ["sync", "colocated", "colocate_async", "separate_async"])
@pytest.mark.parametrize("victim", ["trainer", "engine"])
def test_the_trainer_and_the_engine_die_at_every_moment(
    victim: str, mode: str, lookup_model: Path, tmp_path: Path
) -> None:
    walk(struck_config(lookup_model, tmp_path, victim, mode), f"{victim}, {mode}")


@pytest.mark.parametrize("mode", ["sync", "separate_async"])
def test_the_runner_dies_at_every_moment(mode: str, lookup_model: Path, tmp_path: Path) -> None:
    walk(struck_config(lookup_model, tmp_path, "runner", mode), f"runner, {mode}")


def test_run_resumes_after_its_gateway_dies_at_any_moment(lookup_model: Path, tmp_path: Path) -> None:
    """It lives in the process of the rollouts; no program is left of those that asked it."""
    walk(struck_config(lookup_model, tmp_path, "gateway", "sync"), "gateway, sync")


@pytest.mark.parametrize(("victim", "mode"), [("host", "colocate_async"), ("sandboxes", "sync")])
def test_sandboxes_of_a_process_killed_at_any_moment_are_removed(
    victim: str, mode: str, lookup_model: Path, tmp_path: Path
) -> None:
    """The process that opened them, and the one that started them."""
    with open_boxes() as boxes:
        walk(struck_config(lookup_model, tmp_path, victim, mode, boxes), f"{victim}, {mode}")
        wait_until(boxes.empty, "the end of all sandboxes")
