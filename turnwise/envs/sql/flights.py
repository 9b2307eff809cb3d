"""Air traffic: airports, airlines, flights and bookings.

Owns: :data:`FLIGHTS`.
"""

from __future__ import annotations

import random
from datetime import date
from typing import Final

from turnwise.envs.sql.schema import Rows, Schema, Template, day, people

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


def _rows(rng: random.Random) -> Rows:
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
    rows=_rows,
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
