"""Deleted sessions: no file holds their texts or tokens, nothing is learned from them, and the audit counts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest
import zstandard
from transformers import AutoTokenizer

from support.rollout.record_files import read_records
from support.trainer.live_run import Live, live_config, serving_live
from support.trainer.lookup_run import Turnwise, silent
from turnwise.config import dump_config
from turnwise.ext.live.deletion import erase_lines
from turnwise.ext.live.sessions import session_digest
from turnwise.rollout.records import read_batches
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryFile, TrajectoryWriter

MARKER = "zyxwvu"


def contents(run: Path) -> dict[str, bytes]:
    """Return what the files of a run hold, apart from weights: their bytes, and those of compressed frames in them."""
    files = [file for file in run.rglob("*") if file.is_file() and file.suffix != ".safetensors"]
    texts = {str(file.relative_to(run)): file.read_bytes() for file in files}
    raw = texts[TRAJECTORIES]
    for match in re.finditer(re.escape(zstandard.FRAME_HEADER), raw):
        texts[TRAJECTORIES] += zstandard.ZstdDecompressor().decompressobj().decompress(raw[match.start() :])
    return texts


def holders(run: Path, ids: Sequence[int]) -> set[str]:
    """Return the files that hold the marker, its ids as numbers, or the bytes of these."""
    forms = (MARKER.encode(), ",".join(map(str, ids)).encode(), bytes(ids))
    return {name for name, data in contents(run).items() if any(form in data for form in forms)}


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Have no file of this process grow."""
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


async def wait_for(live: Live, count: str, number: int) -> None:
    """Wait until a count of the service is so high."""
    while (await live.health())[count] < number:
        assert not live.task.done()
        await asyncio.sleep(0.01)


async def ask_and_end(live: Live, name: str, word: str, score: float) -> None:
    """Ask, rate the answer and end the session."""
    assert await live.ask(name, word)
    assert await live.rate(name, score=score, text=word) is None
    assert await live.finish(name) == "finished"


@pytest.mark.long
async def test_no_file_holds_a_deleted_session(colour_model: Path, tmp_path: Path) -> None:
    names = ("learned", "waits", "open", "dropped")
    async with serving_live(live_config(colour_model, tmp_path, checkpoint={"every": 1})) as live:
        # Scores that differ, so that each has a gradient.
        for score, (name, word) in enumerate({"learned": MARKER, "a": "sun", "b": "sea", "other": "rose"}.items()):
            await ask_and_end(live, name, word, score)
        await wait_for(live, "learned", 4)
        while not (live.directory / "checkpoints" / "step_000001").is_dir():
            assert not live.task.done()
            await asyncio.sleep(0.01)
        await ask_and_end(live, "waits", MARKER, 1)
        assert await live.ask("open", MARKER)
        assert await live.ask("dropped", MARKER)
        assert await live.ask("dropped", "fail") == "redactor_failed"
        ids = AutoTokenizer.from_pretrained(colour_model).encode(MARKER)
        holding = {"trajectories.twz", "sessions.jsonl", "ledgers/live.jsonl", "feedback.jsonl"}
        assert holders(live.directory, ids) == holding
        assert await live.delete("waits", key="another") == (404, "not_found")
        with full_disk():
            assert await live.delete("waits") == (507, "disk_full")
        answers = [(await live.delete(name))[1] for name in names]
        assert [answer["learned_in_step"] for answer in answers] == [1, None, None, None]
        assert answers[0]["checkpoints"] == [1]
        await wait_for(live, "deleted", 4)
        assert holders(live.directory, ids) == set()
        for name in names:
            refused = await live.rate(name, thumbs="up"), await live.finish(name), await live.ask(name, "sun")
            assert refused == ("deleted",) * 3
            assert (await live.post("/sessions", {"id": name}))[0] == 410
            # The answer may have been lost: it is sent again.
            assert (await live.delete(name))[0] == 200
    assert holders(live.directory, ids) == set()
    report = audit_run(live.directory, console=silent())
    assert report.contradictions == []
    assert report.counts["sessions deleted by their users"] == 4
    remove_trajectory(live.directory, "other")
    report = audit_run(live.directory, console=silent())
    assert any("trained in step 1, but not on disk" in text for text in report.contradictions)


def remove_trajectory(run: Path, name: str) -> None:
    """Remove a trajectory without a deletion."""
    with TrajectoryFile(run / TRAJECTORIES) as file:
        [location] = [entry.location for entry in file.entries if entry.id.endswith(session_digest("user", name))]
    with contextlib.closing(TrajectoryWriter(run / TRAJECTORIES)) as writer:
        writer.invalidate(location)


