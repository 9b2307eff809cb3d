"""What the tests of the checkers share."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _settled(settled_objects: None) -> None:
    """Each check of an environment looks several times for what it left."""
