"""The task through LangChain: ``run_langchain.py BASE BASE chat|responses|messages``, whole and then streamed."""

import functools
import operator
import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from sums import MODEL, MOST_TURNS, QUESTION, SYSTEM, add


def chat_model(base, route):
    if route == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=MODEL, base_url=base, api_key="any", max_tokens=1000, max_retries=0)
    from langchain_openai import ChatOpenAI

    responses = route == "responses"
    return ChatOpenAI(model=MODEL, base_url=f"{base}/v1", api_key="any", max_retries=0, use_responses_api=responses)


def run(base, route, stream):
    adder = tool(add)
    model = chat_model(base, route).bind_tools([adder])
    messages = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]
    for _ in range(MOST_TURNS):
        message = functools.reduce(operator.add, model.stream(messages)) if stream else model.invoke(messages)
        messages.append(message)
        if not message.tool_calls:
            return message.text
        messages += [adder.invoke(call) for call in message.tool_calls]
    raise AssertionError("no end")


if __name__ == "__main__":
    *bases, wire = sys.argv[1:]
    for url, streamed in zip(bases, (False, True), strict=True):
        print(run(url, wire, streamed))
