"""What the tests of the checkers share."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def _settled_objects() -> None:
    """The checkers collect garbage, many times: what earlier tests left is passed over."""
    gc.collect()
    gc.freeze()
