"""A gateway that was killed and is started again: its open sessions go on as if nothing had happened.

A kill is a copy of the gateway's directory while it runs: what the files hold then is what a kill leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from support.gateway.hosted_endpoint import hosting, provider
from support.gateway.server import ADMIN_HEADERS, Served, serving
from support.rollout.record_files import read_records, write_records
from turnwise.errors import ConfigError, FormatError, InferenceError
from turnwise.gateway.config import GatewayConfig
from turnwise.gateway.server import _prepare
from turnwise.gateway.session_log import read_saved
from turnwise.inference.scripted import ScriptedRequest
from turnwise.recorder.ledger import read_ledger
from turnwise.rollout.audit import audit_files
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import read_trajectories
from turnwise.types import ToolCall, ToolSchema

RUN = ToolSchema("run", "Runs a command.", {"type": "object", "properties": {"command": {"default": 2**70}}})
LINES = ("sessions.jsonl", "ledger.jsonl", "trajectories.twz")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def script(request: ScriptedRequest) -> Any:
    """What a model says depends on its prompt and its seed only, as in a server."""
    if "Break." in request.text[-60:]:
        return InferenceError("the server broke")
    if "Call." in request.text[-60:]:
        return {
            "role": "assistant",
            "content": "So.",
            "reasoning_content": "Hm.",
            "tool_calls": [ToolCall("", "run", {})],
        }
    return f"Answer {len(request.prompt)} {(request.params.seed or 0) % 1000}"


def killed(out: Path) -> Path:
    """The directory that a gateway leaves that is killed now."""
    restarted = out.with_name(f"{out.name}-again")
    shutil.copytree(out, restarted)
    return restarted


async def post(served: Any, path: str, body: Any, *, admin: bool = False, key: str = "") -> tuple[int, Any]:
    headers = ADMIN_HEADERS if admin else {"authorization": f"Bearer {key}"}
    async with served.http.post(path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def state(served: Any, name: str) -> Any:
    async with served.http.get(f"/sessions/{name}", headers=ADMIN_HEADERS) as answer:
        return await answer.json()


def opened_again(served: Any, name: str) -> dict[str, str]:
    """What opening a session answered, in an earlier life of its gateway."""
    keys: dict[str, str] = served.app.sessions.of_id(name).keys
    return keys


async def chat(served: Served, opened: Any, messages: list[Any], **more: Any) -> Any:
    body = {"model": "m", "messages": messages, "tools": [RUN.to_json()], **more}
    status, answer = await post(served, f"{opened['path']}/v1/chat/completions", body)
    assert status == 200, answer
    return answer["choices"][0]["message"]


async def end(served: Any, name: str) -> Trajectory:
    status, body = await post(served, f"/sessions/{name}/finalize", {}, admin=True)
    assert status == 200, body
    return Trajectory.from_bytes(json.dumps(body["trajectory"]))


def left(trajectory: Trajectory) -> Any:
    """What a trajectory holds but for the times of its turns."""
    return {**json.loads(trajectory.to_bytes()), "turn_times": sorted(trajectory.turn_times)}


async def later(served: Served, opened: Any, history: list[Any]) -> None:
    """What an agent does after the kill: it goes on, edits, and is sampled once more."""
    answer = await chat(served, opened, [*history, user("And then?")], temperature=0.5)
    await chat(served, opened, [*history, user("And then?"), answer, user("Now?")])
    await chat(served, opened, [*history, user("And then?")])
    await chat(served, opened, [*history[:-1], {**history[-1], "content": "edited"}])
    assert (await post(served, f"{opened['path']}/v1/chat/completions", {"messages": [user("9th")]}))[0] == 400
    key = opened["reward_key"]
    assert (await post(served, f"/sessions/{opened['id']}/rewards", {"value": 2, "turn_id": "t2"}, key=key))[0] == 200


async def test_a_session_goes_on_as_if_its_gateway_had_not_been_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = {"id": "s", "task_id": "task", "seed": 5, "max_turns": 8, "top_p": 0.5, "lenient": ["tool_choice"]}
    async with serving(script, tools=[RUN], out=out) as served:
        opened = await served.open(**settings)
        called = await chat(served, opened, [user("Call.")], tool_choice="required")
        result = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "é\ud83d\ude00"}
        history = [user("Call."), called, result]
        answer = await chat(served, opened, history)
        await chat(served, opened, [user("Alone.")])
        key = opened["reward_key"]
        assert (await post(served, "/sessions/s/rewards", {"value": 1, "name": "r"}, key=key))[0] == 200
        history += [answer, user("Call.")]
        called = await chat(served, opened, history)
        history += [called, {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "r"}]
        new_out = killed(out)
        baseline = await state(served, "s")
        await later(served, opened, history)
        straight = await end(served, "s")
    async with serving(script, tools=[RUN], out=new_out) as served:
        assert await state(served, "s") == baseline
        assert (await post(served, "/sessions", {"id": "s"}, admin=True))[0] == 409
        await later(served, opened, history)
        restarted = await end(served, "s")
    assert (straight.metrics["forks"], straight.stop_reason) == (3, "max_turns")
    assert left(restarted) == left(straight)
    assert read_saved(new_out / "sessions.jsonl").open == {}


async def test_requests_in_flight_are_sent_again(tmp_path: Path) -> None:
    """Sessions with a stream that was open, a request that failed, and no request at all."""
    out, gate = tmp_path / "out", asyncio.Event()

    async def slow(request: ScriptedRequest) -> Any:
        if "Wait." in request.text[-60:]:
            gate.set()
            await asyncio.Event().wait()
        return script(request)

    async with serving(slow, out=out) as served:
        for name in ("waits", "broke", "new"):
            opened = await served.open(id=name, seed=3)
            del opened["base"]
            history = [user("Go."), await chat(served, opened, [user("Go.")])] if name != "new" else []
            if name == "broke":
                status, body = await post(
                    served, f"{opened['path']}/v1/chat/completions", {"messages": [user("Break.")]}
                )
                assert (status, body["error"]["message"]) == (503, "the server broke")
            if name == "waits":
                asking = asyncio.ensure_future(chat(served, opened, [*history, user("Wait.")]))
                await gate.wait()
        restarted = killed(out)
        asking.cancel()
    async with serving(script, out=restarted) as served:
        waits = opened_again(served, "waits")
        await chat(served, waits, [*history, user("Wait.")])
        assert (await end(served, "waits")).metrics["turns"] == 2
        trajectory = await end(served, "broke")
        assert (trajectory.stop_reason, trajectory.error) == ("error", "InferenceError: the server broke")
        assert served.session({"id": "new"}).turns == 0
        # The answer to its opening may have been lost: the same request gets the same keys, until they are used.
        assert (await post(served, "/sessions", {"id": "new", "seed": 4}, admin=True))[0] == 409
        assert (await post(served, "/sessions", {"id": "new", "seed": 3}, admin=True)) == (200, opened)
        await chat(served, opened, [user("Go.")])
        assert (await post(served, "/sessions", {"id": "new", "seed": 3}, admin=True))[0] == 409
    ends = {trajectory.id: trajectory.stop_reason for trajectory in read_trajectories(restarted / "trajectories.twz")}
    assert ends == {"waits": "completed", "broke": "error", "new": "cancelled"}


async def test_stored_responses_are_gone_on_from(tmp_path: Path) -> None:
    out = tmp_path / "out"

    async def ask(served: Served, opened: Any, **body: Any) -> Any:
        tools = [{"type": "function", "name": "run", "parameters": {}}]
        return await post(served, f"{opened['path']}/v1/responses", {"model": "m", "tools": tools, **body})

    async def go_on(served: Served, opened: Any) -> Trajectory:
        more = {"previous_response_id": second["id"], "instructions": "Be long."}
        status, third = await ask(served, opened, input="On?", **more)
        assert status == 200, third
        references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
        status, other = await ask(served, opened, instructions="Be brief.", input=[user("Call."), *references, result])
        assert status == 200, other
        status, fourth = await ask(served, opened, input="And?", **more | {"previous_response_id": third["id"]})
        assert status == 200, fourth
        status, body = await ask(served, opened, input="x", previous_response_id="resp_unknown")
        assert (status, body["error"]["code"]) == (400, "previous_response_not_found")
        return await end(served, "s")

    async with serving(script, tools=[RUN], out=out) as served:
        opened = await served.open(id="s", seed=1)
        _, first = await ask(served, opened, instructions="Be brief.", input="Call.")
        [call] = [item for item in first["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
        more = {"previous_response_id": first["id"], "instructions": "Be brief."}
        _, second = await ask(served, opened, input=[result], **more)
        restarted = killed(out)
        straight = await go_on(served, opened)
    async with serving(script, tools=[RUN], out=restarted) as served:
        assert left(await go_on(served, opened)) == left(straight)


async def three_sessions(out: Path) -> list[Any]:
    """Sessions of two turns each, killed in the middle; returns the messages of the last one's last request."""
    async with serving(script, out=out) as served:
        for name in ("a", "b", "c"):
            opened = await served.open(id=name, seed=1)
            history = [user(f"Go {name}."), await chat(served, opened, [user(f"Go {name}.")])]
            await chat(served, opened, [*history, user("On.")])
        killed(out)
    return [*history, user("On.")]


def rewritten(file: Path, change: Callable[[list[Any]], Any]) -> None:
    records = [json.loads(line) for line in file.read_bytes().splitlines()]
    change(records)
    file.write_text("".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records))


def events(records: list[Any], session: str, kind: str) -> list[Any]:
    return [record for record in records if record.get("session") == session and record.get("event") == kind]


async def test_uncommitted_call_is_named_after_a_kill(tmp_path: Path) -> None:
    out = tmp_path / "out"
    sessions = await three_sessions(out)
    restarted = out.with_name("out-again")
    # The kill came between the ledger's line and the turn's, of which it left a part.
    log = restarted / "sessions.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]) + lines[-1][:50])
    async with serving(script, out=restarted) as served:
        opened = opened_again(served, "c")
        assert (await state(served, "c"))["turn_ids"] == ["t0"]
        await chat(served, opened, sessions)
        trajectories = [await end(served, name) for name in ("a", "b", "c")]
    [resumed] = [resumption for resumption in read_ledger(restarted / "ledger.jsonl").resumptions if resumption.lost]
    calls = [entry for entry in read_ledger(restarted / "ledger.jsonl").entries if entry.session == "c"]
    assert resumed.lost == {"a": (), "b": (), "c": (calls[1].at,)}
    # It is sampled once more with the same seed, hence the same ids.
    assert calls[2].completion_ids.tolist() == calls[1].completion_ids.tolist()
    assert [(trajectory.metrics["turns"], trajectory.metrics["forks"]) for trajectory in trajectories] == [(2, 0)] * 3
    report = audit_files(restarted)
    assert report.contradictions == []
    assert report.counts["calls that a kill lost before they were committed"] == 1


