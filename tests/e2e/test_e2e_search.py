"""Searches with a small model: what plain episodes, best_of_n and trees reach for their tokens."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.trainer.lookup_run import Turnwise, lines, silent, train_config, wait_until
from turnwise.config import load_config
from turnwise.evaluation.config import EvalConfig
from turnwise.evaluation.metrics import Summary
from turnwise.evaluation.runner import run_eval
from turnwise.trainer.observe.metrics import figures
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.train import run_train
from turnwise.trajectory_file import read_trajectories
from turnwise.types import Message

PORT = re.compile(r"serving \S+ on 127\.0\.0\.1:(\d+)")
SEARCHES: dict[str, dict[str, Any]] = {"best_of_n": {"samples": 4}, "tree": {"branches": 5}}
TASKS = 40


def grounded(messages: list[Message], text: str) -> float:
    """Score a way by what its look-ups gave, and its answer by whether it is what the last one gave."""
    answers = [str(message["content"]) for message in messages if message["role"] == "tool"]
    names = [answer for answer in answers if " " not in answer]
    return min(len(set(names)), 2) + float(bool(names) and text.strip() == names[-1])


@pytest.fixture(scope="module")
def url(warm_lookup: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The model after its warm start, served once for all evaluations."""
    log = tmp_path_factory.mktemp("serve") / "serve.log"
    with Turnwise(log, "serve", warm_lookup / "sft" / "model", "--port", "0") as server:
        wait_until(lambda: PORT.search(server.output()) is not None, "the server's address", server)
        yield f"http://127.0.0.1:{PORT.search(server.output())[1]}"


def evaluate(model: Path, url: str, out: Path, search: dict[str, Any] | None = None) -> Summary:
    """Return the figures of the sampled episodes."""
    settings: dict[str, Any] = {
        "model": model / "sft" / "model", "url": url, "out": out, "samples": 2, "greedy": False,
        "tasks": f"turnwise.envs.basic.lookup:tasks?n={TASKS}&split=test",
        "rollout": {"env": {"name": "lookup"}, "max_turns": 5, "max_tokens_per_turn": 24},
    }  # fmt: skip
    eval_settings = settings if search is None else settings | {"search": search}
    result = run_eval(load_config(EvalConfig, defaults=eval_settings), console=Console(file=io.StringIO()))
    assert result.sampled is not None
    return result.sampled


@pytest.mark.long
def test_searches_find_more_than_plain_episodes(url: str, warm_lookup: Path, tmp_path: Path) -> None:
    plain = evaluate(warm_lookup, url, tmp_path / "plain")
    print(f"plain: success {plain.success}, {plain.sampled_tokens:.0f} tokens")
    for kind, keys in SEARCHES.items():
        for scorer in ("environment", "likelihood", f"{__file__}:grounded"):
            out = tmp_path / f"{kind}-{scorer.rpartition(':')[2]}"
            result = evaluate(warm_lookup, url, out, {"kind": kind, "scorer": scorer, **keys})
            assert result.search is not None
            print(
                f"{out.name}: success {result.success}, any way {result.search.success_mean.mean:.3f}, best way "
                f"{result.search.success_best.mean:.3f}, {result.search.ways:.1f} ways, "
                f"{result.search.sampled_tokens:.0f} tokens of all, {result.search.tool_calls} calls"
            )
            assert result.failed == 0
            if scorer == "environment":
                assert result.success.mean == result.search.success_best.mean
            if scorer != "likelihood":
                assert result.success.mean > plain.success.mean
            assert result.success.mean <= result.search.success_best.mean
    report = audit_run(tmp_path / "tree-grounded", at_most=8, console=silent())
    assert report.contradictions == []


@pytest.mark.long
def test_a_training_run_searches_in_its_evaluations(lookup_model: Path, tmp_path: Path) -> None:
    held_out = "turnwise.envs.basic.lookup:tasks?n=3&split=test"
    search = {"kind": "tree", "branches": 3, "scorer": "likelihood"}
    plan = {"tasks": held_out, "samples": 1, "greedy": False, "every": None, "search": search}
    run_train(train_config(lookup_model, tmp_path, steps=1, eval=plan), console=silent())
    run = tmp_path / "run"
    records = [record for record in lines(run / "metrics.jsonl") if record["kind"] == "eval"]
    assert len(records) == 2
    for record in records:
        values = figures(record)
        assert values["eval/sampled/search/ways"] == 4
        assert values["eval/sampled/search/sampled_tokens"] > values["eval/sampled/sampled_tokens"]
    searched = [
        trajectory for trajectory in read_trajectories(run / "trajectories.twz") if trajectory.partition == "val"
    ]
    assert all(trajectory.search is not None and len(trajectory.branches) == 4 for trajectory in searched)
    trained = [
        trajectory for trajectory in read_trajectories(run / "trajectories.twz") if trajectory.partition == "train"
    ]
    assert all(trajectory.search is None and not trajectory.branches for trajectory in trained)
    assert audit_run(run, at_most=4, console=silent()).contradictions == []
