"""The audit of trajectories that hold text: nothing of them is proven, and none of them passes for it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.rollout.audited import assert_sound, write_trajectories
from turnwise.errors import AuditError, TrainError
from turnwise.gateway.proxy.session import TextSession
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout.audit import audit_files
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import Message

ASK: list[Message] = [{"role": "user", "content": "Go."}]
SAID: Message = {"role": "assistant", "content": "Done."}


def text(name: str = "text") -> Trajectory:
    session = TextSession(id=name)
    session.commit(session.place(ASK, ()), SAID, cut=False, usage=None, sampling={})
    return Trajectory(name, name, "g", "t", segments=session.segments(), recorded="text")


async def tokens(folder: Path, name: str = "tokens") -> Trajectory:
    renderer = ToyRenderer()
    client = LedgerClient(ScriptedClient(renderer, ["Done."]), folder / "ledger.jsonl")
    session = Session(client, renderer, id=name, limits=SessionLimits(context_length=1000))
    await session.chat(ASK)
    await client.close()
    return Trajectory(name, name, "g", "t", segments=session.segments())


@pytest.mark.parametrize("ledger", [False, True])
async def test_of_text_alone_nothing_is_proven(tmp_path: Path, ledger: bool) -> None:
    if ledger:
        await LedgerClient(ScriptedClient(ToyRenderer(), []), tmp_path / "ledger.jsonl").close()
    write_trajectories(tmp_path, [text("a"), text("b")])
    with pytest.raises(AuditError, match="2 trajectories, all recorded as text"):
        audit_files(tmp_path)


async def test_beside_others_text_is_counted_and_left_out(tmp_path: Path) -> None:
    recorded = await tokens(tmp_path)
    write_trajectories(tmp_path, [recorded, text()])
    report = audit_files(tmp_path)
    assert report.sound
    assert report.counts["trajectories of text: not audited"] == 1
    assert report.counts["turns equal to a call"] == 1


async def test_tokens_do_not_pass_for_text(tmp_path: Path) -> None:
    recorded = await tokens(tmp_path)
    hidden: list[Any] = [
        replace(segment, token_ids=segment.token_ids[:0], logprobs=None, weight_versions=())
        for segment in recorded.segments
    ]
    for number, (segments, finding) in enumerate(
        ((recorded.segments, "holds ids"), (hidden, "there are calls of it in the ledger"))
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "ledger.jsonl").write_bytes((tmp_path / "ledger.jsonl").read_bytes())
        write_trajectories(folder, [replace(recorded, segments=segments, recorded="text"), text()])
        assert any(finding in problem for problem in audit_files(folder).contradictions)


async def test_trajectories_of_text_are_never_trained(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="text was recorded as text"):
        to_samples(text())
    assert_sound(tmp_path, await tokens(tmp_path))