def _turn_removed(files: dict[str, list[Any]], _: int) -> None:
    [record] = [record for record in files["trajectories.twz"] if record["id"] == "c"]
    del record["segments"][-2:]


def _id_changed(files: dict[str, list[Any]], _: int) -> None:
    files["trajectories.twz"][1]["segments"][1]["token_ids"][0] += 1


def _turn_named_as_lost(files: dict[str, list[Any]], at: int) -> None:
    resumed(files)["sessions"]["a"].append(at)


def _earlier_call_named_as_lost(files: dict[str, list[Any]], at: int) -> None:
    resumed(files)["sessions"]["c"] = [at]


def _call_that_there_is_not(files: dict[str, list[Any]], _: int) -> None:
    resumed(files)["sessions"]["b"].append(7)


def _call_in_neither(files: dict[str, list[Any]], _: int) -> None:
    resumed(files)["sessions"]["c"].clear()


def _trajectory_removed(files: dict[str, list[Any]], _: int) -> None:
    files["trajectories.twz"][:] = [record for record in files["trajectories.twz"] if record["id"] != "b"]


def _abandoned_with_a_trajectory(files: dict[str, list[Any]], _: int) -> None:
    event = resumed(files)
    del event["sessions"]["b"]
    event["abandoned"]["b"] = "why"


