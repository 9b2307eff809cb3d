"""THE recorder: the one place where messages become tokens and tokens become messages.

The golden rule: a sampled id is never decoded and re-encoded. The ids of the next request are the ids of a
known path plus the encoding of what is new; where that cannot be proven, the request forks at the root, with a
reason that is counted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, ClassVar

import numpy as np

from turnwise.errors import InferenceError, SessionError, TurnwiseError
from turnwise.model.canonical import Canonical, template_arguments
from turnwise.model.core import LLMClient, Renderer, closing
from turnwise.recorder.completion import SessionLimits, check_completion, parse_completion, read_completion, room_for
from turnwise.recorder.history import History, Offers, snapshot
from turnwise.recorder.ledger import join_deltas
from turnwise.recorder.matching import EchoPolicy, MessageMatcher, ReasoningPolicy, RootKey
from turnwise.recorder.tree import (
    Match,
    Node,
    PromptPlacement,
    Sampled,
    Tree,
    addressed,
    fork_reason,
    joined,
    segment_of,
)
from turnwise.seeding import stable_hash
from turnwise.trajectory import Segment
from turnwise.types import Completion, Message, SamplingParams, TokenDelta, TokenIds, TokenPrompt, ToolSchema


@dataclass(slots=True)
class PendingRequest:
    """A request that was placed and is yet to be answered."""

    messages: list[Canonical]
    match: Match
    prompt: TokenPrompt
    params: SamplingParams
    fork: str | None
    renderer: Renderer

    def opened(self) -> PromptPlacement:
        """Return how it was placed."""
        new = 0 if self.match.context is not None else len(self.match.ids)
        return PromptPlacement(len(self.prompt.ids), len(self.prompt.ids) - new, self.match.ids)


@dataclass(slots=True)
class RecordedTurn:
    """A turn that was recorded.

    Attributes:
        opened: How its request was placed.
        completion: What was sampled.
        message: What the agent is given.
    """

    opened: PromptPlacement
    completion: Completion
    message: Message


__all__ = ["PendingRequest", "PromptPlacement", "RecordedTurn", "Session", "SessionLimits"]


class Session:
    """Records one conversation, or several branches of one, with a model.

    Args:
        client: Who samples.
        renderer: Messages to ids and back.
        id: Unique in the run; names the trajectory and keeps requests on the replica that knows the prefix.
        limits: What may be used.
        params: Sampling parameters that a request's own override as a whole.
        seed: Sampling seed: each request draws from a stream of its own that depends only on this and on how
            many requests were sent before.
        one_temperature: Refuse requests at another temperature than that of ``params``. The trainer divides the
            logits of a trajectory by one temperature.
        reasoning: What becomes of the reasoning of earlier turns.
        echo: What becomes of a turn that comes back rewritten, with the ids of its calls.
    """

    recorded_as: ClassVar[str] = "tokens"

    def __init__(
        self,
        client: LLMClient,
        renderer: Renderer,
        *,
        id: str,  # noqa: A002 - the field's name for it
        limits: SessionLimits,
        params: SamplingParams | None = None,
        seed: int | None = None,
        one_temperature: bool = False,
        reasoning: ReasoningPolicy = "keep",
        echo: EchoPolicy = "same",
    ) -> None:
        self.id = id
        self.limits = limits
        self.params = params or SamplingParams()
        self.reasoning = reasoning
        self.echo = echo
        self._client = client
        self.renderer = renderer.at(datetime.now())
        self._seed = seed
        self._one_temperature = one_temperature
        self._tree = Tree()
        self._echoes = MessageMatcher(strict=echo == "strict")
        self._last: Message | None = None
        self._failure: TurnwiseError | None = None
        self._requests = 0
        self._history = History(self._echoes.recognise)
        self._offers = Offers()
        self._prompt_tokens = 0
        self._encoded_tokens = 0
        self._escaped = 0

    @property
    def turns(self) -> int:
        """How many completions were committed."""
        return self._tree.turns

    @property
    def last(self) -> Message | None:
        """The assistant message that was committed last, as it was given to the agent."""
        return self._last

    @property
    def failure(self) -> TurnwiseError | None:
        """What the last request failed with, where the server or its client failed: None once another one succeeds."""
        return self._failure

    def turn_of_call(self, call_id: str) -> str | None:
        """Return the id of the turn that made a call, or None where this session issued no such id."""
        return self._echoes.turn_of(call_id)

    def calls_beside(self, call_id: str) -> int:
        """Return how many calls the turn made that made this one, itself included; 0 where nobody issued such an id."""
        return self._echoes.calls_beside(call_id)

    def room_behind(self, turn_id: str) -> int | None:
        """Return how many tokens of the context are left behind a turn, or None where this session has no such turn."""
        for node in reversed(self._tree.nodes):
            if node.turn_id == turn_id:
                return self.limits.context_length - sum(each.tokens for each in node.path())
        return None

    def measure(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> int:
        """Return how many tokens the prompt of such a request would have. Nothing is sent, and nothing is recorded.

        Raises:
            TurnwiseError: As :meth:`chat`, where it cannot be placed or rendered.
        """
        escaped = self._escaped
        offered = self._offers.offered(tuple(tools or ()), self.renderer.arguments)
        match = self._match(self._history.reduce(messages), *offered, self.renderer)
        self._escaped = escaped
        before = 0 if match.parent is None else sum(node.tokens for node in match.parent.path())
        return before + len(match.ids)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Message:
        """Ask the model for the next assistant message and record what it saw and sampled.

        Args:
            messages: The whole conversation so far, in any form that means the same as before.
            tools: What the model may call.
            params: Sampling parameters instead of the session's.
            fork: Names the fork that this request makes, if it makes one (``compaction``).
            template_args: Arguments of the chat template (``enable_thinking``); they belong to a root as tools do.

        Returns:
            The assistant message, with ``turn_id`` and ``finish_reason``. Its calls carry ids that are unique
            in the session; a call with an ``error`` must not be executed.

        Raises:
            SessionError: The request cannot be placed (prefill, media, no messages), or the client broke its
                contract.
            RenderError: The template cannot render the messages. Nothing was sent.
            BudgetSpent: Nothing is left to sample. Nothing was sent.
            InferenceError: The server failed. Nothing was committed.
        """
        return (await self.record(messages, tools, params, fork=fork, template_args=template_args)).message

    async def record(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> RecordedTurn:
        """Do what :meth:`chat` does, and return with the message how it came about.

        Raises:
            TurnwiseError: As :meth:`chat`.
        """
        request = self._open(messages, tools, params, fork, template_args)
        try:
            completion = await self._client.generate(request.prompt, request.params, session_id=self.id)
            return RecordedTurn(request.opened(), completion, self._commit(request, completion))
        except (InferenceError, SessionError) as error:
            self._failure = error
            raise

    async def stream(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[PromptPlacement | TokenDelta | Message]:
        """Ask as :meth:`chat` does, and show what is sampled while it is.

        Yields:
            How the request was placed, then the pieces of the completion, then the message that :meth:`chat` would
            have returned. It is recorded before the last piece is yielded; whoever closes the stream before that
            leaves nothing.

        Raises:
            TurnwiseError: As :meth:`chat`.
        """
        request = self._open(messages, tools, params, fork, template_args)
        yield request.opened()
        pieces: list[TokenDelta] = []
        message: Message | None = None
        try:
            async with closing(self._client.stream(request.prompt, request.params, session_id=self.id)) as stream:
                async for piece in stream:
                    pieces.append(piece)
                    if piece.finish_reason is not None:
                        message = self._commit(request, join_deltas(pieces))
                    yield piece
            if message is None:
                raise InferenceError(f"session {self.id}: a stream ended without a finish reason; nothing was recorded")
        except (InferenceError, SessionError) as error:
            self._failure = error
            raise
        yield message

    def segments(self, *, messages: bool = True) -> list[Segment]:
        """Return the committed segments, in commit order.

        Args:
            messages: Whether segments carry what they mean, besides their ids.
        """
        return [segment_of(node, messages=messages) for node in self._tree.nodes]

    def close(self) -> None:
        """Let go of what was recorded: no request may follow. What :meth:`segments` returned stays."""
        self._tree.dissolve()

    def metrics(self) -> dict[str, float]:
        """Return counts of this session: turns, branches, forks, tokens sampled, seen and encoded, echoes that were
        rewritten, strings of control ids in messages that stayed text, and by how much requests in flight together went
        over ``max_total_tokens``.
        """
        budget = self.limits.max_total_tokens
        return {
            **self._tree.counts(),
            "prompt_tokens": self._prompt_tokens,
            "encoded_tokens": self._encoded_tokens,
            "rewritten_echoes": len(self._echoes.rewritten),
            "special_in_text": self._escaped,
            "tokens_over_limit": 0 if budget is None else max(0, self._tree.tokens - budget),
        }

    # Match and extend

    def _open(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        params: SamplingParams | None,
        fork: str | None,
        template_args: Mapping[str, Any] | None = None,
    ) -> PendingRequest:
        """Place a request in the tree. Nothing is sent and nothing is recorded."""
        renderer = self.renderer
        if template_args:
            renderer = renderer.under(template_arguments(template_args))
        canonical = self._history.reduce(messages)
        match = self._match(canonical, *self._offers.offered(tuple(tools or ()), renderer.arguments), renderer)
        prompt = self._prompt(match)
        limited = self._limited(params or self.params, prompt)
        if limited.guide is not None:
            limited = replace(limited, guide=renderer.guides.tagged(limited.guide, match.ids, match.tools))
        self._requests += 1
        return PendingRequest(canonical, match, TokenPrompt(prompt), limited, fork, renderer)

    def _match(
        self, messages: list[Canonical], tools: tuple[ToolSchema, ...], key: RootKey, renderer: Renderer
    ) -> Match:
        commits = len(self._tree.nodes)
        turns, context = self._tree.deepest(messages, key)
        if context is not None:
            return Match(context.parent, context, (), context.ids, None, commits, key, tools)
        why = None
        for turn, used in turns:
            assert turn.parent is not None
            new = addressed(turn, messages[used:])
            if self.reasoning == "template" and self._drops(turn, new, tools, renderer):
                why = why or "reasoning_dropped"
                break
            escaped = renderer.escaped
            ids = renderer.extend(turn.parent.ids, turn.ids, turn.messages[0], new, tools)
            if ids is not None:
                self._escaped += renderer.escaped - escaped
                return Match(turn, None, new, self._frozen(ids), None, commits, key, tools)
            # A branch that began where this one could not be extended may go on from there.
            why = why or f"bridge_unproven: {renderer.why}"
        escaped = renderer.escaped
        ids = renderer.render(messages, tools)
        self._escaped += renderer.escaped - escaped
        return Match(None, None, tuple(messages), self._frozen(ids), why, commits, key, tools)

    def _drops(self, turn: Node, new: Sequence[Canonical], tools: Sequence[ToolSchema], renderer: Renderer) -> bool:
        """Whether the template drops reasoning that stands in the ids of a path, once these messages follow it."""
        path = turn.path()
        dropped = renderer.drops([*(message for node in path for message in node.messages), *new], tools)
        # What the template left out of the root when that was rendered is not in its ids.
        return bool(dropped) and bool(dropped - renderer.drops(path[0].messages, tools))

    def _frozen(self, ids: TokenIds) -> TokenIds:
        self._encoded_tokens += len(ids)
        ids = np.array(ids, np.int32)
        ids.flags.writeable = False
        return ids

    def _prompt(self, match: Match) -> TokenIds:
        prompt = joined(match.parent, match.ids)
        self._prompt_tokens += len(prompt)
        return prompt

    # Limits

    def _limited(self, params: SamplingParams, prompt: TokenIds) -> SamplingParams:
        if self._one_temperature and params.temperature != self.params.temperature:
            raise SessionError(
                f"session {self.id}: params.temperature is {params.temperature}, but this trajectory is trained at "
                f"{self.params.temperature} (rollout.temperature): give it that temperature, or none at all"
            )
        most = room_for(
            self.limits,
            self.id,
            prompt=len(prompt),
            committed=self._tree.tokens,
            requests=self._requests,
            wanted=params.max_tokens,
        )
        seed = params.seed
        if seed is None and self._seed is not None:
            seed = stable_hash("request", self._seed, self._requests)
        stop_ids = tuple(sorted(self.renderer.stop_ids.union(params.stop_token_ids)))
        return replace(params, max_tokens=most, stop_token_ids=stop_ids, seed=seed)

    # Commit: no await from here on

    def _commit(self, request: PendingRequest, completion: Completion) -> Message:
        match = request.match
        check_completion(completion, request.params, self.id)
        message, cut = read_completion(request.renderer, completion, match.ids, match.tools, request.params)
        return self._record(request, completion, message, cut=cut)

    def _record(self, request: PendingRequest, completion: Completion, message: Message, *, cut: bool) -> Message:
        match = request.match
        reason = None
        if match.context is not None or self._tree.siblings(match.parent):
            reason = request.fork or fork_reason(self._tree.roots, match, request.messages)
        given, meant = parse_completion(message, self._tree.turns, self._echoes, cut=cut)
        context = self._tree.context_of(match) or self._add(match.parent, match, match.ids, match.new, reason)
        self._add(context, match, completion.token_ids, (meant,), reason, completion, given["turn_id"])
        self._echoes.register(given["turn_id"], meant)
        # What is scored is what was said: agents edit their messages in place.
        self._last = snapshot(given)
        self._history.said(snapshot(given), meant)
        self._failure = None
        return given

    def _add(
        self,
        parent: Node | None,
        match: Match,
        ids: TokenIds,
        messages: tuple[Canonical, ...],
        reason: str | None,
        completion: Completion | None = None,
        turn_id: str | None = None,
    ) -> Node:
        sampled = completion is not None
        return self._tree.add(
            Node(
                index=len(self._tree.nodes),
                parent=parent,
                sampled=sampled,
                messages=messages,
                start=0 if parent is None else parent.end,
                key=match.key,
                tools=match.tools,
                turns=(0 if parent is None else parent.turns) + sampled,
                completion=None if completion is None else Sampled.of(completion),
                turn_id=turn_id,
                fork=reason if self._tree.siblings(parent) else None,
            ),
            ids,
        )
