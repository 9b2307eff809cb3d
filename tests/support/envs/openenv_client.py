"""Plays episodes in an environment that was exported for OpenEnv; run by an interpreter that has OpenEnv.

``openenv_client.py SEED JOBS PATH...``: a job is ``[folder, plays]``; the folder is imported as a package, its
application served by uvicorn, and its own client plays. A play is ``[task, actions]``; the paths, where Turnwise and
what it imports are, come after all that the interpreter has. Prints the rewards of each episode of each job as JSON.
"""

import asyncio
import importlib
import json
import socket
import sys
from pathlib import Path


async def main(folder: Path, seed: int, plays: list) -> list:
    import uvicorn

    sys.path.insert(0, str(folder.parent))
    package = importlib.import_module(folder.name)
    app = importlib.import_module(f"{folder.name}.server.app").app
    action_class = next(getattr(package, name) for name in package.__all__ if name.endswith("Action"))
    client_class = next(getattr(package, name) for name in package.__all__ if name.endswith("Env"))
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    rewards_of_plays = []
    async with client_class(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}") as client:
        for task, actions in plays:
            result = await client.reset(seed=seed, task=task)
            assert result.observation.text
            rewards = []
            for action in actions:
                fields = {"content": action.get("content") or "", "tool_calls": action.get("tool_calls") or []}
                result = await client.step(action_class(**fields))
                rewards.append(result.reward)
            assert result.done
            assert (await client.state()).step_count == len(actions)
            rewards_of_plays.append(rewards)
    server.should_exit = True
    await serving
    return rewards_of_plays


if __name__ == "__main__":
    sys.path += sys.argv[3:]
    jobs = json.loads(sys.argv[2])
    print(json.dumps([asyncio.run(main(Path(folder), int(sys.argv[1]), plays)) for folder, plays in jobs]))
