"""The session for agents that handle token ids themselves: prompt ids in, sampled ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from turnwise.errors import InferenceError, SessionError
from turnwise.model.canonical import Canonical
from turnwise.recorder.completion import check_completion, read_completion
from turnwise.recorder.fork import answers_ids
from turnwise.recorder.matching import RootKey
from turnwise.recorder.requests import PendingRequest, RecordedTurn
from turnwise.recorder.session import Session
from turnwise.recorder.tree import Match, Node, common_length
from turnwise.trajectory import Segment
from turnwise.types import Completion, Message, SamplingParams, TokenIds, TokenPrompt, ToolSchema, as_ids

# No conversation has such a root: no tool is called so.
_KEY: RootKey = ((("<ids>", "", ""),), ())


@dataclass(frozen=True, slots=True)
class TrainedBranch:
    """One branch of the episode as the agent itself reports it.

    Attributes:
        prompt_ids: The initial prompt; not trained.
        response_ids: All that followed: sampled ids and those that the agent inserted.
        mask: 1 for sampled ids to train, else 0.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    mask: Sequence[int]


@dataclass(frozen=True, slots=True)
class _ParsedBranch:
    """A parsed branch: its label in errors, all ids, prompt length, mask of the ids to train."""

    label: str
    token_ids: TokenIds
    prompt_tokens: int
    trained: npt.NDArray[np.bool_]

    @property
    def last_trained(self) -> int:
        return int(np.flatnonzero(self.trained)[-1]) if self.trained.any() else -1


class _TreePath(NamedTuple):
    """A path that matches a prefix of a branch: last node, ids matched, and sampled nodes with their ranges."""

    tail: int
    reach: int
    turns: list[tuple[Node, int, int]]


