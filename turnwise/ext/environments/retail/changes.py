"""Write operations of the retail desk; each is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias

from turnwise.errors import ToolError, shown
from turnwise.ext.environments.retail.desk import Desk, Row, dollars

CancelReason: TypeAlias = Literal["no longer needed", "ordered by mistake"]
DeclineReason: TypeAlias = Literal[
    "order_not_pending",
    "order_not_delivered",
    "return_window_over",
    "final_sale",
    "reason_not_accepted",
    "different_product",
    "out_of_stock",
    "gift_card_balance",
]
Topic: TypeAlias = Literal["account_data", "courier", "damaged_goods", "invoice"]


def cancel_order(desk: Desk, order_id: str, reason: CancelReason) -> dict[str, Any]:
    """Cancel a pending order and refund it."""
    with desk.store.transaction():
        order = _open_order(desk, order_id, "pending", "cancelled")
        refunds = _refund_all(desk, order["order_id"])
        for item in desk.store.rows("SELECT item_id FROM order_items WHERE order_id = ?", order["order_id"]):
            _change_stock(desk, item["item_id"], +1)
        desk.store.write("UPDATE order_items SET state = 'cancelled' WHERE order_id = ?", order["order_id"])
        sql = "UPDATE orders SET status = 'cancelled', cancel_reason = ? WHERE order_id = ?"
        desk.store.write(sql, reason, order["order_id"])
    return {"order_id": order["order_id"], "status": "cancelled", "refunded": _amounts(refunds)}


def change_order_address(
    desk: Desk, order_id: str, street: str, city: str, state: str, zip_code: str
) -> dict[str, Any]:
    """Change the address of a pending order."""
    parts = _address(street, city, state, zip_code)
    with desk.store.transaction():
        order = _open_order(desk, order_id, "pending", "sent to another address")
        sql = "UPDATE orders SET street = ?, city = ?, state = ?, zip = ? WHERE order_id = ?"
        desk.store.write(sql, *parts, order["order_id"])
    return {"order_id": order["order_id"], "address": ", ".join(parts)}


def change_user_address(desk: Desk, user_id: str, street: str, city: str, state: str, zip_code: str) -> dict[str, Any]:
    """Change the customer's own address; orders keep theirs."""
    parts = _address(street, city, state, zip_code)
    with desk.store.transaction():
        _not_transferred(desk)
        desk.user(user_id)
        desk.store.write("UPDATE users SET street = ?, city = ?, state = ?, zip = ? WHERE user_id = ?", *parts, user_id)
    return {"user_id": user_id, "address": ", ".join(parts)}


def change_order_payment(desk: Desk, order_id: str, payment_id: str) -> dict[str, Any]:
    """Move a pending order to another payment method."""
    with desk.store.transaction():
        order = _open_order(desk, order_id, "pending", "paid in another way")
        method = desk.payment_method(payment_id)
        if set(desk.net_paid(order["order_id"])) == {method["payment_id"]}:
            raise ToolError(f"order {order['order_id']} is paid with {method['payment_id']} already")
        refunds = _refund_all(desk, order["order_id"])
        _pay(desk, order["order_id"], method["payment_id"], sum(refunds.values()))
    return {"order_id": order["order_id"], "paid_with": method["payment_id"], "refunded": _amounts(refunds)}


def change_order_items(
    desk: Desk, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str], payment_id: str
) -> dict[str, Any]:
    """Replace items of a pending order by other variants of their products, once per order."""
    with desk.store.transaction():
        order = _open_order(desk, order_id, "pending", "changed")
        if order["items_changed"]:
            raise ToolError(f"the items of order {order['order_id']} were changed before: that can be done only once")
        pairs = _replacements(desk, order, item_ids, new_item_ids)
        for old, new in pairs:
            _change_stock(desk, old["item_id"], +1)
            _change_stock(desk, new["item_id"], -1)
            sql = "UPDATE order_items SET item_id = ?, price = ? WHERE order_id = ? AND item_id = ?"
            desk.store.write(sql, new["item_id"], new["price"], order["order_id"], old["item_id"])
        desk.store.write("UPDATE orders SET items_changed = 1 WHERE order_id = ?", order["order_id"])
        difference = _settle(desk, order["order_id"], payment_id, pairs)
    return {"order_id": order["order_id"], "items": [new["item_id"] for _, new in pairs], "difference": difference}


