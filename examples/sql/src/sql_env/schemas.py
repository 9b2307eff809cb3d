"""Generated databases: row generators, with the tables and question templates of ``shipped/NAME.toml``."""

from __future__ import annotations

import itertools
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from importlib import resources
from typing import Any, Final, TypeAlias

Rows: TypeAlias = Mapping[str, Sequence[Sequence[Any]]]
"""The rows of each table, in the order of its columns."""
Values: TypeAlias = dict[str, list[Any]]
"""Lists of values, by name, from which rows are drawn and questions are filled."""

FIRST_NAMES: Final = (  # noqa: SIM905
    "Agnes Bruno Celia Dario Edith Fabio Greta Henrik Irma Jakob Karin Leon Mona Nico Odile Paolo Rita Samir Tessa Ugo "
    "Vera Willem Yara Zeno"
).split()
LAST_NAMES: Final = (  # noqa: SIM905
    "Adler Bauer Costa Duarte Engel Ferri Gomez Holm Iversen Jung Kraus Lopes Marin Nagy Olsen Prado Reyes Sato Torres "
    "Urban Vidal Wolff Young Zorn"
).split()


@dataclass(frozen=True, slots=True)
class Template:
    """A question with placeholders.

    Attributes:
        question: The question, with ``{name}`` placeholders.
        gold: The gold query, with the same placeholders.
        gaps: The values of each placeholder.
    """

    question: str
    gold: str
    gaps: dict[str, list[Any]]

    def filled(self) -> Iterator[tuple[str, str]]:
        """Yield every question with its query."""
        for values in itertools.product(*self.gaps.values()):
            values_by_gap = dict(zip(self.gaps, values, strict=True))
            yield self.question.format(**values_by_gap), self.gold.format(**values_by_gap)


@dataclass(frozen=True, slots=True)
class Schema:
    """A kind of database.

    Attributes:
        tables: ``CREATE TABLE`` statements.
        draw: Draws the rows.
    """

    name: str
    tables: str
    values: Values
    templates: tuple[Template, ...]
    draw: Callable[[random.Random, Values], Rows]

    def rows(self, rng: random.Random) -> Rows:
        """Draw the rows of a database."""
        return self.draw(rng, self.values)


def people(rng: random.Random, count: int) -> list[str]:
    """Draw distinct names of persons."""
    pairs = rng.sample(range(len(FIRST_NAMES) * len(LAST_NAMES)), count)
    return [f"{FIRST_NAMES[pair // len(LAST_NAMES)]} {LAST_NAMES[pair % len(LAST_NAMES)]}" for pair in pairs]


def day(rng: random.Random, start: date, end: date) -> str:
    """Draw a date, in ISO form."""
    return (start + timedelta(days=rng.randint(0, (end - start).days))).isoformat()


def titles(rng: random.Random, count: int, adjectives: Sequence[str], nouns: Sequence[str]) -> list[str]:
    """Draw distinct two-word titles."""
    pairs = rng.sample(range(len(adjectives) * len(nouns)), count)
    return [f"{adjectives[pair // len(nouns)]} {nouns[pair % len(nouns)]}" for pair in pairs]


def _flight_rows(rng: random.Random, values: Values) -> Rows:
    flights = []
    for number in range(1, 421):
        origin, destination = rng.sample(values["codes"], 2)
        departs = (
            f"{day(rng, date(2024, 1, 1), date(2024, 12, 31))} {rng.randint(5, 22):02}:{rng.choice((0, 15, 30, 45)):02}"
        )
        # A cancelled flight has no delay.
        delay = None if rng.random() < 0.07 else max(0, rng.randint(-40, 120))
        fare = rng.randint(39, 480)
        flights.append(
            (number, rng.choice(values["airlines"])[0], origin, destination, departs, rng.randint(45, 320), delay, fare)
        )
    passengers, cabins = people(rng, 140), values["cabins"]
    bookings = [
        (number, rng.randint(1, 400), rng.choice(passengers), rng.choices(cabins, (1, 6, 2))[0], rng.randint(1, 5))
        for number in range(1, 701)
    ]
    return {"airports": values["airports"], "airlines": values["airlines"], "flights": flights, "bookings": bookings}


