"""Generated databases: tables, row generators and question templates."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Any, Final, TypeAlias

Rows: TypeAlias = dict[str, list[tuple[Any, ...]]]
"""The rows of each table, in the order of its columns."""

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
    """

    question: str
    gold: str
    gaps: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def filled(self) -> Iterator[tuple[str, str]]:
        """Yield every question with its query."""
        for values in itertools.product(*self.gaps.values()):
            values_by_gap = dict(zip(self.gaps, values, strict=True))
            yield self.question.format(**values_by_gap), " ".join(self.gold.format(**values_by_gap).split())


@dataclass(frozen=True, slots=True)
class Schema:
    """A kind of database.

    Attributes:
        tables: ``CREATE TABLE`` statements.
    """

    name: str
    tables: str
    rows: Callable[[random.Random], Rows]
    templates: tuple[Template, ...]


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


_AIRPORTS: Final = (
    ("AVL", "Avelon", "Norda"),
    ("BRM", "Brimont", "Norda"),
    ("CDX", "Cadix Bay", "Sura"),
    ("DOR", "Dorvale", "Sura"),
    ("ELK", "Elkton", "Norda"),
    ("FEN", "Fenwick", "Osta"),
    ("GLN", "Glenrock", "Osta"),
    ("HVN", "Haven", "Sura"),
    ("INV", "Inverloch", "Weslund"),
    ("JUN", "Junira", "Weslund"),
)
_CODES: Final = tuple(code for code, _, _ in _AIRPORTS)
_AIRLINES: Final = (("AX", "Axial Air"), ("BW", "Blue Wing"), ("CT", "Continua"), ("DL", "Delmar"), ("EV", "Everfly"))
_NAMES: Final = tuple(name for _, name in _AIRLINES)
_CABINS: Final = ("business", "economy", "premium")
_COUNTRIES: Final = ("Norda", "Osta", "Sura", "Weslund")


def _flight_rows(rng: random.Random) -> Rows:
    flights = []
    for number in range(1, 421):
        origin, destination = rng.sample(_CODES, 2)
        departs = (
            f"{day(rng, date(2024, 1, 1), date(2024, 12, 31))} {rng.randint(5, 22):02}:{rng.choice((0, 15, 30, 45)):02}"
        )
        # A cancelled flight has no delay.
        delay = None if rng.random() < 0.07 else max(0, rng.randint(-40, 120))
        fare = rng.randint(39, 480)
        flights.append(
            (number, rng.choice(_AIRLINES)[0], origin, destination, departs, rng.randint(45, 320), delay, fare)
        )
    passengers = people(rng, 140)
    bookings = [
        (number, rng.randint(1, 400), rng.choice(passengers), rng.choices(_CABINS, (1, 6, 2))[0], rng.randint(1, 5))
        for number in range(1, 701)
    ]
    return {"airports": list(_AIRPORTS), "airlines": list(_AIRLINES), "flights": flights, "bookings": bookings}


