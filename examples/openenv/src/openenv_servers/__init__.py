"""Environments of OpenEnv behind its server: ``openenv:http://127.0.0.1:8000``, ``openenv:pkg.module:app``."""

from __future__ import annotations

from pathlib import Path

from turnwise.ext.frameworks.foreign import ForeignEnv, Framework

FRAMEWORK = Framework(
    prefix="openenv",
    driver=str(Path(__file__).with_name("driver.py")),
    requirement="openenv-core==0.3.0",
    example="http://127.0.0.1:8000",
    forks=False,
)


def openenv_class(prefix: str, name: str) -> type[ForeignEnv]:  # noqa: ARG001 - the prefix is OpenEnv's
    """Return the class of an environment: what the entry point of ``environment_families`` names."""
    return FRAMEWORK.env_class(name)
