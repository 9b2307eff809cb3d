"""The ``replay:`` section, and what is made of it: strategy, buffer and staleness bound.

A group requested at weight version v may be trained in the steps up to ``v + 1 + bound``. The steps from the next
sampled one up to that have room for as many batches; other outstanding groups are older, and go first. While no more
are outstanding than there is room for, each is trained in time: ``wait`` drops nothing, ``drop`` only what takes longer
than the bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import Field, model_validator

from turnwise.config import Section, shorthand
from turnwise.errors import ConfigError, RegistryError, TrainError, TurnwiseError, shown
from turnwise.plugins import load_class_from_fqn, register_entry
from turnwise.rollout.config import NamedConfig
from turnwise.rollout.core import BatchRef, ForwardingReplayBuffer, ReplayBuffer
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.group_store import PayloadStore, TransferQueueConfig
from turnwise.rollout.replay.strategies import (
    Bounded,
    Fifo,
    Filtered,
    MemberRule,
    Mixed,
    Order,
    Prioritized,
    StragglerDeadline,
    Strategy,
    stored_groups,
)

PositiveInt = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


_TAKES: dict[str, tuple[str, ...]] = {
    "on_policy": (),
    "bounded": ("max_staleness", "when_stale"),
    "fifo": (),
    "prioritized": ("max_staleness", "alpha"),
    "mixed": ("max_staleness", "stored_share", "max_uses", "keep_groups"),
}
"""The strategies that ship, and which keys each reads."""


class FilterGroupsConfig(Section):
    """Dynamic sampling: groups without a learning signal are dropped and replaced before a batch is chosen.

    Attributes:
        metric: Reward by which members are compared: ``reward`` for the sum, or the name of one.
        max_refills: Batches' worth of replacements in one step; after that it trains on what there is.
    """

    metric: Annotated[str, Field(min_length=1)] = "reward"
    max_refills: PositiveInt = 10


class ReplayConfig(Section):
    """Which finished groups a train step learns from, and where they are kept.

    Attributes:
        strategy: ``on_policy``, ``bounded``, ``fifo``, ``prioritized``, ``mixed``, another registered name, or a custom
            class as ``path/to/file.py:Class``, with arguments as ``{name: ..., config: {...}}``. By default
            ``on_policy`` in ``sync``, else ``bounded``.
        max_staleness: Most train steps between the oldest weights that sampled a group and the weights it trains. By
            default 1 with ``bounded``; unbounded with ``prioritized`` and ``mixed``.
        when_stale: ``bounded``: ``wait`` for groups that would become too old; ``drop`` those that arrive too late.
        ahead: Batches requested beyond the one trained next.
        alpha: ``prioritized``: exponent; 0 draws uniformly.
        stored_share: ``mixed``: share of a batch that may be groups trained before.
        max_uses: ``mixed``: most batches of a group, its first included.
        keep_groups: ``mixed``: most trained groups kept.
        filter_groups: Drops groups with equal rewards, under any strategy; None disables it.
        buffer: A custom :class:`~turnwise.rollout.replay.buffer.LocalReplayBuffer` as ``path/to/file.py:Class``, with
            arguments as ``{name: ..., config: {...}}``.
        memory_mb: Memory for waiting groups, in units of 2**20 bytes; beyond it the oldest are read from disk. The
            batch in training comes on top.
        backend: Where finished groups wait: ``local`` is the memory of the trainer, ``transfer_queue`` the storage
            processes of a TransferQueue. The journal is the same.
        transfer_queue: Settings of the latter.
    """

    strategy: Annotated[NamedConfig | None, shorthand("name")] = None
    max_staleness: NotNegative | None = None
    when_stale: Literal["drop", "wait"] = "wait"
    ahead: NotNegative = 1
    alpha: Annotated[float, Field(ge=0)] = 0.6
    stored_share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    max_uses: PositiveInt = 2
    keep_groups: PositiveInt = 256
    buffer: Annotated[NamedConfig | None, shorthand("name")] = None
    filter_groups: FilterGroupsConfig | None = None
    memory_mb: PositiveInt = 1024
    backend: Literal["local", "transfer_queue"] = "local"
    transfer_queue: TransferQueueConfig = TransferQueueConfig()

    @model_validator(mode="after")
    def _queue_is_used(self) -> Self:
        if self.backend == "local" and self.transfer_queue != TransferQueueConfig():
            raise ValueError(
                "transfer_queue is given, but backend is 'local': set replay.backend to 'transfer_queue', or remove it"
            )
        return self

    @model_validator(mode="after")
    def _keys_are_read(self) -> Self:
        if self.strategy is None or self.strategy.name not in _TAKES:
            return self
        name = self.strategy.name
        takes = _TAKES[name]
        keys = {key for keys in _TAKES.values() for key in keys}
        # A saved configuration names every key: one with its default value counts as not given.
        values = self.model_dump(include=keys)
        changed = {key for key, value in values.items() if value != type(self).model_fields[key].default}
        if unread := sorted(changed - set(takes)):
            reads = f"reads {', '.join(takes)}" if takes else "reads none of these keys"
            readers = ", ".join(reader for reader, keys in _TAKES.items() if unread[0] in keys)
            raise ValueError(
                f"{unread[0]} is given, but the strategy {name} {reads}: remove it, or choose a strategy that reads it "
                f"({readers})"
            )
        if self.strategy.config:
            raise ValueError(f"strategy.config is for custom strategies; give the keys of {name} beside strategy")
        return self


DEFAULT_STALENESS = 1


def strategy_name(config: ReplayConfig, *, sync: bool) -> str:
    """Return the name of the configured or default strategy."""
    if config.strategy is not None:
        return config.strategy.name
    return "on_policy" if sync else "bounded"


def allowed_staleness(config: ReplayConfig, *, sync: bool) -> int | None:
    """Return the maximum staleness in train steps; None where unbounded."""
    name = strategy_name(config, sync=sync)
    if name == "on_policy":
        return 0
    return DEFAULT_STALENESS if name == "bounded" and config.max_staleness is None else config.max_staleness


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run that strategies depend on.

    Attributes:
        sync: Whether rollouts and training alternate: batches are then ordered reproducibly.
        members: Which groups are dropped because members failed.
        tail: Straggler deadline of a batch; None waits for all.
    """

    groups: int
    sync: bool
    seed: int = 0
    members: MemberRule = field(default_factory=MemberRule)
    tail: StragglerDeadline | None = None

    @property
    def order(self) -> Order:
        """Order of the groups of a batch."""
        return "key" if self.sync else "arrival"


