"""What follows a sampled turn: the same as the template writes, or declined with the reason."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from support.chat.model_dirs import FAMILIES, MAIN, Family, model_dir, renderer_for, write_model_dir
from turnwise.chat.model_dir import read_model_dir
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.chat.tokens import Tokens
from turnwise.model.canonical import canonical_messages
from turnwise.types import Message, ToolCall, ToolSchema, as_ids

TOOLS = [
    ToolSchema("lookup", "Find a row.", {"type": "object", "properties": {"key": {"type": "string"}}}),
    ToolSchema("add", "", {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}),
]
SYSTEM: Message = {"role": "system", "content": "Be brief."}
USER: Message = {"role": "user", "content": "Where is alpha?\n\nTell me."}
NEXT: Message = {"role": "user", "content": "And now?"}
FIRST = ToolCall("functions.lookup:0", "lookup", {"key": "alpha"})
SECOND = ToolCall("functions.add:1", "add", {"a": 1, "b": 2.5})


def answer(call: ToolCall, content: str = "row 7\n\n  42") -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def says(content: str = "", *calls: ToolCall, reasoning: str = "") -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def text_ids(renderer: TemplateRenderer, text: str) -> np.ndarray[Any, Any]:
    return as_ids(renderer._tokens.encode(text))


def extend(
    renderer: TemplateRenderer,
    history: Sequence[Message],
    completion: np.ndarray[Any, Any],
    turn: Message,
    new: Sequence[Message],
    tools: Sequence[ToolSchema] = (),
) -> list[int] | None:
    """Extend with only the end of the prompt for a tail: more must not be needed."""
    everything = canonical_messages([*history, turn, *new])
    size = len(history)
    tail = renderer.render(everything[:size], tools)[-24:]
    extension = renderer.extend(tail, completion, everything[size], everything[size + 1 :], tools)
    return None if extension is None else [int(number) for number in extension]


def cases(family: str) -> list[tuple[Message, list[Message]]]:
    """Turns and what follows them, such that the template leaves the history as it was."""
    can = FAMILIES[family].says
    thought = "I need to look." if "reasoning" in can else ""
    pairs = [(says("", FIRST, reasoning=thought), [answer(FIRST)])]
    if "two calls" in can:
        pairs.append((says("", FIRST, SECOND, reasoning=thought), [answer(FIRST), answer(SECOND)]))
    if "text and call" in can:
        pairs.append((says("Let me see.", FIRST, reasoning=thought), [answer(FIRST)]))
    if family not in ("qwen3", "qwen3_6", "glm4moe", "gptoss"):
        # These drop reasoning, or the empty mark of it, once another user message stands behind.
        pairs.append((says("It is here."), [NEXT]))
        pairs.append((says("", FIRST), [answer(FIRST), NEXT]))
        pairs.append((says("It is here."), [NEXT, says("Fine."), NEXT]))
    return pairs


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("deepseekv3", "mistral")])
def test_an_extended_prompt_is_the_template_s_own(family: str, with_tools: bool) -> None:
    renderer = renderer_for(family)
    tools = TOOLS if with_tools else []
    for turn, new in cases(family):
        history = [SYSTEM, USER]
        prompt = renderer.render(canonical_messages(history), tools)
        completion = renderer.completion(turn, tools)
        following = extend(renderer, history, completion, turn, new, tools)
        assert following is not None, renderer.why
        full_prompt = renderer.render(canonical_messages([*history, turn, *new]), tools)
        assert [*prompt, *completion, *following] == full_prompt.tolist()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_6", "glm4moe", "gptoss"])
def test_a_turn_whose_reasoning_the_template_drops_later_is_kept(family: str) -> None:
    renderer = renderer_for(family)
    turn = says("It is here.", reasoning="Think hard.")
    following = extend(renderer, [USER], renderer.completion(turn, ()), turn, [NEXT])
    assert following is not None
    text = renderer.decode(as_ids(following))
    full_text = renderer.decode(renderer.render(canonical_messages([USER, turn, NEXT]), ()))
    assert text.lstrip()
    assert full_text.endswith(text)
    assert "Think hard." not in full_text


BRIDGES = {
    "qwen3": ("qwen3", "Qwen3Renderer", "Qwen3RendererConfig"),
    "qwen3_6": ("qwen36", "Qwen36Renderer", "Qwen36RendererConfig"),
    "llama3_1": ("llama_3", "Llama3Renderer", "Llama3RendererConfig"),
    "glm4moe": ("glm45", "GLM45Renderer", "GLM45RendererConfig"),
}


@pytest.mark.parametrize("family", list(BRIDGES))
def test_extensions_equal_the_bridges_of_the_renderers_package(family: str) -> None:
    from transformers import AutoTokenizer

    module, name, config = BRIDGES[family]
    configs = importlib.import_module("renderers.configs")
    bridge = getattr(importlib.import_module(f"renderers.{module}"), name)(
        AutoTokenizer.from_pretrained(model_dir(family)), getattr(configs, config)(thinking_retention="all")
    )
    renderer = renderer_for(family)
    thought = "I need to look." if "reasoning" in FAMILIES[family].says else ""
    one = says("", FIRST, reasoning=thought)
    turns: list[tuple[Message, list[Message]]] = [
        (says("It is here.", reasoning=thought), [NEXT]),
        (one, [answer(FIRST)]),
        (one, [answer(FIRST), NEXT]),
    ]
    if "two calls" in FAMILIES[family].says:
        turns.append((says("", FIRST, SECOND, reasoning=thought), [answer(FIRST), answer(SECOND)]))
    compared = 0
    for turn, new in turns:
        completion = renderer.completion(turn, TOOLS)
        cut = (
            completion[:-1] if family != "glm4moe" else completion[:0]
        )  # the package closes a cut turn of GLM with another id
        lengths = [len(completion), len(cut), len(cut) - 3, 3, 0] if len(cut) else [len(completion)]
        for length in lengths:
            ids = completion[:length]
            read = turn if length >= len(cut) else says("")
            follows = new if read is turn else [NEXT]
            prompt = renderer.render(canonical_messages([USER]), TOOLS)
            bridged = bridge.bridge_to_next_turn(
                prompt.tolist(),
                ids.tolist(),
                [dict(message) for message in follows],
                tools=[tool.to_json()["function"] for tool in TOOLS],
            )
            assert bridged is not None
            extension = extend(renderer, [USER], ids, read, follows, TOOLS)
            assert extension == list(bridged.token_ids[len(prompt) + len(ids) :]), (length, renderer.why)
            compared += 1
    assert compared >= 4


def test_stop_id_is_not_repeated_in_the_extension() -> None:
    renderer = renderer_for("qwen3")
    added = renderer._tokens.added
    completion = renderer.completion(says("Here."), ())
    turn = says("Here.")
    plain = extend(renderer, [USER], completion, turn, [NEXT])
    assert plain is not None
    assert renderer.decode(as_ids(plain)).startswith("\n<|im_start|>user\nAnd now?")
    other = np.append(completion[:-1], np.int32(added["<|endoftext|>"]))
    assert extend(renderer, [USER], other, turn, [NEXT]) == plain
    assert extend(renderer, [USER], completion[:-1], turn, [NEXT]) == [added["<|im_end|>"], *plain]


def test_a_turn_of_glm_ends_with_the_token_of_the_next_role() -> None:
    renderer = renderer_for("glm4moe")
    added = renderer._tokens.added
    turn = says("", FIRST)
    completion = renderer.completion(turn, TOOLS)
    assert int(completion[-1]) == added["<|observation|>"]
    following = extend(renderer, [USER], completion, turn, [answer(FIRST)], TOOLS)
    assert following is not None
    assert added["<|observation|>"] not in following
    cut = extend(renderer, [USER], completion[:-1], turn, [answer(FIRST)], TOOLS)
    assert cut == [added["<|observation|>"], *following]
    with_stop = np.append(completion[:-1], np.int32(added["<|endoftext|>"]))
    assert extend(renderer, [USER], with_stop, turn, [answer(FIRST)], TOOLS) == cut


def test_gpt_oss_keeps_the_sampled_return_and_closes_a_cut_message() -> None:
    renderer = renderer_for("gptoss")
    added = renderer._tokens.added
    assert renderer.stop_ids == {added[token] for token in ("<|return|>", "<|call|>", "<|endoftext|>")}
    turn = says("Here.", reasoning="Hm.")
    completion = renderer.completion(turn, ())
    assert int(completion[-1]) == added["<|return|>"]
    following = extend(renderer, [USER], completion, turn, [NEXT])
    assert following is not None
    assert following[0] == added["<|start|>"]
    thinking = completion[: completion.tolist().index(added["<|end|>"])]
    assert extend(renderer, [USER], thinking, says("", reasoning="Hm."), [NEXT]) == [added["<|end|>"], *following]
    stopped = np.append(thinking, np.int32(added["<|return|>"]))
    assert extend(renderer, [USER], stopped, says("", reasoning="Hm."), [NEXT]) is None
    assert renderer.why == "stop_in_reasoning"


@pytest.mark.parametrize("family", ["qwen3", "qwen3_6", "own", "glm4moe"])
def test_open_reasoning_is_closed_at_a_cut_and_declined_at_a_stop(family: str) -> None:
    renderer = renderer_for(family)
    added = renderer._tokens.added
    markers = renderer.describe()["markers"]
    opened = "" if family == "qwen3_6" else markers["reasoning_open"]
    ids = text_ids(renderer, opened + "Let me think about")
    turn = says("", reasoning="Let me think about")
    cut = extend(renderer, [USER], ids, turn, [NEXT])
    assert cut is not None
    assert cut[0] == added[markers["reasoning_close"]]
    close = min(renderer.stop_ids)
    assert extend(renderer, [USER], np.append(ids, np.int32(close)), turn, [NEXT]) is None
    assert renderer.why == "stop_in_reasoning"
    closed = text_ids(renderer, opened + "Hm" + markers["reasoning_close"] + "Yes")
    extended = extend(renderer, [USER], closed, says("Yes", reasoning="Hm"), [NEXT])
    assert extended == cut[1:]


def test_a_reasoning_marker_inside_a_call_opens_no_reasoning() -> None:
    renderer = renderer_for("qwen3")
    ids = text_ids(renderer, '<tool_call>{"name": "lookup", "arguments": {"key": "<think>"}}</tool_call><|im_end|>')
    read = renderer.parse(ids, text_ids(renderer, renderer._facts.prompt), TOOLS)
    (call,) = read["tool_calls"]
    assert (call.arguments, call.error) == ({"key": "<think>"}, None)
    named = ToolCall(FIRST.id, call.name, call.arguments)
    assert extend(renderer, [USER], ids, says("", named), [answer(named)], TOOLS) is not None


@pytest.mark.parametrize("family", MAIN)
def test_ids_behind_a_stop_id_are_declined(family: str) -> None:
    renderer = renderer_for(family)
    completion = renderer.completion(says("Here."), ())
    assert extend(renderer, [USER], np.append(completion, completion[:3]), says("Here."), [NEXT]) is None
    assert renderer.why == "ids_after_stop"


def test_unprovable_extension_is_declined_with_its_reason() -> None:
    later: Message = {"role": "system", "content": "note"}
    previous = says("Here.")

    def why(family: str, new: list[Message], tools: Sequence[ToolSchema] = (), turn: Message = previous) -> str:
        renderer = renderer_for(family)
        completion = text_ids(renderer, "x")
        assert extend(renderer, [USER], completion, turn, new, tools) is None
        return renderer.why

    assert why("mistral", [NEXT], TOOLS) == "depends_on_history"
    assert why("qwen3_6", [later, NEXT]).startswith("template_error: ")
    assert why("gptoss", [later, NEXT]) == "message_dropped"
    assert why("gptoss", [answer(FIRST), answer(SECOND)], turn=says("", FIRST, SECOND)) == "message_dropped"
    assert why("gptoss", [answer(FIRST)]).startswith("template_error: ")


def test_mistral_extends_tool_answers_although_users_move_the_tools() -> None:
    renderer = renderer_for("mistral")
    call = ToolCall("abcdefghi", "lookup", {"key": "a"})
    following = extend(renderer, [USER], text_ids(renderer, "x"), says("", call), [answer(call)], TOOLS)
    assert following is not None
    assert '"call_id": "abcdefghi"' in renderer.decode(as_ids(following))


def test_call_ids_that_a_template_refuses_are_replaced_the_same_way_everywhere() -> None:
    renderer = renderer_for("mistral")
    call = ToolCall("call_with_a_long_id", "lookup", {"key": "a"})
    messages = canonical_messages([USER, says("", call), answer(call)])
    text = renderer.decode(renderer.render(messages, ()))
    rendered_id = text.split('"id": "')[1][:9]
    assert f'"call_id": "{rendered_id}"' in text
    assert rendered_id.isalnum()


def test_text_closes_without_tokens_are_declined_where_pieces_encode_differently(tmp_path: Any) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    renderer = load_renderer(write_model_dir(tmp_path, Family("plain"), template=template), format="plain")
    assert extend(renderer, [USER], text_ids(renderer, "Yes.\n"), says("Yes."), [NEXT]) is None
    assert renderer.why == "no_bridge"


class CountingTokenizer:
    """A tokenizer that counts what it encodes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.encoded = 0

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any:
        encoding = self.inner.encode(sequence, add_special_tokens=add_special_tokens)
        self.encoded += len(encoding.ids)
        return encoding

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_added_tokens_decoder(self) -> Any:
        return self.inner.get_added_tokens_decoder()


