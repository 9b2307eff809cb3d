"""One conversation of an agent with the model, kept within the context.

Owns: :class:`Conversation`: what is sent next, and which fork that makes. Refuses: what becomes of the model's calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.agents.context.compaction import compacted
from turnwise.agents.context.config import CompactionConfig, ContextConfig, DropConfig
from turnwise.agents.context.dropping import droppable, dropped
from turnwise.agents.core import Episode
from turnwise.types import Message, ToolSchema


class Conversation:
    """A conversation in the episode's session.

    Args:
        episode: Whose session it is in, and where it is counted.
        config: What is done about the context.
        head: How it begins: the system prompt and the task. This is never dropped or summarised.
        tools: What the model may call in it.
        depth: How many agents stand above the one whose conversation it is.
        fork: What its beginning is called where it is not the session's first.

    Attributes:
        depth: As given.
        fork: What the next request is called if it begins a branch.
        messages: What the next request sends.
        session: Where it is recorded.
        limit: Tokens that it may take.
    """

    def __init__(
        self,
        episode: Episode,
        config: ContextConfig,
        head: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        depth: int = 0,
        fork: str | None = None,
    ) -> None:
        self.depth = depth
        self.fork = fork
        self.session = episode.session
        self.head = list(head)
        self.messages = list(head)
        self.tools = tuple(tools)
        self.limit = min(episode.limits.context_length, config.length or episode.limits.context_length)
        self._episode = episode
        self._config = config
        self._turn: str | None = None
        self._compacts = True

    def measure(self, messages: Sequence[Message]) -> int:
        """Return how many tokens a prompt of these messages would have."""
        return self.session.measure(messages, self.tools)

    async def ask(self) -> Message:
        """Make room where it is needed, and return what the model says next. It is part of the conversation then.

        Raises:
            TurnwiseError: As ``Session.chat``.
        """
        if self._turn is not None:
            await self._make_room()
        fork, self.fork = self.fork, None
        message = await self.session.chat(self.messages, self.tools, fork=fork)
        self._turn = message["turn_id"]
        self.messages.append(message)
        return message

    def hear(self, answers: Sequence[Message]) -> None:
        """Append what was answered to the model's last message."""
        self.messages.extend(answers)

    def spare(self, calls: int) -> int:
        """Return how many tokens can be dropped before the next request, which answers so many calls of the last turn.

        Reckoned is only where the context is half full: answers are cut where there is no room for them.
        """
        config, before = self._config.drop_tool_results, self.messages[:-1]
        room = self.session.room_behind(self._turn) if self._turn is not None else None
        if config is None or room is None or room > self.limit // 2:
            return 0
        # The answers that are to come are among the last ones.
        places = droppable(self.messages, config.model_copy(update={"keep": max(0, config.keep - calls)}))
        return max(0, self.measure(before) - self.measure(dropped(before, places, config))) if places else 0

    async def _make_room(self) -> None:
        if self._config.drop_tool_results is not None:
            self._drop(self._config.drop_tool_results)
        compaction = self._config.compaction
        if compaction is not None and self._compacts:
            size = self.measure(self.messages)
            if size > compaction.above * self.limit:
                await self._compact(compaction, size)

    def _drop(self, config: DropConfig) -> None:
        places = droppable(self.messages, config)
        if not places:
            return
        size = self.measure(self.messages)
        if size <= config.begins * self.limit:
            return
        if config.until is not None:
            places = places[: self._enough(places, config, config.until * self.limit)]
        shorter = dropped(self.messages, places, config)
        saved = size - self.measure(shorter)
        if saved > 0:
            self.messages, self.fork = shorter, "dropped_tool_results"
            self._count(dropped_results=len(places), tokens_saved=saved)

    def _enough(self, places: Sequence[int], config: DropConfig, most: float) -> int:
        """Return how many of the answers must go so that the prompt has at most so many tokens; all if that fails."""
        low, high = 1, len(places)
        while low < high:
            middle = (low + high) // 2
            if self.measure(dropped(self.messages, places[:middle], config)) <= most:
                high = middle
            else:
                low = middle + 1
        return low

    async def _compact(self, config: CompactionConfig, size: int) -> None:
        result = await compacted(self, config)
        if result.turn is not None:
            # Else nothing was asked: a fork that is to come has its own name.
            self.fork, self._turn = "compaction", result.turn
        left = self.measure(result.messages) if result.done else size
        if left >= size:
            # Asked again it would say much the same: the conversation goes on as long as there is room.
            self._compacts = False
            self._count(failed_compactions=1)
            if not result.done:
                self.messages = list(result.messages)
            return
        self.messages = list(result.messages)
        self._count(compactions=1, tokens_saved=size - left, cut_summaries=int(result.cut))

    def _count(self, **found: int) -> None:
        self._episode.count({f"context/{name}": float(value) for name, value in found.items() if value}, self._turn)