def return_items(desk: Desk, order_id: str, item_ids: Sequence[str], payment_id: str) -> dict[str, Any]:
    """Take back items of a delivered order and refund their price."""
    with desk.store.transaction():
        order = _open_order(desk, order_id, "delivered", "sent back")
        items = _ordered_items(desk, order, item_ids)
        method = desk.payment_method(payment_id)
        if method["kind"] != "gift_card" and desk.net_paid(order["order_id"]).get(method["payment_id"], 0) <= 0:
            raise ToolError("a return is paid back to what the order was paid with, or to a gift card of the customer")
        amount = sum(item["price"] for item in items)
        for item in items:
            sql = "UPDATE order_items SET state = 'returned' WHERE order_id = ? AND item_id = ?"
            desk.store.write(sql, order["order_id"], item["item_id"])
            # Item by item, so that several calls leave the same rows as one.
            _refund(desk, order["order_id"], method["payment_id"], item["price"])
    return {"order_id": order["order_id"], "returned": [item["item_id"] for item in items], "refunded": dollars(amount)}


def exchange_items(
    desk: Desk, order_id: str, item_ids: Sequence[str], new_item_ids: Sequence[str], payment_id: str
) -> dict[str, Any]:
    """Exchange items of a delivered order for other variants of their products."""
    with desk.store.transaction():
        order = _open_order(desk, order_id, "delivered", "exchanged")
        pairs = _replacements(desk, order, item_ids, new_item_ids)
        for old, new in pairs:
            _change_stock(desk, new["item_id"], -1)
            sql = (
                "UPDATE order_items SET state = 'exchanged', new_item_id = ?, new_price = ? "
                "WHERE order_id = ? AND item_id = ?"
            )
            desk.store.write(sql, new["item_id"], new["price"], order["order_id"], old["item_id"])
        difference = _settle(desk, order["order_id"], payment_id, pairs)
    return {"order_id": order["order_id"], "items": [new["item_id"] for _, new in pairs], "difference": difference}


def decline_request(desk: Desk, order_id: str, reason: DeclineReason) -> dict[str, Any]:
    """Record that a request about an order was refused, and why."""
    with desk.store.transaction():
        _not_transferred(desk)
        order = desk.order(order_id)
        record = desk.store.row("SELECT 1 FROM declined WHERE order_id = ? AND reason = ?", order["order_id"], reason)
        if record is not None:
            raise ToolError(f"this was noted before: order {order['order_id']}, {reason}")
        desk.store.write("INSERT INTO declined VALUES (?, ?)", order["order_id"], reason)
    return {"order_id": order["order_id"], "declined": reason}


def transfer_to_human(desk: Desk, topic: Topic) -> dict[str, Any]:
    """Transfer the customer to a human. Nothing can be changed after it."""
    with desk.store.transaction():
        _not_transferred(desk)
        desk.store.write("INSERT INTO transfers VALUES (?, ?)", desk.identified(), topic)
    desk.transferred = True
    return {"transferred": topic}


CHANGES: Final[dict[str, Callable[..., dict[str, Any]]]] = {
    function.__name__: function
    for function in (
        cancel_order,
        change_order_address,
        change_user_address,
        change_order_payment,
        change_order_items,
        return_items,
        exchange_items,
        decline_request,
        transfer_to_human,
    )
}
"""The changes by the names of their tools."""


def _not_transferred(desk: Desk) -> None:
    if desk.transferred:
        raise ToolError("the customer was transferred: a colleague goes on, and nothing can be changed here")


def _open_order(desk: Desk, order_id: str, status: str, done: str) -> Row:
    _not_transferred(desk)
    order = desk.order(order_id)
    if order["status"] != status:
        raise ToolError(f"order {order['order_id']} is {order['status']}: only a {status} order can be {done}")
    return order


def _ordered_items(desk: Desk, order: Row, item_ids: Sequence[str]) -> list[Row]:
    if not item_ids:
        raise ToolError("item_ids is empty: name at least one item of the order")
    requested = [item_id.strip() for item_id in item_ids]
    if len(set(requested)) < len(requested):
        raise ToolError("item_ids names an item twice")
    sql = "SELECT * FROM order_items WHERE order_id = ?"
    ordered = {row["item_id"]: row for row in desk.store.rows(sql, order["order_id"])}
    for item_id in requested:
        if item_id not in ordered:
            raise ToolError(f"order {order['order_id']} has no item {shown(item_id)}: it has {', '.join(ordered)}")
        if ordered[item_id]["state"] != "ordered":
            raise ToolError(f"item {item_id} of order {order['order_id']} is {ordered[item_id]['state']} already")
    return [ordered[item_id] for item_id in requested]


