"""What a request is made from: a customer's part of a shop, and how the customer speaks of it.

Owns: :class:`Request`, :class:`Part` and :class:`View`. Refuses: what is asked; ``wishes.py`` and ``refusals.py`` do.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import date
from typing import Any, TypeAlias

from turnwise.envs.retail.world import Order, PaymentMethod, User, Variant, World

Action: TypeAlias = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """A request as a whole.

    Attributes:
        customer: Id of the customer.
        identity: The sentence in which the customer says who they are.
        text: What they want.
        actions: The changes that are right.
        facts: What the answer must state.
    """

    customer: str
    identity: str
    text: str
    actions: tuple[Action, ...]
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One of the things that a request asks for."""

    text: str
    actions: tuple[Action, ...]
    facts: tuple[str, ...] = ()


@dataclass(slots=True)
class View:
    """A customer's part of a shop, of which each order and the address are spoken of at most once.

    Attributes:
        world: The shop.
        user: The customer.
        rng: What decides.
        used: Ids of orders that a part of the request speaks of already; the user's own id for the address.
    """

    world: World
    user: User
    rng: random.Random
    used: set[str] = field(default_factory=set)

    def orders(self, *statuses: str) -> list[Order]:
        """Return the customer's orders of these statuses, in random order."""
        found = [each for each in self.world.orders.values() if each.user == self.user.id and each.status in statuses]
        found = [each for each in found if each.id not in self.used]
        self.rng.shuffle(found)
        return found

    def methods(self, *, without: str = "") -> list[PaymentMethod]:
        """Return the customer's payment methods, in random order."""
        found = [each for each in self.world.payments.values() if each.user == self.user.id and each.id != without]
        self.rng.shuffle(found)
        return found

    def items(self, order: Order) -> list[Variant]:
        """Return the variants in an order, in random order."""
        found = [self.world.variants[each] for each in order.items]
        self.rng.shuffle(found)
        return found

    def product(self, variant: Variant) -> str:
        """Return the name of a variant's product."""
        return self.world.products[variant.product]

    def days_since_delivery(self, order: Order) -> int:
        """Return how many days ago an order was delivered."""
        return (date.fromisoformat(self.world.today) - date.fromisoformat(order.delivered_on or "")).days

    def named(self, order: Order) -> str:
        """Return how the customer speaks of an order: by what is in it and in no other one of theirs, or by its id."""
        others = [each for each in self.world.orders.values() if each.user == self.user.id and each.id != order.id]
        elsewhere = {self.world.variants[item].product for each in others for item in each.items}
        own = [self.product(each) for each in self.items(order) if each.product not in elsewhere]
        if own and self.rng.random() < 0.5:
            return f"my order with the {own[0]} in it"
        return f"my order {order.id}"

    def paying(self, method: PaymentMethod) -> str:
        """Return how the customer speaks of a payment method."""
        if method.kind == "credit_card":
            return f"my credit card ending in {method.last_four}"
        return "my PayPal account" if method.kind == "paypal" else "my gift card"

    def other_variant(self, variant: Variant, *, available: bool) -> tuple[Variant, str] | None:
        """Return a variant that differs in one option, and how the customer asks for it."""
        options = dict(variant.options)
        found = []
        for each in self.world.variants_of(variant.product):
            changed = [(key, value) for key, value in each.options if options[key] != value]
            if len(changed) == 1 and (each.stock > 0) == available:
                found.append((each, f"with {changed[0][0]} {changed[0][1]} and everything else as it is"))
        return self.rng.choice(found) if found else None
