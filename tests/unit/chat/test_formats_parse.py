"""The rules of calls and reasoning, format by format, on ids as a model samples them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from support.chat.model_dirs import FAMILIES, model_dir, renderer_for
from turnwise.chat.formats import find_format
from turnwise.chat.formats.core import INSIDE_REASONING, Probe, TurnText
from turnwise.chat.formats.json_lists import Mistral
from turnwise.chat.formats.tagged import Glm, MiniMax, Qwen3Coder, Tagged, TaggedFormat, coerce
from turnwise.chat.renderer import load_renderer
from turnwise.chat.tokens import Marks
from turnwise.model.canonical import canonical_messages
from turnwise.types import Message, ToolCall, ToolSchema, as_ids

TOOLS = [
    ToolSchema(
        "lookup",
        "",
        {
            "type": "object",
            "properties": {
                "key": {"type": "string"},
                "n": {"type": "integer"},
                "maybe": {"type": ["string", "null"]},
                "flag": {"type": "boolean"},
                "rows": {"type": "array"},
            },
        },
    )
]


def parse(family: str, text: str, *, prompt: str | None = None) -> Message:
    """Parse the ids of a text whose markup is real added tokens, behind the family's generation prompt."""
    renderer = renderer_for(family)
    tail = renderer._facts.prompt if prompt is None else prompt
    encode = renderer._tokens.encode
    return renderer.parse(as_ids(encode(text)), as_ids(encode(tail)), TOOLS)


def spelled(family: str, text: str) -> list[int]:
    """The ids of a text without any added token: markup that a model spelled out of ordinary ones."""
    tokens = renderer_for(family)._tokens
    return tokens.encode(tokens.escape(text))


def only(message: Message) -> ToolCall:
    (call,) = message["tool_calls"]
    return call


def test_hermes_reads_reasoning_content_and_calls() -> None:
    message = parse(
        "qwen3",
        "<think>\nHm.\n</think>\n\nLet me see.\n<tool_call>\n"
        '{"name": "lookup", "arguments": {"key": "a", "n": 1}}\n</tool_call>\n<tool_call>\n'
        '{"name": "now", "arguments": {}}\n</tool_call><|im_end|>',
    )
    assert message == {
        "role": "assistant",
        "content": "Let me see.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            ToolCall("", "lookup", {"key": "a", "n": 1}, '{"key": "a", "n": 1}'),
            ToolCall("", "now", {}, "{}"),
        ],
    }


@pytest.mark.parametrize(
    ("inner", "name", "error"),
    [
        ('{"name": "lookup", "arguments": {"key": }}', "lookup", "not valid JSON"),
        ('{"name": "lookup", "arguments": {"n": NaN}}', "lookup", "NaN is not JSON"),
        ('{"arguments": {"key": "a"}}', "", 'has no "name"'),
        ('{"name": 7, "arguments": {}}', "", 'has no "name"'),
        ('{"name": "", "arguments": {}}', "", 'has no "name"'),
        ('{"name": "lookup", "parameters": {}}', "lookup", 'has no "arguments"'),
        ('{"name": "lookup", "arguments": [1]}', "lookup", "array, not an object"),
        ('{"name": "lookup", "arguments": "oops"}', "lookup", "Expecting value"),
        ('{"name": "lookup", "arguments": {}} and more', "lookup", "more text after"),
        ('["lookup"]', "", "array, not an object"),
        ("", "", "not valid JSON"),
        ('{"name": "lookup", "arguments": {"key": "\\ud800"}}', "lookup", "surrogate"),
        ('{"name": "lookup", "arguments": ' + '{"a":' * 20_000, "lookup", "nested too deeply"),
    ],
)
def test_hermes_calls_that_cannot_be_used_say_why(inner: str, name: str, error: str) -> None:
    call = only(parse("qwen3", f"<tool_call>{inner}</tool_call><|im_end|>"))
    assert call.name == name
    assert call.arguments == {}
    assert call.error is not None
    assert error in call.error


