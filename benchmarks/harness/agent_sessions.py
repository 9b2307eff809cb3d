"""Agent sessions that the routing benchmark draws, and servers with a device each on which their routing is simulated.

Sessions are of one client with one router, or of several workers with a router each, which then learn of each other by
the loads that servers report in each interval of their health checks.

A step of a simulated server takes so long per step, per prefilled token and per running sequence (``COSTS``, of the
benchmark's model on one core); its cache drops the blocks used longest ago. Requests go through the product's router.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
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


@dataclass(frozen=True, slots=True)
class Clients:
    """Who routes the sessions.

    Attributes:
        workers: Clients with a router each.
        at_once: Sessions of each at a time; a further one begins where one ends. None for all.
        numbered: Whether each orders equal servers by its number.
        reports: Whether servers report their load.
    """

    workers: int = 1
    at_once: int | None = None
    numbered: bool = False
    reports: bool = False


class Simulation:
    """The sessions of a repeat on simulated servers, by one policy."""

    def __init__(
        self, policy: str, repeat: int, settings: Mapping[str, Any], clients: Clients | None = None, slower: float = 1.0
    ) -> None:
        """Begin the first sessions at once; ``slower`` multiplies the seconds of servers and tools."""
        self._rng = np.random.default_rng([5, repeat])
        self._settings = settings
        self._sessions = sessions(repeat, settings)
        prompts = [self._ids(settings["prompt_tokens"]) for _ in range(settings["groups"])]
        self._histories = [prompts[each.group] for each in self._sessions]
        self._turns = [0] * len(self._sessions)
        clients, self._slower = clients or Clients(), slower
        options = RoutingOptions(policy=policy, prefix_tokens=settings["kv_tokens"])
        self._routers = [Router(settings["replicas"], options) for _ in range(clients.workers)]
        if clients.numbered:
            for number, router in enumerate(self._routers):
                router.rotate_servers(number)
        self._servers = [_Server(settings["kv_tokens"] // BLOCK) for _ in range(settings["replicas"])]
        # (time, order, what happens, the number of a session, a server or a worker)
        self._events: list[tuple[float, int, str, int]] = []
        self._order = 0
        count = len(self._sessions)
        begun = count if clients.at_once is None else min(count, clients.workers * clients.at_once)
        # As the pool of workers assigns episodes: in turn, and then to the worker on which one ended.
        self._worker_of = [number % clients.workers for number in range(count)]
        self._queued, self._left = deque(range(begun, count)), count
        for number in range(begun):
            self._at(0.0, "ask", number)
        self._interval = options.health_interval
        for number in range(clients.workers if clients.reports else 0):
            self._at(self._interval * (number + 1) / clients.workers, "report", number)
        self._idle_s = self._full_s = 0.0
        self._latencies: list[float] = []
        self._reused = self._prompted = 0

    async def run(self) -> dict[str, float]:
        """Play to the end; return the figures."""
        time = 0.0
        while self._events:
            before = time
            time, _, kind, number = heapq.heappop(self._events)
            if self._queued:
                # Later there are fewer sessions than places.
                self._full_s = time
                self._idle_s += (time - before) * sum(not each.running for each in self._servers)
            if kind == "step":
                self._step(number, time)
            elif kind == "ask":
                await self._ask(number, time)
            elif self._left:
                for server, each in enumerate(self._servers):
                    self._routers[number].note_load(server, len(each.running))
                self._at(time + self._interval, "report", number)
        return {
            "idle": self._idle_s / (len(self._servers) * self._full_s) if self._full_s else 0.0,
            "reuse": self._reused / self._prompted,
            **{f"p{percent}": float(np.percentile(self._latencies, percent)) for percent in (50, 95, 99)},
            "busy_s": sum(each.seconds for each in self._servers),
            "wall_s": time,
            "moved": sum(router.counts.moved for router in self._routers),
        }

    def _ids(self, count: int) -> Any:
        return self._rng.integers(2, self._settings["vocabulary"], count).astype(np.int32)

    def _at(self, time: float, kind: str, number: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (time, self._order, kind, number))

    async def _ask(self, number: int, time: float) -> None:
        history, tokens = self._histories[number], self._sessions[number].completions[self._turns[number]]
        router = self._routers[self._worker_of[number]]
        assignment = await router.acquire(RoutedRequest(f"s{number}", history, tokens))
        server = self._servers[assignment.server]
        cached = min(server.read(prefix_hashes(history)), len(history) - 1)
        self._reused += cached
        self._prompted += len(history)
        server.running.append(_Running(number, time, assignment, len(history) - cached, tokens))
        if not server.stepping:
            server.stepping = True
            self._at(time, "step", assignment.server)

    def _step(self, number: int, time: float) -> None:
        server = self._servers[number]
        server.stepping = bool(server.running)
        if not server.stepping:
            return
        seconds, ended = server.step()
        seconds *= self._slower
        for each in ended:
            session, place = each.session, self._turns[each.session]
            tokens = self._sessions[session].completions[place]
            self._latencies.append(time + seconds - each.began)
            router = self._routers[self._worker_of[session]]
            router.release(each.assignment)
            router.completed(number, 0, tokens)
            new = self._ids(tokens + self._settings["observation_tokens"])
            self._histories[session] = np.concatenate([self._histories[session], new])
            self._turns[session] += 1
            ready = time + seconds + self._slower * self._sessions[session].tools[place]
            if self._turns[session] < self._settings["turns"]:
                self._at(ready, "ask", session)
                continue
            self._left -= 1
            if self._queued:
                following = self._queued.popleft()
                self._worker_of[following] = self._worker_of[session]
                self._at(ready, "ask", following)
        self._at(time + seconds, "step", number)