BUFFER_KEY = "replay.buffer"
_EXAMPLE = "return self.take(ids, global_steps), which is a batch and its metrics"


def custom_buffer_class(name: str) -> type[LocalReplayBuffer]:
    """Load the class of ``replay.buffer``."""
    buffer_class = load_class_from_fqn(name, BUFFER_KEY)
    if not issubclass(buffer_class, LocalReplayBuffer):
        raise ConfigError(
            f"{BUFFER_KEY} {name!r} is not a replay buffer: subclass turnwise.LocalReplayBuffer, override sample"
        )
    expected = ["global_steps", "partition_id", "batch_size"]
    has = list(inspect.signature(buffer_class.sample).parameters)[1:]
    if has[:3] != expected:
        raise ConfigError(
            f"{BUFFER_KEY} {name!r}: sample takes ({', '.join(has)}); it is called with ({', '.join(expected)}) by "
            "position"
        )
    return buffer_class


class CustomReplayBuffer(ForwardingReplayBuffer):
    """Calls a custom ``sample`` and validates its result.

    A plain ``def sample`` runs in a thread, where it may block; an ``async def`` on the event loop. While it waits for
    groups to train, discarded ones are replaced.
    """

    _inner: LocalReplayBuffer

    def __init__(self, name: str, inner: LocalReplayBuffer, strategy: Strategy) -> None:
        super().__init__(inner)
        self._name = name
        self._strategy = strategy
        self._refill: Callable[[int], bool] | None = None

    @classmethod
    def make(cls, named: NamedConfig, strategy: Strategy, **inherited: Any) -> CustomReplayBuffer:
        """Make the configured buffer.

        Args:
            named: Its reference and arguments.
            strategy: Strategy of the inherited ``sample``.
            inherited: Further arguments of every :class:`LocalReplayBuffer`.
        """
        buffer_class = custom_buffer_class(named.name)
        try:
            return cls(named.name, buffer_class(strategy=strategy, **inherited, **named.config), strategy)
        except TypeError as error:
            raise ConfigError(
                f"{BUFFER_KEY} {named.name!r} cannot be made: {error}. Its __init__ takes its own arguments and "
                "**inherited, which it passes on: super().__init__(**inherited)"
            ) from error

    async def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[BatchRef, dict[str, float]]:
        """Wait for the groups that the custom ``sample`` chooses, and hand them out.

        Raises:
            TurnwiseError: No further group will come, or ``sample`` raised it.
            TrainError: ``sample`` raised something else, or returned no batch with metrics.
        """
        started = time.monotonic()
        self._inner.refills = False
        try:
            async with self._refilled(global_steps, partition_id, batch_size):
                result = await self._asked(global_steps, partition_id, batch_size)
        except TurnwiseError:
            raise
        except Exception as error:  # a user's class: what it raises is named as its own
            raise TrainError(
                f"{self._name}.sample raised {type(error).__name__} at step {global_steps}: {error}"
            ) from error
        ref, metrics = self._checked(result)
        return ref, {"replay/wait_s": time.monotonic() - started, **metrics}

    async def _asked(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        sample: Callable[..., Any] = self._inner.sample
        if inspect.iscoroutinefunction(sample):
            return await sample(global_steps, partition_id, batch_size)
        result = await self._inner.in_thread(lambda: sample(global_steps, partition_id, batch_size))
        return await result if inspect.isawaitable(result) else result

    def _checked(self, result: Any) -> tuple[BatchRef, dict[str, float]]:
        match result:
            case (BatchRef() as ref, Mapping() as metrics):
                pass
            case _:
                raise TrainError(f"{self._name}.sample returned {shown(result)}: {_EXAMPLE}")
        for key, value in metrics.items():
            if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TrainError(
                    f"{self._name}.sample returned the metric {key!r}: {shown(value)}; metrics are numbers"
                )
        return ref, {key: float(value) for key, value in metrics.items()}

    @contextlib.asynccontextmanager
    async def _refilled(self, step: int, partition_id: str, batch_size: int) -> AsyncIterator[None]:
        """Request replacements for groups that can no longer complete a batch, while the block runs."""
        if partition_id != "train" or self._refill is None:
            yield
            return
        feeding = asyncio.create_task(self._feed(self._refill, step, batch_size))
        feeding.add_done_callback(self._fed)
        try:
            yield
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)

    async def _feed(self, refill: Callable[[int], bool], step: int, batch_size: int) -> None:
        inner = self._inner
        while True:
            missing = self._strategy.lacks(inner.ready("train"), inner.in_flight("train"), step, batch_size)
            # The inherited sample requests refills itself, and takes a smaller batch when none are left.
            if missing > 0 and not inner.refills and not refill(missing):
                inner.fail(
                    TrainError(f"step {step}: groups were discarded, and no others were requested in their place")
                )
                return
            await inner.changed()

    def _fed(self, feeding: asyncio.Task[None]) -> None:
        """Fail the wait for groups that are no longer requested."""
        if not feeding.cancelled() and (error := feeding.exception()) is not None:
            self._inner.fail(error)

    def refill_by(self, refill: Callable[[int], bool]) -> None:
        """Set the callback that requests further groups."""
        self._refill = refill
        super().refill_by(refill)


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """How far rollouts may run ahead of training.

    Attributes:
        groups: Fresh groups of a train step.
        ahead: Batches requested beyond the one trained next.
        bound: Most train steps of staleness; None is unbounded.
    """

    groups: int
    ahead: int = 1
    bound: int | None = None

    def room(self, *, outstanding: int, version: int, step: int, taken: int = 0) -> int:
        """Return how many more groups may be requested.

        Args:
            outstanding: Requested groups neither handed out nor dropped.
            version: The weight version of the servers.
            step: The step whose batch is sampled next: ``version + 1`` between steps, ``version + 2`` while the batch
                of step ``version + 1`` is trained.
            taken: Groups handed out for that step before.
        """
        later = self.ahead if self.bound is None else min(self.ahead, version + 1 + self.bound - step)
        return max(0, (later + 1) * self.groups - taken - outstanding)


