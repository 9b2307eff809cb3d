"""An agent's conversation with the model, kept within the context by dropping results and compaction."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

from turnwise.agents.context.config import CompactionConfig, ContextConfig, DropConfig
from turnwise.agents.core import Episode
from turnwise.tools.response import failure
from turnwise.types import Message, ToolCall, ToolSchema, text_of


def droppable_results(messages: Sequence[Message], config: DropConfig) -> list[int]:
    """Return the indices of tool results that may be dropped, oldest first.

    Results after the last assistant message are unread and stay, as do those no longer than their note.
    """
    names = _tools_of_results(messages)
    last_turn = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=0)
    answers = [index for index in names if names[index] not in config.exclude]
    old = answers[: max(0, len(answers) - config.keep)]
    return [
        index
        for index in old
        if index < last_turn
        and (_has_media(messages[index]) or len(text_of(messages[index])) > len(_note(config, names[index])))
    ]


def drop_results(messages: Sequence[Message], indices: Sequence[int], config: DropConfig) -> list[Message]:
    """Replace the results at these indices by notes; each call keeps its result message."""
    names = _tools_of_results(messages)
    shortened = list(messages)
    for index in indices:
        shortened[index] = {**messages[index], "content": _note(config, names[index])}
    return shortened


def _note(config: DropConfig, tool: str) -> str:
    return config.note.replace("{tool}", tool)


def _has_media(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part.get("type", "text") != "text" for part in content)


def _tools_of_results(messages: Sequence[Message]) -> dict[int, str]:
    """Return the tool of each result, by index."""
    called: dict[str, str] = {}
    tools = {}
    for index, message in enumerate(messages):
        called.update((call.id, call.name) for call in message.get("tool_calls") or ())
        if message["role"] == "tool":
            tools[index] = message.get("name") or called.get(message.get("tool_call_id", ""), "the tool")
    return tools


_SHARE = 8


@dataclass(slots=True)
class Compaction:
    """Result of a compaction.

    Attributes:
        done: Whether it holds a summary; otherwise it is the former conversation, plus the requests for a summary that
            the model answered by calls.
        cut: Whether a length limit cut the summary.
        turn: The last turn, or None where the request did not fit.
    """

    messages: list[Message]
    done: bool = False
    cut: bool = False
    turn: str | None = None


async def compact_conversation(talk: Conversation, config: CompactionConfig) -> Compaction:
    """Ask for a summary of a conversation and return its replacement.

    The request extends the branch. Where it does not fit after the last turns, it goes before them, and they stay
    verbatim after the summary.
    """
    turns = [index for index, message in enumerate(talk.messages) if message["role"] == "assistant"]
    # At least one turn must go.
    keep = min(config.keep_turns, len(turns) - 1)
    kept_from = turns[-keep] if keep > 0 else len(talk.messages)
    room = _room(talk, config)
    request = _question(talk, turns, room, config)
    if request is None:
        return Compaction(talk.messages)
    end, question = request
    behind = talk.messages[end:]
    params = replace(talk.session.params, max_tokens=room)
    result, fork = Compaction(talk.messages), talk.fork
    for _ in range(config.attempts):
        message = await talk.session.chat(question, talk.tools, params, fork=fork or "compaction")
        fork = None
        result.turn = message["turn_id"]
        calls, text = message.get("tool_calls") or (), text_of(message).strip()
        if text and not calls:
            beginning = _with_summary(talk.head, config.summary.replace("{summary}", text))
            cut = message["finish_reason"] == "length"
            return Compaction([*beginning, *talk.messages[min(kept_from, end) :]], True, cut, result.turn)
        question = [*question, message, *(_refusal(call) for call in calls)]
        if calls:
            # The model is to read what became of its calls, so the conversation continues from here.
            result.messages = [*question, *behind]
        else:
            question.append({"role": "user", "content": config.prompt})
        if talk.measure(question) + room > talk.limit:
            break
    return result


def _room(talk: Conversation, config: CompactionConfig) -> int:
    limits = [config.max_tokens or max(1, talk.limit // _SHARE), talk.session.limits.max_tokens_per_turn]
    return min(tokens for tokens in limits if tokens is not None)


def _question(
    talk: Conversation, turns: Sequence[int], room: int, config: CompactionConfig
) -> tuple[int, list[Message]] | None:
    """Return the end of the summarised part and the request for its summary; None where nothing fits."""
    for end in (len(talk.messages), *reversed(turns[1:])):
        question: list[Message] = [*talk.messages[:end], {"role": "user", "content": config.prompt}]
        if talk.measure(question) + room <= talk.limit:
            return end, question
    return None


def _with_summary(head: Sequence[Message], text: str) -> list[Message]:
    """Append a summary to the last user message of a head: many chat templates refuse two user messages in a row."""
    last_message = head[-1] if head else None
    if last_message is None or last_message["role"] != "user":
        return [*head, {"role": "user", "content": text}]
    content = last_message.get("content")
    if isinstance(content, list):
        return [*head[:-1], {**last_message, "content": [*content, {"type": "text", "text": f"\n\n{text}"}]}]
    return [*head[:-1], {**last_message, "content": f"{content}\n\n{text}" if content else text}]


def _refusal(call: ToolCall) -> Message:
    reason = "this call was not executed: write the requested summary as text"
    return failure("unusable_call", reason, tool=call.name).message(call)


class Conversation:
    """A conversation in the episode's session.

    Args:
        head: System prompt and task; never dropped or summarised.
        fork: Fork name of its beginning, where it is not the session's first.

    Attributes:
        fork: Fork name of the next request, if it starts a branch.
        limit: Context limit in tokens.
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
        """Return the prompt length of messages in tokens."""
        return self.session.measure(messages, self.tools)

    async def ask(self) -> Message:
        """Make room where needed, sample the next message and append it."""
        if self._turn is not None:
            await self._make_room()
        fork, self.fork = self.fork, None
        message = await self.session.chat(self.messages, self.tools, fork=fork)
        self._turn = message["turn_id"]
        self.messages.append(message)
        return message

    def hear(self, answers: Sequence[Message]) -> None:
        """Append the answers to the model's last message."""
        self.messages.extend(answers)

    def spare(self, calls: int) -> int:
        """Return the tokens that can be dropped before the next request, which answers ``calls`` calls.

        Computed only from half a context on: below that, results are not cut.
        """
        config, messages = self._config.drop_tool_results, self.messages[:-1]
        room = self.session.context_left(self._turn) if self._turn is not None else None
        if config is None or room is None or room > self.limit // 2:
            return 0
        # The answers that are to come are among the last ones.
        indices = droppable_results(self.messages, config.model_copy(update={"keep": max(0, config.keep - calls)}))
        return max(0, self.measure(messages) - self.measure(drop_results(messages, indices, config))) if indices else 0

    async def _make_room(self) -> None:
        if self._config.drop_tool_results is not None:
            self._drop_results(self._config.drop_tool_results)
        compaction = self._config.compaction
        if compaction is not None and self._compacts:
            size = self.measure(self.messages)
            if size > compaction.above * self.limit:
                await self._compact(compaction, size)

    def _drop_results(self, config: DropConfig) -> None:
        indices = droppable_results(self.messages, config)
        if not indices:
            return
        size = self.measure(self.messages)
        if size <= config.begins * self.limit:
            return
        if config.until is not None:
            indices = indices[: self._count_to_drop(indices, config, config.until * self.limit)]
        shorter = drop_results(self.messages, indices, config)
        saved = size - self.measure(shorter)
        if saved > 0:
            self.messages, self.fork = shorter, "dropped_tool_results"
            self._count(dropped_results=len(indices), tokens_saved=saved)

    def _count_to_drop(self, indices: Sequence[int], config: DropConfig, budget: float) -> int:
        """Return how many results must go to fit ``budget`` tokens; all if that fails."""

        def fits(count: int) -> bool:
            return self.measure(drop_results(self.messages, indices[:count], config)) <= budget

        return 1 + bisect.bisect_left(range(1, len(indices)), True, key=fits)

    async def _compact(self, config: CompactionConfig, size: int) -> None:
        result = await compact_conversation(self, config)
        if result.turn is not None:
            # Else nothing was asked: a fork that is to come has its own name.
            self.fork, self._turn = "compaction", result.turn
        new_size = self.measure(result.messages) if result.done else size
        if new_size >= size:
            # Another attempt would give much the same: the conversation continues as long as there is room.
            self._compacts = False
            self._count(failed_compactions=1)
            if not result.done:
                self.messages = list(result.messages)
            return
        self.messages = list(result.messages)
        self._count(compactions=1, tokens_saved=size - new_size, cut_summaries=int(result.cut))

    def _count(self, **counts: int) -> None:
        self._episode.count({f"context/{name}": float(value) for name, value in counts.items() if value}, self._turn)
