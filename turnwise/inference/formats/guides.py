"""From what an answer is held to, to the structural tag of one prompt.

Owns: :class:`FormatGuides`, and what is refused before anything is sent. Refuses: how a format writes calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import orjson

from turnwise.errors import GuideRefused
from turnwise.inference.formats.core import ChatFormat
from turnwise.inference.formats.tags import Tag, unheld
from turnwise.types import Guide, TokenIds, ToolSchema


class FormatGuides:
    """The grammars of a chat format.

    Args:
        chat_format: How calls and reasoning are written.
        prefix: Returns what stands at the end of a context, the generation prompt at least, with the format's markers
            as private characters.
    """

    __slots__ = ("_format", "_prefix")

    def __init__(self, chat_format: ChatFormat, prefix: Callable[[TokenIds], str]) -> None:
        self._format = chat_format
        self._prefix = prefix

    def tagged(self, guide: Guide, tail: TokenIds, tools: Sequence[ToolSchema]) -> Guide:
        """Return a guide with its tag.

        Args:
            guide: What an answer is held to.
            tail: The context right before it.
            tools: All tools of the request.

        Raises:
            GuideRefused: It names a tool that is not there, the format has no grammar of its calls, or no engine would
                hold an answer to its schema.
        """
        keyword = None if guide.schema is None else unheld(guide.schema)
        if keyword is not None:
            raise GuideRefused(f"no answer can be held to {keyword!r} of a JSON schema: leave it out, and check for it")
        tag = self._format.guide_tag(guide, self._prefix(tail), self._calls(guide, tools))
        try:
            return replace(guide, tag=orjson.dumps({"type": "structural_tag", "format": tag}).decode())
        except TypeError as error:
            raise GuideRefused(f"a schema cannot be sent to the engine ({error}): write it flatter") from error

    def _calls(self, guide: Guide, tools: Sequence[ToolSchema]) -> Tag | None:
        if not guide.calls:
            return None
        known = {tool.name: tool for tool in tools}
        missing = [name for name in guide.calls if name not in known]
        if missing:
            raise GuideRefused(f"a call of {missing[0]!r} is asked for, which is none of the tools {sorted(known)}")
        calls = self._format.calls_tag([known[name] for name in guide.calls], guide.most)
        if calls is None:
            raise GuideRefused(f"the chat format {self._format.name} has no grammar of calls that one could be held to")
        return calls
