"""Checks of forks: a fork answers like its original, and neither sees changes of the other."""

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
from turnwise.ext.checks.environment.context import CheckContext, CheckEpisode
from turnwise.ext.checks.environment.repeats import actions_of, compare, compared_parts, play_alone
from turnwise.tools.core import FunctionTool
from turnwise.types import Message

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_REMEDY: Final = "keep state in attributes that are copied, write fork(), or set forks = None"
_SLOW_S: Final = 0.1
_MANY_OBJECTS: Final = 10_000
_MUTABLE: Final = (list, dict, set, bytearray, deque)


async def fork(context: CheckContext) -> None:
    """Check forks in the middle of the first episode.

    The fork continues with the original's messages and must be answered equally; then an original, whose fork
    continued with other messages, must be answered as without a fork. An environment that claims to fork and raises is
    a warning: nothing else needs forks.
    """
    if context.single or not context.first.supports_fork:
        return
    expected = await play_alone(context)
    try:
        await _check_equal_answers(context, expected)
        await _check_independence(context, expected)
    except EnvError as error:
        context.add_finding("fork", str(error), severity="warning")


async def _check_equal_answers(context: CheckContext, expected: list[Any]) -> None:
    async with context.new_episode(*context.episodes[0]) as episode:
        actions = actions_of(episode)
        answers = await _play(context, episode, actions[: _middle(expected)])
        began = time.perf_counter()
        async with _fork(context, episode) as fork:
            if (slow := slow_copy(episode.env, time.perf_counter() - began)) is not None:
                context.add_finding(
                    "fork", slow, "name it in `fork_shares` if no episode changes it", severity="warning"
                )
            shared_names = list(shared(episode.env, fork.env))
            for name in shared_names:
                context.add_finding("fork", f"a fork and its original share {name}, which can change", _REMEDY)
            for name in shared(episode.env, fork.env, of_functions=True):
                # It may be a table that no episode changes.
                if name not in shared_names:
                    message = f"functions in {name} have variables that a fork shares with its original, and can change"
                    context.add_finding(
                        "fork", message, "name it in `fork_shares` if no episode changes them", severity="warning"
                    )
            answers += await _play(context, fork, actions[_middle(expected) :])
    compare(
        context, "fork", expected, answers, "a fork answers the same messages differently from its original", _REMEDY
    )


async def _check_independence(context: CheckContext, expected: list[Any]) -> None:
    async with context.new_episode(*context.episodes[0]) as episode:
        actions = actions_of(episode)
        answers = await _play(context, episode, actions[: _middle(expected)])
        async with _fork(context, episode) as fork:
            await _play(context, fork, [*reversed(actions[:-1]), actions[-1]])
            answers += await _play(context, episode, actions[_middle(expected) :])
    compare(
        context,
        "fork",
        expected,
        answers,
        "an episode is answered differently after its fork received other messages",
        _REMEDY,
    )


def _middle(expected: list[Any]) -> int:
    # The last answer may end the episode, and an ended episode cannot fork.
    return min(len(expected) // 2, len(expected) - 1)


async def _play(context: CheckContext, episode: CheckEpisode, actions: list[Message]) -> list[Any]:
    answers: list[Any] = []
    for action in actions:
        if episode.is_over:
            break
        answers.append(compared_parts(await context.step(episode, action)))
    return answers


@asynccontextmanager
async def _fork(context: CheckContext, episode: CheckEpisode) -> AsyncIterator[CheckEpisode]:
    env = await context.run(fork_env(episode.env), "fork")
    try:
        yield CheckEpisode(env, f"{episode.where}, a fork", episode.task, list(episode.messages), dict(episode.info))
    finally:
        await context.run(close_env(env), "close")


def shared(env: Env, fork: Env, *, of_functions: bool = False) -> Iterator[str]:
    """Return the names of attributes in which an environment and its fork share mutable objects.

    Mutable are lists, dicts, sets and byte arrays, also inside of others and of objects, and with ``of_functions``
    those in the variables that a function has captured. The inside of objects that are never copied (a task, a logger)
    does not count.
    """
    while isinstance(env, Wrapper) and isinstance(fork, Wrapper):
        env, fork = env.env, fork.env
    excluded = SHARED | frozenset(env.fork_shares) | env.uncopied
    fork_ids = {
        id(part) for name, value in attributes(fork) if name not in excluded for part in _parts_of(value, set(), True)
    }
    # Forks share the messages of the conversation, which do not change.
    fork_ids -= {id(part) for message in env.conversation for part in _parts_of(message, (), False)}
    for name, value in attributes(env):
        parts = () if name in excluded else _parts_of(value, fork_ids, of_functions)
        if any(type(part) in _MUTABLE and id(part) in fork_ids for part in parts):
            yield f"{type(env).__qualname__}.{name}"


def slow_copy(env: Env, seconds: float) -> str | None:
    """Return which attribute makes a fork of that many seconds slow, or None."""
    while isinstance(env, Wrapper):
        env = env.env
    if seconds < _SLOW_S or type(env).fork is not Env.fork or env.forks != "copy":
        return None
    excluded = SHARED | frozenset(env.fork_shares) | env.uncopied
    sizes = {
        name: sum(1 for _ in _parts_of(value, (), False)) for name, value in attributes(env) if name not in excluded
    }
    largest = max(sizes, key=sizes.__getitem__, default="")
    if sizes.get(largest, 0) < _MANY_OBJECTS:
        return None
    return (
        f"a fork takes {seconds:.2g} s, and rollout.tree makes one before each turn: most of it is the copy of "
        f"{largest!r}, which holds {sizes[largest]:,} objects"
    )


def _parts_of(value: Any, opaque_ids: Collection[int], of_functions: bool) -> Iterator[Any]:
    """Yield a value and everything inside it; objects with an id of ``opaque_ids`` are not opened."""
    visited: set[int] = set()
    pending = [value]
    while pending:
        part = pending.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        yield part
        if isinstance(part, Mapping):
            pending += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, set, frozenset, deque)):
            pending += part
        elif isinstance(part, FunctionTool):
            pending.append(part.fn)
        elif isinstance(part, FunctionType):
            cells = part.__closure__ or () if of_functions else ()
            pending += [referent for cell in cells for referent in gc.get_referents(cell)]
        elif not isinstance(part, (type, ModuleType)) and id(part) not in opaque_ids:
            pending += getattr(part, "__dict__", {}).values()