FLIGHTS: Final = Schema(
    name="flights",
    tables="""
CREATE TABLE airports (code TEXT PRIMARY KEY, city TEXT NOT NULL, country TEXT NOT NULL);
CREATE TABLE airlines (code TEXT PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE flights (id INTEGER PRIMARY KEY, airline TEXT NOT NULL REFERENCES airlines(code), origin TEXT NOT NULL
    REFERENCES airports(code), destination TEXT NOT NULL REFERENCES airports(code), departs_at TEXT NOT NULL,
    minutes INTEGER NOT NULL, delay INTEGER, fare INTEGER NOT NULL);
CREATE TABLE bookings (id INTEGER PRIMARY KEY, flight_id INTEGER NOT NULL REFERENCES flights(id),
    passenger TEXT NOT NULL, cabin TEXT NOT NULL, seats INTEGER NOT NULL);
""",
    rows=_flight_rows,
    templates=(
        Template(
            "How many flights from {origin} were more than {delay} minutes late?",
            "SELECT COUNT(*) FROM flights WHERE origin = '{origin}' AND delay > {delay}",
            {"origin": _CODES, "delay": (15, 30, 60)},
        ),
        Template(
            "What share of the flights of {airline} was cancelled (a cancelled flight has no delay), in percent, "
            "rounded to two decimals?",
            "SELECT ROUND(100.0 * SUM(f.delay IS NULL) / COUNT(*), 2) FROM flights f "
            "JOIN airlines a ON a.code = f.airline WHERE a.name = '{airline}'",
            {"airline": _NAMES},
        ),
        Template(
            "For each airline: what was the average delay of its flights to {country}, rounded to two decimals? Give "
            "the name of the airline and the delay, the smallest first (ties by name). Cancelled flights do not count.",
            "SELECT a.name, ROUND(AVG(f.delay), 2) AS late FROM flights f JOIN airlines a ON a.code = f.airline "
            "JOIN airports p ON p.code = f.destination WHERE p.country = '{country}' AND f.delay IS NOT NULL "
            "GROUP BY a.code ORDER BY late, a.name",
            {"country": _COUNTRIES},
        ),
        Template(
            "Between which two airports within {country} did flights take place that were not cancelled? Give the "
            "codes of origin and destination and the number of these flights, for pairs with at least one.",
            "SELECT f.origin, f.destination, COUNT(*) FROM flights f JOIN airports o ON o.code = f.origin "
            "JOIN airports d ON d.code = f.destination WHERE o.country = '{country}' AND d.country = '{country}' "
            "AND f.delay IS NOT NULL GROUP BY f.origin, f.destination",
            {"country": _COUNTRIES},
        ),
        Template(
            "How many {cabin} seats were booked in all on flights that depart in month {month} of 2024?",
            "SELECT SUM(b.seats) FROM bookings b JOIN flights f ON f.id = b.flight_id WHERE b.cabin = '{cabin}' "
            "AND strftime('%m', f.departs_at) = printf('%02d', {month})",
            {"cabin": _CABINS, "month": tuple(range(1, 13))},
        ),
        Template(
            "Which passengers booked flights of every airline? Consider only bookings with at least {seats} seats; "
            "give their names.",
            "SELECT b.passenger FROM bookings b JOIN flights f ON f.id = b.flight_id WHERE b.seats >= {seats} "
            "GROUP BY b.passenger HAVING COUNT(DISTINCT f.airline) = (SELECT COUNT(*) FROM airlines)",
            {"seats": (1, 2, 3)},
        ),
        Template(
            "What was the revenue (seats times fare) of {airline} from bookings in the cabin {cabin}, on flights that "
            "were not cancelled?",
            "SELECT SUM(b.seats * f.fare) FROM bookings b JOIN flights f ON f.id = b.flight_id "
            "JOIN airlines a ON a.code = f.airline WHERE a.name = '{airline}' AND b.cabin = '{cabin}' "
            "AND f.delay IS NOT NULL",
            {"airline": _NAMES, "cabin": _CABINS},
        ),
        Template(
            "For each airport in {country}: which departure is the last of 2024? Give code and departs_at; where "
            "several depart at that time, give one row.",
            "SELECT p.code, MAX(f.departs_at) FROM airports p JOIN flights f ON f.origin = p.code "
            "WHERE p.country = '{country}' GROUP BY p.code",
            {"country": _COUNTRIES},
        ),
    ),
)


_BORN_IN: Final = ("Brazil", "Canada", "Egypt", "Japan", "Norway", "Spain")
_GENRES: Final = ("biography", "crime", "fantasy", "history", "poetry", "travel")
_MEMBER_CITIES: Final = ("Aster", "Birken", "Corda", "Delmont")
_TITLE_ADJECTIVES: Final = (
    "Broken",
    "Distant",
    "Empty",
    "Golden",
    "Hidden",
    "Last",
    "Narrow",
    "Quiet",
    "Red",
    "Winter",
)
_TITLE_NOUNS: Final = (
    "Bridge",
    "Country",
    "Garden",
    "Harbour",
    "Letter",
    "Mirror",
    "Orchard",
    "River",
    "Street",
    "Window",
)


def _library_rows(rng: random.Random) -> Rows:
    names = people(rng, 150)
    authors = [
        (number, name, rng.choice(_BORN_IN), rng.randint(1900, 1995)) for number, name in enumerate(names[:40], 1)
    ]
    books = [
        (number, title, rng.randint(1, 36), rng.choice(_GENRES), rng.randint(1950, 2022), rng.randint(1, 6))
        for number, title in enumerate(titles(rng, 95, _TITLE_ADJECTIVES, _TITLE_NOUNS), 1)
    ]
    members = [
        (number, name, rng.choice(_MEMBER_CITIES), day(rng, date(2015, 1, 1), date(2022, 12, 31)))
        for number, name in enumerate(names[40:], 1)
    ]
    loans = []
    for number in range(1, 601):
        loaned = date.fromisoformat(day(rng, date(2023, 1, 1), date(2024, 11, 30)))
        returned = None if rng.random() < 0.12 else (loaned + timedelta(days=rng.randint(1, 60))).isoformat()
        loans.append((number, rng.randint(1, 88), rng.randint(1, 98), loaned.isoformat(), returned))
    return {"authors": authors, "books": books, "members": members, "loans": loans}