@pytest.mark.long
async def test_deleted_session_is_not_learned_from_after_its_step_was_undone(
    colour_model: Path, tmp_path: Path
) -> None:
    config = live_config(colour_model, tmp_path, batch={"groups": 2}, checkpoint={"every": 1})
    async with serving_live(config) as live:
        for step in (1, 2):
            for score in (0, 1):
                await ask_and_end(live, f"{'ab'[score]}{step}", "sun", score)
            await wait_for(live, "step", step)
        assert (await live.delete("a2"))[1]["learned_in_step"] == 2
        await wait_for(live, "deleted", 1)
    async with serving_live(config, resume_step=1) as live:
        counts = await live.health()
        assert (counts["step"], counts["waiting"], counts["deleted"]) == (1, 1, 1)
        assert (await live.delete("a2"))[1]["checkpoints"] == []
        await ask_and_end(live, "c2", "sea", 5)
        await wait_for(live, "step", 2)
    trained = {row.trajectory for row in read_batches(live.directory / "batches.jsonl").by_step[2]}
    assert trained == {f"0-{session_digest('user', 'b2')}", f"1-{session_digest('user', 'c2')}"}
    assert audit_run(live.directory, console=silent()).contradictions == []


async def start(config: TrainConfig, killed_at: str = "") -> tuple[Turnwise, str]:
    """Start the service in a process that is killed where it would call a function of the module of deletions."""
    file = config.runs / "live.yaml"
    file.write_text(dump_config(config))
    kill = (
        f"import os; from turnwise.ext.live import deletion; deletion.{killed_at} = lambda *_: os.kill(os.getpid(), 9)"
    )
    process = Turnwise(config.runs / "live.log", "live", file, before=f"import os; {kill}" if killed_at else "")
    while (address := re.search(r"serving users at (http://[\w.:]+)", process.output())) is None:
        if process.poll() is not None:
            return process, ""
        await asyncio.sleep(0.02)
    return process, address[1]


@pytest.mark.long
async def test_removal_that_kills_cut_off_is_finished_by_a_restart(colour_model: Path, tmp_path: Path) -> None:
    config = live_config(colour_model, tmp_path)
    run = config.runs / "live"
    stopped = asyncio.create_task(asyncio.sleep(0))
    ids = AutoTokenizer.from_pretrained(colour_model).encode(MARKER)
    process, url = await start(config, "TrajectoryFile")
    with process:
        async with aiohttp.ClientSession() as http:
            live = Live(url, http, stopped, run)
            await ask_and_end(live, "waits", MARKER, 1)
            assert await live.ask("open", "sun")
            with contextlib.suppress(aiohttp.ClientError):
                await live.delete("waits")
            assert await asyncio.to_thread(process.wait) == -signal.SIGKILL
    assert "trajectories.twz" in holders(run, ids)
    process, _ = await start(config, "erase_lines")
    with process:
        assert process.poll() == -signal.SIGKILL
    assert holders(run, ids) == {"sessions.jsonl", "ledgers/live.jsonl", "feedback.jsonl"}
    process, url = await start(config)
    with process:
        async with aiohttp.ClientSession() as http:
            live = Live(url, http, stopped, run)
            assert (await live.health())["deleted"] == 1
            assert await live.rate("waits", thumbs="up") == "deleted"
            assert holders(run, ids) == set()
            await ask_and_end(live, "open", "sea", 1)
            assert (await live.health())["waiting"] == 1
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait)
    assert audit_run(run, console=silent()).contradictions == []


def test_lines_contexts_and_images_of_a_session_are_overwritten_and_offsets_stay(tmp_path: Path) -> None:
    deleted, other = "0-" + "a" * 24, "0-" + "b" * 24
    episode = f"1-train-{deleted}-e0~replay/2.0"
    shared, alone = "1" * 64, "2" * 64
    for image in (shared, alone):
        (tmp_path / image).write_bytes(b"image")
    calls = tmp_path / "live.jsonl"
    media = [["image", shared, 0, 1], ["image", alone, 1, 1]]
    torn = f'{{"session":"{deleted}"'
    calls.write_text(
        "".join(json.dumps({"session": name, "media": media[:count]}, separators=(",", ":")) + "\n"
                for name, count in ((deleted, 2), (other, 1), (episode, 0))) + torn + "\n"
    )  # fmt: skip
    batches = tmp_path / "batches.jsonl"
    contexts = [[deleted, 0, 'a "word"'], [episode, 0, "word"], [other, 0, "stays"]]
    batches.write_text(json.dumps({"step": 1, "contexts": contexts}, separators=(",", ":")) + "\n")
    sizes = [file.stat().st_size for file in (calls, batches)]
    for _ in range(2):
        erase_lines([calls, batches], {deleted[2:].encode()}, tmp_path)
    assert [file.stat().st_size for file in (calls, batches)] == sizes
    lines = calls.read_bytes().split(b"\n")
    records = [json.loads(line) for line in lines[:3]]
    assert records == [{"deleted": deleted}, {"session": other, "media": media[:1]}, {"deleted": episode}]
    assert lines[3].startswith(b'{"deleted":')
    assert read_records(batches)[0]["contexts"] == [[deleted, 0, " " * 10], [episode, 0, " " * 4], contexts[2]]
    assert [file.name for file in tmp_path.iterdir() if len(file.name) == 64] == [shared]
