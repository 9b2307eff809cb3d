"""A shop: its customers, payment methods, products and orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RETURN_DAYS: Final = 30
"""Days after its delivery in which an order may be sent back."""


@dataclass(frozen=True, slots=True)
class Address:
    """A postal address."""

    street: str
    city: str
    state: str
    zip: str


@dataclass(frozen=True, slots=True)
class User:
    """A customer."""

    id: str
    first_name: str
    last_name: str
    email: str
    address: Address


@dataclass(frozen=True, slots=True)
class PaymentMethod:
    """A payment method: ``credit_card``, ``paypal`` or ``gift_card``; only the last has a balance."""

    id: str
    user: str
    kind: str
    last_four: str | None
    balance: int | None


@dataclass(frozen=True, slots=True)
class Variant:
    """An orderable item: a product with all its options chosen."""

    id: str
    product: str
    options: tuple[tuple[str, str], ...]
    price: int
    stock: int
    final_sale: bool


@dataclass(frozen=True, slots=True)
class Order:
    """An order of distinct variants.

    Attributes:
        prices: What each item cost.
    """

    id: str
    user: str
    status: str
    ordered_on: str
    delivered_on: str | None
    address: Address
    items: tuple[str, ...]
    payment: str
    prices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class World:
    """A shop.

    Attributes:
        today: The date of the conversation, in ISO form.
    """

    today: str
    users: dict[str, User]
    payments: dict[str, PaymentMethod]
    products: dict[str, str]
    variants: dict[str, Variant]
    orders: dict[str, Order]
