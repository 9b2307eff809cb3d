"""Text sessions: the recorder for hosted endpoints, which return no token ids.

Turns, branches and fork reasons follow the rules of every session; without a template, no fork is due to rendering.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, ClassVar, NoReturn, Self

import numpy as np

from turnwise.errors import InferenceError, SessionError, StructuredOutputError, TurnwiseError
from turnwise.gateway.config import SETTINGS, SessionSettings
from turnwise.gateway.errors import unsupported
from turnwise.media_files import MediaSpan
from turnwise.model.canonical import Canonical, TemplateArguments, unplaced
from turnwise.model.core import LLMClient, ModelInfo, StructuralTags
from turnwise.recorder.completion import SessionLimits, token_budget
from turnwise.recorder.history import History
from turnwise.recorder.matching import EchoPolicy
from turnwise.recorder.requests import PendingRequest
from turnwise.recorder.session import Session
from turnwise.recorder.tree import NO_IDS
from turnwise.recorder.turn_record import TurnRecord
from turnwise.tools.response import estimated_tokens
from turnwise.types import Completion, Media, Message, SamplingParams, TokenIds, TokenPrompt, ToolCall, ToolSchema

# The limits of a hosted endpoint are unknown: it answers with status 400.
UNKNOWN_CONTEXT = 2**53


class _NoTags:
    def tagged(self, guide: object, tail: TokenIds, tools: Sequence[ToolSchema]) -> NoReturn:  # noqa: ARG002
        raise StructuredOutputError("responses of a hosted endpoint cannot be constrained: remove params.guide")


class TextRenderer:
    """A renderer without ids: every message can follow, and nothing is encoded."""

    def __init__(self) -> None:
        self.placed: tuple[Media, ...] = ()
        self.stop_ids: frozenset[int] = frozenset()
        self.why = ""
        self.media: frozenset[str] = frozenset()
        self.escaped = 0
        self.room: int | None = None
        self.guides: StructuralTags = _NoTags()
        self.arguments: TemplateArguments = ()
        self.reads: frozenset[str] = frozenset()

    def takes(self, name: str, value: object) -> bool:  # noqa: ARG002
        """Return False: there is no template."""
        return False

    def under(self, arguments: TemplateArguments) -> TextRenderer:  # noqa: ARG002
        """Return itself: there is no template."""
        return self

    def at(self, now: datetime) -> TextRenderer:  # noqa: ARG002
        """Return itself: there is no date."""
        return self

    def count(self, text: str) -> int:
        """Return an estimate of a text's tokens."""
        return estimated_tokens(text)

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:  # noqa: ARG002
        """Return no ids."""
        self.placed = unplaced(messages)
        return NO_IDS

    def extend(
        self,
        tail: TokenIds,  # noqa: ARG002
        completion: TokenIds,  # noqa: ARG002
        last: Canonical,  # noqa: ARG002
        new: Sequence[Canonical],
        tools: Sequence[ToolSchema],  # noqa: ARG002
    ) -> TokenIds:
        """Return no ids: any message can follow."""
        self.placed = unplaced(new)
        return NO_IDS

    def drops(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> frozenset[int]:  # noqa: ARG002
        """Return nothing: what the endpoint drops is unknown."""
        return frozenset()

    def parse(self, completion: TokenIds, tail: TokenIds, tools: Sequence[ToolSchema]) -> NoReturn:  # noqa: ARG002
        """Raise: there are no ids."""
        raise token_request_error()

    def completion(self, message: Message, tools: Sequence[ToolSchema]) -> NoReturn:  # noqa: ARG002
        """Raise: the ids are unknown."""
        raise token_request_error()

    def live(self, tail: TokenIds, stops: Sequence[str] = ()) -> NoReturn:  # noqa: ARG002
        """Raise: there are no ids."""
        raise token_request_error()

    def decode(self, token_ids: TokenIds) -> str:  # noqa: ARG002
        """Return an empty text."""
        return ""

    def describe(self) -> dict[str, Any]:
        """Return a description without format or template."""
        return {"format": "text", "proof": "a hosted endpoint renders"}


class NoTokens(LLMClient):
    """A client that cannot sample."""

    async def generate(self, prompt: object, params: object, *, session_id: str) -> NoReturn:  # noqa: ARG002
        """Raise: hosted endpoints return no token ids."""
        raise token_request_error()

    async def model_info(self) -> ModelInfo:
        """Return an unknown model."""
        return ModelInfo("hosted", UNKNOWN_CONTEXT)

    async def close(self) -> None:
        """Do nothing."""


def token_request_error() -> SessionError:
    """Return the error for token requests to a hosted endpoint."""
    return SessionError(
        "a hosted endpoint returns no token ids: an agent talks to it through the address of its session "
        "(episode.address), or in an evaluation through session.chat"
    )


_NO_LOGPROBS = np.zeros(0, np.float32)
_TEXT_SETTINGS = frozenset({"max_turns", "max_total_tokens", "echo"})


@dataclass(frozen=True, slots=True)
class Usage:
    """Token usage reported by an endpoint; ``prompt`` includes the ``cached`` tokens."""

    prompt: int
    completion: int
    cached: int = 0

    def to_metrics(self) -> dict[str, float]:
        """Return the counts by their names in trajectories."""
        return {f"{name}_tokens": float(count) for name, count in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class EndpointAnswer:
    """An answer of an endpoint: message with its call ids, whether a limit ended it, reported usage and model."""

    message: Message
    cut: bool
    usage: Usage | None
    sampling: dict[str, float]
    model: str = ""


Ask = Callable[[Sequence[Message], Sequence[ToolSchema], SamplingParams], Awaitable[EndpointAnswer]]
"""Sends a request to an endpoint; raises a TurnwiseError if there is no answer."""


class TextSession(Session):
    """Records a conversation with a hosted endpoint as text, with all its branches.

    Args:
        id: Names the trajectory.
        max_turns: Maximum number of requests.
        max_total_tokens: Maximum tokens over all branches, prompts included, as reported by the endpoint.
        echo: Policy for turns that come back rewritten.
        params: Default sampling parameters of :meth:`chat`.
        ask: Sends the requests of :meth:`chat`; None if agents only use the gateway.

    Attributes:
        turn_metrics: Reported usage and sampling parameters, by turn id.
    """

    recorded_as: ClassVar[str] = "text"

    def __init__(
        self,
        *,
        id: str,  # noqa: A002 - the field's name for it
        max_turns: int | None = None,
        max_total_tokens: int | None = None,
        echo: EchoPolicy = "same",
        params: SamplingParams | None = None,
        ask: Ask | None = None,
    ) -> None:
        limits = SessionLimits(UNKNOWN_CONTEXT, max_turns=max_turns, max_total_tokens=max_total_tokens)
        super().__init__(NoTokens(), TextRenderer(), id=id, limits=limits, params=params, echo=echo)
        self.turn_metrics: dict[str, dict[str, float]] = {}
        self._ask = ask
        self._history = History(self._recognise)
        self._repeated_ids: set[str] = set()
        self._used_tokens = 0
        self._branch_tokens: dict[int, int] = {}

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Message:
        """Get the next assistant message from the endpoint and record it; see :meth:`Session.chat`.

        Raises:
            SessionError: The session is for the gateway only, or the request cannot be placed.
            BudgetExceeded: A limit is reached, or the endpoint reports a full context.
            InferenceError: The endpoint failed or refused. Nothing was recorded.
        """
        if self._ask is None:
            raise token_request_error()
        if template_args:
            raise SessionError("template_args: a hosted endpoint has no accessible chat template")
        pending = self._place_request(messages, tools, params, fork)
        try:
            answer = await self._ask(messages, tuple(tools or ()), params or self.params)
        except BaseException as error:  # also a cancellation: the pending turn is withdrawn
            self.withdraw([pending])
            if isinstance(error, InferenceError):
                self.fail(error)
            raise
        if answer.model:
            self.count(f"answered_by/{answer.model}")
        return self.commit(pending, answer.message, cut=answer.cut, usage=answer.usage, sampling=answer.sampling)

    def place(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> PendingRequest:
        """Place a request without recording it. Raises SessionError, or BudgetExceeded at a limit."""
        return self._place_request(messages, tools, None, None)

    def commit(
        self, pending: PendingRequest, message: Message, *, cut: bool, usage: Usage | None, sampling: dict[str, float]
    ) -> Message:
        """Record the answer to a request; return it with call ids made unique.

        Args:
            pending: The request.
            message: The message with the endpoint's call ids.
            cut: Whether a length limit ended it.
            usage: Reported usage, or None.
            sampling: Numeric sampling parameters of the request.
        """
        calls: Sequence[ToolCall] = message.get("tool_calls") or ()
        call_ids = [call.id for call in calls]
        # Call ids prove which turn a message is only as long as they are unique.
        self._repeated_ids.update(
            call_id for call_id in call_ids if call_id in self.issued or call_ids.count(call_id) > 1
        )
        completion = Completion(NO_IDS, _NO_LOGPROBS, "length" if cut else "stop", ())
        returned = self._record(pending, completion, message, cut=cut)
        metrics = dict(sampling)
        if usage is None:
            self.count("turns_without_usage")
        else:
            metrics |= usage.to_metrics()
            for name, value in usage.to_metrics().items():
                self.count(name, value)
            self._add_usage(pending, usage)
        self.turn_metrics[returned["turn_id"]] = metrics
        if self.journal is not None:
            branch_tokens_of_turn = self._branch_tokens.get(self._tree.nodes[-1].index)
            extra = {
                "metrics": metrics,
                "used": self._used_tokens,
                "behind": branch_tokens_of_turn,
                "repeated": sorted(self._repeated_ids),
            }
            self.journal(self._turn_record(None, "", extra))
        return returned

    def restore(
        self, record: TurnRecord, prompt: TokenIds, completion: Completion, media: Sequence[MediaSpan] = ()
    ) -> None:
        """Commit a turn of an earlier process again; see :meth:`Session.restore`."""
        super().restore(record, prompt, completion, media)
        extra = record.extra
        self.turn_metrics[record.turn_id] = dict(extra["metrics"])
        self._used_tokens = int(extra["used"])
        if extra["behind"] is not None:
            self._branch_tokens[self._tree.nodes[-1].index] = int(extra["behind"])
        self._repeated_ids.update(extra["repeated"])
        # Unanswered requests used no turn.
        self._requests = self._tree.turns

    def withdraw(self, placed: Sequence[PendingRequest]) -> None:
        """Withdraw unanswered requests: they use no turn."""
        self._requests -= len(placed)

    def fail(self, failure: TurnwiseError) -> None:
        """Set the endpoint's failure, until it answers again."""
        self.failure = failure

    def metrics(self) -> dict[str, float]:
        """Return counters: turns, branches, forks, rewritten echoes, reported tokens (prompt, completion, cached)."""
        counters = super().metrics()
        budget = self.limits.max_total_tokens
        overrun = 0 if budget is None else max(0, self._used_tokens - budget)
        selected = {name: counters[name] for name in ("turns", "branches", "forks", "rewritten_echoes")}
        return {**selected, **self._counts, "tokens_over_limit": overrun, **self._common_temperature()}

    def _common_temperature(self) -> dict[str, float]:
        """Return the temperature if all requests named the same one."""
        temperatures = {metrics.get("temperature") for metrics in self.turn_metrics.values()}
        temperature = temperatures.pop() if len(temperatures) == 1 else None
        return {} if temperature is None else {"temperature": temperature}

    def context_left(self, turn_id: str) -> int | None:  # noqa: ARG002 - unknown
        """Return None: the context length is unknown."""
        return None

    def fork(self, turns: Sequence[str] | None = None, *, resample: str | None = None, seed: int | None = None) -> Self:
        """Return a session that begins anew in the same tree; see :meth:`Session.fork`.

        Raises:
            SessionError: Turns would be replayed, or both continue one conversation: requests to an endpoint cannot be
                compared by ids.
        """
        forked = super().fork(turns, resample=resample, seed=seed)
        forked._history, forked._used_tokens = History(forked._recognise), 0
        return forked

    def measure(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> int:
        """Return an estimate of a request's prompt tokens, at four bytes each."""
        texts = [str(message.get(part) or "") for message in messages for part in ("content", "tool_calls")]
        return estimated_tokens("".join([*texts, *(str(tool.to_json()) for tool in tools or ())]))

    def _recognise(self, ids: Sequence[str], message: Canonical) -> Canonical | None:
        if self._repeated_ids.intersection(ids):
            return None
        return self.issued.recognise(ids, message)

    def _limit_params(self, params: SamplingParams, prompt: TokenPrompt) -> SamplingParams:
        size = len(prompt.token_ids)
        token_budget(
            self.limits, self.id, prompt=size, committed=self._used_tokens, requests=self._requests, requested=None
        )
        return params

    def _add_usage(self, pending: PendingRequest, usage: Usage) -> None:
        """Count each token of the tree once, as sessions with ids do: those of the branch so far are already in."""
        turn = self._tree.nodes[-1]
        parent = pending.match.parent
        branch_tokens = 0 if parent is None else self._branch_tokens.get(parent.index, 0)
        if pending.match.context is not None:
            branch_tokens = usage.prompt
        self._branch_tokens[turn.index] = usage.prompt + usage.completion
        self._used_tokens += max(0, usage.prompt - branch_tokens) + usage.completion


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Limits of the sessions in front of a hosted endpoint; see :class:`TextSession`."""

    max_turns: int | None = None
    max_total_tokens: int | None = None
    echo: EchoPolicy = "same"

    def open(
        self,
        session_id: str,
        settings: SessionSettings,
        began: datetime,  # noqa: ARG002 - there is no date
    ) -> tuple[TextSession, TextRenderer]:
        """Return a new session with its own settings, and its reader. Raises ApiError for the endpoint's settings."""
        refused = [name for name in sorted(SETTINGS - _TEXT_SETTINGS) if getattr(settings, name) is not None]
        if refused:
            raise unsupported(
                refused[0], "not available for a hosted endpoint; available: " + ", ".join(sorted(_TEXT_SETTINGS))
            )
        session = TextSession(
            id=session_id,
            max_turns=settings.max_turns or self.max_turns,
            max_total_tokens=settings.max_total_tokens or self.max_total_tokens,
            echo=settings.echo or self.echo,
        )
        return session, TextRenderer()
