"""Rescoring: reward functions, rubrics and judges applied to recorded trajectories, without a model or environment."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import yaml
from rich.console import Console
from rich.progress import Progress

from turnwise.append_file import lock_directory, write_private
from turnwise.config import read_yaml
from turnwise.envs.core import Env
from turnwise.envs.rewards.core import Rubric, as_rubric
from turnwise.envs.rewards.groups import conversation_of
from turnwise.errors import ConfigError, EnvError, FormatError
from turnwise.evaluation.directory import RESCORED, recorded_sources
from turnwise.evaluation.metrics import EvalResult, Summary, summarize, task_tags
from turnwise.evaluation.searched import chosen_members
from turnwise.evaluation.tables import run_file
from turnwise.tasks.core import Task
from turnwise.tasks.mix import load_mix
from turnwise.trajectory import Trajectory, TrajectoryGroup
from turnwise.trajectory_file import TRAJECTORIES, TrajectoryWriter, effective_trajectories, read_trajectories
from turnwise.types import Message

_CONCURRENT = 32


@dataclass(frozen=True, slots=True)
class RescoreSettings:
    """What is rescored, and how.

    Attributes:
        source: Directory of an evaluation or a run, or a file of trajectories.
        out: Directory to write.
        scorer: A shipped reward function, ``pkg.module:name`` of a function or rubric, or a YAML file with the parts of
            a rubric.
        tasks: Source of the tasks, whose data functions may ask for; None: the one in the source's ``config.yaml``.
        partition: Only ``train`` or only ``val``; None for both.
        success_reward: Minimum reward of a success.
    """

    source: Path
    out: Path
    scorer: str
    tasks: str | None = None
    partition: str | None = None
    success_reward: float = 1.0

    def described(self) -> dict[str, Any]:
        """Return what must be equal for a command to continue another one."""
        return {
            "source": str(run_file(self.source).resolve()), "scorer": self.scorer, "tasks": self.tasks,
            "partition": self.partition,
        }  # fmt: skip


class RecordedEnv(Env):
    """The conversation of a recorded episode, for reward functions; nothing else of its environment was kept."""

    def __init__(self, messages: Sequence[Message]) -> None:
        """Hold a conversation."""
        self.conversation = list(messages)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"env.{name} is not recorded: only functions of text, final, messages, task and data can be applied again"
        )


def load_scorer(scorer: str) -> Rubric:
    """Return the rubric that a name, a reference or a YAML file stands for.

    Raises:
        ConfigError: There is no such function or file.
    """
    target: Any = scorer
    if scorer.endswith((".yaml", ".yml")):
        try:
            target = read_yaml(Path(scorer).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"--scorer is {scorer}, which cannot be read: {error}") from error
        if not isinstance(target, dict):
            raise ConfigError(f"--scorer is {scorer}: write the parts of a rubric, name: function, one below the other")
    return as_rubric(target)


def run_rescore(settings: RescoreSettings, *, console: Console | None = None) -> EvalResult:
    """Score the main session of each recorded episode anew, and write the results as an evaluation's directory.

    Its rewards are replaced by those of the scorer, the scorer's metrics are added, and everything else stays: the
    directory can be viewed, exported and compared (``turnwise compare BEFORE AFTER``). An interrupted command is
    continued by the same one: what was scored is not scored again. Episodes that ended in an error stay failed.

    Args:
        settings: What is rescored.
        console: For progress; by default the terminal.

    Returns:
        The metrics. Episodes whose scorer raised an error are counted as failed, and are tried again by the same
        command.

    Raises:
        ConfigError: The scorer cannot be loaded, the output directory holds something else, or a task is missing.
        FormatError: There are no trajectories, or they are damaged.
        EnvError: No episode could be scored.
    """
    console = console or Console(stderr=True)
    rubric = load_scorer(settings.scorer)
    trajectories = _selected_trajectories(settings)
    config = _run_config(settings.source)
    tasks = _tasks(settings, config, {trajectory.task_id for trajectory in trajectories})
    with lock_directory(settings.out, ConfigError, "the rescoring in"):
        _claim_directory(settings)
        file = settings.out / TRAJECTORIES
        scored = read_trajectories(file) if file.exists() else ()
        done = {(trajectory.id, trajectory.attempt) for trajectory in scored}
        started = time.monotonic()
        writer = TrajectoryWriter(file)
        try:
            with Progress(console=console, disable=not console.is_terminal) as progress:
                bar = progress.add_task("rescoring", total=len(trajectories), completed=len(done))
                waiting = [trajectory for trajectory in trajectories if (trajectory.id, trajectory.attempt) not in done]
                errors = asyncio.run(_score_all(waiting, rubric, tasks, writer, lambda: progress.advance(bar)))
        finally:
            writer.close()
        result = _result(settings, config, tasks, list(read_trajectories(file)), errors, time.monotonic() - started)
        if errors and not any(summary.success.episodes for summary in result.parts.values()):
            raise EnvError(f"no episode could be scored; the last error: {errors[-1][1]}")
        result.write(settings.out)
    if errors:
        console.print(
            f"{len(errors)} episodes could not be scored and are not counted, the last one: {errors[-1][1]}. The same "
            "command tries them again",
            style="red",
            markup=False,
            soft_wrap=True,
        )
    return result


def _selected_trajectories(settings: RescoreSettings) -> list[Trajectory]:
    file = run_file(settings.source)
    recorded = [row for _, row in effective_trajectories(file) if settings.partition in (None, row.partition)]
    # Of a search, the selected branch is rescored.
    pairs = zip(recorded, chosen_members(recorded), strict=True)
    selected = [
        replace(branch, id=original.id, episode_id=original.episode_id, search=None) for original, branch in pairs
    ]
    if not selected:
        raise FormatError(f"{file} holds no trajectories of partition {settings.partition or 'train or val'}")
    return selected


def _run_config(source: Path) -> dict[str, Any]:
    """Return ``config.yaml`` of the run whose trajectories are rescored, through earlier rescorings; empty without."""
    run_folder = run_file(source).parent
    while (run_folder / RESCORED).is_file():
        run_folder = Path(orjson.loads((run_folder / RESCORED).read_bytes())["source"]).parent
    file = run_folder / "config.yaml"
    content = read_yaml(file.read_text(encoding="utf-8")) if file.is_file() else None
    return content or {}


def _tasks(settings: RescoreSettings, config: Mapping[str, Any], task_ids: set[str]) -> Mapping[str, Task]:
    """Return the tasks by id, of a configuration perhaps not all: a function that needs a missing one raises."""
    source = settings.tasks
    if source is None:
        return {task.id: task for source in recorded_sources(config) for task in load_mix(source).tasks}
    tasks = {task.id: task for task in load_mix(source).tasks}
    if missing := sorted(task_ids - tasks.keys()):
        raise ConfigError(
            f"--tasks is {source}, which has no task {missing[0]!r} ({len(missing)} are missing that were rolled out): "
            "name the source of the run's tasks"
        )
    return tasks


def _claim_directory(settings: RescoreSettings) -> None:
    """Note what is rescored in the output directory, or check that it is the same."""
    file, description = settings.out / RESCORED, settings.described()
    record = orjson.dumps(description | {"success_reward": settings.success_reward}, option=orjson.OPT_INDENT_2)
    if not file.exists():
        if existing := sorted(path.name for path in settings.out.iterdir()):
            raise ConfigError(f"--out is {settings.out}, which holds {', '.join(existing[:3])}: name another directory")
        write_private(file, record)
        return
    previous = orjson.loads(file.read_bytes())
    differing = sorted(name for name in description if description[name] != previous.get(name))
    # A scorer that scored nothing is no obstacle to the next one.
    if differing and any(map(_is_scored, read_trajectories(settings.out / TRAJECTORIES))):
        raise ConfigError(
            f"--out is {settings.out}, which holds a rescoring with another {', '.join(differing)}: give the command "
            "that began it, or name another directory"
        )
    write_private(file, record)


async def _score_all(
    trajectories: Sequence[Trajectory],
    rubric: Rubric,
    tasks: Mapping[str, Task],
    writer: TrajectoryWriter,
    advance: Any,
) -> list[tuple[Trajectory, str]]:
    """Score and write trajectories; return those whose scorer failed, with its error."""
    room = asyncio.Semaphore(_CONCURRENT)
    errors: list[tuple[Trajectory, str]] = []

    async def score_one(trajectory: Trajectory) -> None:
        async with room:
            try:
                writer.write(await rescored(trajectory, rubric, tasks.get(trajectory.task_id)))
            except EnvError as error:
                errors.append((trajectory, str(error)))
            advance()

    async with asyncio.TaskGroup() as running:
        for trajectory in trajectories:
            running.create_task(score_one(trajectory))
    return errors


def _is_scored(trajectory: Trajectory) -> bool:
    return trajectory.agent == "main" and trajectory.error is None


async def rescored(trajectory: Trajectory, rubric: Rubric, task: Task | None) -> Trajectory:
    """Return a trajectory with the rewards of a rubric; sessions other than ``main`` and failed ones as they are.

    Raises:
        EnvError: A function raised, timed out, returned no finite numbers, or wants data of a task that is not known.
        FormatError: It was recorded without messages.
    """
    if not _is_scored(trajectory):
        return trajectory
    messages = conversation_of(trajectory)
    if not messages:
        raise FormatError(f"trajectory {trajectory.id} was recorded without its messages: nothing can be scored")
    last_message = messages[-1]
    # As when it ended: a message with calls, or none that the model wrote, was not its answer.
    final = last_message if last_message["role"] == "assistant" and not last_message.get("tool_calls") else None
    score = await rubric.score(RecordedEnv(messages), task, final)
    turn = trajectory.segments[-1].turn_id if final is not None else None
    metrics = {name: value for name, value in trajectory.metrics.items() if not name.startswith("rubric/")}
    rewards = [(turn, name, float(value)) for name, value in score.items()]
    return replace(trajectory, rewards=rewards, metrics=metrics | score.metrics)


def _result(
    settings: RescoreSettings,
    config: Mapping[str, Any],
    tasks: Mapping[str, Task],
    scored: Sequence[Trajectory],
    errors: Sequence[tuple[Trajectory, str]],
    seconds: float,
) -> EvalResult:
    # What breaks figures down is of a training run in the section of its evaluations.
    plan = config.get("eval") or config
    # Other tasks than the run's may lack a field.
    fields = [name for name in plan.get("by", ()) if any(name in task.data for task in tasks.values())]
    tags = task_tags(tasks.values(), fields)
    parts: dict[str, dict[str, TrajectoryGroup]] = {"sampled": {}, "greedy": {}}

    def group_of(trajectory: Trajectory) -> TrajectoryGroup:
        part = "greedy" if trajectory.group_id.endswith("greedy") else "sampled"
        source = tasks[trajectory.task_id].source if trajectory.task_id in tasks else None
        new = TrajectoryGroup(trajectory.group_id, trajectory.task_id, [], source=source)
        return parts[part].setdefault(trajectory.group_id, new)

    # Of an episode that was tried again, the last attempt counts.
    attempts = {member.episode_id: member.attempt for member in sorted(scored, key=lambda member: member.attempt)}
    for member in scored:
        if member.attempt == attempts[member.episode_id]:
            group_of(member).trajectories.append(member)
    for member, _ in errors:
        group_of(member).failed += 1

    def summary(name: str, pass_k: Sequence[int] = ()) -> Summary | None:
        groups, answer = list(parts[name].values()), plan.get("answer")
        if not groups:
            return None
        return summarize(groups, success_reward=settings.success_reward, pass_k=pass_k, answer=answer, tags=tags)

    return EvalResult(summary("sampled", plan.get("pass_k", ())), summary("greedy"), seconds)
