"""Agent sessions that the routing benchmark draws, and servers with a device each on which their routing is simulated.

A step of a simulated server takes so long per step, per prefilled token and per running sequence (``COSTS``, of the
benchmark's model on one core); its cache drops the blocks used longest ago. Requests go through the product's router.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from turnwise.inference.routing import BLOCK, Assignment, RoutedRequest, Router, RoutingOptions, prefix_hashes

COSTS = {"step": 4.5e-3, "prefilled": 0.35e-3, "running": 0.3e-3}
"""Seconds of a step, and more for each prefilled token and each running sequence."""
_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Session:
    """What one session does: its group, lengths of its completions, seconds of its tools."""

    group: int
    completions: list[int]
    tools: list[float]


def sessions(repeat: int, settings: Mapping[str, Any]) -> list[Session]:
    """Draw the sessions of a repeat, in the order in which they begin."""
    rng = np.random.default_rng([11, repeat])
    count, turns = settings["groups"] * settings["group_size"], settings["turns"]
    length, tool = settings["completion_tokens"], settings["tool_seconds"]
    lengths = np.exp(rng.normal(np.log(length["median"]), length["sigma"], (count, turns)))
    seconds = tool["least"] * (1 + rng.pareto(tool["shape"], (count, turns)))
    completions = np.clip(lengths, 1, length["most"]).astype(int).tolist()
    tools = np.minimum(seconds, tool["most"]).tolist()
    return [Session(number // settings["group_size"], completions[number], tools[number]) for number in range(count)]


@dataclass(slots=True)
class _Running:
    """A request on a simulated server: what is left to prefill and to sample."""

    session: int
    began: float
    assignment: Assignment
    prefill: int
    left: int


@dataclass(slots=True)
class _Server:
    """A simulated server."""

    blocks: int
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    running: list[_Running] = field(default_factory=list)
    stepping: bool = False
    seconds: float = 0.0

    def read(self, hashes: list[bytes]) -> int:
        """Return the tokens of a prompt that are cached, and cache it."""
        known = next((place for place, each in enumerate(hashes) if each not in self.cache), len(hashes))
        for each in reversed(hashes):
            self.cache[each] = None
            self.cache.move_to_end(each)
        while len(self.cache) > self.blocks:
            self.cache.popitem(last=False)
        return known * BLOCK

    def step(self) -> tuple[float, list[_Running]]:
        """Prefill a chunk and sample a token of each sequence; return the seconds and what ended."""
        budget, sampling = _CHUNK, []
        for each in self.running:
            taken = min(budget, each.prefill)
            each.prefill -= taken
            budget -= taken
            if not each.prefill:
                sampling.append(each)
                each.left -= 1
        seconds = COSTS["step"] + COSTS["prefilled"] * (_CHUNK - budget) + COSTS["running"] * len(sampling)
        self.seconds += seconds
        self.running = [each for each in self.running if each.left]
        return seconds, [each for each in sampling if not each.left]


class Simulation:
    """The sessions of a repeat on simulated servers, by one policy."""

    def __init__(self, policy: str, repeat: int, settings: Mapping[str, Any]) -> None:
        """Begin all sessions at once."""
        self._rng = np.random.default_rng([5, repeat])
        self._settings = settings
        self._sessions = sessions(repeat, settings)
        prompts = [self._ids(settings["prompt_tokens"]) for _ in range(settings["groups"])]
        self._histories = [prompts[each.group] for each in self._sessions]
        self._turns = [0] * len(self._sessions)
        self._router = Router(settings["replicas"], RoutingOptions(policy=policy, prefix_tokens=settings["kv_tokens"]))
        self._servers = [_Server(settings["kv_tokens"] // BLOCK) for _ in range(settings["replicas"])]
        # (time, order, whether a server steps or a session asks, its number)
        self._events = [(0.0, number, False, number) for number in range(len(self._sessions))]
        self._order = len(self._events)
        self._latencies: list[float] = []
        self._reused = self._prompted = 0

    async def run(self) -> dict[str, float]:
        """Play to the end; return the figures."""
        time = 0.0
        while self._events:
            time, _, steps, number = heapq.heappop(self._events)
            if steps:
                self._step(number, time)
            else:
                await self._ask(number, time)
        return {
            "reuse": self._reused / self._prompted,
            **{f"p{percent}": float(np.percentile(self._latencies, percent)) for percent in (50, 95, 99)},
            "busy_s": sum(each.seconds for each in self._servers),
            "wall_s": time,
            "moved": self._router.counts.moved,
        }

    def _ids(self, count: int) -> Any:
        return self._rng.integers(2, self._settings["vocabulary"], count).astype(np.int32)

    def _at(self, time: float, steps: bool, number: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, steps, number))

    async def _ask(self, number: int, time: float) -> None:
        history, tokens = self._histories[number], self._sessions[number].completions[self._turns[number]]
        assignment = await self._router.acquire(RoutedRequest(f"s{number}", history, tokens))
        server = self._servers[assignment.server]
        cached = min(server.read(prefix_hashes(history)), len(history) - 1)
        self._reused += cached
        self._prompted += len(history)
        server.running.append(_Running(number, time, assignment, len(history) - cached, tokens))
        if not server.stepping:
            server.stepping = True
            self._at(time, True, assignment.server)

    def _step(self, number: int, time: float) -> None:
        server = self._servers[number]
        server.stepping = bool(server.running)
        if not server.stepping:
            return
        seconds, ended = server.step()
        for each in ended:
            session, place = each.session, self._turns[each.session]
            tokens = self._sessions[session].completions[place]
            self._latencies.append(time + seconds - each.began)
            self._router.release(each.assignment)
            self._router.completed(number, 0, tokens)
            new = self._ids(tokens + self._settings["observation_tokens"])
            self._histories[session] = np.concatenate([self._histories[session], new])
            self._turns[session] += 1
            if self._turns[session] < self._settings["turns"]:
                self._at(time + seconds + self._sessions[session].tools[place], False, session)
        self._at(time + seconds, True, number)
