"""From the ``replay:`` section to what it stands for.

A group that is asked for now has tokens of the servers' weights, version v, and may be trained in the steps up to
``v + 1 + bound``. Between the step that is sampled next and that one there is room for so many batches; whatever else
waits or flies is older, and goes first. So as long as no more groups are outstanding than there is room for, each can
be trained in time: with ``wait`` nothing is dropped, and with ``drop`` only what takes longer than the bound.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from turnwise.errors import ConfigError
from turnwise.plugins import load_class_from_fqn
from turnwise.rollout.core import ReplayBuffer
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.rollout.replay.config import DEFAULT_STALENESS, ReplayConfig, RunFacts, allowed_staleness, strategy_name
from turnwise.rollout.replay.custom import CustomReplayBuffer, custom_buffer_class
from turnwise.rollout.replay.strategies import (
    Arrival,
    Bounded,
    Filtered,
    Mixed,
    OnPolicy,
    Prioritized,
    Strategy,
    stored_groups,
)


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """How far rollouts may run ahead of training.

    Attributes:
        groups: Fresh groups that a train step takes.
        ahead: Batches that are asked for beyond the one that is trained next.
        bound: Most train steps that a group's weights may be old; None sets none.
    """

    groups: int
    ahead: int = 1
    bound: int | None = None

    def room(self, *, outstanding: int, version: int, step: int, taken: int = 0) -> int:
        """Return how many more groups may be asked for.

        Args:
            outstanding: Groups that were asked for and are neither handed out to a step nor dropped.
            version: The weight version of the servers.
            step: The step whose batch is sampled next: ``version + 1`` between steps, ``version + 2`` while the batch
                of step ``version + 1`` is trained.
            taken: Groups that were handed out for that step before.
        """
        later = self.ahead if self.bound is None else min(self.ahead, version + 1 + self.bound - step)
        return max(0, (later + 1) * self.groups - taken - outstanding)


KEY = "replay.strategy"


Maker: TypeAlias = Callable[[ReplayConfig, RunFacts], Strategy]


def _on_policy(config: ReplayConfig, facts: RunFacts) -> Strategy:
    del config, facts
    return OnPolicy()


def _bounded(config: ReplayConfig, facts: RunFacts) -> Strategy:
    bound = DEFAULT_STALENESS if config.max_staleness is None else config.max_staleness
    return Bounded(bound, config.when_stale, step_groups=facts.groups, order=facts.order)


def _fifo(config: ReplayConfig, facts: RunFacts) -> Strategy:
    del config
    return Arrival(facts.order)


def _prioritised(config: ReplayConfig, facts: RunFacts) -> Strategy:
    return Prioritized(config.alpha, config.max_staleness, seed=facts.seed)


def _mixed(config: ReplayConfig, facts: RunFacts) -> Strategy:
    bound, seed = config.max_staleness, facts.seed
    return Mixed(config.stored_share, config.max_uses, config.keep_groups, bound, seed=seed)


STRATEGIES: dict[str, Maker] = {
    "on_policy": _on_policy,
    "bounded": _bounded,
    "fifo": _fifo,
    "prioritised": _prioritised,
    "mixed": _mixed,
}


def allowed_uses(config: ReplayConfig, facts: RunFacts) -> int:
    """Return how many steps may train a group. Raises ConfigError as :func:`make_strategy`."""
    strategy = make_strategy(config, facts)
    return strategy.max_uses if strategy.keep_groups else 1


def make_strategy(config: ReplayConfig, facts: RunFacts) -> Strategy:
    """Make the strategy that the configuration names, and what is filtered before it.

    Raises:
        ConfigError: It is not there, or cannot be made.
    """
    strategy = _named_strategy(config, facts)
    return strategy if config.filter_groups is None else Filtered(strategy, config.filter_groups.metric)


def _named_strategy(config: ReplayConfig, facts: RunFacts) -> Strategy:
    name = strategy_name(config, sync=facts.sync)
    if name in STRATEGIES:
        return STRATEGIES[name](config, facts)
    if ":" not in name and "." not in name:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"{KEY} is {name!r}; {hint}known: {', '.join(STRATEGIES)}, or a class of your own as path/to/file.py:Class"
        )
    found = load_class_from_fqn(name, KEY)
    if not issubclass(found, Strategy):
        raise ConfigError(f"{KEY} {name!r} is no strategy: subclass turnwise.rollout.replay.strategies.Strategy")
    arguments = {} if config.strategy is None else config.strategy.config
    try:
        return found(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KEY} {name!r} cannot be made with its config {arguments}: {error}") from error


def check_replay(config: ReplayConfig, facts: RunFacts) -> None:
    """See that strategy and buffer are there.

    Raises:
        ConfigError: As :func:`make_buffer`.
    """
    make_strategy(config, facts)
    if config.buffer is not None:
        custom_buffer_class(config.buffer.name)


def make_buffer(config: ReplayConfig, facts: RunFacts, journal: Journal | None = None) -> ReplayBuffer:
    """Make the buffer of a run, which notes in its journal what it holds and hands out.

    Raises:
        ConfigError: As :func:`make_strategy`, and where a buffer of one's own cannot be made.
    """
    strategy = make_strategy(config, facts)
    kept: dict[str, Any] = {"members": facts.members, "tail": facts.tail, "memory_mb": config.memory_mb}
    if config.buffer is not None:
        return CustomReplayBuffer.make(config.buffer, strategy, journal=journal, **kept)
    return LocalReplayBuffer(strategy, journal, **kept)


def make_admission(config: ReplayConfig, facts: RunFacts) -> StalenessBound:
    """Return how far rollouts may run ahead under the configured strategy."""
    mixed = strategy_name(config, sync=facts.sync) == "mixed"
    stored = stored_groups(config.stored_share, facts.groups) if mixed else 0
    return StalenessBound(facts.groups - stored, config.ahead, allowed_staleness(config, sync=facts.sync))
