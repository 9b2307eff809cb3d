"""OpenAI's form of a tool schema as objects with attributes, for tools that were written to hold one.

Owns: :class:`OpenAIFunctionToolSchema` and the classes of its parts. Each is a dict, so it is JSON as it stands, any
key may be in it, and nothing is lost. Refuses: validation, which belongs to :func:`~turnwise.tools.schema.as_schema`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from turnwise.types import ToolSchema


class _Open(dict[str, Any]):
    """A dict whose keys are attributes too; what is nested in it is read the same way."""

    def __getattr__(self, name: str) -> Any:
        # Copying and pickling look for methods by name: those are no keys.
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self:
            if name in ("description", "enum", "required", "strict"):
                return None
            raise AttributeError(f"{type(self).__name__} has no {name!r}: it has {', '.join(self) or 'nothing'}")
        value = self[name]
        if type(value) is dict:
            # Put in its place, so that what is written into the part stands in the whole.
            value = self[name] = _PARTS.get(name, _Open)(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @classmethod
    def model_validate(cls, value: Mapping[str, Any]) -> Self:
        """Return a mapping as this class."""
        return cls(copy.deepcopy(dict(value)))

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """Return plain dicts of everything that is in it, perhaps without the keys whose value is None."""
        plain: dict[str, Any] = _plain(self, exclude_none)
        return plain


class OpenAIFunctionPropertySchema(_Open):
    """The schema of one parameter: ``type``, ``description``, ``enum``, and any other keyword of JSON schema."""


class OpenAIFunctionParametersSchema(_Open):
    """The schema of the parameters: ``type``, ``properties``, ``required``, and any other keyword of JSON schema."""


class OpenAIFunctionSchema(_Open):
    """A function: ``name``, ``description``, ``parameters``."""


class OpenAIFunctionToolSchema(_Open):
    """A tool: ``type`` (``function``) and ``function``."""

    @classmethod
    def of(cls, schema: ToolSchema) -> Self:
        """Return a ToolSchema in this form."""
        return cls.model_validate(schema.to_json())


_PARTS: dict[str, type[_Open]] = {"function": OpenAIFunctionSchema, "parameters": OpenAIFunctionParametersSchema}


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item, exclude_none) for key, item in value.items() if not (exclude_none and item is None)}
    return [_plain(item, exclude_none) for item in value] if isinstance(value, list) else copy.copy(value)