def test_hermes_accepts_quoted_null_and_missing_arguments() -> None:
    for inner, arguments in (
        ('{"name": "f", "arguments": "{\\"key\\": 1}"}', {"key": 1}),
        ('{"name": "f", "arguments": null}', {}),
        ('{"name": "f"}', {}),
        ('{"arguments": {"key": 1}, "name": "f"}', {"key": 1}),
    ):
        call = only(parse("qwen3", f"<tool_call>{inner}</tool_call><|im_end|>"))
        assert (call.name, call.arguments, call.error) == ("f", arguments, None)


CALLS = {
    "qwen3": '<tool_call>\n{"name": "lookup", "arguments": {"key": "KEY"}}\n</tool_call>',
    "qwen3_6": "<tool_call>\n<function=lookup>\n<parameter=key>\nKEY\n</parameter>\n</function>\n</tool_call>",
    "glm4moe": "<tool_call>lookup\n<arg_key>key</arg_key>\n<arg_value>KEY</arg_value>\n</tool_call>",
    "own": '[|do|]{"tool": "lookup", "with": {"key": "KEY"}}[|/do|]',
    "lfm2": "<|tool_call_start|>[lookup(key='KEY')]<|tool_call_end|>",
    "minimax": '<minimax:tool_call>\n<invoke name="lookup">\n<parameter name="key">KEY</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup:0"
    '<|tool_call_argument_begin|>{"key": "KEY"}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>lookup"
    '\n```json\n{"key": "KEY"}\n```'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral": '[TOOL_CALLS] [{"name": "lookup", "arguments": {"key": "KEY"}, "id": "abcdefghi"}]',
    "llama3_1": '{"name": "lookup", "parameters": {"key": "KEY"}}',
    "bare_pythonic": '[lookup(key="KEY")]',
    "gptoss": '<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"key": "KEY"}<|call|>',
}
PROMPT = {"deepseekv3": "<｜Assistant｜>", "qwen3_6": "<|im_start|>assistant\n<think>\n</think>"}


def stop_of(family: str) -> str:
    return "" if family == "gptoss" else FAMILIES[family].eos


@pytest.mark.parametrize("family", list(CALLS))
def test_a_closed_call_stands_whether_stopped_or_cut(family: str) -> None:
    prompt = PROMPT.get(family)
    closed_call = CALLS[family].replace("KEY", "a")
    for text in (closed_call + stop_of(family), closed_call):
        call = only(parse(family, text, prompt=prompt))
        assert (call.name, call.arguments, call.error) == ("lookup", {"key": "a"}, None)
        assert parse(family, text, prompt=prompt)["content"] == ""


@pytest.mark.parametrize("family", list(CALLS))
def test_an_unfinished_call_is_none_at_a_cut_and_an_error_at_a_stop(family: str) -> None:
    if family == "gptoss":
        return  # its stop ids close calls
    prompt = PROMPT.get(family)
    text = CALLS[family].replace("KEY", "a")
    half = text[: text.index("a", text.index("key") + 5) + 1]
    cut = parse(family, half, prompt=prompt)
    assert not cut.get("tool_calls")
    assert cut["content"] == ""
    stopped = only(parse(family, half + stop_of(family), prompt=prompt))
    assert stopped.error
    assert stopped.raw


THINKING = [name for name in CALLS if "reasoning" in FAMILIES[name].says and name != "gptoss"]


@pytest.mark.parametrize("family", THINKING)
def test_a_call_inside_reasoning_is_an_error_and_stays_in_the_reasoning(family: str) -> None:
    markers = renderer_for(family).describe()["markers"]
    opened, closed = markers["reasoning_open"], markers["reasoning_close"]
    call = CALLS[family].replace("KEY", "a")
    start = "" if family == "qwen3_6" else opened
    for text in (f"{start}Maybe {call} so", f"{start}Maybe {call} so{FAMILIES[family].eos}"):
        message = parse(family, text)
        assert only(message).error == INSIDE_REASONING
        assert only(message).name == "lookup"
        assert call in str(message["reasoning_content"])
        assert message["content"] == ""
    message = parse(family, f"{start}Maybe {call}{closed}Then {call}")
    assert [c.error for c in message["tool_calls"]] == [INSIDE_REASONING, None]
    mention = parse(family, f"{start}I would write {call[:12]}{closed}Then {call}")
    assert [c.error for c in mention["tool_calls"]] == [None]


