"""``turnwise eval`` and ``turnwise serve`` as commands: a checkpoint of a run, served by either, says the same."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from support.trainer.lookup_run import Turnwise, gone, lines, silent, train_config, wait_until
from turnwise import read_run
from turnwise.evaluation.comparison import compare, read_scores
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import read_trajectories

TASKS = "turnwise.envs.basic.lookup:tasks?n=8&split=test"
PORT = re.compile(r"serving \S+ on 127\.0\.0\.1:(\d+)")


@pytest.fixture(scope="module")
def checkpoint(lookup_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("trained")
    return run_train(train_config(lookup_model, runs, steps=1), console=silent()).directory / "checkpoints/step_000001"


def evaluate(checkpoint: Path, out: Path, *more: str) -> str:
    """Evaluate with the command; return what it printed."""
    command = ("eval", "support.envs.run_envs:Graded", "-m", str(checkpoint), "-t", TASKS, "-n", "2", "-o", str(out))
    limits = ("rollout.max_turns=3", "rollout.max_tokens_per_turn=24")
    with Turnwise(out.with_suffix(".log"), *command, *limits, *more) as process:
        process.wait()
    summary = json.loads((out / "summary.json").read_text())
    missed = "--fail-under" in more and min(summary[part]["success"]["mean"] for part in ("sampled", "greedy")) < 1
    assert process.returncode == int(missed), process.output()
    assert ("below --fail-under 1" in process.output()) == missed
    return process.output()


def greedy(out: Path) -> dict[str, Any]:
    """Return what the greedy episodes said, by task."""
    scores = {}
    for trajectory in read_trajectories(out / "trajectories.twz"):
        if "greedy" in trajectory.group_id:
            ids = [segment.token_ids.tolist() for segment in trajectory.segments]
            scores[trajectory.task_id] = (ids, trajectory.rewards, trajectory.stop_reason)
    return scores


@pytest.mark.long
def test_evaluation_of_a_checkpoint_does_not_depend_on_its_server(checkpoint: Path, tmp_path: Path) -> None:
    printed = evaluate(checkpoint, tmp_path / "own")
    with Turnwise(tmp_path / "serve.log", "serve", checkpoint, "--port", "0") as server:
        wait_until(lambda: PORT.search(server.output()) is not None, "the server's address", server)
        port = PORT.search(server.output())[1]
        url = f"http://127.0.0.1:{port}"
        elsewhere = evaluate(checkpoint, tmp_path / "served", "--url", url, "--fail-under", "1")
        children = server.servers()
        server.send_signal(signal.SIGINT)
        assert server.wait() in (0, 130)
        assert gone(children)

    for name, text in (("own", printed), ("served", elsewhere)):
        out = tmp_path / name
        assert re.search(r"success +\d\.\d{3} ± \d\.\d{3} +\d\.\d{3} ± \d\.\d{3}", text), text
        summary = json.loads((out / "summary.json").read_text())
        figures = re.search(r"success +(\S+) ± (\S+)", text)
        assert float(figures[1]) == pytest.approx(summary["sampled"]["success"]["mean"], abs=5e-4)
        assert float(figures[2]) == pytest.approx(summary["sampled"]["success"]["stderr"], abs=5e-4)
        assert (summary["sampled"]["success"]["episodes"], summary["greedy"]["success"]["episodes"]) == (16, 8)
        assert len(lines(out / "episodes.jsonl")) == 24
        report = audit_run(out, console=silent())
        assert report.contradictions == []
        assert report.counts["trajectories"] == 24
        # The weights of an external server are unknown.
        assert bool(report.counts["logprobs recomputed"]) == (name == "own")
    assert greedy(tmp_path / "own") == greedy(tmp_path / "served")
    assert len(greedy(tmp_path / "own")) == 8
    scores = [read_scores(tmp_path / name, part="greedy") for name in ("own", "served")]
    result = compare(*scores)
    assert (result.tasks, result.difference, result.p_value) == (8, 0.0, 1.0)
    turns = read_run(tmp_path / "own").turns("val")
    assert turns["sampled_tokens"].sum() == read_run(tmp_path / "own").tokens()["sampled"].sum()
