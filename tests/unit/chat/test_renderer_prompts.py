"""Whole prompts: the ids of the model's own template, and clear errors where there are none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import FAMILIES, MAIN, Family, model_dir, renderer_for, write_model_dir
from support.property_tests import examples
from turnwise.chat.renderer import load_renderer
from turnwise.errors import RenderError
from turnwise.model.canonical import canonical_messages
from turnwise.model.core import Renderer
from turnwise.types import Message, ToolCall, ToolSchema

TOOLS = [
    ToolSchema(
        "lookup",
        'Find a "row" & more <b>.',
        {"type": "object", "properties": {"key": {"type": "string", "description": "über"}}, "required": ["key"]},
    ),
    ToolSchema("now", "The time."),
]
CALL = ToolCall("functions.lookup:0", "lookup", {"key": "alpha"})
CONVERSATIONS: list[list[Message]] = [
    [{"role": "user", "content": "Hello there."}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say <b>&</b> 'quoted'.\n\nNow."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "Look."},
        {"role": "tool", "tool_call_id": CALL.id, "content": "row 7\n\n42"},
    ],
    [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Here.", "reasoning_content": "Easy."},
        {"role": "user", "content": "Sure?"},
    ],
]


def wire(messages: list[Message]) -> list[dict[str, Any]]:
    return [message.to_template() for message in canonical_messages(messages)]


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' own tokenizers, one for each family."""
    from transformers import AutoTokenizer

    created_at: dict[str, Any] = {}

    def tokenizer(family: str) -> Any:
        if family not in created_at:
            created_at[family] = AutoTokenizer.from_pretrained(model_dir(family))
        return created_at[family]

    return tokenizer


@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("family", [*MAIN, "lfm2", "kimi", "minimax"])
def test_a_prompt_is_the_template_s_own(
    family: str, conversation: int, tools: list[ToolSchema], reference: Any
) -> None:
    messages = CONVERSATIONS[conversation]
    expected = reference(family).apply_chat_template(
        wire(messages),
        tools=[tool.to_json() for tool in tools] or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    assert renderer_for(family).render(canonical_messages(messages), tools).tolist() == expected


@settings(max_examples=examples(60), deadline=None)
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cn"]), max_size=60), min_size=1),
    family=st.sampled_from(["qwen3", "llama3_1", "own", "glm4moe"]),
)
def test_any_text_gives_the_ids_of_the_whole_string(texts: list[str], family: str, reference: Any) -> None:
    renderer = renderer_for(family)
    if any(token in text for token in renderer._tokens.added for text in texts):
        return
    messages: list[Message] = [{"role": "user", "content": text} for text in texts]
    tokenizer = reference(family)
    text = tokenizer.apply_chat_template(wire(messages), add_generation_prompt=True, tokenize=False)
    assert renderer.render(canonical_messages(messages), ()).tolist() == tokenizer.encode(
        text, add_special_tokens=False
    )


def test_arguments_of_the_template_are_the_renderer_s(reference: Any) -> None:
    silent = load_renderer(model_dir("qwen3"), template_kwargs={"enable_thinking": False})
    messages = canonical_messages(CONVERSATIONS[0])
    expected = reference("qwen3").apply_chat_template(
        wire(CONVERSATIONS[0]), add_generation_prompt=True, tokenize=True, enable_thinking=False, return_dict=False
    )
    assert silent.render(messages, ()).tolist() == expected
    assert silent.describe()["template_kwargs"] == {"enable_thinking": False}
    effort = load_renderer(model_dir("gptoss"), template_kwargs={"reasoning_effort": "high"})
    assert "Reasoning: high" in effort.decode(effort.render(messages, ()))


def test_the_date_of_a_prompt_is_fixed_when_the_renderer_is_made() -> None:
    renderer = load_renderer(model_dir("gptoss"), now=datetime(2031, 2, 3))
    assert "Current date: 2031-02-03" in renderer.decode(renderer.render(canonical_messages(CONVERSATIONS[0]), ()))


def test_a_template_of_its_own_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    plain = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    path = write_model_dir(tmp_path, Family("plain"), template=plain)
    (path / "chat_template.jinja").unlink()
    settings_file = path / "tokenizer_config.json"
    config = json.loads(settings_file.read_text())
    config["chat_template"] = [
        {"name": "default", "template": plain},
        {"name": "tool_use", "template": "{{ tools[0].function.name }}" + plain},
    ]
    settings_file.write_text(json.dumps(config))
    renderer = load_renderer(path)
    messages = canonical_messages(CONVERSATIONS[0])
    assert renderer.decode(renderer.render(messages, TOOLS)).startswith("lookup<|im_start|>")
    assert renderer.decode(renderer.render(messages, ())).startswith("<|im_start|>")


