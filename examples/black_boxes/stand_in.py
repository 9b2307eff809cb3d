"""Stands in for a coding agent that is not installed: asks the model, runs the shell commands that it calls, prints.

It reads what the recipes give: the addresses in the environment, and the task from standard input or ``--task=``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

BASH = {"type": "object", "properties": {"command": {"type": "string"}}}
DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def post(url: str, body: Any) -> Any:
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


def main() -> None:
    named = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("--task=")]
    task = named[0] if named else sys.stdin.read()
    tools = [{"name": "Bash", "description": "Run a command.", "input_schema": BASH}]
    messages: list[Any] = [{"role": "user", "content": task}]
    base = os.environ.get("ANTHROPIC_BASE_URL") or os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    while True:
        body = {"model": "any", "max_tokens": 4000, "messages": messages, "tools": tools}
        content = post(f"{base}/v1/messages", body)["content"]
        messages.append({"role": "assistant", "content": content})
        calls = [block for block in content if block["type"] == "tool_use"]
        results = []
        for call in calls:
            ran = subprocess.run(call["input"]["command"], shell=True, capture_output=True, text=True, check=False)
            if DONE in ran.stdout and "-o" in sys.argv:
                submission = {"info": {"submission": ran.stdout.partition(DONE)[2].strip()}}
                Path(sys.argv[sys.argv.index("-o") + 1]).write_text(json.dumps(submission))
                return
            output = ran.stdout + ran.stderr
            results.append({"type": "tool_result", "tool_use_id": call["id"], "content": output or "(nothing)"})
        if not calls:
            print("".join(block["text"] for block in content if block["type"] == "text"))
            return
        messages.append({"role": "user", "content": results})


if __name__ == "__main__":
    main()
