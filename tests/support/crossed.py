"""Parameters of several axes: ``make test`` takes one step from the first values, ``make test-long`` the rest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations; those that differ from the first values on more than one axis are long."""
    return [
        pytest.param(*(axis[index] for axis, index in zip(axes, indices, strict=True)), marks=_marks(indices))
        for indices in itertools.product(*(range(len(axis)) for axis in axes))
    ]


def _marks(indices: Sequence[int]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if sum(index > 0 for index in indices) > 1 else []
