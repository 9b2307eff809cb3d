"""Trajectories: trees of token segments that sessions record, and the training rows made of them."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from turnwise.errors import FormatError, TrainError
from turnwise.images import data_uri
from turnwise.types import (
    Branch,
    FinishReason,
    Logprobs,
    Media,
    ReadMedia,
    RewardEvent,
    Routes,
    SamplingMask,
    Search,
    StopReason,
    TokenIds,
    VersionSpan,
    WriteMedia,
    decode_mask,
    decode_routes,
    encode_routes,
    join_masks,
    join_routes,
)

SegmentKind = Literal["context", "sampled"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of token ids that was added to a branch at once; immutable.

    Attributes:
        index: Index in ``Trajectory.segments``, in commit order (parents before children).
        parent: Index of the preceding segment, -1 for a root.
        kind: ``context`` (``loss_mask`` 0) or ``sampled`` (``loss_mask`` 1).
        token_ids: int32 of shape [tokens].
        messages: The ids' messages as JSON: those that a request added, or the one assistant message.
        turn_id: The turn; sampled segments only.
        logprobs: float32 of shape [tokens], sampled segments only.
        weight_versions: Spans over ``token_ids``, sampled segments only.
        finish_reason: Sampled segments only.
        fork: Why this segment is not the first child of its parent, or None.
        tools: Root contexts only: the tool schemas, as JSON.
        template_args: Root contexts only: additional chat template arguments of the request, or None.
        left_out: Sampled segments only: spans of ids that the agent dropped from its history and that are not trained;
            None for no such ids.
        media: Images of the ids, with positions in this segment; without ids (a recording of text) all at 0.
        routes: The experts that a mixture model chose for the ids, or None.
        mask: Sampled segments only: what truncation kept of the vocabulary for each id, or None.
        digests: Sampled segments only: digests of the logits of some ids, as in ``Completion``.
    """

    index: int
    parent: int
    kind: SegmentKind
    token_ids: TokenIds
    messages: tuple[dict[str, Any], ...] = ()
    turn_id: str | None = None
    logprobs: Logprobs | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason | None = None
    fork: str | None = None
    tools: tuple[dict[str, Any], ...] | None = None
    template_args: dict[str, Any] | None = None
    left_out: tuple[tuple[int, int], ...] | None = None
    media: tuple[Media, ...] = ()
    routes: Routes | None = None
    mask: SamplingMask | None = None
    digests: str | None = None

    @property
    def sampled(self) -> bool:
        """Whether the policy sampled these ids."""
        return self.kind == "sampled"

    @property
    def trained(self) -> npt.NDArray[np.bool_]:
        """Mask of shape [tokens] of the trained ids: sampled and not in ``left_out``."""
        mask = np.full(len(self.token_ids), self.sampled, np.bool_)
        for start, end in self.left_out or ():
            mask[start:end] = False
        return mask


