"""Parameters of model requests: LangChain's keyword arguments, tools and response formats, read into the session's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool

from turnwise.agents.langgraph.run import EpisodeTool
from turnwise.errors import SessionError, shown
from turnwise.gateway.dialects.core import Abilities
from turnwise.gateway.dialects.fields import Fields
from turnwise.gateway.dialects.openai_chat import read_choice
from turnwise.gateway.dialects.response_format import FormatField, ResponseFormat, read_response_format
from turnwise.gateway.errors import ApiError
from turnwise.types import SamplingParams, ToolSchema

SAMPLING: Final = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
# Ours are strict anyway; usage always comes with a stream.
_MEANS_NOTHING: Final = frozenset(("strict", "stream_usage", "api_key"))
_OTHER: Final = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "template_args", "fork")
# Whether they can be held to what is asked is for the engine and the chat format to say.
_ABILITIES: Final = Abilities(guided=True, forced_calls=True)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """Parameters of a model request.

    Attributes:
        params: Sampling; None as the session's.
        fork: Name of the fork that the request makes.
        calls: Whether the graph takes calls. With ``tool_choice: none`` the prompt keeps its tools all the same.
    """

    tools: tuple[ToolSchema, ...]
    params: SamplingParams | None
    template_args: Mapping[str, Any] | None
    fork: str | None
    calls: bool

    @property
    def offered(self) -> frozenset[str] | None:
        """The names of the tools that may be called; None where there are no tools."""
        if not self.tools:
            return None
        return frozenset(tool.name for tool in self.tools) if self.calls else frozenset()


def read_model_request(
    arguments: Mapping[str, Any], stop: Sequence[str] | None, session: SamplingParams
) -> ModelRequest:
    """Parse the parameters of a request.

    Args:
        arguments: Keyword arguments; None counts as not given.
        stop: Stop strings.
        session: The session's sampling.
    """
    arguments = {name: value for name, value in arguments.items() if value is not None and name not in _MEANS_NOTHING}
    unknown = sorted(arguments.keys() - {*SAMPLING, *_OTHER})
    if unknown:
        raise SessionError(
            f"ChatTurnwise takes no {unknown[0]!r} ({shown(arguments[unknown[0]])}): it takes stop, "
            f"{', '.join((*SAMPLING, *_OTHER))}"
        )
    tools = tuple(schema_of(tool) for tool in arguments.get("tools") or ())
    changes: dict[str, Any] = {name: arguments[name] for name in SAMPLING if name in arguments}
    if stop:
        changes["stop"] = tuple(stop)
    calls = True
    if arguments.keys() & {"tool_choice", "parallel_tool_calls", "response_format"}:
        constraint = _constrain(arguments, tools)
        tools, calls, changes["guide"] = constraint.tools, constraint.calls, constraint.guide
    params = replace(session, **changes) if changes else None
    return ModelRequest(tools, params, arguments.get("template_args"), arguments.get("fork"), calls)


def _constrain(arguments: Mapping[str, Any], tools: tuple[ToolSchema, ...]) -> ResponseFormat:
    names = [tool.name for tool in tools]
    parallel = arguments.get("parallel_tool_calls", True)
    try:
        choice = read_choice(Fields({"tool_choice": _choice(arguments.get("tool_choice"), names)}))
        answer = FormatField("response_format", _response_format(arguments.get("response_format")), nested=True)
        return read_response_format(tools, choice, answer, _ABILITIES, single="" if parallel else "parallel_tool_calls")
    except ApiError as error:
        raise SessionError(f"ChatTurnwise: {error.message}") from error


def _choice(value: Any, names: Sequence[str]) -> Any:
    if value is True or value == "any":
        return "required"
    if isinstance(value, dict) and "function" not in value:
        if value.get("type") in ("any", "auto", "none"):
            return _choice(value["type"], names)
        if value.get("type") in ("tool", "function"):
            return {"type": "function", "function": {"name": value.get("name")}}
    if isinstance(value, str) and value not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": value}}
    return None if value is False else value


def _response_format(value: Any) -> Any:
    """Return a response format in OpenAI's format, from a class or schema as well."""
    if value is None or (isinstance(value, dict) and value.get("type") in ("text", "json_object", "json_schema")):
        return value
    return schema_format(value)


def schema_format(schema: Any) -> dict[str, Any]:
    """Return the response format of a class or a JSON schema, in OpenAI's format."""
    try:
        json_schema = convert_to_json_schema(schema)
    except (TypeError, ValueError) as error:
        raise SessionError(f"ChatTurnwise: {shown(schema)} is not a schema of an answer: {error}") from error
    return {"type": "json_schema", "json_schema": {"name": json_schema.get("title", "answer"), "schema": json_schema}}


def schema_of(tool: Any) -> ToolSchema:
    """Convert a tool in any LangChain form to a schema."""
    if isinstance(tool, EpisodeTool):
        return tool.tool_schema
    if not (isinstance(tool, dict) and tool.get("type") == "function" and "function" in tool):
        try:
            tool = convert_to_openai_tool(tool)
        except (TypeError, ValueError) as error:
            raise SessionError(f"ChatTurnwise: {shown(tool)} is not a tool: {error}") from error
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise SessionError(f"ChatTurnwise: {shown(tool)} is not a tool: give a function with a name")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSchema(function["name"], function.get("description") or "", parameters)