LIBRARY: Final = Schema(
    name="library",
    tables="""
CREATE TABLE authors (id INTEGER PRIMARY KEY, name TEXT NOT NULL, country TEXT NOT NULL, born INTEGER NOT NULL);
CREATE TABLE books (id INTEGER PRIMARY KEY, title TEXT NOT NULL, author_id INTEGER NOT NULL REFERENCES authors(id),
    genre TEXT NOT NULL, published INTEGER NOT NULL, copies INTEGER NOT NULL);
CREATE TABLE members (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL, joined_on TEXT NOT NULL);
CREATE TABLE loans (id INTEGER PRIMARY KEY, book_id INTEGER NOT NULL REFERENCES books(id), member_id INTEGER NOT NULL
    REFERENCES members(id), loaned_on TEXT NOT NULL, returned_on TEXT);
""",
    rows=_library_rows,
    templates=(
        Template(
            "How many loans of {genre} books have not been returned?",
            "SELECT COUNT(*) FROM loans l JOIN books b ON b.id = l.book_id WHERE b.genre = '{genre}' "
            "AND l.returned_on IS NULL",
            {"genre": _GENRES},
        ),
        Template(
            "Which books of the genre {genre} were never lent? Give their titles.",
            "SELECT title FROM books WHERE genre = '{genre}' AND NOT EXISTS "
            "(SELECT 1 FROM loans WHERE loans.book_id = books.id)",
            {"genre": _GENRES},
        ),
        Template(
            "Which {count} authors were lent most often in {year}? Give name and number of loans, the most first (ties "
            "by name).",
            "SELECT a.name, COUNT(*) AS lent FROM authors a JOIN books b ON b.author_id = a.id "
            "JOIN loans l ON l.book_id = b.id WHERE l.loaned_on LIKE '{year}-%' GROUP BY a.id "
            "ORDER BY lent DESC, a.name LIMIT {count}",
            {"count": (3, 4, 5, 6), "year": (2023, 2024)},
        ),
        Template(
            "For how many days were returned books of authors from {country} lent on average? Round to two decimals.",
            "SELECT ROUND(AVG(julianday(l.returned_on) - julianday(l.loaned_on)), 2) FROM loans l "
            "JOIN books b ON b.id = l.book_id JOIN authors a ON a.id = b.author_id "
            "WHERE a.country = '{country}' AND l.returned_on IS NOT NULL",
            {"country": _BORN_IN},
        ),
        Template(
            "Which members from {city} kept a book for more than {days} days before returning it? Give each name once.",
            "SELECT DISTINCT m.name FROM members m JOIN loans l ON l.member_id = m.id WHERE m.city = '{city}' "
            "AND julianday(l.returned_on) - julianday(l.loaned_on) > {days}",
            {"city": _MEMBER_CITIES, "days": (45, 50, 55)},
        ),
        Template(
            "For each genre: what is the title of the oldest book by year of publication among those with at least "
            "{copies} copies? Give genre, title and year; where several books are equally old, give all of them.",
            "SELECT genre, title, published FROM books AS b WHERE copies >= {copies} AND published = (SELECT "
            "MIN(published) FROM books WHERE genre = b.genre AND copies >= {copies})",
            {"copies": (1, 2, 3, 4)},
        ),
        Template(
            "How many members who joined in {year} have borrowed books of at least {count} different genres?",
            "SELECT COUNT(*) FROM (SELECT m.id FROM members m JOIN loans l ON l.member_id = m.id "
            "JOIN books b ON b.id = l.book_id WHERE m.joined_on LIKE '{year}-%' GROUP BY m.id "
            "HAVING COUNT(DISTINCT b.genre) >= {count})",
            {"year": (2015, 2016, 2017, 2018, 2019, 2020, 2021, 2022), "count": (3, 4)},
        ),
    ),
)


_DEPARTMENTS: Final = ("arts", "languages", "mathematics", "sciences", "sports")
_TERMS: Final = ("2023-autumn", "2024-spring", "2024-autumn")
_LEVELS: Final = ("Advanced", "Applied", "Basic", "Classic", "General", "Modern", "Practical", "Short")
_SUBJECTS: Final = ("Biology", "Chess", "Drawing", "Geometry", "Latin", "Music", "Optics", "Rowing", "Statistics")


def _school_rows(rng: random.Random) -> Rows:
    names = people(rng, 160)
    teachers = [(number, name, rng.choice(_DEPARTMENTS)) for number, name in enumerate(names[:18], 1)]
    students = [
        (number, name, rng.randint(7, 12), day(rng, date(2006, 1, 1), date(2011, 12, 31)))
        for number, name in enumerate(names[18:], 1)
    ]
    courses = [
        (number, title, rng.randint(1, 16), rng.choice((2, 3, 4, 6)))
        for number, title in enumerate(titles(rng, 30, _LEVELS, _SUBJECTS), 1)
    ]
    enrolments = []
    for term in _TERMS:
        for student in students:
            for course in rng.sample(courses[:28], rng.choice((0, 1, 2, 3, 3))):
                # Without a mark: dropped out.
                mark = None if rng.random() < 0.08 else rng.randint(2, 20) / 2
                enrolments.append((student[0], course[0], term, mark))
    return {"teachers": teachers, "students": students, "courses": courses, "enrolments": enrolments}


