"""Retail tasks: generated customer requests with the changes and facts that answer them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final, TypeAlias

from turnwise.errors import TaskError, shown
from turnwise.ext.environments.retail.desk import dollars
from turnwise.ext.environments.retail.world import (
    RETURN_DAYS,
    SPLITS,
    Order,
    PaymentMethod,
    User,
    Variant,
    World,
    draw,
    world_seed,
)
from turnwise.seeding import stable_hash
from turnwise.tasks import Task

Action: TypeAlias = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Request:
    """A complete request."""

    customer: str
    identity: str
    text: str
    actions: tuple[Action, ...]
    facts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a request."""

    text: str
    actions: tuple[Action, ...]
    facts: tuple[str, ...] = ()


@dataclass(slots=True)
class View:
    """A customer's view of a shop, in which each order and the address are mentioned at most once.

    Attributes:
        used: Ids of orders mentioned so far; the user's id stands for the address.
    """

    world: World
    user: User
    rng: random.Random
    used: set[str] = field(default_factory=set)

    def orders(self, *statuses: str) -> list[Order]:
        """Return the customer's orders of these statuses, in random order."""
        orders = [
            order for order in self.world.orders.values() if order.user == self.user.id and order.status in statuses
        ]
        orders = [order for order in orders if order.id not in self.used]
        self.rng.shuffle(orders)
        return orders

    def methods(self, *, without: str = "") -> list[PaymentMethod]:
        """Return the customer's payment methods, in random order."""
        methods = [
            method for method in self.world.payments.values() if method.user == self.user.id and method.id != without
        ]
        self.rng.shuffle(methods)
        return methods

    def items(self, order: Order) -> list[Variant]:
        """Return the variants in an order, in random order."""
        variants = [self.world.variants[item_id] for item_id in order.items]
        self.rng.shuffle(variants)
        return variants

    def product(self, variant: Variant) -> str:
        """Return the name of a variant's product."""
        return self.world.products[variant.product]

    def days_since_delivery(self, order: Order) -> int:
        """Return the days since an order's delivery."""
        return (date.fromisoformat(self.world.today) - date.fromisoformat(order.delivered_on or "")).days

    def order_phrase(self, order: Order) -> str:
        """Return the customer's name for an order: by a unique item, or by its id."""
        other_orders = [
            other for other in self.world.orders.values() if other.user == self.user.id and other.id != order.id
        ]
        elsewhere = {self.world.variants[item].product for other in other_orders for item in other.items}
        unique_products = [self.product(variant) for variant in self.items(order) if variant.product not in elsewhere]
        if unique_products and self.rng.random() < 0.5:
            return f"my order with the {unique_products[0]} in it"
        return f"my order {order.id}"

    def method_phrase(self, method: PaymentMethod) -> str:
        """Return the customer's name for a payment method."""
        if method.kind == "credit_card":
            return f"my credit card ending in {method.last_four}"
        return "my PayPal account" if method.kind == "paypal" else "my gift card"

    def other_variant(self, variant: Variant, *, available: bool) -> tuple[Variant, str] | None:
        """Return a variant that differs in one option, and the phrase that asks for it."""
        options = dict(variant.options)
        candidates = []
        for candidate in self.world.variants_of(variant.product):
            changed = [(key, value) for key, value in candidate.options if options[key] != value]
            if len(changed) == 1 and (candidate.stock > 0) == available:
                candidates.append((candidate, f"with {changed[0][0]} {changed[0][1]} and everything else as it is"))
        return self.rng.choice(candidates) if candidates else None


def refusal(view: View) -> list[Part]:
    """Ask for something that the policy forbids."""
    makers = list(_MAKERS)
    view.rng.shuffle(makers)
    return next((parts for maker in makers if (parts := maker(view))), [])


def _decline(view: View, order: Order, reason: str, text: str) -> list[Part]:
    view.used.add(order.id)
    return [Part(text, (("decline_request", {"order_id": order.id, "reason": reason}),))]


