"""The ``replay:`` section: which finished groups a train step learns from, and who keeps them."""

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
    """Which groups are whole enough to be trained.

    Attributes:
        least: Fewest members without an error. At least 1: a group without members teaches nothing, whatever else.
        whole: Whether no member may have failed.
    """

    least: int = 1
    whole: bool = False

    def refuses(self, group: TrajectoryGroup) -> str | None:
        """Return why a finished group is not trained, or None where it may be."""
        failed = {each.episode_id for each in group.trajectories if each.error is not None}
        members = {each.episode_id for each in group.trajectories} - failed
        if len(members) < max(1, self.least) or (self.whole and (failed or group.failed)):
            return FAILED
        return None


_TAKES: dict[str, tuple[str, ...]] = {
    "on_policy": (),
    "bounded": ("max_staleness", "when_stale"),
    "fifo": (),
    "prioritised": ("max_staleness", "alpha"),
    "mixed": ("max_staleness", "stored_share", "max_uses", "keep_groups"),
}
"""The strategies that ship, and which keys each reads."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class FilterGroupsConfig(BaseModel):
    """Dynamic sampling: groups that teach nothing are dropped before a batch is chosen, and replaced.

    Attributes:
        metric: By which reward its members are compared: ``reward`` for the sum, or the name of one.
        max_refills: How many batches' worth of groups are asked for in the place of dropped ones, in one step. After
            that it trains on what there is.
    """

    model_config = ConfigDict(extra="forbid")

    metric: Annotated[str, Field(min_length=1)] = "reward"
    max_refills: PositiveInt = 10


class ReplayConfig(BaseModel):
    """Which finished groups a train step learns from, and who keeps them.

    Attributes:
        strategy: ``on_policy``, ``bounded``, ``fifo``, ``prioritised``, ``mixed``, or a class of your own as
            ``path/to/file.py:Class``, with its arguments as ``{name: ..., config: {...}}``. By default ``on_policy``
            in ``sync``, else ``bounded``.
        max_staleness: Most train steps between the oldest weights that sampled a token of a group and those that it
            trains. By default 1 with ``bounded``; ``prioritised`` and ``mixed`` then set no bound.
        when_stale: ``bounded``: ``wait``, a step waits for groups that would otherwise become too old; ``drop``, what
            comes too late is dropped.
        ahead: Batches that are asked for beyond the one that is trained next.
        alpha: ``prioritised``: 0 draws evenly; with more, groups that teach more are drawn more often.
        stored_share: ``mixed``: share of a batch that may be groups that were trained before.
        max_uses: ``mixed``: how many batches a group may be part of, its first included.
        keep_groups: ``mixed``: how many trained groups stay.
        filter_groups: Leave out groups whose members all earned the same, whatever the strategy; None leaves out none.
        buffer: A :class:`~turnwise.rollout.replay.buffer.LocalReplayBuffer` as ``path/to/file.py:Class``, with the
            arguments of its constructor as ``{name: ..., config: {...}}``.
        memory_mb: Memory for groups that wait, in units of 2**20 bytes: beyond it the oldest are read from disk again
            when they are trained. The batch that is being trained comes on top.
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

    @model_validator(mode="after")
    def _keys_are_read(self) -> Self:
        if self.strategy is None or self.strategy.name not in _TAKES:
            return self
        name = self.strategy.name
        takes = _TAKES[name]
        keys = {key for keys in _TAKES.values() for key in keys}
        # A configuration that was written down names every key: what is the default asks for nothing.
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
            raise ValueError(f"strategy.config is for a class of your own; give the keys of {name} beside strategy")
        return self


DEFAULT_STALENESS = 1


def strategy_name(config: ReplayConfig, *, sync: bool) -> str:
    """Return the name of the strategy, the default's where none is configured."""
    if config.strategy is not None:
        return config.strategy.name
    return "on_policy" if sync else "bounded"


def allowed_staleness(config: ReplayConfig, *, sync: bool) -> int | None:
    """Return the most train steps between what sampled a group and what it trains; None where nothing bounds them."""
    name = strategy_name(config, sync=sync)
    if name == "on_policy":
        return 0
    return DEFAULT_STALENESS if name == "bounded" and config.max_staleness is None else config.max_staleness


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a strategy may depend on besides its own keys.

    Attributes:
        groups: Groups of a train step.
        sync: Whether rollouts and training take turns: then batches are ordered so that a run can be repeated.
        seed: Of the run.
        members: Which groups are dropped because members failed.
        tail: How long a step waits for the last groups of its batch; None waits for all.
    """

    groups: int
    sync: bool
    seed: int = 0
    members: MemberRule = field(default_factory=MemberRule)
    tail: StragglerDeadline | None = None

    @property
    def order(self) -> Order:
        """How the groups of a batch are ordered."""
        return "key" if self.sync else "arrival"
