"""An agent without any package: asks OpenAI's API, calls tools by their plain address, and prints its answer.

It takes the task from its argument, or from standard input. Variables: ``CRASH_AFTER`` turns it exits with status 3;
``IDS=1`` says which call of the model each call is.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from typing import Any


def post(url: str, body: Any, **headers: str) -> Any:
    """Post JSON and return what it is answered."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json", **headers})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def main() -> int:
    """Run until the model makes no call."""
    base, tools_url = os.environ["OPENAI_BASE_URL"], os.environ.get("TURNWISE_TOOLS_URL", "")
    tools: list[Any] = []
    if tools_url:
        with urllib.request.urlopen(tools_url) as answer:
            tools = json.load(answer)["tools"]
    task = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
    messages: list[dict[str, Any]] = [{"role": "user", "content": task}]
    crash = int(os.environ.get("CRASH_AFTER", "-1"))
    turns = 0
    while True:
        if turns == crash:
            print("the program is confused", file=sys.stderr)
            return 3
        response = post(f"{base}/chat/completions", {"model": "any", "messages": messages, "tools": tools})
        turns += 1
        message = response["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            print(message["content"])
            return 0
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            headers = {"x-tool-call-id": call["id"]} if os.environ.get("IDS") else {}
            tool_answer = post(f"{tools_url}/{name}", arguments, **headers)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": tool_answer["content"]})


if __name__ == "__main__":
    sys.exit(main())