def _closed_part(files: dict[str, list[Any]], _: int) -> None:
    records = files["ledger.jsonl"]
    records.insert(records.index(resumed(files)) - 1, {"event": "end"})


def resumed(files: dict[str, list[Any]]) -> Any:
    return next(event for event in files["ledger.jsonl"] if event.get("sessions"))


@pytest.mark.parametrize(
    ("plant", "session", "problem"),
    [
        (_turn_removed, "c", "a call of the ledger is in no segment"),
        (_id_changed, "b", "differs at 0"),
        (_turn_named_as_lost, "a", "the ledger names its call as lost before it was committed"),
        (_earlier_call_named_as_lost, "c", "but a later call of the same process was committed"),
        (_call_that_there_is_not, "b", "where it has none"),
        (_call_in_neither, "c", "a call of the ledger is in no segment"),
        (_trajectory_removed, "b", "but no trajectory"),
        (_abandoned_with_a_trajectory, "b", "was abandoned by a gateway that was started again, and is on disk"),
        (_closed_part, "c", "but its process ended in order"),
    ],
)
async def test_audit_finds_planted_damage_after_a_kill(tmp_path: Path, plant: Any, session: str, problem: str) -> None:
    out = tmp_path / "out"
    async with serving(script, out=out) as served:
        for name in ("a", "b", "c"):
            opened = await served.open(id=name)
            history = [user("Go."), await chat(served, opened, [user("Go.")])]
            history += [user("On."), await chat(served, opened, [*history, user("On.")])]
            await chat(served, opened, [*history, user("So?")])
        restarted = killed(out)
    log = restarted / "sessions.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-1]))
    async with serving(script, out=restarted) as served:
        for name in ("a", "b", "c"):
            await chat(served, opened_again(served, name), [user("Other.")])
            await end(served, name)
    assert audit_files(restarted).contradictions == []
    calls = [entry for entry in read_ledger(restarted / "ledger.jsonl").entries if entry.part == 0]
    last_call = {call.session: call for call in calls}
    position = last_call["a"].at if session == "a" else calls[[call.session for call in calls].index("c") + 1].at
    files = {name: read_records(restarted / name) for name in LINES[1:]}
    lost = resumed(files)["sessions"]["c"]
    assert lost == [last_call["c"].at]
    plant(files, position)
    for name, records in files.items():
        write_records(restarted / name, records)
    problems = audit_files(restarted).contradictions
    assert any(session in problem and problem in problem for problem in problems), problems


async def test_a_session_that_cannot_be_rebuilt_is_refused_by_name(tmp_path: Path) -> None:
    out = tmp_path / "out"
    await three_sessions(out)
    restarted = out.with_name("out-again")
    log = restarted / "sessions.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if b'"event":"turn","session":"b"' in line)
    lines[at] = lines[at].replace(b":", b";", 1)
    log.write_bytes(b"".join(lines))
    damaged = log.read_bytes()
    for life in range(2):
        async with serving(script, out=restarted) as served:
            assert len(served.app.sessions) == (2 if life == 0 else 0)
            status, body = await post(served, "/sessions", {"id": "b"}, admin=True)
            assert (status, body["error"]["code"], body["error"]["param"]) == (409, "session_abandoned", "id")
            assert "could not be rebuilt: line" in body["error"]["message"]
            assert "of sessions.jsonl" in body["error"]["message"]
            async with served.http.get("/sessions/b", headers=ADMIN_HEADERS) as answer:
                assert answer.status == 404
                assert "could not be rebuilt" in await answer.text()
    assert (restarted / "sessions.1.damaged").read_bytes() == damaged
    report = audit_files(restarted)
    assert report.contradictions == []
    assert report.counts["sessions that a gateway could not rebuild after a kill"] == 1


