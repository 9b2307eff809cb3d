"""The same again: in a group, a second time, in a used environment, and beside another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnwise.envs.checker.context import CheckContext, Played, brief, some_calls
from turnwise.envs.core import StepResult, schemas
from turnwise.types import Message

_LAST: Message = {"role": "assistant", "content": "I do not know."}


async def group(exam: CheckContext) -> None:
    """Members of a group, reset with one task and one seed, begin equally."""
    if exam.single:
        return
    for task, seed in exam.episodes:
        async with exam.episode(task, seed) as one, exam.episode(task, seed) as other:
            pairs = (
                ("observation", one.messages, other.messages),
                (
                    "tools",
                    [each.to_json() for each in schemas(one.env)],
                    [each.to_json() for each in schemas(other.env)],
                ),
            )
            for what, first, second in pairs:
                if first != second:
                    exam.find(
                        "group",
                        f"two members of a group begin with different {what}: {_difference(first, second)}",
                        "draw everything from the seed that reset is given (random.Random(seed)), nothing else",
                        where=one.where,
                    )
                    return


def _offered(played: Played) -> list[Any]:
    return [schema.to_json() for schema in schemas(played.env)]


def _difference(first: Sequence[Any], second: Sequence[Any]) -> str:
    for one, other in zip(first, second, strict=False):
        if one != other:
            return f"{brief(one)} and {brief(other)}"
    return f"{len(first)} and {len(second)} of them"


async def determinism(exam: CheckContext) -> None:
    """Equal messages in episodes with equal seeds are answered equally."""
    if exam.single:
        return
    plays = [await _alone(exam), await _alone(exam)]
    why = "two episodes with the same seed and the same messages are not equal"
    _compare(exam, "determinism", plays[0], plays[1], why, "draw what is random from the seed of reset only")


async def reuse(exam: CheckContext) -> None:
    """An environment that played an episode plays the next one like a new one."""
    plays = []
    for _ in range(2):
        played = await exam.begin(exam.first, *exam.episodes[0])
        plays.append(await _play(exam, played))
    why = "after a second reset with the same seed the episode is not equal"
    _compare(exam, "reuse", plays[0], plays[1], why, "set all state in reset()")


async def isolation(exam: CheckContext) -> None:
    """Two episodes that run at the same time do not see each other."""
    if exam.single:
        return
    alone = await _alone(exam)
    async with exam.episode(*exam.episodes[0]) as one, exam.episode(*exam.episodes[-1]) as other:
        plays: list[list[Any]] = [[], []]
        actions = [_actions(one), _actions(other)]
        for number in range(max(map(len, actions))):
            for played, seen, mine in zip((other, one), (plays[1], plays[0]), (actions[1], actions[0]), strict=True):
                if number < len(mine) and not played.over:
                    seen.append(_seen(await exam.step(played, mine[number])))
    why = "while another episode runs, the same messages are answered otherwise"
    _compare(exam, "isolation", alone, plays[0], why, "keep state on self; class and module variables are shared")


async def _alone(exam: CheckContext) -> list[Any]:
    async with exam.episode(*exam.episodes[0]) as played:
        return await _play(exam, played)


async def _play(exam: CheckContext, played: Played) -> list[Any]:
    seen: list[Any] = []
    for action in _actions(played):
        seen.append(_seen(await exam.step(played, action)))
        if played.over:
            break
    return seen


def _actions(played: Played) -> list[Message]:
    calls = some_calls(played.env)
    return [*({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls[2:]), _LAST]  # type: ignore[list-item]


def _seen(result: StepResult) -> list[Any]:
    return [list(result.observation), *result[1:4], result.info.get("rewards")]


def _compare(exam: CheckContext, check: str, first: list[Any], second: list[Any], why: str, remedy: str) -> None:
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            exam.find(check, f"{why}: step {number + 1} differs: {brief(one)} and {brief(other)}", remedy)
            return
    if len(first) != len(second):
        exam.find(check, f"{why}: one had {len(first)} steps, the other {len(second)}", remedy)
