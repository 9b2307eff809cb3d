"""The audit of sessions that branch and of a gateway's: they pass, and each planted corruption is found."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from support.chat.model_dirs import renderer_for
from support.gateway.server import ADMIN_HEADERS, serving
from support.rollout.audited import assert_sound, train_once, write_trajectories
from support.rollout.record_files import read_records, write_records
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout.audit import audit_files
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import read_trajectories
from turnwise.types import Message, ToolCall, ToolSchema

LOOK = ToolSchema("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}})
LIMITS = SessionLimits(context_length=100_000)
FUNCTION = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": LOOK.parameters}}
Records = list[dict[str, Any]]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def calling(at: str) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [ToolCall("", "look", {"at": at})],
    }


async def line(request: Any) -> Message:
    # What is asked at the same time is in flight at the same time.
    await asyncio.sleep(0)
    if request.number % 3 == 0:
        return calling(f"place {request.number}")
    # Written so that a tokenizer gives other ids for the same text than were sampled.
    return {"role": "assistant", "content": f"Answer number {request.number} of it"}


async def branch(client: LedgerClient, scripted: ScriptedClient) -> Trajectory:
    """One session with a fork of nearly each reason."""
    session = Session(client, renderer_for("qwen3"), id="branches", limits=LIMITS)
    start = [user("go")]
    first = await session.chat(start, [LOOK])
    messages_with_wall = [
        *start,
        first,
        {"role": "tool", "tool_call_id": first["tool_calls"][0].id, "content": "a wall"},
    ]
    second = await session.chat(messages_with_wall, [LOOK])
    scripted.weight_version = 1
    longer = [*messages_with_wall, second, user("and then?")]
    third = await session.chat(longer, [LOOK])
    await session.chat(longer, [LOOK])
    await session.chat([user("summary: a wall"), user("and then?")], [LOOK], fork="compaction")
    await session.chat([*messages_with_wall, second, user("rather this")], [LOOK])
    await session.chat([*messages_with_wall, {**second, "content": "edited"}, user("so?")], [LOOK])
    await session.chat([*longer, third, user("without tools")], [])
    await session.chat([{"role": "system", "content": "be brief"}, *start], [LOOK])
    await asyncio.gather(*(session.chat([user("both"), user(str(n))]) for n in range(2)))
    return Trajectory("branches", "e", "g", "t", segments=session.segments(), rewards=[("t1", "score", 1.0)])


async def talk(http: aiohttp.ClientSession, path: str) -> None:
    """A conversation in each dialect, with a tool call, a stream, and a history that is told anew."""
    ask: dict[str, Any] = {"model": "m", "messages": [user("go")], "tools": [FUNCTION], "stream": False}
    async with http.post(f"{path}/v1/chat/completions", json=ask) as answer:
        answer_message = (await answer.json())["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": answer_message["tool_calls"][0]["id"], "content": "a door"}
    async with http.post(
        f"{path}/v1/chat/completions", json={**ask, "messages": [user("go"), answer_message, result], "stream": True}
    ) as answer:
        assert b"[DONE]" in await answer.read()
    async with http.post(
        f"{path}/v1/messages", json={"model": "m", "max_tokens": 50, "messages": [user("hi")]}
    ) as answer:
        blocks = (await answer.json())["content"]
    more = [user("hi"), {"role": "assistant", "content": blocks}, user("more")]
    async with http.post(f"{path}/v1/messages", json={"model": "m", "max_tokens": 50, "messages": more}) as answer:
        assert answer.status == 200
    async with http.post(f"{path}/v1/responses", json={"model": "m", "input": "hello"}) as answer:
        response = await answer.json()
    continuation = {"model": "m", "input": "more", "previous_response_id": response["id"]}
    async with http.post(f"{path}/v1/responses", json=continuation) as answer:
        assert answer.status == 200


async def make_run(folder: Path) -> None:
    scripted = ScriptedClient(renderer_for("qwen3"), line, tools=[LOOK])
    client = LedgerClient(scripted, folder / "ledger.jsonl")
    branches = await branch(client, scripted)
    async with serving(client=client, finished=folder / "trajectories.twz") as served:
        for name in ("one", "two"):
            opened = await served.open(id=name)
            await talk(served.http, opened["path"])
            async with served.http.post(f"/sessions/{name}/finalize", json={}, headers=ADMIN_HEADERS) as answer:
                assert answer.status == 200
    await client.close()
    write_trajectories(folder, [branches])
    train_once(folder)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    asyncio.run(make_run(folder))
    return folder


@pytest.fixture
def run(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "run"))


def test_sessions_that_branch_and_those_of_a_gateway_pass(run: Path) -> None:
    report = audit_files(run)
    assert report.contradictions == []
    trajectories = {trajectory.id: trajectory for trajectory in read_trajectories(run / "trajectories.twz")}
    assert set(trajectories) == {"branches", "one", "two"}
    reasons = trajectories["branches"].forks()
    assert {"resample", "compaction", "assistant_edited", "system_changed", "tools_changed", "concurrent"} <= set(
        reasons
    )
    assert report.counts["forks"] == sum(sum(trajectory.forks().values()) for trajectory in trajectories.values())
    assert report.counts["turns equal to a call"] == report.counts["turns"] == 11 + 6 + 6
    assert report.counts["ids trained once"] == sum(trajectory.sampled_tokens for trajectory in trajectories.values())


# What is planted


def edit(file: Path, change: Callable[[Records], Records | None]) -> None:
    records = read_records(file)
    changed = change(records)
    write_records(file, records if changed is None else changed)


def parts(records: Records, name: str = "branches") -> Records:
    segments: Records = next(record for record in records if record["id"] == name)["segments"]
    return segments


def sampled(records: Records, number: int, name: str = "branches") -> dict[str, Any]:
    return [part for part in parts(records, name) if part["kind"] == "sampled"][number]


def spelled(number: int) -> str:
    return renderer_for("qwen3").decode(np.array([number], np.int32))


def re_encode(records: Records) -> None:
    """The same text in other ids: its first long token is split into characters."""
    part = sampled(records, 1)
    renderer = renderer_for("qwen3")
    at = next(
        n for n, number in enumerate(part["token_ids"]) if len(spelled(number)) > 1 and number not in renderer.stop_ids
    )
    split = [number for character in spelled(part["token_ids"][at]) for number in renderer._tokens.encode(character)]
    ids = [*part["token_ids"][:at], *split, *part["token_ids"][at + 1 :]]
    assert renderer.decode(np.array(ids, np.int32)) == renderer.decode(np.array(part["token_ids"], np.int32))
    part["token_ids"] = ids
    part["logprobs"] = [*part["logprobs"], *part["logprobs"][-len(split) + 1 :]]
    part["weight_versions"] = [[part["weight_versions"][0][0], 0, len(part["token_ids"])]]


def change_prompt(records: Records) -> None:
    parts(records, "two")[0]["token_ids"][3] ^= 1


def swap_logprobs(records: Records) -> None:
    values = sampled(records, 2)["logprobs"]
    values[0], values[1] = values[1], values[0]


def swap_logprobs_of_turns(records: Records) -> None:
    one, two = (sampled(records, number, "one") for number in (1, 2))
    size = min(len(one["logprobs"]), len(two["logprobs"]))
    one["logprobs"][:size], two["logprobs"][:size] = two["logprobs"][:size], one["logprobs"][:size]


def drop_branch(records: Records) -> None:
    segments = parts(records)
    del segments[-2:]


def drop_context(records: Records) -> None:
    segments = parts(records, "one")
    leaf = next(part for part in segments if part["kind"] == "context" and part["parent"] >= 0)
    leaf["token_ids"] = leaf["token_ids"][1:]


def hang_elsewhere(records: Records) -> None:
    """A context under another turn, which has a context after it too: the shape of the tree stays right."""
    segments = parts(records)
    forks = [part for part in segments if part["kind"] == "context" and part["parent"] > 0 and "fork" in part]
    turns = [part["index"] for part in segments if part["kind"] == "sampled" and part["index"] < forks[0]["index"]]
    free = [
        index for index in turns if any(part["parent"] == index for part in segments) and index != forks[0]["parent"]
    ]
    forks[0]["parent"] = free[0]


def join_roots(records: Records) -> None:
    segments = parts(records)
    roots = [part["index"] for part in segments if part["parent"] == -1]
    child = next(part for part in segments if part["parent"] == roots[1])
    child["parent"], child["fork"] = roots[0], "resample"


def change_version(records: Records) -> None:
    part = sampled(records, 2)
    assert part["weight_versions"][0][0] == 1
    part["weight_versions"][0][0] = 0


def forget_fork(records: Records) -> None:
    next(part for part in parts(records) if part.get("fork") == "concurrent").pop("fork")


def name_twice(records: Records) -> None:
    """A turn under the name of another one."""
    twins = [part for part in parts(records) if part["kind"] == "sampled" and part.get("fork") == "resample"]
    twins[0]["turn_id"] = sampled(records, 0)["turn_id"]


def copy_branch(records: Records) -> None:
    segments = parts(records, "one")
    copies = [dict(part) for part in segments[:2]]
    copies[0] |= {"index": len(segments), "fork": "restart"}
    copies[1] |= {"index": len(segments) + 1, "parent": len(segments), "turn_id": "t99"}
    segments += copies


def cut_turn(records: Records) -> None:
    part = sampled(records, 4)
    for key in ("token_ids", "logprobs"):
        part[key] = part[key][:-1]
    part["weight_versions"][-1][2] -= 1


def mark_as_context(records: Records) -> None:
    part = sampled(records, -1, "two")
    part["kind"] = "context"
    for key in ("turn_id", "logprobs", "weight_versions", "finish_reason"):
        part.pop(key, None)


def cross_sessions(records: Records) -> None:
    one, two = (next(record for record in records if record["id"] == name) for name in ("one", "branches"))
    one["id"], two["id"] = two["id"], one["id"]


def lose_session(records: Records) -> Records:
    return [record for record in records if record["id"] != "two"]


TRAJECTORIES = [
    (re_encode, "trajectory branches: segment 3 (turn t1): the completion has length"),
    (change_prompt, "trajectory two: segment 1 (turn t0): the prompt differs at 3"),
    (swap_logprobs, "the logprobs differs at 0"),
    (swap_logprobs_of_turns, "the logprobs differs at"),
    (drop_branch, "a call of the ledger is in no segment"),
    (drop_context, "the prompt has length"),
    (hang_elsewhere, "the prompt"),
    (join_roots, "the prompt"),
    (change_version, "weight versions are ((0,"),
    (forget_fork, "but its fork reason is None"),
    (name_twice, "is the second one with turn t0"),
    (copy_branch, "(turn t99): no call in the ledger sampled it"),
    (cut_turn, "the completion has length"),
    (mark_as_context, "is context after context"),
    (cross_sessions, "trajectory branches: segment 11 (turn t5): the prompt has length"),
    (lose_session, "session two: 6 calls in the ledger, but no trajectory"),
]


@pytest.mark.parametrize(
    ("corrupt", "words"), TRAJECTORIES, ids=[corruption.__name__ for corruption, _ in TRAJECTORIES]
)
def test_a_corrupt_tree_is_found(run: Path, corrupt: Callable[[Records], Records | None], words: str) -> None:
    edit(run / "trajectories.twz", corrupt)
    problems = audit_files(run).contradictions
    assert any(words in text for text in problems), problems


def rows(records: Records, name: str = "branches") -> Records:
    return [row for record in records for row in record.get("rows", ()) if row["trajectory"] == name]


def shift_mask(records: Records) -> None:
    for span in rows(records)[0]["spans"]:
        span[0] += 1
        span[1] += 1


def train_shared_twice(records: Records) -> None:
    """A further branch trains the turns that it shares with the first one as well."""
    first = rows(records)[0]["spans"][0]
    other = next(row for row in rows(records)[1:] if row["spans"][0][0] > first[1])
    other["spans"] = [first, *other["spans"]]


def forget_branch(records: Records) -> None:
    record = next(
        record for record in records if any(row["trajectory"] == "branches" for row in record.get("rows", ()))
    )
    record["rows"].pop()


def train_row_of_other_leaf(records: Records) -> None:
    one, two = rows(records)[:2]
    one["leaf"], two["leaf"] = two["leaf"], one["leaf"]


def train_cut_mask(records: Records) -> None:
    rows(records, "one")[0]["spans"][-1][1] -= 1


def train_in_two_steps(records: Records) -> Records:
    return [*records, {**records[-1], "step": records[-1]["step"] + 1}]


BATCHES = [
    (shift_mask, "(context) was trained 1 times"),
    (train_shared_twice, "was trained 2 times"),
    (forget_branch, "(sampled) was trained 0 times"),
    (train_row_of_other_leaf, "trajectory branches"),
    (train_cut_mask, "(sampled) was trained 0 times"),
    (train_in_two_steps, "was trained in more than one step"),
]


@pytest.mark.parametrize(("corrupt", "words"), BATCHES, ids=[corruption.__name__ for corruption, _ in BATCHES])
def test_corrupt_training_of_branches_is_found(
    run: Path, corrupt: Callable[[Records], Records | None], words: str
) -> None:
    edit(run / "batches.jsonl", corrupt)
    problems = audit_files(run).contradictions
    assert any(words in text for text in problems), problems


def calls(records: Records, name: str) -> Records:
    return [record for record in records if record.get("session") == name]


def lose_call(records: Records) -> Records:
    lost = calls(records, "branches")[-1]
    return [record for record in records if record is not lost]


def double_call(records: Records) -> Records:
    last_call = calls(records, "one")[-1]
    at = records.index(last_call)
    # The prompt of a record is told by what it shares with the one before.
    size = last_call["shared"] + len(last_call["token_ids"])
    return [*records[: at + 1], {**last_call, "shared": size, "token_ids": []}, *records[at + 1 :]]


def change_call(records: Records) -> None:
    calls(records, "two")[-1]["completion"][0] ^= 1


def rename_call(records: Records) -> None:
    calls(records, "one")[0]["session"] = "two"


LEDGERS = [
    (lose_call, "no call in the ledger sampled it"),
    (double_call, "a call of the ledger is in no segment"),
    (change_call, "the completion differs at 0"),
    (rename_call, "malformed ledger record: ValueError('shares"),
]


@pytest.mark.parametrize(("corrupt", "words"), LEDGERS, ids=[corruption.__name__ for corruption, _ in LEDGERS])
def test_a_ledger_that_says_something_else_is_found(
    run: Path, corrupt: Callable[[Records], Records | None], words: str
) -> None:
    edit(run / "ledger.jsonl", corrupt)
    problems = audit_files(run).contradictions
    assert any(words in text for text in problems), problems


@pytest.mark.long
def test_every_number_of_every_segment_is_held_against_the_ledger(run: Path) -> None:
    file = run / "trajectories.twz"
    records = read_records(file)
    for record in records:
        for segment in record["segments"]:
            for key in ("token_ids", "logprobs"):
                if segment.get(key):
                    was = segment[key][-1]
                    segment[key][-1] = was + 1 if key == "token_ids" else was - 0.125
                    write_records(file, records)
                    assert not audit_files(run).sound, (record["id"], segment["index"], key)
                    segment[key][-1] = was


def test_a_sound_run_is_told_by_the_helper(sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "again")
    (tmp_path / "again" / "batches.jsonl").unlink()
    assert assert_sound(tmp_path / "again").counts["train steps"] == 3
