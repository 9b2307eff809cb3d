"""Groups in a payload store: what is read there is what was put, and a lost store ends the run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from support.rollout.finished_groups import lively, same
from support.rollout.memory_payloads import MemoryPayloads
from turnwise.columns import DTYPES, pack_trajectory, unpack_trajectory
from turnwise.errors import ConfigError, FormatError
from turnwise.rollout.core import RolloutRequest
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.config import ReplayConfig, RunFacts, check_replay
from turnwise.rollout.replay.group_store import PayloadsLost, columns_of
from turnwise.rollout.replay.strategies import Mixed
from turnwise.tasks import Task


def test_a_row_unpacks_to_its_trajectory() -> None:
    original = lively("g").trajectories[0]
    row = pack_trajectory(original)
    assert {name: column.dtype for name, column in row.items()} == DTYPES
    assert unpack_trajectory(row).to_bytes() == original.to_bytes()
    read = {name: row[name] for name in columns_of(("tokens", "rewards"))}
    bare = unpack_trajectory(read)
    assert [segment.messages for segment in bare.segments] == [()] * len(original.segments)
    assert bare.segments[1].logprobs.tolist() == original.segments[1].logprobs.tolist()
    assert unpack_trajectory({"record": row["record"]}).segments == []
    with pytest.raises(FormatError, match="the columns of trajectory 'g/0' are damaged"):
        unpack_trajectory({**row, "segments": np.zeros(3, np.uint8)})
    with pytest.raises(FormatError, match="have more ids than its segments"):
        unpack_trajectory({**row, "token_ids": np.zeros(99, np.int32)})


def test_numbers_of_more_than_64_bits_are_kept() -> None:
    original = lively("g").trajectories[0]
    messages = ({"role": "assistant", "content": "", "tool_calls": [{"arguments": {"n": 2**70}}]},)
    original = replace(original, segments=[*original.segments[:1], replace(original.segments[1], messages=messages)])
    assert unpack_trajectory(pack_trajectory(original)).segments[1].messages == messages


async def test_groups_live_in_the_store_until_they_are_released(tmp_path: Path) -> None:
    payloads = MemoryPayloads()
    buffer = LocalReplayBuffer(journal=Journal.open(tmp_path), payloads=payloads)
    groups = [lively(name, members=2, baselines=1) for name in ("a", "b")]
    for group in groups:
        await buffer.put(group)
    assert len(payloads.rows) == 6
    ref, _ = await buffer.sample(1, "train", 2)
    assert all(map(same, await buffer.fetch(ref), groups))
    (first, _) = await buffer.fetch(ref, ["tokens"])
    assert first.trajectories[0].rewards == []
    assert first.baselines[0].segments[0].messages == ()
    await buffer.release(ref)
    await buffer.put(lively("c"))
    # What was released is gone with the next group that comes.
    assert len(payloads.rows) == 1
    async with buffer:
        pass
    assert payloads.rows == {}


async def test_a_lost_store_ends_the_run_with_its_journal_intact(tmp_path: Path) -> None:
    payloads = MemoryPayloads()
    buffer = LocalReplayBuffer(journal=Journal.open(tmp_path), payloads=payloads)
    request = RolloutRequest(Task("task", "go"))
    buffer.expect(request, 0)
    await buffer.put(lively("0-x-train-task-e0"))
    ref, _ = await buffer.sample(1, "train", 1)
    payloads.lose()
    with pytest.raises(PayloadsLost, match="the store was lost"):
        await buffer.fetch(ref)
    resumed = LocalReplayBuffer(journal=Journal.open(tmp_path, part=1), payloads=MemoryPayloads())
    assert resumed.expect(request, 0)
    ref, _ = await resumed.sample(1, "train", 1)
    assert same((await resumed.fetch(ref))[0], lively("0-x-train-task-e0"))
    await resumed.release(ref)
    never = LocalReplayBuffer(journal=Journal.open(tmp_path, part=2, after_step=1), payloads=MemoryPayloads())
    assert not never.expect(request, 0)


async def test_groups_above_the_store_s_budget_are_read_from_disk(tmp_path: Path) -> None:
    payloads = MemoryPayloads()
    buffer = LocalReplayBuffer(Mixed(0.5, 2, 9), Journal.open(tmp_path, max_uses=2), memory_mb=1, payloads=payloads)
    groups = [lively(str(number), tokens=40_000) for number in range(6)]
    for group in groups:
        await buffer.put(group)
    stored_bytes = sum(column.nbytes for row in payloads.rows.values() for column in row.values())
    # One more group is there until the next one comes.
    assert stored_bytes < 2**20 + 700_000
    assert len(payloads.rows) < 6
    ref, _ = await buffer.sample(1, "train", 6)
    assert all(map(same, await buffer.fetch(ref), groups))
    await buffer.release(ref)
    for number in range(6, 9):
        await buffer.put(lively(str(number), tokens=40_000))
    assert len(payloads.rows) <= 4


def test_unused_transfer_queue_keys_are_refused() -> None:
    with pytest.raises(ValueError, match=r"backend is 'local': set replay.backend to 'transfer_queue'"):
        ReplayConfig.model_validate({"transfer_queue": {"units": 4}})
    with pytest.raises(ValueError, match="backend"):
        ReplayConfig.model_validate({"backend": "queue"})
    assert ReplayConfig().backend == "local"


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "turnwise.ext.frameworks.transfer_queue", raising=False)
    config = ReplayConfig.model_validate({"backend": "transfer_queue"})
    with pytest.raises(ConfigError, match=r"pip install 'turnwise-rl\[transfer-queue\]'"):
        check_replay(config, RunFacts(2, sync=True))