def test_a_prompt_that_all_members_of_a_group_begin_with_is_encoded_once() -> None:
    files = read_model_dir(model_dir(MAIN[0]))
    counter = CountingTokenizer(files.tokenizer)
    tokens = Tokens(counter)
    text = "the prompt of a group " * 20
    encoded_before = counter.encoded
    first = tokens.encode(text)
    once = counter.encoded
    assert once == encoded_before + len(first)
    first_ids = list(first)
    # What is done to one answer is not seen in the next.
    first.clear()
    assert tokens.encode(text) == first_ids
    assert counter.encoded == once
    # Texts too long to be kept are encoded each time, to the same ids.
    long = text * 200
    ids = tokens.encode(long)
    assert tokens.encode(long) == ids
    assert counter.encoded == once + 2 * len(ids)


@pytest.mark.parametrize("family", MAIN)
def test_encoding_a_turn_costs_its_new_tokens_only(family: str) -> None:
    files = read_model_dir(model_dir(family))
    counter = CountingTokenizer(files.tokenizer)
    assert files.template is not None
    renderer = load_renderer(type(files)(files.path, counter, files.template, None, files.special, files.eos_ids, None))
    previous = says("", FIRST)
    completion = renderer.completion(previous, TOOLS)
    history: list[Message] = [SYSTEM, USER]
    spent = []
    for turn in range(12):
        encoded_before = counter.encoded
        # Another one each time: an answer that was encoded before costs nothing.
        new = answer(FIRST, f"row {turn} " * 50)
        following = extend_counted(renderer, history, completion, previous, [new])
        assert following is not None
        spent.append((counter.encoded - encoded_before) - len(following))
        history += [previous, new]
        if turn == 0:
            continue  # the shape is proven once
        assert spent[-1] in (0, 1), "only new text is encoded (one id may be the close that was sampled)"


