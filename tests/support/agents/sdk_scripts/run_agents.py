"""The task through OpenAI's Agents SDK: ``run_agents.py BASE BASE chat|responses``, whole and then streamed."""

import asyncio
import sys

import openai
from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from sums import MODEL, MOST_TURNS, QUESTION, SYSTEM, add


async def run(base, route, stream):
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="any", max_retries=0)
    kind = OpenAIChatCompletionsModel if route == "chat" else OpenAIResponsesModel
    agent = Agent(name="adder", instructions=SYSTEM, tools=[function_tool(add)], model=kind(MODEL, client))
    if not stream:
        return (await Runner.run(agent, QUESTION, max_turns=MOST_TURNS)).final_output
    result = Runner.run_streamed(agent, QUESTION, max_turns=MOST_TURNS)
    async for _ in result.stream_events():
        pass
    return result.final_output


if __name__ == "__main__":
    *bases, wire = sys.argv[1:]
    for url, streamed in zip(bases, (False, True), strict=True):
        print(asyncio.run(run(url, wire, streamed)))
