"""Turn records: what restores a turn of a session in another process, beside its ids, which the ledger holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from turnwise.errors import FormatError
from turnwise.images import MessageMedia
from turnwise.model.canonical import Canonical, CanonicalCall, TemplateArguments, canonical_arguments
from turnwise.types import FinishReason, ToolSchema

ReadFile = Callable[[str], bytes]
_TEXTS = ("reasoning", "name", "answers", "call_id", "call_name", "turn")


def canonical_record(message: Canonical) -> dict[str, Any]:
    """Return a canonical message as JSON; :func:`read_canonical` is the inverse."""
    record: dict[str, Any] = {"role": message.role, "text": message.text}
    record |= {name: value for name in _TEXTS if (value := getattr(message, name)) not in (None, "")}
    if message.calls:
        record["calls"] = [[call.id, call.name, call.arguments] for call in message.calls]
    if message.media:
        record["media"] = [[each.kind, each.digest, each.at] for each in message.media]
    return record


def read_canonical(record: Mapping[str, Any], files: ReadFile | None = None) -> Canonical:
    """Read a record of :func:`canonical_record`; ``files`` returns the bytes of an image by its digest.

    A malformed one raises KeyError, TypeError or ValueError, and a missing image what ``files`` raises.
    """
    given = {name: record[name] for name in _TEXTS if name in record}
    message = Canonical(str(record["role"]), str(record["text"]), **given)
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
        new: Messages of the context where the turn added it; None where it was known.
        said: The assistant message.
        forks: Fork reasons of the context (None where it was known) and of the completion.
        finish_reason: Of the completion.
        temperature: Of the request; None where it is unknown.
        counters: The session's counters after the turn: ``Session.counters``.
        tools: Tools of a new root.
        arguments: Template arguments of a new root.
        rewritten: Turns found rewritten since the turn before.
        foreign: Call ids of the agent's own, seen since the turn before.
        extra: What kinds of sessions add.
        times: When its request was sent and its completion was there, in seconds since 1970.
    """

    turn_id: str
    parent: int
    context: int
    new: tuple[Canonical, ...] | None
    said: Canonical
    forks: tuple[str | None, str | None]
    finish_reason: FinishReason
    temperature: float | None
    counters: Mapping[str, Any]
    tools: tuple[ToolSchema, ...] = ()
    arguments: TemplateArguments = ()
    rewritten: Sequence[str] = ()
    foreign: Sequence[str] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    times: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON; :meth:`from_json` is the inverse."""
        record: dict[str, Any] = {
            "turn": self.turn_id,
            "parent": self.parent,
            "context": self.context,
            "said": canonical_record(self.said),
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
        optional = ("arguments", "rewritten", "foreign", "extra", "times")
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
            tools = [ToolSchema(name, about, json.loads(given)) for name, about, given in record.get("tools", ())]
            return cls(
                turn_id=str(record["turn"]),
                parent=int(record["parent"]),
                context=int(record["context"]),
                new=None if new is None else tuple(read_canonical(each, files) for each in new),
                said=read_canonical(record["said"]),
                forks=(context_fork, turn_fork),
                finish_reason=record["finish"],
                temperature=record["temperature"],
                counters=dict(record["counters"]),
                tools=tuple(tools),
                arguments=tuple((str(name), str(value)) for name, value in record.get("arguments", ())),
                rewritten=record.get("rewritten", ()),
                foreign=record.get("foreign", ()),
                extra=record.get("extra", {}),
                times=None if times is None else (float(times[0]), float(times[1])),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the record of turn {record.get('turn')!r} is malformed: {error!r}") from error
