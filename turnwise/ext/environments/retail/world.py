"""Initial state of a shop, drawn from a seed: customers, products, orders."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final

from turnwise.seeding import stable_hash

SPLITS: Final = ("train", "test")
RETURN_DAYS: Final = 30
"""Days after its delivery in which an order may be sent back."""

_FIRST: Final = (  # noqa: SIM905
    "Ada Amir Bea Boris Carla Chen Dara Diego Elif Emil Farah Felix Gita Goran Hilda Hugo Ines Ivo Jonas Juno Kira "
    "Kofi Lars Leila Mara Milo Nadia Nils Olena Omar Petra Priya Rafael Runa Sami Sofia Tariq Thea Uma Viktor Wanda "
    "Yusuf Zara"
).split()
_LAST: Final = (  # noqa: SIM905
    "Abara Almeida Berg Bianchi Castillo Dahl Dvorak Eriksen Farkas Fofana Garcia Haddad Hoffmann Ivanova Jansen Kaya "
    "Keller Kowalski Larsen Lindqvist Mbeki Meyer Moreau Nakamura Novak Okafor Ortiz Patel Petrov Quispe Rahman Rossi "
    "Santos Schneider Silva Sorensen Tanaka Toledo Ueda Vargas Weber Winter Yilmaz Zhang"
).split()
_STREETS: Final = (  # noqa: SIM905
    "Alder Birch Cedar Chestnut Elm Harbour Hill Lake Linden Maple Mill Oak Orchard Park River Spruce Station Walnut"
).split()
_CITIES: Final = (
    ("Arborfield", "OH", "440"),
    ("Brookhaven", "NY", "117"),
    ("Clearwater", "FL", "337"),
    ("Dunmore", "PA", "185"),
    ("Eastport", "ME", "046"),
    ("Fairbury", "IL", "617"),
    ("Glenwood", "CO", "816"),
    ("Highmore", "SD", "573"),
    ("Ironwood", "MI", "499"),
    ("Lakeside", "CA", "920"),
)
_CATALOGUE: Final[dict[str, tuple[int, dict[str, tuple[str, ...]]]]] = {
    "desk lamp": (4_900, {"colour": ("black", "white", "brass"), "bulb": ("warm", "cold")}),
    "hiking boots": (12_900, {"size": ("38", "40", "42", "44"), "colour": ("brown", "grey")}),
    "backpack": (7_900, {"colour": ("green", "black", "red"), "volume": ("20 litres", "30 litres")}),
    "kettle": (5_500, {"capacity": ("1 litre", "1.7 litres"), "finish": ("steel", "black", "white")}),
    "headphones": (14_900, {"connection": ("wired", "wireless"), "colour": ("black", "silver", "blue")}),
    "office chair": (24_900, {"material": ("mesh", "leather", "fabric"), "armrests": ("fixed", "adjustable")}),
    "water bottle": (2_400, {"capacity": ("0.5 litres", "0.75 litres"), "colour": ("blue", "pink", "steel")}),
    "coffee grinder": (8_900, {"drive": ("manual", "electric"), "colour": ("black", "silver")}),
    "yoga mat": (3_900, {"thickness": ("4 mm", "6 mm"), "colour": ("purple", "green", "grey")}),
    "running jacket": (9_900, {"size": ("S", "M", "L"), "colour": ("yellow", "navy", "black")}),
    "keyboard": (11_900, {"switches": ("linear", "tactile", "clicky"), "layout": ("full", "compact")}),
    "tablet case": (3_500, {"size": ("10 inch", "12 inch"), "colour": ("brown", "black", "red")}),
    "bookshelf": (17_900, {"height": ("90 cm", "180 cm"), "wood": ("oak", "pine", "walnut")}),
    "sleeping bag": (13_500, {"length": ("regular", "long"), "season": ("summer", "winter", "all year")}),
}


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
        prices: What each item cost; empty: what it costs now.
    """

    id: str
    user: str
    status: str
    ordered_on: str
    delivered_on: str | None
    address: Address
    items: tuple[str, ...]
    payment: str
    prices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    """A shop.

    Attributes:
        seed: The seed that it was drawn from, or the folder that it was read from.
        today: The date of the conversation, in ISO form.
    """

    seed: int | str
    today: str
    users: dict[str, User]
    payments: dict[str, PaymentMethod]
    products: dict[str, str]
    variants: dict[str, Variant]
    orders: dict[str, Order]

    @property
    def split(self) -> str:
        """``test`` for about a quarter of all shops, decided by the customers."""
        return _split(self.users.values())

    def variants_of(self, product: str) -> list[Variant]:
        """Return the variants of a product."""
        return [variant for variant in self.variants.values() if variant.product == product]