def _replacements(
    desk: Desk, order: Row, item_ids: Sequence[str], new_item_ids: Sequence[str]
) -> list[tuple[Row, Row]]:
    if len(item_ids) != len(new_item_ids):
        raise ToolError(f"item_ids has {len(item_ids)} entries and new_item_ids {len(new_item_ids)}: they form pairs")
    items = _ordered_items(desk, order, item_ids)
    sql = "SELECT item_id FROM order_items WHERE order_id = ?"
    order_items = {row["item_id"] for row in desk.store.rows(sql, order["order_id"])}
    pairs = []
    for item, new_item_id in zip(items, new_item_ids, strict=True):
        old, new = desk.variant(item["item_id"]), desk.variant(new_item_id)
        if new["item_id"] in order_items:
            raise ToolError(f"order {order['order_id']} holds item {new['item_id']} already")
        if old["product_id"] != new["product_id"]:
            raise ToolError(
                f"item {new['item_id']} is a {new['name']}: a {old['name']} is exchanged for a {old['name']}"
            )
        if new["stock"] < 1:
            raise ToolError(f"item {new['item_id']} is out of stock")
        order_items.add(new["item_id"])
        pairs.append((item, new))
    return pairs


def _settle(desk: Desk, order_id: str, payment_id: str, pairs: Sequence[tuple[Row, Row]]) -> str:
    method = desk.payment_method(payment_id)
    # Item by item, so that several calls leave the same rows as one; refunds come first, because they can be spent.
    differences: list[int] = sorted(new["price"] - old["price"] for old, new in pairs)
    for difference in differences:
        if difference > 0:
            _pay(desk, order_id, method["payment_id"], difference)
        elif difference < 0:
            _refund(desk, order_id, method["payment_id"], -difference)
    return dollars(sum(differences))


def _refund_all(desk: Desk, order_id: str) -> dict[str, int]:
    paid = desk.net_paid(order_id)
    remaining, refunds = sum(paid.values()), {}
    for payment_id, amount in paid.items():
        # A cheaper variant may have been refunded to a method that paid nothing: its net amount is negative.
        if (refund := min(amount, remaining)) > 0:
            _refund(desk, order_id, payment_id, refund)
            refunds[payment_id] = refund
            remaining -= refund
    return refunds


def _pay(desk: Desk, order_id: str, payment_id: str, amount: int) -> None:
    # Read now: earlier refunds and payments of this transaction count.
    method = desk.payment_method(payment_id)
    if method["kind"] == "gift_card":
        if method["balance"] < amount:
            raise ToolError(f"the gift card holds {dollars(method['balance'])}, and {dollars(amount)} is to be paid")
        _change_balance(desk, payment_id, -amount)
    desk.store.write("INSERT INTO payments VALUES (?, ?, 'payment', ?)", order_id, payment_id, amount)


def _refund(desk: Desk, order_id: str, payment_id: str, amount: int) -> None:
    # A method without a balance is unchanged: NULL stays NULL.
    _change_balance(desk, payment_id, amount)
    desk.store.write("INSERT INTO payments VALUES (?, ?, 'refund', ?)", order_id, payment_id, amount)


def _change_balance(desk: Desk, payment_id: str, change: int) -> None:
    desk.store.write("UPDATE payment_methods SET balance = balance + ? WHERE payment_id = ?", change, payment_id)


def _change_stock(desk: Desk, item_id: str, change: int) -> None:
    desk.store.write("UPDATE variants SET stock = stock + ? WHERE item_id = ?", change, item_id)


def _address(*parts: str) -> tuple[str, ...]:
    clean = tuple(" ".join(part.split()) for part in parts)
    if not all(clean):
        raise ToolError("an address needs a street, a city, a state and a zip code, none of them empty")
    return clean


def _amounts(refunds: dict[str, int]) -> dict[str, str]:
    return {payment_id: dollars(amount) for payment_id, amount in refunds.items()}
