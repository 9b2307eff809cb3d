"""The documentation as a whole: the number of its pages, every link, and the lists of pages and examples."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel
from typer.main import get_command

from support.doc_pages import DOCS, ROOT, anchors, blocks, links, section
from turnwise.cli.app import app
from turnwise.trainer.config.train import TrainConfig

PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]


def broken(file: Path) -> list[str]:
    """The relative links of a page whose file or anchor is missing."""
    broken_links = []
    for link in links(file.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken_links.append(link)
    return broken_links


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_relative_link_and_anchor_resolves(file: Path) -> None:
    assert broken(file) == []


def test_there_are_few_pages() -> None:
    assert len(list(DOCS.rglob("*.md"))) <= 25


def test_the_readme_lists_every_page_of_the_documentation() -> None:
    listed = {link.partition("#")[0] for link in links((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {f"docs/{file.name}" for file in DOCS.glob("*.md")} <= listed


def test_every_example_has_its_line() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    folders = {file.name for file in (ROOT / "examples").iterdir() if file.is_dir() and file.name != "__pycache__"}
    assert {link for link in links(text) if "/" not in link and "#" not in link} == folders


@pytest.mark.parametrize(
    ("link", "sound"),
    [
        ("other.md", True),
        ("other.md#the-first-heading-a_b", True),
        ("other.md#twice-1", True),
        ("#here", True),
        ("https://example.org/x#y", True),
        ("missing.md", False),
        ("other.md#in-code", False),
        ("other.md#twice-2", False),
        ("#there", False),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str, sound: bool) -> None:
    other = "# The first heading: `a_b`\n\n## Twice\n\n```\n# in code\n```\n\n## Twice\n"
    (tmp_path / "other.md").write_text(other)
    (tmp_path / "page.md").write_text(f"# Here\n\n[a]({link})\n\n```\n[b](gone.md)\n```\n")
    assert broken(tmp_path / "page.md") == ([] if sound else [link])


def test_the_first_configuration_and_environment_are_those_that_run() -> None:
    [configuration] = blocks(section("quickstart.md", "Configure a run"), "yaml")
    assert TrainConfig.model_validate(yaml.safe_load(configuration)).rollout.group_size == 8
    [environment] = blocks(section("quickstart.md", "Write an environment"), "python")
    assert environment == (ROOT / "examples" / "hello" / "env.py").read_text(encoding="utf-8")


def test_every_command_has_its_row() -> None:
    rows = re.findall(r"^\| `turnwise ([\w-]+)", section("configuration.md", "Commands"), re.MULTILINE)
    assert set(rows) == set(get_command(app).commands)


def test_every_extra_has_its_row() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = re.findall(r"^\| (`[^|]*`) \|", section("quickstart.md", "Install elsewhere"), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row)}
    assert named == set(project["optional-dependencies"]) - {"dev", "bench"}


def test_the_keys_of_the_configuration_page_are_keys() -> None:
    table = section("configuration.md", "Sections and keys")
    keys = [
        key for row in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE) for key in re.findall(r"`([^`]+)`", row)
    ]
    assert len(keys) > 30
    # The policy's name is the run's to choose.
    assert [key for key in keys if not is_key(TrainConfig, key.replace("policies.main", "policies").split("."))] == []


def is_key(model: type[BaseModel], path: list[str]) -> bool:
    """Whether a path of keys leads through the sections below a model."""
    field = model.model_fields.get(path[0])
    if field is None or len(path) == 1:
        return field is not None
    return any(is_key(model, path[1:]) for model in models_in(field.annotation))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)
