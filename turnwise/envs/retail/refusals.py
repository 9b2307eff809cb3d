"""Requests that the policy forbids: each is to be declined for one reason, and nothing is to be changed.

Owns: :func:`refusal`, which makes one that this customer can ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turnwise.envs.retail.view import Part, View
from turnwise.envs.retail.world import RETURN_DAYS, Order


def refusal(view: View) -> list[Part]:
    """Ask for something that the policy forbids."""
    makers = list(_MAKERS)
    view.rng.shuffle(makers)
    return next((parts for maker in makers if (parts := maker(view))), [])


def _declined(view: View, order: Order, reason: str, text: str) -> list[Part]:
    view.used.add(order.id)
    return [Part(text, (("decline_request", {"order_id": order.id, "reason": reason}),))]


def _not_pending(view: View) -> list[Part]:
    for order in view.orders("shipped", "delivered"):
        text = f"Please cancel {view.named(order)}, I no longer need it."
        return _declined(view, order, "order_not_pending", text)
    return []


def _not_delivered(view: View) -> list[Part]:
    for order in view.orders("shipped"):
        # An item on final sale would be a second reason.
        items = [each for each in view.items(order) if not each.final_sale]
        if items:
            text = f"I want to send back the {view.product(items[0])} from {view.named(order)}."
            return _declined(view, order, "order_not_delivered", text)
    return []


def _window(view: View) -> list[Part]:
    for order in view.orders("delivered"):
        items = [each for each in view.items(order) if not each.final_sale]
        if items and view.days_since_delivery(order) > RETURN_DAYS:
            text = f"The {view.product(items[0])} from {view.named(order)} is not for me, I want my money back for it."
            return _declined(view, order, "return_window_over", text)
    return []


def _final_sale(view: View) -> list[Part]:
    for order in view.orders("delivered"):
        items = [each for each in view.items(order) if each.final_sale]
        if items and view.days_since_delivery(order) <= RETURN_DAYS:
            text = f"I want to send back the {view.product(items[0])} from {view.named(order)} and get a refund."
            return _declined(view, order, "final_sale", text)
    return []


def _reason(view: View) -> list[Part]:
    for order in view.orders("pending"):
        why = view.rng.choice(
            (
                "I have found it cheaper elsewhere.",
                "Your delivery takes too long.",
                "I do not like your company any more.",
            )
        )
        return _declined(
            view, order, "reason_not_accepted", f"Cancel {view.named(order)}. {why} That is my only reason."
        )
    return []


def _different(view: View) -> list[Part]:
    for order in view.orders("delivered"):
        item = view.items(order)[0]
        other = view.rng.choice([each for product, each in view.world.products.items() if product != item.product])
        text = f"I would like to exchange the {view.product(item)} from {view.named(order)} for a {other}."
        return _declined(view, order, "different_product", text)
    return []


def _out_of_stock(view: View) -> list[Part]:
    for order in view.orders("pending", "delivered"):
        for item in view.items(order):
            found = view.other_variant(item, available=False)
            if found is not None:
                verb = "swap" if order.status == "pending" else "exchange"
                text = f"Please {verb} the {view.product(item)} in {view.named(order)} for one {found[1]}. "
                text += "Nothing else will do."
                return _declined(view, order, "out_of_stock", text)
    return []


def _gift_card(view: View) -> list[Part]:
    for order in view.orders("pending"):
        total = sum(each.price for each in view.items(order))
        cards = [each for each in view.methods() if each.balance is not None and each.balance < total]
        if cards:
            text = f"I want to pay for all of {view.named(order)} with my gift card instead."
            return _declined(view, order, "gift_card_balance", text)
    return []


_MAKERS: Final[tuple[Callable[[View], list[Part]], ...]] = (
    _not_pending,
    _not_delivered,
    _window,
    _final_sale,
    _reason,
    _different,
    _out_of_stock,
    _gift_card,
)
