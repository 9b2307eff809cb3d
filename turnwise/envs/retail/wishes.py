"""Requests that the policy allows.

Owns: one maker for each kind. A maker looks at one customer's part of a shop and returns a request that has exactly one
right outcome, or nothing where this customer has nothing of the kind to ask for.
"""

from __future__ import annotations

from collections.abc import Mapping

from turnwise.envs.retail.desk import dollars
from turnwise.envs.retail.view import Action, Part, View
from turnwise.envs.retail.world import RETURN_DAYS


def _address(view: View) -> dict[str, str]:
    other = view.rng.choice([each for each in view.world.users.values() if each.id != view.user.id]).address
    street = f"{view.rng.randint(1, 980)} {other.street.split(maxsplit=1)[1]}"
    return {"street": street, "city": other.city, "state": other.state, "zip_code": other.zip}


def _spoken(address: Mapping[str, str]) -> str:
    return f"{address['street']}, {address['city']}, {address['state']} {address['zip_code']}"


def cancel(view: View) -> list[Part]:
    """Cancel a pending order."""
    for order in view.orders("pending"):
        reason, said = view.rng.choice(
            (
                ("no longer needed", "I no longer need it."),
                ("ordered by mistake", "I ordered it by mistake."),
            )
        )
        text = f"Please cancel {view.named(order)}. {said}"
        view.used.add(order.id)
        facts: tuple[str, ...] = ()
        if view.rng.random() < 0.5:
            text += " How much money do I get back?"
            facts = (dollars(sum(each.price for each in view.items(order))),)
        return [Part(text, (("cancel_order", {"order_id": order.id, "reason": reason}),), facts)]
    return []


def send_back(view: View) -> list[Part]:
    """Send items back within the days that the policy allows."""
    for order in view.orders("delivered"):
        items = [each for each in view.items(order) if not each.final_sale]
        if view.days_since_delivery(order) > RETURN_DAYS or not items:
            continue
        items = items[: view.rng.randint(1, 2)]
        cards = [each for each in view.methods() if each.id == order.payment or each.kind == "gift_card"]
        method = cards[0]
        view.used.add(order.id)
        names = " and the ".join(view.product(each) for each in items)
        text = (
            f"I want to send back the {names} from {view.named(order)}. The money should go to {view.paying(method)}."
        )
        arguments = {"order_id": order.id, "item_ids": [each.id for each in items], "payment_id": method.id}
        facts: tuple[str, ...] = ()
        if view.rng.random() < 0.5:
            text += " Tell me how much that is."
            facts = (dollars(sum(each.price for each in items)),)
        return [Part(text, (("return_items", arguments),), facts)]
    return []


def _replace(view: View, status: str, tool: str, wish: str) -> list[Part]:
    for order in view.orders(status):
        pairs = [(each, view.other_variant(each, available=True)) for each in view.items(order)]
        found = [(old, *new) for old, new in pairs if new is not None][: view.rng.randint(1, 2)]
        if not found:
            continue
        difference = sum(new.price - old.price for old, new, _ in found)
        # A gift card with too little on it would be a request to decline.
        methods = [each for each in view.methods() if each.balance is None or each.balance >= difference]
        method = methods[0]
        view.used.add(order.id)
        wanted = " and ".join(f"the {view.product(old)} for one {how}" for old, _, how in found)
        text = f"{wish.format(order=view.named(order), items=wanted)} Settle the difference in price with "
        text += f"{view.paying(method)}."
        arguments = {
            "order_id": order.id,
            "item_ids": [old.id for old, _, _ in found],
            "new_item_ids": [new.id for _, new, _ in found],
            "payment_id": method.id,
        }
        return [Part(text, ((tool, arguments),))]
    return []


def exchange(view: View) -> list[Part]:
    """Exchange items of a delivered order."""
    return _replace(view, "delivered", "exchange_items", "From {order} I would like to exchange {items}.")


def change_items(view: View) -> list[Part]:
    """Swap items of a pending order."""
    return _replace(view, "pending", "change_order_items", "Before {order} is sent, please swap {items}.")


def address_change(view: View) -> list[Part]:
    """Send a pending order somewhere else, and perhaps move altogether."""
    for order in view.orders("pending"):
        address = _address(view)
        view.used.add(order.id)
        text = f"Please send {view.named(order)} to {_spoken(address)} instead."
        actions: tuple[Action, ...] = (("change_order_address", {"order_id": order.id, **address}),)
        if view.user.id not in view.used and view.rng.random() < 0.3:
            view.used.add(view.user.id)
            text += " I have moved there, so make it the address of my account as well."
            actions = (*actions, ("change_user_address", {"user_id": view.user.id, **address}))
        return [Part(text, actions)]
    return []


def payment(view: View) -> list[Part]:
    """Pay for a pending order otherwise."""
    for order in view.orders("pending"):
        total = sum(each.price for each in view.items(order))
        methods = [
            each for each in view.methods(without=order.payment) if each.balance is None or each.balance >= total
        ]
        if methods:
            view.used.add(order.id)
            text = f"I would rather pay for {view.named(order)} with {view.paying(methods[0])}. Please change that."
            return [Part(text, (("change_order_payment", {"order_id": order.id, "payment_id": methods[0].id}),))]
    return []


def question(view: View) -> list[Part]:
    """Ask for an amount; nothing changes."""
    orders = view.orders("pending", "shipped", "delivered")
    if view.rng.random() < 0.5 and orders:
        view.used.add(orders[0].id)
        total = sum(each.price for each in view.items(orders[0]))
        return [Part(f"What did I pay for {view.named(orders[0])} in total?", (), (dollars(total),))]
    product = view.rng.choice(list(view.world.products))
    prices = [each.price for each in view.world.variants_of(product) if each.stock > 0]
    if not prices:
        return []
    text = f"What does the cheapest {view.world.products[product]} cost that you can deliver right now?"
    return [Part(text, (), (dollars(min(prices)),))]


def transfer(view: View) -> list[Part]:
    """Ask for what the tools cannot do."""
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