@pytest.mark.parametrize("family", THINKING)
def test_a_closing_marker_that_is_spelled_out_closes_nothing(family: str) -> None:
    renderer = renderer_for(family)
    markers = renderer.describe()["markers"]
    start = "" if family == "qwen3_6" else markers["reasoning_open"]
    encode = renderer._tokens.encode
    ids = [
        *encode(start + "Hm"),
        *spelled(family, markers["reasoning_close"]),
        *encode(CALLS[family].replace("KEY", "a")),
    ]
    message = renderer.parse(as_ids(ids), as_ids(encode(renderer._facts.prompt)), TOOLS)
    assert only(message).error == INSIDE_REASONING


@pytest.mark.parametrize("family", ["qwen3", "qwen3_6", "glm4moe", "own", "lfm2", "kimi", "deepseekv3", "mistral"])
def test_a_marker_that_is_spelled_out_is_content(family: str) -> None:
    renderer = renderer_for(family)
    call = CALLS[family].replace("KEY", "a")
    tail = renderer._tokens.encode(PROMPT.get(family, renderer._facts.prompt))
    message = renderer.parse(as_ids(spelled(family, call)), as_ids(tail), TOOLS)
    assert not message.get("tool_calls")
    assert message["content"] == call


@pytest.mark.parametrize("family", ["qwen3", "qwen3_6", "glm4moe", "own"])
def test_markup_inside_a_string_that_is_spelled_out_stays_in_the_string(family: str) -> None:
    renderer = renderer_for(family)
    markers = renderer.describe()["markers"]
    head, tail = CALLS[family].split("KEY")
    encode = renderer._tokens.encode
    odd = f"x {markers['close']} y {markers['open']} {markers['reasoning_open']}"
    ids = [*encode(head), *spelled(family, odd), *encode(tail)]
    message = renderer.parse(as_ids(ids), as_ids(encode(PROMPT.get(family, renderer._facts.prompt))), TOOLS)
    assert only(message).arguments == {"key": odd}


def test_text_behind_a_stop_id_is_not_content() -> None:
    assert parse("qwen3", "Yes.<|im_end|>\n<|im_start|>user\nMore")["content"] == "Yes."
    assert parse("glm4moe", "\n<think></think>\nYes.<|user|>\nhi")["content"] == "Yes."


def test_reasoning_that_nobody_opened_is_still_reasoning() -> None:
    message = parse("qwen3", "Hm.\n</think>\n\nYes.<|im_end|>")
    assert (message.get("reasoning_content"), message["content"]) == ("Hm.", "Yes.")


def test_reasoning_that_the_prompt_opened() -> None:
    message = parse("qwen3_6", "Hm.\n</think>\n\nYes.<|im_end|>")
    assert (message.get("reasoning_content"), message["content"]) == ("Hm.", "Yes.")
    cut = parse("qwen3_6", "Hm.")
    assert (cut.get("reasoning_content"), cut["content"]) == ("Hm.", "")


def test_a_marker_in_the_text_of_the_prompt_opens_no_reasoning() -> None:
    renderer = load_renderer(model_dir("qwen3"), special_in_text="template")
    tail = renderer.render(canonical_messages([{"role": "user", "content": "Write <think> first. " * 3}]), ())
    message = renderer.parse(as_ids(renderer._tokens.encode("Yes." + CALLS["qwen3"])), tail, TOOLS)
    assert message["content"] == "Yes."
    assert only(message).error is None


def test_interrupted_call_is_an_error() -> None:
    call = CALLS["qwen3"].replace("KEY", "a")
    calls = parse("qwen3", call.removesuffix("</tool_call>") + call + "<|im_end|>")["tool_calls"]
    assert calls[0].error is not None
    assert "not closed" in calls[0].error
    assert calls[1].error is None


@pytest.mark.parametrize("text", ['{"answer": 3}', "[1, 2]", '{"name": "Bob", "age": 3}', '"lookup"', "3"])
@pytest.mark.parametrize("family", ["llama3_1", "bare_pythonic", "qwen3", "mistral"])
def test_an_answer_that_merely_is_json_is_content(family: str, text: str) -> None:
    message = parse(family, text + FAMILIES[family].eos)
    assert message["content"] == text
    assert not message.get("tool_calls")


