"""Trajectories as a report holds them: figures of all, a table, and the contents of as many as fit."""

from __future__ import annotations

import base64
import hashlib
import math
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import orjson

from turnwise.agents.roles import role_of
from turnwise.errors import FormatError
from turnwise.evaluation.estimates import clustered_mean, natural_order
from turnwise.evaluation.searched import chosen_members, search_row
from turnwise.ext.report.runs import RunFacts, shortened
from turnwise.trajectory import Segment, Trajectory, branch_paths, messages_of, segment_record
from turnwise.trajectory_file import TrajectoryFile, effective_trajectories

CHUNK_BYTES: Final = 256 * 1024
"""JSON of a chunk, before compression: what is decoded to show one trajectory."""
LARGEST: Final = 4 * 1024 * 1024
"""JSON of the largest trajectory that is kept with its tokens; of a larger one the messages are."""
MOST_ROWS: Final = 100_000
MOST_TASKS: Final = 20_000
MOST_ERRORS: Final = 50
_TRIES = 8
_FAILED_SHARE = 4
_TOLERANCE = 1e-6
_DIGITS = 4
_LEVEL = 6
_LARGE_GROUP = 8
_LEAST_CHUNKS = 16
_PLAIN = (
    "id", "episode_id", "group_id", "task_id", "agent", "policy", "rewards", "metrics", "turn_metrics", "turn_notes",
    "states", "partition", "attempt", "reasoning", "recorded", "baseline", "error",
)  # fmt: skip


