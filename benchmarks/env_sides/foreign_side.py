"""The frameworks' sides of ``foreign_env``: reasoning-gym and OpenEnv alone, 64 episodes at a time.

Run by a framework's own Python: ``foreign_side.py reasoning-gym|openenv EPISODES SECONDS``, the seconds being what the
model takes for a turn. ``serve`` serves the game, and prints its address.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

AT_ONCE = 64
GUESSES = 4
FAMILY = "chain_sum"


async def episodes_per_second(
    episode: Callable[[int, float], Awaitable[float]], number: int, seconds: float
) -> dict[str, float]:
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(index: int, seconds: float) -> float:
        async with slots:
            return await episode(index, seconds)

    # Not measured: what is made once, for which no model needs its time.
    await asyncio.gather(*(one(index, 0.0) for index in range(AT_ONCE)))
    began, spent = time.perf_counter(), time.process_time()
    rewards = await asyncio.gather(*(one(index, seconds) for index in range(number)))
    took, spent = time.perf_counter() - began, time.process_time() - spent
    return {"episodes_per_s": number / took, "cpu_ms": 1e3 * spent / number, "reward": sum(rewards)}


async def reasoning_gym(number: int, seconds: float) -> dict[str, float]:
    import reasoning_gym as framework

    dataset = framework.create_dataset(FAMILY, seed=0, size=number)

    async def episode(index: int, seconds: float) -> float:
        entry = dataset[index]
        await asyncio.sleep(seconds)
        return float(dataset.score_answer("12", entry))

    return await episodes_per_second(episode, number, seconds)


async def openenv(number: int, seconds: float, address: str) -> dict[str, float]:
    from openenv.core import GenericEnvClient

    async def episode(index: int, seconds: float) -> float:
        total = 0.0
        async with GenericEnvClient(base_url=address) as client:
            await client.reset(seed=index)
            for _ in range(GUESSES):
                await asyncio.sleep(seconds)
                total += (await client.step({"text": "\\boxed{5}"})).reward
        return total

    return await episodes_per_second(episode, number, seconds)


async def serve() -> None:
    import uvicorn
    from openenv.core.env_server import create_app
    from openenv_side import GuessAction, GuessNumber, GuessObservation

    bound = socket.create_server(("127.0.0.1", 0))
    app = create_app(GuessNumber, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=4 * AT_ONCE)
    # Not "error": it logs an exception, with its stack, for each session that a client closes.
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    print(f"http://127.0.0.1:{bound.getsockname()[1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving


def main(arguments: list[str]) -> None:
    if arguments[0] == "serve":
        asyncio.run(serve())
        return
    number, seconds = int(arguments[1]), float(arguments[2])
    side: Any = reasoning_gym(number, seconds) if arguments[0] == "reasoning-gym" else None
    print(json.dumps(asyncio.run(side or openenv(number, seconds, arguments[3]))))


if __name__ == "__main__":
    main(sys.argv[1:])
