"""Checks of forks: a fork answers as its original would, and neither sees what the other does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from turnwise.envs.checker.context import CheckContext, Played
from turnwise.envs.checker.repeats import actions_of, alone, compare, seen_of
from turnwise.envs.core import Env
from turnwise.envs.forking import SHARED
from turnwise.envs.wrappers import Wrapper
from turnwise.errors import EnvError
from turnwise.types import Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_REMEDY: Final = "keep state in attributes that are copied, write fork(), or set forks = None"
_MUTABLE: Final = (list, dict, set, bytearray)


async def fork(exam: CheckContext) -> None:
    """Check forks in the middle of the first episode.

    The fork goes on with the original's messages and is answered equally; then an original, whose fork went on with
    other messages, is answered as if it had none. An environment that says that it can fork and raises is a warning:
    nothing else needs forks.
    """
    if exam.single or not exam.first.supports_fork:
        return
    expected = await alone(exam)
    try:
        await _same(exam, expected)
        await _apart(exam, expected)
    except EnvError as error:
        exam.find("fork", str(error), severity="warning")


async def _same(exam: CheckContext, expected: list[Any]) -> None:
    async with exam.episode(*exam.episodes[0]) as played:
        actions = actions_of(played)
        seen = await _play(exam, played, actions[: _middle(expected)])
        async with _fork(exam, played) as other:
            for name in shared(played.env, other.env):
                exam.find("fork", f"a fork and its original share {name}, which can change", _REMEDY)
            seen += await _play(exam, other, actions[_middle(expected) :])
    compare(exam, "fork", expected, seen, "a fork answers the same messages otherwise than its original", _REMEDY)


async def _apart(exam: CheckContext, expected: list[Any]) -> None:
    async with exam.episode(*exam.episodes[0]) as played:
        actions = actions_of(played)
        seen = await _play(exam, played, actions[: _middle(expected)])
        async with _fork(exam, played) as other:
            await _play(exam, other, [*reversed(actions[:-1]), actions[-1]])
            seen += await _play(exam, played, actions[_middle(expected) :])
    compare(exam, "fork", expected, seen, "an episode whose fork went on otherwise is answered otherwise", _REMEDY)


def _middle(expected: list[Any]) -> int:
    # The last answer may end the episode, and an episode that is over cannot fork.
    return min(len(expected) // 2, len(expected) - 1)


async def _play(exam: CheckContext, played: Played, actions: list[Message]) -> list[Any]:
    seen: list[Any] = []
    for action in actions:
        if played.over:
            break
        seen.append(seen_of(await exam.step(played, action)))
    return seen


@asynccontextmanager
async def _fork(exam: CheckContext, played: Played) -> AsyncIterator[Played]:
    env: Env = await exam.call(played.env, "fork")
    try:
        yield Played(env, f"{played.where}, a fork", played.task, list(played.messages), dict(played.info))
    finally:
        await exam.call(env, "close")


def shared(env: Env, other: Env) -> Iterator[str]:
    """Return the names of attributes whose mutable value an environment and its fork have in common."""
    while isinstance(env, Wrapper) and isinstance(other, Wrapper):
        env, other = env.env, other.env
    kept = SHARED | frozenset(env.fork_shares)
    for name, value in vars(env).items():
        if name not in kept and isinstance(value, _MUTABLE) and vars(other).get(name) is value:
            yield f"{type(env).__qualname__}.{name}"