def pack(value: Any) -> str:
    """Return a value as JSON, compressed (raw deflate) and in base64, as the page unpacks it."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    data = orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    return base64.b64encode(compressor.compress(data) + compressor.flush()).decode("ascii")


def fit_into(build: Callable[[int], Any], largest: int, room: int) -> tuple[str, int]:
    """Return what ``build`` makes of as large a number as fits into ``room`` characters when packed, and the number."""
    number = largest
    text = pack(build(number))
    while len(text) > room and number > 0:
        number = int(number * min(0.8, 0.9 * max(0, room) / len(text)))
        text = pack(build(number))
    return text, number


@dataclass(slots=True)
class Row:
    """What tables, filters and figures need of one trajectory.

    Attributes:
        offset: Byte offset of its record in the file.
        part: ``train``, or of held-out groups what distinguishes them (``sampled``, ``step-8-greedy``).
        counted: Whether its reward is part of its episode's.
        calls: Number of tool calls.
        version: Newest weight version that sampled a token of it.
        slot: Chunk and index in it, if the report holds its contents.
        search: Of a searched trajectory the ways, the sampled ids of all, and the rewards of those that ended.
    """

    offset: int
    id: str
    task: str
    part: str
    group: str
    episode: tuple[str, int]
    agent: str
    counted: bool
    reward: float
    stop: str
    error: str | None
    turns: int
    tokens: int
    calls: int
    errors: int
    kinds: dict[str, int]
    forks: int
    version: int | None
    success: bool = False
    slot: tuple[int, int] | None = None
    search: tuple[int, int, tuple[float, ...]] | None = None


@dataclass(slots=True)
class Episode:
    """One attempt at a task, over all its sessions; those with an error are counted as failed and are in no mean."""

    task: str
    part: str
    reward: float
    success: bool
    turns: int
    tokens: int
    stop: str
    error: str | None
    search: tuple[int, int, tuple[float, ...]] | None = None


def read_rows(facts: RunFacts) -> list[Row]:
    """Return a row for each trajectory of a run, in the order of the file.

    Raises:
        FormatError: A record of the file cannot be read; the message names file and byte.
    """
    if facts.trajectories is None:
        return []
    try:
        located = effective_trajectories(facts.trajectories)
        rows = [trajectory_row(location.offset, trajectory, facts) for location, trajectory in located]
    except FormatError as error:
        raise FormatError(
            f"{error}; leave this run out, or make the report with the version of Turnwise that wrote it"
        ) from error
    return rows


def _part(group: str, partition: str) -> str:
    tag = group.rpartition("~")[2] if "~" in group else ""
    return tag if partition != "train" and tag else partition


def trajectory_row(offset: int, recorded: Trajectory, facts: RunFacts) -> Row:
    """Return the row of a trajectory whose record is at an offset; of a searched one that of the selected branch."""
    [trajectory] = chosen_members([recorded])
    searched = search_row(
        [recorded], lambda branch: branch[0].reward, lambda reward: reward >= facts.success_reward - _TOLERANCE
    )
    kinds = {
        name.removeprefix("tool_errors/"): int(count)
        for name, count in trajectory.metrics.items()
        if name.startswith("tool_errors/") and count
    }
    versions = [version for segment in trajectory.segments for version, _, _ in segment.weight_versions]
    return Row(
        offset=offset,
        id=recorded.id,
        task=trajectory.task_id,
        part=_part(trajectory.group_id, trajectory.partition),
        group=trajectory.group_id,
        episode=(recorded.episode_id, trajectory.attempt),
        agent=trajectory.agent,
        counted=not trajectory.frozen if facts.role is None else role_of(trajectory.agent) == facts.role,
        reward=round(trajectory.reward, 6),
        stop=str(trajectory.stop_reason),
        error=None if trajectory.error is None else shortened(trajectory.error),
        turns=sum(segment.sampled for segment in trajectory.segments),
        tokens=trajectory.sampled_tokens,
        calls=int(trajectory.metrics.get("tool_calls", 0)),
        errors=max(int(trajectory.metrics.get("tool_errors", 0)), sum(kinds.values())),
        kinds=kinds,
        forks=sum(trajectory.forks().values()),
        version=max(versions, default=None),
        success=trajectory.error is None and trajectory.reward >= facts.success_reward - _TOLERANCE,
        search=None if searched is None else (searched.ways, searched.sampled_tokens, searched.rewards),
    )


def episodes_of(rows: Iterable[Row], facts: RunFacts) -> list[Episode]:
    """Return the episodes of rows: rewards of their sessions added up, or their mean where one role counts."""
    members: defaultdict[tuple[str, int], list[Row]] = defaultdict(list)
    for row in rows:
        members[row.episode].append(row)
    episodes = []
    for sessions in members.values():
        main = next((row for row in sessions if row.agent == "main"), sessions[0])
        rewards = [row.reward for row in sessions if row.counted]
        reward = math.fsum(rewards) / (1 if facts.role is None else max(1, len(rewards)))
        episodes.append(
            Episode(
                task=main.task,
                part=main.part,
                reward=reward,
                success=main.error is None and reward >= facts.success_reward - _TOLERANCE,
                turns=sum(row.turns for row in sessions),
                tokens=sum(row.tokens for row in sessions),
                stop=main.stop,
                error=next((row.error for row in sessions if row.error is not None), None),
                search=_episode_search(sessions),
            )
        )
    return episodes


def _episode_search(rows: Sequence[Row]) -> tuple[int, int, tuple[float, ...]] | None:
    """Return the search of an episode, over all its sessions."""
    searched = [(row, row.search) for row in rows if row.search is not None]
    if not searched:
        return None
    rewards = [search[2] for row, search in searched if row.counted]
    totals = tuple(math.fsum(branch_rewards) for branch_rewards in zip(*rewards, strict=True))
    return searched[0][1][0], sum(search[1] for _, search in searched), totals


def part_figures(episodes: Sequence[Episode]) -> dict[str, dict[str, Any]]:
    """Return by part what a summary of an evaluation says: means with standard errors, counts, stop reasons."""
    parts: defaultdict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        parts[episode.part].append(episode)
    return {part: _figures(members) for part, members in parts.items()}


def _figures(episodes: Sequence[Episode]) -> dict[str, Any]:
    completed = [episode for episode in episodes if episode.error is None]
    by_task: defaultdict[str, list[Episode]] = defaultdict(list)
    for episode in completed:
        by_task[episode.task].append(episode)

    def mean(of: Callable[[Episode], float]) -> list[float | None]:
        estimate = clustered_mean([of(episode) for episode in members] for members in by_task.values())
        return [None, None] if not completed else [estimate.mean, estimate.stderr]

    return {
        "episodes": len(episodes),
        "failed": len(episodes) - len(completed),
        "tasks": len({episode.task for episode in episodes}),
        "reward": mean(lambda episode: episode.reward),
        "success": mean(lambda episode: episode.success),
        "turns": mean(lambda episode: episode.turns)[0],
        "tokens": mean(lambda episode: episode.tokens)[0],
        "stops": dict(Counter(episode.stop for episode in episodes).most_common()),
        "search": _search_figures([search for episode in completed if (search := episode.search) and search[2]]),
    }


def _search_figures(searches: Sequence[tuple[int, int, tuple[float, ...]]]) -> dict[str, float] | None:
    """Return means over searched episodes: ways, sampled ids of all of them, and their mean and best reward."""
    if not searches:
        return None
    count = len(searches)
    return {
        "ways": sum(branches for branches, _, _ in searches) / count,
        "tokens": sum(tokens for _, tokens, _ in searches) / count,
        "mean": math.fsum(math.fsum(rewards) / len(rewards) for _, _, rewards in searches) / count,
        "best": math.fsum(max(rewards) for _, _, rewards in searches) / count,
    }


def task_columns(episodes: Sequence[Episode], max_pairs: int) -> dict[str, list[Any]]:
    """Return means by part and task, of at most ``max_pairs`` pairs; which tasks is the same for every run."""
    pairs: defaultdict[tuple[str, str], list[Episode]] = defaultdict(list)
    for episode in episodes:
        pairs[episode.part, episode.task].append(episode)
    shown_pairs = list(pairs)
    if len(pairs) > max_pairs:
        shown_pairs = sorted(pairs, key=lambda pair: (_lot(pair[1]), pair[0]))[:max_pairs]
    columns: defaultdict[str, list[Any]] = defaultdict(list)
    for pair in sorted(shown_pairs, key=lambda pair: (pair[0], natural_order(pair[1]))):
        completed = [episode for episode in pairs[pair] if episode.error is None]
        columns["part"].append(pair[0])
        columns["task"].append(pair[1])
        columns["episodes"].append(len(completed))
        columns["failed"].append(len(pairs[pair]) - len(completed))
        for name in ("reward", "success", "turns", "tokens"):
            total = math.fsum(float(getattr(episode, name)) for episode in completed)
            columns[name].append(round(total / len(completed), 6) if completed else None)
    return columns


def error_counts(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """Return the most frequent errors: their text, how many trajectories they ended, and the last one's id."""
    counts: Counter[str] = Counter(row.error for row in rows if row.error is not None)
    last_id = {row.error: row.id for row in rows if row.error is not None}
    return [(text, count, last_id[text]) for text, count in counts.most_common(MOST_ERRORS)]


