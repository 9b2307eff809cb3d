"""Forks of running environments: how ``Env.fork`` makes an independent one in the same state.

``copy``: attributes are copied deeply, sandboxes and instances of tools are forked. ``replay``: a new environment is
reset with the same task and seed and takes the recorded actions again; accepted only with equal answers.
"""

from __future__ import annotations

import copy
import gc
import inspect
import random
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from types import FunctionType, MethodType
from typing import Any, Final

from turnwise.errors import EnvError, SandboxError, shown
from turnwise.sandboxes.core import Sandbox
from turnwise.sandboxes.manager import SandboxManager
from turnwise.tasks.core import Task
from turnwise.tools.core import BaseTool, FunctionTool
from turnwise.tools.response import ToolResponse
from turnwise.types import Message, ToolCall

SHARED: Final = frozenset(
    {"executor", "count_tokens", "main_session", "open_judge", "sandboxes", "guest_mounts", "secrets", "loaded_tools"}
    | {"_own_manager", "_maker"}
)
"""Attributes of the base classes that a fork has in common with its original: none of them changes in an episode."""

Memo = dict[int, Any]
"""Copies by the id of their original, as ``copy.deepcopy`` takes them."""


@dataclass(slots=True)
class Script:
    """The actions of an episode and their answers; kept where the environment forks by replay.

    Attributes:
        task: The task of the reset.
        seed: Its seed.
        first: The messages that reset returned.
        steps: Each message or single call, and what was answered to it.
    """

    task: Task | None
    seed: int | None
    first: list[Message]
    steps: list[tuple[Message | ToolCall, Any]] = field(default_factory=list)


def why_not_forkable(env: Any) -> str | None:
    """Return why an environment cannot fork now, or None."""
    if env.forks is None:
        return "its class says that it cannot (forks = None)"
    if not env._running:
        return "no episode runs: fork it between reset() and the end of the episode"
    if env.lost_thread:
        return "a call that timed out still runs in its thread and may change it"
    if env.pending_score is not None:
        return "it is being scored"
    return None


async def copy_env(
    env: Any, shared: Collection[str], fork_state: Callable[[Any, Memo], Any], copies: Memo | None = None
) -> Any:
    """Return a deep copy of an environment.

    Args:
        env: The environment.
        shared: Names of attributes that the copy shares.
        fork_state: Called with the copy and the memo; what cannot be copied as an attribute is made there.
        copies: Copies that are made already.

    Raises:
        EnvError: An attribute cannot be copied, or a sandbox cannot be forked.
    """
    fork = object.__new__(type(env))
    sandboxes: list[tuple[SandboxManager, Sandbox]] = []
    memo: Memo = {id(env): fork} | (copies or {})
    # Where copy.deepcopy keeps the originals of what it has copied.
    originals = memo[id(memo)] = []
    copied_of: dict[str, tuple[Any, list[Any]]] = {}
    try:
        for manager, sandbox in env._in_use:
            forked = await _forked(env, manager, sandbox)
            sandboxes.append((manager, forked))
            memo[id(sandbox)] = forked
        fork._in_use = tuple(sandboxes)
        _share_tools(env, memo)
        # Messages do not change.
        fork.conversation = memo[id(env.conversation)] = list(env.conversation)
        shared = SHARED | frozenset(shared)
        for name, value in attributes(env):
            if name in env.uncopied:
                continue
            if name in shared:
                object.__setattr__(fork, name, value)
                continue
            count = len(originals)
            object.__setattr__(fork, name, _copy(env, name, value, memo))
            copied_of[name] = value, originals[count:]
        for name, (value, children) in copied_of.items():
            _refuse_shared(env, name, [value, *gc.get_referents(*children)], memo)
        await fork_state(fork, memo)
    except BaseException:  # also a cancellation: what was forked is closed
        for manager, sandbox in sandboxes:
            await manager.release(sandbox)
        raise
    if env._own_manager is not None:
        env._own_manager.users += 1
    return fork


async def _forked(env: Any, manager: SandboxManager, sandbox: Sandbox) -> Sandbox:
    try:
        [fork] = await manager.fork(sandbox)
    except SandboxError as error:
        raise EnvError(f"{type(env).__qualname__} cannot fork: its sandbox cannot: {error}") from error
    return fork


