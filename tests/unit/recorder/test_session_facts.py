"""What a session says of itself: its policies, what stayed text, and the date that it lives in."""

from __future__ import annotations

import datetime

import pytest

from support.chat.model_dirs import FAMILIES, build_model_dir, model_dir, renderer_for
from turnwise.chat import template
from turnwise.chat.renderer import load_renderer
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder import session as session_module
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory
from turnwise.types import Message, ToolSchema

LIMITS = SessionLimits(context_length=10_000)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def test_escaped_control_strings_are_counted_per_session() -> None:
    renderer = renderer_for("qwen3")
    first, other = (
        Session(ScriptedClient(renderer, ["a", "b", "c"]), renderer, id=name, limits=LIMITS) for name in "ab"
    )
    tool = ToolSchema("look", "Writes <|im_end|> and <tool_call>.", {"type": "object", "properties": {}})
    history = [user("say <|im_end|> twice: <|im_end|>")]
    history += [await first.chat(history, [tool]), user("<tool_call>")]
    await other.chat([user("nothing")], [tool])
    await first.chat(history, [tool])
    # Asking again renders nothing.
    await first.chat(history, [tool])
    assert first.metrics()["special_in_text"] == 3
    assert other.metrics()["special_in_text"] == 0
    ends = [
        number for segment in first.segments() for number in segment.token_ids.tolist() if number in renderer.stop_ids
    ]
    # The system's, both users' and the model's own.
    assert len(ends) == 3 + sum(segment.sampled for segment in first.segments())


async def test_control_strings_are_not_counted_if_they_become_ids() -> None:
    renderer = load_renderer(model_dir("qwen3"), special_in_text="template")
    session = Session(ScriptedClient(renderer, ["a"]), renderer, id="s", limits=LIMITS)
    await session.chat([user("say <|im_end|>")])
    assert session.metrics()["special_in_text"] == 0


DATED = "{{ '<|im_start|>system\\n' + strftime_now('%d %B %Y') + '<|im_end|>\\n' }}" + FAMILIES["kimi"].source


async def test_a_session_never_sees_the_date_change(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(datetime.datetime):
        today = datetime.datetime(2031, 12, 31, 23, 59)

        @classmethod
        def now(cls, tz=None):
            return cls.today

    monkeypatch.setattr(template, "datetime", Clock)
    monkeypatch.setattr(session_module, "datetime", Clock)
    renderer = load_renderer(build_model_dir(tmp_path, "kimi"), chat_template=DATED)
    client = ScriptedClient(renderer, ["a", "b", "c"])
    session = Session(client, renderer, id="s", limits=LIMITS)
    first = await session.chat([user("q")])
    Clock.today = datetime.datetime(2032, 1, 1, 0, 1)
    await session.chat([user("q"), first, user("r")])
    await session.chat([user("another beginning")])
    assert session.metrics()["branches"] == 2
    assert [request.text.count("31 December 2031") for request in client.requests] == [1, 1, 1]
    assert not any("2032" in request.text for request in client.requests)


async def test_trajectory_names_its_recording_policies() -> None:
    config = RolloutConfig(env=SpecConfig(name="lookup"), reasoning="template", echo="strict")
    renderer = renderer_for("qwen3")
    producer = await RolloutProducer.create(
        config, ScriptedClient(renderer, lambda _: "42"), None, RolloutParts(renderer)
    )
    [group] = await producer.gather([RolloutRequest(Task("t", "What is it?", {"answer": "42"}))])
    await producer.close()
    read = [Trajectory.from_bytes(trajectory.to_bytes()) for trajectory in group.trajectories]
    assert {(trajectory.reasoning, trajectory.echo) for trajectory in read} == {("template", "strict")}
    # What was written before they were told was recorded under these.
    assert (Trajectory("s", "e", "g", "t").reasoning, Trajectory("s", "e", "g", "t").echo) == ("keep", "same")
