"""Environments of reasoning-gym, TextArena and gem: ``reasoning-gym:chain_sum``, ``textarena:Wordle-v0``."""

from __future__ import annotations

from pathlib import Path

from turnwise.ext.frameworks.foreign import ForeignEnv, Framework

_DRIVERS = Path(__file__).parent
FRAMEWORKS = {
    framework.prefix: framework
    for framework in (
        Framework(
            prefix="gem",
            driver=str(_DRIVERS / "gem_driver.py"),
            requirement="gem-llm==0.1.0",
            example="game:GuessTheNumber-v0-easy",
        ),
        Framework(
            prefix="reasoning-gym",
            driver=str(_DRIVERS / "reasoning_gym_driver.py"),
            requirement="reasoning-gym==0.1.25",
            system_prompt="default",
            example="chain_sum",
            has_levels=True,
        ),
        Framework(
            prefix="textarena",
            driver=str(_DRIVERS / "textarena_driver.py"),
            requirement="textarena==0.7.4",
            example="GuessTheNumber-v0",
        ),
    )
}


def game_class(prefix: str, name: str) -> type[ForeignEnv]:
    """Return the class of an environment: what the entry points of ``environment_families`` name."""
    return FRAMEWORKS[prefix].env_class(name)
