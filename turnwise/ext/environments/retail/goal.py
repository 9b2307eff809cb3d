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
from turnwise.ext.environments.retail.changes import CHANGES, Changes
from turnwise.ext.environments.retail.desk import Desk
from turnwise.ext.environments.retail.store import Store
from turnwise.ext.environments.retail.tau_bench import read_shop
from turnwise.tasks import Task

LONGEST_ANSWER: Final = 1_000
"""Maximum characters of an answer that states facts: listing the whole shop is no answer."""
FURTHER_AMOUNTS: Final = 1
"""Allowed amounts of money beyond those that were asked for: listing all prices is not finding the lowest, and
the policy forbids it."""
FURTHER_NUMBERS: Final = 3
"""Allowed numbers beyond those that were asked for: counting from 1 to 99 is not counting the variants."""

_NUMBER: Final = re.compile(r"(?<![\w.,$#-])\d{1,4}(?![\w-]|[.,]\d)")
_DECIMAL: Final = re.compile(r"\d[\d,]*\.\d+")
_AMOUNT: Final = re.compile(r"\$ ?(\d[\d,]*(?:\.\d+)?)|\b(\d[\d,]*(?:\.\d+)?) ?(?:dollars|USD)\b")

Action = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Goal:
    """Goal of an episode.

    Attributes:
        world: Folder of the shop.
        actions: Tool calls that reach the goal.
        facts: Texts that the answer must contain, such as ``$12.50``.
        digest: Hash of each table in the goal state.
    """

    world: str
    customer: str
    actions: tuple[Action, ...]
    facts: tuple[str, ...]
    digest: dict[str, str]


def goal_of(task: Task) -> Goal:
    """Return the goal of a task."""
    where = f"task {task.id!r}: data"
    world, customer = task.data.get("world"), task.data.get("customer")
    if not isinstance(world, str) or not Path(world).is_dir():
        raise TaskError(f"{where}['world'] is {shown(world)}: it must be tau-bench's folder retail/data, with the shop")
    if all(user[0] != customer for user in read_shop(world)["users"]):
        raise TaskError(f"{where}['customer'] is {shown(customer)}: it must be a user id of the shop {world}")
    facts = task.data.get("facts", [])
    if not isinstance(facts, Sequence) or isinstance(facts, str) or not all(isinstance(fact, str) for fact in facts):
        raise TaskError(f"{where}['facts'] is {shown(facts)}: it must be a list of strings")
    actions = task.data.get("actions", [])
    if not isinstance(actions, Sequence) or isinstance(actions, str):
        raise TaskError(f"{where}['actions'] is {shown(actions)}: it must be a list of actions")
    pairs = tuple(_action(action, f"{where}['actions'][{index}]") for index, action in enumerate(actions))
    try:
        digest = _digest(world, str(customer), json.dumps(pairs, sort_keys=True))
    except (ToolError, TypeError) as error:
        raise TaskError(f"{where}['actions'] cannot be executed in the shop {world}: {error}") from error
    if not facts and digest == _digest(world, str(customer), "[]"):
        raise TaskError(
            f"{where}: the actions change nothing and there are no 'facts': an empty episode would solve it"
        )
    return Goal(world, str(customer), pairs, tuple(facts), digest)


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
def _digest(world: str, customer: str, actions: str) -> dict[str, str]:
    store = Store(read_shop(world))
    try:
        changes = Changes()
        changes.desk = Desk(store, customer)
        for name, arguments in json.loads(actions):
            CHANGES[name](changes, **arguments)
        return store.digest()
    finally:
        store.close()


def states_facts(answer: str, facts: Sequence[str]) -> bool:
    """Return whether an answer states all facts.

    Amounts of money match by value (``$1,250.5`` is ``$1250.50``), other facts by their words without case. An answer
    longer than ``LONGEST_ANSWER``, or with more than ``FURTHER_AMOUNTS`` amounts or, where a number was asked for,
    ``FURTHER_NUMBERS`` numbers of its kind (whole or decimal) besides the facts, states nothing.
    """
    if not facts:
        return True
    # The length is checked first: the search for amounts is quadratic in consecutive digits.
    if len(answer) > LONGEST_ANSWER:
        return False
    amounts = _amounts(answer)
    requested = {amount for fact in facts for amount in _amounts(fact)}
    if requested and len(amounts) > len(requested) + FURTHER_AMOUNTS:
        return False
    numbers = {fact for fact in facts if fact.isdecimal()}
    if numbers and len({*_NUMBER.findall(answer)}) > len(numbers) + FURTHER_NUMBERS:
        return False
    decimals = {fact for fact in facts if _DECIMAL.fullmatch(fact)}
    if decimals and len({*_DECIMAL.findall(answer)}) > len(decimals) + FURTHER_NUMBERS:
        return False
    text = " ".join(answer.casefold().split())
    for fact in facts:
        expected = _amounts(fact)
        stated = expected <= amounts if expected else _contains_words(text, " ".join(fact.casefold().split()))
        if not stated:
            return False
    return True


def _contains_words(text: str, words: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def _amounts(text: str) -> set[float]:
    numbers = (prefixed or suffixed for prefixed, suffixed in _AMOUNT.findall(text))
    return {round(float(number.replace(",", "")), 2) for number in numbers if len(number) <= 20}
