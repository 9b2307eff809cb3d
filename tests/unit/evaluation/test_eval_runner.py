"""Evaluation with the code that training rolls out with: a scripted model, the shipped environment, real files."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from support.chat.toy_renderer import ToyRenderer
from turnwise.config import load_config
from turnwise.envs import ToolEnv
from turnwise.errors import ConfigError, InferenceError, TaskError
from turnwise.evaluation import EvalConfig, EvalPlan, evaluate, result_table
from turnwise.evaluation.metrics import EvalResult, rates_below, summarize
from turnwise.evaluation.runner import eval_requests, load_eval_tasks, print_notes
from turnwise.inference.scripted import ScriptedClient, ScriptedRequest
from turnwise.recorder.ledger import LedgerClient
from turnwise.rollout.audit import audit_files
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts
from turnwise.rollout.producer import RolloutProducer
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.trajectory_file import TrajectoryWriter, read_trajectories
from turnwise.types import StopReason, ToolCall, as_ids

TASKS = "turnwise.envs.basic.lookup:tasks?n=4&split=test"


def solver(request: ScriptedRequest):
    """Looks up and answers; when it samples (temperature above 0), members with an odd number guess."""
    number = int(request.session_id.rpartition("/")[2].partition(".")[0])
    text = request.text
    if request.number == 0:
        person = text.partition("Who manages ")[2].partition("?")[0]
        if request.params.temperature > 0 and number % 2 == 1:
            return "no idea"
        return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "team_of", {"person": person})]}
    answer = text.rpartition(":")[2].partition("<")[0]
    if request.number == 1:
        return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "manager_of", {"team": answer})]}
    return answer


async def run(folder: Path, plan: EvalPlan, script=solver, **options):
    renderer = ToyRenderer()
    config = RolloutConfig(env=SpecConfig(name="lookup"), max_turns=4, retries=0, temperature=0.8)
    client = LedgerClient(ScriptedClient(renderer, script), folder / "ledger.jsonl")
    writer = TrajectoryWriter(folder / "trajectories.twz")
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer, write=writer.write))
    try:
        return await evaluate(producer, plan, **options)
    finally:
        await producer.close()
        await client.close()
        writer.close()


async def loaded(plan: EvalPlan):
    return (await load_eval_tasks(plan, RolloutConfig(env=SpecConfig(name="lookup")), ToyRenderer())).tasks


async def test_figures_files_and_audit_of_an_evaluation(tmp_path: Path) -> None:
    seen: list[str] = []
    plan = EvalPlan(tasks=TASKS, samples=4, pass_k=[1, 2, 4])
    result = await run(tmp_path, plan, on_group=lambda group: seen.append(group.id))
    assert result.sampled is not None
    assert result.greedy is not None
    assert (result.sampled.success.mean, result.greedy.success.mean) == (0.5, 1.0)
    assert (result.sampled.success.episodes, result.greedy.success.episodes) == (16, 4)
    assert result.sampled.success.stderr == 0.0, "every task has the same share of successes"
    assert result.sampled.pass_at[1].mean == pytest.approx(0.5)
    # C(2, 2) / C(4, 2): the chance that both of two drawn episodes are guesses.
    assert result.sampled.pass_at[2].mean == pytest.approx(1 - 1 / 6)
    assert result.sampled.pass_at[4].mean == 1.0
    assert result.greedy.pass_at == {}
    assert result.sampled.turns == pytest.approx(2.0)
    assert result.greedy.tool_calls == 8
    assert result.sampled.stop_reasons == {"completed": 16}
    assert len(seen) == len(set(seen)) == 8

    result.write(tmp_path)
    summary = orjson.loads((tmp_path / "summary.json").read_bytes())
    assert summary["sampled"]["success"]["mean"] == 0.5
    rows = [orjson.loads(line) for line in (tmp_path / "episodes.jsonl").read_bytes().splitlines()]
    assert len(rows) == 20
    assert {row["part"] for row in rows} == {"sampled", "greedy"}
    assert sum(row["success"] for row in rows) == 12
    report = audit_files(tmp_path)
    assert report.contradictions == []
    assert report.counts["trajectories"] == 20


async def test_every_evaluation_begins_from_the_same_states(tmp_path: Path) -> None:
    plan = EvalPlan(tasks=TASKS, samples=0)
    for name in ("one", "two"):
        await run(tmp_path / name, plan, label=name)
    seeds = [
        {trajectory.task_id: trajectory.seed for trajectory in read_trajectories(tmp_path / name / "trajectories.twz")}
        for name in ("one", "two")
    ]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 4


async def test_labels_separate_evaluations_of_a_run(tmp_path: Path) -> None:
    plan = EvalPlan(tasks=TASKS, samples=1)
    for label in ("step-0", "step-10"):
        await run(tmp_path, plan, label=label)
    assert audit_files(tmp_path).contradictions == []


async def test_a_failure_of_the_server_is_counted_and_no_zero(tmp_path: Path) -> None:
    def script(request: ScriptedRequest):
        if "-1-" in request.session_id or "test-0-1" in request.session_id:
            return InferenceError("gone")
        return solver(request)

    result = await run(tmp_path, EvalPlan(tasks=TASKS, samples=0), script)
    assert result.greedy is not None
    assert (result.greedy.success.mean, result.greedy.success.episodes, result.greedy.failed) == (1.0, 3, 1)
    console = Console(file=io.StringIO(), width=120)
    console.print(result_table(result, "title"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "failed, not counted" in text
    assert "1.000 ± 0.000 (1 of 4 failed)" in text
    assert rates_below(0.9, result.to_json()) == {"greedy": 0.75}
    assert "completed 3" in text


class Unscored(ToolEnv):
    """An environment without a score."""


def test_notes_name_episodes_that_the_figures_leave_out(tmp_path: Path) -> None:
    def notes(env: str, reward: float, stop_reason: StopReason = StopReason.COMPLETED, **more: int) -> str:
        segments = [Segment(0, -1, "context", as_ids([1])), Segment(1, 0, "sampled", as_ids([2]), turn_id="t0")]
        played = Trajectory(
            "e", "e", "g", "t", segments=segments, rewards=[("t0", "score", reward)], stop_reason=stop_reason
        )
        summary = summarize([TrajectoryGroup("g", "t", [played], failed=more.pop("failed", 0))])
        console = Console(file=io.StringIO(), width=80)
        config = load_config(EvalConfig, overrides=["model=m", f"rollout.env.name={env}"])
        print_notes(config, tmp_path, EvalResult(summary, None, 1.0, **more), ["EnvError: [gone]"], console)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    unscored = f"{__name__}:Unscored"
    assert notes("lookup", 0.0) == notes(unscored, 1.0) == ""
    assert "test_eval_runner:Unscored defines no score, so each episode counts as 0: define" in notes(unscored, 0.0)
    assert "2 episodes failed and are not counted, the last error: EnvError: [gone]. The" in notes(
        "lookup", 0, failed=2
    )
    assert "1 episodes were cut off by a time-out" in notes("lookup", 0, StopReason.TIMEOUT)
    assert "interrupted: 3 episodes were unfinished" in notes("lookup", 0, unfinished=3)


async def test_tasks_are_rolled_out_sampled_and_greedily() -> None:
    plan = EvalPlan(tasks=TASKS, samples=3, limit=2)
    requests = eval_requests(plan, await loaded(plan), "step-20")
    assert [(r.group_size, r.temperature, r.tag, r.partition) for r in requests] == [
        (3, None, "step-20-sampled", "val"),
        (3, None, "step-20-sampled", "val"),
        (1, 0.0, "step-20-greedy", "val"),
        (1, 0.0, "step-20-greedy", "val"),
    ]


async def test_no_tasks_is_an_error() -> None:
    with pytest.raises(TaskError, match="holds no task"):
        await loaded(EvalPlan(tasks="turnwise.envs.basic.lookup:tasks?n=0"))


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("samples=0", "greedy: true"),
        ("pass_k=[9]", "pass_k up to samples (4)"),
        ("samples=-1", "at least 0"),
        ("rollout.tree.branches=3", "search (kind: tree) instead of rollout.tree"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(override: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(EvalConfig, overrides=["tasks=x", "greedy=false", "model=m", "rollout.env.name=lookup", override])
    assert part in str(caught.value)
    # Keys that do not go together are named, and not the whole configuration.
    assert "{'" not in str(caught.value)
