"""Rescoring: recorded episodes get other rewards, and nothing is scored twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console

from turnwise.cli import main
from turnwise.errors import ConfigError, EnvError, FormatError
from turnwise.evaluation.comparison import compare, read_scores
from turnwise.ext.checks.rescore import RescoreSettings, run_rescore
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TrajectoryWriter, read_trajectories
from turnwise.types import StopReason, as_ids

CALLS: Counter[str] = Counter()
QUIET = Console(quiet=True)


def length(text: str) -> float:
    CALLS[text] += 1
    return float(len(text))


def exact(text: str, answer: str) -> float:
    return float(text == answer)


def picky(text: str) -> float:
    CALLS[text] += 1
    if text == "four" and CALLS[text] == 1:
        raise ValueError("not today")
    return 1.0


def stateful(env: Any) -> float:
    return float(env.found)


def asked(messages: list[Any], env: Any) -> float:
    assert list(env.conversation) == messages
    return float(messages[0]["content"] == "How many?")


def recorded(name: str, text: str, *, group: str, task: str, **fields: Any) -> Trajectory:
    segments = [
        Segment(0, -1, "context", as_ids([1, 2]), ({"role": "user", "content": "How many?"},)),
        Segment(
            1, 0, "sampled", as_ids([3]), ({"role": "assistant", "content": text},), "t0", np.zeros(1, np.float32),
            ((0, 0, 1),), "stop",
        ),
    ]  # fmt: skip
    values: dict[str, Any] = {
        "rewards": [("t0", "score", 0.0)],
        "metrics": {"seconds": 1.0, "rubric/old": 3.0},
        **fields,
    }
    return Trajectory(name, name, group, task, segments=segments, partition="val", **values)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    CALLS.clear()
    folder = tmp_path / "run"
    folder.mkdir()
    writer = TrajectoryWriter(folder / "trajectories.twz")
    for trajectory in (
        recorded("a-0", "two", group="a~sampled", task="a"),
        recorded("a-1", "four", group="a~sampled", task="a"),
        recorded("b-0", "four", group="b~sampled", task="b"),
        recorded("b-g", "five", group="b~greedy", task="b"),
        recorded("b-1", "", group="b~sampled", task="b", error="EnvError: broken", stop_reason=StopReason.ERROR),
    ):
        writer.write(trajectory)
    writer.close()
    rows = [
        {"id": "a", "prompt": "p", "data": {"answer": "four"}},
        {"id": "b", "prompt": "p", "data": {"answer": "five"}},
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def scored(out: Path) -> dict[str, float]:
    return {row.id: row.reward for row in read_trajectories(out / "trajectories.twz") if row.error is None}


def test_rewards_are_replaced_and_all_else_stays(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_rescore(RescoreSettings(run, out, f"{__file__}:length", success_reward=4.0), console=QUIET)
    assert scored(out) == {"a-0": 3.0, "a-1": 4.0, "b-0": 4.0, "b-g": 4.0}
    originals = {trajectory.id: trajectory for trajectory in read_trajectories(run / "trajectories.twz")}
    for trajectory in read_trajectories(out / "trajectories.twz"):
        assert trajectory.segments[1].messages == originals[trajectory.id].segments[1].messages
        assert trajectory.segments[1].logprobs is not None
        assert trajectory.error == originals[trajectory.id].error
    new = next(trajectory for trajectory in read_trajectories(out / "trajectories.twz") if trajectory.id == "a-1")
    assert (new.rewards, new.metrics) == ([("t0", "score", 4.0)], {"seconds": 1.0})
    assert result.sampled is not None
    assert result.greedy is not None
    assert (result.sampled.success.episodes, result.sampled.failed, result.greedy.success.mean) == (3, 1, 1.0)
    assert [row.success for row in result.sampled.rows] == [row.reward == 4.0 for row in result.sampled.rows]
    # An evaluation's directory: it is compared like one.
    run_rescore(RescoreSettings(run, tmp_path / "other", f"{__file__}:asked"), console=QUIET)
    comparison = compare(*(read_scores(folder, metric="reward") for folder in (tmp_path / "other", out)))
    # Task a: 3.5 against 1; task b: 4 against 1.
    assert comparison.to_json()["difference"] == pytest.approx(2.75)


def test_a_rubric_of_a_file_with_the_tasks_data(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "rubric.yaml"
    parts = f'right: {{function: "{__file__}:exact", weight: 2}}\nasked: {{function: "{__file__}:asked", weight: 0}}\n'
    file.write_text(parts)
    settings = RescoreSettings(run, tmp_path / "out", str(file), tasks=str(tmp_path / "tasks.jsonl"))
    run_rescore(settings, console=QUIET)
    assert scored(tmp_path / "out") == {"a-0": 0.0, "a-1": 2.0, "b-0": 0.0, "b-g": 2.0}
    first = next(row for row in read_trajectories(tmp_path / "out" / "trajectories.twz") if row.id == "a-0")
    assert first.metrics["rubric/asked"] == 1.0
    assert "rubric/old" not in first.metrics
    # By default the tasks are those of the run's configuration.
    (run / "config.yaml").write_text(f"tasks:\n- source: {tmp_path / 'tasks.jsonl'}\n  name: counted\n")
    run_rescore(RescoreSettings(run, tmp_path / "again", f"{__file__}:exact"), console=QUIET)
    assert scored(tmp_path / "again")["a-1"] == 1.0


def test_the_figures_are_those_of_the_runs_evaluation(run: Path, tmp_path: Path) -> None:
    tasks = [{"source": str(tmp_path / "tasks.jsonl"), "name": "counted"}]
    plan = {"samples": 2, "pass_k": [1, 2], "by": ["answer"], "answer": "[a-z]+"}
    for name, config in (("evaluation", {"tasks": tasks, **plan}), ("training", {"eval": {"tasks": tasks, **plan}})):
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        run_rescore(RescoreSettings(run, tmp_path / name, f"{__file__}:exact"), console=QUIET)
        # One rescoring after another has them, too.
        second = RescoreSettings(tmp_path / name, tmp_path / f"{name}-again", f"{__file__}:exact")
        result = run_rescore(second, console=QUIET)
        assert result.sampled is not None
        assert result.greedy is not None
        # Task a: one of two right; of task b one episode is left, which is wrong.
        assert {k: (e.mean, e.tasks) for k, e in result.sampled.pass_at.items()} == {1: (0.25, 2), 2: (1.0, 1)}
        assert {k: e.mean for k, e in result.sampled.pass_all.items()} == {1: 0.25, 2: 0.0}
        assert result.sampled.maj_at.keys() == {1, 2}
        assert result.greedy.pass_at == {}
        assert {tag: e.success.mean for tag, e in result.sampled.by_tag.items()} == {
            "answer four": 0.5,
            "answer five": 0,
        }
        assert result.sampled.by_source["counted"].success.episodes == 3
    # Without the field in other tasks there are no tags.
    (tmp_path / "other.jsonl").write_text('{"id": "a", "prompt": "p"}\n{"id": "b", "prompt": "p"}\n')
    other = RescoreSettings(run, tmp_path / "other", f"{__file__}:length", tasks=str(tmp_path / "other.jsonl"))
    sampled = run_rescore(other, console=QUIET).sampled
    assert sampled is not None
    assert (sampled.by_tag, sampled.pass_at.keys()) == ({}, {1, 2})


def test_scored_episodes_are_not_scored_again(run: Path, tmp_path: Path) -> None:
    settings = RescoreSettings(run, tmp_path / "out", f"{__file__}:picky")
    result = run_rescore(settings, console=QUIET)
    assert result.sampled is not None
    # One of two that said "four" failed at its first call, and one had failed before.
    assert (result.sampled.failed, len(scored(tmp_path / "out"))) == (2, 3)
    calls = CALLS.total()
    result = run_rescore(settings, console=QUIET)
    assert CALLS.total() == calls + 1
    assert result.sampled is not None
    assert (result.sampled.failed, len(scored(tmp_path / "out"))) == (1, 4)


def test_unscorable_episodes_are_named(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(EnvError, match=r"no episode could be scored; .*env\.found is not recorded: only functions of"):
        run_rescore(RescoreSettings(run, out, f"{__file__}:stateful"), console=QUIET)
    # Nothing was scored, so another scorer may begin.
    run_rescore(RescoreSettings(run, out, f"{__file__}:length"), console=QUIET)
    with pytest.raises(ConfigError, match=r"holds a rescoring with another scorer: give"):
        run_rescore(RescoreSettings(run, out, f"{__file__}:stateful"), console=QUIET)
    with pytest.raises(EnvError, match="takes 'answer', which is neither one of"):
        run_rescore(RescoreSettings(run, tmp_path / "data", f"{__file__}:exact"), console=QUIET)
    with pytest.raises(ConfigError, match=r"run, which holds trajectories.index, trajectories.twz: name another"):
        run_rescore(RescoreSettings(run, run, f"{__file__}:length"), console=QUIET)
    with pytest.raises(ConfigError, match=r"there is no reward function 'regexp'; did you mean 'regex'"):
        run_rescore(RescoreSettings(run, tmp_path / "a", "regexp"), console=QUIET)
    with pytest.raises(ConfigError, match=r"--scorer is nowhere.yaml, which cannot be read"):
        run_rescore(RescoreSettings(run, tmp_path / "a", "nowhere.yaml"), console=QUIET)
    (tmp_path / "few.jsonl").write_text('{"id": "a", "prompt": "p"}\n')
    with pytest.raises(ConfigError, match=r"few.jsonl, which has no task 'b' \(1 are missing that were rolled out\)"):
        run_rescore(
            RescoreSettings(run, tmp_path / "a", f"{__file__}:length", str(tmp_path / "few.jsonl")), console=QUIET
        )
    with pytest.raises(FormatError, match="no trajectories of partition train"):
        run_rescore(RescoreSettings(run, tmp_path / "a", f"{__file__}:length", partition="train"), console=QUIET)
    assert not (tmp_path / "a").exists()


def test_the_command_prints_the_metrics(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["rescore", str(run), "-o", str(tmp_path / "out"), "--scorer", f"{__file__}:length"])
    assert exited.value.code == 0
    output = capsys.readouterr().out
    assert "success" in output
    assert f"written to {tmp_path / 'out'}" in output.replace("\n", "")
    assert (tmp_path / "out" / "summary.json").exists()
