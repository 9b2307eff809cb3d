"""The tool with which a model says that it is done.

Owns: :class:`SubmitTool`. Refuses: judging what was done; the environment scores the episode when it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from turnwise.errors import ConfigError
from turnwise.tools.core import BaseTool
from turnwise.tools.places import as_schema_of
from turnwise.tools.response import ToolResponse

_DESCRIPTION: Final = (
    "Hand in your work as it is now. This ends the task: call it once, when you are done and have checked the result."
)


class SubmitTool(BaseTool):
    """``submit``: ends the episode, which is then scored. Takes no configuration."""

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Any = None) -> None:
        """Take nothing, or another schema.

        Raises:
            ConfigError: There is a configuration.
        """
        if config:
            raise ConfigError(f"tool 'submit': config is {dict(config)!r}: it takes none")
        super().__init__({}, tool_schema or as_schema_of("submit", _DESCRIPTION, {}, ()))

    async def execute(
        self,
        instance_id: str,  # noqa: ARG002
        parameters: dict[str, Any],  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[ToolResponse, float | None, dict[str, float]]:
        """End the episode."""
        return ToolResponse("Submitted.", ends=True), None, {}
