"""Runs to make reports of, and a reader of the pages that are made."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.trajectory import Segment, Trajectory
from turnwise.trajectory_file import TrajectoryWriter
from turnwise.types import StopReason, as_ids


def unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text), -zlib.MAX_WBITS))


@dataclass
class Page(HTMLParser):
    """A page as a browser sees it: its elements, and the texts of those that hold any."""

    path: Path
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    scripts: dict[str, str] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)
    title: str = ""

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._text: list[str] = []
        self.feed(self.path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._text = []

    def handle_data(self, data: str) -> None:
        self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self.title = "".join(self._text)
        if tag == "script":
            name = self.tags[-1][1].get("id")
            if name is None:
                self.code.append("".join(self._text))
            else:
                self.scripts[name] = "".join(self._text)

    @property
    def head(self) -> Any:
        return json.loads(self.scripts["head"])

    def part(self, name: str, run: int = 0) -> Any:
        return unpack(self.scripts[f"run-{run}-{name}"])

    def rows(self, run: int = 0) -> list[dict[str, Any]]:
        table = self.part("table", run)
        return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]

    def record(self, trajectory: str, run: int = 0) -> Any:
        """Return what the page shows of a trajectory, the way its script finds it; None if it is left out."""
        [row] = [row for row in self.rows(run) if row["id"] == trajectory]
        return None if row["chunk"] is None else self.part(f"chunk-{row['chunk']}", run)[row["place"]]


def played(name: str, task: str = "task", answer: str = "zoe", **changes: Any) -> Trajectory:
    """Return a trajectory of one turn whose reward is in the turn."""
    segments = [
        Segment(0, -1, "context", as_ids([1, 2]), ({"role": "user", "content": "Who?"},)),
        Segment(
            1, 0, "sampled", as_ids([3, 4]), ({"role": "assistant", "content": answer},), "t0",
            np.array([-0.25, -1.5], np.float32), ((5, 0, 2),), "stop",
        ),
    ]  # fmt: skip
    values: dict[str, Any] = {"rewards": [("t0", "score", 1.0)], "stop_reason": StopReason.COMPLETED}
    group = changes.pop("group_id", f"g-{task}")
    return Trajectory(name, changes.pop("episode_id", name), group, task, segments=segments, **(values | changes))


def write_run(folder: Path, trajectories: Iterable[Trajectory]) -> Path:
    folder.mkdir(exist_ok=True)
    writer = TrajectoryWriter(folder / "trajectories.twz")
    for trajectory in trajectories:
        writer.write(trajectory)
    writer.close()
    return folder


def write_metrics(folder: Path, *records: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder
