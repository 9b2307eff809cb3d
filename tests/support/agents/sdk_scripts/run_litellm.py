"""The task through LiteLLM: ``run_litellm.py BASE BASE chat|messages|responses``, whole and then streamed."""

import json
import sys

import litellm
from sums import DESCRIPTION, MODEL, MOST_TURNS, QUESTION, SCHEMA, SYSTEM, add

FUNCTION = {"name": "add", "description": DESCRIPTION, "parameters": SCHEMA}


def chat(model, base, stream):
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    request = {"model": model, "api_base": base, "api_key": "any", "num_retries": 0, "max_tokens": 1000}
    request["tools"] = [{"type": "function", "function": FUNCTION}]
    for _ in range(MOST_TURNS):
        answer = litellm.completion(messages=messages, stream=stream, **request)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump())
        for call in message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise AssertionError("no end")


def responses(base, stream):
    # Of models that it does not know it asks for the whole response, and makes up a stream.
    litellm.register_model({MODEL: {"litellm_provider": "openai", "mode": "chat", "supports_native_streaming": True}})
    request = {"model": f"openai/{MODEL}", "api_base": base, "api_key": "any", "instructions": SYSTEM}
    request["tools"] = [{"type": "function", "strict": False, **FUNCTION}]
    items = [{"role": "user", "content": QUESTION}]
    for _ in range(MOST_TURNS):
        answer = litellm.responses(input=items, stream=stream, **request)
        if stream:
            answer = next(event for event in list(answer) if event.type == "response.completed").response
        output = [item if isinstance(item, dict) else item.model_dump() for item in answer.output]
        calls = [item for item in output if item["type"] == "function_call"]
        if not calls:
            return "".join(part["text"] for part in output[-1]["content"])
        results = [
            {
                "type": "function_call_output",
                "call_id": call["call_id"],
                "output": str(add(**json.loads(call["arguments"]))),
            }
            for call in calls
        ]
        items = [*items, *output, *results]
    raise AssertionError("no end")


if __name__ == "__main__":
    *bases, route = sys.argv[1:]
    # It prints a line about each model name that it does not know.
    litellm.suppress_debug_info = True
    for url, streamed in zip(bases, (False, True), strict=True):
        if route == "responses":
            print(responses(f"{url}/v1", streamed))
        elif route == "chat":
            print(chat(f"openai/{MODEL}", f"{url}/v1", streamed))
        else:
            print(chat(f"anthropic/{MODEL}", url, streamed))
