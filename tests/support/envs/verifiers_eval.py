"""Runs episodes of an exported package of verifiers with recorded messages; run by an interpreter that has verifiers.

``verifiers_eval.py SEED JOBS PATH...``, as ``inspect_eval.py``. Prints the reward of each episode of each job as JSON.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

from verifiers_plays import Endpoint


async def main(seed: int, jobs: list) -> list:
    import verifiers.v1 as vf

    endpoint, rewards_of_jobs = Endpoint(), []
    client = vf.EvalClientConfig(base_url=await endpoint.start(), api_key_var="NO_SUCH_KEY")
    for folder, plays in jobs:
        sys.path.insert(0, folder)
        [package] = [file.parent.name for file in Path(folder).glob("*/env.json")]
        env = importlib.import_module(package).load_environment(seed=seed)
        tasks = {task.data.task: task for task in env.taskset}
        rewards = []
        async with env.serving():
            for name, actions in plays:
                endpoint.say(actions)
                [slot] = env.slots(tasks[name])
                episode = await env.run_slot(slot, vf.ModelContext(model="m", client=client))
                assert episode.ok, [*episode.errors, *episode.traces[0].errors]
                assert not endpoint.left
                rewards.append(episode.traces[0].reward)
        rewards_of_jobs.append(rewards)
    await endpoint.runner.cleanup()
    return rewards_of_jobs


if __name__ == "__main__":
    sys.path += sys.argv[3:]
    print(json.dumps(asyncio.run(main(int(sys.argv[1]), json.loads(sys.argv[2])))))
