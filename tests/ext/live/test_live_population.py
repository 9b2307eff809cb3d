"""A live policy learns from a population of users for 2,000 sessions, while it is killed twenty times."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import aiohttp
import pytest

from support.trainer.live_population import (
    RIGHT,
    KilledService,
    Population,
    check_learned_once,
    check_nothing_lost,
    success,
)
from support.trainer.live_run import build_colour_model, live_config
from support.trainer.lookup_run import MODEL, shared

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
GROUPS = 8
WAVE = 50
KILLS = 20
POISONED = range(26, 32)
"""Waves in which all rate, and all of them lie, until what was learned from them is undone."""
POISON = {"lies": 1.0, "feedback": 1.0}
DELETING = 21
DELETED = 50


@pytest.fixture(scope="session")
def guessing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that names the right colour three times in nine; one for all workers."""
    return shared(tmp_path_factory, "guessing-model", functools.partial(build_colour_model, guesses=2)) / MODEL


async def test_population_teaches_a_service_that_is_killed_twenty_times(guessing_model: Path, tmp_path: Path) -> None:
    held_out = f"support.trainer.live_run:colour_tasks?words={','.join(RIGHT)}"
    config = live_config(
        guessing_model,
        tmp_path,
        rollout={"env": {"name": "single_turn", "config": {"scorer": "exact_match"}}},
        eval={"tasks": held_out, "samples": 32, "greedy": False},
        batch={"groups": GROUPS},
        policies={"main": {"optim": {"name": "muon", "lr": 4e-3}}},
        checkpoint={"every": 1},
        custom={"live": {"canary": {"kl_budget": 0.25}}},
    )
    draw = random.Random(0)
    async with KilledService(config) as service, aiohttp.ClientSession() as http:
        users = Population(service, http, GROUPS, draw)
        rollbacks = 0
        for wave in range(2 * KILLS):
            if wave % 2:
                # Some 110 events: answers, feedback, ends of sessions, and looks at what was learned.
                service.kill_after(draw.randint(1, 110))
            health = await users.health()
            if wave == POISONED.start:
                rollbacks = health["rollbacks"]
            is_poisoned = wave in POISONED and health["rollbacks"] == rollbacks
            await users.talk(1, size=WAVE, **(POISON if is_poisoned else {}))
            if wave == DELETING:
                await users.delete(draw.sample(users.talks, DELETED))
        assert service.lives == 1 + KILLS
        health = await users.health()
        await service.stop()
    assert success(users.talks[:100]) <= 0.4
    assert success(users.talks[-200:]) >= 0.85
    assert health["promotions"] >= 2
    assert health["rollbacks"] > rollbacks
    check_nothing_lost(service.directory, users.talks)
    check_learned_once(service.directory, health["waiting"], DELETED)
