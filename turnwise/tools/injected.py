"""Parameters of function tools that the task fills, and the model never sees.

Owns: :data:`Injected` and :func:`injected_parameters`. Refuses: deciding what they hold; see ``selection.py``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

T = TypeVar("T")


class _Injected:
    """Marks a hint."""

    def __repr__(self) -> str:
        return "injected"


_MARK: Final = _Injected()

Injected = Annotated[T, _MARK]
"""A parameter that is no part of a tool's schema: ``table: Injected[str]``. Its value comes from
``tools_kwargs[tool]["execute_kwargs"]`` of the episode's task, as it stands there."""


def injected_parameters(parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names of the injected parameters, and whether each must be given."""
    return {each.name: each.default is each.empty for each in parameters if _marked(hints.get(each.name))}


def _marked(hint: Any) -> bool:
    return get_origin(hint) is Annotated and any(each is _MARK for each in get_args(hint)[1:])
