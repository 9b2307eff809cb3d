"""A LangGraph agent learns to use two tools: the job of ``../lookup``, with the graph of ``graph.py`` as its agent.

Model, warm start, tasks and settings are those of ``../lookup/train.yaml``; what differs is the agent and that an
episode may ask twice as often, since two scouts ask. ``--smoke`` plays the graph with a scripted model, in a second.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from pathlib import Path

from turnwise import Message
from turnwise.envs.solution import tool_call
from turnwise.inference.scripted import ScriptedRequest

HERE = Path(__file__).parent
LOOKUP = HERE.parent / "lookup"
GRAPH = f"{HERE / 'graph.py'}:make_graph"


def main() -> int:
    sys.path[:0] = [str(LOOKUP), str(HERE.parent / "small_model")]
    if "--smoke" in sys.argv:
        return asyncio.run(smoke())
    from job import Job, run
    from teacher import demonstrations

    # At the rate of lookup the policy was certain before it was right, in some runs.
    ours = (
        "rollout.agent.name=langgraph",
        f"rollout.agent.config.graph={GRAPH}",
        "rollout.max_turns=8",
        "steps=32",
        "policies.main.optim.lr=5e-4",
    )
    return run(Job("lookup", LOOKUP, demonstrations, count=4480, overrides=ours), __doc__)


async def smoke() -> int:
    """Play one episode: both scouts look the team and its manager up, and the judge takes what they found."""
    from teacher import demonstrations

    from turnwise import RolloutConfig, RolloutProducer, RolloutRequest, ScriptedClient, load_tasks
    from turnwise.chat.renderer import load_renderer
    from turnwise.rollout.core import RolloutParts
    from turnwise.trainer.offline.small_model import make_model

    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), await demonstrations(50, seed=0), seed=0)
        renderer = load_renderer(directory)
    config = RolloutConfig.model_validate(
        {
            "env": {"name": "lookup"},
            "agent": {"name": "langgraph", "config": {"graph": GRAPH}},
            "group_size": 1,
            "max_turns": 8,
        }
    )
    client = ScriptedClient(renderer, answer)
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer))
    [group] = await producer.gather([RolloutRequest(next(iter(load_tasks("turnwise.envs.basic.lookup:tasks?n=1"))))])
    await producer.close()
    [trajectory] = group.trajectories
    print(f"{trajectory.stop_reason}, reward {trajectory.reward:g}, forks {dict(trajectory.forks())}")
    for name in sorted(name for name in trajectory.metrics if name.startswith("node/")):
        print(f"{name} {trajectory.metrics[name]:g}")
    return 0 if trajectory.error is None and trajectory.reward == 1.0 else 1


def answer(request: ScriptedRequest) -> Message | str:
    """Return the next message of a player that knows the tools."""
    tool_answers = re.findall(r"<tool_response>\s*(\w+)\s*</tool_response>", request.text)
    if len(tool_answers) == 2:
        return tool_answers[1]
    persons = re.findall(r"Who manages (\w+)\?", request.text)
    call = tool_call("manager_of", team=tool_answers[0]) if tool_answers else tool_call("team_of", person=persons[-1])
    return {"role": "assistant", "content": "", "tool_calls": [call]}


if __name__ == "__main__":
    sys.exit(main())
