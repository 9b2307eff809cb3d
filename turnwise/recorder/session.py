"""The session: the only place where messages become tokens and tokens become messages.

A sampled id is never decoded and re-encoded. The next prompt is the ids of a known path plus the encoding of the new
messages; where that cannot be proven equal to the template, the request forks at the root with a counted reason.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar, Self

import numpy as np

from turnwise.errors import InferenceError, PromptTooLong, SessionError, TurnwiseError
from turnwise.media_files import MediaSpan
from turnwise.model.canonical import Canonical, canonical_tools, template_arguments
from turnwise.model.core import LLMClient, Renderer, closing
from turnwise.recorder.completion import (
    SessionLimits,
    check_completion,
    context_overflow,
    parse_completion,
    read_completion,
    token_budget,
)
from turnwise.recorder.fork import Prefix, RequestGate, answers_messages, exclude_other_forks, returned_turn
from turnwise.recorder.history import History, RequestTools, snapshot
from turnwise.recorder.ledger import join_deltas
from turnwise.recorder.matching import EchoPolicy, MessageMatcher, ReasoningPolicy, RootKey, ToolsKey
from turnwise.recorder.prompts import (
    Encoded,
    count_characters,
    drops_reasoning,
    encode,
    in_thread,
    is_heavy,
    render_prompt,
    run_unsuspended,
)
from turnwise.recorder.requests import PendingRequest, RecordedTurn
from turnwise.recorder.tree import (
    Match,
    Node,
    PromptPlacement,
    Sampled,
    Tree,
    fork_reason,
    path_ids,
    path_media,
    path_tokens,
    segment_of,
    with_call_ids,
)
from turnwise.recorder.turn_record import TurnRecord, context_media, find_context
from turnwise.seeding import stable_hash
from turnwise.trajectory import Segment
from turnwise.types import Completion, Message, SamplingParams, TokenDelta, TokenIds, TokenPrompt, ToolSchema

__all__ = ["PromptPlacement", "Session", "SessionLimits"]


class Session:
    """Records a conversation with a model, with all its branches.

    Args:
        client: Inference client.
        renderer: Chat template and format of the model.
        id: Unique in the run; names the trajectory and routes to the replica that caches the prefix.
        limits: Token and turn limits.
        params: Default sampling parameters; those of a request replace them as a whole.
        seed: Sampling seed; each request's stream depends on it and the number of earlier requests only.
        one_temperature: Refuse requests at another temperature than ``params``: the trainer scales the logits of a
            trajectory by one temperature.
        reasoning: Policy for the reasoning of earlier turns.
        echo: Policy for turns that come back rewritten.
        began: When the session began, for templates that write a date; now by default.

    Attributes:
        journal: Called with the record of each turn right after its commit, before the turn is returned; its
            error fails the request, and the turn stays committed.
        gate: What each request waits at before it samples.
        issued: The calls that its turns issued, by call id.
        last: The assistant message committed last, as returned; None for a restored one.
        failure: Error of the last request if the server or client failed; None after a success.
        sampled_turns: Ids of the turns that this object sampled, in commit order; not those of its forks, nor those
            before it was forked.
        turns_by_request: The turns that answered each request, by its key (``""`` where it has none).
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
        began: datetime | None = None,
    ) -> None:
        self.id = id
        self.journal: Callable[[TurnRecord], None] | None = None
        self.gate: RequestGate | None = None
        self.sampled_turns: list[str] = []
        self.turns_by_request: defaultdict[str, list[str]] = defaultdict(list)
        self.limits = limits
        self.params = params or SamplingParams()
        self.reasoning = reasoning
        self.echo = echo
        self._client = client
        self.turn_times: dict[str, tuple[float, float]] = {}
        self.renderer = renderer.at(began or datetime.now())
        self._seed = seed
        self._one_temperature = one_temperature
        self._tree = Tree()
        self.issued = MessageMatcher(strict=echo == "strict")
        self.last: Message | None = None
        self.failure: TurnwiseError | None = None
        self._returned: dict[str, Message] = {}
        self._forks: list[Session] = []
        self._prefix: Prefix | None = None
        self._requests = self._spent = 0
        self._history, self._request_tools = History(self.issued.recognise), RequestTools()
        # Turns before this session was forked; None until any fork.
        self._inherited_turns: tuple[str, ...] | None = None
        self._prompt_tokens = self._encoded_tokens = self._escaped = 0
        self._counts: dict[str, float] = {}

    @property
    def turns(self) -> int:
        """Number of committed completions."""
        return self._tree.turns

    @property
    def counters(self) -> dict[str, Any]:
        """Counters behind limits, sampling seeds and metrics, as JSON; set in a restored session."""
        counters = {
            "requests": self._requests,
            "prompt_tokens": self._prompt_tokens,
            "encoded_tokens": self._encoded_tokens,
            "escaped": self._escaped,
        }
        return {**counters, "counts": dict(self._counts)} if self._counts else counters

    @counters.setter
    def counters(self, saved: Mapping[str, Any]) -> None:
        self._requests = int(saved["requests"])
        self._prompt_tokens = int(saved["prompt_tokens"])
        self._encoded_tokens = int(saved["encoded_tokens"])
        self._escaped = int(saved["escaped"])
        self._counts = dict(saved.get("counts", {}))

    def turn_of_call(self, call_id: str) -> str | None:
        """Return the id of the turn that issued a call id, or None."""
        return self.issued.turn_of(call_id)

    def context_left(self, turn_id: str) -> int | None:
        """Return the tokens of context left after a turn, or None for an unknown turn."""
        for node in reversed(self._tree.nodes):
            if node.turn_id == turn_id:
                return self.limits.context_length - sum(node.tokens for node in node.path())
        return None

    def measure(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> int:
        """Return the prompt tokens of such a request, without sending or recording it; errors as :meth:`chat`."""
        escaped = self._escaped
        reduced, (offered, key) = run_unsuspended(self._reduce(False, messages, tuple(tools or ())))
        root = key, self.renderer.arguments
        match = run_unsuspended(self._match(False, reduced, offered, root, self.renderer))
        self._escaped = escaped
        prefix_tokens = 0 if match.parent is None else sum(node.tokens for node in match.parent.path())
        return prefix_tokens + len(match.token_ids)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Message:
        """Sample the next assistant message and record what the model saw and sampled.

        Args:
            messages: The whole conversation so far.
            tools: Tools that the model may call.
            params: Sampling parameters instead of the session's.
            fork: Label of the fork that this request makes, if any (``compaction``).
            template_args: Chat template arguments (``enable_thinking``); part of the root key, like tools.

        Returns:
            The assistant message with ``turn_id`` and ``finish_reason``. Call ids are unique in the session; a call
            with an ``error`` must not be executed.

        Raises:
            SessionError: The request cannot be placed (prefill, an image that is not given as data, no messages), or
                the client broke its contract.
            RenderError: The template cannot render the messages, or the model does not take their images. Nothing was
                sent.
            BudgetExceeded: No tokens or turns are left. Nothing was sent.
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
        key: str = "",
        repeat: str | None = None,
    ) -> RecordedTurn:
        """Like :meth:`chat`, with placement and completion; ``repeat`` is a turn that answers the request again."""
        if repeat is not None:
            turn = next(node for node in self._tree.nodes if node.turn_id == repeat)
            return returned_turn(turn, self._returned.get(repeat), self.renderer, params or self.params)
        if (replayed := await self._replay_or_admit(messages, tools, template_args)) is not None:
            return replayed
        request = await self._prepare(True, messages, tools, params, fork, template_args)
        request.key = key
        try:
            completion = await self._client.generate(request.prompt, request.params, session_id=self.id)
            return RecordedTurn(request.placement(), completion, self._commit(request, completion))
        except (InferenceError, SessionError) as error:
            self.failure = error
            raise

    async def stream(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
        key: str = "",
    ) -> AsyncIterator[PromptPlacement | TokenDelta | Message]:
        """Like :meth:`chat`, but stream the completion.

        Yields:
            The placement, the deltas, then the message of :meth:`chat`. The turn is committed before the last delta;
            closing the stream earlier commits nothing.
        """
        if (replayed := await self._replay_or_admit(messages, tools, template_args)) is not None:
            for part in replayed.pieces():
                yield part
            return
        request = await self._prepare(True, messages, tools, params, fork, template_args)
        request.key = key
        yield request.placement()
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
            self.failure = error
            raise
        yield message

    def segments(self, *, messages: bool = True) -> list[Segment]:
        """Return the committed segments in commit order, with their messages if ``messages``."""
        return [segment_of(node, messages=messages) for node in self._tree.nodes]

    def restore(
        self, record: TurnRecord, prompt: TokenIds, completion: Completion, media: Sequence[MediaSpan] = ()
    ) -> None:
        """Commit a turn of an earlier process again; turns come in commit order, before any request.

        Args:
            record: The record that the earlier process gave its journal.
            prompt: Ids that the model saw, int32 of shape [tokens].
            completion: What it sampled.
            media: Positions of the images that the model saw.

        Raises:
            SessionError: The record, its ids, and the turns restored so far contradict each other.
        """
        nodes, new = self._tree.nodes, record.new
        parent, shared, prefix_tokens = find_context(record, self._tree, prompt, completion, self.id)
        token_ids = prompt[prefix_tokens:]
        key: RootKey = (canonical_tools(record.tools), record.arguments) if parent is None else parent.key
        tools = record.tools if parent is None else parent.tools
        placed = context_media(record, shared or parent, prefix_tokens, media, self.id)
        for image in (image for message in new or () for image in message.media):
            self._history.intern_bytes(image.digest, image.data)
        match = Match(parent, shared, new or (), token_ids, None, len(nodes), key, tools, placed)
        context = shared or self._add(parent, match, token_ids, match.new, record.forks[0])
        if shared is not None:
            match = replace(match, key=shared.key, tools=shared.tools)
        self._add(context, match, completion.token_ids, (record.message,), record.forks[1], completion, record.turn_id)
        self.issued.register(record.turn_id, record.message)
        self.issued.restore(record.rewritten, record.foreign)
        self.counters = record.counters
        self.turns_by_request[record.request].append(record.turn_id)
        if record.times is not None:
            self.turn_times[record.turn_id] = record.times

    @property
    def replaying(self) -> bool:
        """Whether turns before the fork remain to be replayed."""
        return self._prefix is not None and bool(self._prefix.remaining)

    def fork(self, turns: Sequence[str] | None = None, *, resample: str | None = None, seed: int | None = None) -> Self:
        """Return a session that continues apart in the same tree. Raises SessionError (unknown turn, no token ids).

        Args:
            turns: Turns before the fork in commit order, replayed before it samples; None: it continues from here.
            resample: The turn that the first request samples again: that request must be the same.
            seed: Its sampling seed; None: one that differs from this session's and from those of its other forks.
        """
        if self.recorded_as != "tokens" and (turns is None or turns):
            raise SessionError(f"session {self.id} is recorded as {self.recorded_as}: it cannot be forked")
        if seed is None and self._seed is not None:
            seed = stable_hash("fork", self._seed, len(self._forks))
        nodes = {node.turn_id: node for node in self._tree.nodes if node.sampled}
        if unknown := [turn for turn in (*(turns or ()), resample) if turn is not None and turn not in nodes]:
            raise SessionError(f"session {self.id}: cannot fork after {unknown[0]!r}: there is no such turn")
        forked = copy.copy(self)
        forked._prefix = Prefix(self.id, self._returned, [nodes[turn] for turn in turns or ()], nodes.get(resample))
        forked._history, forked._request_tools = History(self.issued.recognise), RequestTools()
        forked.turns_by_request = defaultdict(list)
        forked.sampled_turns, forked._forks, forked._seed, forked.failure, forked.gate = [], [], seed, None, None
        self._inherited_turns = self._inherited_turns or ()
        forked._inherited_turns = (*self._inherited_turns, *self.sampled_turns) if turns is None else tuple(turns)
        if turns is not None:
            path = {node for turn in turns for node in nodes[turn].path()}
            forked.last, forked._requests, forked._spent = None, len(turns), sum(node.tokens for node in path)
        forked._prompt_tokens = forked._encoded_tokens = forked._escaped = 0
        self._forks.append(forked)
        return forked

    async def _replay_or_admit(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, template_args: Mapping[str, Any] | None
    ) -> RecordedTurn | None:
        """Return the turn before the fork that answers a request; None for a request that samples, once it may."""
        if self._prefix is None or self._prefix.exhausted:
            if self.gate is not None:
                await self.gate.admit(first=False)
            return None
        renderer = self.renderer.under(template_arguments(template_args)) if template_args else self.renderer
        canonical, (_, tools_key) = await self._reduce(True, messages, tuple(tools or ()))
        asks = partial(answers_messages, messages=canonical, key=(tools_key, renderer.arguments))
        turn = await self._prefix.replay(asks, self.gate, f"the last message is {canonical[-1].text[:200]!r}")
        if turn is not None:
            self.last = snapshot(turn.message)
        return turn

    def close(self) -> None:
        """Release the recorded tree; further requests fail, returned segments stay valid."""
        self._tree.dissolve()

    def metrics(self) -> dict[str, float]:
        """Return counters: turns, branches, forks, tokens, rewritten echoes, escaped control tokens, budget overrun."""
        budget, sessions = self.limits.max_total_tokens, self._with_forks()
        return {
            **self._tree.counts(),
            "prompt_tokens": sum(session._prompt_tokens for session in sessions),
            "encoded_tokens": sum(session._encoded_tokens for session in sessions),
            "rewritten_echoes": len(self.issued.rewritten),
            "special_in_text": sum(session._escaped for session in sessions),
            "tokens_over_limit": 0 if budget is None else max(0, *(session._spent - budget for session in sessions)),
            **self._counts,
        }

    def _with_forks(self) -> list[Session]:
        """Return the session and all its forks."""
        return [self, *(session for fork in self._forks for session in fork._with_forks())]

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a metric of the trajectory."""
        self._counts[name] = self._counts.get(name, 0.0) + value

    # Match and extend

    def _place_request(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        params: SamplingParams | None,
        fork: str | None,
    ) -> PendingRequest:
        """Place a request in the tree without sending or recording it."""
        return run_unsuspended(self._prepare(False, messages, tools, params, fork))

    async def _prepare(
        self,
        threaded: bool,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None,
        params: SamplingParams | None,
        fork: str | None,
        template_args: Mapping[str, Any] | None = None,
    ) -> PendingRequest:
        renderer = self.renderer
        if template_args:
            renderer = renderer.under(template_arguments(template_args))
        canonical, (offered, key) = await self._reduce(threaded, messages, tuple(tools or ()))
        match = await self._match(threaded, canonical, offered, (key, renderer.arguments), renderer)
        prompt = TokenPrompt(path_ids(match.parent, match.token_ids), path_media(match.parent, match.media))
        self._prompt_tokens += len(prompt.token_ids)
        limited = self._limit_params(params or self.params, prompt)
        if limited.guide is not None:
            limited = replace(limited, guide=renderer.guides.tagged(limited.guide, match.token_ids, match.tools))
        self._requests += 1
        return PendingRequest(canonical, match, prompt, limited, fork, renderer)

    async def _reduce(
        self, threaded: bool, messages: Sequence[Message], tools: tuple[ToolSchema, ...]
    ) -> tuple[list[Canonical], tuple[tuple[ToolSchema, ...], ToolsKey]]:
        """Return a request's canonical messages, and copies of its tools with their key."""
        history, request_tools = self._history, self._request_tools
        closest = history.closest(messages)
        heavy = is_heavy(*messages[closest[1] :]) or (not request_tools.holds(tools) and is_heavy(*tools))
        if threaded and heavy:
            return await in_thread(lambda: (history.reduce(messages, closest), request_tools.update(tools)))
        return history.reduce(messages, closest), request_tools.update(tools)

    async def _match(
        self, threaded: bool, messages: list[Canonical], tools: tuple[ToolSchema, ...], key: RootKey, renderer: Renderer
    ) -> Match:
        commits = len(self._tree.nodes)
        candidates = self._tree.find_matches(messages, key)
        turns, context = exclude_other_forks(candidates, self._inherited_turns, self.sampled_turns)
        if context is not None:
            return Match(context.parent, context, (), context.token_ids, None, commits, key, tools, context.media)
        why = None
        for turn, used in turns:
            new = with_call_ids(turn, messages[used:])
            if self.reasoning == "template" and drops_reasoning(renderer, turn.path(), new, tools):
                why = why or "reasoning_dropped"
                break
            encoded = await self._extension(threaded, turn, new, tools, renderer)
            if encoded.token_ids is not None:
                token_ids = self._count_encoded(encoded.token_ids, encoded.escaped)
                return Match(turn, None, new, token_ids, None, commits, key, tools, encoded.media)
            # A branch that began where this one could not be extended may be continued instead.
            why = why or f"bridge_unproven: {encoded.why}"
        try:
            encoded = await render_prompt(renderer, messages, tools, self.limits.context_length, threaded=threaded)
        except PromptTooLong as error:
            raise context_overflow(self.limits, self.id, error.tokens) from None
        assert encoded.token_ids is not None
        token_ids = self._count_encoded(encoded.token_ids, encoded.escaped)
        return Match(None, None, tuple(messages), token_ids, why, commits, key, tools, encoded.media)

    async def _extension(
        self, threaded: bool, turn: Node, new: Sequence[Canonical], tools: Sequence[ToolSchema], renderer: Renderer
    ) -> Encoded:
        assert turn.parent is not None
        prefix_tokens = path_tokens(turn)
        room = self.limits.context_length - prefix_tokens
        extend = methodcaller("extend", turn.parent.token_ids, turn.token_ids, turn.messages[0], new, tools)
        try:
            return await encode(renderer, count_characters(new), room, extend, threaded=threaded)
        except PromptTooLong as error:
            raise context_overflow(self.limits, self.id, prefix_tokens + error.tokens) from None

    def _count_encoded(self, token_ids: TokenIds, escaped: int) -> TokenIds:
        """Count what was encoded; return the ids as they are kept."""
        self._encoded_tokens += len(token_ids)
        self._escaped += escaped
        token_ids = np.array(token_ids, np.int32)
        token_ids.flags.writeable = False
        return token_ids

    # Limits

    def _limit_params(self, params: SamplingParams, prompt: TokenPrompt) -> SamplingParams:
        if self._one_temperature and params.temperature != self.params.temperature:
            raise SessionError(
                f"session {self.id}: params.temperature is {params.temperature}, but this trajectory is trained at "
                f"{self.params.temperature} (rollout.temperature): give it that temperature, or none at all"
            )
        max_tokens = token_budget(
            self.limits,
            self.id,
            prompt=len(prompt.token_ids),
            images=[image.length for image in prompt.media],
            committed=self._spent,
            requests=self._requests,
            requested=params.max_tokens,
        )
        seed = params.seed
        if seed is None and self._seed is not None:
            seed = stable_hash("request", self._seed, self._requests)
        stop_ids = tuple(sorted(self.renderer.stop_ids.union(params.stop_token_ids)))
        masks = self.params.sampling_mask or params.sampling_mask
        return replace(params, max_tokens=max_tokens, stop_token_ids=stop_ids, seed=seed, sampling_mask=masks)

    # Commit: no await from here on

    def _commit(self, request: PendingRequest, completion: Completion) -> Message:
        match = request.match
        check_completion(completion, request.params, self.id)
        message, cut = read_completion(request.renderer, completion, match.token_ids, match.tools, request.params)
        returned = self._record(request, completion, message, cut=cut)
        if self.journal is not None:
            self.journal(self._turn_record(request.params.temperature, request.key, {}))
        return returned

    def _turn_record(self, temperature: float | None, key: str, extra: Mapping[str, Any]) -> TurnRecord:
        """Return the record of the turn committed last."""
        turn = self._tree.nodes[-1]
        context, completion = turn.parent, turn.completion
        assert context is not None
        assert completion is not None
        # A new context is committed right before its first turn.
        fresh, parent = context.index == turn.index - 1, context.parent
        root = fresh and parent is None
        rewritten, foreign = self.issued.take_changes()
        return TurnRecord(
            turn_id=turn.turn_id or "",
            parent=-1 if parent is None else parent.index,
            context=context.index,
            new=context.messages if fresh else None,
            message=turn.messages[0],
            forks=(context.fork if fresh else None, turn.fork),
            finish_reason=completion.finish_reason,
            temperature=temperature,
            counters=self.counters,
            tools=context.tools if root else (),
            arguments=context.key[1] if root else (),
            rewritten=rewritten,
            foreign=foreign,
            extra=extra,
            request=key,
            times=self.turn_times.get(turn.turn_id or ""),
        )

    def _record(self, request: PendingRequest, completion: Completion, message: Message, *, cut: bool) -> Message:
        match = request.routed_match(completion)
        reason = None
        if match.context is not None or self._tree.siblings(match.parent):
            branched = "branch" if self._prefix is not None and not self.sampled_turns else None
            reason = request.fork or branched or fork_reason(self._tree.roots, match, request.messages)
        returned, canonical = parse_completion(message, self._tree.turns, self.issued, cut=cut)
        context = self._tree.context_of(match) or self._add(match.parent, match, match.token_ids, match.new, reason)
        self._add(context, match, completion.token_ids, (canonical,), reason, completion, returned["turn_id"])
        self.issued.register(returned["turn_id"], canonical)
        # Scored is the message as it was returned: agents edit their messages in place.
        self.last = self._returned[returned["turn_id"]] = snapshot(returned)
        self.sampled_turns.append(returned["turn_id"])
        self.turns_by_request[request.key].append(returned["turn_id"])
        self.turn_times[returned["turn_id"]] = request.times()
        self._history.register_returned(snapshot(returned), canonical)
        self.failure = None
        return returned

    def _add(
        self,
        parent: Node | None,
        match: Match,
        token_ids: TokenIds,
        messages: tuple[Canonical, ...],
        reason: str | None,
        completion: Completion | None = None,
        turn_id: str | None = None,
    ) -> Node:
        sampled = completion is not None
        self._spent += len(token_ids)
        return self._tree.add(
            Node(
                index=len(self._tree.nodes),
                parent=parent,
                sampled=sampled,
                messages=messages,
                start=0 if parent is None else parent.end,
                key=match.key,
                tools=tuple(tool for tool in match.tools if not tool.deferred),
                turns=(0 if parent is None else parent.turns) + sampled,
                completion=None if completion is None else Sampled.of(completion),
                turn_id=turn_id,
                fork=reason if self._tree.siblings(parent) else None,
                media=() if sampled else match.media,
                routes=None if sampled else match.routes,
            ),
            token_ids,
        )
