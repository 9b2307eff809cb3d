"""The task through OpenAI's client: ``run_openai.py BASE BASE chat|responses|stored``, whole and then streamed."""

import json
import sys

import openai
from sums import DESCRIPTION, MODEL, MOST_TURNS, QUESTION, SCHEMA, SYSTEM, add

FUNCTION = {"name": "add", "description": DESCRIPTION, "parameters": SCHEMA}


def chat(client, stream):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    request = {"model": MODEL, "tools": [{"type": "function", "function": FUNCTION}]}
    for _ in range(MOST_TURNS):
        if stream:
            with client.chat.completions.stream(messages=messages, **request) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(messages=messages, **request).choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("no end")


def responses(client, stream, stored):
    request = {"model": MODEL, "tools": [{"type": "function", "strict": False, **FUNCTION}], "instructions": SYSTEM}
    items = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_TURNS):
        if stream:
            with client.responses.stream(input=items, store=stored, **request) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(input=items, store=stored, **request)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": str(add(**json.loads(call.arguments)))}
            for call in calls
        ]
        if stored:
            items, request["previous_response_id"] = results, response.id
        else:
            items = [*items, *response.output, *results]
    raise AssertionError("no end")


if __name__ == "__main__":
    *bases, route = sys.argv[1:]
    for base, streamed in zip(bases, (False, True), strict=True):
        sdk_client = openai.OpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
        print(chat(sdk_client, streamed) if route == "chat" else responses(sdk_client, streamed, route == "stored"))