def _lot(task: str) -> bytes:
    """Return a number that is drawn for a task, the same in every run."""
    return hashlib.blake2b(task.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def halving(count: int) -> list[int]:
    """Return 0 to ``count - 1``, the last first, then the first, then those half-way between earlier ones."""
    order = [count - 1, 0][: min(count, 2)]
    gaps = deque([(0, count - 1)])
    while gaps:
        low, high = gaps.popleft()
        if high - low >= 2:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order


def by_priority(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the groups in the order in which a report that has no room for all keeps them.

    Each task's newest group comes first, then each task's oldest, then those between (:func:`halving`); the tasks of
    such a round come in an order that is drawn by their names, so that reports of several runs keep the same ones.
    Every fourth group is one with an error, while there are any.
    """
    tasks: defaultdict[str, dict[str, list[Row]]] = defaultdict(dict)
    for row in rows:
        tasks[row.task].setdefault(row.group, []).append(row)
    ranked = []
    for task, groups in tasks.items():
        members, lot = list(groups.values()), _lot(task)
        ranked += [(turn, lot, index, members[index]) for turn, index in enumerate(halving(len(members)))]
    ranked.sort(key=lambda entry: entry[:3])
    failed = deque(group for *_, group in ranked if any(row.error is not None for row in group))
    unfailed = deque(group for *_, group in ranked if all(row.error is None for row in group))
    order: list[list[Row]] = []
    while failed or unfailed:
        first = failed if failed and (not unfailed or len(order) % _FAILED_SHARE == 0) else unfailed
        order.append(first.popleft())
    return order


def table_columns(rows: Iterable[Row]) -> dict[str, list[Any]]:
    """Return the table of trajectories that the page shows, a list per column."""
    columns: defaultdict[str, list[Any]] = defaultdict(list)
    for row in rows:
        for name in ("id", "task", "part", "agent", "stop", "reward", "turns", "tokens", "calls", "errors", "forks"):
            columns[name].append(getattr(row, name))
        columns["success"].append(int(row.success))
        columns["version"].append(row.version)
        columns["error"].append(row.error)
        columns["kinds"].append(row.kinds or None)
        columns["chunk"].append(None if row.slot is None else row.slot[0])
        columns["place"].append(None if row.slot is None else row.slot[1])
    return columns


@dataclass(slots=True)
class Contents:
    """What a report holds of the contents of a run's trajectories.

    Attributes:
        trajectories: Number of trajectories.
        slim: Number of those without their tokens.
        chunks: Number of chunks.
        size: Characters of all chunks.
        token_ids: All ids that occur.
    """

    trajectories: int = 0
    slim: int = 0
    chunks: int = 0
    size: int = 0
    token_ids: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Record:
    """A trajectory as JSON; ``token_ids`` is None where it is too large to be kept with its tokens."""

    row: Row
    data: bytes
    token_ids: set[int] | None


def chunks(facts: RunFacts, groups: Iterable[Sequence[Row]], room: int, contents: Contents) -> Iterator[str]:
    """Yield packed chunks of groups until ``room`` characters are full, and note in the rows where they are.

    A chunk that does not fit is left out, and the next ones are tried a few times.
    """
    tries = 0
    # Of small room no large part may stay empty because a chunk does not fit.
    for batch in _batches(facts, groups, min(CHUNK_BYTES, room // _LEAST_CHUNKS)):
        text = pack([orjson.Fragment(record.data) for record in batch])
        if contents.size + len(text) > room:
            tries += 1
            if tries == _TRIES:
                return
            continue
        for index, record in enumerate(batch):
            record.row.slot = (contents.chunks, index)
            contents.slim += record.token_ids is None
            contents.token_ids |= record.token_ids or set()
        contents.trajectories += len(batch)
        contents.chunks += 1
        contents.size += len(text)
        yield text


def _batches(facts: RunFacts, groups: Iterable[Sequence[Row]], least_size: int) -> Iterator[list[_Record]]:
    """Yield the records of as many groups as have ``least_size`` bytes; only a large group is divided."""
    if facts.trajectories is None:
        return
    batch: list[_Record] = []
    size = 0
    with TrajectoryFile(facts.trajectories) as file:
        for group in groups:
            for row in group:
                batch.append(_read_record(file, row, facts))
                size += len(batch[-1].data)
                if size >= least_size * (1 if row is group[-1] else _LARGE_GROUP):
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch


def _read_record(file: TrajectoryFile, row: Row, facts: RunFacts) -> _Record:
    trajectory = file.at(row.offset)
    data = dumped(trajectory_record(trajectory, facts))
    if len(data) > LARGEST:
        return _Record(row, dumped(trajectory_record(trajectory, facts, tokens=False)), None)
    return _Record(row, data, {token_id for segment in trajectory.segments for token_id in segment.token_ids.tolist()})


def dumped(record: dict[str, Any]) -> bytes:
    """Return the JSON of a record that the page's script reads."""
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_STRICT_INTEGER
    try:
        return orjson.dumps(record, option=option)
    except TypeError:
        # A model may write numbers of more digits than JavaScript keeps, which become texts, and half characters.
        return orjson.dumps(_narrow(record), option=option)


def _whole(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _narrow(value: Any) -> Any:
    if isinstance(value, dict):
        return {_whole(str(key)): _narrow(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_narrow(element) for element in value]
    if isinstance(value, str):
        return _whole(value)
    return str(value) if isinstance(value, int) and abs(value) >= 1 << 53 else value


def trajectory_record(trajectory: Trajectory, facts: RunFacts, *, tokens: bool = True) -> dict[str, Any]:
    """Return all that the page shows of a trajectory, as orjson-serialisable values."""
    return {
        **{name: getattr(trajectory, name) for name in _PLAIN},
        "reward": trajectory.reward,
        "stop_reason": str(trajectory.stop_reason),
        # As text: a seed may have more digits than a number of JavaScript.
        "seed": str(trajectory.seed),
        "segments": [_segment(segment, tokens) for segment in trajectory.segments],
        "gaps": facts.gaps.get(trajectory.id, ()),
        "ways": _branch_leaves(trajectory),
        "search": _search_choice(trajectory),
    }


def _branch_leaves(trajectory: Trajectory) -> list[tuple[int, float, str]]:
    """Return (last segment, reward, stop reason) of each branch of a forked episode."""
    if not trajectory.branches:
        return []
    segment_of = {segment.turn_id: segment.index for segment in trajectory.segments if segment.sampled}
    branches = zip(branch_paths(trajectory.branches), trajectory.returns(), trajectory.branches, strict=True)
    return [
        (segment_of[path[-1]], reward, str(branch.stop_reason))
        for path, reward, branch in branches
        if path and path[-1] in segment_of
    ]


def _search_choice(trajectory: Trajectory) -> dict[str, Any] | None:
    """Return the choice of a searched trajectory; ``leaves`` are (last segment, score, chosen) of each branch."""
    search = trajectory.search
    if search is None:
        return None
    segment_of = {segment.turn_id: segment.index for segment in trajectory.segments if segment.sampled}
    paths = branch_paths(trajectory.branches)
    leaves = [
        (segment_of.get(path[-1]), score, number == search.chosen)
        for number, (path, score) in enumerate(zip(paths, search.scores, strict=False))
        if path
    ]
    score = search.scores[search.chosen] if search.scores else None
    return {
        "kind": search.kind, "scorer": search.scorer, "ways": max(1, len(paths)), "score": score, "leaves": leaves,
    }  # fmt: skip


def _segment(segment: Segment, tokens: bool) -> dict[str, Any]:
    # The page shows images where their messages have them.
    record = segment_record(replace(segment, messages=messages_of(segment), media=()))
    record["tokens"] = len(segment.token_ids)
    if not tokens:
        return {name: value for name, value in record.items() if name not in ("token_ids", "logprobs")}
    if segment.logprobs is not None:
        record["logprobs"] = np.round(segment.logprobs.astype(np.float64), _DIGITS)
    return record
