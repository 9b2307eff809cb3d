"""The fields of the wire APIs: which are honoured, which have no effect, and which are refused, and why.

A field that is in no table is refused, except in messages of the assistant, to which clients add fields of their own.
docs/gateway.md shows the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.errors import nearest, shown
from turnwise.gateway.errors import ApiError, unsupported

_EMPTY: tuple[Any, ...] = (False, "", [], {})


class Rule(Protocol):
    """What a field may hold."""

    def check(self, value: Any, at: str) -> None:
        """Raise ApiError if the value of the field ``at`` is refused."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """A field with any value, which the parser of the request reads (``honoured``) or which has no effect."""

    honoured: bool

    def check(self, value: Any, at: str) -> None:
        """Accept any value: the parser checks it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, with the remedy, unless its value is null or one that asks for nothing (``neutral``)."""

    remedy: str
    neutral: tuple[Any, ...] = _EMPTY

    def check(self, value: Any, at: str) -> None:
        """Raise ApiError unless the value asks for nothing."""
        if value is not None and value not in self.neutral:
            raise unsupported(at, f"it is {shown(value)}; {self.remedy}")


@dataclass(frozen=True, slots=True)
class ObjectTable:
    """The fields of an object, or of every object in a list; ``is_open``: fields without a rule are accepted."""

    fields: Mapping[str, Rule]
    is_open: bool = False

    def check(self, value: Any, at: str) -> None:
        """Raise ApiError for a refused or unknown field."""
        if isinstance(value, list):
            for index, entry in enumerate(value):
                self.check(entry, f"{at}[{index}]")
        elif isinstance(value, dict):
            for key, entry in value.items():
                rule = self.fields.get(key)
                if rule is None and (self.is_open or entry is None):
                    continue
                if not isinstance(rule, Accepted):
                    name = f"{at}.{key}" if at else key
                    if rule is None:
                        accepted = [field for field, rule in self.fields.items() if not isinstance(rule, Refused)]
                        remedy = nearest(key, accepted) or "; remove it"
                        message = f"{name}: this API has no such field, which is {shown(entry)}{remedy}"
                        raise ApiError(400, message, param=name, code="unknown_parameter")
                    rule.check(entry, name)


@dataclass(frozen=True, slots=True)
class KindTable:
    """Objects whose fields depend on their kind, the value of ``key``.

    Kinds without a rule are refused with the ``remedy``; without one the parser refuses them.
    """

    key: str
    default: str
    kinds: Mapping[str, Rule]
    remedy: str = ""

    def check(self, value: Any, at: str) -> None:
        """Raise ApiError for a refused or unknown field."""
        if isinstance(value, list):
            for index, entry in enumerate(value):
                self.check(entry, f"{at}[{index}]")
        elif isinstance(value, dict):
            kind = value.get(self.key) or self.default
            rule = self.kinds.get(kind) if isinstance(kind, str) else None
            if rule is not None:
                rule.check(value, at)
            elif self.remedy:
                raise unsupported(f"{at}.{self.key}", f"it is {shown(kind)}; {self.remedy}")


def _table(
    honoured: str, neutral: str = "", refused: Mapping[str, Refused] | None = None, **objects: Rule
) -> ObjectTable:
    """Return a table of space-separated names; ``objects`` are honoured fields that hold objects."""
    accepted = dict.fromkeys(honoured.split(), Accepted(True)) | dict.fromkeys(neutral.split(), Accepted(False))
    return ObjectTable({**accepted, **(refused or {}), **objects})


def _refuse(remedy: str, names: str, *neutral: Any) -> dict[str, Refused]:
    return dict.fromkeys(names.split(), Refused(remedy, neutral or _EMPTY))


_ECHO = ObjectTable({}, is_open=True)
_OWN = "log-probabilities would not be the model's own: remove it"
_IDS = "ids and log-probabilities are in the trajectory: remove it"
_ENGINE = {
    **_refuse(_OWN, "presence_penalty frequency_penalty logit_bias allowed_token_ids bad_words min_tokens ignore_eos"),
    **_refuse(_OWN, "use_beam_search best_of watermarking repetition_detection"),
    **_refuse(_OWN, "repetition_penalty length_penalty", 1),
    **_refuse(
        "use the API's own field for structured output",
        "structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
        "guided_whitespace_pattern",
    ),
    **_refuse("a completion ends at strings: use stop", "stop_token_ids include_stop_str_in_output"),
    **_refuse("the chat template is the model's: use chat_template_kwargs", "chat_template documents"),
    **_refuse(_IDS, "prompt_logprobs logprob_token_ids return_token_ids return_tokens_as_token_ids echo"),
    **_refuse(_IDS, "return_token_offsets return_prompt_text routed_experts_prompt_start"),
    **_refuse("assistant messages cannot be continued: end with another message", "continue_final_message"),
    **_refuse("every response is the assistant's: remove it", "add_generation_prompt", True),
    **_refuse("special tokens are never part of a text: remove it", "add_special_tokens"),
    **_refuse("special tokens are never part of a text", "skip_special_tokens spaces_between_special_tokens", True),
    **_refuse("a prompt is never truncated: shorten the messages", "truncate_prompt_tokens truncation_side"),
    **_refuse("the engine has no such limit: use an effort of reasoning", "thinking_token_budget"),
    **_refuse("it is not passed to the engine: remove it", "kv_transfer_params ec_transfer_params vllm_xargs"),
    **_refuse("it is not passed to the engine: remove it", "mm_processor_kwargs media_io_kwargs"),
}
_SAMPLING = "model temperature top_p top_k min_p seed stream tool_choice chat_template_kwargs"
_LABELS = (
    "metadata service_tier user safety_identifier prompt_cache_key prompt_cache_options prompt_cache_retention "
    "request_id session_id priority cache_salt stream_interval"
)
_MARKS = "cache_control prompt_cache_breakpoint"
_MODERATION = _refuse("nothing is moderated here: remove it", "moderation")
_LATER = _refuse("tools are all offered at once: remove it", "defer_loading async")
_CALLERS = _refuse("only the model calls tools: remove it", "allowed_callers", [], ["direct"])
_SCHEMA = _table("type schema", "name description strict")
_FORMATS = {"text": _table("type"), "json_object": _table("type"), "json_schema": _SCHEMA}

_TEXT = _table("type text", f"{_MARKS} annotations citations logprobs")
_CHAT_PARTS = KindTable(
    "type",
    "text",
    {
        **dict.fromkeys(("text", "input_text", "output_text"), _TEXT),
        "image_url": _table("type", f"{_MARKS} detail", image_url=_table("url", "detail")),
    },
)
_CHAT_MESSAGE = _table("role name", f"{_MARKS} id", content=_CHAT_PARTS)
_CHAT_RESULT = _table("role name tool_call_id", f"{_MARKS} id", content=_CHAT_PARTS)
_CHAT_TOOL = _table("type", _MARKS, function=_table("name description parameters", "strict", _LATER))

CHAT = _table(
    f"{_SAMPLING} max_tokens max_completion_tokens stop n logprobs top_logprobs reasoning_effort parallel_tool_calls",
    f"{_LABELS} store prediction verbosity",
    {
        **_ENGINE,
        **_MODERATION,
        **_refuse("use tools and tool_choice", "functions function_call", [], "none", "auto"),
        **_refuse("responses are text only: remove it", "audio"),
        **_refuse("responses are text only: use ['text']", "modalities", [], ["text"]),
        **_refuse("the gateway does not search: offer a tool that the agent runs", "web_search_options", None),
        **_refuse("use reasoning_effort or chat_template_kwargs", "reasoning thinking enable_thinking thinking_budget"),
        **_refuse("reasoning is part of every answer: remove it", "include_reasoning", True),
    },
    return_token_ids=Accepted(True),
    messages=KindTable(
        "role",
        "",
        {
            **dict.fromkeys(("system", "developer", "user"), _CHAT_MESSAGE),
            **dict.fromkeys(("tool", "function"), _CHAT_RESULT),
            "assistant": _ECHO,
        },
    ),
    tools=KindTable("type", "function", {"function": _CHAT_TOOL}),
    response_format=KindTable("type", "", {**_FORMATS, "json_schema": _table("type", json_schema=_SCHEMA)}),
    stream_options=_table(
        "include_usage", "include_obfuscation", _refuse("usage is sent at the end", "continuous_usage_stats")
    ),
)
"""A request of Chat Completions."""

_INPUT_PARTS = KindTable(
    "type",
    "input_text",
    {
        **dict.fromkeys(("text", "input_text", "output_text"), _TEXT),
        "input_image": _table(
            "type image_url", f"{_MARKS} detail", _refuse("no file is stored here: send image_url", "file_id")
        ),
    },
)
_INPUT_MESSAGE = _table("type role id", "status phase", content=_INPUT_PARTS)
_INPUT_RESULT = _table("type call_id id", "status caller name namespace", output=_INPUT_PARTS)
_ITEMS: dict[str, Rule] = {
    "message": KindTable(
        "role", "", {**dict.fromkeys(("system", "developer", "user"), _INPUT_MESSAGE), "assistant": _ECHO}
    ),
    **dict.fromkeys(("function_call", "custom_tool_call", "tool_search_call", "reasoning"), _ECHO),
    "tool_search_output": _table("type call_id execution tools", "id status"),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output", "local_shell_call_output"), _INPUT_RESULT),
    "item_reference": _table("type id"),
}
_ANY_TOOL = _LATER | _CALLERS
_FUNCTION_TOOLS = {
    "function": _table("type name description parameters function", "strict output_schema", _ANY_TOOL),
    "custom": _table("type name description", "format", _ANY_TOOL),
}

RESPONSES = _table(
    f"{_SAMPLING} stop max_output_tokens instructions include previous_response_id store parallel_tool_calls "
    "top_logprobs",
    f"{_LABELS} client_metadata max_tool_calls access_programs image",
    {
        **_ENGINE,
        **_MODERATION,
        **_refuse("background responses are not supported: wait for the answer", "background background_options"),
        **_refuse("send the items, or previous_response_id", "conversation"),
        **_refuse("stored prompts are not supported: send instructions and input", "prompt"),
        **_refuse("a conversation is never truncated: shorten the input", "truncation", "disabled"),
        **_refuse("the gateway compacts nothing: compact in the agent", "context_management"),
        **_refuse("reasoning is part of every answer: remove it", "include_reasoning", True),
        **_refuse("use previous_response_id", "previous_input_messages enable_response_messages"),
    },
    input=KindTable("type", "message", _ITEMS, "nothing of this kind runs here: send what it says as a message"),
    tools=KindTable(
        "type",
        "function",
        {
            **_FUNCTION_TOOLS,
            "namespace": _table("type name", "description", tools=KindTable("type", "function", _FUNCTION_TOOLS)),
            "tool_search": _table("type execution description parameters"),
        },
    ),
    reasoning=_table(
        "effort",
        "summary generate_summary",
        {
            **_refuse("the gateway's key reasoning says what stays in a prompt", "context", "auto", "all_turns"),
            **_refuse("the model has one mode: remove it", "mode", "standard"),
        },
    ),
    text=_table("", "verbosity", format=KindTable("type", "", _FORMATS)),
    stream_options=_table("", "include_obfuscation"),
)
"""A request of Responses."""

_BLOCK_FIELDS: dict[str, Rule] = {
    "text": _TEXT,
    "image": _table("type source", "cache_control transformations"),
    "document": _table(
        "type source",
        "cache_control",
        {
            **_refuse("the model would not see it: put it into the text", "title context"),
            **_refuse("the model cites nothing: remove it", "citations", {"enabled": False}),
        },
    ),
    "tool_reference": _table("type tool_name", "cache_control"),
}
_BLOCKS = KindTable("type", "text", _BLOCK_FIELDS)
_TOOL_RESULT = _table("type tool_use_id is_error", "cache_control toolset_name", content=_BLOCKS)
_KEPT_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}

MESSAGES = _table(
    f"{_SAMPLING} max_tokens stop_sequences mcp_servers",
    f"{_LABELS} cache_control betas inference_geo speed user_profile_id workspace_id diagnostics billing_policy "
    "fallbacks fallback_credit_token",
    {
        **_ENGINE,
        **_refuse("nothing is run here: remove it", "container"),
        **_refuse(
            "the gateway edits no history: edit it in the agent",
            "context_management",
            *({"edits": edits} for edits in ([], [_KEPT_THINKING], [{**_KEPT_THINKING, "keep": {"type": "all"}}])),
            {},
        ),
        **_refuse("the gateway compacts nothing: compact in the agent", "compaction"),
        **_refuse("no thread is stored here: send all messages", "thread"),
    },
    messages=KindTable(
        "role",
        "",
        {
            "user": _table(
                "role", "id", content=KindTable("type", "text", {**_BLOCK_FIELDS, "tool_result": _TOOL_RESULT})
            ),
            "assistant": _ECHO,
            "system": _table(
                "role", "", _refuse("it is never cleared: remove it", "clear_at output_config"), content=_BLOCKS
            ),
        },
    ),
    system=_BLOCKS,
    tools=KindTable(
        "type",
        "custom",
        {
            "custom": _table(
                "type name description input_schema defer_loading",
                "cache_control eager_input_streaming strict",
                {**_CALLERS, **_refuse("the model would not see it: describe it in description", "input_examples")},
            )
        },
    ),
    thinking=_table("type", "budget_tokens display block_binding"),
    output_config=_table(
        "effort", "", _refuse("the model is not told of a budget: use max_tokens", "task_budget"), format=_SCHEMA
    ),
    output_format=_SCHEMA,
)
"""A request of Anthropic Messages."""
