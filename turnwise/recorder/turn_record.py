"""Turn records: with its ids, which the ledger holds, a record restores a turn of a session in another process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from turnwise.errors import FormatError, SessionError
from turnwise.images import MessageMedia
from turnwise.media_files import MediaSpan, media_spans
from turnwise.model.canonical import Canonical, CanonicalCall, TemplateArguments, canonical_arguments
from turnwise.recorder.tree import NO_IDS, Node, Tree, path_ids, path_media
from turnwise.types import Completion, FinishReason, Media, TokenIds, ToolSchema

ReadFile = Callable[[str], bytes]
_TEXTS = ("reasoning", "name", "answers", "call_id", "call_name", "turn")


def canonical_record(message: Canonical) -> dict[str, Any]:
    """Return a canonical message as JSON; :func:`read_canonical` is the inverse."""
    record: dict[str, Any] = {"role": message.role, "text": message.text}
    record |= {name: value for name in _TEXTS if (value := getattr(message, name)) not in (None, "")}
    if message.calls:
        record["calls"] = [[call.id, call.name, call.arguments] for call in message.calls]
    if message.media:
        record["media"] = [[image.kind, image.digest, image.at] for image in message.media]
    return record


def read_canonical(record: Mapping[str, Any], files: ReadFile | None = None) -> Canonical:
    """Read a record of :func:`canonical_record`; ``files`` returns the bytes of an image by its digest.

    A malformed one raises KeyError, TypeError or ValueError, and a missing image what ``files`` raises.
    """
    texts = {name: record[name] for name in _TEXTS if name in record}
    message = Canonical(str(record["role"]), str(record["text"]), **texts)
    calls = [
        CanonicalCall(name, arguments, canonical_arguments(arguments)[1], call_id)
        for call_id, name, arguments in record.get("calls", ())
    ]
    if record.get("media"):
        if files is None:
            raise ValueError("it holds images, and there is no folder of images")
        media = [MessageMedia(kind, str(digest), int(at), files(digest)) for kind, digest, at in record["media"]]
        message = replace(message, media=tuple(media))
    return replace(message, calls=tuple(calls)) if calls else message


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """A committed turn without ids, log-probabilities and version spans. Its size is that of its new messages.

    Attributes:
        turn_id: The turn.
        parent: Index of the sampled node before its context; -1 at a root.
        context: Index of its context node.
        new: Messages of the context if the turn added it; None if the tree had it.
        message: The assistant message.
        forks: Fork reasons of the context (None if the tree had it) and of the completion.
        finish_reason: Of the completion.
        temperature: Of the request; None where it is unknown.
        counters: The session's counters after the turn: ``Session.counters``.
        tools: Tools of a new root.
        arguments: Template arguments of a new root.
        rewritten: Turns found rewritten since the turn before.
        foreign: Call ids that the agent made up, seen since the turn before.
        extra: Values that the kind of session adds.
        request: The key of its request; see ``Session.turns_by_request``.
        times: When its request was sent and its completion arrived, in seconds since 1970.
    """

    turn_id: str
    parent: int
    context: int
    new: tuple[Canonical, ...] | None
    message: Canonical
    forks: tuple[str | None, str | None]
    finish_reason: FinishReason
    temperature: float | None
    counters: Mapping[str, Any]
    tools: tuple[ToolSchema, ...] = ()
    arguments: TemplateArguments = ()
    rewritten: Sequence[str] = ()
    foreign: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    request: str = ""
    times: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON; :meth:`from_json` is the inverse."""
        record: dict[str, Any] = {
            "turn": self.turn_id,
            "parent": self.parent,
            "context": self.context,
            "said": canonical_record(self.message),
            "finish": self.finish_reason,
            "temperature": self.temperature,
            "counters": self.counters,
        }
        if self.new is not None:
            record["new"] = [canonical_record(message) for message in self.new]
        if any(self.forks):
            record["forks"] = self.forks
        if self.tools:
            # As text: a schema may hold numbers of more than 64 bits.
            record["tools"] = [[tool.name, tool.description, json.dumps(tool.parameters)] for tool in self.tools]
        optional = ("arguments", "rewritten", "foreign", "extra", "request", "times")
        return record | {name: value for name in optional if (value := getattr(self, name))}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], files: ReadFile | None = None) -> Self:
        """Read a record of :meth:`to_json`; ``files`` returns the bytes of an image by its digest.

        Raises FormatError.
        """
        try:
            new = record.get("new")
            context_fork, turn_fork = record.get("forks", (None, None))
            times = record.get("times")
            tools = [
                ToolSchema(name, text, json.loads(parameters)) for name, text, parameters in record.get("tools", ())
            ]
            return cls(
                turn_id=str(record["turn"]),
                parent=int(record["parent"]),
                context=int(record["context"]),
                new=None if new is None else tuple(read_canonical(message, files) for message in new),
                message=read_canonical(record["said"]),
                forks=(context_fork, turn_fork),
                finish_reason=record["finish"],
                temperature=record["temperature"],
                counters=dict(record["counters"]),
                tools=tuple(tools),
                arguments=tuple((str(name), str(value)) for name, value in record.get("arguments", ())),
                rewritten=record.get("rewritten", ()),
                foreign=record.get("foreign", ()),
                extra=record.get("extra", {}),
                request=str(record.get("request", "")),
                times=None if times is None else (float(times[0]), float(times[1])),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the record of turn {record.get('turn')!r} is malformed: {error!r}") from error


def find_context(
    record: TurnRecord, tree: Tree, prompt: TokenIds, completion: Completion, session_id: str
) -> tuple[Node | None, Node | None, int]:
    """Return where a recorded turn continues the tree of the turns before it.

    Args:
        record: The turn.
        tree: The tree of the turns restored so far.
        prompt: Ids that the model saw, int32 of shape [tokens].
        completion: What it sampled.
        session_id: For error messages.

    Returns:
        The sampled node before its context (None at a root), its context if the tree has it, and the number of ids
        before the context.

    Raises:
        SessionError: The record, its ids, and the turns restored so far contradict each other.
    """
    nodes, new = tree.nodes, record.new
    parent = nodes[record.parent] if 0 <= record.parent < len(nodes) else None
    prefix = path_ids(parent, NO_IDS)
    token_ids = prompt[len(prefix) :]
    context = nodes[record.context] if new is None and 0 <= record.context < len(nodes) else None
    if (
        record.turn_id != f"t{tree.turns}"
        or (parent is None) != (record.parent < 0)
        or (parent is not None and not parent.sampled)
        or not np.array_equal(prefix, prompt[: len(prefix)])
        or (new is not None and record.context != len(nodes))
        or (new is None and (context is None or context.sampled or not np.array_equal(context.token_ids, token_ids)))
        or record.finish_reason != completion.finish_reason
    ):
        raise SessionError(
            f"session {session_id}: turn {record.turn_id} does not continue the {tree.turns} turns before it "
            f"with the call of {len(prompt)} and {len(completion.token_ids)} ids that the ledger has for it"
        )
    return parent, context, len(prefix)


def context_media(
    record: TurnRecord, last_node: Node | None, prefix_tokens: int, media: Sequence[MediaSpan], session_id: str
) -> tuple[Media, ...]:
    """Return the images of a restored context, with positions in its ids.

    Args:
        record: The turn.
        last_node: The last node before the context.
        prefix_tokens: Number of ids before the context.
        media: Places of all images that the model saw.
        session_id: For error messages.

    Raises:
        SessionError: They are not the images of the record.
    """
    seen = media_spans(path_media(last_node, ()))
    files = {image.digest: image for message in record.new or () for image in message.media}
    fresh = media[len(seen) :]
    if list(media[: len(seen)]) != seen or [image.digest for image in fresh] != [
        image.digest for message in record.new or () for image in message.media
    ]:
        raise SessionError(
            f"session {session_id}: turn {record.turn_id} holds other images than the call that the ledger has for it"
        )
    return tuple(
        Media(files[image.digest].kind, files[image.digest].data, image.position - prefix_tokens, image.length)
        for image in fresh
    )
