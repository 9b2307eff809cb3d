"""The ``replay:`` section, and what is made of it: strategy, buffer and staleness bound.

A group requested at weight version v may be trained in the steps up to ``v + 1 + bound``. The steps from the next
sampled one up to that have room for as many batches; other outstanding groups are older, and go first. While no more
are outstanding than there is room for, each is trained in time: ``wait`` drops nothing, ``drop`` only what takes longer
than the bound.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

from pydantic import Field, model_validator

from turnwise.config import Section, shorthand
from turnwise.errors import ConfigError, RegistryError, user_code
from turnwise.plugins import check_contract, find_class, load_class_from_fqn, registering
from turnwise.rollout.config import NamedConfig
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.strategies import Bounded, Fifo, Order, StragglerDeadline, Strategy

PositiveInt = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


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
        strategy: ``on_policy``, ``bounded``, ``fifo``, another registered name, or a custom
            class as ``path/to/file.py:Class``, with arguments as ``{name: ..., config: {...}}``. By default
            ``on_policy`` in ``sync``, else ``bounded``.
        max_staleness: Most train steps between the oldest weights that sampled a group and the weights it trains. By
            default 1 with ``bounded``.
        when_stale: ``bounded``: ``wait`` for groups that would become too old; ``drop`` those that arrive too late.
        ahead: Batches requested beyond the one trained next.
        filter_groups: Drops groups with equal rewards, under any strategy; None disables it.
        buffer: A custom :class:`~turnwise.rollout.replay.buffer.LocalReplayBuffer` as ``path/to/file.py:Class``, with
            arguments as ``{name: ..., config: {...}}``.
        memory_mb: Memory for waiting groups, in units of 2**20 bytes; beyond it the oldest are read from disk. The
            batch in training comes on top.
    """

    strategy: Annotated[NamedConfig | None, shorthand("name")] = None
    max_staleness: NotNegative | None = None
    when_stale: Literal["drop", "wait"] = "wait"
    ahead: NotNegative = 1
    buffer: Annotated[NamedConfig | None, shorthand("name")] = None
    filter_groups: FilterGroupsConfig | None = None
    memory_mb: PositiveInt = 1024

    @model_validator(mode="after")
    def _keys_are_read(self) -> Self:
        if self.strategy is None or self.strategy.name not in STRATEGIES:
            return self
        name = self.strategy.name
        _, takes = STRATEGIES[name]
        keys = {key for _, keys in STRATEGIES.values() for key in keys}
        # A saved configuration names every key: one with its default value counts as not given.
        values = self.model_dump(include=keys)
        changed = {key for key, value in values.items() if value != type(self).model_fields[key].default}
        if unread := sorted(changed - set(takes)):
            reads = f"reads {', '.join(takes)}" if takes else "reads none of these keys"
            readers = ", ".join(reader for reader, (_, keys) in STRATEGIES.items() if unread[0] in keys)
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
        min_members: Fewest members without an error; groups with fewer are dropped.
        tail: Straggler deadline of a batch; None waits for all.
    """

    groups: int
    sync: bool
    min_members: int = 1
    tail: StragglerDeadline | None = None

    @property
    def order(self) -> Order:
        """Order of the groups of a batch."""
        return "key" if self.sync else "arrival"


BUFFER_KEY = "replay.buffer"


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


def _bounded(config: ReplayConfig, facts: RunFacts) -> Strategy:
    bound = DEFAULT_STALENESS if config.max_staleness is None else config.max_staleness
    return Bounded(bound, config.when_stale, step_groups=facts.groups, order=facts.order)


STRATEGIES: dict[str, tuple[Maker, tuple[str, ...]]] = {
    "on_policy": (lambda *_: Bounded(0, "drop", order="key"), ()),
    "bounded": (_bounded, ("max_staleness", "when_stale")),
    "fifo": (lambda _, facts: Fifo(facts.order), ()),
}
"""The strategies that ship by name, and which keys each reads."""

CUSTOM_STRATEGIES: dict[str, type[Strategy]] = {}
"""Registered strategies by name; their arguments are ``replay.strategy.config``."""

S = TypeVar("S", bound=type[Strategy])


def register_strategy(name: str) -> Callable[[S], S]:
    """Register a strategy's class for ``replay.strategy``. Raises RegistryError."""
    if name in STRATEGIES:
        raise RegistryError(f"the strategy name {name!r} is that of one that ships: choose another name")
    check = partial(check_contract, Strategy, f"strategy {name!r}")
    return registering(name, CUSTOM_STRATEGIES, "strategy", check)


def make_strategy(config: ReplayConfig, facts: RunFacts) -> Strategy:
    """Make the configured strategy."""
    name = strategy_name(config, sync=facts.sync)
    if name in STRATEGIES:
        return STRATEGIES[name][0](config, facts)
    strategy_class = find_class(name, dict.fromkeys(STRATEGIES, Strategy) | CUSTOM_STRATEGIES, STRATEGY_KEY)
    if not issubclass(strategy_class, Strategy):
        raise ConfigError(
            f"{STRATEGY_KEY} {name!r} is not a strategy: subclass turnwise.rollout.replay.strategies.Strategy"
        )
    arguments = {} if config.strategy is None else config.strategy.config
    with user_code(ConfigError, f"{STRATEGY_KEY} {name!r} cannot be made with its config {arguments}:"):
        return strategy_class(**arguments)


def check_replay(config: ReplayConfig, facts: RunFacts) -> None:
    """Check strategy and buffer.

    Raises:
        ConfigError: One of them cannot be used.
    """
    make_strategy(config, facts)
    if config.buffer is not None:
        custom_buffer_class(config.buffer.name)


def make_buffer(config: ReplayConfig, facts: RunFacts, journal: Journal | None = None) -> LocalReplayBuffer:
    """Make the buffer of a run, backed by its journal."""
    arguments: dict[str, Any] = {
        "strategy": make_strategy(config, facts),
        "journal": journal,
        "min_members": facts.min_members,
        "filter_metric": None if config.filter_groups is None else config.filter_groups.metric,
        "tail": facts.tail,
        "memory_mb": config.memory_mb,
    }
    if config.buffer is None:
        return LocalReplayBuffer(**arguments)
    name = config.buffer.name
    buffer_class = custom_buffer_class(name)
    try:
        return buffer_class(**arguments, **config.buffer.config)
    except TypeError as error:
        raise ConfigError(
            f"{BUFFER_KEY} {name!r} cannot be made: {error}. Its __init__ takes its own arguments and **inherited, "
            "which it passes on: super().__init__(**inherited)"
        ) from error


def make_admission(config: ReplayConfig, facts: RunFacts) -> StalenessBound:
    """Return the staleness bound of the configured strategy."""
    return StalenessBound(facts.groups, config.ahead, allowed_staleness(config, sync=facts.sync))
