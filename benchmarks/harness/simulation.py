"""A discrete-event simulation of the three training modes: servers, episodes, groups, a trainer, and failures.

Time advances from event to event (a heap); a seed determines everything. What is simulated:

- A server samples a token of each of its running episodes in a step, whose time is a roofline
  (``harness/roofline.py``): episodes slow each other down, and a server that empties gets faster. Prefill holds the
  server up. More episodes than ``max_seqs`` wait.
- An episode has turns: prefill of what is new, a completion, then a tool, during which it is on no server. Lengths of
  completions are log-normal and cut off, correlated within a group; tools take a Pareto time.
- A group is finished with its last member. How many groups are requested is decided by the package's own
  ``StalenessBound``; a step takes the oldest finished groups, and waits for those that would be too old afterwards
  (``replay.strategy: bounded``, ``when_stale: wait``).
- ``sync`` rolls out, trains and syncs in turn. ``colocate_async`` pauses the servers while it trains
  (``overlap.sampling: pause``); tools go on. ``separate_async`` trains parts of a batch as they arrive, on devices of
  its own. After a sync, what is in flight is prefilled again.
- Devices fail at exponential intervals. A lost server's turns start over on others, and it is back after a restart. A
  lost trainer goes back to its last checkpoint: steps since then are trained again, from recorded groups.

Not simulated: evaluation, checkpoint writing, network contention, garbage, and rewards.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import NormalDist, fmean
from typing import Any, Literal

from harness.model_shape import ModelShape
from harness.roofline import Accelerators, forward_operations, weights_read
from turnwise.rollout.replay.config import StalenessBound
from turnwise.trainer.scale.memory import BYTES

Mode = Literal["sync", "colocate_async", "separate_async"]
MODES: tuple[Mode, ...] = ("sync", "colocate_async", "separate_async")
_REFRESH = 1024.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Episodes: their turns, completions and tools.

    Attributes:
        prompt: Tokens of the first prompt.
        turns: Turns of an episode.
        completion: Mean of a turn's sampled tokens, after the cut.
        most: Where completions are cut off.
        sigma: Standard deviation of the logarithm of their length.
        shared: Share of that variance that members of a group have in common.
        observation: Tokens that a tool returns.
        tool_s: Least seconds of a tool; 0 without tools.
        tool_shape: Shape of the Pareto distribution of tools' seconds.
        tool_most_s: Where these are cut off.
    """

    prompt: int
    turns: int
    completion: float
    most: int
    sigma: float = 0.8
    shared: float = 0.5
    observation: int = 0
    tool_s: float = 0.0
    tool_shape: float = 1.2
    tool_most_s: float = 60.0

    def location(self) -> float:
        """Return the mean of the logarithm with which lengths have their mean after the cut (by bisection)."""
        normal, low, high = NormalDist(), 0.0, math.log(self.most) + 3
        for _ in range(60):
            middle = (low + high) / 2
            # The mean of min(X, most): both parts of the integral in closed form.
            z = (math.log(self.most) - middle) / self.sigma
            mean = math.exp(middle + self.sigma**2 / 2) * normal.cdf(z - self.sigma) + self.most * (1 - normal.cdf(z))
            low, high = (middle, high) if mean < self.completion else (low, middle)
        return low


@dataclass(frozen=True, slots=True)
class Setting:
    """What is simulated.

    Attributes:
        shape: The model.
        cluster: The devices and their assumed efficiency.
        devices: Devices of one server.
        rollout_gpus: Devices that sample.
        train_gpus: Devices that train; in ``sync`` and ``colocate_async`` the same ones.
        groups: Groups of a step.
        members: Episodes of a group.
        lengths: The episodes.
        passes: Forward passes that a trained token is worth.
        stream: Parts of a batch (``separate_async``).
        ahead: Batches requested beyond the one trained next.
        staleness: Most train steps of staleness.
        max_seqs: Episodes that run on a server at the same time.
        sync_s: Seconds of a weight sync, and of what else stands between training and rollout.
        pauses: Whether servers of ``colocate_async`` pause while it trains (``overlap.sampling``).
        hours_between_failures: Mean hours of a device until it fails; None: never.
        restart_s: Seconds until a failed server or trainer is back.
        checkpoint_every: Steps between checkpoints.
        slower: Factor of all times of decoding, prefill and training.
    """

    shape: ModelShape
    cluster: Accelerators
    devices: int
    rollout_gpus: int
    train_gpus: int
    groups: int
    members: int
    lengths: Lengths
    passes: float = 4.0
    stream: int = 4
    ahead: int = 1
    staleness: int = 1
    max_seqs: int = 256
    sync_s: float = 5.0
    pauses: bool = True
    hours_between_failures: float | None = None
    restart_s: float = 300.0
    checkpoint_every: int = 10
    slower: float = 1.0


