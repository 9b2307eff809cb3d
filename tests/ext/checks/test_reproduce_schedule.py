"""The schedule of an asynchronous run: its versions, batches and order are repeated, and differences are named."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.trainer.lookup_run import MODEL, build_model, shared, silent, train_config
from turnwise.errors import ReplayError
from turnwise.ext.checks.reproduce import reasons_to_differ, reproduce
from turnwise.ext.checks.run_file import pack_run
from turnwise.ext.checks.scheduled import ScheduledClient
from turnwise.model.core import LLMClient, ModelInfo
from turnwise.rollout.core import GroupFacts
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.journal.schedule import Schedule
from turnwise.trainer.train import run_train
from turnwise.trajectory import Segment, Trajectory, TrajectoryGroup
from turnwise.trajectory_file import TrajectoryFile
from turnwise.types import Completion, SamplingParams, StopReason, TokenPrompt, VersionSpan

KEY = "train-a-e0"
PROMPT = np.array([1, 2], np.int32)


class VersionedClient(LLMClient):
    """Samples ids of version and position, until ``max_tokens``."""

    def __init__(self) -> None:
        self.version = 0
        self.requests: list[tuple[int, SamplingParams]] = []

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        self.requests.append((len(prompt.token_ids), params))
        positions = len(prompt.token_ids) + np.arange(params.max_tokens or 0)
        ids = (100 * self.version + positions).astype(np.int32)
        return Completion(ids, -ids.astype(np.float32), "length", ((self.version, 0, len(ids)),))

    async def model_info(self) -> ModelInfo:
        return ModelInfo("versioned", 100)

    async def close(self) -> None:
        pass


def episode(member: int, ids: list[int], versions: tuple[VersionSpan, ...], process: int = 0) -> Trajectory:
    name = f"{process}-{KEY}/{member}.0"
    sampled = np.array(ids, np.int32)
    segments = [
        Segment(0, -1, "context", PROMPT),
        Segment(
            1, 0, "sampled", sampled, turn_id="t0", logprobs=-sampled.astype(np.float32), weight_versions=versions,
            finish_reason="length",
        ),
    ]  # fmt: skip
    return Trajectory(name, name, f"{process}-{KEY}", "a", segments=segments)


def record(
    run: Path, members: list[Trajectory], step: int, *, resumed_after: int | None = None, key: str = KEY
) -> None:
    """Write a group that a step trains, by a process that resumed after a step, or the first one."""
    part = 0 if resumed_after is None else 1
    journal = Journal.open(run, part=part, after_step=resumed_after or 0)
    group = TrajectoryGroup(members[0].group_id, "a", members)
    for number, member in enumerate(members):
        journal.write(member)
        journal.member(key, group.id, number, [member])
    journal.group(group, GroupFacts(group.id, key, "a", "train", 0, 0, (0.0,) * len(members)))
    journal.take(step, [key])
    journal.close()


def test_tokens_are_sampled_by_the_recorded_versions(tmp_path: Path) -> None:
    record(tmp_path, [episode(0, [2, 3, 104, 105], ((0, 0, 2), (1, 2, 4)))], 2)
    schedule, inner = Schedule.read(tmp_path), VersionedClient()
    client = ScheduledClient(inner, schedule)

    async def sample() -> Completion:
        params = SamplingParams(max_tokens=4, stop=("end",), seed=5)
        request = asyncio.create_task(client.generate(TokenPrompt(PROMPT), params, session_id=f"0-{KEY}/0.0"))
        assert schedule.advance(0) == [KEY]
        while not schedule.settled:
            await schedule.changed()
        # What the first version samples is all there is, until the next one is served.
        assert len(inner.requests) == 1
        assert not request.done()
        inner.version = 1
        assert schedule.advance(1) == []
        return await request

    completion = asyncio.run(sample())
    assert completion.token_ids.tolist() == [2, 3, 104, 105]
    assert completion.weight_versions == ((0, 0, 2), (1, 2, 4))
    assert completion.finish_reason == "length"
    assert schedule.difference is None
    assert [(prompt, params.max_tokens, params.continued) for prompt, params in inner.requests] == [
        (2, 2, 0),
        (4, 2, 2),
    ]


@pytest.mark.parametrize(
    ("session", "prompt", "difference"),
    [
        (f"0-{KEY}/0.0", [1, 2], f"step 1, episode 0-{KEY}/0.0, turn 0, token 1: its id was 9 and is 3"),
        (f"0-{KEY}/0.1", [1, 2, 3], f"step 1, episode 0-{KEY}/0.1: a prompt of 3 ids was not recorded"),
        ("0-train-b-e0/0.0", [1, 2], None),
        (f"0-val-{KEY}/0.0", [1, 2], None),
    ],
)
def test_first_sampled_token_that_differs_is_named(
    tmp_path: Path, session: str, prompt: list[int], difference: str | None
) -> None:
    record(tmp_path, [episode(0, [2, 9], ((0, 0, 2),))], 1)
    schedule = Schedule.read(tmp_path)
    client = ScheduledClient(VersionedClient(), schedule)
    request = client.generate(TokenPrompt(np.array(prompt, np.int32)), SamplingParams(max_tokens=2), session_id=session)
    asyncio.run(request)
    assert schedule.difference == difference


def test_episode_that_ends_before_its_recorded_turns_differs(tmp_path: Path) -> None:
    recorded = episode(0, [2], ((0, 0, 1),))
    record(tmp_path, [recorded], 1)
    schedule = Schedule.read(tmp_path)
    cancelled = Trajectory(recorded.id, recorded.id, "g", "a", stop_reason=StopReason.CANCELLED)
    schedule.ended(cancelled)
    schedule.ended(Trajectory("0-train-b-e0/0.0", "0-train-b-e0/0.0", "g", "b"))
    assert schedule.difference is None
    schedule.ended(Trajectory(recorded.id, recorded.id, "g", "a"))
    assert schedule.difference == f"step 1, episode {recorded.id}: it ended before a recorded turn (completed)"


def test_batches_follow_the_journal_without_what_was_given_back(tmp_path: Path) -> None:
    record(tmp_path, [episode(0, [2], ((0, 0, 1),))], 1)
    journal = Journal.open(tmp_path, part=1, after_step=1)
    journal.take(2, [KEY, KEY])
    journal.take(2, [KEY, "other"])
    journal.take(2, [KEY, "other", KEY], back=True)
    journal.take(3, [KEY])
    journal.close()
    Journal.open(tmp_path, part=2, after_step=2).close()
    schedule = Schedule.read(tmp_path)
    assert [schedule.next_batch(step) for step in (1, 2)] == [[KEY], [KEY]]
    for step in (2, 3):
        with pytest.raises(ReplayError, match=f"step {step} was interrupted between two parts of its batch"):
            schedule.next_batch(step)


def test_weights_that_a_kill_lost_are_named_with_step_and_episode(tmp_path: Path) -> None:
    record(tmp_path, [episode(0, [2, 3], ((1, 0, 1), (3, 1, 2)))], 4)
    record(tmp_path, [episode(0, [2], ((2, 0, 1),), process=1)], 4, resumed_after=2, key="train-b-e0")
    assert list(Schedule.read(tmp_path).groups) == ["train-b-e0"]
    journal = Journal.open(tmp_path, part=2, after_step=4)
    journal.take(5, [KEY])
    journal.close()
    lost = f"step 5 trained episode 0-{KEY}/0.0, which weights of step 3 sampled that were lost"
    with pytest.raises(ReplayError, match=lost):
        Schedule.read(tmp_path)


ALONE = {"rollout": {"concurrency": 1}, "inference": {"engine": "builtin", "prefix_cache": False}}
EXACT = {"mode": "separate_async", "inference": {"engine": "exact"}}
DECAYS = {"policies": {"main": {"schedule": {"kind": "cosine"}}}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (ALONE, None),
        (ALONE | {"rollout": {"concurrency": 2}}, "inference.engine is builtin: "),
        (ALONE | {"inference": {"engine": "builtin"}}, "inference.engine is builtin: "),
        (ALONE | {"mode": "colocate_async"}, "inference.engine is builtin: "),
        (EXACT, None),
        (
            EXACT | {"rollout": {"agent_loop_manager_class": "my.module.Manager"}},
            "mode is separate_async with rollout.agent_loop_manager_class: ",
        ),
        (ALONE | {"budget": {"wall_time": "2h"}}, None),
        (ALONE | DECAYS, None),
        (ALONE | DECAYS | {"budget": {"wall_time": "2h"}}, "budget.wall_time: "),
    ],
)
def test_settings_by_which_bits_depend_on_timing_are_named(
    tmp_path: Path, changes: dict[str, Any], reason: str | None
) -> None:
    reasons = reasons_to_differ(train_config(tmp_path, tmp_path, **changes))
    assert [text.startswith(reason or "none") for text in reasons] == ([] if reason is None else [True])


@pytest.mark.long
def test_asynchronous_run_is_executed_again_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    monkeypatch.chdir(tmp_path)
    config = train_config(
        model,
        tmp_path / "runs",
        mode="separate_async",
        steps=4,
        inference={"engine": "exact"},
        rollout={"concurrency": 8},
        replay={"max_staleness": 2, "ahead": 2},
        overlap={"stream": 2},
    )
    run = run_train(config, console=silent()).directory
    with TrajectoryFile(run / "trajectories.twz") as file:
        versions = {
            version
            for entry in file.entries
            for segment in file.read(entry).segments
            for version, _, _ in segment.weight_versions
        }
    assert len(versions) > 1
    pack_run(run, tmp_path / "run.turnwise")
    result = reproduce(tmp_path / "run.turnwise", tmp_path / "again", console=silent())
    assert result.verdict().startswith("equal, bit for bit, 4 steps")
    assert (result.first, result.checkpoints) == (None, 4)
