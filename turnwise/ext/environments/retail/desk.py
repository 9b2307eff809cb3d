"""Read operations of the retail desk, limited to the identified customer."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ToolError, shown
from turnwise.ext.environments.retail.store import Store
from turnwise.tools.core import function_tool

Row = sqlite3.Row


@dataclass(slots=True)
class Desk:
    """State of a conversation with the shop.

    Attributes:
        customer: Id of the identified customer, if any.
        transferred: Whether the customer was transferred: nothing can be changed any more.
    """

    store: Store
    customer: str | None = None
    transferred: bool = False

    def identify(self, user: Row | None, what: str) -> str:
        """Identify the customer by a lookup's result. Raises ToolError for no result, or another customer."""
        if user is None:
            raise ToolError(f"there is no customer with {what}")
        if self.customer not in (None, user["user_id"]):
            raise ToolError("this conversation is with another customer: one conversation serves one customer")
        self.customer = user["user_id"]
        return self.customer

    def identified(self) -> str:
        """Return the customer's id. Raises ToolError before identification."""
        if self.customer is None:
            raise ToolError("no customer has been identified: find the customer by e-mail, or by name and zip, first")
        return self.customer

    def user(self, user_id: str) -> Row:
        """Return the customer's row. Raises ToolError for other ids."""
        if user_id != self.identified():
            raise ToolError(f"{shown(user_id)} is not the customer who was identified in this conversation")
        user = self.store.row("SELECT * FROM users WHERE user_id = ?", user_id)
        assert user is not None
        return user

    def order(self, order_id: str) -> Row:
        """Return an order of the customer. Raises ToolError for other ids."""
        customer = self.identified()
        order = self.store.row("SELECT * FROM orders WHERE order_id = ?", order_id.strip().removeprefix("#"))
        if order is None:
            raise ToolError(f"there is no order {shown(order_id)}: order ids look like W1234567")
        if order["user_id"] != customer:
            raise ToolError(f"order {shown(order_id)} belongs to another customer")
        return order

    def payment_method(self, payment_id: str) -> Row:
        """Return a payment method of the customer. Raises ToolError for other ids."""
        customer = self.identified()
        sql = "SELECT * FROM payment_methods WHERE payment_id = ? AND user_id = ?"
        method = self.store.row(sql, payment_id.strip(), customer)
        if method is None:
            raise ToolError(f"the customer has no payment method {shown(payment_id)}: see get_user")
        return method

    def variant(self, item_id: str) -> Row:
        """Return a variant with its product's name. Raises ToolError for unknown ids."""
        sql = "SELECT variants.*, name FROM variants JOIN products USING (product_id) WHERE item_id = ?"
        variant = self.store.row(sql, item_id.strip())
        if variant is None:
            raise ToolError(f"there is no item {shown(item_id)}: see get_product for the ids of a product's variants")
        return variant

    def net_paid(self, order_id: str) -> dict[str, int]:
        """Return the net amounts paid for an order by payment method, in cents, without zeros."""
        sql = (
            "SELECT payment_id, SUM(CASE kind WHEN 'payment' THEN amount ELSE -amount END) AS net FROM payments "
            "WHERE order_id = ? GROUP BY payment_id ORDER BY payment_id"
        )
        return {row["payment_id"]: row["net"] for row in self.store.rows(sql, order_id) if row["net"]}


