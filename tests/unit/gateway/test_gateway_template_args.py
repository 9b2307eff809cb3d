"""What requests of the three APIs ask of the chat template reaches it where it can, as a part of the conversation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.chat.model_dirs import FAMILIES, Family, model_dir, template_of, write_model_dir
from support.gateway.server import Served, serving
from turnwise.chat.renderer import load_renderer
from turnwise.gateway.dialects.response_format import abilities_of

CHAT, RESPONSES, MESSAGES = "v1/chat/completions", "v1/responses", "v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [{"role": "user", "content": "Go."}]},
    RESPONSES: {"model": "m", "input": "Go."},
    MESSAGES: {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Go."}]},
}
NO_THOUGHT = "assistant\n<think>\n\n</think>\n\n"


async def ask(served: Served, opened: dict[str, Any], route: str, more: dict[str, Any]) -> tuple[int, Any]:
    async with served.http.post(f"{opened['path']}/{route}", json={**BODIES[route], **more}) as answer:
        return answer.status, await (answer.read() if more.get("stream") else answer.json())


def prompts(served: Served, opened: dict[str, Any]) -> list[str]:
    """The roots of a session, as text."""
    return [
        served.renderer.decode(segment.token_ids) for segment in served.session(opened).segments() if segment.parent < 0
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "wish"),
    [
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (RESPONSES, {"chat_template_kwargs": {"enable_thinking": False}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 99}, "output_config": {"effort": "none"}}),
        (MESSAGES, {"chat_template_kwargs": {"enable_thinking": False}}),
    ],
)
async def test_reasoning_is_switched_off_where_the_template_can(route: str, wish: dict[str, Any], stream: bool) -> None:
    async with serving(lambda _: "Yes.") as served:
        opened = await served.open()
        status, body = await ask(served, opened, route, {**wish, "stream": stream})
        assert status == 200, body
        # It is read behind the prompt that it has, while it is sampled too.
        text = b"".join(re.findall(rb'"(?:text|content|delta)":"([^"]*)"', body if stream else orjson.dumps(body)))
        assert b"Yes." in text
        assert b"thinking_delta" not in text
        (prompt,) = prompts(served, opened)
        assert prompt.endswith(NO_THOUGHT)
        (root, _) = served.session(opened).segments()
        assert root.template_args == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("route", "wish"),
    [
        (CHAT, {"reasoning_effort": "high"}),
        (CHAT, {"reasoning_effort": None, "chat_template_kwargs": None}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": None}}),
        (RESPONSES, {"reasoning": {"effort": "low", "summary": "auto"}}),
        (RESPONSES, {"reasoning": {"effort": None}}),
        (MESSAGES, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}),
        (MESSAGES, {"output_config": {"effort": "high"}}),
    ],
)
async def test_option_that_the_template_does_not_read_is_ignored(route: str, wish: dict[str, Any]) -> None:
    async with serving(lambda _: "Yes.") as served:
        opened = await served.open()
        for more in ({}, wish):
            assert (await ask(served, opened, route, more))[0] == 200
        segments = served.session(opened).segments()
        assert [segment.fork for segment in segments] == [None, None, "resample"]
        assert segments[0].template_args is None


@pytest.mark.parametrize(
    ("route", "wish", "line"),
    [
        (CHAT, {"reasoning_effort": "high"}, "high"),
        (CHAT, {"reasoning_effort": "minimal"}, "medium"),
        (CHAT, {"reasoning_effort": "none"}, "medium"),
        (CHAT, {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"}, "low"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "low"),
        (RESPONSES, {"reasoning": {"effort": "xhigh"}}, "medium"),
        (MESSAGES, {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}, "high"),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "medium"),
    ],
)
async def test_effort_reaches_a_template_that_reads_it(route: str, wish: dict[str, Any], line: str) -> None:
    async with serving(lambda _: "Yes.", family="gptoss") as served:
        opened = await served.open()
        assert (await ask(served, opened, route, wish))[0] == 200
        (prompt,) = prompts(served, opened)
        assert f"Reasoning: {line}" in prompt


@pytest.mark.parametrize(
    ("kwargs", "field", "problem"),
    [
        ({"enable_thinkin": False}, "chat_template_kwargs.enable_thinkin", "enable_thinking"),
        ({"enable_thinking": "no"}, "chat_template_kwargs.enable_thinking", "'no'"),
        ({"enable_thinking": 0}, "chat_template_kwargs.enable_thinking", "0"),
        ({"messages": []}, "chat_template_kwargs.messages", "enable_thinking"),
        ({"bos_token": "<|im_end|>"}, "chat_template_kwargs.bos_token", "enable_thinking"),
        (["enable_thinking"], "chat_template_kwargs", "object"),
        ("enable_thinking", "chat_template_kwargs", "object"),
    ],
)
@pytest.mark.parametrize("route", list(BODIES))
async def test_unknown_template_argument_is_a_400(route: str, kwargs: Any, field: str, problem: str) -> None:
    async with serving(lambda _: "Yes.") as served:
        opened = await served.open()
        status, body = await ask(served, opened, route, {"chat_template_kwargs": kwargs})
        assert status == 400
        assert field in body["error"]["message"]
        assert problem in body["error"]["message"]
        assert body["error"].get("param", field) == field
        assert served.session(opened).segments() == []


@pytest.mark.parametrize(
    ("route", "wish"),
    [
        (CHAT, {"reasoning_effort": 3}),
        (RESPONSES, {"reasoning": {"effort": 3}}),
        (RESPONSES, {"reasoning": "high"}),
        (MESSAGES, {"output_config": {"effort": 3}}),
        (MESSAGES, {"thinking": "off"}),
    ],
)
async def test_template_option_of_a_wrong_type_is_a_400(route: str, wish: dict[str, Any]) -> None:
    async with serving(lambda _: "Yes.") as served:
        opened = await served.open()
        status, body = await ask(served, opened, route, wish)
        assert status == 400
        assert next(iter(wish)) in body["error"]["message"]


async def test_equal_options_of_three_apis_share_a_conversation() -> None:
    async with serving(lambda _: "Yes.") as served:
        opened = await served.open()
        for route, wish in (
            (CHAT, {"reasoning_effort": "none"}),
            (RESPONSES, {"reasoning": {"effort": "none"}}),
            (MESSAGES, {"thinking": {"type": "disabled"}}),
        ):
            assert (await ask(served, opened, route, wish))[0] == 200
        assert [segment.fork for segment in served.session(opened).segments()] == [None, None, "resample", "resample"]


async def test_tokens_are_counted_with_the_arguments() -> None:
    async with serving(lambda _: "Yes.") as served:
        opened = await served.open()
        for wish in ({}, {"thinking": {"type": "disabled"}}):
            _, counted = await ask(served, opened, MESSAGES, wish)
            route = f"{opened['path']}/{MESSAGES}/count_tokens"
            async with served.http.post(route, json={**BODIES[MESSAGES], **wish}) as answer:
                assert (await answer.json())["input_tokens"] == counted["usage"]["input_tokens"]
        _, other = await ask(served, opened, MESSAGES, {})
        assert other["usage"]["input_tokens"] < counted["usage"]["input_tokens"]


async def test_a_gateway_may_fix_the_arguments() -> None:
    fixed = load_renderer(model_dir("qwen3"), template_kwargs={"enable_thinking": False}, fixed_arguments=True)
    async with serving(lambda _: "Yes.", renderer=fixed) as served:
        opened = await served.open()
        status, body = await ask(served, opened, CHAT, {"chat_template_kwargs": {"enable_thinking": True}})
        assert (status, "no arguments" in body["error"]["message"]) == (400, True)
        assert (await ask(served, opened, MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 9}}))[0] == 200
        (prompt,) = prompts(served, opened)
        assert prompt.endswith(NO_THOUGHT)


async def test_effort_none_reaches_a_template_that_names_it(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
        "{% if reasoning_effort == 'none' %}[no effort]{% endif %}"
        "{% if enable_thinking is false %}[not thinking]{% endif %}{% endif %}"
    )
    renderer = load_renderer(write_model_dir(tmp_path, Family("plain"), template=template))
    async with serving(lambda _: "Yes.", renderer=renderer) as served:
        opened = await served.open()
        assert (await ask(served, opened, CHAT, {"reasoning_effort": "none"}))[0] == 200
        assert (await ask(served, opened, MESSAGES, {"thinking": {"type": "disabled"}}))[0] == 200
        assert [prompt.rpartition("\n")[2] for prompt in prompts(served, opened)] == ["[no effort]", "[not thinking]"]


async def test_a_stream_is_read_behind_the_prompt_that_its_arguments_make(tmp_path: Path) -> None:
    """Under an argument, this template begins the reasoning itself, with more words than its prompt has otherwise."""
    opens = "<think>\\nLet us see, step by step, what it is that is asked of us here and why it is asked."
    silent = "{%- if enable_thinking is defined and enable_thinking is false %}"
    source = template_of(FAMILIES["qwen3"])
    assert silent in source
    source = source.replace(
        silent, "{%- if enable_thinking is defined and enable_thinking %}{{- '" + opens + "' }}{%- endif %}" + silent
    )
    renderer = load_renderer(write_model_dir(tmp_path, FAMILIES["qwen3"], template=source))
    token_ids = [*renderer._tokens.encode("So it is.\n</think>\n\nYes."), renderer._tokens.added["<|im_end|>"]]
    async with serving(lambda _: token_ids, renderer=renderer) as served:
        opened = await served.open()
        wish = {"chat_template_kwargs": {"enable_thinking": True}}
        _, body = await ask(served, opened, CHAT, wish)
        assert body["choices"][0]["message"]["reasoning_content"].strip() == "So it is."
        assert body["choices"][0]["message"]["content"] == "Yes."
        _, stream = await ask(served, opened, CHAT, {**wish, "stream": True})
        deltas = [json.loads(line[6:])["choices"] for line in stream.split(b"\n") if line.startswith(b"data: {")]
        texts = {
            key: [text for choices in deltas for choice in choices if (text := choice["delta"].get(key))]
            for key in ("content", "reasoning_content")
        }
        # As it is sampled, not when all of it is there: it is known to be reasoning from the beginning.
        assert len(texts["reasoning_content"]) > 3
        assert {key: "".join(text).strip() for key, text in texts.items()} == {
            "content": "Yes.",
            "reasoning_content": "So it is.",
        }


@pytest.mark.parametrize(
    ("route", "tool"),
    [
        (CHAT, {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}),
        (RESPONSES, {"type": "function", "name": "look", "parameters": {"type": "object"}}),
        (MESSAGES, {"name": "look", "input_schema": {"type": "object"}}),
    ],
)
async def test_tools_are_refused_where_the_template_drops_calls(
    route: str, tool: dict[str, Any], tmp_path: Path
) -> None:
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    )
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    renderer = load_renderer(write_model_dir(tmp_path, FAMILIES["qwen3"], template=template))
    abilities = abilities_of(renderer, guides=False)
    async with serving(lambda _: "Yes.", renderer=renderer, abilities=abilities) as served:
        opened = await served.open()
        status, body = await ask(served, opened, route, {"tools": [tool]})
        assert status == 400, body
        assert "tools: no call of them can be read: " in json.dumps(body)
        assert (await ask(served, opened, route, {}))[0] == 200
