"""Images in sessions: what the model saw, what is recorded, on disk, audited, restored and trained."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import renderer_for
from support.chat.sees import seeing, shared
from support.pictures import png
from support.property_tests import examples
from support.rollout.audited import assert_sound
from turnwise.columns import pack_trajectory, unpack_trajectory
from turnwise.errors import BudgetExceeded, FormatError, RenderError, SessionError
from turnwise.images import image_part
from turnwise.inference.scripted import ScriptedClient
from turnwise.media_files import MediaFiles, media_spans
from turnwise.model.core import LLMClient
from turnwise.recorder.ledger import LedgerClient, LedgerWriter, read_ledger
from turnwise.recorder.session import Session, SessionLimits
from turnwise.recorder.turn_record import TurnRecord
from turnwise.rollout.audit import audit_files
from turnwise.rollout.records import row_digest
from turnwise.trajectory import Trajectory, messages_of, to_samples
from turnwise.trajectory_file import TrajectoryWriter, read_trajectories
from turnwise.types import Completion, Media, ToolCall, ToolSchema

LIMITS = SessionLimits(context_length=100_000)
LOOK = ToolSchema("look", "The picture.")
CALL = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "look", {})]}


def user(*content):
    return {"role": "user", "content": [c if isinstance(c, dict) else {"type": "text", "text": c} for c in content]}


def answer(message, *images):
    call = message["tool_calls"][0]
    return {"role": "tool", "tool_call_id": call.id, "content": [image_part(image) for image in images]}


class Watching(ScriptedClient):
    """Keeps the prompts that it was asked."""

    def __init__(self, *arguments, **named) -> None:
        super().__init__(*arguments, **named)
        self.prompts = []

    async def generate(self, prompt, params, *, session_id) -> Completion:
        self.prompts.append(prompt)
        return await super().generate(prompt, params, session_id=session_id)


def trajectory_of(session: Session) -> Trajectory:
    return Trajectory(session.id, session.id, "group", "task", segments=session.segments())


def seen(prompt) -> list[tuple]:
    return [tuple(span) for span in media_spans(prompt.media)]


@given(
    first=st.lists(st.integers(0, 3), max_size=3),
    answers=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3),
    repeat=st.booleans(),
)
@settings(max_examples=examples(12), deadline=None)
def test_segments_and_rows_hold_exactly_the_images_of_the_call(first, answers, repeat, tmp_path_factory) -> None:
    asyncio.run(_exactly(first, answers, repeat, tmp_path_factory.mktemp("run")))


def _begins(sequence, part) -> bool:
    return sequence[: len(part)].tolist() == part.tolist()


async def _exactly(first, answers, repeat, folder: Path) -> None:
    renderer, _ = shared()
    pictures = [png(8 * (1 + seed % 3), 8, seed) for seed in range(6)]
    client = Watching(renderer, lambda request: CALL if request.number < len(answers) else "red", tools=[LOOK])
    book = LedgerWriter(folder / "ledger.jsonl")
    session = Session(LedgerClient(client, book), renderer, id="s", limits=LIMITS)
    messages = [user("what", *(image_part(pictures[number]) for number in first))]
    expected = [list(first)]
    for numbers in answers:
        message = await session.chat(messages, [LOOK])
        messages += [message, answer(message, *(pictures[number] for number in numbers))]
        expected.append([*expected[-1], *numbers])
    messages.append(await session.chat(messages, [LOOK]))
    if repeat:
        # The same text and sizes with another image is another prompt.
        other = [user("what", *(image_part(png(8 * (1 + number % 3), 8, number + 12)) for number in first))]
        expected.append([number + 12 for number in first])
        await session.chat(other, [LOOK])
    digests = {number: Media("image", png(8 * (1 + number % 3), 8, number), 0, 1).digest for number in range(18)}
    assert [[number.digest for number in prompt.media] for prompt in client.prompts] == [
        [digests[number] for number in one] for one in expected
    ]
    book.close()
    trajectory = trajectory_of(session)
    for prompt, turn in zip(client.prompts, trajectory.turns(), strict=True):
        path = [trajectory.segments[index] for index in turn.path]
        ids = np.concatenate([segment.token_ids for segment in path])
        assert ids.tolist() == prompt.token_ids.tolist()
        starts = np.cumsum([0, *(len(segment.token_ids) for segment in path)])
        placed = [
            (number.kind, number.digest, int(start) + number.position, number.length)
            for segment, start in zip(path, starts, strict=False)
            for number in segment.media
        ]
        assert placed == seen(prompt)
        pad = {int(number) for m in prompt.media for number in prompt.token_ids[m.position : m.end]}
        assert len(pad) <= 1, "positions cover placeholders only"
    assert [[tuple(number) for number in entry.media] for entry in read_ledger(folder / "ledger.jsonl").entries] == [
        seen(prompt) for prompt in client.prompts
    ]
    for row in to_samples(trajectory).rows:
        calls = [seen(prompt) for prompt in client.prompts if _begins(row.input_ids, prompt.token_ids)]
        assert seen(row) in calls
    assert_sound(folder, trajectory)


async def test_an_image_is_on_disk_once_and_no_record_holds_its_bytes(tmp_path: Path) -> None:
    renderer, processor = seeing()
    pictures = [png(16, 16, seed) for seed in range(4)]
    book = LedgerWriter(tmp_path / "ledger.jsonl")
    client = Watching(renderer, ["a", "b", "c", "d", "e"])
    session = Session(LedgerClient(client, book), renderer, id="s", limits=LIMITS)
    messages = []
    for picture in (*pictures, pictures[0]):
        messages.append(user("look", image_part(picture)))
        messages.append(await session.chat(messages))
    book.close()
    assert processor.placed == pictures, "each is processed once"
    buffers = {id(media.data) for prompt in client.prompts for media in prompt.media}
    assert len(buffers) == len(pictures), "and held once"
    assert session.metrics()["forks"] == 0
    assert_sound(tmp_path, trajectory_of(session))
    files = {file.name: file.read_bytes() for file in (tmp_path / "media").iterdir()}
    assert sorted(files.values()) == sorted(pictures)
    for name in ("ledger.jsonl", "trajectories.twz"):
        assert b"iVBOR" not in (tmp_path / name).read_bytes()
    [read] = read_trajectories(tmp_path / "trajectories.twz")
    assert read.segments[0].media == trajectory_of(session).segments[0].media
    assert messages_of(read.segments[0])[0]["content"][1] == image_part(pictures[0])


async def test_a_trajectory_that_travels_holds_its_images(tmp_path: Path) -> None:
    renderer, _ = shared()
    session = Session(ScriptedClient(renderer, ["a"]), renderer, id="s", limits=LIMITS)
    await session.chat([user("look", image_part(png(16, 16)))])
    sent = trajectory_of(session)
    received = Trajectory.from_bytes(sent.to_bytes())
    assert received.segments[0].media == sent.segments[0].media
    with pytest.raises(FormatError, match=r"names the image [0-9a-f]{64}, and there is no folder"):
        unpack_trajectory(pack_trajectory(sent, MediaFiles(tmp_path / "media").write))
    with pytest.raises(FormatError, match=r"cannot be read .* Keep the folder media/ beside the records"):
        unpack_trajectory(pack_trajectory(sent, lambda media: None), MediaFiles(tmp_path / "other").read)
    file = next((tmp_path / "media").iterdir())
    file.write_bytes(b"changed")
    with pytest.raises(FormatError, match="the file was changed"):
        MediaFiles(tmp_path / "media").read(file.name)


async def test_a_cut_row_holds_whole_images_only() -> None:
    renderer, _ = shared()
    session = Session(ScriptedClient(renderer, ["a", "b"]), renderer, id="s", limits=LIMITS)
    messages = [user("look", image_part(png(16, 16)))]
    messages += [await session.chat(messages), user(image_part(png(40, 40, 2)))]
    await session.chat(messages)
    [row] = to_samples(trajectory_of(session)).rows
    one, two = row.media
    for limit in range(one.end, len(row.input_ids) + 1):
        for cut in to_samples(trajectory_of(session), max_tokens=limit).rows:
            is_cut = two.position < limit < two.end
            assert len(cut.input_ids) == (two.position if is_cut else limit)
            assert cut.media == ((one, two) if limit >= two.end else (one,))
    other = replace(row, media=(one, replace(two, data=png(40, 40, 3))))
    assert row_digest(other) != row_digest(row)


async def test_unplaceable_image_is_refused_before_the_request() -> None:
    renderer, _ = shared()
    client = Watching(renderer, ["a"])
    session = Session(client, renderer, id="s", limits=replace(LIMITS, context_length=60))
    with pytest.raises(
        BudgetExceeded, match=r"\(100 of them of 2 images: send fewer or smaller ones\), the context 60"
    ):
        await session.chat([user(image_part(png(80, 40)), image_part(png(80, 40, 1)))])
    with pytest.raises(RenderError, match="broken"):
        await session.chat([user(image_part(png(8, 8)[:-5]))])
    with pytest.raises(SessionError, match="are not read"):
        await session.chat([user({"type": "image_url", "image_url": {"url": "https://a.test/a.png"}})])
    text = renderer_for("qwen3")
    blind = Session(Watching(text, ["a"]), text, id="b", limits=LIMITS)
    with pytest.raises(RenderError, match="this model takes text only"):
        await blind.chat([user(image_part(png(8, 8)))])
    assert client.prompts == []
    assert session.segments() == blind.segments() == []


async def test_a_restored_session_goes_on_with_its_images(tmp_path: Path) -> None:
    renderer, _ = shared()
    lines = functools.partial(ScriptedClient, renderer, [CALL, "red", "blue"], tools=[LOOK])
    book = LedgerWriter(tmp_path / "ledger.jsonl")
    session = Session(LedgerClient(lines(), book), renderer, id="s", limits=LIMITS)
    records: list[bytes] = []
    session.journal = lambda record: records.append(orjson.dumps(record.to_json()))
    messages = [user("what", image_part(png(16, 8)))]
    message = await session.chat(messages, [LOOK])
    messages += [message, answer(message, png(24, 8, 1))]
    messages.append(await session.chat(messages, [LOOK]))
    book.close()
    assert all(b"iVBOR" not in record for record in records)
    files = MediaFiles.beside(book.path)
    restored = Session(lines(), renderer, id="s", limits=LIMITS)
    entries = read_ledger(book.path).entries
    for record, entry in zip(records, entries, strict=True):
        completion = Completion(entry.completion_ids, entry.logprobs, entry.finish_reason, entry.weight_versions)
        restored.restore(
            TurnRecord.from_json(orjson.loads(record), files.read), entry.prompt_ids, completion, entry.media
        )
    assert [segment.media for segment in restored.segments()] == [segment.media for segment in session.segments()]
    messages.append(user("and"))
    await restored.chat(messages, [LOOK])
    assert restored.metrics()["forks"] == 0
    other = Session(lines(), renderer, id="s", limits=LIMITS)
    wrong = [segment._replace(digest="0" * 64) for segment in entries[0].media]
    record = TurnRecord.from_json(orjson.loads(records[0]), files.read)
    with pytest.raises(SessionError, match="holds other images than the call"):
        other.restore(record, entries[0].prompt_ids, completion, wrong)


async def test_the_audit_knows_another_image_behind_equal_ids(tmp_path: Path) -> None:
    renderer, _ = shared()
    client: LLMClient = ScriptedClient(renderer, ["a"])
    book = LedgerWriter(tmp_path / "ledger.jsonl")
    session = Session(LedgerClient(client, book), renderer, id="s", limits=LIMITS)
    await session.chat([user("look", image_part(png(16, 16)))])
    book.close()
    trajectory = trajectory_of(session)
    [media] = trajectory.segments[0].media
    trajectory.segments[0] = replace(trajectory.segments[0], media=(replace(media, data=png(16, 16, 7)),))
    writer = TrajectoryWriter(tmp_path / "trajectories.twz")
    writer.write(trajectory)
    writer.close()
    [contradiction] = audit_files(tmp_path).contradictions
    assert "the images are " in contradiction
    assert "in the trajectory" in contradiction
