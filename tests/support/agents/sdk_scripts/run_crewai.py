"""The task through CrewAI: ``run_crewai.py BASE BASE chat``, whole and then streamed."""

import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from sums import MODEL, MOST_TURNS, QUESTION, SYSTEM


@tool("add")
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


if __name__ == "__main__":
    *bases, route = sys.argv[1:]
    for base, streamed in zip(bases, (False, True), strict=True):
        llm = LLM(model=f"openai/{MODEL}", base_url=f"{base}/v1", api_key="any", stream=streamed)
        agent = Agent(
            role="adder", goal="add", backstory=SYSTEM, tools=[add], llm=llm, max_iter=MOST_TURNS, verbose=False
        )
        task = Task(description=QUESTION, expected_output="The three sums.", agent=agent)
        print(Crew(agents=[agent], tasks=[task], verbose=False).kickoff())
