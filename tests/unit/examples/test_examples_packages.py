"""Examples that are packages of their own: what their entry points refer to, and that a build holds it."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from turnwise.envs.registration import env_class
from turnwise.plugins import PLUGIN_KINDS, load_object
from turnwise.tasks import load_tasks

EXAMPLES = Path(__file__).parents[3] / "examples"
# What a program imports by name has no entry points.
PACKAGES = sorted(
    str(file.parent.relative_to(EXAMPLES))
    for file in EXAMPLES.rglob("pyproject.toml")
    if "entry-points" in tomllib.loads(file.read_text())["project"]
)


def test_most_packages_have_entry_points() -> None:
    assert {"sql", "tool_calls", "two_player"} <= set(PACKAGES)


@pytest.mark.parametrize("name", PACKAGES)
def test_entry_points_of_a_package_refer_to_what_it_builds(name: str) -> None:
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())
    groups = project["project"]["entry-points"]
    assert {group.removeprefix("turnwise.") for group in groups} <= set(PLUGIN_KINDS)
    setuptools = project["tool"]["setuptools"]
    for entry_points in groups.values():
        for reference in entry_points.values():
            module = reference.partition(":")[0].partition(".")[0]
            assert load_object(reference, "plug-in") is not None
            if module not in setuptools.get("py-modules", ()):
                [folder] = setuptools["packages"]["find"]["where"]
                assert (EXAMPLES / name / folder / module / "__init__.py").exists()


@pytest.mark.parametrize("name", PACKAGES)
def test_an_environment_of_a_package_has_tasks_and_a_page(name: str) -> None:
    project = tomllib.loads((EXAMPLES / name / "pyproject.toml").read_text())["project"]
    text = (EXAMPLES / name / project["readme"]).read_text()
    entry_points = project["entry-points"]
    assert entry_points.keys() & {"turnwise.environments", "turnwise.environment_families"}
    for env, reference in entry_points.get("turnwise.environments", {}).items():
        cls = env_class(env)
        assert f"{cls.__module__}:{cls.__qualname__}".startswith(reference.partition(":")[0])
        assert load_tasks(cls.default_tasks, limit=1)
        assert f"turnwise check-env {env}" in text
    for prefix, reference in entry_points.get("turnwise.environment_families", {}).items():
        assert env_class(f"{prefix}:NAME").__qualname__ == "NAME"
        assert load_object(reference, "family")(prefix, "NAME") is env_class(f"{prefix}:NAME")
        assert f"turnwise check-env {prefix}:" in text
