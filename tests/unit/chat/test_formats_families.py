"""Formats of single families: what their templates write is read back, and damaged calls are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.chat.model_dirs import FAMILIES, Family, template_with_calls, write_model_dir
from support.chat.real_templates import CALL, TOOLS, Report, check_damage, check_messages
from turnwise.chat.renderer import TemplateRenderer, load_renderer, save_format
from turnwise.types import Message, ToolCall, ToolSchema, as_ids

_JSON = "'{\"name\": ' + c.function.name|tojson + ', \"arguments\": ' + c.function.arguments|tojson + '}'"
_COMMA = "('' if loop.last else ', ')"
_LITERAL = (
    "{%- macro literal(v) -%}{%- if v is string -%}{{ '<|\"|>' + v + '<|\"|>' }}"
    "{%- elif v is mapping -%}{{ '{' }}{%- for k, w in v|items -%}{{ k + ':' }}{{ literal(w) }}"
    "{{ '' if loop.last else ',' }}{%- endfor -%}{{ '}' }}"
    "{%- elif v is iterable -%}{{ '[' }}{%- for w in v -%}{{ literal(w) }}{{ '' if loop.last else ',' }}{%- endfor -%}"
    "{{ ']' }}{%- else -%}{{ v|tojson }}{%- endif -%}{%- endmacro -%}"
)
_NESTED = (
    "{%- macro nested(v) -%}{%- if v is mapping -%}{%- for k, w in v|items -%}{{ '<~><' + k + '>' }}{{ nested(w) }}"
    "{{ '<~></' + k + '>' }}{%- endfor -%}{%- elif v is iterable and v is not string -%}{%- for w in v -%}"
    "{{ '<~><item>' }}{{ nested(w) }}{{ '<~></item>' }}{%- endfor -%}{%- else -%}{{ v if v is string else v|tojson }}"
    "{%- endif -%}{%- endmacro -%}"
)
TEMPLATES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "a list in a section": (
        "json_section",
        f"{{{{ '<TOOLCALL>[' }}}}{{% for c in m.tool_calls %}}{{{{ {_JSON} + {_COMMA} }}}}{{% endfor %}}"
        "{{ ']</TOOLCALL>' }}",
        (),
    ),
    "a list of names with arguments": (
        "json_section",
        "{{ '<|calls|>[' }}{% for c in m.tool_calls %}{{ '{' + c.function.name|tojson + ': ' "
        f"+ c.function.arguments|tojson + '}}' + {_COMMA} }}}}{{% endfor %}}{{{{ ']<|done|>' }}}}",
        ("<|calls|>", "<|done|>"),
    ),
    "an object a line": (
        "json_section",
        f"{{{{ '<tool_calls>' }}}}{{% for c in m.tool_calls %}}{{{{ '\\n' + {_JSON} }}}}{{% endfor %}}"
        "{{ '\\n</tool_calls>' }}",
        ("<tool_calls>", "</tool_calls>"),
    ),
    "a list as the whole answer": (
        "json_section",
        f"{{{{ '[' }}}}{{% for c in m.tool_calls %}}{{{{ {_JSON} + {_COMMA} }}}}{{% endfor %}}{{{{ ']' }}}}",
        (),
    ),
    "literals with tokens as quotes": (
        "gemma",
        "{% for c in m.tool_calls %}{{ '<|tool_call>call:' + c.function.name + literal(c.function.arguments) "
        "+ '<tool_call|>' }}{% endfor %}",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    "nested elements": (
        "nested_tags",
        "{{ '<~><calls>\\n' }}{% for c in m.tool_calls %}{{ '<~><invoke name=\"' + c.function.name + '\">' "
        "+ nested(c.function.arguments) + '<~></invoke>\\n' }}{% endfor %}{{ '<~></calls>' }}",
        ("<~>",),
    ),
}
DEEP = ToolSchema(
    "deep", "", {"type": "object", "properties": {"where": {"type": "object"}, "note": {"type": "string"}}}
)
ARGUMENTS: list[dict[str, Any]] = [
    {"where": {"rows": [1, "x", {"far": True}], "near": {"a": 2.5}}, "note": "12"},
    {"note": 'Say "hi", {or} [not]: <b>ü</b>\n\\ done', "where": {"far": False}},
    {"note": "", "where": {"name": "a b"}},
]


def renderer_of(path: Path, name: str) -> TemplateRenderer:
    _, calls, tokens = TEMPLATES[name]
    source = _LITERAL + _NESTED + template_with_calls(calls)
    return load_renderer(
        write_model_dir(path, Family("", source=source, special=(*FAMILIES["kimi"].special[:3], *tokens)))
    )


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_format_is_detected_and_its_damaged_calls_are_errors(name: str, tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, name)
    report = Report()
    assert renderer.describe()["format"] == TEMPLATES[name][0]
    assert {"answer", "one call", "two calls", "a call without arguments"} <= set(renderer.describe()["proof"])
    check_messages(renderer, report)
    check_damage(renderer, [CALL], report)
    check_damage(renderer, [CALL, ToolCall("functions.now:1", "now", {})], report)
    assert report.faults == []
    assert report.damaged["error"] > 20
    save_format(renderer, tmp_path)
    assert load_renderer(tmp_path).describe()["markers"] == renderer.describe()["markers"]


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_arguments_are_read_back_and_cut_calls_are_none(name: str, tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, name)
    tail = as_ids(renderer._tokens.encode(renderer._facts.prompt))
    tools = [*TOOLS, DEEP]
    for arguments in ARGUMENTS:
        message: Message = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "deep", arguments)]}
        ids = renderer.completion(message, tools)
        (call,) = renderer.parse(ids, tail, tools)["tool_calls"]
        assert (call.name, call.arguments, call.error) == ("deep", arguments, None)
        for length in range(len(ids)):
            for parsed in renderer.parse(ids[:length], tail, tools).get("tool_calls", ()):
                assert (parsed.arguments, parsed.error) == (arguments, None), "a call that was cut off is no call"
        live = renderer.live(tail)
        assert [piece for number in ids.tolist() for piece in live.feed([number])] == []


def test_a_list_of_other_objects_is_an_answer(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, "a list as the whole answer")
    for text in ('[{"name": "Ana"}]', "[1, 2]", "[see below]"):
        message = renderer.parse(as_ids(renderer._tokens.encode(text + "<|im_end|>")), as_ids([]), TOOLS)
        assert message == {"role": "assistant", "content": text}


def test_values_that_are_all_quoted_take_the_type_of_the_schema(tmp_path: Path) -> None:
    renderer = renderer_of(tmp_path, "literals with tokens as quotes")
    text = '<|tool_call>call:lookup{key:<|"|>7<|"|>,count:<|"|>7<|"|>}<tool_call|><|im_end|>'
    (call,) = renderer.parse(as_ids(renderer._tokens.encode(text)), as_ids([]), TOOLS)["tool_calls"]
    assert call.arguments == {"key": "7", "count": 7}
