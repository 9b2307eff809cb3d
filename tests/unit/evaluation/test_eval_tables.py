"""Tables of a run: what is in its file, joined as a person would."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from turnwise import RunTables, read_run
from turnwise.errors import ConfigError, FormatError
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TrajectoryWriter
from turnwise.types import StopReason, as_ids


def session(episode: str, agent: str = "main", partition: str = "train", reward: float = 1.0) -> Trajectory:
    call = {"id": "c0", "type": "function", "function": {"name": "team_of", "arguments": {"person": "mia"}}}
    late = {**call, "id": "c1", "function": {"name": "late", "arguments": "{}"}}
    segments = [
        Segment(0, -1, "context", as_ids([1, 2]), ({"role": "user", "content": "Who?"},)),
        Segment(
            1, 0, "sampled", as_ids([3, 4, 5]), ({"role": "assistant", "content": "Hm.", "tool_calls": [call]},), "t0",
            np.array([-1.0, -2.0, -3.0], np.float32), ((7, 0, 2), (8, 2, 3)), "stop",
        ),
        Segment(2, 1, "context", as_ids([6]), ({"role": "tool", "tool_call_id": "c0", "content": "red"},)),
        Segment(
            3, 2, "sampled", as_ids([7, 8]), ({"role": "assistant", "content": "zoe", "tool_calls": [late]},), "t1",
            np.array([-0.5, -0.5], np.float32), ((8, 0, 2),), "stop",
        ),
        Segment(
            4, 0, "sampled", as_ids([9]), ({"role": "assistant", "content": "?"},), "t2",
            np.array([-0.25], np.float32), ((8, 0, 1),), "length", fork="resample", left_out=((0, 1),),
        ),
    ]  # fmt: skip
    return Trajectory(
        f"{episode}.{agent}", episode, "g", "task", agent=agent, segments=segments,
        rewards=[("t0", "lookup", 0.25), (None, "score", reward - 0.25)], stop_reason=StopReason.COMPLETED,
        metrics={"tool_calls": 1.0, "tool_errors": 0.0, "seconds": 2.0}, turn_metrics={"t0": {"took": 0.5}},
        partition=partition, seed=4,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunTables:
    writer = TrajectoryWriter(tmp_path / "trajectories.twz")
    for trajectory in (session("g/0"), session("g/0", "critic"), session("v/0", partition="val", reward=0.5)):
        writer.write(trajectory)
    writer.close()
    with (tmp_path / "trajectories.twz").open("ab") as file:
        file.write(b"TWZ\x01T half a record")
    return read_run(tmp_path, success_reward=2.0)


def test_episodes_are_those_of_all_their_sessions(run: RunTables) -> None:
    table = run.episodes()
    assert table["episode_id"].tolist() == ["g/0", "v/0"]
    first = table.iloc[0]
    assert (first["trajectory_id"], first["reward"], first["success"], first["turns"]) == ("g/0.main", 2.0, True, 6)
    assert (first["tool_calls"], first["sampled_tokens"], first["forks"], first["seed"]) == (2, 12, 2, 4)
    assert (first["reward/lookup"], first["reward/score"], first["metric/seconds"]) == (0.5, 1.5, 4.0)
    assert (first["stop_reason"], first["error"]) == ("completed", None)
    assert table["success"].tolist() == [True, False]
    assert run.episodes("val")["episode_id"].tolist() == ["v/0"]


def test_a_failed_episode_has_no_reward_and_no_success(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path / "trajectories.twz")
    for name, reason, error in (("a", "completed", None), ("b", "error", "EnvError: gone"), ("c", "cancelled", None)):
        failed = session(name)
        failed.stop_reason, failed.error = StopReason(reason), error
        writer.write(failed)
    writer.close()
    table = read_run(tmp_path).episodes()
    assert table["success"].isna().tolist() == table["reward"].isna().tolist() == [False, True, True]
    # So a rate by task is that of the episodes which count.
    assert table.groupby("task_id")["success"].mean().tolist() == [1.0]


def test_success_follows_the_rule_of_the_run(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path / "trajectories.twz")
    for trajectory in (session("a"), session("a", "critic", reward=0.0)):
        writer.write(trajectory)
    writer.close()

    def success() -> tuple[list[float], list[bool]]:
        table = read_run(tmp_path).episodes()
        return table["reward"].tolist(), table["success"].tolist()

    assert success() == ([1.0], [True])
    (tmp_path / "config.yaml").write_text("success_reward: 0.0\nrole: critic\n")
    assert success() == ([0.0], [True])
    (tmp_path / "config.yaml").write_text("eval: {success_reward: 1.5, role: critic}\n")
    assert success() == ([1.0], [False])
    assert read_run(tmp_path, success_reward=0.5).episodes()["success"].tolist() == [True]


def test_turns_have_prompts_and_samples(run: RunTables) -> None:
    table = run.turns("val")
    assert table["turn_id"].tolist() == ["t0", "t1", "t2"]
    assert table["prompt_tokens"].tolist() == [2, 6, 2]
    assert table["sampled_tokens"].tolist() == [3, 2, 1]
    assert table["weight_version"].tolist() == [7, 8, 8]
    assert table["logprob"].tolist() == [-2.0, -0.5, -0.25]
    assert table["reward"].tolist() == [0.25, 0.0, 0.0]
    assert [None if fork != fork else fork for fork in table["fork"].tolist()] == [None, None, "resample"]
    assert table["text"].tolist() == ["Hm.", "zoe", "?"]
    assert (table["metric/took"][0], np.isnan(table["metric/took"][1])) == (0.5, True)


def test_tool_calls_have_their_answers(run: RunTables) -> None:
    table = run.tool_calls("val")
    assert table[["turn_id", "tool", "arguments"]].values.tolist() == [
        ["t0", "team_of", '{"person":"mia"}'],
        ["t1", "late", "{}"],
    ]
    assert table["answer"][0] == "red"
    assert table["answer"].isna().tolist() == [False, True]


def test_tokens_are_there_once(run: RunTables) -> None:
    table = run.tokens("val")
    assert table["token_id"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert table["sampled"].tolist() == [False, False, True, True, True, False, True, True, True]
    assert table["trained"].tolist() == [False, False, True, True, True, False, True, True, False]
    assert table["weight_version"].tolist() == [-1, -1, 7, 7, 8, -1, 8, 8, 8]
    assert table["logprob"].tolist()[2:5] == [-1.0, -2.0, -3.0]
    assert table["logprob"].isna().sum() == 3
    assert table["place"].tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 0]
    assert len(run.tokens()) == 27


def test_tables_join_by_their_ids(run: RunTables) -> None:
    joined = run.turns().merge(run.episodes()[["episode_id", "reward"]], on="episode_id", suffixes=("", "_episode"))
    assert joined.groupby("agent")["reward_episode"].mean().to_dict() == {
        "critic": 2.0, "main": pytest.approx((3 * 2.0 + 3 * 0.5) / 6)
    }  # fmt: skip


def test_a_run_without_trajectories_has_empty_tables(tmp_path: Path) -> None:
    (tmp_path / "trajectories.twz").touch()
    run = read_run(tmp_path)
    for table in (run.episodes(), run.turns(), run.tool_calls(), run.tokens()):
        assert len(table) == 0
        assert list(table.columns)[:4] == ["trajectory_id", "episode_id", "task_id", "partition"]


def test_unreadable_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FormatError, match=r"no such file: .*trajectories\.twz: give a run directory"):
        read_run(tmp_path)
    (tmp_path / "trajectories.twz").touch()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"tables of a run need pandas: pip install 'turnwise-rl\[tables\]'"):
        read_run(tmp_path)


def test_the_questions_of_the_documentation_have_answers(
    run: RunTables, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(from turnwise import read_run.*?)```", page, re.DOTALL)
    shutil.copytree(run.file.parent, run.file.parent / "runs" / "lookup-seed0")
    monkeypatch.chdir(run.file.parent)
    exec(block, {})
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("completed", "team_of", "answered", "weight_version"))
