"""The model of the live policy's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.trainer.live_run import build_colour_model
from support.trainer.lookup_run import MODEL, shared


@pytest.fixture(scope="session")
def colour_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that names colours; one for all workers."""
    return shared(tmp_path_factory, "colour-model", build_colour_model) / MODEL