@pytest.mark.parametrize("damage", ["no log", "no ledger", "another prompt"])
async def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, damage: str) -> None:
    out = tmp_path / "out"
    await three_sessions(out)
    restarted = out.with_name("out-again")
    if damage == "no log":
        (restarted / "sessions.jsonl").unlink()
    elif damage == "no ledger":
        (restarted / "ledger.jsonl").unlink()
    else:
        # What follows stays where it is.
        ledger = (restarted / "ledger.jsonl").read_bytes()
        (restarted / "ledger.jsonl").write_bytes(re.sub(rb'(?<="shared":)[2-9](?=\d)', rb"1", ledger))
    async with serving(script, out=restarted) as served:
        why = {
            "no log": "its opening is not in sessions.jsonl",
            "no ledger": "ledger.jsonl lacks the call of its turn t0",
            "another prompt": "turn t1 does not continue the 1 turns before it",
        }[damage]
        for name in ("a", "b", "c"):
            status, body = await post(served, "/sessions", {"id": name}, admin=True)
            assert (status, body["error"]["code"]) == (409, "session_abandoned")
            assert why in body["error"]["message"]
        assert len(served.app.sessions) == 0


async def test_another_schema_version_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    out = tmp_path / "out"
    await three_sessions(out)
    log = out.with_name("out-again") / "sessions.jsonl"
    rewritten(log, lambda records: records[0].update(schema_version=9))
    baseline = log.read_bytes()
    with pytest.raises(FormatError, match="schema version 9; this version reads 1"):
        async with serving(script, out=log.parent):
            pass
    assert log.read_bytes() == baseline


async def test_a_lifetime_goes_on_by_the_clock(tmp_path: Path) -> None:
    out = tmp_path / "out"
    await three_sessions(out)
    restarted = out.with_name("out-again")
    rewritten(restarted / "sessions.jsonl", lambda records: events(records, "a", "open")[0].update(ends=1.0))
    async with serving(script, out=restarted) as served:
        opened = {name: opened_again(served, name) for name in ("a", "b")}
        assert (await post(served, f"{opened['a']['path']}/v1/chat/completions", {"messages": [user("x")]}))[0] == 404
        assert await served.app.sessions.sweep() == 1
        await chat(served, opened["b"], [user("x")])
    ends = {
        trajectory.id: (trajectory.stop_reason, trajectory.metrics["turns"])
        for trajectory in read_trajectories(restarted / LINES[2])
    }
    assert ends == {"a": ("timeout", 2), "b": ("cancelled", 3), "c": ("cancelled", 2)}


@pytest.mark.long
async def test_restarted_log_holds_open_sessions_only(tmp_path: Path) -> None:
    out = tmp_path / "0"
    sizes = []
    for number in range(4):
        async with serving(script, out=out) as served:
            for name in range(3):
                opened = await served.open(id=f"{number}-{name}")
                await chat(served, opened, [user("Go.")])
                await end(served, opened["id"])
            if number == 0:
                await chat(served, await served.open(id="open"), [user("Go.")])
            sizes.append((out / LINES[0]).stat().st_size)
            out = killed(out)
    assert max(sizes[1:]) - min(sizes[1:]) < 100
    async with serving(script, out=out) as served:
        assert len(read_saved(out / LINES[0]).open) == len(served.app.sessions) == 1


async def test_a_turn_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    """The disk is full for the log, not for the ledger: the agent is told, and no turn is lost."""
    out = tmp_path / "out"
    async with serving(script, out=out) as served:
        for number in range(3):
            # So that the log is longer than the ledger.
            await served.open(id=f"{number}" * 200, task_id="t" * 200, group_id="g" * 200)
        opened = await served.open(id="s")
        key = opened["reward_key"]
        limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, ((out / LINES[0]).stat().st_size + 10, limit[1]))
        try:
            status, body = await post(served, f"{opened['path']}/v1/chat/completions", {"messages": [user("Go.")]})
            assert (status, body["error"]["code"]) == (507, "disk_full")
            assert "sessions.jsonl cannot be written" in body["error"]["message"]
            for path, admin in (("/sessions/s/rewards", False), ("/sessions", True)):
                status, body = await post(
                    served, path, {"value": 1} if not admin else {"id": "n"}, admin=admin, key=key
                )
                assert (status, body["error"]["code"]) == (507, "disk_full")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, handler)
        assert (await post(served, "/sessions/s/rewards", {"value": 1}, key=key))[0] == 200
        restarted = killed(out)
    async with serving(script, out=restarted) as served:
        session_state = await state(served, "s")
        assert (session_state["turn_ids"], session_state["rewards"]) == (["t0"], [[None, "reward", 1.0]])