def _not_pending(view: View) -> list[Part]:
    for order in view.orders("shipped", "delivered"):
        text = f"Please cancel {view.order_phrase(order)}, I no longer need it."
        return _decline(view, order, "order_not_pending", text)
    return []


def _not_delivered(view: View) -> list[Part]:
    for order in view.orders("shipped"):
        # An item on final sale would be a second reason.
        items = [item for item in view.items(order) if not item.final_sale]
        if items:
            text = f"I want to send back the {view.product(items[0])} from {view.order_phrase(order)}."
            return _decline(view, order, "order_not_delivered", text)
    return []


def _return_window(view: View) -> list[Part]:
    for order in view.orders("delivered"):
        items = [item for item in view.items(order) if not item.final_sale]
        if items and view.days_since_delivery(order) > RETURN_DAYS:
            text = f"The {view.product(items[0])} from {view.order_phrase(order)} is not for me, "
            text += "I want my money back for it."
            return _decline(view, order, "return_window_over", text)
    return []


def _final_sale(view: View) -> list[Part]:
    for order in view.orders("delivered"):
        items = [item for item in view.items(order) if item.final_sale]
        if items and view.days_since_delivery(order) <= RETURN_DAYS:
            text = f"I want to send back the {view.product(items[0])} from {view.order_phrase(order)} and get a refund."
            return _decline(view, order, "final_sale", text)
    return []


def _unaccepted_reason(view: View) -> list[Part]:
    for order in view.orders("pending"):
        why = view.rng.choice(
            (
                "I have found it cheaper elsewhere.",
                "Your delivery takes too long.",
                "I do not like your company any more.",
            )
        )
        return _decline(
            view, order, "reason_not_accepted", f"Cancel {view.order_phrase(order)}. {why} That is my only reason."
        )
    return []


def _different_product(view: View) -> list[Part]:
    for order in view.orders("delivered"):
        item = view.items(order)[0]
        other = view.rng.choice([name for product, name in view.world.products.items() if product != item.product])
        text = f"I would like to exchange the {view.product(item)} from {view.order_phrase(order)} for a {other}."
        return _decline(view, order, "different_product", text)
    return []


def _out_of_stock(view: View) -> list[Part]:
    for order in view.orders("pending", "delivered"):
        for item in view.items(order):
            replacement = view.other_variant(item, available=False)
            if replacement is not None:
                verb = "swap" if order.status == "pending" else "exchange"
                text = (
                    f"Please {verb} the {view.product(item)} in {view.order_phrase(order)} for one {replacement[1]}. "
                )
                text += "Nothing else will do."
                return _decline(view, order, "out_of_stock", text)
    return []


def _gift_card(view: View) -> list[Part]:
    for order in view.orders("pending"):
        total = sum(item.price for item in view.items(order))
        cards = [card for card in view.methods() if card.balance is not None and card.balance < total]
        if cards:
            text = f"I want to pay for all of {view.order_phrase(order)} with my gift card instead."
            return _decline(view, order, "gift_card_balance", text)
    return []


_MAKERS: Final[tuple[Callable[[View], list[Part]], ...]] = (
    _not_pending,
    _not_delivered,
    _return_window,
    _final_sale,
    _unaccepted_reason,
    _different_product,
    _out_of_stock,
    _gift_card,
)


def _new_address(view: View) -> dict[str, str]:
    other = view.rng.choice([user for user in view.world.users.values() if user.id != view.user.id]).address
    street = f"{view.rng.randint(1, 980)} {other.street.split(maxsplit=1)[1]}"
    return {"street": street, "city": other.city, "state": other.state, "zip_code": other.zip}


def _address_phrase(address: Mapping[str, str]) -> str:
    return f"{address['street']}, {address['city']}, {address['state']} {address['zip_code']}"


