"""The task through Inspect: ``run_inspect.py BASE BASE chat|responses``; it does not stream."""

import sys

from inspect_ai import Task
from inspect_ai import eval as evaluate
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.solver import generate, system_message, use_tools
from inspect_ai.tool import tool
from sums import MODEL, QUESTION, SYSTEM


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two integers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    return execute


if __name__ == "__main__":
    *bases, route = sys.argv[1:]
    for base in bases:
        model = get_model(
            f"openai/{MODEL}", base_url=f"{base}/v1", api_key="any", responses_api=route == "responses", memoize=False
        )
        task = Task(dataset=[Sample(QUESTION)], solver=[system_message(SYSTEM), use_tools(add()), generate()])
        (log,) = evaluate(task, model=model, display="none", log_dir="logs", score=False)
        assert log.status == "success", log.error
        print(log.samples[0].output.completion)
