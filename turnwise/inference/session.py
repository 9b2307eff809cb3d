"""THE recorder: the one place where messages become tokens and tokens become messages.

Owns: :class:`Session`, a tree of segments that alternate between context (what a request added) and sampled
(what the model answered). Only this file makes segments. Refuses: sampling, tools, rewards, HTTP.

The golden rule: a sampled id is never decoded and re-encoded. The ids of the next request are the ids of a
known path plus the encoding of what is new; where that cannot be proven, the request forks at the root, with a
reason that is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from turnwise.errors import BudgetSpent, InferenceError, SessionError, TurnwiseError
from turnwise.inference.answer import answer, check_completion, read_completion
from turnwise.inference.canonical import Canonical, History, canonical_tools, snapshot
from turnwise.inference.core import LLMClient, Renderer
from turnwise.inference.forks import fork_reason
from turnwise.inference.tree import Match, Node, ToolsKey, Tree
from turnwise.seeding import stable_hash
from turnwise.trajectory import Segment
from turnwise.types import (
    Completion,
    Message,
    SamplingParams,
    StopReason,
    TokenIds,
    TokenPrompt,
    ToolSchema,
)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may use.

    Attributes:
        context_length: Most tokens that prompt and completion may have together.
        max_tokens_per_turn: Most tokens of one completion.
        max_total_tokens: Most committed tokens over all branches, prompts included.
        max_turns: Most model calls.
    """

    context_length: int
    max_tokens_per_turn: int | None = None
    max_total_tokens: int | None = None
    max_turns: int | None = None


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
    """

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
    ) -> None:
        self.id = id
        self.limits = limits
        self.params = params or SamplingParams()
        self._client = client
        self._renderer = renderer
        self._seed = seed
        self._one_temperature = one_temperature
        self._tree = Tree()
        self._issued: dict[str, str] = {}
        self._last: Message | None = None
        self._failure: TurnwiseError | None = None
        self._requests = 0
        self._history = History()
        self._tools: tuple[tuple[ToolSchema, ...], ToolsKey] = ((), ())
        self._prompt_tokens = 0
        self._encoded_tokens = 0

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
        return self._issued.get(call_id)

    def room_behind(self, turn_id: str) -> int | None:
        """Return how many tokens of the context are left behind a turn, or None where this session has no such turn."""
        for node in reversed(self._tree.nodes):
            if node.turn_id == turn_id:
                return self.limits.context_length - sum(len(each.ids) for each in node.path())
        return None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
    ) -> Message:
        """Ask the model for the next assistant message and record what it saw and sampled.

        Args:
            messages: The whole conversation so far, in any form that means the same as before.
            tools: What the model may call.
            params: Sampling parameters instead of the session's.
            fork: Names the fork that this request makes, if it makes one (``compaction``).

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
        canonical = self._history.reduce(messages)
        match = self._match(canonical, *self._offered(tuple(tools or ())))
        prompt = self._prompt(match)
        params = self._limited(params or self.params, len(prompt))
        self._requests += 1
        try:
            completion = await self._client.generate(TokenPrompt(prompt), params, session_id=self.id)
            message = self._commit(match, canonical, params, completion, fork)
        except (InferenceError, SessionError) as error:
            self._failure = error
            raise
        self._failure = None
        return message

    def segments(self, *, messages: bool = True) -> list[Segment]:
        """Return the committed segments, in commit order.

        Args:
            messages: Whether segments carry what they mean, besides their ids.
        """
        return [_segment(node, messages) for node in self._tree.nodes]

    def metrics(self) -> dict[str, float]:
        """Return counts of this session: turns, forks, tokens sampled, seen and encoded."""
        nodes = self._tree.nodes
        sampled = sum(len(node.ids) for node in nodes if node.sampled)
        return {
            "turns": self.turns,
            "forks": sum(node.fork is not None for node in nodes),
            "sampled_tokens": sampled,
            "context_tokens": self._tree.tokens - sampled,
            "prompt_tokens": self._prompt_tokens,
            "encoded_tokens": self._encoded_tokens,
        }

    def _offered(self, tools: tuple[ToolSchema, ...]) -> tuple[tuple[ToolSchema, ...], ToolsKey]:
        """Return a request's tools and their key. They are copies: what was offered stays, whoever edits its schema."""
        if tools != self._tools[0]:
            own = copy.deepcopy(tools)
            self._tools = (own, canonical_tools(own))
        return self._tools

    # Match and extend

    def _match(self, messages: list[Canonical], tools: tuple[ToolSchema, ...], key: ToolsKey) -> Match:
        commits = len(self._tree.nodes)
        turns, context = self._tree.deepest(messages, key)
        if context is not None:
            return Match(context.parent, context, (), context.ids, None, commits, key, tools)
        why = None
        for turn in turns:
            assert turn.parent is not None
            new = _answers_issued(turn, messages[turn.end :])
            ids = self._renderer.extend(turn.parent.ids, turn.ids, turn.messages[0], new, tools)
            if ids is not None:
                return Match(turn, None, new, self._frozen(ids), None, commits, key, tools)
            # A branch that began where this one could not be extended may go on from there.
            why = why or self._renderer.why
        ids = self._renderer.render(messages, tools)
        return Match(None, None, tuple(messages), self._frozen(ids), why, commits, key, tools)

    def _frozen(self, ids: TokenIds) -> TokenIds:
        self._encoded_tokens += len(ids)
        ids = np.array(ids, np.int32)
        ids.flags.writeable = False
        return ids

    def _prompt(self, match: Match) -> TokenIds:
        before = [] if match.parent is None else [node.ids for node in match.parent.path()]
        prompt = np.concatenate([*before, match.ids]) if before else match.ids
        self._prompt_tokens += len(prompt)
        return prompt

    # Limits

    def _limited(self, params: SamplingParams, prompt_tokens: int) -> SamplingParams:
        limits = self.limits
        if self._one_temperature and params.temperature != self.params.temperature:
            raise SessionError(
                f"session {self.id}: params.temperature is {params.temperature}, but this trajectory is trained at "
                f"{self.params.temperature} (rollout.temperature): give it that temperature, or none at all"
            )
        if limits.max_turns is not None and self._requests >= limits.max_turns:
            raise BudgetSpent(StopReason.MAX_TURNS, f"session {self.id}: all {limits.max_turns} turns are used")
        room = limits.context_length - prompt_tokens
        if room <= 0:
            raise BudgetSpent(
                StopReason.CONTEXT_OVERFLOW,
                f"session {self.id}: the prompt has {prompt_tokens} tokens, the context {limits.context_length}",
            )
        allowed = [room]
        if limits.max_total_tokens is not None:
            left = limits.max_total_tokens - self._tree.tokens
            if left <= 0:
                raise BudgetSpent(
                    StopReason.MAX_TOKENS, f"session {self.id}: all {limits.max_total_tokens} tokens are used"
                )
            allowed.append(left)
        allowed += [n for n in (limits.max_tokens_per_turn, params.max_tokens) if n is not None]
        seed = params.seed
        if seed is None and self._seed is not None:
            seed = stable_hash("request", self._seed, self._requests)
        stop_ids = tuple(sorted(self._renderer.stop_ids.union(params.stop_token_ids)))
        return replace(params, max_tokens=min(allowed), stop_token_ids=stop_ids, seed=seed)

    # Commit: no await from here on

    def _commit(
        self,
        match: Match,
        messages: list[Canonical],
        params: SamplingParams,
        completion: Completion,
        fork: str | None,
    ) -> Message:
        check_completion(completion, params, self.id)
        message, cut = read_completion(self._renderer, completion, match, params)
        reason = None
        if match.context is not None or self._tree.siblings(match.parent):
            reason = fork or fork_reason(self._tree.nodes, match, messages)
        given, meant = answer(message, self._tree.turns, self._issued, cut=cut)
        context = self._context(match, reason)
        self._add(context, match, completion.token_ids, (meant,), reason, completion, given["turn_id"])
        self._issued.update((call.id, given["turn_id"]) for call in given.get("tool_calls", ()))
        # What is scored is what was said: agents edit their messages in place.
        self._last = snapshot(given)
        self._history.said(snapshot(given), meant)
        return given

    def _context(self, match: Match, reason: str | None) -> Node:
        """Return the known context with equal messages and equal ids, else add one."""
        if match.context is not None:
            return match.context
        for node in self._tree.siblings(match.parent):
            if node.key == match.key and node.messages == match.new and np.array_equal(node.ids, match.ids):
                return node
        return self._add(match.parent, match, match.ids, match.new, reason)

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
                ids=ids,
                messages=messages,
                start=0 if parent is None else parent.end,
                key=match.key,
                tools=match.tools,
                turns=(0 if parent is None else parent.turns) + sampled,
                completion=completion,
                turn_id=turn_id,
                fork=reason if self._tree.siblings(parent) else None,
            )
        )