def cancel(view: View) -> list[Part]:
    """Cancel a pending order."""
    for order in view.orders("pending"):
        reason, explanation = view.rng.choice(
            (("no longer needed", "I no longer need it."), ("ordered by mistake", "I ordered it by mistake."))
        )
        text = f"Please cancel {view.order_phrase(order)}. {explanation}"
        view.used.add(order.id)
        facts: tuple[str, ...] = ()
        if view.rng.random() < 0.5:
            text += " How much money do I get back?"
            facts = (dollars(sum(item.price for item in view.items(order))),)
        return [Part(text, (("cancel_order", {"order_id": order.id, "reason": reason}),), facts)]
    return []


def send_back(view: View) -> list[Part]:
    """Return items within the allowed days."""
    for order in view.orders("delivered"):
        items = [item for item in view.items(order) if not item.final_sale]
        if view.days_since_delivery(order) > RETURN_DAYS or not items:
            continue
        items = items[: view.rng.randint(1, 2)]
        cards = [method for method in view.methods() if method.id == order.payment or method.kind == "gift_card"]
        method = cards[0]
        view.used.add(order.id)
        names = " and the ".join(view.product(item) for item in items)
        text = f"I want to send back the {names} from {view.order_phrase(order)}. "
        text += f"The money should go to {view.method_phrase(method)}."
        arguments = {"order_id": order.id, "item_ids": [item.id for item in items], "payment_id": method.id}
        facts: tuple[str, ...] = ()
        if view.rng.random() < 0.5:
            text += " Tell me how much that is."
            facts = (dollars(sum(item.price for item in items)),)
        return [Part(text, (("return_items", arguments),), facts)]
    return []


def _replace_items(view: View, status: str, tool: str, wish: str) -> list[Part]:
    for order in view.orders(status):
        pairs = [(item, view.other_variant(item, available=True)) for item in view.items(order)]
        replacements = [(old, *new) for old, new in pairs if new is not None][: view.rng.randint(1, 2)]
        if not replacements:
            continue
        difference = sum(new.price - old.price for old, new, _ in replacements)
        # A gift card with too small a balance would make this a request to decline.
        methods = [method for method in view.methods() if method.balance is None or method.balance >= difference]
        method = methods[0]
        view.used.add(order.id)
        phrases = " and ".join(f"the {view.product(old)} for one {how}" for old, _, how in replacements)
        text = f"{wish.format(order=view.order_phrase(order), items=phrases)} Settle the difference in price with "
        text += f"{view.method_phrase(method)}."
        arguments = {
            "order_id": order.id,
            "item_ids": [old.id for old, _, _ in replacements],
            "new_item_ids": [new.id for _, new, _ in replacements],
            "payment_id": method.id,
        }
        return [Part(text, ((tool, arguments),))]
    return []


def exchange(view: View) -> list[Part]:
    """Exchange items of a delivered order."""
    return _replace_items(view, "delivered", "exchange_items", "From {order} I would like to exchange {items}.")


def change_items(view: View) -> list[Part]:
    """Swap items of a pending order."""
    return _replace_items(view, "pending", "change_order_items", "Before {order} is sent, please swap {items}.")


def address_change(view: View) -> list[Part]:
    """Send a pending order to another address, and perhaps change the customer's own."""
    for order in view.orders("pending"):
        address = _new_address(view)
        view.used.add(order.id)
        text = f"Please send {view.order_phrase(order)} to {_address_phrase(address)} instead."
        actions: tuple[Action, ...] = (("change_order_address", {"order_id": order.id, **address}),)
        if view.user.id not in view.used and view.rng.random() < 0.3:
            view.used.add(view.user.id)
            text += " I have moved there, so make it the address of my account as well."
            actions = (*actions, ("change_user_address", {"user_id": view.user.id, **address}))
        return [Part(text, actions)]
    return []


def payment(view: View) -> list[Part]:
    """Pay for a pending order by another method."""
    for order in view.orders("pending"):
        total = sum(item.price for item in view.items(order))
        methods = [
            method
            for method in view.methods(without=order.payment)
            if method.balance is None or method.balance >= total
        ]
        if methods:
            view.used.add(order.id)
            text = f"I would rather pay for {view.order_phrase(order)} with {view.method_phrase(methods[0])}. "
            text += "Please change that."
            return [Part(text, (("change_order_payment", {"order_id": order.id, "payment_id": methods[0].id}),))]
    return []


