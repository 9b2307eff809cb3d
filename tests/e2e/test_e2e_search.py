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
    told = [str(each["content"]) for each in messages if each["role"] == "tool"]
    known = [each for each in told if " " not in each]
    return min(len(set(known)), 2) + float(bool(known) and text.strip() == known[-1])


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
    given = settings if search is None else settings | {"search": search}
    result = run_eval(load_config(EvalConfig, defaults=given), console=Console(file=io.StringIO()))
    assert result.sampled is not None
    return result.sampled


@pytest.mark.long
def test_searches_find_more_than_plain_episodes(url: str, warm_lookup: Path, tmp_path: Path) -> None:
    plain = evaluate(warm_lookup, url, tmp_path / "plain")
    print(f"plain: success {plain.success}, {plain.sampled_tokens:.0f} tokens")
    for kind, keys in SEARCHES.items():
        for scorer in ("environment", "likelihood", f"{__file__}:grounded"):
            out = tmp_path / f"{kind}-{scorer.rpartition(':')[2]}"
            found = evaluate(warm_lookup, url, out, {"kind": kind, "scorer": scorer, **keys})
            assert found.search is not None
            print(
                f"{out.name}: success {found.success}, any way {found.search.success_mean.mean:.3f}, best way "
                f"{found.search.success_best.mean:.3f}, {found.search.ways:.1f} ways, "
                f"{found.search.sampled_tokens:.0f} tokens of all, {found.search.tool_calls} calls"
            )
            assert found.failed == 0
            if scorer == "environment":
                assert found.success.mean == found.search.success_best.mean
            if scorer != "likelihood":
                assert found.success.mean > plain.success.mean
            assert found.success.mean <= found.search.success_best.mean
    report = audit_run(tmp_path / "tree-grounded", at_most=8, console=silent())
    assert report.contradictions == []


@pytest.mark.long
def test_a_training_run_searches_in_its_evaluations(lookup_model: Path, tmp_path: Path) -> None:
    held_out = "turnwise.envs.basic.lookup:tasks?n=3&split=test"
    search = {"kind": "tree", "branches": 3, "scorer": "likelihood"}
    plan = {"tasks": held_out, "samples": 1, "greedy": False, "every": None, "search": search}
    run_train(train_config(lookup_model, tmp_path, steps=1, eval=plan), console=silent())
    run = tmp_path / "run"
    found = [each for each in lines(run / "metrics.jsonl") if each["kind"] == "eval"]
    assert len(found) == 2
    for each in found:
        shown = figures(each)
        assert shown["eval/sampled/search/ways"] == 4
        assert shown["eval/sampled/search/sampled_tokens"] > shown["eval/sampled/sampled_tokens"]
    searched = [each for each in read_trajectories(run / "trajectories.twz") if each.partition == "val"]
    assert all(each.search is not None and len(each.branches) == 4 for each in searched)
    trained = [each for each in read_trajectories(run / "trajectories.twz") if each.partition == "train"]
    assert all(each.search is None and not each.branches for each in trained)
    assert audit_run(run, at_most=4, console=silent()).contradictions == []
