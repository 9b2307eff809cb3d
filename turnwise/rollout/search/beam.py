"""Beam search over the turns of an episode: after each turn the ways that score best go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from turnwise.agents.core import Episode
from turnwise.agents.forks import BranchPoint
from turnwise.errors import InferenceError
from turnwise.rollout.growth import Grown
from turnwise.types import StopReason


@dataclass(slots=True, eq=False)
class Way:
    """A way through an episode, which waits before each of its model calls until it may go on.

    Attributes:
        number: In the order in which ways began.
        parent: The way that it was forked from; None for the first.
        point: Where it was forked.
        episode: Its episode, once it has begun.
        stop_reason: Why it ended, once it has.
        error: The failure that ended it.
        at: The state before the model call at which it waits; None where it does not.
        score: Of the way as far as it went.
        rated: Whether that is its end.
    """

    number: int
    parent: Way | None = None
    point: BranchPoint | None = None
    episode: Episode | None = None
    stop_reason: StopReason = StopReason.COMPLETED
    error: Exception | None = None
    at: BranchPoint | None = None
    score: float | None = None
    rated: bool = False
    _task: asyncio.Task[None] | None = None
    _may_go: asyncio.Event = field(default_factory=asyncio.Event)
    _waits: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def origin(self) -> tuple[Episode, BranchPoint] | None:
        """The episode that it was forked from, and where; None for the first way."""
        if self.parent is None or self.parent.episode is None or self.point is None:
            return None
        return self.parent.episode, self.point

    @property
    def over(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self._task is not None and self._task.done()

    @property
    def complete(self) -> bool:
        """Whether it went to its end and was rewarded."""
        return self.over and self.error is None and self.stop_reason is not StopReason.PRUNED

    async def wait(self, point: BranchPoint) -> None:
        """Wait before a model call until the way may go on; the first call of several at a time is where it waits."""
        if self.at is None:
            self.at = point
            self._may_go.clear()
            self._waits.set()
        await self._may_go.wait()

    def begin(self, play: PlayWay) -> None:
        """Begin to play it."""
        self._task = asyncio.create_task(play(self))

    def go_on(self) -> None:
        """Let it make the model call at which it waits."""
        self.at = None
        self._waits.clear()
        self._may_go.set()

    async def stops(self) -> None:
        """Wait until it waits, or is over. Raises what playing it raises."""
        assert self._task is not None
        waiting = asyncio.create_task(self._waits.wait())
        try:
            await asyncio.wait({self._task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done():
            self._task.result()

    async def prune(self) -> None:
        """End it where it waits."""
        self.stop_reason, self.at = StopReason.PRUNED, None
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel what plays it, and wait for that."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})


PlayWay: TypeAlias = Callable[[Way], Coroutine[Any, Any, None]]
"""Plays a way to its end, and notes episode, stop reason and failure in it; a pruned one returns, too."""
ScoreWays: TypeAlias = Callable[[Sequence[Grown], Mapping[int, bool]], Awaitable[list[float]]]
"""Scores some ways of a tree, given by their indices, with whether each has ended."""


async def beam(width: int, branches: int, play: PlayWay, score: ScoreWays) -> list[Way]:
    """Search an episode turn by turn.

    Each way that is kept is continued ``branches`` times from its next model call on; of all continuations, and the
    ways that have ended, the ``width`` with the highest scores are kept, until none of them can go on.

    Args:
        width: Ways that are kept.
        branches: Continuations of each, at each turn.
        play: Plays one way.
        score: Scores ways.

    Returns:
        All ways in the order in which they began, those that were pruned or failed included.

    Raises:
        InferenceError: A way met one: the whole search is to be repeated.
        ScorerError: A way got no score.
    """
    ways = [Way(0)]
    ways[0].begin(play)
    try:
        await _all_stop(ways)
        kept = ways[:1]
        while going := [way for way in kept if way.at is not None and not way.over]:
            new = [
                Way(len(ways) + index * (branches - 1) + offset, way, way.at)
                for index, way in enumerate(going)
                for offset in range(branches - 1)
            ]
            ways += new
            for way in new:
                way.begin(play)
            for way in going:
                way.go_on()
            await _all_stop([*going, *new])
            candidates = [way for way in dict.fromkeys([*kept, *new]) if way.error is None]
            await _rate(ways, [way for way in candidates if way in going or way in new], score)
            candidates.sort(key=lambda way: (-(way.score or 0.0), way.number))
            kept = candidates[:width]
            await asyncio.gather(*(way.prune() for way in candidates[width:] if not way.over))
        # Such as one that could not be forked anywhere, or whose time was over while it waited.
        await _rate(ways, [way for way in ways if way.complete and not way.rated], score)
    finally:
        await asyncio.gather(*(way.cancel() for way in ways if not way.over), return_exceptions=True)
    return ways


async def _all_stop(ways: Sequence[Way]) -> None:
    await asyncio.gather(*(way.stops() for way in ways))
    failed = next((way.error for way in ways if isinstance(way.error, InferenceError)), None)
    if failed is not None:
        raise failed


async def _rate(ways: Sequence[Way], rated: Sequence[Way], score: ScoreWays) -> None:
    tree, numbers = tree_of(ways)
    ended = [way.over for way in rated]
    found = await score(tree, {numbers[way]: over for way, over in zip(rated, ended, strict=True)})
    for way, value, over in zip(rated, found, ended, strict=True):
        way.score, way.rated = value, over


def settled(ways: Sequence[Way]) -> tuple[list[Grown], list[float | None], list[int]]:
    """Return the ways of a search that is over as a tree, their scores, and the indices of those that are complete."""
    tree, numbers = tree_of(ways)
    for grown in tree:
        grown.record.settle()
    return tree, [way.score for way in numbers], [number for way, number in numbers.items() if way.complete]


def tree_of(ways: Sequence[Way]) -> tuple[list[Grown], dict[Way, int]]:
    """Return the ways whose episodes have begun as branches of a tree, and the number of each there."""
    begun = [way for way in ways if way.episode is not None]
    numbers = {way: number for number, way in enumerate(begun)}
    tree = []
    for way in begun:
        assert way.episode is not None
        parent = -1 if way.parent is None else numbers[way.parent]
        tree.append(Grown(way.episode, way.stop_reason, parent, way.point))
    return tree, numbers
