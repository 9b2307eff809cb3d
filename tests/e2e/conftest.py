"""What the tests of whole runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.lookup_run import MODEL, build_model, shared


@pytest.fixture(scope="session")
def lookup_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that writes calls and answers; one for all workers."""
    return shared(tmp_path_factory, "lookup-model", build_model) / MODEL