def test_llama_reads_several_calls_and_the_python_tag() -> None:
    one, two = '{"name": "lookup", "parameters": {"key": "a"}}', '{"name": "now", "parameters": {}}'
    for text in (
        f"{one}; {two}",
        f"<|python_tag|>{one}; {two}",
        f"{one}\n{two}",
        f"<|python_tag|>{one}<|python_tag|>{two}",
    ):
        for stop in ("<|eot_id|>", "<|eom_id|>", ""):
            message = parse("llama3_1", text + stop)
            assert [(c.name, c.arguments, c.error) for c in message["tool_calls"]] == [
                ("lookup", {"key": "a"}, None),
                ("now", {}, None),
            ]
            assert message["content"] == ""
    broken = only(parse("llama3_1", '{"name": "lookup", "parameters": {"key": }}<|eot_id|>'))
    assert (broken.name, broken.error is not None) == ("lookup", True)
    nameless = only(parse("llama3_1", '<|python_tag|>{"parameters": {}}<|eot_id|>'))
    assert nameless.error == 'the call has no "name"'
    words = parse("llama3_1", f"It is {one}<|eot_id|>")
    assert not words.get("tool_calls")


def test_pythonic_reads_the_calls_before_a_mistake() -> None:
    text = "<|tool_call_start|>[lookup(key='a\\'b', n=-3, flag=True, rows=[1, None, {'x': 1.5}]), now(), lookup(1)]"
    calls = parse("lfm2", text + "<|tool_call_end|><|im_end|>")["tool_calls"]
    assert calls[0].arguments == {"key": "a'b", "n": -3, "flag": True, "rows": [1, None, {"x": 1.5}]}
    assert (calls[1].name, calls[1].arguments, calls[1].error) == ("now", {}, None)
    assert calls[2].error == "the call cannot be parsed: arguments are written as name=value"
    assert calls[2].name == "lookup"
    cut = parse("lfm2", "<|tool_call_start|>[lookup(key='a'), now(")["tool_calls"]
    assert [call.name for call in cut] == ["lookup"]
    bare = parse("bare_pythonic", '[lookup(key="a"), now(<|im_end|>')["tool_calls"]
    assert [call.error is None for call in bare] == [True, False]


def test_mistral_keeps_closed_calls_and_the_model_s_ids() -> None:
    one = '{"name": "lookup", "arguments": {"key": "a"}, "id": "abcdefghi"}'
    cut = only(parse("mistral", f'[TOOL_CALLS] [{one}, {{"name": "now"'))
    assert (cut.id, cut.name, cut.arguments, cut.error) == ("abcdefghi", "lookup", {"key": "a"}, None)
    stopped = parse("mistral", f"[TOOL_CALLS] [{one}, oops</s>")["tool_calls"]
    assert [call.error is None for call in stopped] == [True, False]
    unclosed = parse("mistral", f"[TOOL_CALLS] [{one}</s>")["tool_calls"]
    assert [call.error is None for call in unclosed] == [True, False]


def test_kimi_keeps_the_model_s_own_ids() -> None:
    call = only(parse("kimi", CALLS["kimi"].replace("KEY", "a").replace(":0", ":4")))
    assert (call.id, call.name) == ("functions.lookup:4", "lookup")


def test_tagged_values_are_read_by_the_schema() -> None:
    def call(**values: str) -> ToolCall:
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        text = f"<tool_call>\n<function=lookup>\n{inner}</function>\n</tool_call><|im_end|>"
        return only(parse("qwen3_6", text, prompt=PROMPT["qwen3_6"]))

    arguments = call(key="null", n="5.0", maybe="null", flag="True", rows='[1, "x"]')
    assert arguments.arguments == {"key": "null", "n": 5, "maybe": None, "flag": True, "rows": [1, "x"]}
    arguments = call(key=" 12\n", n="five", maybe="12", flag="yes", rows="none")
    assert arguments.arguments == {"key": " 12\n", "n": "five", "maybe": "12", "flag": "yes", "rows": "none"}
    assert call(other="7", more="word").arguments == {"other": 7, "more": "word"}