def test_second_gateway_in_a_directory_is_refused(tmp_path: Path) -> None:
    config = GatewayConfig(model=tmp_path, out=tmp_path / "out")
    with contextlib.ExitStack() as first:
        _prepare(config, first)
        with contextlib.ExitStack() as second, pytest.raises(ConfigError, match="another process is using"):
            _prepare(config, second)
    with contextlib.ExitStack() as third:
        _prepare(config, third)


async def test_a_hosted_session_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    number = iter(range(1, 100))

    async def respond(request: Any) -> Any:
        count = next(number)
        item = {"type": "message", "id": f"msg_{count}", "role": "assistant",
                "content": [{"type": "output_text", "text": f"Answer {count}."}]}  # fmt: skip
        usage = {"input_tokens": 7 * count, "output_tokens": 2, "total_tokens": 9}
        return web.json_response(
            {"id": f"resp_{count}", "status": "completed", "output": [item], "usage": usage, "model": "m"}
        )

    async def ask(hosted: Any, opened: Any, **body: Any) -> Any:
        return await post(hosted, f"{opened['path']}/v1/responses", body)

    async def go_on(hosted: Any) -> Trajectory:
        nonlocal number
        number = iter(range(10, 100))
        more = [user("Go."), {"type": "item_reference", "id": "msg_1"}, user("On.")]
        assert (await ask(hosted, opened, input="So?", previous_response_id="resp_2"))[0] == 200
        assert (await ask(hosted, opened, input=[*more, {"type": "item_reference", "id": "msg_2"}, user("Hm?")]))[
            0
        ] == 200
        assert (await ask(hosted, opened, input="So?", previous_response_id="resp_10"))[0] == 200
        return await hosted.finalize(opened)

    async with provider(respond) as there:
        async with hosting(there.url, finished=out / LINES[2]) as hosted:
            opened = await hosted.open(id="s", max_total_tokens=500)
            assert (await ask(hosted, opened, input="Go.", temperature=0.5, instructions="Brief."))[0] == 200
            status, _ = await ask(hosted, opened, input="On.", previous_response_id="resp_1", temperature=0.5)
            assert status == 200
            new_out = killed(out)
            straight = await go_on(hosted)
        async with hosting(there.url, finished=new_out / LINES[2]) as hosted:
            restarted = await go_on(hosted)
    assert left(restarted) == left(straight)
    assert (straight.recorded, straight.metrics["turns"]) == ("text", 5)


@pytest.mark.parametrize("stream", [False, True])
async def test_retry_after_a_kill_gets_the_recorded_answer(tmp_path: Path, stream: bool) -> None:
    body = {"model": "m", "messages": [user("Call.")], "tools": [RUN.to_json()], "stream": stream}

    async def attempt(served: Any, opened: Any, number: int) -> str:
        headers = {"x-stainless-retry-count": str(number)}
        async with served.http.post(f"{opened['path']}/v1/chat/completions", json=body, headers=headers) as answer:
            reply = await answer.text()
            assert answer.status == 200, reply
        return "".join(re.findall(r'"(?:content|reasoning_content|arguments|id)":"((?!chatcmpl)[^"]*)"', reply))

    async with serving(script, tools=[RUN], out=tmp_path / "gateway") as served:
        await served.open(id="s", seed=5)
        first = await attempt(served, opened_again(served, "s"), 0)
        again = killed(tmp_path / "gateway")
    async with serving(script, tools=[RUN], out=again) as served:
        assert await attempt(served, opened_again(served, "s"), 1) == first
        assert "c00000000" in first
        session = served.session({"id": "s"})
        assert (session.turns, session.metrics()["branches"]) == (1, 1)
