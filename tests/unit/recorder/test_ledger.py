"""The ledger: everything that crossed, readable after any kill."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from support.chat.toy_renderer import ToyRenderer
from turnwise.errors import FormatError, InferenceError
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient, read_ledger
from turnwise.types import SamplingParams, TokenPrompt

PARAMS = SamplingParams(stop_token_ids=(1,))


def prompt(*ids: int) -> TokenPrompt:
    return TokenPrompt(np.array(ids, np.int32))


async def ask(client, ids, session="s"):
    return await client.generate(prompt(*ids), PARAMS, session_id=session)


async def test_prompts_are_written_as_differences_and_read_whole(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    client = LedgerClient(ScriptedClient(ToyRenderer(), ["ab", "c", "d"]), path)
    first = await ask(client, [5] * 200)
    await ask(client, [7, 8], session="other")
    longer = [5] * 200 + first.token_ids.tolist() + [9]
    await ask(client, longer)
    await ask(client, [5, 6])
    await client.close()
    ledger = read_ledger(path)
    assert [e.prompt_ids.tolist() for e in ledger.entries] == [[5] * 200, [7, 8], longer, [5, 6]]
    np.testing.assert_array_equal(ledger.entries[0].logprobs, first.logprobs)
    assert ledger.entries[0].weight_versions == ((0, 0, 3),)
    assert ledger.closed_parts == {0}
    # The third request shares all but its last id with the first one.
    assert len(path.read_bytes().split(b"\n")[3]) < 200


async def test_failed_calls_are_not_written(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    client = LedgerClient(ScriptedClient(ToyRenderer(), [InferenceError("gone"), "x"]), path)
    with pytest.raises(InferenceError):
        await ask(client, [5])
    await ask(client, [5])
    await client.close()
    assert len(read_ledger(path).entries) == 1


async def test_a_cancelled_call_is_not_written(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"

    async def never(request):
        await asyncio.Event().wait()

    client = LedgerClient(ScriptedClient(ToyRenderer(), never), path)
    task = asyncio.create_task(ask(client, [5]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.close()
    assert read_ledger(path).entries == []


async def test_streams_are_written_too(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    client = LedgerClient(ScriptedClient(ToyRenderer(), ["abc"]), path)
    pieces = [piece async for piece in client.stream(prompt(5), PARAMS, session_id="s")]
    await client.close()
    [entry] = read_ledger(path).entries
    assert entry.completion_ids.tolist() == [int(piece.token_ids[0]) for piece in pieces]
    assert entry.weight_versions == ((0, 0, 4),)


async def test_a_killed_process_leaves_an_open_part_and_a_torn_line(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    killed = LedgerClient(ScriptedClient(ToyRenderer(), ["a", "b"]), path)
    await ask(killed, [5])
    with path.open("ab") as file:
        file.write(b'{"session": "s", "shar')
    assert read_ledger(path).torn
    resumed = LedgerClient(ScriptedClient(ToyRenderer(), ["c"]), path)
    await ask(resumed, [6])
    await resumed.close()
    ledger = read_ledger(path)
    assert [(e.part, e.prompt_ids.tolist()) for e in ledger.entries] == [(0, [5]), (1, [6])]
    assert ledger.closed_parts == {1}
    assert not ledger.torn


async def test_damage_in_the_middle_is_named_with_its_line(tmp_path) -> None:
    path = tmp_path / "ledger.jsonl"
    client = LedgerClient(ScriptedClient(ToyRenderer(), ["a", "b"]), path)
    await ask(client, [5])
    await ask(client, [5])
    await client.close()
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:-4], *lines[2:]]))
    with pytest.raises(FormatError, match=r"ledger.jsonl:2"):
        read_ledger(path)
    path.write_bytes(b"\n".join([lines[0], lines[2], *lines[2:]]))
    with pytest.raises(FormatError, match="shares"):
        read_ledger(path)