def extend_counted(
    renderer: TemplateRenderer,
    history: list[Message],
    completion: np.ndarray[Any, Any],
    turn: Message,
    new: list[Message],
) -> Any:
    everything = canonical_messages([*history, turn, *new])
    size = len(history)
    return renderer.extend(as_ids([5, 6, 7]), completion, everything[size], everything[size + 1 :], TOOLS)


ODD_TEXTS = [
    "<tool_response>\nx\n</tool_response>",
    "be quick /nothink",
    "</think> well <think>",
    "  spaces around \n\n",
    "\n\nlines",
    "{}",
    '{"name": "lookup", "arguments": {}}',
    "<|im_start|>system\nobey<|im_end|>",
    "über 数据 🙂 e\u0301",
    "",
]


@pytest.mark.parametrize("odd", ODD_TEXTS)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("deepseekv3", "mistral")])
def test_templates_that_look_at_the_text_of_messages_write_the_same_behind_a_turn(family: str, odd: str) -> None:
    renderer = renderer_for(family)
    for turn, new in cases(family):
        altered = [{**message, "content": odd} if message["role"] != "assistant" else message for message in new]
        completion = renderer.completion(turn, TOOLS)
        following = extend(renderer, [USER], completion, turn, altered, TOOLS)
        assert following is not None, renderer.why
        full_prompt = renderer.render(canonical_messages([USER, turn, *altered]), TOOLS)
        prompt = renderer.render(canonical_messages([USER]), TOOLS)
        assert [*prompt, *completion, *following] == full_prompt.tolist()


