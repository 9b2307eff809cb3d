"""``format: auto``: decided by what a template writes, proven by reading it back, or not decided at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.chat.model_dirs import FAMILIES, Family, model_dir, renderer_for, template_of, write_model_dir
from turnwise.chat.formats import FORMATS
from turnwise.chat.renderer import load_renderer, save_format
from turnwise.errors import RenderError
from turnwise.model.canonical import canonical_messages
from turnwise.types import Message, ToolCall, ToolSchema, as_ids

TOOLS = [
    ToolSchema("lookup", "", {"type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}})
]
CALL = ToolCall("functions.lookup:0", "lookup", {"key": "a b", "n": 7})


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_is_told_from_its_render(family: str) -> None:
    description = renderer_for(family).describe()
    assert description["format"] == FAMILIES[family].format
    assert description["source"] == "auto"
    proven = {"answer", "one call", *(["two calls"] if "two calls" in FAMILIES[family].says else [])}
    assert proven <= set(description["proof"])
    assert not set(description["proof"]) & set(description["unproven"])
    json.dumps(description)


RENAMES = {
    "qwen3": {"tool_call>": "call_x>", "think>": "muse>", "tool_response>": "reply>"},
    "qwen3_6": {
        "tool_call>": "call_x>",
        "think>": "muse>",
        "function=": "fn:",
        "/function>": "/fn>",
        "parameter": "arg",
    },
    "glm4moe": {"tool_call>": "call_x>", "think>": "muse>", "arg_key>": "k>", "arg_value>": "v>"},
    "gptoss": {
        "<|channel|>": "<|lane|>",
        "<|message|>": "<|body|>",
        "<|end|>": "<|over|>",
        "<|start|>": "<|next|>",
        "<|call|>": "<|ask|>",
        "<|return|>": "<|done|>",
        "analysis": "musing",
    },
    "lfm2": {"tool_call_start": "ask", "tool_call_end": "asked"},
    "deepseekv3": {"tool▁call": "frage", "tool▁sep": "strich"},
    "kimi": {"<|tool_call": "<|ask"},
    "minimax": {"minimax:tool_call": "asks", "invoke": "do", "parameter": "with"},
    "mistral": {"TOOL_CALLS": "ASK"},
    "own": {"[|do|]": "[|please|]", "[|/do|]": "[|thanks|]", '"tool"': '"who"', '"with"': '"what"'},
    "qwen2_5": {"tool_call>": "call_x>", '\\"arguments\\"': '\\"args\\"', '"arguments"': '"args"'},
    "llama3_1": {'"parameters"': '"params"', "<|python_tag|>": "<|tag|>"},
}


UNDECIDABLE_AS_TEXT = {"kimi"}
"""Families whose formats need ids to tell markers from text."""


def renamed(text: str, pairs: dict[str, str]) -> str:
    for old, new in pairs.items():
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("as_tokens", [True, False], ids=["added tokens", "plain text"])
@pytest.mark.parametrize("family", list(RENAMES))
def test_renamed_markers_are_read_or_refused(family: str, as_tokens: bool, tmp_path: Path) -> None:
    markers, pairs = FAMILIES[family], RENAMES[family]
    template = renamed(template_of(markers), pairs)
    special = tuple(renamed(token, pairs) for token in markers.special)
    plain = tuple(renamed(token, pairs) for token in markers.plain) if as_tokens else ()
    turn = tuple(t for t in special if "im_" in t or "turn" in t or "over" in t or t in ("</s>", "<s>"))
    ends = renamed(markers.eos, pairs)
    special = special if as_tokens or family in ("gptoss", "deepseekv3", "glm4moe", "llama3_1") else (*turn, ends)
    special = tuple(dict.fromkeys(special))
    family_renamed = Family(markers.format, source=template, special=special, plain=plain, bos=markers.bos, eos=ends)
    path = write_model_dir(tmp_path, family_renamed)
    if not as_tokens and family in UNDECIDABLE_AS_TEXT:
        with pytest.raises(RenderError, match=r"cannot detect.*Set `format:`"):
            load_renderer(path)
        return
    renderer = load_renderer(path)
    assert renderer.describe()["format"] == markers.format
    if family == "deepseekv3":
        return
    message: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    if "reasoning" in markers.says:
        message["reasoning_content"] = "Let me look."
    prompt = renderer.render(canonical_messages([{"role": "user", "content": "x"}]), TOOLS)
    back = renderer.parse(renderer.completion(message, TOOLS), prompt, TOOLS)
    assert [(call.name, call.arguments, call.error) for call in back["tool_calls"]] == [
        (CALL.name, CALL.arguments, None)
    ]
    assert back.get("reasoning_content") == message.get("reasoning_content")


def test_a_way_of_writing_calls_that_no_format_reads_is_refused(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name + ' <- ' + c.function.arguments.values()|join('/') }}"
        "{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    path = write_model_dir(tmp_path, Family("x"), template=template)
    with pytest.raises(RenderError, match=r"cannot detect.*qzfirst <- qzvalue/73019.*Set `format:` to one of hermes"):
        load_renderer(path)
    renderer = load_renderer(path, format="hermes")
    assert renderer.describe()["source"] == "config"
    assert "one call" in renderer.describe()["unproven"]
    ids = renderer._tokens.encode('<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>')
    message = renderer.parse(as_ids(ids), as_ids([]), ())
    assert message["tool_calls"] == [ToolCall("", "f", {}, "{}")]
    with pytest.raises(RenderError, match="cannot render a call of 'lookup'"):
        renderer.completion({"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOLS)


def test_ambiguous_format_detection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Twin(FORMATS["hermes"]):  # type: ignore[misc]
        name = "twin"

    monkeypatch.setitem(FORMATS, "twin", Twin)
    with pytest.raises(RenderError, match=r"cannot detect.*hermes, twin all parse"):
        load_renderer(model_dir("own"))


def test_a_template_whose_turns_do_not_follow_its_generation_prompt_is_told_so(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + loop.index|string + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    path = write_model_dir(tmp_path, Family("plain"), template=template)
    with pytest.raises(RenderError, match="calls are not written, and an answer does not follow the generation prompt"):
        load_renderer(path)


def test_a_template_that_writes_no_calls_is_plain(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    renderer = load_renderer(write_model_dir(tmp_path, Family("plain"), template=template))
    assert renderer.describe()["format"] == "plain"
    assert "one call" in renderer.describe()["unproven"]
    with pytest.raises(RenderError, match="tool_calls differs"):
        renderer.completion({"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOLS)


def test_unknown_format_error_lists_formats() -> None:
    with pytest.raises(RenderError, match=r"'herms' is unknown; did you mean 'hermes'\?; allowed: auto, hermes"):
        load_renderer(model_dir("own"), format="herms")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_configured_format_reads_the_template_s_own_markers(family: str) -> None:
    renderer = load_renderer(model_dir(family), format=FAMILIES[family].format)
    assert renderer.describe()["source"] == "config"
    assert renderer.describe()["markers"] == renderer_for(family).describe()["markers"]
    assert renderer.stop_ids == renderer_for(family).stop_ids


def test_checkpoint_keeps_its_training_format(tmp_path: Path) -> None:
    path = write_model_dir(tmp_path, FAMILIES["own"])
    trained = load_renderer(path, format="llama3_json")
    saved = save_format(trained, path)
    assert saved.name == "turnwise_format.json"
    reloaded = load_renderer(path)
    assert reloaded.describe()["format"] == "llama3_json"
    assert reloaded.describe()["source"] == str(saved)
    assert reloaded.describe()["markers"] == trained.describe()["markers"]
    assert load_renderer(path, format="hermes").describe()["format"] == "hermes"
    saved.write_text('{"format": "herms", "markers": {}}')
    with pytest.raises(RenderError, match=r"turnwise_format\.json: format 'herms'"):
        load_renderer(path)
    saved.write_text('{"format": "hermes", "markers": {"open": "x"}}')
    with pytest.raises(RenderError, match="arguments, close, name"):
        load_renderer(path)
    saved.write_text("[]")
    with pytest.raises(RenderError, match="holds no JSON object"):
        load_renderer(path)


def test_the_registry_names_each_format_once() -> None:
    assert list(FORMATS) == [format_class.name for format_class in FORMATS.values()]
    assert {"hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "glm", "gpt_oss"} <= set(FORMATS)


def test_equal_reasoning_markers_are_no_pair(tmp_path: Path) -> None:
    template = template_of(FAMILIES["own"]).replace("[|/muse|]", "[|muse|]")
    path = write_model_dir(tmp_path, FAMILIES["own"], template=template)
    description = load_renderer(path).describe()
    assert "reasoning_open" not in description["markers"]
    assert "reasoning and an answer" in description["unproven"]
