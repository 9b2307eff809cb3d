"""What besides text a tool may answer with, and whether a model's renderer can place it.

Owns: the kinds of media, :func:`check_media`, which is asked before a rollout starts, and :func:`undeclared`, which is
asked of every answer. Refuses: reading media.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from turnwise.errors import ConfigError, EnvError, ToolSchemaError

if TYPE_CHECKING:
    from turnwise.tools.core import Tool
    from turnwise.tools.response import ToolResponse

MEDIA: Final = ("image", "video", "audio")
"""Kinds of media, as the fields of a ToolResponse are called."""


def as_media(label: str, kinds: Iterable[str]) -> frozenset[str]:
    """Return declared kinds of media.

    Raises:
        ToolSchemaError: One is unknown.
    """
    found = frozenset((kinds,) if isinstance(kinds, str) else kinds)
    unknown = sorted(found - set(MEDIA))
    if unknown:
        raise ToolSchemaError(
            f"{label}: media names {', '.join(map(repr, unknown))}: allowed are {', '.join(MEDIA)} (text always is)"
        )
    return found


def check_media(env: str, tools: Mapping[str, Tool], takes: Collection[str]) -> None:
    """Hold the tools of an environment against what a renderer places.

    Args:
        env: The environment's name.
        tools: Its tools by name.
        takes: The kinds of media that the renderer places besides text.

    Raises:
        ConfigError: A tool may answer with something else.
    """
    for name, tool in tools.items():
        refused = sorted(as_media(f"tool {name!r}", tool.media) - set(takes))
        if refused:
            placed = ", ".join(["text", *sorted(takes)])
            raise ConfigError(
                f"environment {env!r}: its tool {name!r} answers with {', '.join(refused)}, but the renderer of this "
                f"model places {placed} only: leave the tool out, let it say in text what there is to see or hear, or "
                "choose a model whose renderer takes it"
            )


def undeclared(tool: Tool, response: ToolResponse) -> EnvError | None:
    """Return the error of an answer that holds what its tool did not declare, or None."""
    given = (("image", response.image), ("video", response.video), ("audio", response.audio))
    found = [kind for kind, items in given if items and kind not in tool.media]
    if not found:
        return None
    listed = ", ".join(map(repr, found))
    return EnvError(
        f"tool {tool.name!r} answered with {', '.join(found)}, which it does not declare: write media=({listed},) in "
        "@function_tool, or as an attribute of the BaseTool, so that a model that cannot take it is refused before "
        "the rollout starts"
    )