def chatml(header: str, generation: str) -> str:
    return (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + " + header + " + '\\n' + m.content + '<|im_end|>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}" + generation + "{% endif %}"
    )


def test_a_template_that_counts_messages_depends_on_history(tmp_path: Any) -> None:
    template = chatml("(' ' + loop.index|string if m.role == 'user' else '')", "{{ '<|im_start|>assistant\\n' }}")
    renderer = load_renderer(write_model_dir(tmp_path, Family("plain"), template=template))
    assert extend(renderer, [USER], text_ids(renderer, "Yes.<|im_end|>"), says("Yes."), [NEXT]) is None
    assert renderer.why == "depends_on_history"


def test_generation_prompt_with_tools_is_rendered_with_tools(tmp_path: Any) -> None:
    template = chatml("''", "{{ '<|im_start|>assistant' + (' with ' ~ tools|length if tools else '') + '\\n' }}")
    renderer = load_renderer(write_model_dir(tmp_path, Family("plain"), template=template))
    for tools, ending in ((TOOLS, "assistant with 2\n"), (TOOLS[:1], "assistant with 1\n"), ([], "assistant\n")):
        following = extend(renderer, [USER], text_ids(renderer, "Yes.<|im_end|>"), says("Yes."), [NEXT], tools)
        assert following is not None
        assert renderer.decode(as_ids(following)).endswith(ending)


@pytest.mark.parametrize("family", MAIN)
def test_the_tokens_that_end_a_turn_are_found_without_any_configuration(family: str, tmp_path: Any) -> None:
    path = write_model_dir(tmp_path, FAMILIES[family])
    (path / "generation_config.json").unlink()
    config = json.loads((path / "tokenizer_config.json").read_text())
    del config["eos_token"]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = load_renderer(path)
    stops = set(renderer.describe()["stop_ids"].values())
    expected = {
        "llama3_1": {"<|eot_id|>", "<|eom_id|>"},
        "glm4moe": {"<|user|>", "<|observation|>"},
        "gptoss": {"<|return|>", "<|call|>"},
        "own": {"[|over|]"},
    }
    assert stops == expected.get(family, {"<|im_end|>"})


def test_more_tool_sets_than_are_remembered_change_nothing() -> None:
    renderer = load_renderer(model_dir("own"))
    turn = says("Here.")
    completion = renderer.completion(turn, ())
    reasons = {
        tuple(extend(renderer, [USER], completion, turn, [NEXT], [ToolSchema(f"tool{n}", "")]) or ())
        for n in range(130)
    }
    assert len(reasons) == 1
