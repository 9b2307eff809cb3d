"""Routing of requests over replicas: by session, shared prefix and load, to healthy servers only."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from turnwise.inference.connections import ConnectionFailed
from turnwise.types import TokenIds

BLOCK = 32
"""Tokens of a block, in which prefixes are compared."""
_SESSIONS = 65536
_WEIGHT_OF_NEWEST = 0.05
"""Of the newest completion in the running mean of lengths."""
_GOLDEN_RATIO = 0.6180339887498949
"""However many of its multiples are taken, modulo 1 they lie evenly between 0 and 1."""


def prefix_hashes(token_ids: TokenIds) -> list[bytes]:
    """Return the hash of each prefix that ends with a whole block, shortest first."""
    data, size = token_ids.tobytes(), BLOCK * token_ids.itemsize
    state, hashes = blake2b(digest_size=8), []
    for start in range(0, len(data) - size + 1, size):
        state.update(data[start : start + size])
        hashes.append(state.copy().digest())
    return hashes


class PrefixMemory:
    """Prefixes that a server was sent, as hashes of blocks; the ones used longest ago are forgotten first."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens // BLOCK
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def shared(self, hashes: Sequence[bytes]) -> int:
        """Return the tokens of the longest remembered prefix."""
        blocks = next((index for index, block in enumerate(hashes) if block not in self._blocks), len(hashes))
        return blocks * BLOCK

    def add(self, hashes: Sequence[bytes]) -> None:
        """Remember a prompt's prefixes."""
        # The end of a prompt is forgotten before its beginning, without which it could not be found.
        for block in reversed(hashes[: self._most]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the server's cache is empty."""
        self._blocks.clear()


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How requests are divided among several servers.

    Attributes:
        policy: ``affinity`` prefers the server of the session, then the longest shared prefix, then the fewest tokens
            in flight; ``least_loaded`` goes by tokens in flight alone, ``round_robin`` takes servers in turn.
        imbalance: How far a server may be ahead of the least loaded one and still be chosen for its cache: its tokens
            in flight may be more by the tokens cached there plus this share of the mean over servers.
        prefix_tokens: Tokens of prompts that each server is assumed to cache.
        max_requests: Maximum requests in flight on one server; further ones wait in order of arrival. None for no
            limit.
        deadline: Seconds until a completion fails, waiting included; None for no limit.
        resume_tokens: Tokens after which servers report a completion that they are sampling, so that it is resumed from
            them if its server dies; 0 to sample such a completion again.
        eject_after: Failed connections or health checks in a row after which a server gets no more requests.
        health_interval: Seconds between health checks, which also readmit a server.
        health_timeout: Seconds within which a server has to answer one.
        routed_experts: Whether servers report the experts of each token, for requests that ask for them.
    """

    policy: Literal["affinity", "least_loaded", "round_robin"] = "affinity"
    imbalance: float = 0.5
    prefix_tokens: int = 131072
    max_requests: int | None = None
    deadline: float | None = None
    resume_tokens: int = 64
    eject_after: int = 2
    health_interval: float = 1.0
    health_timeout: float = 30.0
    routed_experts: bool = False


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """What a server is chosen for.

    Attributes:
        session_id: Empty for a request of no session.
        token_ids: The prompt.
        max_tokens: Most tokens that may be sampled, if limited.
        sampled: Tokens that another server sampled already.
        avoid: Number of a server that just failed, taken only if there is no other.
        hashes: Of the prompt's prefixes.
    """

    session_id: str
    token_ids: TokenIds
    max_tokens: int | None = None
    sampled: int = 0
    avoid: int | None = None
    hashes: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A request on a server: ``tokens`` are those that it counts for until it is released."""

    server: int
    tokens: int


@dataclass(slots=True)
class ServerLoad:
    """What the router knows of a server.

    Attributes:
        prefixes: Prefixes that its cache may hold.
        tokens: Tokens in flight: prompts, and completions of the mean length.
        requests: Requests in flight.
        elsewhere: Requests of other clients in flight, when the server last reported its load.
        served: Requests so far.
        failures: Failed connections and health checks in a row.
        ejected: Whether it gets no requests.
        suspended: Whether health checks do not readmit it.
        version: Weights that it answered with last.
    """

    prefixes: PrefixMemory
    tokens: int = 0
    requests: int = 0
    elsewhere: int = 0
    served: int = 0
    failures: int = 0
    ejected: bool = False
    suspended: bool = False
    version: int | None = None


@dataclass(slots=True)
class RoutingCounts:
    """Decisions so far.

    Attributes:
        moved: Requests whose session was on another server.
        ejections: Servers ejected.
        resumed_tokens: Tokens that were not sampled again where a completion was resumed on another server.
    """

    moved: int = 0
    ejections: int = 0
    resumed_tokens: int = 0


class Router:
    """Chooses a server for each request, and counts what is in flight.

    With ``policy: affinity`` a request goes to the server of its session, else to the one with the longest shared
    prefix, else to the one with the fewest tokens in flight. A server is chosen for its cache only while its tokens in
    flight exceed the least loaded server's by at most the shared tokens plus ``imbalance`` times the mean. Of equal
    servers it takes the one with the fewest requests of other clients, then the first of its own order.
    """

    def __init__(self, count: int, options: RoutingOptions | None = None, *, sessions: int = _SESSIONS) -> None:
        """Route over ``count`` servers, remembering the servers of at most so many ``sessions``."""
        self.options = options or RoutingOptions()
        self.servers = [ServerLoad(PrefixMemory(self.options.prefix_tokens)) for _ in range(count)]
        self.counts = RoutingCounts()
        self._order = list(range(count))
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._most_sessions = sessions
        self._mean_completion = 0.0
        self._waiting: deque[tuple[RoutedRequest, asyncio.Future[Assignment]]] = deque()

    @property
    def active(self) -> bool:
        """Whether requests are in flight or waiting, or a server could be readmitted."""
        return bool(self._waiting) or any(
            server.requests or (server.ejected and not server.suspended) for server in self.servers
        )

    async def acquire(self, request: RoutedRequest) -> Assignment:
        """Choose a server and count the request on it, after waiting for one with room.

        Raises ConnectionFailed if all servers are ejected.
        """
        if len(self.servers) > 1 and self.options.policy == "affinity":
            request.hashes = prefix_hashes(request.token_ids)
        # While others wait, no server has room: none is overtaken here.
        assignment = self._assign(request)
        if assignment is not None:
            return assignment
        admission: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
        entry = (request, admission)
        self._waiting.append(entry)
        try:
            return await admission
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            elif not admission.cancelled() and admission.exception() is None:
                # It was given a server in the moment in which it was cancelled.
                self.release(admission.result())
            self._admit_waiting()
            raise

    @property
    def waiting(self) -> int:
        """Requests that wait for a server with room."""
        return len(self._waiting)

    def release(self, assignment: Assignment) -> None:
        """Count a request as no longer in flight."""
        server = self.servers[assignment.server]
        server.requests -= 1
        server.tokens -= assignment.tokens
        self._admit_waiting()

    def completed(self, number: int, version: int | None, sampled: int | None) -> None:
        """Note the answer of a server.

        Args:
            number: The server.
            version: Weights that it sampled with last.
            sampled: Length of the completion; None if it continues.
        """
        server = self.servers[number]
        server.failures = 0
        if sampled is not None:
            change = sampled - self._mean_completion
            self._mean_completion += change * (_WEIGHT_OF_NEWEST if self._mean_completion else 1.0)
        if version is not None:
            if server.version is not None and version > server.version:
                # Its cache was computed with other weights.
                server.prefixes.clear()
            server.version = version

    def rotate_servers(self, client: int) -> None:
        """Order equal servers for one of several clients, by its number: each begins at another server."""
        first = int(client * _GOLDEN_RATIO % 1 * len(self.servers))
        self._order = [*range(first, len(self.servers)), *range(first)]

    def note_load(self, number: int, requests: int) -> None:
        """Note the requests in flight that a server reports, those of this client included."""
        server = self.servers[number]
        server.elsewhere = max(0, requests - server.requests)

    def failed(self, number: int) -> bool:
        """Note that a connection or health check failed; return whether the server is ejected."""
        server = self.servers[number]
        server.failures += 1
        if server.failures >= self.options.eject_after:
            self.eject(number)
        return server.ejected

    def eject(self, number: int, *, hold: bool = False) -> None:
        """Send a server no more requests until :meth:`admit`; ``hold`` keeps health checks from readmitting it.

        The only server of a client is not ejected.
        """
        server = self.servers[number]
        if len(self.servers) == 1:
            return
        server.suspended = server.suspended or hold
        if not server.ejected:
            server.ejected = True
            server.prefixes.clear()
            self.counts.ejections += 1
        self._admit_waiting()

    def admit(self, number: int) -> None:
        """Send a server requests again."""
        server = self.servers[number]
        if server.ejected:
            # It takes its turn with the others, not all turns that it missed.
            server.served = max(other.served for other in self.servers)
        server.ejected = server.suspended = False
        server.failures = 0
        self._admit_waiting()

    def home(self, session_id: str) -> int | None:
        """Return the server of a session, if it is known."""
        return self._sessions.get(session_id)

    def _admit_waiting(self) -> None:
        while self._waiting:
            request, admission = self._waiting[0]
            try:
                assignment = None if admission.done() else self._assign(request)
            except ConnectionFailed as error:
                admission.set_exception(error)
            else:
                if assignment is not None:
                    admission.set_result(assignment)
                elif not admission.done():
                    return
            self._waiting.popleft()

    def _assign(self, request: RoutedRequest) -> Assignment | None:
        """Count a request on the server chosen for it; None if none has room. Raises ConnectionFailed."""
        healthy = [number for number in self._order if not self.servers[number].ejected]
        if not healthy:
            raise ConnectionFailed(f"none of {len(self.servers)} servers is healthy")
        limit = self.options.max_requests
        free = [number for number in healthy if limit is None or self.servers[number].requests < limit]
        if not free:
            return None
        free = [number for number in free if number != request.avoid] or free
        number = self._choose(request, free)
        tokens = len(request.token_ids) + request.sampled
        expected = round(self._mean_completion)
        tokens += expected if request.max_tokens is None else min(expected, request.max_tokens)
        server = self.servers[number]
        if request.sampled and request.avoid not in (None, number):
            self.counts.resumed_tokens += request.sampled
        request.avoid = None
        server.prefixes.add(request.hashes)
        server.tokens += tokens
        server.requests += 1
        server.served += 1
        return Assignment(number, tokens)

    def _choose(self, request: RoutedRequest, free: Sequence[int]) -> int:
        servers = self.servers
        if self.options.policy == "round_robin":
            return min(free, key=lambda number: servers[number].served)
        loads = {number: (servers[number].tokens, servers[number].elsewhere, servers[number].served) for number in free}
        least_loaded = min(free, key=loads.__getitem__)
        if len(servers) == 1 or self.options.policy == "least_loaded":
            return least_loaded
        mean = sum(servers[number].tokens for number in free) / len(free)
        slack = servers[least_loaded].tokens + self.options.imbalance * mean
        shared = {number: servers[number].prefixes.shared(request.hashes) for number in free}
        within = [number for number in free if servers[number].tokens <= slack + shared[number]]
        home = self._sessions.get(request.session_id) if request.session_id else None
        if home is not None and home in within:
            number = home
        else:
            number = min(within, key=lambda number: (-shared[number], loads[number]))
            self.counts.moved += home is not None
        if request.session_id:
            self._sessions[request.session_id] = number
            self._sessions.move_to_end(request.session_id)
            if len(self._sessions) > self._most_sessions:
                self._sessions.popitem(last=False)
        return number


class HealthChecks:
    """Asks servers for their health while requests are in flight, ejects those that do not answer, and readmits them.

    What is in flight on a server that stays silent is abandoned, so that it can be resumed on another one.
    """

    def __init__(self, router: Router, ask: Callable[[int], Awaitable[bool]], abandon: Callable[[int], None]) -> None:
        """Check the servers of a router.

        Args:
            router: What ejects and readmits.
            ask: Whether a server answers.
            abandon: Fails all requests in flight on a server.
        """
        self._router = router
        self._ask = ask
        self._abandon = abandon
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Check from now on, as long as something is in flight; nothing for a single server."""
        if len(self._router.servers) < 2:
            return
        loop = asyncio.get_running_loop()
        if self._task is None or self._task.done() or loop is not self._loop:
            self._loop, self._task = loop, loop.create_task(self._run())

    async def stop(self) -> None:
        """Stop checking; idempotent."""
        task, self._task = self._task, None
        if task is not None and self._loop is asyncio.get_running_loop():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self) -> None:
        while self._router.active:
            await asyncio.sleep(self._router.options.health_interval)
            await asyncio.gather(*(self._check(number) for number in range(len(self._router.servers))))
        for server in self._router.servers:
            # Nobody asks any more what is in flight.
            server.elsewhere = 0

    async def _check(self, number: int) -> None:
        router, server = self._router, self._router.servers[number]
        if server.suspended:
            return
        try:
            async with asyncio.timeout(router.options.health_timeout):
                healthy = await self._ask(number)
        except (TimeoutError, ConnectionFailed):
            healthy = False
        if router.servers[number].suspended:
            return
        if not healthy:
            if router.failed(number):
                self._abandon(number)
        elif server.ejected:
            router.admit(number)
        else:
            server.failures = 0
