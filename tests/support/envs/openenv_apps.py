"""Three small environments on OpenEnv's server: by messages, by MCP tools, and by an action with several fields."""

from __future__ import annotations

import random

from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Heard(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, **options):
        self.number, self.left = random.Random(seed).randint(1, options.get("most", 8)), 4
        return Heard(text=f"guess from 1 to {options.get('most', 8)}")

    def step(self, action, timeout_s=None, **options):
        self.left -= 1
        guess = int(action.message)
        if guess == self.number:
            return Heard(text="right", reward=1.0, done=True)
        return Heard(text="higher" if guess < self.number else "lower", reward=-0.1, done=self.left == 0)

    @property
    def state(self):
        return self._state


class Move(Action):
    x: int
    y: int = 0


class Seen(Observation):
    x: int = 0
    y: int = 0


class Walking(Guessing):
    def reset(self, seed=None, episode_id=None, **options):
        self.x = self.y = 0
        return Seen()

    def step(self, action, timeout_s=None, **options):
        self.x, self.y = self.x + action.x, self.y + action.y
        return Seen(x=self.x, y=self.y, reward=float(action.x), done=self.x >= 3)


class Unpaid(Guessing):
    def step(self, action, timeout_s=None, **options):
        return Heard(text="thanks", done=True)


class Counting(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("counting")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        super().__init__(server)
        self._state = State()

    def reset(self, seed=None, episode_id=None, **options):
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action, timeout_s=None, **options):
        return Observation(done=False, reward=0.0)

    @property
    def state(self):
        return self._state


guessing = create_app(Guessing, Guess, Heard, env_name="guessing", max_concurrent_envs=64)
walking = create_app(Walking, Move, Seen, env_name="walking", max_concurrent_envs=64)
unpaid = create_app(Unpaid, Guess, Heard, env_name="unpaid", max_concurrent_envs=64)
counting = create_app(Counting, CallToolAction, CallToolObservation, env_name="counting", max_concurrent_envs=64)
