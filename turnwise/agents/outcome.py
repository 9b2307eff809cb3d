"""What an agent's code makes of an episode: rewards while it runs, its return value, and spent budgets."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, SupportsFloat

from turnwise.agents.core import Episode
from turnwise.errors import AgentError, BudgetExceeded, shown
from turnwise.types import StopReason

_EPISODE: contextvars.ContextVar[Episode] = contextvars.ContextVar("turnwise_episode")
_NAME = "reward"


@contextlib.contextmanager
def use_episode(episode: Episode) -> Iterator[None]:
    """Make an episode current for this block, its tasks, and threads of
    :meth:`turnwise.agents.core.Episode.in_thread`.
    """
    token = _EPISODE.set(episode)
    try:
        yield
    finally:
        _EPISODE.reset(token)


def current_episode() -> Episode:
    """Return the episode of the calling agent code.

    Raises:
        AgentError: There is none, or the thread was started without the agent's context.
    """
    episode = _EPISODE.get(None)
    if episode is None:
        raise AgentError(
            "no episode runs here: call this inside of an agent; a thread that you start needs the agent's context "
            "(contextvars.copy_context().run)"
        )
    return episode


def emit_reward(reward: SupportsFloat) -> None:
    """Reward the agent's last turn, or the episode before its first turn.

    Rewards add up with each other and with the return value, and replace the environment's score.

    Raises:
        AgentError: No episode is current, or it is no finite number.
    """
    episode = current_episode()
    main = episode.sessions.get("main")
    last_message = None if main is None else main.last
    episode.reward(_number(reward, "emit_reward"), None if last_message is None else last_message["turn_id"])


async def apply_result(episode: Episode, result: object) -> None:
    """Apply the return value of an agent's code.

    Args:
        episode: The episode.
        result: None; a number, the episode's reward; named numbers, its parts; or a list with a number, or None, for
            each turn of the main session.

    Raises:
        AgentError: It is something else, or the environment has scored the episode already.
    """
    if result is None:
        return
    if isinstance(result, Mapping):
        for name, value in result.items():
            episode.reward(_number(value, f"the agent returned {name!r}"), name=str(name))
    elif isinstance(result, (list, tuple)):
        await _per_turn(episode, result)
    else:
        episode.reward(_number(result, "the agent returned"))


async def _per_turn(episode: Episode, values: list[Any] | tuple[Any, ...]) -> None:
    main = episode.sessions.get("main")
    turns = [] if main is None else await episode.list_turns(main)
    if len(values) != len(turns):
        raise AgentError(
            f"the agent returned {len(values)} rewards ({shown(values)}), but took {len(turns)} turns: return one for "
            "each turn in order (None for no reward), or a single number for the episode"
        )
    for turn, value in zip(turns, values, strict=True):
        if value is not None:
            episode.reward(_number(value, f"the agent returned for turn {turn}"), turn)


def _number(value: object, what: str) -> float:
    # Tensors and arrays of one element are numbers, too; a text is none.
    if isinstance(value, SupportsFloat):
        with contextlib.suppress(TypeError, ValueError):
            return float(value)
    raise AgentError(
        f"{what}: {shown(value)} of type {type(value).__name__} is not a reward: return a number, named numbers, a "
        "list with one number for each turn, or None"
    )


@contextlib.contextmanager
def within_budget(episode: Episode) -> Iterator[None]:
    """Let a spent budget of turns or tokens end one episode: the block is left, and its forks continue.

    Without it a spent budget ends the agent, and so all forks of its episode.
    """
    try:
        yield
    except Exception as error:  # an agent's code may wrap a spent budget in anything
        spent = budget_spent(error)
        if spent is None:
            raise
        # An episode that a step has ended keeps its end, whatever the agent tried after it.
        if not episode.ended:
            episode.finish(StopReason(spent.stop_reason))


def budget_spent(error: BaseException | None) -> BudgetExceeded | None:
    """Return the BudgetExceeded in an agent's error: itself, its cause, or part of a group."""
    while error is not None and not isinstance(error, BudgetExceeded):
        if isinstance(error, BaseExceptionGroup):
            budgets = [budget_spent(part) for part in error.exceptions]
            return budgets[0] if all(budgets) else None
        error = error.__cause__
    return error
