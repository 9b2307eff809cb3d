"""Self-distillation: what the teacher is told of a turn, and what it makes of the turn's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from pydantic import ValidationError

from support.chat.toy_renderer import ToyRenderer
from turnwise.model.canonical import canonical_messages
from turnwise.rollout.records import BatchWriter, read_batches
from turnwise.trainer.algorithms.config import AlgorithmConfig, SelfDistillConfig
from turnwise.trainer.algorithms.teacher_contexts import CONTEXTS, RecordedTurn, recorded_turns
from turnwise.trainer.batch.experience import build_experience, collect
from turnwise.trainer.batch.self_distill import SelfTeacher
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.types import Branch, StopReason, as_ids

ASK = {"role": "user", "content": "sum"}
SORRY = {"role": "tool", "content": "no such key", "tool_call_id": "c00000000", "name": "get"}
RENDERER = ToyRenderer()


def call(argument: str) -> dict[str, Any]:
    function = {"name": "get", "arguments": {"key": argument}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c00000000", "type": "function", "function": function}],
    }


def say(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def recording(name: str, messages: Sequence[dict[str, Any]], reward: float, **fields: Any) -> Trajectory:
    """A trajectory without forks: each of the assistant's messages is a turn of two ids that spell it out."""
    segments: list[Segment] = []
    turns = 0
    for message in messages:
        index, parent = len(segments), len(segments) - 1
        if message["role"] == "assistant":
            ids = as_ids([500 + hash_of(message), 7])
            logprobs = np.array([-1.0, -2.0], np.float32)
            segments.append(
                Segment(index, parent, "sampled", ids, (message,), f"t{turns}", logprobs, ((0, 0, 2),), "stop")
            )
            turns += 1
        else:
            ids = RENDERER.render(canonical_messages([message]), ())
            segments.append(Segment(index, parent, "context", ids, (message,), tools=() if index == 0 else None))
    rewards = [(None, "score", reward)]
    return Trajectory(name, name, "g", "task", segments=segments, rewards=rewards, **fields)


def hash_of(message: dict[str, Any]) -> int:
    return sum(orjson.dumps(message)) % 400


