"""Tasks of Inspect (inspect-ai) as environments: ``inspect:path/to/file.py@TASK``, ``inspect:package/TASK``."""

from __future__ import annotations

from pathlib import Path

from turnwise.ext.frameworks.foreign import ForeignEnv, Framework

FRAMEWORK = Framework(
    prefix="inspect",
    driver=str(Path(__file__).with_name("driver.py")),
    requirement="inspect-ai==0.3.285",
    example="path/to/file.py@task",
    has_rows=True,
    forks=False,
    apart=True,
)


def inspect_class(prefix: str, name: str) -> type[ForeignEnv]:  # noqa: ARG001 - the prefix is Inspect's
    """Return the class of a task's environment: what the entry point of ``environment_families`` names."""
    return FRAMEWORK.env_class(name)
