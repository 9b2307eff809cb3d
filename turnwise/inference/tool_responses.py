"""What follows a turn that called tools, as a model's own template writes it: for loops that are not Turnwise's.

Owns: :func:`tool_response_ids` and :func:`tool_response_text`, which return what a session would append to its prompt.
Refuses: recording; who records with a session needs neither.

They hold for every chat format (``<tool_response>`` of the Qwen family, the ``functions.NAME to=assistant`` messages of
gpt-oss, ``[TOOL_RESULTS]`` of Mistral and the others), because the template itself is asked, with the proof that
sessions ask for: that it writes the same whatever stands before.
"""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.errors import RenderError
from turnwise.inference.canonical import Canonical, CanonicalCall
from turnwise.inference.core import Renderer
from turnwise.types import TokenIds, ToolCall, ToolSchema

__all__ = ["tool_response_ids", "tool_response_text"]


def tool_response_ids(
    renderer: Renderer, calls: Sequence[ToolCall], answers: Sequence[str], tools: Sequence[ToolSchema] = ()
) -> TokenIds:
    """Return the ids to append to a turn that called tools and ended with its stop token.

    Args:
        renderer: Of the model, see :func:`~turnwise.inference.renderer.load_renderer`.
        calls: The calls of that turn, in its order: their names, and their ids where the model wrote them.
        answers: What each call gave, in the same order; at least one, and no more than there are calls.
        tools: The tools of the prompt.

    Returns:
        The answers and the prompt of the next turn, int32 of shape [tokens], without the stop token, which the model
        sampled.

    Raises:
        RenderError: The template cannot say it, or nothing proves what it says of it whatever stands before.
    """
    if not calls or not 0 < len(answers) <= len(calls):
        raise RenderError(
            f"answers: {len(answers)} answers to {len(calls)} calls; give each call's, in the order of the calls"
        )
    ids = [call.id or f"call{number:05d}" for number, call in enumerate(calls)]
    last = Canonical(
        "assistant",
        "",
        calls=tuple(CanonicalCall(call.name, "{}", {}, each) for call, each in zip(calls, ids, strict=True)),
    )
    new = [
        Canonical("tool", text, answers=number, call_id=ids[number], call_name=calls[number].name)
        for number, text in enumerate(answers)
    ]
    tail = renderer.render([Canonical("user", "?")], tools)
    # How a turn with a call ends in this format; what it says of the call itself does not matter to what follows.
    ended = renderer.completion(
        {"role": "assistant", "content": "", "tool_calls": [ToolCall(ids[0], calls[0].name, {})]}, tools
    )
    following = renderer.extend(tail, ended, last, new, tools)
    if following is None:
        names = ", ".join(call.name for call in calls)
        raise RenderError(f"this chat template cannot go on behind calls of {names}: {renderer.why}")
    return following


def tool_response_text(
    renderer: Renderer, calls: Sequence[ToolCall], answers: Sequence[str], tools: Sequence[ToolSchema] = ()
) -> str:
    """Return the same as text, special tokens spelled out: to show, or for a loop that encodes text itself.

    A loop that can append ids takes :func:`tool_response_ids`: only there markup in an answer stays text.

    Raises:
        RenderError: As :func:`tool_response_ids`.
    """
    return renderer.decode(tool_response_ids(renderer, calls, answers, tools))
