"""Damaged calls, in every format: read as they were meant, or an error; never another call, never an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.chat.model_dirs import FAMILIES, Family, model_dir, renderer_for, template_with_calls, write_model_dir
from support.chat.real_templates import CALL, TOOLS, Report, check_damage, check_messages
from turnwise.chat.formats.json_lists import Mistral
from turnwise.chat.renderer import load_renderer
from turnwise.types import Message, ToolCall, as_ids

TYPED = template_with_calls(
    "{{ '<｜DSML｜tool_calls>' }}{% for c in m.tool_calls %}"
    "{{ '\\n<｜DSML｜invoke name=\"' + c.function.name + '\">' }}"
    "{% for k, v in c.function.arguments|items %}{{ '\\n<｜DSML｜parameter name=\"' + k + '\" string=\"' "
    "+ ('true' if v is string else 'false') + '\">' + (v if v is string else v|tojson) + '</｜DSML｜parameter>' }}"
    "{% endfor %}{{ '\\n</｜DSML｜invoke>' }}{% endfor %}{{ '\\n</｜DSML｜tool_calls>' }}"
)
"""How DeepSeek V3.2 writes calls: an attribute tells texts from JSON."""
WITH_IDS = template_with_calls(
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' "
    "+ c.function.arguments|tojson }}{% endfor %}"
)
"""How Mistral Small 3.2 writes calls."""
SAYING = template_with_calls(
    "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments|tojson }}"
    "{% endfor %}"
).replace("'\\n' + m.content", "('\\n<|say|>' if m.role == 'assistant' and m.content else '\\n') + m.content")
"""A token stands before an answer, but not before calls."""


@pytest.mark.parametrize("family", list(FAMILIES))
def test_damaged_calls_are_errors_and_no_other_calls_or_answers(family: str) -> None:
    report = Report()
    for calls in ([CALL], [CALL, ToolCall("functions.now:1", "now", {})]):
        check_damage(renderer_for(family), calls, report)
    assert report.damaged["error"] > 5
    assert report.damaged["read"] > 5
    assert report.faults == []


def renderer_of(path: Path, template: str, *tokens: str) -> Report:
    special = (*FAMILIES["kimi"].special[:3], *tokens)
    renderer = load_renderer(write_model_dir(path, Family("", source=template, special=special)))
    report = Report(renderer.describe()["format"])
    check_messages(renderer, report)
    check_damage(renderer, [CALL], report)
    check_damage(renderer, [CALL, ToolCall("functions.now:1", "now", {})], report)
    return report


@pytest.mark.parametrize("tokens", [("｜DSML｜",), ()], ids=["added token", "plain text"])
def test_values_with_an_attribute_for_their_type_are_read_by_it(tokens: tuple[str, ...], tmp_path: Path) -> None:
    report = renderer_of(tmp_path, TYPED, *tokens)
    assert (report.chat_format, report.refused_messages, report.faults) == ("minimax", ["reasoning and a call"], [])
    text = (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="lookup">\n<｜DSML｜parameter name="key" string="true">12'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="count" string="false">oops</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls><|im_end|>"
    )
    renderer = load_renderer(tmp_path)
    (wrong,) = renderer.parse(as_ids(renderer._tokens.encode(text)), as_ids([]), TOOLS)["tool_calls"]
    assert wrong.error is not None
    assert wrong.error.startswith("the parameter 'count' is not valid JSON")
    right = renderer.parse(as_ids(renderer._tokens.encode(text.replace("oops", "3"))), as_ids([]), TOOLS)
    assert right["tool_calls"][0].arguments == {"key": "12", "count": 3}


def test_ids_behind_their_own_marker_are_kept(tmp_path: Path) -> None:
    tokens = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    report = renderer_of(tmp_path, WITH_IDS, *tokens)
    assert (report.chat_format, report.faults) == (Mistral.name, [])
    renderer = load_renderer(tmp_path)
    message: Message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("abcdefghi", "now", {})]}
    (call,) = renderer.parse(renderer.completion(message, TOOLS), as_ids([]), TOOLS)["tool_calls"]
    assert (call.id, call.name, call.error) == ("abcdefghi", "now", None)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen3", 'Look: {"name": "lookup", "arguments": {"key": "a"}}\n</tool_call><|im_end|>'),
        ("qwen3", '{"name": "lookup", "arguments": {"key": "a"}}<|im_end|>'),
        ("mistral", '[{"name": "lookup", "arguments": {"key": "a"}, "id": "abcdefghi"}]</s>'),
        ("glm4moe", "lookup\n<arg_key>key</arg_key>\n<arg_value>a</arg_value>\n</tool_call><|observation|>"),
        ("deepseekv3", "lookup\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"),
        ("llama3_1", 'I look.\n{"name": "lookup", "parameters": {"key": "a"}}<|eot_id|>'),
        ("llama3_1", '"name": "lookup", "parameters": {"key": "a"}}<|eot_id|>'),
        ("gptoss", ' to functions.lookup<|channel|>commentary json<|message|>{"key": "a"}<|call|>'),
    ],
)
def test_a_call_without_its_opening_is_an_error_beside_the_text(family: str, text: str) -> None:
    renderer = renderer_for(family)
    prompt = "" if family == "deepseekv3" else renderer._facts.prompt
    ids = as_ids(renderer._tokens.encode(text))
    (call, *_) = renderer.parse(ids, as_ids(renderer._tokens.encode(prompt)), TOOLS)["tool_calls"]
    assert call.error is not None


def test_an_answer_in_json_or_with_a_bare_closing_marker_stays_an_answer() -> None:
    renderer = renderer_for("qwen3")
    prompt = as_ids(renderer._tokens.encode(renderer._facts.prompt))
    for text in ('{"name": "Ana", "arguments": {"key": "a"}}', '{"name": "lookup"}', "Done.\n[1, 2]"):
        message = renderer.parse(as_ids(renderer._tokens.encode(text)), prompt, TOOLS)
        assert message == {"role": "assistant", "content": text}
    call = '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n</tool_call>'
    (now,) = renderer.parse(as_ids(renderer._tokens.encode(call)), prompt, TOOLS)["tool_calls"]
    assert now.error is None


def test_a_call_of_llama_3_by_its_marker_may_follow_text() -> None:
    renderer = renderer_for("llama3_1")
    text = 'I look.\n<|python_tag|>{"name": "lookup", "parameters": {"key": "a"}}<|eom_id|>'
    ids = renderer._tokens.encode(text)
    message = renderer.parse(as_ids(ids), as_ids(renderer._tokens.encode(renderer._facts.prompt)), TOOLS)
    (call,) = message["tool_calls"]
    assert (message["content"], call.name, call.arguments, call.error) == ("I look.", "lookup", {"key": "a"}, None)
    streamed = renderer.live(as_ids([])).feed(ids)
    assert "".join(piece.text for piece in streamed) == "I look."


def test_the_markup_before_an_answer_is_no_text(tmp_path: Path) -> None:
    special = (*FAMILIES["kimi"].special[:3], "<|say|>", "[TOOL_CALLS]", "[ARGS]")
    renderer = load_renderer(write_model_dir(tmp_path, Family("", source=SAYING, special=special)))
    assert renderer.describe()["markers"]["text_open"] == "<|say|>"
    ids = renderer.completion({"role": "assistant", "content": "It is 4."}, TOOLS)
    assert renderer.decode(ids) == "<|say|>It is 4.<|im_end|>"
    assert renderer.parse(ids, as_ids([]), TOOLS)["content"] == "It is 4."
    assert "".join(piece.text for piece in renderer.live(as_ids([])).feed(ids.tolist())) == "It is 4."


@pytest.mark.parametrize(
    ("calls", "why"),
    [("", "drops tool calls"), ("{% set _ = m.tool_calls.append(1) %}", "raises on tool calls (SecurityError: ")],
)
def test_a_template_without_calls_is_warned_of_with_model_and_remedy(calls: str, why: str, tmp_path: Path) -> None:
    path = write_model_dir(tmp_path, Family("plain", source=template_with_calls(calls)))
    warning = load_renderer(path).describe()["warning"]
    assert warning.startswith(f"model {str(path)!r}: its own chat template {why}")
    assert "set renderer.chat_template to one that writes calls (hermes, hermes-short, or a jinja file)" in warning
    assert load_renderer(path, format="plain").describe()["warning"] == ""
    assert load_renderer(path, chat_template="hermes").describe()["warning"] == ""
    assert load_renderer(model_dir("qwen3")).describe()["warning"] == ""
