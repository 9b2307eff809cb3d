"""Rendering of trajectories for a terminal: messages, sampled tokens, rewards, stop reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from turnwise.errors import FormatError
from turnwise.evaluation.tables import run_file
from turnwise.images import image_label
from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TrajectoryEntry, TrajectoryFile
from turnwise.types import WHY_UNFORKED

_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
# What a model sampled may hold the control codes of a terminal: they are shown, not obeyed.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_CONTROLS |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclass(frozen=True, slots=True)
class Selection:
    """A filter of trajectories by task, id and partition, limited to the newest ``number``."""

    task: str | None = None
    trajectory: str | None = None
    partition: str | None = None
    number: int = 3

    def holds(self, trajectory: TrajectoryEntry) -> bool:
        """Whether a trajectory matches."""
        return (
            (self.task is None or trajectory.task_id == self.task)
            and (self.trajectory is None or trajectory.id == self.trajectory)
            and (self.partition is None or trajectory.partition == self.partition)
        )

    def __str__(self) -> str:
        parts = {"task": self.task, "id": self.trajectory, "partition": self.partition}
        return ", ".join(f"{name} {value!r}" for name, value in parts.items() if value is not None)


def show(
    source: Path, selection: Selection, *, tokens: bool = False, console: Console | None = None
) -> list[Trajectory]:
    """Print and return the newest matching trajectories of a run directory or file. Raises FormatError.

    With ``tokens`` also their ids, logprobs and weight versions.
    """
    console = console or Console()
    path = run_file(source)
    with TrajectoryFile(path) as file:
        matching = [entry for entry in file.entries if selection.holds(entry)]
        if not matching:
            criteria = f" with {selection}" if str(selection) else ""
            if not file.entries:
                raise FormatError(f"{path} holds no trajectory: no episode has ended")
            raise FormatError(f"{path} holds {len(file.entries)} trajectories, none{criteria}")
        newest = [file.read(entry) for entry in matching[max(0, len(matching) - selection.number) :]]
        for trajectory in newest:
            console.print(render(trajectory, tokens=tokens))
        console.print(
            Text(f"{len(newest)} of {len(matching)} trajectories ({len(file.entries)} in {path})", style="dim")
        )
    return newest


def trajectory_values(trajectory: Trajectory, *, tokens: bool = False) -> dict[str, Any]:
    """Return a trajectory as JSON values, with segments in the order of the recording; ``parent`` is a segment's."""
    ids = ("task_id", "group_id", "episode_id", "partition", "seed", "agent", "policy", "reward", "error")
    values = {"id": trajectory.id, **{name: getattr(trajectory, name) for name in ids}}
    values |= {"stop_reason": str(trajectory.stop_reason), "rewards": trajectory.rewards, "segments": []}
    for segment in trajectory.segments:
        names = ("index", "parent", "turn_id", "sampled", "fork", "finish_reason", "messages")
        row = {name: getattr(segment, name) for name in names}
        if tokens:
            logprobs = None if segment.logprobs is None else segment.logprobs.tolist()
            row |= {"token_ids": segment.token_ids.tolist(), "logprobs": logprobs}
            row["weight_versions"] = segment.weight_versions
        values["segments"].append(row)
    return values


def render(trajectory: Trajectory, *, tokens: bool = False) -> RenderableType:
    """Return a trajectory laid out for a terminal; shared segments of branches are shown once."""
    parts: list[RenderableType] = [_head(trajectory)]
    shown_segments: set[int] = set()
    leaves = trajectory.leaves()
    for number, leaf in enumerate(leaves, 1):
        path = trajectory.path(leaf)
        if len(leaves) > 1:
            parts.append(_branch(number, len(leaves), path, shown_segments))
        for segment in path:
            if segment.index not in shown_segments:
                shown_segments.add(segment.index)
                parts.extend(_segment(segment, trajectory.rewards, tokens and trajectory.recorded != "text"))
    episode_rewards = [event for event in trajectory.rewards if event[0] is None]
    if episode_rewards:
        parts.append(Text.assemble(("episode ", "dim"), _rewards(episode_rewards)))
    parts.extend(_ways(trajectory))
    title = Text(f" {trajectory.id} ", style="bold")
    return Panel(Group(*parts), title=title, title_align="left", border_style="red" if trajectory.error else "blue")


