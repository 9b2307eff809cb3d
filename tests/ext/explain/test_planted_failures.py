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


@pytest.mark.parametrize("planted", PLANTED)
def test_planted_failure_is_the_first_finding(planted: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    name, settings = PLANTED[planted]
    if name == "hidden_tools":
        template = {"chat_template": str(toolless_template(tmp_path)), "check_template": False}
        settings = [*settings, {"renderer": template}]
    explanation = explained(settings, models, tmp_path)
    assert explanation.findings, "no finding"
    first = explanation.findings[0]
    assert (first.name, first.level) == (name, Level.PROBLEM), explanation.to_json()
    assert first.evidence


@pytest.mark.parametrize("healthy", HEALTHY)
def test_healthy_run_has_notes_at_most(healthy: str, models: tuple[Path, Path], tmp_path: Path) -> None:
    explanation = explained(HEALTHY[healthy], models, tmp_path)
    above = [finding for finding in explanation.findings if finding.level > Level.NOTE]
    assert not above, explanation.to_json()