STRATEGY_KEY = "replay.strategy"


Maker: TypeAlias = Callable[[ReplayConfig, RunFacts], Strategy]


def _on_policy(config: ReplayConfig, facts: RunFacts) -> Strategy:
    del config, facts
    return Bounded(0, "drop", order="key")


def _bounded(config: ReplayConfig, facts: RunFacts) -> Strategy:
    bound = DEFAULT_STALENESS if config.max_staleness is None else config.max_staleness
    return Bounded(bound, config.when_stale, step_groups=facts.groups, order=facts.order)


def _fifo(config: ReplayConfig, facts: RunFacts) -> Strategy:
    del config
    return Fifo(facts.order)


def _prioritized(config: ReplayConfig, facts: RunFacts) -> Strategy:
    return Prioritized(config.alpha, config.max_staleness, seed=facts.seed)


def _mixed(config: ReplayConfig, facts: RunFacts) -> Strategy:
    bound, seed = config.max_staleness, facts.seed
    return Mixed(config.stored_share, config.max_uses, config.keep_groups, bound, seed=seed)


STRATEGIES: dict[str, Maker] = {
    "on_policy": _on_policy,
    "bounded": _bounded,
    "fifo": _fifo,
    "prioritized": _prioritized,
    "mixed": _mixed,
}
"""The strategies that ship, by name."""

