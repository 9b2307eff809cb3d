"""Evaluations whose episodes are searches: figures, files, resumption, and what is refused."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.rollout.record_files import record_bytes
from support.rollout.resumed_evaluation import evaluate_in, figures
from turnwise.config import load_config
from turnwise.envs.registration import register
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError
from turnwise.evaluation import EvalConfig, EvalPlan, EvalResult, result_table
from turnwise.evaluation.config import EvalBudget
from turnwise.evaluation.export import export_run
from turnwise.evaluation.spending import Spending
from turnwise.inference.scripted import ScriptedRequest
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.journal.finished import FINISHED, FinishedMembers
from turnwise.tasks import Task
from turnwise.tools.core import function_tool
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.observe.metrics import figures as flat
from turnwise.trajectory_file import TRAJECTORIES, read_trajectories
from turnwise.types import Message, ToolCall

SEARCHES: dict[str, dict[str, Any]] = {"best_of_n": {"samples": 3}, "tree": {"branches": 3, "rounds": 2}}
SEEN: list[int] = []


def steps(n: int = 3) -> list[dict[str, Any]]:
    """Return tasks."""
    return [{"id": f"t{number}", "prompt": f"Count to {6 + number}.", "goal": 6 + number} for number in range(n)]


TASKS = f"{Path(__file__)}:steps"


class Steps(ToolEnv):
    """Adds up to a goal."""

    def __init__(self) -> None:
        self.goal = self.total = 0

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        assert task is not None
        self.goal = task.data["goal"]
        return str(task.prompt), {}

    @function_tool
    def add(self, n: int) -> str:
        """Add."""
        self.total += n
        return f"total {self.total}"

    def score(self, final: Message | None) -> float:
        return float(self.total >= self.goal)


register("test-search-steps", Steps)


def guesses(request: ScriptedRequest) -> Message | str:
    """Act by the sampling seed: what is asked again is answered alike."""
    SEEN.append(request.params.seed or 0)
    number = random.Random(request.params.seed).randrange(5)
    if number == 4 or request.text.count("total") > 4:
        return "done"
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "add", {"n": number})]}


async def run(folder: Path, kind: str, scorer: str = "environment") -> tuple[EvalResult, FinishedMembers]:
    """Evaluate with a search; the directory is continued."""
    plan = EvalPlan.model_validate(
        {"tasks": TASKS, "samples": 2, "pass_k": [1, 2], "search": {"kind": kind, "scorer": scorer, **SEARCHES[kind]}}
    )
    config = RolloutConfig(env=SpecConfig(name="test-search-steps"), max_turns=6, retries=0)
    return await evaluate_in(folder, plan, config, guesses)


@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        ("best_of_n", (2,)),
        ("tree", (5, None)),
        pytest.param("best_of_n", (0, 5, None), marks=pytest.mark.long),
        pytest.param("tree", (0, 2, None), marks=pytest.mark.long),
    ],
)
async def test_resumed_search_equals_the_uninterrupted_one(
    kind: str, counts: tuple[int | None, ...], tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    SEEN.clear()
    uninterrupted, _ = await run(tmp_path / "whole", kind)
    requests = len(SEEN)
    assert uninterrupted.sampled is not None
    assert uninterrupted.sampled.search is not None
    payloads = record_bytes(tmp_path / "whole" / TRAJECTORIES)
    lines = (tmp_path / "whole" / FINISHED).read_bytes().splitlines(keepends=True)
    for number, end in enumerate(counts):
        count = len(payloads) if end is None else end
        folder = tmp_path / f"killed-{number}"
        folder.mkdir()
        torn = payloads[count][:40] if count < len(payloads) else b""
        (folder / TRAJECTORIES).write_bytes(b"".join(payloads[:count]) + torn)
        (folder / FINISHED).write_bytes(b"".join(lines[: count + 1]))
        SEEN.clear()
        resumed, finished = await run(folder, kind)
        assert figures(resumed) == figures(uninterrupted)
        # A finished search is not played again.
        assert finished.restored == count
        assert len(SEEN) < requests or not count
        assert bool(SEEN) == (end is not None)


async def test_costs_and_rewards_of_searches_are_shown(tmp_path: Path) -> None:
    result, _ = await run(tmp_path, "best_of_n")
    summary = result.sampled
    assert summary is not None
    assert summary.search is not None
    # An oracle chooses without mistakes; a choice is worth what it earns above the mean of the ways.
    assert summary.search.success_best.mean == summary.success.mean >= summary.search.success_mean.mean
    assert summary.search.reward_best.mean == summary.reward.mean > summary.search.reward_mean.mean
    assert summary.search.score.mean == pytest.approx(summary.reward.mean)
    assert summary.search.ways == 3
    assert summary.search.sampled_tokens > summary.sampled_tokens
    assert set(summary.pass_at) == {1, 2}
    assert result.greedy is not None
    assert result.greedy.search is None
    figures = summary.to_json()["search"]
    assert (figures["ways"], figures["tool_calls"]) == (3, summary.search.tool_calls)
    logged = flat({"kind": "eval", **result.to_json()})
    assert logged["eval/sampled/search/success_best"] == summary.success.mean
    assert logged["eval/sampled/search/ways"] == 3
    [names] = [[*map(str, column.cells)] for column in result_table(result).columns[:1]]
    assert {"ways of an episode", "tokens sampled, all ways", "success, best way", "score of the chosen"} <= {*names}
    console = Console(width=200, file=io.StringIO())
    console.print(result_table(result, "env.py:Locked: model[1]"))
    assert "env.py:Locked: model[1]" in console.file.getvalue()  # type: ignore[attr-defined]
    result.write(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert [len(row["search"]["rewards"]) for row in rows if row["part"] == "sampled"] == [3] * 6
    assert all("search" not in row for row in rows if row["part"] == "greedy")


async def test_a_budget_counts_all_ways(tmp_path: Path) -> None:
    await run(tmp_path, "best_of_n")
    spending = Spending(EvalBudget(tokens=10_000), None)
    spending.add_file(tmp_path / TRAJECTORIES)
    trajectories = list(read_trajectories(tmp_path / TRAJECTORIES))
    sampled = sum(len(turn.sampled.token_ids) for trajectory in trajectories for turn in trajectory.turns())
    assert spending.sampled_tokens == sampled


@pytest.mark.ext
async def test_chosen_branches_are_exported_and_reported(tmp_path: Path) -> None:
    from turnwise.ext.report.page import write_report
    from turnwise.ext.report.runs import RunFacts
    from turnwise.ext.report.trajectories import episodes_of, part_figures, read_rows

    await run(tmp_path, "best_of_n")
    searched = [row for row in read_trajectories(tmp_path / TRAJECTORIES) if row.search is not None]
    assert export_run(tmp_path, tmp_path / "chosen.jsonl", "sft") == len(searched) + 3
    assert export_run(tmp_path, tmp_path / "ways.jsonl", "jsonl") == 3 * len(searched) + 3
    written = [json.loads(line) for line in (tmp_path / "chosen.jsonl").read_text().splitlines()]
    assert all(row["messages"][-1]["role"] == "assistant" for row in written)
    facts = RunFacts("a", "evaluation", tmp_path / TRAJECTORIES)
    parts = part_figures(episodes_of(read_rows(facts), facts))
    returns = [trajectory.returns() for trajectory in searched]
    assert parts["greedy"]["search"] is None
    assert parts["sampled"]["search"] == pytest.approx(
        {
            "ways": 3,
            "tokens": sum(trajectory.sampled_tokens for trajectory in searched) / len(searched),
            "mean": sum(sum(rewards) for rewards in returns) / (3 * len(returns)),
            "best": sum(max(rewards) for rewards in returns) / len(returns),
        }
    )
    assert parts["sampled"]["reward"][0] == pytest.approx(parts["sampled"]["search"]["best"])
    page = tmp_path / "report.html"
    write_report([tmp_path], page)
    assert page.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "best_of_n", "scorer": "environment"}, "samples for kind best_of_n"),
        ({"kind": "best_of_n", "samples": 1, "scorer": "environment"}, "samples of at least 2"),
        ({"kind": "best_of_n", "samples": 4}, "scorer"),
        ({"kind": "best_of_n", "samples": 4, "branches": 2, "scorer": "likelihood"}, "no branches for kind best_of_n"),
        ({"kind": "beam", "branches": 2, "scorer": "likelihood"}, "allowed: 'best_of_n' or 'tree'"),
        ({"kind": "tree", "branches": 0, "scorer": "likelihood"}, "branches"),
        ({"kind": "tree", "branches": 2, "where": "nowhere", "scorer": "likelihood"}, "where is 'nowhere'"),
        ({"kind": "tree", "branches": 2, "scorer": {"function": "likelihood", "arguments": {"a": 1}}}, "no arguments"),
    ],
)
def test_malformed_search_sections_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(EvalConfig, defaults={"model": "m", "rollout": {"env": {"name": "lookup"}}, "search": settings})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"temperature": 0}}, "rollout.temperature above 0 together with search"),
        ({"samples": 0}, "samples of at least 1 together with search"),
        ({"role": "solver"}, "no role together with search.scorer environment"),
        ({"rollout": {"group_reward": {"function": "rank_by", "in_evaluation": True}}}, "group_reward"),
        ({"rollout": {"remote": {"key_file": "k"}}}, "either search or rollout.remote"),
    ],
)
def test_settings_incompatible_with_a_search_are_refused(changes: dict[str, Any], message: str) -> None:
    search = {"kind": "best_of_n", "samples": 2, "scorer": "environment"}
    rollout = {"env": {"name": "lookup"}} | changes.pop("rollout", {})
    with pytest.raises(ConfigError, match=message):
        load_config(EvalConfig, defaults={"model": "m", "rollout": rollout, "search": search} | changes)


def test_a_scorer_that_cannot_be_used_is_refused() -> None:
    from turnwise.rollout.branching.search import SearchConfig
    from turnwise.rollout.branching.strategies import BranchingStrategy

    for scorer, message in (
        ("nothing", "there is no reward function 'nothing'"),
        ("no_such_module:score", "no_such_module"),
        ("pairwise_judge", "(base_url|compares trajectories)"),
        (f"{Path(__file__)}:wants_env", "takes 'env'"),
    ):
        with pytest.raises(ConfigError, match=message):
            BranchingStrategy(SearchConfig.model_validate({"kind": "best_of_n", "samples": 2, "scorer": scorer}))


def wants_env(env: Any) -> float:
    """A reward function that needs what a way does not have."""
    del env
    return 0.0


def test_a_training_run_may_search_in_its_evaluations() -> None:
    search = {"kind": "best_of_n", "samples": 2, "scorer": "likelihood"}
    data: dict[str, Any] = {
        "name": "run", "steps": 1, "rollout": {"env": {"name": "lookup"}},
        "policies": {"main": {"model": {"path": "m"}}},
        "eval": {"tasks": "turnwise.envs.basic.lookup:tasks?n=2", "search": search},
    }  # fmt: skip
    config = load_config(TrainConfig, defaults=data)
    assert config.eval is not None
    assert config.eval.search is not None
    with pytest.raises(ConfigError, match=r"rollout.temperature above 0|temperature"):
        load_config(TrainConfig, defaults=data | {"rollout": {"env": {"name": "lookup"}, "temperature": 0}})