class TokenSession(Session):
    """A :class:`Session` that accepts messages, token ids, or both."""

    _left_out: dict[int, npt.NDArray[np.bool_]] | None = None

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolSchema] = (),
        key: str = "",
    ) -> RecordedTurn:
        """Sample a completion of exactly these ids and record both.

        Args:
            prompt_ids: The whole prompt.
            params: Sampling parameters instead of the session's.
            tools: Used to parse calls of the completion; not part of the prompt.
            key: What its repetitions have in common.

        Raises:
            SessionError: No ids, or the client broke its contract.
            BudgetExceeded: No tokens or turns are left. Nothing was sent.
            InferenceError: The server failed. Nothing was committed.
        """
        prompt = _check_ids("prompt_ids", prompt_ids)
        if self._prefix is not None and not self._prefix.exhausted:
            asks = partial(answers_ids, prompt=prompt)
            if (replayed := await self._prefix.replay(asks, self.gate, f"a prompt of {len(prompt)} ids")) is not None:
                return replayed
        elif self.gate is not None:
            await self.gate.admit(first=False)
        request = self._place_ids(prompt, params)
        request.key = key
        try:
            completion = await self._client.generate(request.prompt, request.params, session_id=self.id)
            return RecordedTurn(request.placement(), completion, self._commit_ids(request, completion, tools))
        except (InferenceError, SessionError) as error:
            self.failure = error
            raise

    def train_only(self, branches: Sequence[TrainedBranch]) -> None:
        """Train only the branches that an agent reports; sampled ids that are missing or masked there are excluded.

        Raises SessionError, and excludes nothing, if the report contradicts what was sampled.
        """
        claims = [
            _parse_branch(branch, f"output {number}" if len(branches) > 1 else "the output")
            for number, branch in enumerate(branches)
        ]
        trained = {node.index: np.zeros(node.tokens, np.bool_) for node in self._tree.nodes if node.sampled}
        # A path that holds a whole branch also holds each of its prefixes: the longer branch has fewer paths to match.
        for claim in sorted(claims, key=lambda branch: branch.last_trained, reverse=True):
            self._match_branch(claim, trained)
        spoken = {node.index for node in self._tree.nodes if node.sampled and node.key != _KEY}
        self._left_out = {index: ~mask for index, mask in trained.items() if index not in spoken and not mask.all()}

    def segments(self, *, messages: bool = True) -> list[Segment]:
        """Return the committed segments, in commit order; see :meth:`Session.segments`."""
        segments = super().segments(messages=messages)
        for index, mask in (self._left_out or {}).items():
            segments[index] = replace(segments[index], left_out=_spans(mask))
        return segments

    # Requests of ids

    def _place_ids(self, prompt: TokenIds, params: SamplingParams | None) -> PendingRequest:
        parent, used = self._deepest_prefix(prompt)
        new = prompt[used:].copy()
        context = next((node for node in self._id_children(parent) if np.array_equal(node.token_ids, new)), None)
        if context is None:
            self._encoded_tokens += len(new)
        self._prompt_tokens += len(prompt)
        meaning = (Canonical("prompt", self.renderer.decode(new)),) if context is None else context.messages
        match = Match(parent, context, meaning, new, None, len(self._tree.nodes), _KEY, ())
        request_prompt = TokenPrompt(prompt)
        limited = self._limit_params(params or self.params, request_prompt)
        self._requests += 1
        return PendingRequest([], match, request_prompt, limited, self._reason(match, prompt), self.renderer)

    def _id_children(self, parent: Node | None) -> list[Node]:
        return [node for node in self._tree.siblings(parent) if node.key == _KEY]

    def _deepest_prefix(self, prompt: TokenIds) -> tuple[Node | None, int]:
        """Return the latest turn with the longest path that is a proper prefix of ``prompt``, and its length."""
        best: tuple[Node | None, int] = (None, 0)
        pending: list[tuple[Node, int]] = [(node, 0) for node in self._id_children(None)]
        while pending:
            node, start = pending.pop()
            end = start + len(node.token_ids)
            if end >= len(prompt) or not np.array_equal(node.token_ids, prompt[start:end]):
                continue
            if node.sampled and (best[0] is None or (end, node.index) > (best[1], best[0].index)):
                best = (node, end)
            pending.extend((child, end) for child in node.children)
        return best

    def _reason(self, match: Match, prompt: TokenIds) -> str:
        """Return the fork reason of committing this request, if it forks."""
        if match.context is not None:
            return "resample"
        if match.parent is not None and not match.parent.children:
            # It does not fork: the search through all turns is not needed.
            return "history_edited"
        shared = max(
            (_shared_length(node, prompt) for node in self._tree.nodes if node.key == _KEY and node.sampled), default=0
        )
        return "continuation" if shared == len(prompt) else "history_edited" if shared else "restart"

    def _commit_ids(self, request: PendingRequest, completion: Completion, tools: Sequence[ToolSchema]) -> Message:
        match = request.match
        check_completion(completion, request.params, self.id)
        message, cut = read_completion(request.renderer, completion, match.token_ids, tools, request.params)
        siblings = self._tree.siblings(match.context or match.parent)
        late = any(node.index >= match.commits for node in siblings)
        return self._record(replace(request, fork="concurrent" if late else request.fork), completion, message, cut=cut)

    # Branches reported by the agent

    def _match_branch(self, claim: _ParsedBranch, trained: dict[int, npt.NDArray[np.bool_]]) -> None:
        """Find a branch in the tree and mark its trained ids; a resumed completion may need several paths."""
        missing = claim.trained.copy()
        paths = self._matching_paths(claim.token_ids)
        while missing.any():
            path = max(paths, key=lambda candidate: _path_rank(candidate, missing, trained), default=None)
            if path is None or not any(missing[start:end].any() for _, start, end in path.turns):
                break
            for node, start, end in path.turns:
                trained[node.index][: end - start] |= missing[start:end]
                missing[start:end] = False
        wrong = np.flatnonzero(missing)
        if len(wrong):
            at = int(wrong[0])
            raise SessionError(
                f"{claim.label}: response_mask is 1 at {at - claim.prompt_tokens} (id {int(claim.token_ids[at])}, "
                f"{len(wrong)} such ids), but the model did not sample it: "
                f"{self._sampled_instead(claim.token_ids, at)}. "
                "Append the ids of generate() unchanged, and mark everything else with 0"
            )

    def _matching_paths(self, token_ids: TokenIds) -> list[_TreePath]:
        """Return the paths that match a prefix of ``ids`` and hold sampled ids."""
        paths: list[_TreePath] = []
        pending: list[tuple[Node, _TreePath]] = [(node, _TreePath(-1, 0, [])) for node in self._id_children(None)]
        while pending:
            node, prefix = pending.pop()
            start = prefix.reach
            end = start + common_length(node.token_ids, token_ids[start:])
            if end == start and node.tokens:
                continue
            turns = [*prefix.turns, (node, start, end)] if node.sampled else prefix.turns
            path = _TreePath(node.index, end, turns)
            complete = end == start + node.tokens
            on = [
                child
                for child in node.children
                if complete and end < len(token_ids) and (not child.tokens or child.token_ids[0] == token_ids[end])
            ]
            pending.extend((child, path) for child in on)
            if turns and not on:
                paths.append(path)
        return paths

    def _sampled_instead(self, token_ids: TokenIds, at: int) -> str:
        """Describe for an error what the model sampled at ``at``."""
        turns = [node for node in self._tree.nodes if node.sampled and node.key == _KEY]
        if not turns:
            return "no ids were sampled in this session"
        closest = max(turns, key=lambda node: _shared_length(node, token_ids))
        shared = _shared_length(closest, token_ids)
        closest_ids = np.concatenate([node.token_ids for node in closest.path()])
        if shared < at:
            return f"the ids differ from what it saw from {shared} on"
        if at < len(closest_ids):
            return (
                f"it sampled {int(closest_ids[at])}"
                if at >= len(closest_ids) - len(closest.token_ids)
                else "that id was in its prompt"
            )
        return f"turn {closest.turn_id} ended before it"


