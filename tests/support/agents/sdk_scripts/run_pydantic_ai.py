"""The task through pydantic-ai: ``run_pydantic_ai.py BASE BASE chat|responses|typed``, whole and then streamed.

``typed`` has an output type, which the model answers by a call of a tool that it must make.
"""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from sums import MODEL, QUESTION, SYSTEM, add


class Sums(BaseModel):
    """The answer."""

    first: int
    second: int
    total: int


async def run(base, route, stream):
    kind = OpenAIResponsesModel if route == "responses" else OpenAIChatModel
    model = kind(MODEL, provider=OpenAIProvider(base_url=f"{base}/v1", api_key="any"))
    agent = Agent(model, system_prompt=SYSTEM, tools=[add], output_type=Sums if route == "typed" else str)
    # Its run_stream() ends at the first text: with a handler of events all turns are streamed.
    return (await agent.run(QUESTION, event_stream_handler=read if stream else None)).output


async def read(context, events):
    async for _ in events:
        pass


if __name__ == "__main__":
    *bases, wire = sys.argv[1:]
    for url, streamed in zip(bases, (False, True), strict=True):
        print(asyncio.run(run(url, wire, streamed)))
