"""The tables of fields of the three wire APIs: against the SDKs' types, the docs, and requests of each kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typing_extensions
from anthropic.types import message_create_params as messages_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from support.gateway.field_rows import TABLES, field_rows
from turnwise.gateway.dialects.anthropic import Anthropic
from turnwise.gateway.dialects.core import Abilities, Dialect
from turnwise.gateway.dialects.field_tables import CHAT, MESSAGES, RESPONSES, KindTable, ObjectTable, Rule
from turnwise.gateway.dialects.openai_chat import OpenAIChat
from turnwise.gateway.dialects.openai_responses import OpenAIResponses
from turnwise.gateway.errors import ApiError

DOCS = Path(__file__).parents[3] / "docs" / "gateway.md"
ASK = [{"role": "user", "content": "Go."}]
BODIES: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "chat": (OpenAIChat(), {"model": "m", "messages": ASK}),
    "responses": (OpenAIResponses(), {"model": "m", "input": "Go."}),
    "messages": (Anthropic(), {"model": "m", "messages": ASK, "max_tokens": 9}),
}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def read(dialect: str, fields: Mapping[str, Any]) -> Any:
    reader, body = BODIES[dialect]
    return reader.read({**body, **fields}, Abilities())


@pytest.mark.parametrize(
    ("dialect", "fields", "param", "words"),
    [
        ("chat", {"structured_outputs": {"json": {}}}, "structured_outputs", "the API's own field"),
        ("chat", {"guided_json": {"type": "object"}}, "guided_json", "the API's own field"),
        ("chat", {"guided_regex": "[ab]"}, "guided_regex", "the API's own field"),
        ("chat", {"guided_choice": ["a"]}, "guided_choice", "the API's own field"),
        ("chat", {"min_tokens": 5}, "min_tokens", "it is 5"),
        ("chat", {"stop_token_ids": [7]}, "stop_token_ids", "use stop"),
        ("chat", {"ignore_eos": True}, "ignore_eos", "it is True"),
        ("chat", {"allowed_token_ids": [1]}, "allowed_token_ids", "log-probabilities"),
        ("chat", {"chat_template": "{{ x }}"}, "chat_template", "chat_template_kwargs"),
        ("chat", {"web_search_options": {}}, "web_search_options", "it is {}"),
        ("chat", {"temprature": 0.1}, "temprature", "did you mean 'temperature'?"),
        ("chat", {"max_token": 1}, "max_token", "did you mean 'max_tokens'?"),
        ("chat", {"zzz": 1}, "zzz", "remove it"),
        ("chat", {"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", "no such field"),
        ("chat", {"tools": [{"type": "function", "function": FUNCTION, "x": 1}]}, "tools[0].x", "no such field"),
        ("chat", {"messages": [{**ASK[0], "contents": "x"}]}, "messages[0].contents", "did you mean 'content'?"),
        ("chat", {"stream_options": {"include_use": True}}, "stream_options.include_use", "include_usage"),
        ("responses", {"truncation": "auto"}, "truncation", "it is 'auto'"),
        ("responses", {"context_management": [{"type": "compaction"}]}, "context_management", "compact in the agent"),
        ("responses", {"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type", "'compaction'"),
        ("responses", {"input": [{"type": "mcp_call", "name": "f"}]}, "input[0].type", "'mcp_call'"),
        ("responses", {"input": [{"type": "shell_call", "action": {}}]}, "input[0].type", "'shell_call'"),
        ("responses", {"input": [{"type": "mesage", **ASK[0]}]}, "input[0].type", "'mesage'"),
        ("responses", {"max_tokens": 5}, "max_tokens", "did you mean 'max_output_tokens'?"),
        ("responses", {"tools": [{"type": "shell"}]}, "tools[0].type", "its schema is not in the request"),
        ("responses", {"tools": [{**FUNCTION, "defer_loading": True}]}, "tools[0].defer_loading", "it is True"),
        ("messages", {"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management", "edits"),
        ("messages", {"thread": {"type": "create"}}, "thread", "send all messages"),
        ("messages", {"output_config": {"task_budget": {"total": 9}}}, "output_config.task_budget", "use max_tokens"),
        ("messages", {"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples", "in description"),
        ("messages", {"stop": ["x"]}, "stop", "did you mean 'stop_sequences'?"),
    ],
)
def test_field_without_effect_is_refused_by_name_value_and_remedy(
    dialect: str, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read(dialect, fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        ("chat", {"user": "u", "metadata": {"a": "b"}, "store": False, "min_tokens": 0, "temprature": None}),
        ("chat", {"modalities": ["text"], "repetition_penalty": 1.0, "logit_bias": {}, "function_call": "auto"}),
        ("chat", {"messages": [*ASK, {"role": "assistant", "content": "A.", "provider_fields": {}}, *ASK]}),
        ("responses", {"truncation": "disabled", "prompt_cache_key": "k", "client_metadata": {"a": 1}, "store": False}),
        ("responses", {"input": [*ASK, {"type": "reasoning", "summary": [], "of_a_client": 1}, *ASK]}),
        ("messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
        ("messages", {"tools": [{**TOOL, "defer_loading": True, "eager_input_streaming": True}], "speed": "fast"}),
    ],
)
def test_field_that_asks_for_nothing_is_accepted(dialect: str, fields: dict[str, Any]) -> None:
    assert read(dialect, fields).messages


@pytest.mark.parametrize("kind", ["web_search", "file_search", "code_interpreter", "mcp", "image_generation"])
def test_tools_of_the_provider_are_left_out_and_counted_by_default(kind: str) -> None:
    for dialect in ("chat", "responses"):
        request = read(dialect, {"tools": [{"type": kind, "anything": 1}]})
        assert (request.tools, request.ignored) == ((), {"server_tools"})
    request = read("messages", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]})
    assert request.ignored == {"server_tools"}


@pytest.mark.parametrize(
    ("params", "table"),
    [
        (chat_params.CompletionCreateParamsBase, CHAT),
        (responses_params.ResponseCreateParamsBase, RESPONSES),
        (messages_params.MessageCreateParamsBase, MESSAGES),
        (beta_params.MessageCreateParamsBase, MESSAGES),
    ],
)
def test_no_field_of_the_sdks_types_is_unknown(params: Any, table: ObjectTable) -> None:
    assert list(missing_fields(params, table, "", set())) == []


def missing_fields(kind: Any, rule: Rule, at: str, seen: set[Any]) -> Iterator[str]:
    """Yield each field of a type, and of the objects in it, that a table lacks."""
    if not typing_extensions.is_typeddict(kind):
        for part in get_args(kind):
            yield from missing_fields(part, rule, at, seen)
        return
    if (kind, id(rule)) in seen:
        return
    seen.add((kind, id(rule)))
    hints = get_type_hints(kind)
    if isinstance(rule, KindTable):
        for value in literals(hints.get(rule.key)) or [rule.default]:
            if value in rule.kinds:
                yield from missing_fields(kind, rule.kinds[value], f"{at}<{value}>", seen)
    elif isinstance(rule, ObjectTable):
        for name, hint in hints.items():
            if name in rule.fields:
                yield from missing_fields(hint, rule.fields[name], f"{at}.{name}", seen)
            elif not rule.is_open:
                yield f"{at}.{name} of {kind.__name__}"


def literals(hint: Any) -> list[str]:
    parts = get_args(hint)
    return [value for part in parts for value in ([part] if isinstance(part, str) else literals(part))]


def test_docs_show_the_tables() -> None:
    text = DOCS.read_text()
    for title, table in TABLES.items():
        rows = "\n".join(field_rows(table))
        shown = re.search(rf"\n#### Fields of {title}\n\n(.*?)\n\n", text, re.DOTALL)
        assert shown is not None, title
        assert shown[1] == rows, f"docs/gateway.md, Fields of {title}, should hold\n{rows}"