def _parse_branch(branch: TrainedBranch, where: str) -> _ParsedBranch:
    prompt, response = _check_ids(f"{where}: prompt_ids", branch.prompt_ids), as_ids(branch.response_ids)
    mask = np.asarray(branch.mask)
    if mask.shape != response.shape or not np.isin(mask, (0, 1)).all():
        raise SessionError(
            f"{where}: response_mask has {mask.size} entries and response_ids {response.size}: give one for each "
            "id, 1 where the model sampled it and 0 where it did not"
        )
    trained = np.concatenate([np.zeros(len(prompt), np.bool_), mask.astype(np.bool_)])
    return _ParsedBranch(where, np.concatenate([prompt, response]), len(prompt), trained)


def _path_rank(
    path: _TreePath, missing: npt.NDArray[np.bool_], trained: dict[int, npt.NDArray[np.bool_]]
) -> tuple[int, bool, int, int, int, int]:
    """Return the sort key of a path for the unmatched ids of a branch; the largest wins.

    In order: holds the last of them, unclaimed; its turns are unmatched as a whole; number of unclaimed ids; length;
    commit order.
    """
    last_missing, fresh, torn, unclaimed_ids = -1, False, 0, 0
    for node, start, end in path.turns:
        here = np.flatnonzero(missing[start:end])
        if len(here):
            free = ~trained[node.index][here]
            last_missing, fresh = start + int(here[-1]), bool(free[-1])
            torn += len(here) < node.tokens
            unclaimed_ids += int(free.sum())
    return last_missing, fresh, -torn, unclaimed_ids, path.reach, path.tail


def _check_ids(what: str, values: Sequence[int]) -> TokenIds:
    try:
        token_ids = as_ids(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise SessionError(f"{what} must be a list of token ids: {error}") from error
    if token_ids.ndim != 1 or len(token_ids) == 0 or int(token_ids.min()) < 0:
        raise SessionError(
            f"{what} must be a list of at least one token id, none negative; its shape is {token_ids.shape}"
        )
    return token_ids


def _shared_length(node: Node, token_ids: TokenIds) -> int:
    """Return the length of the common prefix of a path and ``ids``."""
    return common_length(np.concatenate([ancestor.token_ids for ancestor in node.path()]), token_ids)


def _spans(mask: npt.NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))