CUSTOM_STRATEGIES: dict[str, type[Strategy]] = {}
"""Registered strategies by name; their arguments are ``replay.strategy.config``."""

S = TypeVar("S", bound=type[Strategy])


def register_strategy(name: str) -> Callable[[S], S]:
    """Register a strategy's class for ``replay.strategy``. Raises RegistryError."""

    def register(cls: S) -> S:
        if name in STRATEGIES:
            raise RegistryError(f"the strategy name {name!r} is that of one that ships: choose another name")
        if not issubclass(cls, Strategy) or inspect.isabstract(cls):
            raise RegistryError(
                f"strategy {name!r} is {cls!r}: subclass turnwise.rollout.replay.strategies.Strategy, define choose"
            )
        register_entry(name, cls, CUSTOM_STRATEGIES, "strategy")
        return cls

    return register


def allowed_uses(config: ReplayConfig, facts: RunFacts) -> int:
    """Return how many steps may train a group."""
    strategy = make_strategy(config, facts)
    return strategy.max_uses if strategy.keep_groups else 1


def make_strategy(config: ReplayConfig, facts: RunFacts) -> Strategy:
    """Make the configured strategy, behind its filter."""
    strategy = _named_strategy(config, facts)
    return strategy if config.filter_groups is None else Filtered(strategy, config.filter_groups.metric)


def _named_strategy(config: ReplayConfig, facts: RunFacts) -> Strategy:
    name = strategy_name(config, sync=facts.sync)
    if name in STRATEGIES:
        return STRATEGIES[name](config, facts)
    if name not in CUSTOM_STRATEGIES and ":" not in name and "." not in name:
        names = [*STRATEGIES, *CUSTOM_STRATEGIES]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"{STRATEGY_KEY} is {name!r}; {hint}known: {', '.join(names)}, or a custom class as path/to/file.py:Class"
        )
    strategy_class: type[Any] = CUSTOM_STRATEGIES.get(name) or load_class_from_fqn(name, STRATEGY_KEY)
    if not issubclass(strategy_class, Strategy):
        raise ConfigError(
            f"{STRATEGY_KEY} {name!r} is not a strategy: subclass turnwise.rollout.replay.strategies.Strategy"
        )
    arguments = {} if config.strategy is None else config.strategy.config
    try:
        return strategy_class(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{STRATEGY_KEY} {name!r} cannot be made with its config {arguments}: {error}") from error


def check_replay(config: ReplayConfig, facts: RunFacts) -> None:
    """Check strategy and buffer.

    Raises:
        ConfigError: One of them cannot be used.
        MissingExtraError: The backend's package is not installed.
    """
    make_strategy(config, facts)
    make_payloads(config)
    if config.buffer is not None:
        custom_buffer_class(config.buffer.name)


def make_payloads(config: ReplayConfig) -> PayloadStore | None:
    """Return the store of the configured backend, which is not started yet; None for this process's memory.

    Raises:
        MissingExtraError: Its package is not installed.
    """
    if config.backend == "local":
        return None
    from turnwise.rollout.replay.transfer_queue import TransferQueuePayloads

    return TransferQueuePayloads(config.transfer_queue)


def make_buffer(config: ReplayConfig, facts: RunFacts, journal: Journal | None = None) -> ReplayBuffer:
    """Make the buffer of a run, backed by its journal."""
    strategy = make_strategy(config, facts)
    arguments: dict[str, Any] = {
        "members": facts.members,
        "tail": facts.tail,
        "memory_mb": config.memory_mb,
        "payloads": make_payloads(config),
    }
    if config.buffer is not None:
        return CustomReplayBuffer.make(config.buffer, strategy, journal=journal, **arguments)
    return LocalReplayBuffer(strategy, journal, **arguments)


def make_admission(config: ReplayConfig, facts: RunFacts) -> StalenessBound:
    """Return the staleness bound of the configured strategy."""
    mixed = strategy_name(config, sync=facts.sync) == "mixed"
    stored = stored_groups(config.stored_share, facts.groups) if mixed else 0
    return StalenessBound(facts.groups - stored, config.ahead, allowed_staleness(config, sync=facts.sync))