SCHOOL: Final = Schema(
    name="school",
    tables="""
CREATE TABLE teachers (id INTEGER PRIMARY KEY, name TEXT NOT NULL, department TEXT NOT NULL);
CREATE TABLE students (id INTEGER PRIMARY KEY, name TEXT NOT NULL, grade INTEGER NOT NULL, born_on TEXT NOT NULL);
CREATE TABLE courses (id INTEGER PRIMARY KEY, title TEXT NOT NULL, teacher_id INTEGER NOT NULL REFERENCES teachers(id),
    credits INTEGER NOT NULL);
CREATE TABLE enrolments (student_id INTEGER NOT NULL REFERENCES students(id), course_id INTEGER NOT NULL
    REFERENCES courses(id), term TEXT NOT NULL, mark REAL, PRIMARY KEY (student_id, course_id, term));
""",
    rows=_school_rows,
    templates=(
        Template(
            "What is the average mark of the students of grade {grade} in the term {term}, rounded to two decimals? "
            "Enrolments without a mark do not count.",
            "SELECT ROUND(AVG(e.mark), 2) FROM enrolments e JOIN students s ON s.id = e.student_id "
            "WHERE s.grade = {grade} AND e.term = '{term}'",
            {"grade": (7, 8, 9, 10, 11, 12), "term": _TERMS},
        ),
        Template(
            "For each department: how many courses do its teachers teach? Only departments with at least {count} "
            "courses; give department and number, in the order of the departments.",
            "SELECT t.department, COUNT(*) FROM teachers t JOIN courses c ON c.teacher_id = t.id "
            "GROUP BY t.department HAVING COUNT(*) >= {count} ORDER BY t.department",
            {"count": (2, 3, 4, 5, 6)},
        ),
        Template(
            "Which teachers of the department {department} teach no course? Give their names.",
            "SELECT t.name FROM teachers t LEFT JOIN courses c ON c.teacher_id = t.id "
            "WHERE t.department = '{department}' AND c.id IS NULL",
            {"department": _DEPARTMENTS},
        ),
        Template(
            "Which students of grade {grade} were enrolled in no course in the term {term}? Give their names.",
            "SELECT name FROM students WHERE grade = {grade} AND id NOT IN "
            "(SELECT student_id FROM enrolments WHERE term = '{term}')",
            {"grade": (7, 8, 9, 10, 11, 12), "term": _TERMS},
        ),
        Template(
            "Which courses had more than {count} enrolments in the term {term}? Give title, name of the teacher and "
            "number of enrolments.",
            "SELECT c.title, t.name, COUNT(*) FROM courses c JOIN teachers t ON t.id = c.teacher_id "
            "JOIN enrolments e ON e.course_id = c.id WHERE e.term = '{term}' GROUP BY c.id HAVING COUNT(*) > {count}",
            {"count": (8, 9, 10, 11, 12), "term": _TERMS},
        ),
        Template(
            "How many credits did each student of grade {grade} earn over all terms? A course counts where its mark is "
            "at least 5. Give name and credits of those with at least one credit, the most first (ties by name).",
            "SELECT s.name, SUM(c.credits) AS earned FROM students s JOIN enrolments e ON e.student_id = s.id "
            "JOIN courses c ON c.id = e.course_id WHERE s.grade = {grade} AND e.mark >= 5 GROUP BY s.id "
            "ORDER BY earned DESC, s.name",
            {"grade": (7, 8, 9, 10, 11, 12)},
        ),
        Template(
            "Who are the students born in {year} whose average mark over all terms is above the average of all marks? "
            "Give their names.",
            "SELECT s.name FROM students s JOIN enrolments e ON e.student_id = s.id WHERE s.born_on LIKE '{year}-%' "
            "GROUP BY s.id HAVING AVG(e.mark) > (SELECT AVG(mark) FROM enrolments)",
            {"year": (2006, 2007, 2008, 2009, 2010, 2011)},
        ),
    ),
)


_CITIES: Final = ("Basel", "Gent", "Lyon", "Malmo", "Porto", "Turin")
_CATEGORIES: Final = ("garden", "kitchen", "office", "sports", "toys")
_STATUSES: Final = ("cancelled", "delivered", "open", "returned")
_ADJECTIVES: Final = ("Blue", "Compact", "Folding", "Heavy", "Light", "Nordic", "Quick", "Round", "Silent", "Sturdy")
_NOUNS: Final = ("Basket", "Bench", "Board", "Bottle", "Chair", "Lamp", "Rack", "Set", "Stand", "Table")


def _shop_rows(rng: random.Random) -> Rows:
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
    rows=_shop_rows,
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