@dataclass(slots=True)
class Result:
    """What a simulation did, without its first steps, in which nothing is ahead yet.

    Attributes:
        step_s: Mean seconds of a step.
        tokens_per_s: Sampled tokens of trained groups a second.
        trainer_busy: Share of the time in which the trainer trained.
        servers_busy: Mean share of the time in which a server had something to do and was not paused.
        staleness: Largest staleness of a trained group.
        failures: Failures of devices.
        trained_again: Steps that a trainer repeated after a failure.
        events: Events in all.
    """

    step_s: float
    tokens_per_s: float
    trainer_busy: float
    servers_busy: float
    staleness: int
    failures: int
    trained_again: int
    events: int


@dataclass(slots=True, eq=False)
class Group:
    """A group, until it is trained."""

    version: int
    left: int
    tokens: float = 0.0


@dataclass(slots=True, eq=False)
class Episode:
    """An episode: the turn that it is in, and its tokens so far."""

    group: Group
    factor: float
    turn: int = 0
    context: float = 0.0
    server: Server | None = None
    size: float = 0.0


@dataclass(slots=True, eq=False)
class Server:
    """A server: the turns that run on it advance together, a token a step.

    Attributes:
        level: Tokens that each turn that ran all the time would have.
        running: (level at its end, number, episode) as a heap.
        tokens: Sum of the running contexts, less ``level`` for each.
        stall: Seconds of prefill that come first.
        stamp: Number of the last change: older events do not count.
    """

    level: float = 0.0
    time: float = 0.0
    step: float = 1.0
    running: list[tuple[float, int, Episode]] = field(default_factory=list)
    waiting: deque[Episode] = field(default_factory=deque)
    tokens: float = 0.0
    stall: float = 0.0
    stamp: int = 0
    paused: bool = False
    busy: float = 0.0
    gone: bool = False


class Costs:
    """Seconds of decoding steps, prefill and training, by the rooflines, tabulated."""

    def __init__(self, setting: Setting) -> None:
        shape, cluster = setting.shape, setting.cluster
        number, devices = BYTES["bfloat16"], setting.devices
        bandwidth = devices * cluster.bandwidth
        speed = cluster.operations
        sizes = range(setting.max_seqs + 1)
        whole = shape.layers - shape.windowed
        # Windowed layers are full after their window, which is short; a token more is read in the others.
        state = number * (shape.kv_elements(shape.window or 1) - 2 * shape.keys * whole * (shape.window or 1))
        self._weights = [(number * weights_read(shape, n) + n * state) / bandwidth for n in sizes]
        self._computing = [forward_operations(shape, n, 0) / (devices * speed) for n in sizes]
        self._token = number * 2 * shape.keys * whole / bandwidth
        self._attended = 4 * shape.queries * whole / (devices * speed)
        self._overhead = cluster.step_overhead_ms / 1e3
        self._slower = setting.slower
        self._prefill = forward_operations(shape, 1, setting.lengths.prompt) / (devices * speed)
        length = setting.lengths.prompt + setting.lengths.turns * setting.lengths.completion
        self._train = setting.passes * forward_operations(shape, 1, length / 2) / (setting.train_gpus * speed)

    def decode(self, sequences: int, tokens: float) -> float:
        """Return the seconds of a decoding step of so many sequences with so many tokens of context in all."""
        reading = self._weights[sequences] + self._token * tokens
        return self._slower * (max(reading, self._computing[sequences] + self._attended * tokens) + self._overhead)

    def prefill(self, tokens: float) -> float:
        """Return the seconds of prefill."""
        return self._slower * self._prefill * tokens

    def train(self, tokens: float) -> float:
        """Return the seconds of an update on so many tokens."""
        return self._slower * self._train * tokens


