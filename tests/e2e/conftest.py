"""What the tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.lookup_run import MODEL, build_model, shared, warm_start


@pytest.fixture(scope="session")
def lookup_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that writes calls and answers; one for all workers."""
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL


@pytest.fixture(scope="session")
def warm_lookup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warm start of the main job at seed 0, with which the jobs begin that differ in what comes after it."""
    return shared(tmp_path_factory, "warm-lookup", warm_start)