def question(view: View) -> list[Part]:
    """Ask for an amount; nothing changes."""
    orders = view.orders("pending", "shipped", "delivered")
    if view.rng.random() < 0.5 and orders:
        view.used.add(orders[0].id)
        total = sum(item.price for item in view.items(orders[0]))
        return [Part(f"What did I pay for {view.order_phrase(orders[0])} in total?", (), (dollars(total),))]
    product = view.rng.choice(list(view.world.products))
    prices = [variant.price for variant in view.world.variants_of(product) if variant.stock > 0]
    if not prices:
        return []
    text = f"What does the cheapest {view.world.products[product]} cost that you can deliver right now?"
    return [Part(text, (), (dollars(min(prices)),))]


def transfer(view: View) -> list[Part]:
    """Ask for something that the tools cannot do."""
    topic, text = view.rng.choice(
        (
            ("account_data", "I have a new e-mail address, please change it in my account."),
            ("account_data", "I got married, so please change the last name in my account."),
            ("courier", "The driver of your delivery service was very rude to me, and I want to complain about it."),
            ("invoice", "The invoice that I got names the wrong tax number of my company."),
            ("damaged_goods", "My last parcel was crushed, and something in it is broken. What happens now?"),
        )
    )
    return [Part(text, (("transfer_to_human", {"topic": topic}),))]


def compose(world: World, kind: str, rng: random.Random) -> Request:
    """Return a request of a kind."""
    users = list(world.users.values())
    rng.shuffle(users)
    for user in users:
        view = View(world, user, rng)
        parts = KINDS[kind](view)
        if parts:
            actions = tuple(action for part in parts for action in part.actions)
            # After a transfer the desk can change nothing, so it comes last in any request.
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
    part_count = view.rng.randint(2, 3)
    parts: list[Part] = []
    for maker in makers:
        if len(parts) < part_count:
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
"""Makers of requests by kind."""


_PER_SHOP: Final = 8


def tasks(n: int = 200, *, split: str = "train", seed: int = 0, kind: str | None = None) -> Iterator[Task]:
    """Yield ``n`` requests of a split, the kinds in turn, eight to a shop.

    Args:
        n: Number of tasks.
        split: ``train`` or ``test``.
        seed: Determines the shops.
        kind: Only requests of this kind.
    """
    if split not in SPLITS:
        raise TaskError(f"retail has no split {shown(split)}: it has {', '.join(SPLITS)}")
    if kind is not None and kind not in KINDS:
        raise TaskError(f"retail has no kind of task {shown(kind)}: it has {', '.join(KINDS)}")
    kinds = tuple(KINDS) if kind is None else (kind,)
    for index in range(n):
        world = draw(world_seed(split, seed, index // _PER_SHOP))
        yield _task(f"retail-{split}-{seed}-{index}", world, kinds[index % len(kinds)], index)


def task_from_seed(seed: int | None) -> Task:
    """Return the training task of a seed; a random one for None."""
    number = random.getrandbits(63) if seed is None else seed
    return _task(f"retail-seed-{number}", draw(world_seed("train", number, 0)), list(KINDS)[number % len(KINDS)], 0)


def _task(name: str, world: World, kind: str, index: int) -> Task:
    request = compose(world, kind, random.Random(stable_hash("retail task", world.seed, kind, index)))
    actions = [{"name": tool, "arguments": arguments} for tool, arguments in request.actions]
    data = {
        "world": world.seed,
        "kind": kind,
        "customer": request.customer,
        # Two columns: in a dialogue the customer states the identity only when asked.
        "identity": request.identity,
        "request": request.text,
        "actions": actions,
        "facts": list(request.facts),
    }
    return Task(name, f"{request.identity} {request.text}", data)
