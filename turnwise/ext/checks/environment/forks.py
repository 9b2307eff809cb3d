"""Checks of forks: a fork answers as its original would, and neither sees what the other does."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

from turnwise.envs.core import Env, close_env, fork_env
from turnwise.envs.forking import SHARED, attributes
from turnwise.envs.wrappers import Wrapper
from turnwise.errors import EnvError
from turnwise.ext.checks.environment.context import CheckContext, Played
from turnwise.ext.checks.environment.repeats import actions_of, alone, compare, seen_of
from turnwise.tools.core import FunctionTool
from turnwise.types import Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_REMEDY: Final = "keep state in attributes that are copied, write fork(), or set forks = None"
_SLOW_S: Final = 0.1
_MANY: Final = 10_000
_MUTABLE: Final = (list, dict, set, bytearray, deque)


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
        began = time.perf_counter()
        async with _fork(exam, played) as other:
            if (slow := slow_copy(played.env, time.perf_counter() - began)) is not None:
                exam.find("fork", slow, "name it in `fork_shares` if no episode changes it", severity="warning")
            found = list(shared(played.env, other.env))
            for name in found:
                exam.find("fork", f"a fork and its original share {name}, which can change", _REMEDY)
            for name in shared(played.env, other.env, of_functions=True):
                # It may be a table that no episode changes.
                if name not in found:
                    said = f"functions in {name} have variables that a fork shares with its original, and can change"
                    exam.find("fork", said, "name it in `fork_shares` if no episode changes them", severity="warning")
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
    env = await exam.run(fork_env(played.env), "fork")
    try:
        yield Played(env, f"{played.where}, a fork", played.task, list(played.messages), dict(played.info))
    finally:
        await exam.run(close_env(env), "close")


def shared(env: Env, other: Env, *, of_functions: bool = False) -> Iterator[str]:
    """Return the names of attributes in which an environment and its fork have something mutable in common.

    Looked at are lists, dicts, sets and byte arrays, also inside of others and of objects, and ``of_functions`` those
    in the variables that a function has captured. What an object that is not copied at all (a task, a logger) has
    inside is its own affair.
    """
    while isinstance(env, Wrapper) and isinstance(other, Wrapper):
        env, other = env.env, other.env
    kept = SHARED | frozenset(env.fork_shares) | env.uncopied
    theirs = {id(each) for name, value in attributes(other) if name not in kept for each in _inside(value, set(), True)}
    # Forks have the messages of the conversation in common: those do not change.
    theirs -= {id(each) for message in env.conversation for each in _inside(message, (), False)}
    for name, value in attributes(env):
        found = () if name in kept else _inside(value, theirs, of_functions)
        if any(type(each) in _MUTABLE and id(each) in theirs for each in found):
            yield f"{type(env).__qualname__}.{name}"


def slow_copy(env: Env, seconds: float) -> str | None:
    """Return which attribute makes a fork slow that took so long, or None."""
    while isinstance(env, Wrapper):
        env = env.env
    if seconds < _SLOW_S or type(env).fork is not Env.fork or env.forks != "copy":
        return None
    kept = SHARED | frozenset(env.fork_shares) | env.uncopied
    sizes = {name: sum(1 for _ in _inside(value, (), False)) for name, value in attributes(env) if name not in kept}
    largest = max(sizes, key=sizes.__getitem__, default="")
    if sizes.get(largest, 0) < _MANY:
        return None
    return (
        f"a fork takes {seconds:.2g} s, and rollout.tree makes one before each turn: most of it is the copy of "
        f"{largest!r}, which holds {sizes[largest]:,} objects"
    )


def _inside(value: Any, closed: Collection[int], of_functions: bool) -> Iterator[Any]:
    """Yield a value and what it holds; of objects with the ids ``closed`` only themselves."""
    known: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if id(each) in known:
            continue
        known.add(id(each))
        yield each
        if isinstance(each, Mapping):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, (list, tuple, set, frozenset, deque)):
            left += each
        elif isinstance(each, FunctionTool):
            left.append(each.fn)
        elif isinstance(each, FunctionType):
            cells = each.__closure__ or () if of_functions else ()
            left += [found for cell in cells for found in gc.get_referents(cell)]
        elif not isinstance(each, (type, ModuleType)) and id(each) not in closed:
            left += getattr(each, "__dict__", {}).values()
