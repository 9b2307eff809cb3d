"""Recorded runs: configuration, renderers, tasks and episodes of a directory, for playing its episodes again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from turnwise.agents.roles import MAIN
from turnwise.config import read_yaml
from turnwise.errors import ConfigError, FormatError
from turnwise.evaluation.tables import run_file
from turnwise.gateway.frozen import load_renderers
from turnwise.inference.config import RendererConfig
from turnwise.inference.engines import model_settings
from turnwise.model.core import Renderer
from turnwise.recorder.branches import branch_trajectories, selected_branch
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.preflight import load_checked
from turnwise.tasks.config import TasksConfig
from turnwise.tasks.core import Task
from turnwise.trajectory import Trajectory
from turnwise.trajectory_file import TrajectoryFile

Section = TypeVar("Section", bound=BaseModel)

UNLIMITED: Final = 1_000_000
"""Context length where nothing says it."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What a run's or an evaluation's directory says about how its episodes were played.

    Attributes:
        path: Its trajectories.
        said: Its ``config.yaml``.
        rollout: Environment, agent and limits; episodes are not forked.
        policy: The first policy.
        model: Directory of that policy's model; in a training run the one that it began with.
        renderer: Of that policy.
        others: Renderers of the further policies, trained and frozen, by name.
    """

    path: Path
    said: Mapping[str, Any]
    rollout: RolloutConfig
    policy: str
    model: Path
    renderer: Renderer
    others: Mapping[str, Renderer]

    @classmethod
    def load(cls, source: Path) -> Self:
        """Read a directory.

        Raises:
            ConfigError: There is no usable configuration, or its models are missing.
            FormatError: There are no trajectories.
        """
        path = run_file(source)
        file = path.with_name("config.yaml")
        if not file.is_file():
            raise ConfigError(f"{file} is missing: a replay needs the environment, agent and tasks of the run")
        said = read_yaml(file.read_text(encoding="utf-8")) or {}
        if said.get("hosted"):
            raise ConfigError(
                f"{path} was recorded as text from a hosted endpoint: without token ids nothing is replayed"
            )
        rollout = load_section(RolloutConfig, said, "rollout", file)
        settings = load_section(RendererConfig, said, "renderer", file)
        trained = said.get("policies") or {MAIN: {"model": {"path": said.get("model")}}}
        policy, model = next((name, Path(each["model"]["path"])) for name, each in trained.items())
        others = load_renderers(rollout.frozen, model, settings)
        for name, each in trained.items():
            own = load_section(RendererConfig, each, "renderer", file) if each.get("renderer") else settings
            others[name] = own.load(Path(each["model"]["path"]))
        renderer = others.pop(policy)
        return cls(path, said, rollout.model_copy(update={"tree": None}), policy, model, renderer, others)

    @property
    def context_length(self) -> int:
        """The context length of the recorded model."""
        longest = model_settings(self.model).get("max_position_embeddings") or UNLIMITED
        return int((self.said.get("inference") or {}).get("max_context") or longest)

    def episodes(
        self, *, number: int | None = None, task: str | None = None, episode: str | None = None
    ) -> list[Trajectory]:
        """Return the trajectories of episodes; forked ones as one episode for each branch.

        Args:
            number: The newest so many; None for all.
            task: Only those of this task.
            episode: Only the one with this id, or with a trajectory of this id, of a searched one the chosen way alone;
                of a forked one, ``~n`` before its member names the n-th branch.

        Raises:
            FormatError: There are none, or they are damaged.
        """
        with TrajectoryFile(self.path) as trajectories:
            known = {each for entry in trajectories.entries for each in (entry.episode_id, entry.id)}
            way = episode is not None and episode not in known
            named = re.sub(r"~\d+(?=/\d+\.\d+(?:/|$))", "", episode or "", count=1) if way else episode
            wanted = [
                entry
                for entry in trajectories.entries
                if task in (None, entry.task_id) and named in (None, entry.episode_id, entry.id)
            ]
            found = list(dict.fromkeys((entry.episode_id, entry.attempt) for entry in wanted))
            chosen = set(found if number is None else found[max(0, len(found) - number) :])
            if not chosen:
                of = "" if task is None else f" of task {task!r}"
                raise FormatError(
                    f"{self.path} holds no trajectories{of}"
                    if episode is None
                    else f"{self.path} holds no episode {episode!r}: turnwise view lists them"
                )
            # All sessions of an episode, also where one of them was named.
            read = [
                trajectories.read(each) for each in trajectories.entries if (each.episode_id, each.attempt) in chosen
            ]
        if episode in known:
            read = [selected_branch(each) for each in read]
        ways = [branch for each in read for branch in branch_trajectories(each)]
        asked = {each.episode_id for each in ways if episode in (each.episode_id, each.id)}
        if way and not asked:
            raise FormatError(
                f"{self.path} holds no episode {episode!r}; it was forked into "
                f"{', '.join(dict.fromkeys(each.episode_id for each in ways))}"
            )
        return [each for each in ways if each.episode_id in asked] if way else ways

    async def tasks(self) -> dict[str, Task]:
        """Return the tasks of training and evaluation by id. Raises ConfigError."""
        sources = [each for each in (self.said.get("tasks"), (self.said.get("eval") or {}).get("tasks")) if each]
        tasks: dict[str, Task] = {}
        for each in sources or [None]:
            parsed = None if each is None else TypeAdapter(TasksConfig).validate_python(each)
            limit = self.said.get("limit")
            loaded = await load_checked(parsed, self.rollout, self.renderer, limit=limit, max_prompt_tokens=None)
            tasks |= {one.id: one for one in loaded.tasks}
        return tasks


def load_section(kind: type[Section], said: Mapping[str, Any], name: str, file: Path) -> Section:
    """Return a section of a run's configuration. Raises ConfigError where it is missing or of another version."""
    try:
        return kind.model_validate(said[name])
    except (KeyError, ValidationError) as error:
        raise ConfigError(f"{file}: {name} is missing, or of another version of Turnwise: {error}") from error
