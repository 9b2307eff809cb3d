"""What stands where a session wants a renderer and a model, and a hosted endpoint has neither to show.

Owns: :class:`TextRenderer` and :class:`NoTokens`. Refuses: ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

import numpy as np

from turnwise.errors import GuideRefused, SessionError
from turnwise.inference.canonical import Canonical
from turnwise.inference.core import GuideTags, LLMClient, ModelInfo
from turnwise.inference.template_args import TemplateArguments
from turnwise.types import Message, TokenIds, ToolSchema

NO_IDS: TokenIds = np.zeros(0, np.int32)
NO_IDS.flags.writeable = False
# Nobody knows what a hosted endpoint can take: it says so itself, with a status of 400.
UNKNOWN_CONTEXT = 2**53
_BYTES_A_TOKEN = 4


class _NoTags:
    def tagged(self, guide: object, tail: TokenIds, tools: Sequence[ToolSchema]) -> NoReturn:  # noqa: ARG002
        """Raise: programs ask the endpoint for that in its own words."""
        raise GuideRefused("nothing here holds an answer of a hosted endpoint to anything: leave params.guide out")


class TextRenderer:
    """The renderer of no ids: every message is placed, and nothing is encoded."""

    def __init__(self) -> None:
        self.stop_ids: frozenset[int] = frozenset()
        self.why = ""
        self.media: frozenset[str] = frozenset()
        self.escaped = 0
        self.guides: GuideTags = _NoTags()
        self.arguments: TemplateArguments = ()
        self.reads: frozenset[str] = frozenset()

    def takes(self, name: str, value: object) -> bool:  # noqa: ARG002
        """Return that there is no template to be given anything."""
        return False

    def under(self, arguments: TemplateArguments) -> TextRenderer:  # noqa: ARG002
        """Return itself: the endpoint is told in its own words."""
        return self

    def at(self, now: datetime) -> TextRenderer:  # noqa: ARG002
        """Return itself: it writes no date."""
        return self

    def count(self, text: str) -> int:
        """Return a guess at how many tokens a text takes: the endpoint's tokenizer is not known."""
        return -(-len(text.encode()) // _BYTES_A_TOKEN)

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:  # noqa: ARG002
        """Return no ids."""
        return NO_IDS

    def extend(
        self,
        tail: TokenIds,  # noqa: ARG002
        completion: TokenIds,  # noqa: ARG002
        last: Canonical,  # noqa: ARG002
        new: Sequence[Canonical],  # noqa: ARG002
        tools: Sequence[ToolSchema],  # noqa: ARG002
    ) -> TokenIds:
        """Return no ids: whatever is said next can follow."""
        return NO_IDS

    def drops(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> frozenset[int]:  # noqa: ARG002
        """Return nothing: what the endpoint drops is not known."""
        return frozenset()

    def parse(self, completion: TokenIds, tail: TokenIds, tools: Sequence[ToolSchema]) -> NoReturn:  # noqa: ARG002
        """Raise: there are no ids to read."""
        raise no_tokens()

    def completion(self, message: Message, tools: Sequence[ToolSchema]) -> NoReturn:  # noqa: ARG002
        """Raise: nobody knows the ids."""
        raise no_tokens()

    def live(self, tail: TokenIds, stops: Sequence[str] = ()) -> NoReturn:  # noqa: ARG002
        """Raise: there are no ids to read."""
        raise no_tokens()

    def decode(self, ids: TokenIds) -> str:  # noqa: ARG002
        """Return nothing: there are no ids."""
        return ""

    def describe(self) -> dict[str, Any]:
        """Return that nothing is rendered."""
        return {"format": "text", "proof": "a hosted endpoint renders"}


class NoTokens(LLMClient):
    """The client of a session that samples nothing itself."""

    async def generate(self, prompt: object, params: object, *, session_id: str) -> NoReturn:  # noqa: ARG002
        """Raise: tokens cannot be asked for."""
        raise no_tokens()

    def stream(self, prompt: object, params: object, *, session_id: str) -> NoReturn:  # noqa: ARG002
        """Raise: tokens cannot be asked for."""
        raise no_tokens()

    async def model_info(self) -> ModelInfo:
        """Return what is not known."""
        return ModelInfo("hosted", UNKNOWN_CONTEXT)

    async def close(self) -> None:
        """Nothing to release."""


def no_tokens() -> SessionError:
    """Return the error of whoever asks a hosted endpoint for tokens."""
    return SessionError(
        "a hosted endpoint tells no token ids: an agent talks to it through the address of its session "
        "(episode.address), or in an evaluation through session.chat"
    )
