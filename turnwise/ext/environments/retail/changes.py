"""Write operations of the retail desk; each is one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

from turnwise.errors import ToolError, shown
from turnwise.ext.environments.retail.desk import Desk, Row, dollars
from turnwise.tools.core import FunctionTool, function_tool

CancelReason: TypeAlias = Literal["no longer needed", "ordered by mistake"]
DeclineReason: TypeAlias = Literal[
    "order_not_pending",
    "order_not_delivered",
    "reason_not_accepted",
    "different_product",
    "out_of_stock",
    "gift_card_balance",
]
Topic: TypeAlias = Literal["account_data", "courier", "damaged_goods", "invoice"]
Items: TypeAlias = Annotated[list[str], "item ids of the order"]
NewItems: TypeAlias = Annotated[list[str], "as many item ids, each of the same product as its counterpart"]


class Changes:
    """The tools that change the shop; each is one transaction."""

    desk: Desk

    @function_tool(inline=True)
    def cancel_order(self, order_id: str, reason: CancelReason) -> dict[str, Any]:
        """Cancel a pending order."""
        with self.desk.store.transaction():
            order = _open_order(self.desk, order_id, "pending", "cancelled")
            refunds = _refund_all(self.desk, order["order_id"])
            for item in self.desk.store.rows("SELECT item_id FROM order_items WHERE order_id = ?", order["order_id"]):
                _change_stock(self.desk, item["item_id"], +1)
            self.desk.store.write("UPDATE order_items SET state = 'cancelled' WHERE order_id = ?", order["order_id"])
            sql = "UPDATE orders SET status = 'cancelled', cancel_reason = ? WHERE order_id = ?"
            self.desk.store.write(sql, reason, order["order_id"])
        return {"order_id": order["order_id"], "status": "cancelled", "refunded": _amounts(refunds)}

    @function_tool(inline=True)
    def change_order_address(self, order_id: str, street: str, city: str, state: str, zip_code: str) -> dict[str, Any]:
        """Send a pending order to another address."""
        parts = _address(street, city, state, zip_code)
        with self.desk.store.transaction():
            order = _open_order(self.desk, order_id, "pending", "sent to another address")
            sql = "UPDATE orders SET street = ?, city = ?, state = ?, zip = ? WHERE order_id = ?"
            self.desk.store.write(sql, *parts, order["order_id"])
        return {"order_id": order["order_id"], "address": ", ".join(parts)}

    @function_tool(inline=True)
    def change_user_address(self, user_id: str, street: str, city: str, state: str, zip_code: str) -> dict[str, Any]:
        """Change the customer's own address. Orders keep theirs."""
        parts = _address(street, city, state, zip_code)
        with self.desk.store.transaction():
            _not_transferred(self.desk)
            self.desk.user(user_id)
            sql = "UPDATE users SET street = ?, city = ?, state = ?, zip = ? WHERE user_id = ?"
            self.desk.store.write(sql, *parts, user_id)
        return {"user_id": user_id, "address": ", ".join(parts)}

    @function_tool(inline=True)
    def change_order_payment(self, order_id: str, payment_id: str) -> dict[str, Any]:
        """Pay a pending order with another payment method of the customer."""
        with self.desk.store.transaction():
            order = _open_order(self.desk, order_id, "pending", "paid in another way")
            method = self.desk.payment_method(payment_id)
            if set(self.desk.net_paid(order["order_id"])) == {method["payment_id"]}:
                raise ToolError(f"order {order['order_id']} is paid with {method['payment_id']} already")
            refunds = _refund_all(self.desk, order["order_id"])
            _pay(self.desk, order["order_id"], method["payment_id"], sum(refunds.values()))
        return {"order_id": order["order_id"], "paid_with": method["payment_id"], "refunded": _amounts(refunds)}

    @function_tool(inline=True)
    def change_order_items(
        self, order_id: str, item_ids: Items, new_item_ids: NewItems, payment_id: str
    ) -> dict[str, Any]:
        """Change items of a pending order to other variants of the same products; once per order."""
        with self.desk.store.transaction():
            order = _open_order(self.desk, order_id, "pending", "changed")
            if order["items_changed"]:
                raise ToolError(
                    f"the items of order {order['order_id']} were changed before: that can be done only once"
                )
            pairs = _replacements(self.desk, order, item_ids, new_item_ids)
            for old, new in pairs:
                _change_stock(self.desk, old["item_id"], +1)
                _change_stock(self.desk, new["item_id"], -1)
                sql = "UPDATE order_items SET item_id = ?, price = ? WHERE order_id = ? AND item_id = ?"
                self.desk.store.write(sql, new["item_id"], new["price"], order["order_id"], old["item_id"])
            self.desk.store.write("UPDATE orders SET items_changed = 1 WHERE order_id = ?", order["order_id"])
            difference = _settle(self.desk, order["order_id"], payment_id, pairs)
        return {"order_id": order["order_id"], "items": [new["item_id"] for _, new in pairs], "difference": difference}

    @function_tool(inline=True)
    def return_items(self, order_id: str, item_ids: Items, payment_id: str) -> dict[str, Any]:
        """Take items of a delivered order back; their price goes to the payment method."""
        with self.desk.store.transaction():
            order = _open_order(self.desk, order_id, "delivered", "sent back")
            items = _ordered_items(self.desk, order, item_ids)
            method = self.desk.payment_method(payment_id)
            paid = self.desk.net_paid(order["order_id"]).get(method["payment_id"], 0)
            if method["kind"] != "gift_card" and paid <= 0:
                raise ToolError(
                    "a return is paid back to what the order was paid with, or to a gift card of the customer"
                )
            amount = sum(item["price"] for item in items)
            for item in items:
                sql = "UPDATE order_items SET state = 'returned' WHERE order_id = ? AND item_id = ?"
                self.desk.store.write(sql, order["order_id"], item["item_id"])
                # Item by item, so that several calls leave the same rows as one.
                _refund(self.desk, order["order_id"], method["payment_id"], item["price"])
        returned = [item["item_id"] for item in items]
        return {"order_id": order["order_id"], "returned": returned, "refunded": dollars(amount)}

    @function_tool(inline=True)
    def exchange_items(self, order_id: str, item_ids: Items, new_item_ids: NewItems, payment_id: str) -> dict[str, Any]:
        """Exchange items of a delivered order for other variants of the same products."""
        with self.desk.store.transaction():
            order = _open_order(self.desk, order_id, "delivered", "exchanged")
            pairs = _replacements(self.desk, order, item_ids, new_item_ids)
            for old, new in pairs:
                _change_stock(self.desk, new["item_id"], -1)
                sql = (
                    "UPDATE order_items SET state = 'exchanged', new_item_id = ?, new_price = ? "
                    "WHERE order_id = ? AND item_id = ?"
                )
                self.desk.store.write(sql, new["item_id"], new["price"], order["order_id"], old["item_id"])
            difference = _settle(self.desk, order["order_id"], payment_id, pairs)
        return {"order_id": order["order_id"], "items": [new["item_id"] for _, new in pairs], "difference": difference}

    @function_tool(inline=True)
    def decline_request(self, order_id: str, reason: DeclineReason) -> dict[str, Any]:
        """Note that a request about an order is refused by the policy, and why."""
        with self.desk.store.transaction():
            _not_transferred(self.desk)
            order = self.desk.order(order_id)
            sql = "SELECT 1 FROM declined WHERE order_id = ? AND reason = ?"
            if self.desk.store.row(sql, order["order_id"], reason) is not None:
                raise ToolError(f"this was noted before: order {order['order_id']}, {reason}")
            self.desk.store.write("INSERT INTO declined VALUES (?, ?)", order["order_id"], reason)
        return {"order_id": order["order_id"], "declined": reason}

    @function_tool(inline=True)
    def transfer_to_human(self, topic: Topic) -> dict[str, Any]:
        """Hand the customer over to a human, for what the tools cannot do. Nothing can be changed afterwards."""
        with self.desk.store.transaction():
            _not_transferred(self.desk)
            self.desk.store.write("INSERT INTO transfers VALUES (?, ?)", self.desk.identified(), topic)
        self.desk.transferred = True
        return {"transferred": topic}


CHANGES: Final[dict[str, FunctionTool]] = {
    name: tool for name, tool in vars(Changes).items() if isinstance(tool, FunctionTool)
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
