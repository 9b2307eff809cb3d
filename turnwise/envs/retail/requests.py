"""What customers ask for: one thing, or several at once.

Owns: :data:`KINDS` and :func:`compose`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from turnwise.envs.retail.refusals import refusal
from turnwise.envs.retail.view import Part, Request, View
from turnwise.envs.retail.wishes import (
    address_change,
    cancel,
    change_items,
    exchange,
    payment,
    question,
    send_back,
    transfer,
)
from turnwise.envs.retail.world import User, World
from turnwise.errors import TaskError


def compose(world: World, kind: str, rng: random.Random) -> Request:
    """Return a request of a kind.

    Raises:
        TaskError: No customer of the shop has anything to ask of this kind.
    """
    users = list(world.users.values())
    rng.shuffle(users)
    for user in users:
        view = View(world, user, rng)
        parts = KINDS[kind](view)
        if parts:
            actions = tuple(action for part in parts for action in part.actions)
            # A transfer ends what the desk can do, so it comes last whatever the customer says first.
            actions = tuple(sorted(actions, key=lambda action: action[0] == "transfer_to_human"))
            facts = tuple(fact for part in parts for fact in part.facts)
            return Request(user.id, _identity(user, rng), " ".join(part.text for part in parts), actions, facts)
    raise TaskError(f"no customer of the shop {world.seed} has a request of the kind {kind!r}")


def _identity(user: User, rng: random.Random) -> str:
    name = f"{user.first_name} {user.last_name}"
    return rng.choice(
        (
            f"Hello, my name is {name} and my e-mail address is {user.email}.",
            f"Hi, this is {name}, zip code {user.address.zip}.",
            f"Good day, I am a customer of yours; my e-mail address is {user.email}.",
        )
    )


def _multi(view: View) -> list[Part]:
    makers = [cancel, send_back, exchange, change_items, address_change, payment, refusal]
    view.rng.shuffle(makers)
    wanted = view.rng.randint(2, 3)
    parts: list[Part] = []
    for maker in makers:
        if len(parts) < wanted:
            parts += maker(view)
    if len(parts) < 2:
        return []
    if view.rng.random() < 0.2:
        parts += transfer(view)
    return parts


KINDS: Final[dict[str, Callable[[View], list[Part]]]] = {
    "cancel": cancel,
    "return": send_back,
    "exchange": exchange,
    "items": change_items,
    "address": address_change,
    "payment": payment,
    "question": question,
    "refuse": refusal,
    "transfer": transfer,
    "multi": _multi,
}
"""The kinds of requests, each with what makes one."""