@pytest.mark.parametrize(
    ("inner", "error"),
    [
        ("<function=lookup>\n<parameter=key>\na\n</function>\n", "'key' is not closed"),
        ("<function=lookup>\n<parameter=key\n</function>\n", "has no value"),
        ("<function=lookup>\n<parameter=key", "a parameter has no value"),
        ("<function=>\n</function>\n", "no name"),
        ("<function=lookup>\n", "tags are not closed"),
        ("lookup", "does not begin with"),
        ("", "does not begin with"),
    ],
)
def test_tagged_calls_that_cannot_be_used_say_why(inner: str, error: str) -> None:
    call = only(parse("qwen3_6", f"<tool_call>\n{inner}</tool_call><|im_end|>", prompt=PROMPT["qwen3_6"]))
    assert call.error is not None
    assert error in call.error


def test_tagged_white_space_between_tags_is_free() -> None:
    text = "<tool_call><function=lookup><parameter=key>a</parameter><parameter=n>3</parameter></function></tool_call>"
    assert only(parse("qwen3_6", text, prompt=PROMPT["qwen3_6"])).arguments == {"key": "a", "n": 3}
    text = "<tool_call>lookup<arg_key>key</arg_key><arg_value>a</arg_value></tool_call>"
    assert only(parse("glm4moe", text)).arguments == {"key": "a"}


def test_gpt_oss_messages() -> None:
    message = parse(
        "gptoss",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"key": "a"}<|call|>',
    )
    assert (message.get("reasoning_content"), message["content"]) == ("Hm.", "Looking.")
    assert (only(message).name, only(message).arguments, only(message).error) == ("lookup", {"key": "a"}, None)
    header_first = ' to=functions.lookup<|channel|>commentary json<|message|>{"key": "a"}<|call|>'
    assert only(parse("gptoss", header_first)).arguments == {"key": "a"}
    cut = header_first.removesuffix("<|call|>")
    assert not parse("gptoss", cut).get("tool_calls")
    inner_call = '<|channel|>analysis to=functions.lookup<|message|>{"key": "a"}<|call|>'
    assert only(parse("gptoss", inner_call)).error == INSIDE_REASONING
    broken = only(parse("gptoss", cut.replace('"a"}', "") + "<|call|>"))
    assert broken.error is not None
    assert "not valid JSON" in broken.error
    unclosed = only(parse("gptoss", cut + "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>"))
    assert unclosed.error == "the call was not closed with <|call|>"
    assert parse("gptoss", "<|channel|>final<|message|>Yes.<|return|>")["content"] == "Yes."
    assert parse("gptoss", "<|channel|>analysis<|message|>Hm")["content"] == ""


DEGENERATE = [
    "<tool_call>",
    "<think>",
    "</think>",
    "\n",
    " ",
    '{"name":',
    '"arguments": ',
    "<parameter=",
    "</parameter>\n",
]


@pytest.mark.parametrize("piece", DEGENERATE)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_6", "glm4moe", "llama3_1", "gptoss"])
def test_a_model_that_repeats_itself_costs_no_quadratic_time(family: str, piece: str) -> None:
    renderer = renderer_for(family)
    encode = renderer._tokens.encode
    start = CALLS[family].split("KEY")[0]
    ids: Any = as_ids([*encode(start), *(encode(piece) * 8000)[:16_000], *encode(CALLS[family])])
    tail = renderer.render(canonical_messages([{"role": "user", "content": "x"}]), ())
    started = time.process_time()
    renderer.parse(ids, tail, TOOLS)
    assert time.process_time() - started < 3


GLM_ON_ONE_LINE = {
    **Glm.defaults,
    "first": "<arg_key>",
    "value": "</arg_key><arg_value>",
    "next": "</arg_value><arg_key>",
}


@pytest.mark.parametrize("blank", ["", "\n", " ", "\n\n  "])
def test_white_space_between_tags_is_no_part_of_a_value(blank: str) -> None:
    call = Tagged({**GLM_ON_ONE_LINE, "end": "</arg_value>", "empty": ""}, Marks({}, ()))
    tags = (
        "<arg_key>key</arg_key>",
        "<arg_value>a b</arg_value>",
        "<arg_key>n</arg_key>",
        "<arg_value>3</arg_value>",
        "",
    )
    parsed = call.read("lookup" + blank.join(tags), TOOLS)
    assert (parsed.error, parsed.arguments) == (None, {"key": "a b", "n": 3})


