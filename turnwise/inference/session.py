"""THE recorder: the one place where messages become tokens and tokens become messages.

Owns: :class:`Session`, a tree of segments that alternate between context (what a request added) and sampled
(what the model answered). Only this file makes segments. Refuses: sampling, tools, rewards, HTTP.

The golden rule: a sampled id is never decoded and re-encoded. The ids of the next request are the ids of a
known path plus the encoding of what is new; where that cannot be proven, the request forks at the root, with a
reason that is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from turnwise.errors import BudgetSpent, InferenceError, SessionError
from turnwise.inference.canonical import (
    Canonical,
    Canonicalizer,
    canonical_messages,
    canonical_tools,
    same_arguments,
)
from turnwise.inference.core import LLMClient, Renderer
from turnwise.inference.forks import fork_reason
from turnwise.tasks import stable_hash
from turnwise.trajectory import Segment
from turnwise.types import (
    Completion,
    Message,
    SamplingParams,
    StopReason,
    TokenIds,
    TokenPrompt,
    ToolCall,
    ToolSchema,
    text_of,
)

ToolsKey = tuple[tuple[str, str, str], ...]


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


@dataclass(slots=True, eq=False)
class Node:
    """A node of the tree. Its ids never change; only ``children`` grows.

    Attributes:
        index: Place in commit order.
        parent: The node before it.
        sampled: Whether the model sampled its ids.
        ids: int32 of shape [tokens], not writeable.
        messages: The canonical messages that it means: those one request added, or the one assistant message.
        start: How many messages stand before it on its path.
        key: The tools of its root.
        tools: The same, as schemas.
        turns: How many sampled nodes the path up to and including it holds.
        children: Nodes after it, in commit order.
        completion: Sampled nodes only.
        turn_id: Sampled nodes only.
        fork: Why it is not the only child of its parent.
    """

    index: int
    parent: Node | None
    sampled: bool
    ids: TokenIds
    messages: tuple[Canonical, ...]
    start: int
    key: ToolsKey
    tools: tuple[ToolSchema, ...]
    turns: int
    children: list[Node] = field(default_factory=list)
    completion: Completion | None = None
    turn_id: str | None = None
    fork: str | None = None

    @property
    def end(self) -> int:
        """How many messages the path up to and including this node means."""
        return self.start + len(self.messages)

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


@dataclass(frozen=True, slots=True)
class Match:
    """How a request continues the tree.

    Attributes:
        parent: The sampled node that the new context follows, or None at a root.
        context: A known context that means all the messages, or None.
        new: The messages of the new context.
        ids: The ids of the (new or known) context.
        why: Why the deepest matching turn could not be extended, where that is why this is a root.
        commits: How many nodes the tree had.
    """

    parent: Node | None
    context: Node | None
    new: tuple[Canonical, ...]
    ids: TokenIds
    why: str | None
    commits: int


class Session:
    """Records one conversation, or several branches of one, with a model.

    Args:
        client: Who samples.
        renderer: Messages to ids and back.
        id: Unique in the run; names the trajectory and keeps requests on the replica that knows the prefix.
        limits: What may be used.
        params: Sampling parameters that a request's own override as a whole.
        seed: Sampling seed: each request draws from a stream of its own that depends only on this and on how
            many turns were committed before.
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
    ) -> None:
        self.id = id
        self.limits = limits
        self.params = params or SamplingParams()
        self._client = client
        self._renderer = renderer
        self._seed = seed
        self._nodes: list[Node] = []
        self._roots: list[Node] = []
        self._issued: dict[str, str] = {}
        self._last: Message | None = None
        self._turns = 0
        self._committed_tokens = 0
        self._requests = 0
        self._seen: list[tuple[Mapping[str, Any], Canonical]] = []
        self._tools: tuple[list[ToolSchema], ToolsKey] = ([], ())
        self._prompt_tokens = 0
        self._encoded_tokens = 0

    @property
    def turns(self) -> int:
        """How many completions were committed."""
        return self._turns

    @property
    def last(self) -> Message | None:
        """The assistant message that was committed last."""
        return self._last

    def turn_of_call(self, call_id: str) -> str | None:
        """Return the id of the turn that made a call, or None where this session issued no such id."""
        return self._issued.get(call_id)

    @property
    def committed_tokens(self) -> int:
        """Tokens of all segments, each counted once."""
        return self._committed_tokens

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
        offered = tuple(tools or ())
        canonical = self._canonical(messages)
        match = self._match(canonical, offered)
        prompt = self._prompt(match)
        params = self._limited(params or self.params, len(prompt))
        self._requests += 1
        completion = await self._client.generate(TokenPrompt(prompt), params, session_id=self.id)
        return self._commit(match, canonical, offered, params, completion, fork)

    def segments(self, *, messages: bool = True) -> list[Segment]:
        """Return the committed segments, in commit order.

        Args:
            messages: Whether segments carry what they mean, besides their ids.
        """
        return [_segment(node, messages) for node in self._nodes]

    def metrics(self) -> dict[str, float]:
        """Return counts of this session: turns, forks, tokens sampled, seen and encoded."""
        sampled = sum(len(node.ids) for node in self._nodes if node.sampled)
        return {
            "turns": self.turns,
            "forks": sum(node.fork is not None for node in self._nodes),
            "sampled_tokens": sampled,
            "context_tokens": self._committed_tokens - sampled,
            "prompt_tokens": self._prompt_tokens,
            "encoded_tokens": self._encoded_tokens,
        }

    # Canonical form

    def _canonical(self, messages: Sequence[Message]) -> list[Canonical]:
        """Reduce the messages, reusing the form of those that are equal to the last request's."""
        if not messages:
            raise SessionError("messages is empty: a request needs at least one message")
        reducer = Canonicalizer()
        result: list[Canonical] = []
        seen = self._seen
        for index, message in enumerate(messages):
            if index < len(seen) and _same(seen[index][0], message):
                canonical = seen[index][1]
                reducer.skip(index, canonical)
            else:
                # A tool message's form depends on the assistant message before it: from here on all is new.
                seen = []
                canonical = reducer.reduce(index, message)
            result.append(canonical)
        if result[-1].role == "assistant":
            raise SessionError(
                f"messages[{len(result) - 1}] is an assistant message: continuing one (prefill) is not supported; "
                "end the request with a user or tool message"
            )
        known = len(seen)
        # Agents edit lists and messages in place: what is remembered is a copy.
        self._seen = self._seen[:known] + [
            (copy.deepcopy(dict(message)), form) for message, form in zip(messages[known:], result[known:], strict=True)
        ]
        return result

    def _tools_key(self, tools: tuple[ToolSchema, ...]) -> ToolsKey:
        known, key = self._tools
        if list(tools) != known:
            key = canonical_tools(tools)
            self._tools = (copy.deepcopy(list(tools)), key)
        return key

    # Match and extend

    def _match(self, messages: list[Canonical], tools: tuple[ToolSchema, ...]) -> Match:
        commits = len(self._nodes)
        key = self._tools_key(tools)
        turn, context = self._deepest(messages, key)
        if context is not None:
            return Match(context.parent, context, (), context.ids, None, commits)
        why = None
        if turn is not None and turn.parent is not None:
            new = self._answers_issued(turn, messages[turn.end :])
            ids = self._renderer.extend(turn.parent.ids, turn.ids, turn.messages[0], new, tools)
            if ids is not None:
                return Match(turn, None, new, self._frozen(ids), None, commits)
            why = self._renderer.why
        ids = self._renderer.render(messages, tools)
        return Match(None, None, tuple(messages), self._frozen(ids), why, commits)

    def _deepest(self, messages: list[Canonical], key: ToolsKey) -> tuple[Node | None, Node | None]:
        """Find the deepest turn whose path means a prefix, or a context that means all the messages.

        Most turns first, then most messages; among equals a turn that has not been extended, then the one
        committed last.
        """
        best: Node | None = None
        whole: Node | None = None
        pending = [node for node in self._roots if node.key == key]
        while pending:
            node = pending.pop()
            if node.end > len(messages) or tuple(messages[node.start : node.end]) != node.messages:
                continue
            if not node.sampled and node.end == len(messages):
                if whole is None or (node.turns, node.index) > (whole.turns, whole.index):
                    whole = node
            elif node.sampled and node.end < len(messages) and (best is None or _rank(node) > _rank(best)):
                best = node
            pending.extend(node.children)
        return best, whole

    def _answers_issued(self, turn: Node, new: list[Canonical]) -> tuple[Canonical, ...]:
        """Give answers to calls of the path the ids and names that this session issued for those calls."""
        issued = {node.start: node.messages[0].calls for node in turn.path() if node.sampled}
        result = []
        for message in new:
            if message.answers is not None and message.answers[0] in issued:
                call = issued[message.answers[0]][message.answers[1]]
                message = replace(message, call_id=call.id, call_name=call.name)
            result.append(message)
        return tuple(result)

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
            left = limits.max_total_tokens - self._committed_tokens
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
        tools: tuple[ToolSchema, ...],
        params: SamplingParams,
        completion: Completion,
        fork: str | None,
    ) -> Message:
        self._check(completion, params)
        message, cut = self._parse(match, tools, params, completion)
        reason = None
        if match.context is not None or self._siblings(match.parent):
            reason = fork or fork_reason(self._nodes, match, messages, self._tools_key(tools))
        context = self._context(match, tools, reason)
        given = self._given(message, cut)
        self._turns += 1
        self._last = given
        self._add(
            parent=context,
            sampled=True,
            ids=completion.token_ids,
            messages=(canonical_messages([given])[0],),
            tools=tools,
            reason=reason,
            completion=completion,
            turn_id=given["turn_id"],
        )
        return given

    def _check(self, completion: Completion, params: SamplingParams) -> None:
        ids, finish = completion.token_ids, completion.finish_reason
        if finish not in ("stop", "length"):
            raise InferenceError(f"session {self.id}: a completion ended with {finish!r}; nothing was recorded")
        if len(ids) == 0 or len(completion.logprobs) != len(ids):
            raise SessionError(
                f"session {self.id}: a completion of {len(ids)} ids came with {len(completion.logprobs)} logprobs"
            )
        if finish == "stop" and not params.stop and int(ids[-1]) not in params.stop_token_ids:
            raise SessionError(
                f"session {self.id}: the client says 'stop', but the last id {int(ids[-1])} is no stop id "
                f"{params.stop_token_ids} and no stop string was given: it broke its contract"
            )
        covered = 0
        for _, start, end in completion.weight_versions:
            if start != covered or end <= start:
                covered = -1
                break
            covered = end
        if covered != len(ids):
            raise SessionError(
                f"session {self.id}: weight version spans {completion.weight_versions} do not cover {len(ids)} ids"
            )

    def _parse(
        self, match: Match, tools: tuple[ToolSchema, ...], params: SamplingParams, completion: Completion
    ) -> tuple[Message, bool]:
        """Return what the ids mean and whether the turn was cut (no stop id at its end)."""
        message = self._renderer.parse(completion.token_ids, match.ids, tools)
        cut = int(completion.token_ids[-1]) not in self._renderer.stop_ids
        if cut and params.stop:
            # The agent is given the text before the stop string; the ids up to it stay recorded.
            text = text_of(message)
            ends = [position for position in (text.find(stop) for stop in params.stop) if position >= 0]
            if ends:
                message["content"] = text[: min(ends)]
        return message, cut and completion.finish_reason == "length"

    def _given(self, message: Message, cut: bool) -> Message:
        """Return the message that the agent is given: ids issued, turn named."""
        number = self._turns
        calls: list[ToolCall] = []
        for position, call in enumerate(message.get("tool_calls") or ()):
            # Nine letters and digits: what the strictest chat template (Mistral's) accepts.
            own = call.id if call.id and call.id not in self._issued else f"c{number:05d}{position:03d}"
            self._issued[own] = f"t{number}"
            calls.append(replace(call, id=own))
        given: Message = {
            "role": "assistant",
            "content": text_of(message),
            "turn_id": f"t{number}",
            "finish_reason": "length" if cut else "stop",
        }
        if calls:
            given["tool_calls"] = calls
        reasoning = message.get("reasoning_content")
        if reasoning:
            given["reasoning_content"] = reasoning
        return given

    def _context(self, match: Match, tools: tuple[ToolSchema, ...], reason: str | None) -> Node:
        """Return the known context with equal messages and equal ids, else add one."""
        if match.context is not None:
            return match.context
        key = self._tools_key(tools)
        siblings = self._siblings(match.parent)
        for node in siblings:
            if node.key == key and node.messages == match.new and np.array_equal(node.ids, match.ids):
                return node
        return self._add(
            parent=match.parent, sampled=False, ids=match.ids, messages=match.new, tools=tools, reason=reason
        )

    def _siblings(self, parent: Node | None) -> list[Node]:
        return self._roots if parent is None else parent.children

    def _add(
        self,
        *,
        parent: Node | None,
        sampled: bool,
        ids: TokenIds,
        messages: tuple[Canonical, ...],
        tools: tuple[ToolSchema, ...],
        reason: str | None,
        completion: Completion | None = None,
        turn_id: str | None = None,
    ) -> Node:
        ids.flags.writeable = False
        siblings = self._siblings(parent)
        node = Node(
            index=len(self._nodes),
            parent=parent,
            sampled=sampled,
            ids=ids,
            messages=messages,
            start=0 if parent is None else parent.end,
            key=self._tools_key(tools),
            tools=tools,
            turns=(0 if parent is None else parent.turns) + sampled,
            completion=completion,
            turn_id=turn_id,
            fork=reason if siblings else None,
        )
        siblings.append(node)
        self._nodes.append(node)
        self._committed_tokens += len(ids)
        return node


def _same(seen: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether a message is the remembered one. ``==`` alone takes True and 1 for the same argument."""
    return seen == message and (
        not message.get("tool_calls") or same_arguments(seen["tool_calls"], message["tool_calls"])
    )


def _rank(node: Node) -> tuple[int, int, bool, int]:
    return (node.turns, node.end, not node.children, node.index)


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
