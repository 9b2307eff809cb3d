"""Exports of a run: what other programs read is what was recorded, and nothing half-written stays."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.chat.model_dirs import build_model_dir
from support.rollout.record_files import spoil
from turnwise.cli import main
from turnwise.errors import ConfigError, FormatError
from turnwise.evaluation.export import Choice, export_run
from turnwise.evaluation.tables import read_run
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TrajectoryWriter
from turnwise.types import StopReason, as_ids

TOOLS = ({"type": "function", "function": {"name": "team_of", "parameters": {"type": "object"}}},)
HUGE = 10**30


def sampled(index: int, parent: int, message: dict[str, Any], fork: str | None = None) -> Segment:
    ids = as_ids([index])
    return Segment(
        index, parent, "sampled", ids, (message,), f"t{index}", np.zeros(1, np.float32), ((0, 0, 1),), "stop", fork
    )


def recorded(name: str, reward: float, *, task: str = "a", error: str | None = None, **fields: Any) -> Trajectory:
    call = {"id": "c0", "type": "function", "function": {"name": "team_of", "arguments": {"person": "mía", "n": HUGE}}}
    segments = [
        Segment(0, -1, "context", as_ids([1, 2]), ({"role": "user", "content": "Who?"},), tools=TOOLS),
        sampled(1, 0, {"role": "assistant", "content": "", "tool_calls": [call]}),
        Segment(2, 1, "context", as_ids([3]), ({"role": "tool", "tool_call_id": "c0", "content": "red"},)),
        sampled(3, 2, {"role": "assistant", "content": "red"}),
        sampled(4, 0, {"role": "assistant", "content": "?"}, fork="resample"),
    ]
    reason = StopReason.ERROR if error else StopReason.COMPLETED
    return Trajectory(
        name, name, f"g-{task}", task, segments=segments, rewards=[(None, "score", reward)], stop_reason=reason,
        error=error, **fields,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    writer = TrajectoryWriter(folder / "trajectories.twz")
    for trajectory in (
        recorded("a0", 0.0),
        recorded("a1", 1.0),
        recorded("a2", 1.0),
        recorded("b0", 0.5, task="b", partition="val"),
        recorded("c0", 1.0, task="c", error="EnvError: broken"),
        recorded("d0", 1.0, task="d", policy="judge"),
    ):
        writer.write(trajectory)
    writer.close()
    with (folder / "trajectories.twz").open("ab") as file:
        file.write(b"TWZ\x01T half a record")
    return folder


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_line_is_a_branch_in_openais_form(run: Path, tmp_path: Path) -> None:
    assert export_run(run, tmp_path / "deep" / "all.jsonl", "jsonl") == 12
    first, second = rows(tmp_path / "deep" / "all.jsonl")[:2]
    assert [message["role"] for message in first["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant"]
    (call,) = first["messages"][1]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"person": "mía", "n": HUGE}
    assert first["tools"] == second["tools"] == list(TOOLS)
    assert (first["trajectory_id"], first["branch"], first["rewards"]) == ("a0", 0, {"score": 0.0})
    assert (second["branch"], second["stop_reason"], second["error"]) == (1, "completed", None)
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "all.jsonl"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(), ["a0", "a1", "a2", "b0", "c0", "d0"]),
        (Choice(partition="val"), ["b0"]),
        (Choice(policy="judge"), ["d0"]),
        (Choice(min_reward=0.5), ["a1", "a2", "b0", "d0"]),
        (Choice(best_per_task=1), ["a1", "b0", "c0", "d0"]),
        (Choice(policy="main", min_reward=0.0, best_per_task=2), ["a1", "a2", "b0"]),
    ],
)
def test_filters_choose_trajectories(choice: Choice, expected: list[str], run: Path, tmp_path: Path) -> None:
    assert export_run(run, tmp_path / "out", "jsonl", choice) == 2 * len(expected)
    ids = [row["trajectory_id"] for row in rows(tmp_path / "out")]
    assert list(dict.fromkeys(ids)) == expected


def test_episodes_of_a_repeated_evaluation_are_exported_once(tmp_path: Path) -> None:
    file = tmp_path / "trajectories.twz"
    writer = TrajectoryWriter(file)
    for name, partition in (
        ("0-val-a-e0~step-0-sampled", "val"),
        ("1-val-a-e0~step-0-sampled", "val"),
        ("0-train-a-e0", "train"),
    ):
        member = recorded(f"{name}/0.0", 1.0, partition=partition)
        member.group_id = name
        writer.write(member)
    writer.close()
    export_run(file, tmp_path / "out", "jsonl")
    counted = {row["group_id"] for row in rows(tmp_path / "out")}
    assert counted == {"1-val-a-e0~step-0-sampled", "0-train-a-e0"}
    assert set(read_run(file).episodes()["group_id"]) == counted


def test_demonstrations_are_readable_by_sft(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "demonstrations.jsonl"
    # The trajectory that ended in an error is left out.
    assert export_run(run, file, "sft") == 10
    assert all(set(row) == {"messages", "tools"} for row in rows(file))
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows(file))


def answered(name: str, reward: float, *answers: str, group: str = "g", **fields: Any) -> Trajectory:
    """Return a trajectory of one prompt and a call, answered, where there are two answers, by a tool in between."""
    segments = [Segment(0, -1, "context", as_ids([1]), ({"role": "user", "content": "Who?"},), tools=TOOLS)]
    for answer in answers:
        if len(segments) > 1:
            tool = {"role": "tool", "tool_call_id": "c0", "content": "red"}
            segments.append(Segment(len(segments), len(segments) - 1, "context", as_ids([2]), (tool,)))
        segments.append(sampled(len(segments), len(segments) - 1, {"role": "assistant", "content": answer}))
    return Trajectory(name, name, group, group, segments=segments, rewards=[(None, "score", reward)], **fields)


def preferences(tmp_path: Path, *trajectories: Trajectory, choice: Choice | None = None) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    writer = TrajectoryWriter(folder / "trajectories.twz")
    for trajectory in trajectories:
        writer.write(trajectory)
    writer.close()
    export_run(folder, folder / "pairs.jsonl", "preference", choice)
    return rows(folder / "pairs.jsonl")


def sides(pairs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(pair["chosen"][-1]["content"], pair["rejected"][-1]["content"]) for pair in pairs]


def test_preferences_pair_the_best_of_a_group_with_its_worst_then_inwards(tmp_path: Path) -> None:
    rewards = {"low": 0.1, "best": 1.0, "good": 0.8, "worst": 0.0}
    trajectories = [
        *(answered(name, reward, name) for name, reward in rewards.items()),
        answered("broken", 2.0, "broken", error="EnvError: gone"),
        # Of another group, of another agent, and equal ones.
        answered("alone", 0.5, "alone", group="h"),
        answered("seller", 0.4, "seller", agent="seller"),
        *(answered(name, 1.0, name, group="even") for name in ("same", "equal")),
    ]
    assert sides(preferences(tmp_path, *trajectories)) == [("best", "worst"), ("good", "low")]
    assert sides(preferences(tmp_path, *trajectories, choice=Choice(best_per_task=1))) == [("best", "worst")]
    assert sides(preferences(tmp_path, *trajectories, choice=Choice(min_reward=0.9))) == [("best", "worst")]
    with pytest.raises(ConfigError, match="holds nothing to export of partition val"):
        preferences(tmp_path, *trajectories, choice=Choice(partition="val"))


def test_the_prompt_of_a_pair_ends_with_what_the_model_answers(tmp_path: Path) -> None:
    [pair] = preferences(tmp_path, answered("a", 1.0, "look", "red"), answered("b", 0.0, "look", "blue"))
    assert [message["role"] for message in pair["prompt"]] == ["user", "assistant", "tool"]
    assert (pair["chosen"], json.loads(pair["tools"])) == ([{"role": "assistant", "content": "red"}], list(TOOLS))
    # One that is the beginning of the other, and one that ends with what no model said.
    [pair] = preferences(tmp_path, answered("a", 1.0, "look"), answered("b", 0.0, "look", "blue"))
    assert [message["role"] for message in pair["prompt"]] == ["user"]
    assert [len(pair[side]) for side in ("chosen", "rejected")] == [1, 3]


def test_trl_renders_exported_preferences_as_whole_conversations(tmp_path: Path) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_model_dir(tmp_path / "model", "qwen3"))
    [pair] = preferences(tmp_path, answered("a", 1.0, "look", "red"), answered("b", 0.0, "find", "blue"))
    assert data_utils.is_conversational(pair)
    texts = data_utils.apply_chat_template(pair, tokenizer, tools=json.loads(pair["tools"]))
    for side in ("chosen", "rejected"):
        conversation = [*pair["prompt"], *pair[side]]
        text = tokenizer.apply_chat_template(conversation, tools=json.loads(pair["tools"]), tokenize=False)
        assert texts["prompt"] + texts[side] == text


def test_datasets_load_exported_conversations(run: Path, tmp_path: Path) -> None:
    import datasets

    file = tmp_path / "out.jsonl"
    assert export_run(run, file, "jsonl") == 12
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert sum(partition == "train" for partition in loaded["partition"]) == 10
    call = loaded[0]["messages"][1]["tool_calls"][0]["function"]
    assert json.loads(call["arguments"])["n"] == HUGE


def test_failed_export_leaves_no_file(run: Path, tmp_path: Path) -> None:
    existing = set(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="holds nothing to export of min_reward 2"):
        export_run(run, tmp_path / "out", "jsonl", Choice(min_reward=2.0))
    with pytest.raises(ConfigError, match="run exists: name a file or folder that does not"):
        export_run(run, run, "jsonl")
    with pytest.raises(FormatError, match="no such file"):
        export_run(tmp_path / "nowhere", tmp_path / "out", "jsonl")
    with pytest.raises(ConfigError, match="out cannot be written: "):
        export_run(run, run / "trajectories.twz" / "out", "jsonl")
    spoil(run / "trajectories.twz", 1)
    with pytest.raises(FormatError, match="are damaged, and intact trajectories follow: restore the file"):
        export_run(run, tmp_path / "out", "jsonl")
    assert set(tmp_path.iterdir()) == existing


def test_export_command_reports_its_output(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def command(*more: str) -> int:
        with pytest.raises(SystemExit) as exited:
            main(["export", str(run), str(tmp_path / "out.jsonl"), *more])
        return int(exited.value.code or 0)

    assert command("--to", "sft", "--min-reward", "1", "--best-per-task", "1") == 0
    assert "out.jsonl: 4 conversations of " in capsys.readouterr().out
    assert command("--to", "jsonl", "--step", "3") == 1
    assert "--to is jsonl, with --step: they choose a model: leave out --to" in " ".join(
        capsys.readouterr().err.split()
    )
    assert command("--min-reward", "1") == 1
    assert "--to is model, with --min-reward: a model has none" in " ".join(capsys.readouterr().err.split())
