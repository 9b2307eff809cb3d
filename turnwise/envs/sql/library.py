"""A library: authors, books, members and loans.

Owns: :data:`LIBRARY`.
"""

from __future__ import annotations

import random
from datetime import date, timedelta
from typing import Final

from turnwise.envs.sql.schema import Rows, Schema, Template, day, people, titles

_COUNTRIES: Final = ("Brazil", "Canada", "Egypt", "Japan", "Norway", "Spain")
_GENRES: Final = ("biography", "crime", "fantasy", "history", "poetry", "travel")
_CITIES: Final = ("Aster", "Birken", "Corda", "Delmont")
_ADJECTIVES: Final = ("Broken", "Distant", "Empty", "Golden", "Hidden", "Last", "Narrow", "Quiet", "Red", "Winter")
_NOUNS: Final = ("Bridge", "Country", "Garden", "Harbour", "Letter", "Mirror", "Orchard", "River", "Street", "Window")


def _rows(rng: random.Random) -> Rows:
    names = people(rng, 150)
    authors = [
        (number, name, rng.choice(_COUNTRIES), rng.randint(1900, 1995)) for number, name in enumerate(names[:40], 1)
    ]
    books = [
        (number, title, rng.randint(1, 36), rng.choice(_GENRES), rng.randint(1950, 2022), rng.randint(1, 6))
        for number, title in enumerate(titles(rng, 95, _ADJECTIVES, _NOUNS), 1)
    ]
    members = [
        (number, name, rng.choice(_CITIES), day(rng, date(2015, 1, 1), date(2022, 12, 31)))
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
    rows=_rows,
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
            {"country": _COUNTRIES},
        ),
        Template(
            "Which members from {city} kept a book for more than {days} days before returning it? Give each name once.",
            "SELECT DISTINCT m.name FROM members m JOIN loans l ON l.member_id = m.id WHERE m.city = '{city}' "
            "AND julianday(l.returned_on) - julianday(l.loaned_on) > {days}",
            {"city": _CITIES, "days": (45, 50, 55)},
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
