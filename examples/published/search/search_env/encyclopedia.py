"""Search corpora: jsonl files, and a generated encyclopedia of a fictional country."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from turnwise.errors import ConfigError, shown
from turnwise.seeding import stable_hash
from turnwise.tasks.seeded import in_split


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of a corpus."""

    id: str
    title: str
    text: str


def read_corpus(path: str) -> list[Passage]:
    """Read ``{"id", "title", "text"}`` rows; the id defaults to the row number from 0, the title may be missing.

    Raises:
        ConfigError: The file is missing or empty, or a line is invalid; the message names the line.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"corpus is {shown(path)}: there is no such file; give a .jsonl with id, title and text")
    passages: list[Passage] = []
    lines: dict[str, int] = {}
    with file.open("rb") as rows:
        for number, line in enumerate(rows, 1):
            if not line.strip():
                continue
            passage = _passage(line, f"{path}:{number}", str(len(passages)))
            if passage.id in lines:
                raise ConfigError(f"{path}:{number}: the id {passage.id!r} is used in line {lines[passage.id]} already")
            lines[passage.id] = number
            passages.append(passage)
    if not passages:
        raise ConfigError(f"corpus {path}: the file holds no passages")
    return passages


def _passage(line: bytes, where: str, number: str) -> Passage:
    try:
        row: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: this line is not JSON ({error}): write one JSON object per line") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: a passage is an object with 'text' (and 'id', 'title'), not {shown(row)}")
    name = row.get("id", number)
    if isinstance(name, bool) or not isinstance(name, (str, int)) or name == "":
        raise ConfigError(f"{where}: field 'id' is {shown(name)}: it must be a string or an integer")
    title, text = row.get("title") or "", row.get("text")
    if not isinstance(title, str):
        raise ConfigError(f"{where}: field 'title' is {shown(title)}: it must be a string")
    if not isinstance(text, str) or not text.strip():
        there = ", ".join(map(repr, row)) or "none"
        raise ConfigError(f"{where}: field 'text' is {shown(text)} (fields here: {there}): it must be a string")
    return Passage(str(name), title, text)


_ONSETS: Final = "b br c d dr f fr g gl h j k kr l m n p pr r s sk st t tr v w z".split()  # noqa: SIM905
_VOWELS: Final = "a e i o u ai ea io".split()  # noqa: SIM905
_ENDS: Final = "n r l s nd rt th m ck".split()  # noqa: SIM905
_PROFESSIONS: Final = ("architect", "botanist", "composer", "engineer", "painter", "physician", "teacher", "weaver")
_GOODS: Final = ("bicycles", "clocks", "glassware", "maps", "pianos", "porcelain", "telescopes", "umbrellas")
_BUILDINGS: Final = ("Bridge", "Library", "Museum", "Theatre", "Tower", "Station")
_SUBJECTS: Final = ("a novel", "a travelogue", "a collection of essays", "a chronicle")


@dataclass(frozen=True, slots=True)
class River:
    """A river."""

    name: str
    mountain: str
    length: int


@dataclass(frozen=True, slots=True)
class Town:
    """A town on a river."""

    name: str
    region: str
    river: River
    founded: int
    mayor: str
    dish: str


@dataclass(frozen=True, slots=True)
class Person:
    """A person with a birthplace."""

    name: str
    profession: str
    born: int
    town: Town


@dataclass(frozen=True, slots=True)
class Work:
    """A building, a company or a book.

    Attributes:
        kind: ``building``, ``company`` or ``book``.
        year: Year of opening, founding or publication.
        detail: The company's product, or the kind of book.
    """

    kind: str
    name: str
    maker: Person
    town: Town
    year: int
    detail: str


@dataclass(frozen=True, slots=True)
class Encyclopedia:
    """All entities, with an article on each."""

    towns: tuple[Town, ...]
    works: tuple[Work, ...]
    passages: tuple[Passage, ...]


@functools.lru_cache(maxsize=8)
def encyclopedia(split: str, seed: int) -> Encyclopedia:
    """Draw an encyclopedia of some 900 articles: 40 rivers, 120 towns, 240 people and 480 works."""
    rng = random.Random(stable_hash("encyclopedia", split, seed))
    names = _names(rng, split)
    rivers = [River(f"the {next(names)}", f"Mount {next(names)}", rng.randint(41, 980)) for _ in range(40)]
    regions = [next(names) for _ in range(12)]
    towns = [
        Town(
            name=next(names),
            region=rng.choice(regions),
            river=rng.choice(rivers),
            founded=rng.randint(1050, 1790),
            mayor=f"{next(names)} {next(names)}",
            dish=f"{next(names).lower()} stew",
        )
        for _ in range(120)
    ]
    people = [
        Person(f"{next(names)} {next(names)}", rng.choice(_PROFESSIONS), rng.randint(1790, 1930), rng.choice(towns))
        for _ in range(240)
    ]
    works = [_work(rng, number, names, people, towns) for number in range(480)]
    articles = [*map(_river_article, rivers), *map(_town_article, towns)]
    articles += [*map(_person_article, people), *map(_work_article, works)]
    rng.shuffle(articles)
    passages = tuple(Passage(f"a{number}", title, text) for number, (title, text) in enumerate(articles, 1))
    return Encyclopedia(tuple(towns), tuple(works), passages)


def _names(rng: random.Random, split: str) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        name = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(2)) + rng.choice(_ENDS)
        if name not in seen and in_split(split, "encyclopedia", name):
            seen.add(name)
            yield name.capitalize()


def _work(rng: random.Random, number: int, names: Iterator[str], people: list[Person], towns: list[Town]) -> Work:
    kind = ("building", "company", "book")[number % 3]
    maker, town = rng.choice(people), rng.choice(towns)
    year = maker.born + rng.randint(24, 60)
    if kind == "building":
        return Work(kind, f"the {next(names)} {rng.choice(_BUILDINGS)}", maker, town, year, "")
    if kind == "company":
        return Work(kind, f"{next(names)} & {next(names)}", maker, town, year, rng.choice(_GOODS))
    return Work(kind, f"The {next(names)} of {next(names)}", maker, town, year, rng.choice(_SUBJECTS))


def _river_article(river: River) -> tuple[str, str]:
    text = f"{_capital(river.name)} is a river of {river.length} kilometres. Its source is on {river.mountain}."
    return _capital(river.name), text


def _town_article(town: Town) -> tuple[str, str]:
    text = (
        f"{town.name} is a town in the region of {town.region}. It lies on {town.river.name} and was founded in "
        f"{town.founded}. Its mayor is {town.mayor}. The town is known for a dish that is called {town.dish}."
    )
    return town.name, text


def _person_article(person: Person) -> tuple[str, str]:
    article = "an" if person.profession[0] in "aeiou" else "a"
    text = f"{person.name}, born in {person.born} in {person.town.name}, was by training {article} {person.profession}."
    return person.name, text


def _work_article(work: Work) -> tuple[str, str]:
    name = _capital(work.name)
    if work.kind == "building":
        text = f"{name} stands in {work.town.name}. It was designed by {work.maker.name} and opened in {work.year}."
    elif work.kind == "company":
        text = (
            f"{name} is a maker of {work.detail}. The company was founded in {work.year} by {work.maker.name} and has "
            f"its seat in {work.town.name}."
        )
    else:
        text = f"{name} is {work.detail} about {work.town.name}. It was written by {work.maker.name} in {work.year}."
    return name, text


def _capital(name: str) -> str:
    return name[0].upper() + name[1:]
