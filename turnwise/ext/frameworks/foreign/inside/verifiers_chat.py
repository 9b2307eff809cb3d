"""The harness of an episode of verifiers: a chat loop in this process, which verifiers loads as a plugin by its id."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

from .core import framework

__all__ = ["ChatHarness"]

_chat = framework("verifiers.v1.dialects.chat")
_mcp = framework("verifiers.v1.harnesses.utils.mcp")
_bounded = framework("verifiers.v1.harnesses.utils.compaction").bound_tool_message
_httpx = framework("httpx")
_NullHarness: Any = framework("verifiers.v1.harnesses.null").NullHarness

conversations: dict[str, list[dict[str, Any]]] = {}
"""The messages of each open trace by its id: also results of calls that no request carried any more."""


class ChatHarness(_NullHarness):  # type: ignore[misc]
    """The loop of verifiers' ``null`` harness in this process: ask the model, call its tools, until a text."""

    async def setup(self, runtime: Any) -> None:
        """Prepare nothing: there is no program to install."""

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Run one segment: from a prompt, or the conversation so far, to a message without calls."""
        del runtime
        system_prompt, prompt = self.resolve_prompt(data)
        messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [_chat.message_to_wire(message) for message in prompt or ()]
        conversations[trace.id] = messages
        urls = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # No time limit: the answer takes as long as the policy and its trainer do. Certificates take long to load.
            options = {"headers": {"Authorization": f"Bearer {secret}"}, "timeout": None, "trust_env": False}
            options["verify"] = endpoint.startswith("https:")
            client = await stack.enter_async_context(_httpx.AsyncClient(**options))
            tools, dispatch, servers = await _mcp.connect_mcp({"mcpServers": urls}, stack)
            body = {"model": ctx.model, **({"tools": tools} if tools else {})}
            calls: Any = None
            while calls is None or calls:
                answer = await client.post(f"{endpoint}/chat/completions", json={**body, "messages": messages})
                if answer.is_error:
                    if trace.stop_condition is None:
                        raise RuntimeError(f"the endpoint answered {answer.status_code}: {answer.text}")
                    break
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or ()
                for call in calls:
                    tool_message = await _ask_interceptor(client, tool_interception_url, call)
                    if tool_message is None:
                        content = await _call_tool(servers, dispatch, call["function"])
                        tool_message = {"role": "tool", "tool_call_id": call["id"], "content": content}
                        tool_message["name"] = call["function"]["name"]
                    messages.append(_bounded(tool_message))
        return framework("verifiers.v1").ProgramResult(exit_code=0, stdout="", stderr="")


async def _ask_interceptor(client: Any, url: str | None, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the message that a policy of the environment substitutes for a call, or None: the call may run."""
    if url is None:
        return None
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        arguments = function["arguments"]
    request = {"tool_call_id": call["id"], "name": function["name"], "arguments": arguments}
    answer = await client.post(url, json=request)
    answer.raise_for_status()
    decision = answer.json()
    if decision["action"] == "stop":
        raise RuntimeError(decision["reason"])
    denied: dict[str, Any] | None = decision["message"] if decision["action"] == "deny" else None
    return denied


async def _call_tool(servers: Any, dispatch: Any, function: dict[str, Any]) -> Any:
    """Return the result of a call by the framework's tool servers, or an error that the model may correct."""
    if function["name"] not in dispatch:
        return f"error: unknown tool {function['name']!r}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await _mcp.call_mcp(servers, dispatch, function["name"], arguments)