def _library_rows(rng: random.Random, values: Values) -> Rows:
    names, countries = people(rng, 150), values["countries"]
    authors = [
        (number, name, rng.choice(countries), rng.randint(1900, 1995)) for number, name in enumerate(names[:40], 1)
    ]
    books = [
        (number, title, rng.randint(1, 36), rng.choice(values["genres"]), rng.randint(1950, 2022), rng.randint(1, 6))
        for number, title in enumerate(titles(rng, 95, values["adjectives"], values["nouns"]), 1)
    ]
    members = [
        (number, name, rng.choice(values["cities"]), day(rng, date(2015, 1, 1), date(2022, 12, 31)))
        for number, name in enumerate(names[40:], 1)
    ]
    loans = []
    for number in range(1, 601):
        loaned = date.fromisoformat(day(rng, date(2023, 1, 1), date(2024, 11, 30)))
        returned = None if rng.random() < 0.12 else (loaned + timedelta(days=rng.randint(1, 60))).isoformat()
        loans.append((number, rng.randint(1, 88), rng.randint(1, 98), loaned.isoformat(), returned))
    return {"authors": authors, "books": books, "members": members, "loans": loans}


def _school_rows(rng: random.Random, values: Values) -> Rows:
    names = people(rng, 160)
    teachers = [(number, name, rng.choice(values["departments"])) for number, name in enumerate(names[:18], 1)]
    students = [
        (number, name, rng.randint(7, 12), day(rng, date(2006, 1, 1), date(2011, 12, 31)))
        for number, name in enumerate(names[18:], 1)
    ]
    courses = [
        (number, title, rng.randint(1, 16), rng.choice((2, 3, 4, 6)))
        for number, title in enumerate(titles(rng, 30, values["levels"], values["subjects"]), 1)
    ]
    enrolments = []
    for term in values["terms"]:
        for student in students:
            for course in rng.sample(courses[:28], rng.choice((0, 1, 2, 3, 3))):
                # Without a mark: dropped out.
                mark = None if rng.random() < 0.08 else rng.randint(2, 20) / 2
                enrolments.append((student[0], course[0], term, mark))
    return {"teachers": teachers, "students": students, "courses": courses, "enrolments": enrolments}


def _shop_rows(rng: random.Random, values: Values) -> Rows:
    customers = [
        (number, name, rng.choice(values["cities"]), day(rng, date(2020, 1, 1), date(2023, 6, 30)))
        for number, name in enumerate(people(rng, 110), 1)
    ]
    products = [
        (number, title, rng.choice(values["categories"]), rng.randint(300, 25_000) / 100)
        for number, title in enumerate(titles(rng, 45, values["adjectives"], values["nouns"]), 1)
    ]
    orders, lines = [], []
    for number in range(1, 381):
        # Some customers and some products are never ordered.
        customer = rng.randint(1, 96)
        status = rng.choices(values["statuses"], (10, 65, 15, 10))[0]
        orders.append((number, customer, day(rng, date(2023, 1, 1), date(2024, 12, 31)), status))
        for product in rng.sample(products[:41], rng.randint(1, 4)):
            price = round(product[3] * rng.choice((0.8, 0.9, 1.0, 1.0)), 2)
            lines.append((number, product[0], rng.randint(1, 6), price))
    return {"customers": customers, "products": products, "orders": orders, "order_lines": lines}


def _read_schema(name: str, draw: Callable[[random.Random, Values], Rows]) -> Schema:
    file = resources.files("sql_env") / "questions" / f"{name}.toml"
    record = tomllib.loads(file.read_text("utf-8"))
    values: Values = record["values"]
    templates = tuple(
        Template(
            " ".join(template["question"].split()),
            " ".join(template["gold"].split()),
            # A gap has its values, or the name of a list of values.
            {name: values[gap] if isinstance(gap, str) else gap for name, gap in template["gaps"].items()},
        )
        for template in record["templates"]
    )
    return Schema(name, record["tables"], values, templates, draw)


SCHEMAS: Final = {
    name: _read_schema(name, draw)
    for name, draw in (
        ("shop", _shop_rows),
        ("school", _school_rows),
        ("library", _library_rows),
        ("flights", _flight_rows),
    )
}
"""The generated databases, by name."""