def messages_of(segment: Segment) -> tuple[dict[str, Any], ...]:
    """Return a segment's messages in OpenAI's form: parts ``image_url`` with data instead of images' digests."""
    if not segment.media:
        return segment.messages
    images = {
        image.digest: {"type": "image_url", "image_url": {"url": data_uri(image.data)}} for image in segment.media
    }
    return tuple(
        {**message, "content": [images.get(part.get("sha256"), part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in segment.messages
    )


_SEGMENT_FIELDS = ("index", "parent", "kind", "token_ids", "messages")
_SAMPLED_FIELDS = ("turn_id", "logprobs", "weight_versions", "finish_reason")
_RARE_FIELDS = ("fork", "tools", "template_args", "left_out", "digests")


def segment_record(segment: Segment, media: WriteMedia | None = None) -> dict[str, Any]:
    """Return a segment as orjson-serialisable values; :func:`read_segment` is the inverse.

    The record names images by digest where ``media`` writes them, else it holds their bytes.
    """
    record = {name: getattr(segment, name) for name in _SEGMENT_FIELDS + _SAMPLED_FIELDS * segment.sampled}
    if segment.media:
        record["media"] = [[image.kind, image.digest, image.position, image.length] for image in segment.media]
        if media is not None:
            media(segment.media)
        else:
            for entry, image in zip(record["media"], segment.media, strict=True):
                entry.append(base64.b64encode(image.data).decode())
    if segment.routes is not None:
        record["routes"] = encode_routes(segment.routes)
    if segment.mask is not None:
        record["mask"] = segment.mask.encode()
    return record | {name: value for name in _RARE_FIELDS if (value := getattr(segment, name)) is not None}


def read_segment(record: dict[str, Any], media: ReadMedia | None = None) -> Segment:
    """Read a record of :func:`segment_record`; a malformed one raises KeyError, TypeError, ValueError and the like.

    ``media`` reads the images that the record only names. Raises FormatError where one is missing.
    """
    logprobs = record.get("logprobs")
    tools, template_args = record.get("tools"), record.get("template_args")
    left_out, routes, mask = record.get("left_out"), record.get("routes"), record.get("mask")
    return Segment(
        index=record["index"],
        parent=record["parent"],
        kind=record["kind"],
        token_ids=np.asarray(record["token_ids"], np.int32),
        messages=_as_tuple(record["messages"]),
        logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
        weight_versions=tuple((int(v), int(s), int(e)) for v, s, e in record.get("weight_versions", ())),
        tools=None if tools is None else _as_tuple(tools),
        template_args=json.loads(template_args) if isinstance(template_args, str) else template_args,
        left_out=None if left_out is None else tuple((int(start), int(end)) for start, end in left_out),
        media=tuple(_read_media(image, media) for image in record.get("media", ())),
        routes=decode_routes(routes) if isinstance(routes, str) else routes,
        mask=None if mask is None else decode_mask(mask),
        **{name: record.get(name) for name in ("turn_id", "finish_reason", "fork", "digests")},
    )


def _read_media(record: Sequence[Any], read: ReadMedia | None) -> Media:
    kind, digest, position, length, *encoded = record
    if encoded:
        data = base64.b64decode(encoded[0])
    elif read is not None:
        data = read(digest)
    else:
        raise FormatError(f"the record names the image {digest}, and there is no folder to read it from")
    return Media(kind, data, int(position), int(length))


def _as_tuple(value: Any) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(value) if isinstance(value, str) else value)


SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: the sampled segment, and the path of segments that the model saw."""

    turn_id: str
    sampled: Segment
    path: tuple[int, ...]


def branch_paths(branches: Sequence[Branch]) -> list[tuple[str, ...]]:
    """Return the turns of each branch, those before its fork included.

    Raises:
        FormatError: A branch does not begin on its parent.
    """
    paths: list[tuple[str, ...]] = []
    for number, branch in enumerate(branches):
        shared: tuple[str, ...] = ()
        if branch.parent >= number or (branch.parent < 0) != (number == 0):
            raise FormatError(f"branch {number} names {branch.parent} as its parent: parents come first")
        if branch.after is not None:
            parent = paths[branch.parent] if number else ()
            if branch.after not in parent:
                raise FormatError(f"branch {number} begins after turn {branch.after!r}, which its parent does not have")
            shared = parent[: parent.index(branch.after) + 1]
        paths.append(shared + branch.turns)
    return paths


@dataclass(slots=True)
class Trajectory:
    """The recording of one session of one episode.

    Attributes:
        id: Unique in the run.
        episode_id: The episode (one attempt at a task).
        group_id: The group within which rewards are compared.
        task_id: The dataset row.
        agent: The session's name (``main`` unless the agent opened further ones).
        policy: The policy that sampled.
        frozen: Whether that policy is never trained.
        segments: A forest, in commit order.
        rewards: Events (turn id or None, name, value).
        stop_reason: Why it ended.
        error: ``ErrorType: message`` where an error ended it.
        metrics: Counts and times of this trajectory.
        turn_metrics: Metrics by turn id: calls, and what tools measured.
        turn_times: When the request of a turn was sent, and when its completion was there, in seconds since 1970, by
            turn id; without turns that an earlier process of a gateway recorded.
        turn_notes: Texts by turn id ("" for the episode) that tools and scores noted: what a tool reported among its
            metrics that is no number, why a solution counts for nothing.
        states: The environment's state label after each turn, by turn id; the empty key holds the initial state.
        partition: ``train`` or ``val``.
        attempt: 0 for the first attempt at this episode, counted up by retries.
        seed: The environment's reset seed.
        reasoning: How reasoning of earlier turns was rendered: ``keep`` or ``template``.
        echo: How rewritten turns were matched: ``same`` or ``strict``.
        recorded: ``tokens``, or ``text`` for endpoints without token ids, where segments hold messages only.
        baseline: Whether it is a greedy rollout that serves as a reward baseline: in no group, never trained.
        branches: The ways through an episode that was forked (``rollout.tree``) or searched (``eval.search``); empty
            for one that was not.
        search: The choice among them, for an episode that was searched.
    """

    id: str
    episode_id: str
    group_id: str
    task_id: str
    agent: str = "main"
    policy: str = "main"
    frozen: bool = False
    segments: list[Segment] = field(default_factory=list)
    rewards: list[RewardEvent] = field(default_factory=list)
    stop_reason: StopReason = StopReason.COMPLETED
    error: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    turn_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    turn_times: dict[str, tuple[float, float]] = field(default_factory=dict)
    turn_notes: dict[str, dict[str, str]] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    partition: str = "train"
    attempt: int = 0
    seed: int = 0
    reasoning: str = "keep"
    echo: str = "same"
    recorded: str = "tokens"
    baseline: bool = False
    branches: list[Branch] = field(default_factory=list)
    search: Search | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def reward(self) -> float:
        """Sum of all reward events; of a forked episode the mean over branches, of a searched one the choice's."""
        returns = self.returns()
        if self.search is not None:
            return returns[self.search.chosen]
        return sum(returns) / len(returns)

    def returns(self) -> list[float]:
        """Return the reward of each branch; of an episode that was not forked, its one reward."""
        if not self.branches:
            return [float(sum(value for _, _, value in self.rewards))]
        return [sum(rewards.values()) for rewards in self.branch_rewards()]

    def named_rewards(self) -> dict[str, float]:
        """Return the rewards summed by name; of a forked episode the mean, of a searched one those of the choice."""
        if self.search is not None:
            return self.branch_rewards()[self.search.chosen]
        means: dict[str, float] = {}
        for rewards in self.branch_rewards():
            for name, value in rewards.items():
                means[name] = means.get(name, 0.0) + value / max(1, len(self.branches))
        return means

    def branch_rewards(self) -> list[dict[str, float]]:
        """Return the rewards of each branch, summed by name; of an episode that was not forked, its one."""
        paths = [set(path) for path in branch_paths(self.branches)] if self.branches else [None]
        by_branch: list[dict[str, float]] = []
        for number, path in enumerate(paths):
            sums: dict[str, float] = {}
            for turn_id, name, value in self.rewards:
                if path is None or turn_id is None or turn_id in path:
                    sums[name] = sums.get(name, 0.0) + value
            for _, name, value in self.branches[number].rewards if path is not None else ():
                sums[name] = sums.get(name, 0.0) + value
            by_branch.append(sums)
        return by_branch

    @property
    def sampled_tokens(self) -> int:
        """Number of sampled ids over all branches; for ``text``, the endpoint's token counts."""
        if self.recorded == "text":
            return int(self.metrics.get("completion_tokens", 0))
        return sum(len(segment.token_ids) for segment in self.segments if segment.sampled)

    def forks(self) -> Counter[str]:
        """Count the forks by reason."""
        return Counter(segment.fork for segment in self.segments if segment.fork is not None)

    def leaves(self) -> list[int]:
        """Return the indices of segments without children, in commit order."""
        parents = {segment.parent for segment in self.segments}
        return [segment.index for segment in self.segments if segment.index not in parents]

    def path(self, index: int) -> list[Segment]:
        """Return the segments from a root to ``index``, in order."""
        path = []
        while index >= 0:
            path.append(self.segments[index])
            index = self.segments[index].parent
        return path[::-1]

    def turns(self) -> Iterator[Turn]:
        """Yield the turns in commit order."""
        for segment in self.segments:
            if segment.sampled and segment.turn_id is not None:
                path = tuple(ancestor.index for ancestor in self.path(segment.parent))
                yield Turn(segment.turn_id, segment, path)

    def to_bytes(self) -> bytes:
        """Return one line of JSON, with its images. Raises FormatError for what JSON cannot express."""
        check_finite(self)
        record = {name: getattr(self, name) for name in _TRAJECTORY_FIELDS}
        for rare in ("frozen", "branches", "search"):
            if not record[rare]:
                del record[rare]
        record["segments"] = segments = [segment_record(segment) for segment in self.segments]
        return dump_records(self.id, record, segments)

    @classmethod
    def from_bytes(cls, data: bytes | str) -> Trajectory:
        """Read a line of :meth:`to_bytes`. Raises FormatError for another schema version, or malformed fields."""
        try:
            record = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise FormatError(f"a trajectory record is not JSON: {error}") from error
        version = record.get("schema_version") if isinstance(record, dict) else None
        if version != SCHEMA_VERSION:
            raise FormatError(
                f"a trajectory record has schema version {version!r}; this version reads {SCHEMA_VERSION}"
            )
        try:
            segments = [read_segment(item) for item in record.pop("segments")]
            record["stop_reason"] = StopReason(record["stop_reason"])
            times = record.get("turn_times", {})
            record["turn_times"] = {turn: (begin, end) for turn, (begin, end) in times.items()}
            record["rewards"] = [(turn, name, float(value)) for turn, name, value in record["rewards"]]
            record["branches"] = [_read_branch(branch) for branch in record.get("branches", ())]
            if (search := record.get("search")) is not None:
                record["search"] = Search(**{**search, "scores": tuple(search["scores"])})
            return cls(segments=segments, **record)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise FormatError(f"trajectory record {record.get('id')!r} is malformed: {error!r}") from error


def _read_branch(record: dict[str, Any]) -> Branch:
    return Branch(
        parent=int(record["parent"]),
        after=record["after"],
        again=record["again"],
        turns=tuple(record["turns"]),
        rewards=tuple((turn, name, float(value)) for turn, name, value in record["rewards"]),
        stop_reason=StopReason(record["stop_reason"]),
    )


_TRAJECTORY_FIELDS = tuple(attribute.name for attribute in fields(Trajectory) if attribute.name != "segments")


def check_finite(trajectory: Trajectory) -> None:
    """Raise FormatError for a log-probability or reward that is not finite."""
    for segment in trajectory.segments:
        if segment.logprobs is not None and not np.isfinite(segment.logprobs).all():
            raise FormatError(f"trajectory {trajectory.id}: segment {segment.index} has a logprob that is not finite")
    of_branches = [value for branch in trajectory.branches for _, _, value in branch.rewards]
    if not np.isfinite([*(value for _, _, value in trajectory.rewards), *of_branches]).all():
        raise FormatError(f"trajectory {trajectory.id}: a reward is not finite: {trajectory.rewards}, {of_branches}")


def dump_records(trajectory_id: str, value: Any, segments: Sequence[dict[str, Any]]) -> bytes:
    """Return a value that holds these records of segments as JSON. Raises FormatError for what JSON cannot express.

    A model may write numbers of more than 64 bits as arguments: then messages and tools are kept as JSON text.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        texts = ("messages", "tools", "template_args")
    try:
        for segment in segments:
            segment |= {key: json.dumps(segment[key]) for key in texts if key in segment}
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise FormatError(f"trajectory {trajectory_id!r} cannot be written as JSON: {error}") from error


@dataclass(slots=True)
class TrajectoryGroup:
    """Trajectories of one task whose rewards are compared (ragged where members were dropped).

    Attributes:
        id: Unique in the run.
        task_id: Their task.
        trajectories: The members.
        partition: ``train`` or ``val``.
        failed: Number of members that ended in an error and are not in ``trajectories``.
        source: Task source for metrics, if there is more than one.
        baselines: Greedy rollouts of the task, where requested; not members.
    """

    id: str
    task_id: str
    trajectories: list[Trajectory]
    partition: str = "train"
    failed: int = 0
    source: str | None = None
    baselines: list[Trajectory] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One training row: a branch of a trajectory from root to leaf. All arrays have shape [tokens].

    Attributes:
        input_ids: int32, exactly the ids that the engine saw and sampled.
        loss_mask: bool, true where the policy sampled the id and this row trains it.
        rollout_logprobs: float32, 0 where the id was not sampled; with ``mask``, those after truncation.
        weight_versions: int32, weight version that sampled the id, -1 where it was not sampled.
        turn_ids: int32, number of the turn in commit order, -1 where the id was not sampled.
        trajectory_id: Its trajectory.
        group_id: Its group.
        leaf: Index of the leaf segment.
        media: Images, with positions in the row.
        routes: The experts of the ids, if they are to be replayed and any were reported.
        mask: What truncation kept for each id, if it is to be trained under and any was reported.
    """

    input_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    rollout_logprobs: Logprobs
    weight_versions: npt.NDArray[np.int32]
    turn_ids: npt.NDArray[np.int32]
    trajectory_id: str
    group_id: str
    leaf: int
    media: tuple[Media, ...] = ()
    routes: Routes | None = None
    mask: SamplingMask | None = None

    @property
    def key(self) -> tuple[str, int]:
        """(trajectory id, leaf index), unique in a run."""
        return self.trajectory_id, self.leaf

    @property
    def trained_tokens(self) -> int:
        """Number of trained ids."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class Samples:
    """The training rows of a trajectory, with counts of what is in none.

    Attributes:
        empty_leaves: Leaves whose row owned no sampled id.
        unowned_tokens: Sampled ids that no kept row trains: 0 unless rows were filtered or cut, or the agent left ids
            out.
    """

    rows: list[TrainSample]
    empty_leaves: int
    unowned_tokens: int


def to_samples(
    trajectory: Trajectory,
    *,
    max_tokens: int | None = None,
    keep: Callable[[Sequence[Segment]], bool] | None = None,
    reported: bool = False,
) -> Samples:
    """Return one row per leaf; each sampled id is trained in exactly one of them.

    A shared sampled segment is trained in the first kept leaf in commit order, after filtering and cutting.

    Args:
        trajectory: The trajectory.
        max_tokens: Rows are cut to this many ids.
        keep: Filters rows by the leaf's path.
        reported: Whether rows have the experts and sampling masks that servers reported, for the model that sampled.

    Raises:
        TrainError: The trajectory was recorded as text.
    """
    if trajectory.recorded == "text":
        raise TrainError(
            f"trajectory {trajectory.id} was recorded as text: its endpoint returned no token ids that could be trained"
        )
    numbers = {s.index: n for n, s in enumerate(s for s in trajectory.segments if s.sampled)}
    owned: set[int] = set()
    rows, empty, trained = [], 0, 0
    for leaf in trajectory.leaves():
        path = trajectory.path(leaf)
        if keep is not None and not keep(path):
            continue
        row = _row(trajectory, path, numbers, owned, max_tokens)
        if reported and (routes := path_routes(path)) is not None:
            row = replace(row, routes=routes[: len(row.input_ids)])
        if reported and (mask := path_masks(path)) is not None:
            mask = mask.select(np.arange(len(row.input_ids)))
            row = replace(row, mask=mask, rollout_logprobs=mask.logprobs)
        if row.trained_tokens == 0:
            empty += 1
            continue
        trained += row.trained_tokens
        rows.append(row)
    return Samples(rows, empty, trajectory.sampled_tokens - trained)


def _row(
    trajectory: Trajectory, path: Sequence[Segment], numbers: dict[int, int], owned: set[int], max_tokens: int | None
) -> TrainSample:
    total = sum(len(segment.token_ids) for segment in path)
    length = total if max_tokens is None else min(total, max_tokens)
    media = path_media(path)
    # An image is whole or not in the row.
    length = min([length, *(image.position for image in media if image.position < length < image.end)])
    token_ids = np.concatenate([segment.token_ids for segment in path])[:length]
    mask = np.zeros(length, np.bool_)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, -1, np.int32)
    turns = np.full(length, -1, np.int32)
    start = 0
    for segment in path:
        end = min(start + len(segment.token_ids), length)
        if segment.sampled and segment.logprobs is not None and start < end:
            logprobs[start:end] = segment.logprobs[: end - start]
            turns[start:end] = numbers[segment.index]
            for version, span_start, span_end in segment.weight_versions:
                versions[start + span_start : min(start + span_end, end)] = version
            if segment.index not in owned:
                mask[start:end] = segment.trained[: end - start]
                owned.add(segment.index)
        start += len(segment.token_ids)
    return TrainSample(
        token_ids,
        mask,
        logprobs,
        versions,
        turns,
        trajectory.id,
        trajectory.group_id,
        path[-1].index,
        tuple(image for image in media if image.end <= length),
    )


def path_routes(path: Sequence[Segment]) -> Routes | None:
    """Return the routed experts of the ids of a path of segments, None where none were reported."""
    return join_routes([(len(segment.token_ids), segment.routes) for segment in path])


def path_masks(path: Sequence[Segment]) -> SamplingMask | None:
    """Return the sampling masks of the ids of a path of segments, None where none were reported."""
    parts = [(np.zeros(len(s.token_ids), np.float32) if s.logprobs is None else s.logprobs, s.mask) for s in path]
    return join_masks(parts)


def path_media(path: Sequence[Segment]) -> tuple[Media, ...]:
    """Return the images of a path of segments, with positions in its ids."""
    images: list[Media] = []
    start = 0
    for segment in path:
        images += (image.at(start + image.position) for image in segment.media)
        start += len(segment.token_ids)
    return tuple(images)
