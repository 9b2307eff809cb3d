"""Runs that fail for one planted reason each, which is the first finding; healthy runs, with notes at most."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from support.trainer.lookup_run import MODEL, build_model, merged, shared, silent, train_config
from support.trainer.planted_runs import HEALTHY, PLANTED, build_color_model, model_of, toolless_template
from turnwise.ext.explain.explain import Explanation, explain_run
from turnwise.ext.explain.findings import Level
from turnwise.trainer.train import run_train

pytestmark = pytest.mark.long

RUN: dict[str, Any] = {"steps": 12, "batch": {"groups": 6}, "checkpoint": {"every": 100}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    lookup = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    return lookup, shared(tmp_path_factory, "color-model", build_color_model)


def explained(settings: list[dict[str, Any]], models: tuple[Path, Path], folder: Path) -> Explanation:
    changes = functools.reduce(merged, [RUN, *settings])
    run_train(train_config(model_of(settings, *models), folder, **changes), console=silent())
    return explain_run(folder / "run")


def test_ten_of_twelve_planted_failures_are_the_first_finding(models: tuple[Path, Path], tmp_path: Path) -> None:
    """All of them cannot be asked for: what a policy learns of a hacked reward in 24 steps differs between runs."""
    missed = {}
    for planted, (name, settings) in PLANTED.items():
        folder = tmp_path / planted.replace(" ", "-")
        folder.mkdir()
        if name == "hidden_tools":
            template = {"chat_template": str(toolless_template(folder)), "check_template": False}
            settings = [*settings, {"renderer": template}]
        explanation = explained(settings, models, folder)
        first = [(finding.name, finding.level) for finding in explanation.findings[:1] if finding.evidence]
        if first != [(name, Level.PROBLEM)]:
            missed[planted] = explanation.to_json()
    print(f"first findings: {len(PLANTED) - len(missed)} of {len(PLANTED)}; not {', '.join(missed) or 'none'}")
    assert len(PLANTED) == 12
    assert len(missed) <= 2, missed


@pytest.mark.parametrize("healthy", HEALTHY)
def test_healthy_run_has_notes_at_most(healthy: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    explanation = explained(HEALTHY[healthy], models, tmp_path)
    above = [finding for finding in explanation.findings if finding.level > Level.NOTE]
    assert not above, explanation.to_json()
