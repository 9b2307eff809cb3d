"""Canonicalization and rendering of requests: small ones at once, large ones in a worker thread.

Tokenizing a megabyte takes half a second, in which the event loop would answer no other session and no health check.
So a long text is rendered in a thread, and is not tokenized at all if its bytes show that it has more ids than the
context has room for. The thread shares the interpreter with the event loop; the tokenizer runs in parallel.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from turnwise.model.canonical import Canonical
from turnwise.model.core import Renderer
from turnwise.recorder.tree import Node
from turnwise.types import Media, TokenIds, ToolCall, ToolSchema

_T = TypeVar("_T")
LONG = 100_000
"""Characters from which on messages are rendered in a thread; at this length tokenizing takes about 50 ms."""
_HEAVY = 20_000
"""Parts of a JSON value from which on it is canonicalized in a thread; at this size that takes about 30 ms."""
_CHARACTERS = 3
# To decode eight bytes of an image takes as long as to tokenize a character.
_IMAGE_BYTES = 8
# One thread: two long prompts would not be faster in parallel, and each running thread delays the event loop.
_THREAD = ThreadPoolExecutor(1, "render")


async def in_thread(work: Callable[..., _T], *arguments: Any) -> _T:
    """Return the result of a function that runs in the thread of large requests, after those before it."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work, *arguments)


def is_heavy(*values: Any) -> bool:
    """Return whether JSON values, messages or tools have so many parts that to convert them takes tens of milliseconds.

    Eight characters count as one part: arguments are texts to parse.
    """
    budget = _HEAVY
    stack: list[Any] = list(values)
    while stack and budget > 0:
        value = stack.pop()
        budget -= 1
        kind = type(value)
        if kind is str:
            budget -= len(value) >> _CHARACTERS
        elif kind is dict:
            stack.extend(value.values())
        elif kind is list or kind is tuple:
            stack.extend(value)
        elif kind is ToolCall:
            stack += (value.raw, value.arguments)
        elif kind is ToolSchema:
            stack.append(value.parameters)
    return budget <= 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """A rendered text.

    Attributes:
        token_ids: Its ids, int32 of shape [tokens]; None if it could not be rendered as an extension.
        escaped: Number of control-token strings kept as text.
        why: Why there are no ids.
        media: Images, with positions in the ids.
    """

    token_ids: TokenIds | None
    escaped: int
    why: str = ""
    media: tuple[Media, ...] = ()


def count_characters(messages: Iterable[Canonical]) -> int:
    """Return the characters of messages, images included by the time that it takes to read them."""
    return sum(
        len(message.text)
        + len(message.reasoning)
        + sum(len(call.arguments) for call in message.calls)
        + sum(len(media.data) for media in message.media) // _IMAGE_BYTES
        for message in messages
    )


async def render_prompt(
    renderer: Renderer,
    messages: Sequence[Canonical],
    tools: Sequence[ToolSchema],
    room: int | None = None,
    *,
    threaded: bool = True,
) -> Encoded:
    """Render a whole prompt, which may have ``room`` ids; arguments and errors as :func:`encode`."""
    size = count_characters(messages) + sum(len(tool.description) for tool in tools)
    return await encode(renderer, size, room, lambda target: target.render(messages, tools), threaded=threaded)


async def encode(
    renderer: Renderer, size: int, room: int | None, work: Callable[[Renderer], TokenIds | None], *, threaded: bool
) -> Encoded:
    """Render a text.

    Args:
        renderer: Its renderer.
        size: Its characters.
        room: Ids that it may have; None for any number.
        work: Renders it with the renderer that it is given.
        threaded: Whether a long text is rendered in a thread. Without, this never suspends: see
            :func:`run_unsuspended`.

    Raises:
        RenderError: The template or the tokenizer cannot render it.
        PromptTooLong: A long text certainly has more ids than ``room``.
    """
    if not threaded or size <= LONG:
        return _encode(renderer, work)
    return await in_thread(_encode_bounded, renderer, room, work)


def _encode(renderer: Renderer, work: Callable[[Renderer], TokenIds | None]) -> Encoded:
    escaped_before = renderer.escaped
    token_ids = work(renderer)
    escaped = renderer.escaped - escaped_before
    if token_ids is None:
        return Encoded(None, escaped, renderer.why)
    return Encoded(token_ids, escaped, media=renderer.placed)


def _encode_bounded(renderer: Renderer, room: int | None, work: Callable[[Renderer], TokenIds | None]) -> Encoded:
    # A copy: the event loop uses the renderer meanwhile.
    bounded = copy.copy(renderer)
    bounded.room = room
    return _encode(bounded, work)


def release_memory() -> None:
    """Return free memory to the system, in the thread of large requests, after those that wait for it.

    To tokenize takes a hundred bytes a character, which the allocator would keep.
    """
    _THREAD.submit(_trim)


def _trim() -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(AttributeError):  # Only glibc has it.
        ctypes.CDLL(None).malloc_trim(0)


def run_unsuspended(work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of a coroutine that does not suspend."""
    try:
        work.send(None)
    except StopIteration as done:
        result: _T = done.value
        return result
    work.close()
    raise RuntimeError("a coroutine suspended that must not")


def drops_reasoning(
    renderer: Renderer, path: Sequence[Node], new: Sequence[Canonical], tools: Sequence[ToolSchema]
) -> bool:
    """Return whether the template drops reasoning from the ids of a path once these messages follow it."""
    dropped = renderer.drops([*(message for node in path for message in node.messages), *new], tools)
    # What the template left out of the root when that was rendered is not in its ids.
    return bool(dropped) and bool(dropped - renderer.drops(path[0].messages, tools))