def _answers_issued(turn: Node, new: list[Canonical]) -> tuple[Canonical, ...]:
    """Give answers to calls of the path the ids and names that were issued for those calls."""
    result = []
    for message in new:
        asked: Node | None = turn
        # Nearly always the turn itself: answers follow the calls.
        while asked is not None and message.answers is not None and asked.start > message.answers[0]:
            asked = asked.parent
        if asked is not None and message.answers is not None and asked.sampled and asked.start == message.answers[0]:
            call = asked.messages[0].calls[message.answers[1]]
            message = replace(message, call_id=call.id, call_name=call.name)
        result.append(message)
    return tuple(result)


def _segment(node: Node, messages: bool) -> Segment:
    completion = node.completion
    parent = -1 if node.parent is None else node.parent.index
    meant = tuple(message.to_template() for message in node.messages) if messages else ()
    if completion is None:
        tools = tuple(tool.to_json() for tool in node.tools) if parent < 0 else None
        return Segment(node.index, parent, "context", node.ids, meant, fork=node.fork, tools=tools)
    return Segment(
        index=node.index,
        parent=parent,
        kind="sampled",
        ids=node.ids,
        messages=meant,
        turn_id=node.turn_id,
        logprobs=completion.logprobs,
        weight_versions=completion.weight_versions,
        finish_reason=completion.finish_reason,
        fork=node.fork,
    )
