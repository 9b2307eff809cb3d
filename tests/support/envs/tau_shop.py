"""A shop in the files of tau-bench's retail domain: four customers, each with orders of every status."""

import json
from pathlib import Path
from typing import Any

_NAMES = (("Ada", "Abara"), ("Boris", "Berg"), ("Carla", "Castillo"), ("Dara", "Dahl"))
_PRODUCTS = {
    "backpack": 79.0,
    "desk lamp": 49.0,
    "kettle": 55.0,
    "keyboard": 119.0,
    "office chair": 249.0,
    "yoga mat": 39.0,
}
_OPTIONS = [(colour, size) for colour in ("black", "blue", "red") for size in ("small", "large")]
_SURCHARGES = (0.0, -4.5, 6.0, 12.5, -8.0, 3.0)
"""What each variant costs beyond its product's base price; the last variant is not available."""
_STATUSES = ("pending", "pending", "delivered", "delivered", "processed", "pending")


def write_tau_shop(folder: Path) -> Path:
    """Write ``users.json``, ``products.json`` and ``orders.json``, and return their folder.

    Customers are ``customer_0`` to ``customer_3``: the gift cards of the even ones hold a dollar, of the odd ones 500.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(len(_NAMES))
    shop = {
        "users": {f"customer_{number}": _user(number) for number in numbers},
        "products": {f"p{number}": _product(number, name) for number, name in enumerate(_PRODUCTS)},
        "orders": {f"#{name}": _order(number, index) for number in numbers for index, name in _order_names(number)},
    }
    for name, records in shop.items():
        (folder / f"{name}.json").write_text(json.dumps(records))
    return folder


def _order_names(customer: int) -> list[tuple[int, str]]:
    return [(index, f"W{1000 + 10 * customer + index}") for index in range(len(_STATUSES))]


def _user(number: int) -> dict[str, Any]:
    first_name, family_name = _NAMES[number]
    methods = {
        f"credit_card_{number}": {"source": "credit_card", "brand": "visa", "last_four": f"000{number}"},
        f"paypal_{number}": {"source": "paypal"},
        f"gift_card_{number}": {"source": "gift_card", "balance": 500 if number % 2 else 1},
    }
    return {
        "name": {"first_name": first_name, "last_name": family_name},
        "address": _address(number),
        "email": f"{first_name}.{family_name}@example.com",
        "payment_methods": methods,
        "orders": [f"#{name}" for _, name in _order_names(number)],
    }


def _address(number: int) -> dict[str, str]:
    street = {"address1": f"{number + 1} Elm Street", "address2": "", "country": "USA"}
    return {**street, "city": "Dunmore", "state": "PA", "zip": f"1850{number}"}


def _product(number: int, name: str) -> dict[str, Any]:
    variants = {
        f"i{number}{variant}": {
            "item_id": f"i{number}{variant}",
            "options": {"colour": colour, "size": size},
            "available": variant < len(_OPTIONS) - 1,
            "price": _price(number, variant),
        }
        for variant, (colour, size) in enumerate(_OPTIONS)
    }
    return {"name": name, "product_id": f"p{number}", "variants": variants}


def _price(product: int, variant: int) -> float:
    return list(_PRODUCTS.values())[product] + _SURCHARGES[variant]


def _order(customer: int, index: int) -> dict[str, Any]:
    first = (customer + index) % len(_PRODUCTS)
    variants = ((first, 0), ((first + 1) % len(_PRODUCTS), index % 3))
    total = sum(_price(product, variant) for product, variant in variants)
    method = f"paypal_{customer}" if index % 2 else f"credit_card_{customer}"
    return {
        "user_id": f"customer_{customer}",
        "address": _address(customer),
        "items": [
            {"item_id": f"i{product}{variant}", "price": _price(product, variant)} for product, variant in variants
        ],
        "status": _STATUSES[index],
        "payment_history": [{"transaction_type": "payment", "amount": total, "payment_method_id": method}],
    }
