"""Images at the gateway: the parts of three protocols reach the model, are recorded, and survive a kill."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from support.chat.sees import shared
from support.gateway.server import ADMIN_HEADERS, serving
from support.pictures import png
from turnwise.gateway.dialects.core import Abilities
from turnwise.images import data_uri
from turnwise.trajectory import Trajectory, messages_of
from turnwise.trajectory_file import read_trajectories
from turnwise.types import Media, ToolCall, ToolSchema

LOOK = ToolSchema("look", "The picture.")
ONE, TWO = png(16, 16, 1), png(24, 8, 2)
SEES = Abilities(images=True)
CALL = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "look", {})]}


def digest(data: bytes) -> str:
    return Media("image", data, 0, 1).digest


def held(trajectory: Trajectory) -> list[list[str]]:
    return [[image.digest for image in segment.media] for segment in trajectory.segments if not segment.sampled]


async def ended(served: Any, opened: Any) -> Trajectory:
    async with served.http.post(f"/sessions/{opened['id']}/finalize", json={}, headers=ADMIN_HEADERS) as answer:
        return Trajectory.from_bytes(json.dumps((await answer.json())["trajectory"]))


def seen_by(served: Any) -> str:
    text: str = served.client.requests[-1].text
    return text


async def test_chat_completions_with_an_image_of_a_user_and_of_a_tool() -> None:
    async with serving([CALL, "red", "blue"], tools=[LOOK], renderer=shared()[0], abilities=SEES) as served:
        opened = await served.open()
        client = openai.AsyncOpenAI(base_url=f"{opened['base']}/v1", api_key="any", max_retries=0)
        messages: list[Any] = [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": data_uri(ONE), "detail": "low"}},
                ],
            }
        ]
        tools: Any = [LOOK.to_json()]
        first = (await client.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0].message
        assert seen_by(served).count("<|image_pad|>") == 4
        assert first.tool_calls
        image = {"type": "image_url", "image_url": {"url": data_uri(TWO)}}
        messages += [first.to_dict(), {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": [image]}]
        message = await client.chat.completions.create(model="m", messages=messages, tools=tools)
        assert message.choices[0].message.content == "red"
        assert seen_by(served).count("<|image_pad|>") == 4 + 3
        trajectory = await ended(served, opened)
    assert held(trajectory) == [[digest(ONE)], [digest(TWO)]]
    assert trajectory.metrics["forks"] == 0


async def test_anthropic_blocks_also_inside_a_tool_result() -> None:
    async with serving([CALL, "red"], tools=[LOOK], renderer=shared()[0], abilities=SEES) as served:
        opened = await served.open()
        client = anthropic.AsyncAnthropic(base_url=opened["base"], api_key="any", max_retries=0)

        def block(data: bytes) -> dict[str, Any]:
            encoded = data_uri(data).partition(",")[2]
            return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}

        tools: Any = [{"name": "look", "description": "The picture.", "input_schema": LOOK.parameters}]
        messages: Any = [{"role": "user", "content": [block(ONE), {"type": "text", "text": "What is it?"}]}]
        first = await client.messages.create(model="m", messages=messages, max_tokens=50, tools=tools)
        used = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": used.id, "content": [block(TWO)]}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        await client.messages.create(model="m", messages=messages, max_tokens=50, tools=tools)
        trajectory = await ended(served, opened)
    assert held(trajectory) == [[digest(ONE)], [digest(TWO)]]
    assert trajectory.metrics["forks"] == 0


async def test_responses_with_an_input_image() -> None:
    async with serving(["red", "blue"], renderer=shared()[0], abilities=SEES) as served:
        opened = await served.open()
        client = openai.AsyncOpenAI(base_url=f"{opened['base']}/v1", api_key="any", max_retries=0)
        content: Any = [
            {"type": "input_text", "text": "What is it?"},
            {"type": "input_image", "image_url": data_uri(ONE), "detail": "auto"},
        ]
        first = await client.responses.create(model="m", input=[{"role": "user", "content": content}])
        assert first.output_text == "red"
        more: Any = [
            {"role": "user", "content": [{"type": "input_image", "image_url": data_uri(TWO), "detail": "auto"}]}
        ]
        await client.responses.create(model="m", input=more, previous_response_id=first.id)
        trajectory = await ended(served, opened)
    assert held(trajectory) == [[digest(ONE)], [digest(TWO)]]


async def test_a_gateway_that_was_killed_goes_on_with_the_images_of_its_sessions(tmp_path: Path) -> None:
    renderer = shared()[0]
    image = {"type": "image_url", "image_url": {"url": data_uri(ONE)}}
    messages: list[Any] = [{"role": "user", "content": [image]}]
    async with serving(["red", "blue"], out=tmp_path / "out", renderer=renderer, abilities=SEES) as served:
        opened = await served.open(id="s")
        url = f"{opened['path']}/v1/chat/completions"
        async with served.http.post(url, json={"model": "m", "messages": messages}) as answer:
            messages.append((await answer.json())["choices"][0]["message"])
        shutil.copytree(tmp_path / "out", tmp_path / "again")
    assert b"iVBOR" not in (tmp_path / "again" / "sessions.jsonl").read_bytes()
    async with serving(["red", "blue"], out=tmp_path / "again", renderer=renderer, abilities=SEES) as served:
        messages.append({"role": "user", "content": "Sure?"})
        async with served.http.post(url, json={"model": "m", "messages": messages}) as answer:
            assert answer.status == 200, await answer.text()
        trajectory = await ended(served, opened)
    assert held(trajectory) == [[digest(ONE)], []]
    assert trajectory.metrics["forks"] == 0
    [read] = read_trajectories(tmp_path / "again" / "trajectories.twz")
    assert messages_of(read.segments[0])[0]["content"] == [image]


@pytest.mark.parametrize(
    ("url", "abilities", "problem"),
    [
        (data_uri(ONE), Abilities(), "this model accepts text only"),
        ("https://a.test/b.png", SEES, "URLs are not fetched"),
        ("data:image/png;base64,AAAA", SEES, "no image of a known type"),
        (data_uri(ONE).replace("png", "webp"), SEES, "name that type"),
        (data_uri(ONE[:-6]), SEES, "is broken: save it again"),
    ],
)
async def test_unusable_image_is_answered_with_400(url: str, abilities: Abilities, problem: str) -> None:
    async with serving(["red"], renderer=shared()[0], abilities=abilities) as served:
        opened = await served.open()
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        async with served.http.post(f"{opened['path']}/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert problem in (await answer.json())["error"]["message"]
        await ended(served, opened)