@functools.lru_cache(maxsize=64)
def draw(seed: int) -> World:
    """Draw a shop of 14 products and 20 customers, each with three to five orders."""
    rng = random.Random(stable_hash("retail", seed))
    today = date(2025, 3, 1) + timedelta(days=rng.randrange(270))
    numbers = iter(rng.sample(range(1_000_000, 10_000_000), 600))
    users = {user.id: user for user in _users(seed)}
    payments = {method.id: method for user in users for method in _payment_methods(rng, user, numbers)}
    products = {f"p{next(numbers)}": name for name in _CATALOGUE}
    variants = {
        variant.id: variant for product, name in products.items() for variant in _variants(rng, product, name, numbers)
    }
    orders: dict[str, Order] = {}
    for user in users.values():
        methods = [method for method in payments.values() if method.user == user.id]
        for _ in range(rng.randint(3, 5)):
            order = _order(rng, user, methods, list(variants.values()), today, f"W{next(numbers)}")
            orders[order.id] = order
    return World(seed, today.isoformat(), users, payments, products, variants, orders)


def world_seed(split: str, seed: int, index: int) -> int:
    """Return the seed of the ``index``-th shop of a split."""
    tried = (stable_hash("retail world", split, seed, index, attempt) for attempt in itertools.count())
    return next(candidate for candidate in tried if _split(_users(candidate)) == split)


def _split(users: Iterable[User]) -> str:
    people = [part for user in users for part in (user.email, user.address.street)]
    return "test" if stable_hash(*people) % 4 == 0 else "train"


def _address(rng: random.Random) -> Address:
    city, state, prefix = rng.choice(_CITIES)
    return Address(
        f"{rng.randint(1, 980)} {rng.choice(_STREETS)} Street", city, state, f"{prefix}{rng.randint(10, 99)}"
    )


def _users(seed: int) -> Iterator[User]:
    # Users have their own generator: the split of a shop is known without drawing the rest of it.
    rng = random.Random(stable_hash("retail customers", seed))
    for pair in rng.sample(range(len(_FIRST) * len(_LAST)), 20):
        first_name, last_name = _FIRST[pair // len(_LAST)], _LAST[pair % len(_LAST)]
        number = rng.randint(1000, 9999)
        name = f"{first_name}.{last_name}".lower()
        yield User(
            f"{name.replace('.', '_')}_{number}", first_name, last_name, f"{name}{number}@example.com", _address(rng)
        )


def _payment_methods(rng: random.Random, user: str, numbers: Iterator[int]) -> Iterator[PaymentMethod]:
    yield PaymentMethod(f"card_{next(numbers)}", user, "credit_card", f"{rng.randint(0, 9999):04}", None)
    if rng.random() < 0.6:
        yield PaymentMethod(f"paypal_{next(numbers)}", user, "paypal", None, None)
    if rng.random() < 0.75:
        balance = rng.choice((rng.randint(500, 4_000), rng.randint(30_000, 90_000)))
        yield PaymentMethod(f"gift_{next(numbers)}", user, "gift_card", None, balance)


def _variants(rng: random.Random, product: str, name: str, numbers: Iterator[int]) -> Iterator[Variant]:
    base, options = _CATALOGUE[name]
    for values in itertools.product(*options.values()):
        price = base + 50 * rng.randint(-base // 400, base // 400)
        stock = 0 if rng.random() < 0.2 else rng.randint(1, 30)
        pairs = tuple(zip(options, values, strict=True))
        yield Variant(f"i{next(numbers)}", product, pairs, price, stock, rng.random() < 0.12)


def _order(
    rng: random.Random, user: User, methods: list[PaymentMethod], variants: list[Variant], today: date, name: str
) -> Order:
    status = rng.choices(("pending", "shipped", "delivered"), (45, 12, 43))[0]
    items: dict[str, str] = {}
    for variant in rng.sample(variants, rng.randint(1, 4)):
        items.setdefault(variant.product, variant.id)
    age = {"pending": (0, 2), "shipped": (3, 6), "delivered": (5, 75)}[status]
    ordered = today - timedelta(days=rng.randint(*age))
    delivered = None
    if status == "delivered":
        # Not near the end of the window: whether the day of the delivery counts would be ambiguous there.
        days = min(rng.choice((rng.randint(1, RETURN_DAYS - 5), rng.randint(RETURN_DAYS + 5, 70))), 70)
        delivered = today - timedelta(days=days)
        ordered = delivered - timedelta(days=rng.randint(2, 6))
    paid_with = rng.choice([method for method in methods if method.kind != "gift_card"])
    address = user.address if rng.random() < 0.8 else _address(rng)
    return Order(
        id=name,
        user=user.id,
        status=status,
        ordered_on=ordered.isoformat(),
        delivered_on=None if delivered is None else delivered.isoformat(),
        address=address,
        items=tuple(items.values()),
        payment=paid_with.id,
    )
