"""Tasks: a customer's request, and the changes and facts that answer it.

Owns: :func:`tasks` and :func:`drawn`. A shop belongs to ``train`` or to ``test`` by its customers, so no customer of
one split is ever seen in the other. Refuses: saying anything in a prompt that the customer would not know.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final

from turnwise.envs.retail.requests import KINDS, compose
from turnwise.envs.retail.world import SPLITS, World, draw, world_seed
from turnwise.errors import TaskError, shown
from turnwise.seeding import stable_hash
from turnwise.tasks import Task

_PER_SHOP: Final = 8


def tasks(n: int = 200, *, split: str = "train", seed: int = 0, kind: str | None = None) -> Iterator[Task]:
    """Yield ``n`` requests of a split, the kinds in turn; eight are made in each shop.

    Args:
        n: How many.
        split: ``train`` or ``test``.
        seed: Another seed gives other shops.
        kind: Only requests of this kind.

    Raises:
        TaskError: There is no such split or kind.
    """
    if split not in SPLITS:
        raise TaskError(f"retail has no split {shown(split)}: it has {', '.join(SPLITS)}")
    if kind is not None and kind not in KINDS:
        raise TaskError(f"retail has no kind of task {shown(kind)}: it has {', '.join(KINDS)}")
    kinds = tuple(KINDS) if kind is None else (kind,)
    for index in range(n):
        world = draw(world_seed(split, seed, index // _PER_SHOP))
        yield _task(f"retail-{split}-{seed}-{index}", world, kinds[index % len(kinds)], index)


def drawn(seed: int | None) -> Task:
    """Return the task that belongs to a seed; a new one every time for None."""
    number = random.getrandbits(63) if seed is None else seed
    return _task(f"retail-seed-{number}", draw(world_seed("train", number, 0)), list(KINDS)[number % len(KINDS)], 0)


def _task(name: str, world: World, kind: str, index: int) -> Task:
    request = compose(world, kind, random.Random(stable_hash("retail task", world.seed, kind, index)))
    actions = [{"name": tool, "arguments": arguments} for tool, arguments in request.actions]
    data = {
        "world": world.seed,
        "kind": kind,
        "customer": request.customer,
        # Apart from each other: in a dialogue the customer says who they are only when they are asked.
        "identity": request.identity,
        "request": request.text,
        "actions": actions,
        "facts": list(request.facts),
    }
    return Task(name, f"{request.identity} {request.text}", data)
