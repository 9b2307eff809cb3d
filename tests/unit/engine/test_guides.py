"""What answers are held to: tags of every chat format, walked at random, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from support.chat.model_dirs import FAMILIES, model_dir, renderer_for
from support.engine.grammar_walks import CALLS, HELD, SAYING, SCHEMA, TOOLS, WITHOUT_CALLS, check, says, walker
from support.property_tests import examples
from turnwise.chat.formats import tags
from turnwise.chat.formats.tags import unenforced_keyword
from turnwise.chat.renderer import load_renderer
from turnwise.engine.structured_output import grammar_of
from turnwise.errors import StructuredOutputError
from turnwise.inference.scripted import ScriptedClient
from turnwise.inference.wire import BadRequest, decode_request, encode_request
from turnwise.model.canonical import canonical_messages
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import Guide, Message, SamplingParams, TokenPrompt, as_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_messages_conform_to_their_guide(family: str) -> None:
    walks = walker(family)
    finished = dict.fromkeys(HELD, 0)
    for name, guide in HELD.items():
        if family in WITHOUT_CALLS and guide.calls:
            with pytest.raises(StructuredOutputError, match="chat format pythonic"):
                walks.walk(guide, 0)
            finished[name] = 1
            continue
        for seed in range(3):
            ids, complete = walks.walk(guide, seed)
            if complete:
                finished[name] += 1
                check(name, walks.renderer.parse(ids, walks.prompt, TOOLS))
    # Values without quotes end with a tag that a random walk rarely spells.
    assert all(finished[name] for name in ("two", "single", "json", "json or call"))


@pytest.mark.parametrize("family", SAYING)
def test_grammar_allows_messages_written_by_the_template(family: str) -> None:
    walks = walker(family)
    for count in says(family):
        message: Any = {"role": "assistant", "content": "", "tool_calls": CALLS[:count]}
        ids = walks.renderer.completion(message, TOOLS)
        tagged = walks.renderer.guides.tagged(HELD["required"], walks.prompt, TOOLS)
        grammar = walks.guides.hold(tagged.tag, walks.stops)
        text = walks.renderer.decode(ids)
        for position, token in enumerate(ids.tolist()):
            assert grammar.allowed()[token], (text, walks.renderer.decode(ids[:position]))
            if token not in walks.stops:
                grammar.take(token)


def settle(thinking: bool) -> str:
    """Return the tag of a JSON answer, where the prompt does or does not close the reasoning."""
    renderer = load_renderer(model_dir("qwen3"), template_kwargs={"enable_thinking": thinking})
    prompt = renderer.render(canonical_messages([{"role": "user", "content": "Hi."}]), ())
    return renderer.guides.tagged(Guide(schema=SCHEMA), prompt, ()).tag


def test_reasoning_is_unconstrained_if_the_prompt_allows_it() -> None:
    added = {token.content: n for n, token in _added("qwen3").items()}
    free, closed = settle(True), settle(False)
    assert f'"token":{added["<think>"]}' in free
    assert "any_text" not in closed
    # A prompt that opens the reasoning leaves it to be closed.
    walks = walker("qwen3_6")
    opened = json.loads(walks.renderer.guides.tagged(Guide(schema=SCHEMA), walks.prompt, TOOLS).tag)["format"]
    assert [part["type"] for part in opened["elements"][:2]] == ["any_text", "token"]


def _added(family: str) -> dict[int, Any]:
    return Tokenizer.from_file(str(model_dir(family) / "tokenizer.json")).get_added_tokens_decoder()


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"properties": {"a": {"multipleOf": 3}}}, "multipleOf"),
        ({"$defs": {"a": {"items": {"uniqueItems": True}}}}, "uniqueItems"),
        ({"anyOf": [{"type": "null"}, {"if": {"const": 1}}]}, "if"),
        ({"allOf": [{"minLength": 1}, {"maxLength": 3}]}, "allOf"),
        ({"properties": {"a": {}}, "patternProperties": {"x": {}}}, "patternProperties"),
        ({"$dynamicRef": "#x", "$defs": {"x": {"$dynamicAnchor": "x", "type": "integer"}}}, "$dynamicRef"),
    ],
)
def test_a_schema_that_nothing_would_be_held_to_is_refused(schema: dict[str, Any], keyword: str) -> None:
    walks = walker("qwen2_5")
    with pytest.raises(StructuredOutputError, match=re.escape(f"'{keyword}'")):
        walks.renderer.guides.tagged(Guide(schema=schema), walks.prompt, ())


@pytest.mark.parametrize(
    "schema",
    [
        SCHEMA,
        # Names of properties and values are no keywords.
        {"properties": {"not": {"type": "string"}, "if": {"const": {"then": 1}}}, "required": ["not"]},
        {"enum": [{"multipleOf": 3}], "uniqueItems": False, "allOf": [{"type": "string"}]},
        {"unevaluatedProperties": True},
        True,
    ],
)
def test_a_schema_that_can_be_held_to_is_not_refused(schema: Any) -> None:
    assert unenforced_keyword(schema) is None


def test_a_call_of_no_tool_is_refused() -> None:
    walks = walker("qwen2_5")
    with pytest.raises(StructuredOutputError, match="'later' is required"):
        walks.renderer.guides.tagged(Guide(calls=("later",), text=False), walks.prompt, TOOLS)


def test_strings_of_limited_length_keep_their_limit_where_markers_would_be_excluded() -> None:
    limited = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}}
    assert "excludes" not in tags.json_value(limited, ["<tool_call>"])
    assert tags.json_value({"type": "string"}, ["<tool_call>"])["excludes"] == ["<tool_call>"]


def test_grammar_enforces_the_limit_of_calls() -> None:
    call = tags.text("x")
    assert tags.repeated(call, None, 1) == call
    for limit in (2, 3, 5):
        nested = json.dumps(tags.repeated(call, tags.text(";"), limit))
        assert nested.count('"x"') == limit


TEXTS = st.text(alphabet=st.characters(codec="utf-8"), min_size=1, max_size=12)


@settings(max_examples=examples(60), deadline=None)
@given(wall=TEXTS, text_before=st.text(alphabet="ab</>\\{}[]\n\"' é日", max_size=10))
def test_any_text_ends_at_the_first_following_string(wall: str, text_before: str) -> None:
    walks = walker("qwen2_5")
    tag = {"format": tags.sequence(tags.free(wall), tags.text(wall + "!"), tags.text("done"))}
    grammar = walks.guides.hold(json.dumps(tag), walks.stops)
    tokenizer = Tokenizer.from_file(str(model_dir("qwen2_5") / "tokenizer.json"))
    spelled = tokenizer.encode(text_before, add_special_tokens=False).ids
    spelled += tokenizer.encode(wall + "!", add_special_tokens=False).ids
    spelled += tokenizer.encode("done", add_special_tokens=False).ids
    if wall in text_before or tokenizer.decode(spelled, skip_special_tokens=False) != text_before + wall + "!done":
        return
    for token in spelled:
        assert grammar.allowed()[token]
        grammar.take(token)
    assert grammar.allowed().nonzero()[0].tolist() == walks.stops


@pytest.mark.parametrize(
    "tag",
    [
        "",
        "[]",
        "{}",
        '{"format": 3}',
        '{"format": {"type": "sequence"}}',
        '{"format": {"type": "token", "token": "<x>"}}',
        '{"format": {"type": "const_string", "value": 3}}',
        '{"format": {"type": "star", "content": {"type": "tag"}}}',
        '{"format": ' + '{"type": "star", "content": ' * 3000 + '{"type": "any_text"}' + "}" * 3001,
    ],
)
def test_invalid_structural_tags_are_refused(tag: str) -> None:
    with pytest.raises(BadRequest, match="structured_outputs"):
        grammar_of(tag)


def test_a_guide_crosses_the_wire() -> None:
    params = SamplingParams(max_tokens=4, guide=Guide(schema=SCHEMA, tag='{"format": {}}'))
    limits: dict[str, Any] = {"vocabulary": 100, "max_context": 100, "stop_strings": True}
    read = decode_request(encode_request(as_ids([1, 2]), params), **limits)
    assert read.params.guide == Guide(tag='{"format": {}}')
    with pytest.raises(BadRequest, match="continued"):
        decode_request(encode_request(as_ids([1, 2]), params, continued=1), **limits)


async def test_a_session_sends_the_tag_of_its_prompt() -> None:
    renderer = renderer_for("qwen3")
    client = ScriptedClient(renderer, ['{"a": 1}', "text"], guides=True)
    assert (await client.model_info()).guides
    session = Session(client, renderer, id="s", limits=SessionLimits(context_length=1000))
    messages: list[Message] = [{"role": "user", "content": "Hi."}]
    await session.chat(messages, params=SamplingParams(guide=Guide(schema=SCHEMA)))
    (sent,) = client.requests
    assert sent.params.guide is not None
    assert sent.params.guide.tag == renderer.guides.tagged(Guide(schema=SCHEMA), sent.prompt, ()).tag
    with pytest.raises(StructuredOutputError):
        await session.chat(messages, params=SamplingParams(guide=Guide(schema={"not": {}, "if": {"const": 1}})))
    # What is refused has used no turn, and is not a failure.
    assert (session.turns, session.failure, len(client.requests)) == (1, None, 1)


async def test_a_client_that_cannot_refuses() -> None:
    renderer = renderer_for("qwen3")
    client = ScriptedClient(renderer, ["text"])
    session = Session(client, renderer, id="s", limits=SessionLimits(context_length=1000))
    with pytest.raises(StructuredOutputError, match="leave params"):
        await session.chat([{"role": "user", "content": "Hi."}], params=SamplingParams(guide=Guide(schema=SCHEMA)))
    assert session.failure is None
    trusting = ScriptedClient(renderer, ["text"], guides=True)
    with pytest.raises(StructuredOutputError):
        await trusting.generate(TokenPrompt(as_ids([1])), SamplingParams(guide=Guide(schema=SCHEMA)), session_id="")