@pytest.mark.parametrize("chat_format", [Glm, MiniMax, Qwen3Coder])
def test_a_value_without_its_closing_tag_is_an_error(chat_format: type[TaggedFormat]) -> None:
    markers = chat_format.defaults
    inner = markers["head"] + "lookup" + markers["first"] + "key" + markers["value"] + "a" + markers["next"] + "n"
    inner += markers["value"] + "3" + markers["end"]
    call = Tagged(markers, Marks({}, ()))
    assert call.read(inner, TOOLS).arguments == {"key": "a", "n": 3}
    closing, _, _ = markers["next"].strip().partition(">")
    broken = call.read(inner.replace(f"{closing}>", "", 1), TOOLS)
    assert (broken.name, broken.arguments) == ("lookup", {})
    assert broken.error == "the parameter 'key' is not closed"


def coder(text: str) -> Message:
    """Parse a turn of Qwen 3 Coder whose markers are ordinary text."""
    return Qwen3Coder(Qwen3Coder.defaults, {}).parse(TurnText(text, "", opened=False, stopped=True), TOOLS).message()


def test_a_call_of_qwen_3_coder_without_its_opener_is_a_call() -> None:
    call = "<function=lookup>\n<parameter=key>\na\n</parameter>\n</function>\n"
    for text in (f"I look.\n{call}</tool_call>", f"I look.\n{call}"):
        message = coder(text)
        assert (message["content"], only(message).arguments) == ("I look.", {"key": "a"})
    two = coder(f"{call}</tool_call>\n<tool_call>\n{call}</tool_call>")
    assert [parsed.error for parsed in two["tool_calls"]] == [None, None]
    mention = "Write <function=other>\n<parameter=key>\na\n</parameter>\n</function> to call other."
    assert coder(mention) == {"role": "assistant", "content": mention}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("['a', True, None]", ["a", True, None]),
        ("{'a': 1}", {"a": 1}),
        ("(1, 2)", [1, 2]),
        ("[a]", "[a]"),
        ("{1}", "{1}"),
    ],
)
def test_python_literals_are_read_where_an_array_or_object_is_expected(text: str, value: Any) -> None:
    assert coerce(text, frozenset({"array", "object"})) == value
    assert coerce(text, frozenset({"string"})) == text


def test_a_call_of_llama_3_by_a_wrong_key_is_an_error_and_no_answer() -> None:
    call = only(parse("llama3_1", '{"name": "lookup", "arguments": {"key": "a"}}<|eot_id|>'))
    assert (call.name, call.error) == ("lookup", 'the call has no "parameters"')
    answer = '{"name": "Ana", "arguments": {"key": "a"}}'
    assert parse("llama3_1", answer + "<|eot_id|>") == {"role": "assistant", "content": answer}


def test_call_ids_shortened_by_the_template_are_detected() -> None:
    arguments = {Probe.KEY: Probe.VALUE, Probe.NUMBER_KEY: Probe.NUMBER}
    first = "0123456789abcdef"
    one = f"[TOOL_CALLS][{json.dumps({'name': Probe.FIRST, 'arguments': arguments, 'id': first[-9:]})}]"
    probe = Probe({"[TOOL_CALLS]": 1}, "", None, None, one, None, (first, "x"), None)
    markers = Mistral.detect(probe)
    assert markers is not None
    assert markers["id"] == "id"


def test_formats_are_found_by_names_with_hyphens() -> None:
    assert find_format("gpt-oss") is find_format("gpt_oss")


def test_a_grammar_without_tags_around_values_is_read() -> None:
    markers = {**Glm.defaults, "first": "(", "value": "=", "next": ";", "end": ")", "empty": "()"}
    parsed = Tagged(markers, Marks({}, ())).read("lookup(key=a b;n=3)", TOOLS)
    assert (parsed.error, parsed.arguments) == (None, {"key": "a b", "n": 3})
