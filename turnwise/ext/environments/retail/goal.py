"""Goals of retail tasks: the shop's final state, and the facts that the answer must state."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turnwise.errors import TaskError, ToolError, shown
from turnwise.ext.environments.retail.changes import CHANGES
from turnwise.ext.environments.retail.desk import Desk
from turnwise.ext.environments.retail.store import Store
from turnwise.ext.environments.retail.tau_bench import read_shop
from turnwise.ext.environments.retail.world import World, draw
from turnwise.tasks import Task

LONGEST_ANSWER: Final = 1_000
"""Characters of an answer that may state facts: one that lists the whole shop states none."""
FURTHER_AMOUNTS: Final = 1
"""Different amounts of money in such an answer beyond those that were asked for: listing all prices is not
finding the lowest. The policy says so."""

_AMOUNT: Final = re.compile(r"\$ ?(\d[\d,]*(?:\.\d+)?)|\b(\d[\d,]*(?:\.\d+)?) ?(?:dollars|USD)\b")

Action = tuple[str, Mapping[str, Any]]


def world_of(place: int | str) -> World:
    """Return the shop of a seed, or of a folder of tau-bench's. Raises TaskError."""
    return draw(place) if isinstance(place, int) else read_shop(place)


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of an episode.

    Attributes:
        actions: Tool calls that reach the goal.
        facts: Texts that the answer must hold, such as ``$12.50``.
        digest: Hash of each table in the goal state.
    """

    world: int | str
    customer: str
    actions: tuple[Action, ...]
    facts: tuple[str, ...]
    digest: dict[str, str]


def goal_of(task: Task) -> Goal:
    """Return the goal of a task."""
    where = f"task {task.id!r}: data"
    world, customer = task.data.get("world"), task.data.get("customer")
    if isinstance(world, bool) or not isinstance(world, (int, str)) or (isinstance(world, str) and not _is_shop(world)):
        raise TaskError(
            f"{where}['world'] is {shown(world)}: it must be the seed of a shop, an integer, or the folder of one"
        )
    if customer not in world_of(world).users:
        raise TaskError(f"{where}['customer'] is {shown(customer)}: it must be a user id of the shop {world}")
    facts = task.data.get("facts", [])
    if not isinstance(facts, Sequence) or isinstance(facts, str) or not all(isinstance(each, str) for each in facts):
        raise TaskError(f"{where}['facts'] is {shown(facts)}: it must be a list of strings")
    actions = task.data.get("actions", [])
    if not isinstance(actions, Sequence) or isinstance(actions, str):
        raise TaskError(f"{where}['actions'] is {shown(actions)}: it must be a list of actions")
    pairs = tuple(_action(each, f"{where}['actions'][{index}]") for index, each in enumerate(actions))
    try:
        digest = _digest(world, str(customer), json.dumps(pairs, sort_keys=True))
    except (ToolError, TypeError) as error:
        raise TaskError(f"{where}['actions'] cannot be executed in the shop {world}: {error}") from error
    if not facts and digest == _digest(world, str(customer), "[]"):
        raise TaskError(
            f"{where}: the actions change nothing and there are no 'facts': an empty episode would solve it"
        )
    return Goal(world, str(customer), pairs, tuple(facts), digest)


def _is_shop(folder: str) -> bool:
    return Path(folder).is_dir()


def _action(value: Any, where: str) -> Action:
    name = value.get("name") if isinstance(value, Mapping) else None
    arguments = value.get("arguments") if isinstance(value, Mapping) else None
    if name not in CHANGES or not isinstance(arguments, Mapping):
        raise TaskError(
            f'{where} is {shown(value)}: write {{"name": ..., "arguments": {{...}}}} with one of the names '
            f"{', '.join(CHANGES)}"
        )
    return str(name), dict(arguments)


@functools.lru_cache(maxsize=1024)
def _digest(world: int | str, customer: str, actions: str) -> dict[str, str]:
    store = Store(world_of(world))
    try:
        desk = Desk(store, customer)
        for name, arguments in json.loads(actions):
            CHANGES[name](desk, **arguments)
        return store.digest()
    finally:
        store.close()


def states(answer: str, facts: Sequence[str]) -> bool:
    """Return whether an answer states all facts.

    Amounts of money match by value (``$1,250.5`` is ``$1250.50``), other facts by their words without case. An answer
    longer than ``LONGEST_ANSWER``, or with more than ``FURTHER_AMOUNTS`` amounts besides the facts, states nothing.
    """
    if not facts:
        return True
    # Its length comes first: what looks for amounts takes time in the square of the digits that follow each other.
    if len(answer) > LONGEST_ANSWER:
        return False
    amounts = _amounts(answer)
    asked = {amount for fact in facts for amount in _amounts(fact)}
    if asked and len(amounts) > len(asked) + FURTHER_AMOUNTS:
        return False
    text = " ".join(answer.casefold().split())
    for fact in facts:
        wanted = _amounts(fact)
        there = wanted <= amounts if wanted else _holds(text, " ".join(fact.casefold().split()))
        if not there:
            return False
    return True


def _holds(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def _amounts(text: str) -> set[float]:
    found = (one or other for one, other in _AMOUNT.findall(text))
    return {round(float(each.replace(",", "")), 2) for each in found if len(each) <= 20}
