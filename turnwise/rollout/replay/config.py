"""The ``replay:`` section: strategy, staleness, reuse and memory of the replay buffer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from turnwise.rollout.config import NamedConfig
from turnwise.rollout.replay.strategies import Order, StragglerDeadline
from turnwise.trajectory import TrajectoryGroup

PositiveInt = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


FAILED = "failed"
"""Why such a group is dropped, as it is counted."""


@dataclass(frozen=True, slots=True)
class MemberRule:
    """Which groups are complete enough to train.

    Attributes:
        least: Fewest members without an error, at least 1.
        whole: Whether every member must have succeeded.
    """

    least: int = 1
    whole: bool = False

    def refuses(self, group: TrajectoryGroup) -> str | None:
        """Return why a group is not trained, or None."""
        failed = {each.episode_id for each in group.trajectories if each.error is not None}
        members = {each.episode_id for each in group.trajectories} - failed
        if len(members) < max(1, self.least) or (self.whole and (failed or group.failed)):
            return FAILED
        return None


_TAKES: dict[str, tuple[str, ...]] = {
    "on_policy": (),
    "bounded": ("max_staleness", "when_stale"),
    "fifo": (),
    "prioritized": ("max_staleness", "alpha"),
    "mixed": ("max_staleness", "stored_share", "max_uses", "keep_groups"),
}
"""The strategies that ship, and which keys each reads."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class FilterGroupsConfig(BaseModel):
    """Dynamic sampling: groups without a learning signal are dropped and replaced before a batch is chosen.

    Attributes:
        metric: Reward by which members are compared: ``reward`` for the sum, or the name of one.
        max_refills: Batches' worth of replacements in one step; after that it trains on what there is.
    """

    model_config = ConfigDict(extra="forbid")

    metric: Annotated[str, Field(min_length=1)] = "reward"
    max_refills: PositiveInt = 10


class TransferQueueConfig(BaseModel):
    """A TransferQueue that holds finished groups (``backend: transfer_queue``).

    Attributes:
        units: Storage processes, each on one CPU of the Ray cluster; one more is the queue's controller.
        address: Ray cluster as ``host:port``, or ``local`` for one on this machine that ends with the run. By default
            the one that the process is connected to, else that of ``RAY_ADDRESS``, else ``local``.
        timeout: Seconds after which a call without an answer counts as a lost store; also the wait for free CPUs.
    """

    model_config = ConfigDict(extra="forbid")

    units: PositiveInt = 2
    address: Annotated[str, Field(min_length=1)] | None = None
    timeout: Annotated[float, Field(gt=0)] = 60.0


class ReplayConfig(BaseModel):
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

    model_config = ConfigDict(extra="forbid")

    strategy: Annotated[NamedConfig | None, BeforeValidator(_named)] = None
    max_staleness: NotNegative | None = None
    when_stale: Literal["drop", "wait"] = "wait"
    ahead: NotNegative = 1
    alpha: Annotated[float, Field(ge=0)] = 0.6
    stored_share: Annotated[float, Field(ge=0, lt=1)] = 0.5
    max_uses: PositiveInt = 2
    keep_groups: PositiveInt = 256
    buffer: Annotated[NamedConfig | None, BeforeValidator(_named)] = None
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
        whole = self.model_dump(include=keys)
        given = {key for key, value in whole.items() if value != type(self).model_fields[key].default}
        if unread := sorted(given - set(takes)):
            reads = f"reads {', '.join(takes)}" if takes else "reads none of these keys"
            readers = ", ".join(each for each, keys in _TAKES.items() if unread[0] in keys)
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
