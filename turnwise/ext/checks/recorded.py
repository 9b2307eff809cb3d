"""Recorded runs: configuration, renderers, tasks and episodes of a directory, for playing its episodes again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from pydantic import BaseModel, ValidationError

from turnwise.agents.roles import MAIN
from turnwise.config import read_yaml
from turnwise.errors import ConfigError, FormatError
from turnwise.evaluation.directory import recorded_sources
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
"""Context length of a model that names none."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """How the episodes of a run or an evaluation were played, as its directory says.

    Attributes:
        path: Its trajectories.
        config: Its ``config.yaml``.
        rollout: Environment, agent and limits; episodes are not forked.
        policy: The first policy.
        model: Directory of that policy's model; in a training run the one that it began with.
        renderer: Of that policy.
        renderers: Renderers of the further policies, trained and frozen, by name.
    """

    path: Path
    config: Mapping[str, Any]
    rollout: RolloutConfig
    policy: str
    model: Path
    renderer: Renderer
    renderers: Mapping[str, Renderer]

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
        config = read_yaml(file.read_text(encoding="utf-8")) or {}
        if config.get("hosted"):
            raise ConfigError(
                f"{path} was recorded as text from a hosted endpoint: without token ids nothing is replayed"
            )
        rollout = load_section(RolloutConfig, config, "rollout", file)
        settings = load_section(RendererConfig, config, "renderer", file)
        trained = config.get("policies") or {MAIN: {"model": {"path": config.get("model")}}}
        policy, model = next((name, Path(section["model"]["path"])) for name, section in trained.items())
        renderers = load_renderers(rollout.frozen, model, settings)
        for name, section in trained.items():
            has_renderer = bool(section.get("renderer"))
            renderer_config = load_section(RendererConfig, section, "renderer", file) if has_renderer else settings
            renderers[name] = renderer_config.load(Path(section["model"]["path"]))
        renderer = renderers.pop(policy)
        return cls(path, config, rollout.model_copy(update={"tree": None}), policy, model, renderer, renderers)

    @property
    def context_length(self) -> int:
        """The context length of the recorded model."""
        longest = model_settings(self.model).get("max_position_embeddings") or UNLIMITED
        return int((self.config.get("inference") or {}).get("max_context") or longest)

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
            ids = {name for entry in trajectories.entries for name in (entry.episode_id, entry.id)}
            names_branch = episode is not None and episode not in ids
            episode_id = re.sub(r"~\d+(?=/\d+\.\d+(?:/|$))", "", episode or "", count=1) if names_branch else episode
            matching = [
                entry
                for entry in trajectories.entries
                if task in (None, entry.task_id) and episode_id in (None, entry.episode_id, entry.id)
            ]
            keys = list(dict.fromkeys((entry.episode_id, entry.attempt) for entry in matching))
            selected = set(keys if number is None else keys[max(0, len(keys) - number) :])
            if not selected:
                of = "" if task is None else f" of task {task!r}"
                raise FormatError(
                    f"{self.path} holds no trajectories{of}"
                    if episode is None
                    else f"{self.path} holds no episode {episode!r}: turnwise view lists them"
                )
            # All sessions of an episode, also where one of them was named.
            entries = [entry for entry in trajectories.entries if (entry.episode_id, entry.attempt) in selected]
            read = [trajectories.read(entry) for entry in entries]
        if episode in ids:
            read = [selected_branch(trajectory) for trajectory in read]
        branches = [branch for trajectory in read for branch in branch_trajectories(trajectory)]
        requested = {branch.episode_id for branch in branches if episode in (branch.episode_id, branch.id)}
        if names_branch and not requested:
            raise FormatError(
                f"{self.path} holds no episode {episode!r}; it was forked into "
                f"{', '.join(dict.fromkeys(branch.episode_id for branch in branches))}"
            )
        return [branch for branch in branches if branch.episode_id in requested] if names_branch else branches

    async def tasks(self) -> dict[str, Task]:
        """Return the tasks of training and evaluation by id. Raises ConfigError."""
        tasks: dict[str, Task] = {}
        sources: Sequence[TasksConfig | None] = recorded_sources(self.config) or [None]
        for source in sources:
            limit = self.config.get("limit")
            loaded = await load_checked(source, self.rollout, self.renderer, limit=limit, max_prompt_tokens=None)
            tasks |= {task.id: task for task in loaded.tasks}
        return tasks


def load_section(kind: type[Section], config: Mapping[str, Any], name: str, file: Path) -> Section:
    """Return a section of a run's configuration. Raises ConfigError where it is missing or of another version."""
    try:
        return kind.model_validate(config[name])
    except (KeyError, ValidationError) as error:
        raise ConfigError(f"{file}: {name} is missing, or of another version of Turnwise: {error}") from error
