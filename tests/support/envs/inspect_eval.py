"""Evaluates samples of an exported Inspect task with recorded messages; run by an interpreter that has Inspect.

``inspect_eval.py SEED JOBS PATH...``, as ``openenv_client.py``: the plays of a job are ``[sample, actions]``, and the
paths come after all that the interpreter has. Prints the scores of each job as JSON.
"""

import json
import os
import sys
from pathlib import Path


def output(action: dict):
    from inspect_ai.model import ChatMessageAssistant, ModelOutput, ModelUsage
    from inspect_ai.tool import ToolCall

    calls = [
        ToolCall(id=call["id"], function=call["name"], arguments=call["arguments"])
        for call in action.get("tool_calls") or ()
    ]
    message = ChatMessageAssistant(content=action.get("content") or "", tool_calls=calls or None)
    model_output = ModelOutput.from_message(message)
    # Inspect counts tokens that are not told, with a vocabulary that it downloads.
    model_output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    return model_output


def main(folder: Path, seed: int, plays: list) -> list:
    from inspect_ai import eval as evaluate
    from inspect_ai.model import get_model

    # Inspect takes patterns below its working directory.
    os.chdir(folder)
    rewards = []
    for sample, actions in plays:
        model = get_model("mockllm/model", custom_outputs=[output(action) for action in actions], memoize=False)
        [log] = evaluate(
            "task.py", model=model, sample_id=sample, task_args={"seed": seed}, display="none", log_dir="logs"
        )
        assert log.status == "success", log.error.message
        rewards += [scored.scores["reward"].value for scored in log.samples]
    return rewards


if __name__ == "__main__":
    sys.path += sys.argv[3:]
    print(json.dumps([main(Path(folder), int(sys.argv[1]), plays) for folder, plays in json.loads(sys.argv[2])]))
