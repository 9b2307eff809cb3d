"""The task through smolagents: ``run_smolagents.py BASE BASE tools|code``, whole and then streamed.

``tools``: the agent that calls tools, of which it must make one in each turn; ``code``: the agent that writes Python.
"""

import contextlib
import sys

from smolagents import CodeAgent, LogLevel, OpenAIModel, ToolCallingAgent, tool
from sums import MODEL, MOST_TURNS, QUESTION


@tool
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


if __name__ == "__main__":
    *bases, route = sys.argv[1:]
    kind = ToolCallingAgent if route == "tools" else CodeAgent
    for base, streamed in zip(bases, (False, True), strict=True):
        model = OpenAIModel(MODEL, api_base=f"{base}/v1", api_key="any")
        with contextlib.redirect_stdout(sys.stderr):  # what is streamed is shown as it comes
            agent = kind([add], model, max_steps=MOST_TURNS, stream_outputs=streamed, verbosity_level=LogLevel.OFF)
            answer = agent.run(QUESTION)
        print(answer)
