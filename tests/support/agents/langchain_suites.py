"""LangChain's own standard suites, over ChatTurnwise as a recorder of a scripted policy.

The policy is scripted because the suites ask for what a tiny model cannot do (the right arguments of a call); the chat
format, the recorder and everything of the chat model are the real ones. What it says depends on the prompt alone: a
call of the first tool offered, an instance of the schema asked for, or a sentence.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import Any, ClassVar

from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from support.chat.model_dirs import renderer_for
from turnwise.agents.langgraph.chat_model import ChatTurnwise
from turnwise.inference.scripted import Line, ScriptedClient, ScriptedRequest
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import ToolCall

RENDERER = renderer_for("qwen3")
_NUMBERS = itertools.count()


def instance(schema: dict[str, Any], text: str, root: dict[str, Any] | None = None) -> Any:
    """Return a value of a JSON schema, with the number or the quoted words of a message where there are any."""
    root = root or schema
    if "$ref" in schema:
        return instance(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], text, root)
    if "anyOf" in schema:
        return instance(schema["anyOf"][0], text, root)
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        return {name: instance(part, text, root) for name, part in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance(schema.get("items", {}), text, root)]
    if kind in ("integer", "number"):
        return int((re.findall(r"\d+", text) or ["3"])[-1])
    if kind == "boolean":
        return True
    return (schema.get("enum") or re.findall(r"['\"]([^'\"]+)['\"]", text) or ["cats"])[0]


def policy(request: ScriptedRequest) -> Line:
    """Say what the prompt asks for."""
    _, _, question = request.text.rpartition("<|im_start|>user\n")
    text = question.partition("<|im_end|>")[0]
    tools = [
        json.loads(line)["function"] for line in re.findall(r"^(\{\"type\": \"function\".*\})$", request.text, re.M)
    ]
    guide = request.params.guide
    if guide is not None and guide.schema is not None:
        # In JSON mode any object will do, and the suite asks for a joke.
        return json.dumps(instance(guide.schema, text) or {"setup": "Why?", "punchline": "Ha."}, ensure_ascii=False)
    if tools and "<tool_response>" not in text and (guide is not None or "<tool_response>" not in question):
        tool = next((schema for schema in tools if guide is None or schema["name"] in guide.calls), tools[0])
        call = ToolCall("", tool["name"], instance(tool["parameters"], text))
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    return "Hello there, and how are you? I am well, thank you, and here is a whole sentence."


def params() -> dict[str, Any]:
    """Return the parameters of a model with a session of its own."""
    client = ScriptedClient(RENDERER, policy, guides=True)
    session = Session(client, RENDERER, id=f"suite-{next(_NUMBERS)}", limits=SessionLimits(context_length=100_000))
    return {"session": session}


class TestUnit(ChatModelUnitTests):
    chat_model_class: ClassVar[type] = ChatTurnwise

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return params()


class TestIntegration(ChatModelIntegrationTests):
    chat_model_class: ClassVar[type] = ChatTurnwise
    # One policy: a session has no other model to switch to.
    supports_model_override: ClassVar[bool] = False
    supports_json_mode: ClassVar[bool] = True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return params()
