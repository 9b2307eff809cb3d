"""No calls: everything that is no reasoning is content. For templates that write no calls."""

from __future__ import annotations

from typing import ClassVar

from turnwise.inference.formats.core import ChatFormat, Probe


class Plain(ChatFormat):
    """Text and reasoning only."""

    name: ClassVar[str] = "plain"

    __slots__ = ()

    @classmethod
    def detect(cls, probe: Probe) -> dict[str, str] | None:
        """Return no markers where the template leaves calls out."""
        return {} if probe.one is None or probe.FIRST not in probe.one else None

    def begins_call(self, text: str) -> bool | None:  # noqa: ARG002
        """No text does."""
        return False