class Scores:
    """Scores the tokens of each row alike, and notes the rows."""

    def __init__(self, *logprobs: float) -> None:
        self.logprobs = torch.tensor(logprobs)
        self.rows: list[list[int]] = []

    def __call__(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        for batch in batches:
            self.rows += [batch.input_ids[0, start : start + length].tolist() for start, length, _ in batch.segments]
        return [self.logprobs.repeat(len(batch.rows)) for batch in batches]


def teach(
    trajectories: Sequence[Trajectory], *contexts: str, score: Scores, weight: float = 0.5, longest: float = 999
) -> tuple[dict[str, list[float]], dict[str, float], Any]:
    """Return the advantages of trained tokens by trajectory, metrics and contexts."""
    self_distill = SelfDistillConfig(contexts=list(contexts), weight=weight)
    config = AlgorithmConfig(self_distill=self_distill, drop_zero_variance=False)
    collected = collect([TrajectoryGroup("g", "task", list(trajectories))])
    experience = build_experience(collected, config, temperature=1.0)
    rewards = {row.sample.trajectory_id: float(np.asarray(row.advantage).max()) for row in experience.rows}
    teacher = SelfTeacher(self_distill, RENDERER, score, BatchConfig(groups=1), 1.0, longest)
    result = teacher.teach(experience, collected.trajectories)
    by_row = {row.sample.trajectory_id: np.asarray(row.advantage)[row.sample.loss_mask].tolist() for row in result.rows}
    return by_row, result.metrics | {f"reward of {name}": value for name, value in rewards.items()}, result.contexts


def test_advantages_by_hand() -> None:
    failed = recording("a", [ASK, call("x"), SORRY, say("5")], 0.0, turn_metrics={"t0": {"tool_errors": 1.0}})
    solved = recording("b", [ASK, say("6")], 1.0)
    score = Scores(-0.5, -20.0)
    advantages, metrics, contexts = teach([failed, solved], "error", score=score)
    reward = metrics["reward of a"]
    # Teacher less policy: 0.5 for the first token; for the second -18, clipped to -5. Half of each and of the rewards.
    assert advantages["a"] == pytest.approx([reward / 2 + 0.25, reward / 2 - 2.5, reward / 2, reward / 2])
    assert advantages["b"] == pytest.approx([metrics["reward of b"] / 2] * 2)
    assert contexts == {("a", 0): "An attempt at this step failed:\nno such key"}
    assert (metrics["distill/turns"], metrics["distill/too_long"]) == (1.0, 0.0)
    prompted = [{"role": "user", "content": f"sum\n\n{contexts['a', 0]}"}]
    prompt = RENDERER.render(canonical_messages(prompted), ()).tolist()
    # Nothing is scored after the last token.
    assert score.rows == [[*prompt, int(failed.segments[1].token_ids[0])]]
    alone, *_ = teach([failed, solved], "error", score=score, weight=1.0)
    assert alone == {"a": pytest.approx([0.5, -5.0, 0.0, 0.0]), "b": [0.0, 0.0]}


def test_weight_zero_is_grpo() -> None:
    plain, untaught = AlgorithmConfig(), AlgorithmConfig(self_distill=SelfDistillConfig(contexts=["error"], weight=0))
    assert untaught.teacher is None
    assert (untaught.leaves_out_dead, untaught.compares_groups) == (plain.leaves_out_dead, plain.compares_groups)
    config = type("Config", (), {"algorithm": untaught})()
    assert SelfTeacher.of(config, RENDERER, Scores()) is None  # type: ignore[arg-type]


def test_turns_that_are_too_long_with_their_context_are_counted() -> None:
    failed = recording("a", [ASK, call("x"), SORRY, say("5")], 0.0, turn_metrics={"t0": {"tool_errors": 1.0}})
    advantages, metrics, contexts = teach([failed], "error", score=Scores(), longest=20)
    assert advantages == {"a": [0.0] * 4}
    assert (metrics["distill/turns"], metrics["distill/too_long"], contexts) == (0.0, 1.0, {})


def turns_of(*trajectories: Trajectory) -> dict[tuple[str, int], RecordedTurn]:
    return {(turn.trajectory.id, turn.number): turn for turn in recorded_turns(trajectories)}


def test_contexts_tell_what_followed_the_turn() -> None:
    notes = {"t0": {"judge": "the key is wrong"}, "": {"judge": "too late"}}
    reply = {"role": "user", "content": "no, 6"}
    turns = turns_of(recording("a", [ASK, say("5"), reply, call("x"), SORRY, say("6")], 0.0, turn_notes=notes))
    texts = {
        (name, number): text
        for name, context in CONTEXTS.items()
        for (_, number), turn in turns.items()
        if (text := context(turn))
    }
    assert texts == {
        ("critique", 0): "A review of an attempt:\nthe key is wrong",
        ("critique", 1): "A review of an attempt:\ntoo late",
        ("critique", 2): "A review of an attempt:\ntoo late",
        ("correction", 0): "An attempt at this step was answered:\nno, 6",
    }


def test_a_sibling_teaches_where_it_parts_from_a_worse_attempt() -> None:
    answer = {**SORRY, "content": "6"}
    lost = recording("lost", [ASK, call("x"), answer, say("5")], 0.0)
    won = recording("won", [ASK, call("x"), answer, say("6")], 1.0)
    other = recording("other", [ASK, say("5")], 0.0)
    turns = turns_of(lost, won, other)
    texts = {key: CONTEXTS["sibling"](turn) for key, turn in turns.items()}
    from_there = 'This continuation succeeded:\nassistant: get({"key": "x"})\ntool: 6\nassistant: 6'
    # The first turn of the lost attempt is that of the one that won.
    assert texts == {
        ("lost", 0): None,
        ("lost", 1): "This continuation succeeded:\nassistant: 6",
        ("won", 0): None,
        ("won", 1): None,
        ("other", 0): from_there,
    }


def test_the_branch_of_a_tree_that_won_teaches_the_one_that_lost() -> None:
    stem = recording("a", [ASK, call("x"), {**SORRY, "content": "6"}, say("5")], 0.0)
    second = replace(stem.segments[3], index=4, token_ids=as_ids([900, 7]), messages=(say("6"),), turn_id="t2")
    branches = [
        Branch(-1, None, None, ("t0", "t1"), ((None, "score", 0.0),), StopReason.COMPLETED),
        Branch(0, "t0", None, ("t2",), ((None, "score", 1.0),), StopReason.COMPLETED),
    ]
    tree = replace(stem, segments=[*stem.segments, second], rewards=[], branches=branches)
    texts = {number: CONTEXTS["sibling"](turn) for (_, number), turn in turns_of(tree).items()}
    assert texts == {0: None, 1: "This continuation succeeded:\nassistant: 6", 2: None}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"self_distill": {"contexts": ["eror"]}}, "did you mean 'error'"),
        ({"self_distill": {"contexts": []}}, "at least 1 item"),
        ({"self_distill": {"contexts": ["error"], "weight": 1.5}}, "less than or equal to 1"),
        ({"self_distill": {"contexts": ["error"]}, "distill": {"teacher": "t"}}, "are two teachers: remove one"),
        (
            {"self_distill": {"contexts": ["error"], "weight": 1}, "credit": "turns"},
            "algorithm.credit is 'turns', but algorithm.self_distill.weight is 1: nothing is learned from rewards",
        ),
    ],
)
def test_bad_settings_raise_validation_error(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        AlgorithmConfig.model_validate(values)


def test_contexts_are_recorded_beside_the_rows(tmp_path: Path) -> None:
    [rows] = collect([TrajectoryGroup("g", "task", [recording("a", [ASK, say("5")], 0.0)])]).samples
    writer = BatchWriter(tmp_path / "batches.jsonl")
    writer.write(1, rows, contexts={("a", 0): "a text"})
    writer.close()
    record = orjson.loads((tmp_path / "batches.jsonl").read_bytes().splitlines()[1])
    assert record["contexts"] == [["a", 0, "a text"]]
    assert [row.trajectory for row in read_batches(tmp_path / "batches.jsonl").by_step[1]] == ["a"]
