"""The task through Anthropic's client: ``run_anthropic.py BASE BASE messages``, whole and then streamed."""

import sys

import anthropic
from sums import DESCRIPTION, MODEL, MOST_TURNS, QUESTION, SCHEMA, SYSTEM, add

TOOLS = [{"name": "add", "description": DESCRIPTION, "input_schema": SCHEMA}]


def run(client, stream):
    messages = [{"role": "user", "content": QUESTION}]
    request = {"model": MODEL, "max_tokens": 1000, "system": SYSTEM, "tools": TOOLS}
    for _ in range(MOST_TURNS):
        if stream:
            with client.messages.stream(messages=messages, **request) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(messages=messages, **request)
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))} for call in calls]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    raise AssertionError("no end")


if __name__ == "__main__":
    *bases, _ = sys.argv[1:]
    for base, streamed in zip(bases, (False, True), strict=True):
        print(run(anthropic.Anthropic(base_url=base, api_key="any", max_retries=0), streamed))