def _share_tools(env: Any, memo: Memo) -> None:
    """Let copies refer to the same tools: only a bound method holds anything of an episode."""
    for tool in () if "tools" in env.uncopied else env.tools:
        _no_closure(env, "tools", tool.fn if isinstance(tool, FunctionTool) else tool)
        bound = inspect.ismethod(tool) or (isinstance(tool, FunctionTool) and inspect.ismethod(tool.fn))
        if not bound and isinstance(tool, (FunctionTool, BaseTool)):
            memo[id(tool)] = tool


def attributes(env: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an environment by name, also those in ``__slots__`` of its classes."""
    yield from vars(env).items()
    for cls in type(env).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(env, name):
                yield name, getattr(env, name)


def _refuse_shared(env: Any, name: str, values: list[Any], memo: Memo) -> None:
    """Refuse what a deep copy leaves as it is although it refers to the original, among an attribute's values."""
    for member in values:
        kind = type(member)
        if kind is FunctionType:
            _no_closure(env, f"its attribute {name!r}", member)
        elif kind is weakref.ref and memo.get(id(member()), member()) is not member():
            raise EnvError(
                f"{type(env).__qualname__} cannot fork: its attribute {name!r} holds {shown(member)}, a weak "
                "reference, which in a fork would still be one to the original's object: use a plain reference, or "
                "write fork()"
            )
        elif kind is TemporaryDirectory:
            raise EnvError(
                f"{type(env).__qualname__} cannot fork: its attribute {name!r} holds {shown(member)}, a folder that a "
                "fork would share and that the first close() removes: keep files in a sandbox "
                "(await self.open_sandbox()), which is forked, or write fork()"
            )


def _no_closure(env: Any, name: str, function: Any) -> None:
    """Refuse a function that refers to its environment: copies have the same one, which would act on the original."""
    if type(function) is FunctionType and _refers(function, env):
        raise EnvError(
            f"{type(env).__qualname__} cannot fork: {name} holds {shown(function)}, a closure over the environment, "
            "which in a fork would act on the original: make it a method"
        )


def _refers(member: Any, env: Any, depth: int = 4) -> bool:
    """Whether a value is an environment, or a function or method that was made with it."""
    if member is env:
        return True
    if type(member) is MethodType:
        return member.__self__ is env
    if type(member) is not FunctionType or not depth:
        return False
    # A cell is empty until its variable is set.
    cells = [value for cell in member.__closure__ or () for value in gc.get_referents(cell)]
    bound = (*cells, *(member.__defaults__ or ()), *(member.__kwdefaults__ or {}).values())
    return any(_refers(bound_value, env, depth - 1) for bound_value in bound)


def _copy(env: Any, name: str, value: Any, memo: Memo) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Task):
        # The tasks of a dataset serve many episodes, also at the same time.
        return value
    if type(value) is random.Random:
        # A hundred times as fast as the copy of its 625 numbers.
        duplicate = memo[id(value)] = random.Random()
        duplicate.setstate(value.getstate())
        return duplicate
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # an environment's objects: what copying one raises is named
        raise EnvError(
            f"{type(env).__qualname__} cannot fork: its attribute {name!r} holds {shown(value)}, which cannot be "
            f"copied ({type(error).__name__}: {error}): name it in `fork_shares` if episodes may share it, write "
            'fork() in the class, set forks = "replay", or forks = None to say that it cannot'
        ) from error


def comparable_answer(result: Any) -> Any:
    """Return the answer of a step or a single call in a form that compares."""
    if isinstance(result, ToolResponse):
        return [result.content(), result.reward]
    observation = result.observation
    observation = [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
    return [observation, result.reward, result.terminated, result.truncated]


def equip(env: Any, fork: Any) -> None:
    """Give a fork what the runner gave its original."""
    if loaded := vars(env).get("loaded_tools"):
        fork.add_tools(loaded)
    fork.sandboxes, fork.guest_mounts = env.sandboxes, env.guest_mounts
    fork.count_tokens = env.count_tokens


def describe_action(number: int, action: Message | ToolCall) -> str:
    """Return how an error names a replayed action."""
    if isinstance(action, ToolCall):
        return f"call {number} ({action.name})"
    called = ", ".join(call.name for call in action.get("tool_calls") or ())
    return f"step {number} ({called or 'a message without calls'})"


def check_answer(env: Any, where: str, answer: Any, recorded: Any) -> None:
    """Check that a replayed action was answered as in the episode. Raises EnvError."""
    if answer != recorded:
        raise EnvError(
            f"{type(env).__qualname__} cannot fork by replay: {where} answered {shown(answer)} where the episode had "
            f"{shown(recorded)}: draw all randomness from the seed of reset, or write fork()"
        )