def _head(trajectory: Trajectory) -> Text:
    turns = sum(segment.sampled for segment in trajectory.segments)
    facts = [
        f"task {trajectory.task_id}",
        f"{trajectory.partition}, seed {trajectory.seed}",
        f"{turns} turn{'' if turns == 1 else 's'}",
        f"{trajectory.sampled_tokens} tokens sampled",
    ]
    if trajectory.recorded == "text":
        facts.append("recorded as text")
    if trajectory.baseline:
        facts.append("greedy baseline")
    if trajectory.agent != "main":
        facts.insert(1, f"session {trajectory.agent}")
    if trajectory.policy != "main":
        facts.append(f"sampled by {trajectory.policy}{', which is frozen' if trajectory.frozen else ''}")
    if trajectory.search is not None:
        facts.append(f"{trajectory.search.kind}: way {trajectory.search.chosen} of {max(1, len(trajectory.branches))}")
    elif trajectory.branches:
        facts.append(f"mean of {len(trajectory.branches)} ways")
    head = Text.assemble(("reward ", "dim"), (f"{trajectory.reward:g}", "bold"), ("  ended ", "dim"))
    head.append(str(trajectory.stop_reason), style="bold")
    head.append(f"\n{'  '.join(facts)}", style="dim")
    if forks := trajectory.forks():
        head.append("\nforks: " + ", ".join(f"{reason} ×{count}" for reason, count in forks.most_common()))
    if (why := trajectory.turn_notes.get("", {}).get(WHY_UNFORKED)) is not None:
        head.append(f"\n{'a branch failed' if trajectory.branches else 'not forked'}: {why}", style="yellow")
    if trajectory.error is not None:
        head.append(f"\n{trajectory.error}", style="red")
    return head


def _ways(trajectory: Trajectory) -> Iterator[Text]:
    """Yield a line for each branch of a forked episode."""
    for number, (branch, reward) in enumerate(zip(trajectory.branches, trajectory.returns(), strict=False)):
        text = Text(f"way {number}", style="bold")
        if (search := trajectory.search) is not None:
            score = search.scores[number] if number < len(search.scores) else None
            text.append("  chosen" if number == search.chosen else "", style="bold green")
            text.append("" if score is None else f"  {search.scorer} {score:g}")
        text.append(f"  reward {reward:g}  {branch.stop_reason}  turns {' '.join(branch.turns) or 'none'}")
        if branch.parent >= 0:
            resampled = "" if branch.again is None else f", {branch.again} sampled again"
            text.append(f"  (from way {branch.parent} after {branch.after or 'the reset'}{resampled})", style="dim")
        yield text


def _branch(number: int, total: int, path: Sequence[Segment], shown_segments: set[int]) -> Text:
    text = Text(f"── branch {number} of {total}", style="bold")
    shared = [segment for segment in path if segment.index in shown_segments]
    if shared:
        text.append(f", continues after segment {shared[-1].index}")
    first = path[len(shared)] if len(shared) < len(path) else None
    if first is not None and first.fork is not None:
        text.append(f" ({first.fork})")
    return text


def _segment(
    segment: Segment, rewards: Sequence[tuple[str | None, str, float]], tokens: bool
) -> Iterator[RenderableType]:
    if not segment.messages:
        kind = "sampled" if segment.sampled else "context"
        yield Text(f"{kind}: {len(segment.token_ids)} ids (messages were not saved)", style="dim")
    for message in segment.messages:
        yield _message(message, segment)
    if tokens:
        yield Padding(_ids(segment), (0, 0, 0, 2))
    turn_rewards = [event for event in rewards if event[0] is not None and event[0] == segment.turn_id]
    if turn_rewards:
        yield Padding(_rewards(turn_rewards), (0, 0, 0, 2))


def _message(message: Mapping[str, Any], segment: Segment) -> Text:
    role = str(message.get("role", "?"))
    label = f"{role} {message['name']}" if message.get("name") else role
    text = Text(label, style=f"bold {_STYLES.get(role, 'white')}")
    if segment.sampled:
        text.append(f"  {segment.turn_id}", style="dim")
        if segment.finish_reason == "length":
            text.append("  cut off", style="red")
    body = Text()
    if message.get("reasoning_content"):
        body.append(f"\n{_safe(message['reasoning_content'])}", style="dim italic")
    if message.get("content"):
        body.append(f"\n{_content(message['content'], segment)}")
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments")
        arguments_text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        body.append(_safe(f"\n→ {function.get('name')}({arguments_text})"), style="bold yellow")
    return text.append_text(body)


def _content(content: Any, segment: Segment) -> str:
    if isinstance(content, str):
        return _safe(content)
    labels = {media.digest: image_label(media.data, media.digest) for media in segment.media}
    return _safe(
        "".join(labels.get(part.get("sha256")) or part.get("text", f"[{part.get('type')}]") for part in content)
    )


def _safe(text: Any) -> str:
    return str(text).translate(_CONTROLS)


def _ids(segment: Segment) -> Text:
    text = Text(f"ids {segment.token_ids.tolist()}", style="dim")
    if segment.logprobs is not None:
        text.append(f"\nlogprobs {[round(float(value), 4) for value in segment.logprobs]}")
        spans = ", ".join(f"version {version}: [{start}, {end})" for version, start, end in segment.weight_versions)
        text.append(f"\n{spans}; finish reason {segment.finish_reason}")
    return text


def _rewards(events: Sequence[tuple[str | None, str, float]]) -> Text:
    return Text("  ".join(f"★ {name} {value:+g}" for _, name, value in events), style="bold magenta")