def test_special_tokens_reach_the_template() -> None:
    for family in ("llama3_1", "deepseekv3", "mistral"):
        renderer = renderer_for(family)
        first = int(renderer.render(canonical_messages(CONVERSATIONS[0]), ())[0])
        assert first == renderer._tokens.added[str(FAMILIES[family].bos)]


def test_unreadable_arguments_are_rendered_as_their_raw_text() -> None:
    broken = ToolCall("functions.lookup:0", "lookup", {}, '{"key": oops', "the call is not valid JSON")
    messages: list[Message] = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [broken]},
        {"role": "tool", "tool_call_id": broken.id, "content": "error"},
    ]
    for family in MAIN:
        if family == "gptoss":
            continue
        renderer = renderer_for(family)
        assert '{"key": oops' in renderer.decode(renderer.render(canonical_messages(messages), ())), family
    # This template has no place for the answer of a call that is none, and says so.
    with pytest.raises(RenderError, match="no previous assistant message"):
        renderer_for("gptoss").render(canonical_messages(messages), ())


def test_a_template_that_raises_is_a_render_error_with_its_words() -> None:
    messages = canonical_messages(
        [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}, {"role": "user", "content": "z"}]
    )
    with pytest.raises(RenderError, match="System message must be at the beginning"):
        renderer_for("qwen3_6").render(messages, ())


def test_dropped_reasoning_is_seen() -> None:
    thought: Message = {"role": "assistant", "content": "Here.", "reasoning_content": "Easy."}
    later = canonical_messages([CONVERSATIONS[0][0], thought, CONVERSATIONS[0][0]])
    cycle = canonical_messages(CONVERSATIONS[2])
    assert renderer_for("qwen3").drops(later, ())
    assert not renderer_for("qwen3").drops(cycle, TOOLS)
    assert not renderer_for("own").drops(later, ())
    assert not renderer_for("qwen3").drops(canonical_messages(CONVERSATIONS[1]), ())
    assert renderer_for("llama3_1").drops(later, ())


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(RenderError, match="is not a folder on this machine"):
        load_renderer(tmp_path / "nothing")
    path = write_model_dir(tmp_path / "model", FAMILIES["own"])
    (path / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(RenderError, match="not valid jinja"):
        load_renderer(path)
    (path / "chat_template.jinja").unlink()
    with pytest.raises(RenderError, match="has no chat template"):
        load_renderer(path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(RenderError, match=r"tokenizer\.json is not a tokenizer"):
        load_renderer(path, chat_template="{{ x }}")
    (path / "tokenizer.json").unlink()
    with pytest.raises(RenderError, match=r"holds no tokenizer \(tokenizer.json, or one of .*: name a whole model"):
        load_renderer(path, chat_template="{{ x }}")
    with pytest.raises(RenderError, match="special_in_text: 'raw' is unknown; allowed: escape, template"):
        load_renderer(model_dir("own"), special_in_text="raw")  # type: ignore[arg-type]


def test_missing_stop_token_error_names_the_remedy(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    path = write_model_dir(tmp_path, Family("plain"), template=template)
    (path / "generation_config.json").unlink()
    (path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RenderError, match=rf"model '{path}': no token ends a turn.*set eos_token in tokenizer_config"):
        load_renderer(path)
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    with pytest.raises(RenderError, match=r"\(its eos_token, '</s>', is no token of its tokenizer\)"):
        load_renderer(path)


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    path = tmp_path / "slow"
    shutil.copytree(model_dir("own"), path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text(json.dumps(tokenizer["model"]["vocab"]))
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    (path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "GPT2Tokenizer"
    config["additional_special_tokens"] = list(FAMILIES["own"].special)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    renderer = load_renderer(path)
    assert renderer.describe()["format"] == "hermes"
    (path / "vocab.json").write_text("{}")
    (path / "merges.txt").unlink()
    config["tokenizer_class"] = "NoSuchTokenizer"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(RenderError, match=r"no tokenizer\.json"):
        load_renderer(path)


def test_the_contract_holds_and_nothing_heavy_is_imported() -> None:
    assert isinstance(renderer_for("own"), Renderer)
    code = (
        "import sys; import turnwise.chat.renderer; "
        "bad = {'torch', 'transformers', 'renderers', 'openai'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
