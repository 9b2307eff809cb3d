"""A shop: customers, products, orders and what was ordered.

Owns: :data:`SHOP`.
"""

from __future__ import annotations

import random
from datetime import date
from typing import Final

from turnwise.envs.sql.schema import Rows, Schema, Template, day, people, titles

_CITIES: Final = ("Basel", "Gent", "Lyon", "Malmo", "Porto", "Turin")
_CATEGORIES: Final = ("garden", "kitchen", "office", "sports", "toys")
_STATUSES: Final = ("cancelled", "delivered", "open", "returned")
_ADJECTIVES: Final = ("Blue", "Compact", "Folding", "Heavy", "Light", "Nordic", "Quick", "Round", "Silent", "Sturdy")
_NOUNS: Final = ("Basket", "Bench", "Board", "Bottle", "Chair", "Lamp", "Rack", "Set", "Stand", "Table")


def _rows(rng: random.Random) -> Rows:
    customers = [
        (number, name, rng.choice(_CITIES), day(rng, date(2020, 1, 1), date(2023, 6, 30)))
        for number, name in enumerate(people(rng, 110), 1)
    ]
    products = [
        (number, title, rng.choice(_CATEGORIES), rng.randint(300, 25_000) / 100)
        for number, title in enumerate(titles(rng, 45, _ADJECTIVES, _NOUNS), 1)
    ]
    orders, lines = [], []
    for number in range(1, 381):
        # Some customers and some products are never ordered.
        customer = rng.randint(1, 96)
        status = rng.choices(_STATUSES, (10, 65, 15, 10))[0]
        orders.append((number, customer, day(rng, date(2023, 1, 1), date(2024, 12, 31)), status))
        for product in rng.sample(products[:41], rng.randint(1, 4)):
            price = round(product[3] * rng.choice((0.8, 0.9, 1.0, 1.0)), 2)
            lines.append((number, product[0], rng.randint(1, 6), price))
    return {"customers": customers, "products": products, "orders": orders, "order_lines": lines}


SHOP: Final = Schema(
    name="shop",
    tables="""
CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL, joined_on TEXT NOT NULL);
CREATE TABLE products (id INTEGER PRIMARY KEY, title TEXT NOT NULL, category TEXT NOT NULL, list_price REAL NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer_id INTEGER NOT NULL REFERENCES customers(id),
    ordered_on TEXT NOT NULL, status TEXT NOT NULL);
CREATE TABLE order_lines (order_id INTEGER NOT NULL REFERENCES orders(id), product_id INTEGER NOT NULL
    REFERENCES products(id), quantity INTEGER NOT NULL, unit_price REAL NOT NULL, PRIMARY KEY (order_id, product_id));
""",
    rows=_rows,
    templates=(
        Template(
            "How many orders with the status '{status}' were placed in {year}?",
            "SELECT COUNT(*) FROM orders WHERE status = '{status}' AND strftime('%Y', ordered_on) = '{year}'",
            {"status": _STATUSES, "year": ("2023", "2024")},
        ),
        Template(
            "What is the revenue (quantity times unit price, over delivered orders) from customers in {city}, rounded "
            "to two decimals?",
            "SELECT ROUND(SUM(l.quantity * l.unit_price), 2) FROM order_lines l JOIN orders o ON o.id = l.order_id "
            "JOIN customers c ON c.id = o.customer_id WHERE o.status = 'delivered' AND c.city = '{city}'",
            {"city": _CITIES},
        ),
        Template(
            "For each product category: how many units were sold in orders of {year} that are not cancelled? Give "
            "category and units, the most units first (ties by category).",
            "SELECT p.category, SUM(l.quantity) AS units FROM order_lines l JOIN products p ON p.id = l.product_id "
            "JOIN orders o ON o.id = l.order_id WHERE o.status <> 'cancelled' AND o.ordered_on LIKE '{year}-%' "
            "GROUP BY p.category ORDER BY units DESC, p.category",
            {"year": ("2023", "2024")},
        ),
        Template(
            "Which customers placed at least {count} orders in {year}? Give their names and how many orders these are.",
            "SELECT c.name, COUNT(*) FROM customers c JOIN orders o ON o.customer_id = c.id "
            "WHERE o.ordered_on LIKE '{year}-%' GROUP BY c.id HAVING COUNT(*) >= {count}",
            {"count": (3, 4, 5), "year": ("2023", "2024")},
        ),
        Template(
            "List the names of all customers from {city} who have never placed an order.",
            "SELECT name FROM customers WHERE city = '{city}' AND id NOT IN (SELECT customer_id FROM orders)",
            {"city": _CITIES},
        ),
        Template(
            "Which products of the category {category} have a list price above the average list price of all products? "
            "Give title and list price, the most expensive first (ties by title).",
            "SELECT title, list_price FROM products WHERE category = '{category}' AND list_price > "
            "(SELECT AVG(list_price) FROM products) ORDER BY list_price DESC, title",
            {"category": _CATEGORIES},
        ),
        Template(
            "For each month of {year}, written like {year}-01: how many different customers placed an order? Give "
            "month and number, in the order of the months.",
            "SELECT substr(ordered_on, 1, 7) AS month, COUNT(DISTINCT customer_id) FROM orders "
            "WHERE ordered_on LIKE '{year}-%' GROUP BY month ORDER BY month",
            {"year": ("2023", "2024")},
        ),
        Template(
            "Name the {count} customers who spent the most (quantity times unit price, over orders that are not "
            "cancelled), with the amount rounded to two decimals, the largest first (ties by name).",
            "SELECT c.name, ROUND(SUM(l.quantity * l.unit_price), 2) AS spent FROM customers c "
            "JOIN orders o ON o.customer_id = c.id JOIN order_lines l ON l.order_id = o.id "
            "WHERE o.status <> 'cancelled' GROUP BY c.id ORDER BY spent DESC, c.name LIMIT {count}",
            {"count": (3, 4, 5, 6, 7, 8)},
        ),
    ),
)