class Simulation:
    """Runs a setting in one mode."""

    def __init__(self, setting: Setting, mode: Mode, seed: int = 0) -> None:
        self._setting, self._mode = setting, mode
        self._costs = Costs(setting)
        self._random = random.Random(seed)
        self._location = setting.lengths.location()
        self._servers = [Server() for _ in range(max(1, setting.rollout_gpus // setting.devices))]
        self._here = list(self._servers)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = self._handled = 0
        self._now = 0.0
        self._version = 0
        self._ready: dict[int, list[Group]] = {}
        self._in_flight: Counter[int] = Counter()
        self._training: list[Group] = []
        self._bound = StalenessBound(setting.groups, setting.ahead, setting.staleness)
        self._taken = 0
        self._busy = False
        self._down_until = 0.0
        self._trained: list[tuple[float, float]] = []
        self._trained_tokens = 0.0
        self._trainer_s = 0.0
        self._stale = self._failures = self._again = 0

    def run(self, steps: int) -> Result:
        """Simulate so many steps after the first ones, which are not counted."""
        first = 1 if self._mode == "sync" else 2 + self._setting.ahead
        self._request()
        self._next_failure()
        mark: tuple[float, float, float] | None = None
        while len(self._trained) < first + steps:
            self._now, _, call, arguments = heapq.heappop(self._events)
            self._handled += 1
            call(*arguments)
            if mark is None and len(self._trained) == first:
                mark = (self._now, self._trainer_s, sum(each.busy for each in self._servers))
                self._failures = self._again = 0
        assert mark is not None
        seconds = self._now - mark[0]
        busy = sum(each.busy for each in self._servers) - mark[2]
        return Result(
            step_s=seconds / steps,
            tokens_per_s=sum(tokens for _, tokens in self._trained[first:]) / seconds,
            trainer_busy=(self._trainer_s - mark[1]) / seconds,
            servers_busy=busy / seconds / len(self._servers),
            staleness=self._stale,
            failures=self._failures,
            trained_again=self._again,
            events=self._handled,
        )

    def _at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, call, arguments))

    # Episodes.

    def _request(self) -> None:
        """Request as many groups as the mode and the staleness bound allow."""
        outstanding = self._finished() + self._in_flight.total() + len(self._training)
        if self._mode == "sync":
            room = self._setting.groups - outstanding if not self._busy else 0
        else:
            # Once a batch is handed out, the one after it is the next.
            whole = self._taken == self._setting.groups
            step, taken = (self._version + 2, 0) if whole else (self._version + 1, self._taken)
            waiting = outstanding - len(self._training)
            room = self._bound.room(outstanding=waiting, version=self._version, step=step, taken=taken)
        for _ in range(room):
            self._begin_group()

    def _begin_group(self) -> None:
        lengths = self._setting.lengths
        group = Group(self._version, self._setting.members)
        self._in_flight[group.version] += 1
        common = math.sqrt(lengths.shared) * self._random.gauss(0, 1)
        # Members share a prompt, which is prefilled once: on the server that the group begins on.
        server = self._least()
        self._advance(server)
        server.stall += self._costs.prefill(lengths.prompt)
        for _ in range(self._setting.members):
            own = math.sqrt(1 - lengths.shared) * self._random.gauss(0, 1)
            episode = Episode(group, common + own, context=float(lengths.prompt))
            self._begin_turn(episode, self._least(), new=0.0)

    def _least(self) -> Server:
        """Return the emptier of two servers chosen at random (of all where there are few)."""
        few = len(self._here) <= 8
        chosen = self._here if few else [self._here[int(len(self._here) * self._random.random())] for _ in range(2)]
        return min(chosen, key=lambda each: len(each.running) + len(each.waiting))

    def _begin_turn(self, episode: Episode, server: Server, *, new: float) -> None:
        lengths = self._setting.lengths
        # Turns of one episode vary around its own length.
        spread = episode.factor if lengths.turns == 1 else (episode.factor + self._random.gauss(0, 1)) / math.sqrt(2)
        size = min(float(lengths.most), max(1.0, math.exp(self._location + lengths.sigma * spread)))
        episode.size = size
        self._place(episode, server, new=new)

    def _place(self, episode: Episode, server: Server, *, new: float) -> None:
        """Run a turn on a server, or let it wait there."""
        self._advance(server)
        episode.server = server
        server.stall += self._costs.prefill(new)
        if len(server.running) >= self._setting.max_seqs:
            server.waiting.append(episode)
        else:
            self._start(server, episode)
        self._schedule(server)

    def _start(self, server: Server, episode: Episode) -> None:
        self._number += 1
        heapq.heappush(server.running, (server.level + episode.size, self._number, episode))
        server.tokens += episode.context - server.level

    def _end_turn(self, episode: Episode) -> None:
        lengths = self._setting.lengths
        episode.context += episode.size
        episode.group.tokens += episode.size
        episode.turn += 1
        if episode.turn >= lengths.turns:
            self._end_episode(episode.group)
            return
        wait = 0.0
        if lengths.tool_s:
            wait = min(lengths.tool_most_s, lengths.tool_s * self._random.paretovariate(lengths.tool_shape))
        self._at(self._now + wait, self._after_tool, episode)

    def _after_tool(self, episode: Episode) -> None:
        lengths, server = self._setting.lengths, episode.server
        episode.context += lengths.observation
        new = float(lengths.observation)
        if server is None or server.gone:
            # Another server has none of its history.
            server, new = self._least(), episode.context
        self._begin_turn(episode, server, new=new)

    def _end_episode(self, group: Group) -> None:
        group.left -= 1
        if group.left == 0:
            self._in_flight[group.version] -= 1
            self._ready.setdefault(group.version, []).append(group)
            self._try_to_train()

    # Servers.

    def _advance(self, server: Server) -> None:
        """Bring a server's progress up to now."""
        passed, server.time = self._now - server.time, self._now
        if server.paused or not server.running or server.gone:
            return
        server.busy += passed
        held = min(server.stall, passed)
        server.stall -= held
        server.level += (passed - held) / server.step

    def _schedule(self, server: Server) -> None:
        """Compute a server's step again, and when its next turn ends (or its contexts have grown)."""
        server.stamp += 1
        if server.paused or not server.running or server.gone:
            return
        count = len(server.running)
        server.step = self._costs.decode(count, server.tokens + count * server.level)
        left = min(server.running[0][0] - server.level, _REFRESH)
        self._at(self._now + server.stall + max(0.0, left) * server.step, self._serve, server, server.stamp)

    def _serve(self, server: Server, stamp: int) -> None:
        if stamp != server.stamp:
            return
        self._advance(server)
        ended = []
        while server.running and server.running[0][0] <= server.level + 1e-6:
            level, _, episode = heapq.heappop(server.running)
            server.tokens -= episode.context - (level - episode.size)
            ended.append(episode)
        while server.waiting and len(server.running) < self._setting.max_seqs:
            self._start(server, server.waiting.popleft())
        self._schedule(server)
        for episode in ended:
            self._end_turn(episode)

    def _pause(self, *, paused: bool) -> None:
        for server in self._servers:
            self._advance(server)
            server.paused = paused
            self._schedule(server)

    # The trainer.

    def _due(self) -> bool:
        """Whether the next part of a batch may be trained."""
        size = self._part()
        return self._finished() >= size and (self._mode == "sync" or not self._must_wait(size))

    def _finished(self) -> int:
        return sum(map(len, self._ready.values()))

    def _must_wait(self, size: int) -> bool:
        """Whether a batch of the oldest would leave more than can be trained in time, as the strategy ``bounded`` asks.

        Of the groups up to each version that is in flight, those that are left have to fit into this step and the later
        ones that may still train them.
        """
        head, taken = 0, 0
        rest: dict[int, int] = {}
        for version in sorted(self._ready):
            count = len(self._ready[version])
            own = min(count, size - taken)
            taken += own
            rest[version] = count - own
            head = version if own else head
        left = self._setting.groups - self._taken - size
        for version in [version for version, count in self._in_flight.items() if count and version < head]:
            waiting = sum(count for each, count in (*rest.items(), *self._in_flight.items()) if each <= version)
            later = version + self._setting.staleness - self._version
            if waiting > left + later * self._setting.groups:
                return True
        return False

    def _part(self) -> int:
        if self._mode != "separate_async":
            return self._setting.groups
        return min(-(-self._setting.groups // self._setting.stream), self._setting.groups - self._taken)

    def _try_to_train(self) -> None:
        if self._busy or self._now < self._down_until or not self._due():
            return
        size = self._part()
        self._taken += size
        for version in sorted(self._ready):
            missing = size - len(self._training)
            self._training += self._ready[version][:missing]
            self._ready[version] = self._ready[version][missing:]
        self._busy = True
        self._stale = max(self._stale, *(self._version - group.version for group in self._training))
        if self._mode != "sync":
            self._request()
        if self._mode == "colocate_async" and self._setting.pauses:
            self._pause(paused=True)
        lengths, members = self._setting.lengths, self._setting.members
        # A shared prompt is computed once for its group.
        context = lengths.prompt + members * (lengths.turns - 1) * lengths.observation
        seconds = self._costs.train(sum(group.tokens + context for group in self._training))
        self._trainer_s += seconds
        self._at(self._now + seconds, self._trained_part)

    def _trained_part(self) -> None:
        self._trained_tokens += sum(group.tokens for group in self._training)
        self._training = []
        if self._taken < self._setting.groups:
            self._busy = False
            self._try_to_train()
            return
        self._at(self._now + self._setting.sync_s, self._synced)
        if self._mode != "sync":
            self._pause(paused=True)

    def _synced(self) -> None:
        self._version += 1
        self._taken = 0
        self._busy = False
        self._trained.append((self._now, self._trained_tokens))
        self._trained_tokens = 0.0
        if self._mode != "sync":
            self._pause(paused=False)
            for server in self._servers:
                # What is in flight computes its keys and values again.
                server.stall += self._costs.prefill(server.tokens + len(server.running) * server.level)
                self._schedule(server)
        self._request()
        self._try_to_train()

    # Failures.

    def _next_failure(self) -> None:
        hours = self._setting.hours_between_failures
        if hours is None:
            return
        shared = self._mode != "separate_async"
        devices = self._setting.rollout_gpus + (0 if shared else self._setting.train_gpus)
        self._at(self._now + self._random.expovariate(devices / (3600 * hours)), self._fail)

    def _fail(self) -> None:
        self._failures += 1
        shared = self._mode != "separate_async"
        sampling, training = self._setting.rollout_gpus, self._setting.train_gpus
        if shared or self._random.random() < sampling / (sampling + training):
            self._lose(self._random.choice(self._servers))
        if shared or self._random.random() < training / (sampling + training):
            # Since its last checkpoint it has trained what it trains again, from recorded groups.
            lost = len(self._trained) % self._setting.checkpoint_every
            self._again += lost
            mean = self._trainer_s / max(1, len(self._trained))
            self._down(self._setting.restart_s + lost * (mean + self._setting.sync_s))
        self._next_failure()

    def _down(self, seconds: float) -> None:
        """Hold the trainer up: what it does ends so much later."""
        until = max(self._down_until, self._now) + seconds
        self._down_until = until
        moved = {self._trained_part, self._synced}
        self._events = [
            (time + seconds if call in moved else time, number, call, arguments)
            for time, number, call, arguments in self._events
        ]
        heapq.heapify(self._events)
        self._at(until, self._try_to_train)

    def _lose(self, server: Server) -> None:
        if server.gone or len(self._here) == 1:
            return
        self._advance(server)
        server.gone = True
        self._here.remove(server)
        lost = [episode for _, _, episode in server.running] + list(server.waiting)
        server.running, server.tokens, server.stall = [], 0.0, 0.0
        server.waiting.clear()
        server.stamp += 1
        for episode in lost:
            self._place(episode, self._least(), new=episode.context)
        self._at(self._now + self._setting.restart_s, self._back, server)

    def _back(self, server: Server) -> None:
        self._advance(server)
        server.gone = False
        self._here.append(server)
        self._schedule(server)


def mean_step(setting: Setting, mode: Mode, steps: int, seeds: int = 1) -> Result:
    """Return the mean of results over seeds; counts are added up."""
    found = [Simulation(setting, mode, seed).run(steps) for seed in range(seeds)]
    return Result(
        fmean(each.step_s for each in found),
        fmean(each.tokens_per_s for each in found),
        fmean(each.trainer_busy for each in found),
        fmean(each.servers_busy for each in found),
        max(each.staleness for each in found),
        sum(each.failures for each in found),
        sum(each.trained_again for each in found),
        sum(each.events for each in found),
    )
