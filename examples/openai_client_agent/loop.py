"""An agent as it may already exist: a loop on the ``openai`` package that knows nothing of Turnwise.

Its only inputs are an address of a model, a task, and an address of tools. It is started once and plays one task
after the other: a line of JSON on its standard input each, and a line with the answer on its standard output
(``workers`` in ``train.yaml``). That spares most of the time, which goes into importing the package.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import httpx
from openai import OpenAI, OpenAIError


def play(client: OpenAI, http: httpx.Client, task: str, tools_url: str) -> str:
    """Ask until an answer comes without calls."""
    tools = http.get(tools_url).json()["tools"]
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        answer = client.chat.completions.create(model="any", messages=messages, tools=tools)
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            url = f"{tools_url}/{call.function.name}"
            response = http.post(url, content=call.function.arguments, headers={"x-tool-call-id": call.id})
            body = response.json()
            content = body["content"] if response.is_success else body["error"]["message"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def main() -> None:
    # One pool of connections for all tasks. What fails is not tried again: the other side sees to that.
    http = httpx.Client(timeout=600)
    client = OpenAI(api_key="any", base_url="http://unused", http_client=http, max_retries=0)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            session_client = client.with_options(base_url=job["openai_base_url"])
            result = {"answer": play(session_client, http, job["prompt"], job["tools_url"])}
        except (OpenAIError, httpx.HTTPError, ValueError) as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": job["id"], **result}), flush=True)


if __name__ == "__main__":
    main()
