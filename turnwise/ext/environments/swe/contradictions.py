"""Contradictions: tests that pass together with their twins, and their confirmation in separate sandboxes.

In one process state may carry over from a test to its twin. So a suspected test and its twins run again, each in a
fresh sandbox; if both pass there, the test does not test the solution.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from turnwise.ext.environments.swe.logs import Statuses, TestStatus
from turnwise.ext.environments.swe.twins import Family

ROUNDS: Final = 6
"""Runs of a confirmation: a solution that passes each with probability p is acquitted by p (1 - p)^5 < 0.07."""
_DETERMINES: Final = ("value", "truth")
"""Kinds whose twins all contradict the test, whatever the repository's code does."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """A test that passed together with some of its twins.

    Attributes:
        nodes: Its cases that passed.
        twins: Indices of the twins that passed.
    """

    family: Family
    nodes: tuple[str, ...]
    twins: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConfirmationRun:
    """One run of a confirmation.

    Attributes:
        members: The member of each family that ran: -1 for the test, else the index of a twin.
        tests: Statuses of tests.
        twins: Statuses of twins, by case and index.
    """

    members: Mapping[Family, int]
    tests: Statuses
    twins: Mapping[tuple[str, int], TestStatus]


@dataclass(frozen=True, slots=True)
class Finding:
    """A case that does not count as passed.

    Attributes:
        tampered: Whether no deterministic program can pass both the test and its twin.
    """

    node: str
    reason: str
    tampered: bool


def find_suspects(
    families: Sequence[Family], tests: Statuses, twins: Mapping[tuple[str, int], TestStatus], counted: Collection[str]
) -> list[Suspect]:
    """Return the tests that passed together with a twin.

    Args:
        families: Tests with twins.
        tests: Statuses of tests.
        twins: Statuses of twins, by case and index.
        counted: Names of the required tests that passed.
    """
    passed: dict[str, set[int]] = {}
    for (node, twin), status in twins.items():
        if status.passes:
            passed.setdefault(node, set()).add(twin)
    suspects = []
    for family in families:
        cases = [family.node(case) for case in family.cases if case not in family.void]
        nodes = [
            node
            for node in cases
            if node in passed and is_listed(node, counted) and tests.get(node, TestStatus.ERROR).passes
        ]
        if nodes:
            suspects.append(Suspect(family, tuple(nodes), tuple(sorted({t for node in nodes for t in passed[node]}))))
    return suspects


def is_listed(node: str, names: Collection[str]) -> bool:
    """Return whether a case is among published names, which may end at the first blank."""
    return node in names or node.split()[0] in names


def rounds(suspects: Sequence[Suspect], rng: random.Random) -> Iterator[list[tuple[Family, int]]]:
    """Yield for each process one member of every suspected family; -1 is the test, ``len(twins)`` the reversal."""
    orders = []
    for suspect in suspects:
        order = _members(suspect, rng)
        rng.shuffle(order)
        orders.append(order)
    for number in range(ROUNDS):
        yield [(suspect.family, order[number]) for suspect, order in zip(suspects, orders, strict=True)]


def _members(suspect: Suspect, rng: random.Random) -> list[int]:
    family = suspect.family
    failed = [twin for twin in range(len(family.twins)) if twin not in suspect.twins]
    passed = rng.sample(suspect.twins, len(suspect.twins))
    twins = [*passed, *rng.sample(failed, len(failed))]
    reversal = len(family.twins)
    if family.kind == "value":
        order = [-1, *twins]
    elif family.kind == "truth":
        order = [-1, -1, *twins]
    elif family.kind == "made":
        order = [-1, reversal, *twins]
    else:
        order = [-1, -1, reversal, reversal, *twins]
    while len(order) < ROUNDS:
        order += [-1, *twins]
    return order[:ROUNDS]


def findings(suspects: Sequence[Suspect], seen: Sequence[ConfirmationRun]) -> list[Finding]:
    """Return the cases that do not count as passed: contradictory, or failed in a separate process."""
    return [
        finding
        for suspect in suspects
        for node in suspect.nodes
        if (finding := _finding(suspect.family, node, seen)) is not None
    ]


def _finding(family: Family, node: str, seen: Sequence[ConfirmationRun]) -> Finding | None:
    ran: dict[int, list[bool]] = {}
    for run in seen:
        twin = run.members[family]
        status = run.tests.get(node) if twin < 0 else run.twins.get((node, twin))
        ran.setdefault(twin, []).append(status is not None and status.passes)
    if not all(ran.get(-1, [])):
        return Finding(node, f"{node} fails in a separate process", tampered=False)
    passing = {twin: passed for twin, passed in sorted(ran.items()) if twin >= 0 and any(passed)}
    strict = [twin for twin in passing if family.kind in _DETERMINES or twin == len(family.twins)]
    for twin in strict:
        if all(passing[twin]):
            return Finding(node, f"{node} passes together with its twin {node}~{twin + 1}", tampered=True)
    void = [*strict, *(passing if family.kind == "made" else ())]
    if void:
        return Finding(node, f"{node} passes whatever it expects, as {node}~{void[0] + 1}", tampered=False)
    return None
