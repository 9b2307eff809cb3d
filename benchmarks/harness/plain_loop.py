"""A loop on one kept connection and nothing but the standard library: the least that a program does to ask a model.

A worker of a black-box agent: a line of JSON for each episode, and a line with its answer.
"""

from __future__ import annotations

import http.client
import json
import sys
from typing import Any
from urllib.parse import urlsplit

KEPT: dict[str, http.client.HTTPConnection] = {}


def ask(method: str, url: str, body: Any = None) -> Any:
    parts = urlsplit(url)
    if parts.netloc not in KEPT:
        KEPT[parts.netloc] = http.client.HTTPConnection(parts.netloc)
    connection = KEPT[parts.netloc]
    sent = None if body is None else json.dumps(body).encode()
    connection.request(method, parts.path, sent, {"content-type": "application/json"})
    return json.loads(connection.getresponse().read())


def play(base: str, tools_url: str, task: str) -> str:
    tools = ask("GET", tools_url)["tools"]
    messages: list[Any] = [{"role": "user", "content": task}]
    while True:
        said = ask("POST", f"{base}/chat/completions", {"model": "any", "messages": messages, "tools": tools})
        message = said["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"])
        for call in message["tool_calls"]:
            found = ask("POST", f"{tools_url}/{call['function']['name']}", json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": found["content"]})


if __name__ == "__main__":
    for line in sys.stdin:
        job = json.loads(line)
        answer = play(job["openai_base_url"], job["tools_url"], job["prompt"])
        print(json.dumps({"id": job["id"], "answer": answer}), flush=True)
