"""OpenEnv's side of ``env_steps``: the same game as an OpenEnv environment, stepped in one process.

Run by OpenEnv's own Python. ``served`` is how its documentation has an environment used: the server that
``create_app`` makes, and a client that speaks its WebSocket protocol, here both in this process, over loopback.
``bare`` calls the environment's object itself, without server and client.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import sys
import threading
import time

import uvicorn
from clock import EPISODES, GUESSES, HIGH, LIMIT, LOW, SERVED_EPISODES, answer, report
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_app

NUMBER = re.compile(r"\\boxed\{(\d+)\}")


class GuessAction(Action):
    text: str


class GuessObservation(Observation):
    text: str


class GuessNumber(Environment[GuessAction, GuessObservation, State]):
    """Guess a number between LOW and HIGH; the answer says higher or lower."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id="", step_count=0)
        self._target = LOW

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> GuessObservation:
        # Above all guesses that are made, so that no guess ends the episode.
        self._target = random.Random(seed).randint(max(GUESSES) + 1, HIGH)
        self._state = State(episode_id=episode_id or "", step_count=0)
        return GuessObservation(text=f"Guess a number from {LOW} to {HIGH}.", done=False, reward=0.0)

    def step(self, action: GuessAction, timeout_s: float | None = None, **_: object) -> GuessObservation:  # noqa: ARG002
        self._state.step_count += 1
        found = NUMBER.findall(action.text)
        if not found:
            return GuessObservation(text="Write your guess in \\boxed{}.", done=False, reward=0.0)
        guess = int(found[-1])
        if guess == self._target:
            return GuessObservation(text="That is the number.", done=True, reward=1.0)
        done = self._state.step_count >= LIMIT
        hint = "higher" if self._target > guess else "lower"
        return GuessObservation(text=f"The number is {hint} than {guess}.", done=done, reward=0.0)

    @property
    def state(self) -> State:
        return self._state


def bare(episodes: int) -> tuple[float, int]:
    env = GuessNumber()
    spent, steps = 0.0, 0
    for seed in range(episodes):
        env.reset(seed=seed)
        began = time.process_time()
        for guess in GUESSES:
            observation = env.step(GuessAction(text=answer(guess)))
        spent += time.process_time() - began
        steps += len(GUESSES)
        assert "higher" in observation.text
        assert not observation.done
    return spent, steps


async def play(url: str, episodes: int) -> tuple[float, int]:
    spent, steps = 0.0, 0
    async with GenericEnvClient(base_url=url) as client:
        for seed in range(episodes):
            await client.reset(seed=seed)
            began = time.process_time()
            for guess in GUESSES:
                result = await client.step({"text": answer(guess)})
            spent += time.process_time() - began
            steps += len(GUESSES)
            assert "higher" in result.observation["text"]
            assert not result.done
    return spent, steps


def served(episodes: int) -> tuple[float, int]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(GuessNumber, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        return asyncio.run(play(f"http://127.0.0.1:{listener.getsockname()[1]}", episodes))
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    scale = float(sys.argv[1])
    report(bare=(bare, int(EPISODES * scale)), served=(served, int(SERVED_EPISODES * scale)))