class Lookups:
    """The read-only tools."""

    desk: Desk

    @function_tool(inline=True)
    def find_user_by_email(self, email: str) -> str:
        """Identify the customer by e-mail address; returns the user id."""
        sql = "SELECT user_id FROM users WHERE email = ?"
        return self.desk.identify(self.desk.store.row(sql, email.strip().lower()), "this e-mail address")

    @function_tool(inline=True)
    def find_user_by_name(self, first_name: str, last_name: str, zip_code: str) -> str:
        """Identify the customer by name and zip code; returns the user id."""
        sql = "SELECT user_id FROM users WHERE lower(first_name) = ? AND lower(last_name) = ? AND zip = ?"
        values = (first_name.strip().lower(), last_name.strip().lower(), zip_code.strip())
        return self.desk.identify(self.desk.store.row(sql, *values), "this name and zip code")

    @function_tool(inline=True)
    def get_user(self, user_id: str) -> dict[str, Any]:
        """Name, address, payment methods and order ids of the customer."""
        user = self.desk.user(user_id)
        methods = self.desk.store.rows("SELECT * FROM payment_methods WHERE user_id = ? ORDER BY payment_id", user_id)
        orders = self.desk.store.rows("SELECT order_id FROM orders WHERE user_id = ? ORDER BY order_id", user_id)
        return {
            "user_id": user["user_id"],
            "name": f"{user['first_name']} {user['last_name']}",
            "email": user["email"],
            "address": _address(user),
            "payment_methods": [_payment_method(method) for method in methods],
            "orders": [row["order_id"] for row in orders],
        }

    @function_tool(inline=True)
    def get_order(self, order_id: str) -> dict[str, Any]:
        """Status, address, items and payments of an order of the customer."""
        order = self.desk.order(order_id)
        sql = (
            "SELECT order_items.*, product_id, name, options FROM order_items "
            "JOIN variants USING (item_id) JOIN products USING (product_id) WHERE order_id = ? ORDER BY item_id"
        )
        view: dict[str, Any] = {
            "order_id": order["order_id"],
            "status": order["status"],
            "address": _address(order),
            "items": [_item(row) for row in self.desk.store.rows(sql, order["order_id"])],
        }
        sql = "SELECT payment_id, kind, amount FROM payments WHERE order_id = ? ORDER BY rowid"
        view["payments"] = [
            {"payment_id": row["payment_id"], "kind": row["kind"], "amount": dollars(row["amount"])}
            for row in self.desk.store.rows(sql, order["order_id"])
        ]
        if order["cancel_reason"] is not None:
            view["cancel_reason"] = order["cancel_reason"]
        return view

    @function_tool(inline=True)
    def list_products(self) -> dict[str, str]:
        """The names of all products, with their product ids."""
        return {row["name"]: row["product_id"] for row in self.desk.store.rows("SELECT * FROM products ORDER BY name")}

    @function_tool(inline=True)
    def get_product(self, product_id: str) -> dict[str, Any]:
        """All variants of a product: item id, options, price, and whether it is available."""
        product = self.desk.store.row("SELECT * FROM products WHERE product_id = ?", product_id.strip())
        if product is None:
            raise ToolError(f"there is no product {shown(product_id)}: see list_products")
        variants = self.desk.store.rows(
            "SELECT * FROM variants WHERE product_id = ? ORDER BY item_id", product["product_id"]
        )
        return {
            "product_id": product["product_id"],
            "name": product["name"],
            "variants": [
                {
                    "item_id": variant["item_id"],
                    "options": json.loads(variant["options"]),
                    "price": dollars(variant["price"]),
                    "available": variant["stock"] > 0,
                }
                for variant in variants
            ],
        }


def dollars(cents: int) -> str:
    """Format an amount: ``$12.50``."""
    return f"{'-' if cents < 0 else ''}${abs(cents) // 100}.{abs(cents) % 100:02}"


def _address(row: Row) -> dict[str, str]:
    return {key: row[key] for key in ("street", "city", "state", "zip")}


def _payment_method(row: Row) -> dict[str, Any]:
    view = {"payment_id": row["payment_id"], "kind": row["kind"]}
    if row["last_four"] is not None:
        view["last_four"] = row["last_four"]
    if row["balance"] is not None:
        view["balance"] = dollars(row["balance"])
    return view


def _item(row: Row) -> dict[str, Any]:
    view = {
        "item_id": row["item_id"],
        "product_id": row["product_id"],
        "product": row["name"],
        "options": json.loads(row["options"]),
        "price": dollars(row["price"]),
        "state": row["state"],
    }
    if row["new_item_id"] is not None:
        view |= {"exchanged_for": row["new_item_id"], "new_price": dollars(row["new_price"])}
    return view
