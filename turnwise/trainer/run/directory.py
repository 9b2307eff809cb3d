"""The directory of a run: its lock, its files, and the state shared by successive processes."""

from __future__ import annotations

import contextlib
import hashlib
import resource
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from turnwise.agents.roles import MAIN
from turnwise.append_file import lock_directory, replace_file, write_private, writing
from turnwise.chat.model_dir import trained_digest
from turnwise.config import differences, dump_config, load_config
from turnwise.engine.numerics.self_check import capability
from turnwise.errors import CheckpointError, ConfigError, DiskError, FormatError, TrainError, shown
from turnwise.gateway.frozen import load_renderers
from turnwise.model.core import Renderer
from turnwise.recorder.ledger import LEDGER
from turnwise.rollout.audit import BATCHES, RUN_FILE
from turnwise.rollout.journal.journal import Journal
from turnwise.rollout.journal.state import JOURNAL
from turnwise.rollout.managers import check_manager
from turnwise.rollout.preflight import format_lines, load_checked
from turnwise.rollout.records import BatchWriter
from turnwise.rollout.replay.config import check_replay
from turnwise.tasks.core import Task
from turnwise.tasks.order import TaskOrder
from turnwise.trainer.algorithms.credit import load_credit
from turnwise.trainer.config.policy import MACHINE_OF_MODEL
from turnwise.trainer.config.train import CheckpointConfig, TrainConfig
from turnwise.trainer.learn.distill import check_teacher
from turnwise.trainer.learn.learner import find_engine
from turnwise.trainer.observe.loggers import LoggedRun
from turnwise.trainer.observe.metrics import meaning
from turnwise.trainer.observe.run_log import RunLog, check_loggers
from turnwise.trainer.observe.timeline import Timeline
from turnwise.trainer.observe.warnings import Diagnostics
from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState, load_state, policy_folder, restore_rng
from turnwise.trainer.run.hooks import Hooks, load_hooks
from turnwise.trainer.run.machine import check_machine
from turnwise.trainer.run.policies import LoadedPolicy, check_layout, check_shared_servers
from turnwise.trainer.run.task_scheduler import open_tasks
from turnwise.trajectory_file import TRAJECTORIES

CHECKPOINTS = "checkpoints"
_MOST_NAMED = 4

# What may differ between the parts of a run: how far, how often and with what machine, but not what is learned.
_FREE_SECTIONS = (
    *("runs", "name", "steps", "budget", "eval", "checkpoint"),
    *("inference", "placement", "ray", "layout", "loggers", "custom"),
)
_FREE_KEYS: dict[str, Any] = {
    "replay": {"memory_mb"},
    "batch": {"max_tokens_per_micro_batch"},
    "rollout": {
        **dict.fromkeys(("concurrency", "retries", "gateway", "address"), True),
        "remote": {"key_file"},
        "sandbox": {"max_starts", "prewarm"},
        "frozen": {"__all__": {"inference"}},
    },
}


def config_digest(config: TrainConfig) -> str:
    """Return a digest of the configuration keys that a resumed run must not change."""
    return hashlib.blake2b(
        orjson.dumps(_resumable_config(config), option=orjson.OPT_SORT_KEYS), digest_size=16
    ).hexdigest()


def _resumable_config(config: TrainConfig) -> dict[str, Any]:
    free: dict[str, Any] = dict.fromkeys(_FREE_SECTIONS, True)
    machine: dict[str, Any] = {
        name: {
            "engine_options": set(find_engine(policy.engine).placement_options),
            "inference": True,
            "served_by": True,
            "weight_transport": True,
            "model": set(MACHINE_OF_MODEL),
        }
        for name, policy in config.policies.items()
    }
    return config.model_dump(mode="json", exclude={**free, **_FREE_KEYS, "policies": machine})


def changed_keys(file: Path, config: TrainConfig) -> str:
    """Return the keys that a resumed run must not change and that differ from a saved configuration, as a sentence.

    Args:
        file: The saved configuration; the result is empty where this version cannot load it.
        config: The configuration to resume with.
    """
    try:
        saved, now = _resumable_config(load_config(TrainConfig, file)), _resumable_config(config)
    except ConfigError:
        return ""
    keys = [f"{key} was {shown(old)} and is {shown(new)}" for key, old, new in differences("", saved, now)]
    more = f" and {len(keys) - _MOST_NAMED} more" if len(keys) > _MOST_NAMED else ""
    return f": {', '.join(keys[:_MOST_NAMED])}{more}" if keys else ""


class RunDirectory:
    """The directory of one run.

    ``run.json`` holds ``id`` (unique among runs of this name), ``parts`` (processes so far), ``config_digest``,
    ``first_eval`` with the section ``eval`` that it was made by, ``wall_s`` and ``cpu_s``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path / RUN_FILE

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Create and lock the directory for a block. Raises TrainError if another process works in it."""
        return lock_directory(self.path, TrainError, "the run")

    def resume_point(
        self, store: CheckpointStore, config: TrainConfig, step: int | None, say: Callable[[str], object]
    ) -> tuple[Path | None, TrainerState]:
        """Return the checkpoint to resume from (the newest intact one, or that of ``step``) and its state; None for a
        new run.

        Raises:
            CheckpointError: The run has another configuration, no checkpoint is intact, or it lacks a file besides.
            FormatError: ``run.json`` cannot be read.
        """
        self.check_config(config)
        if step is None:
            latest, problems = store.newest()
        elif step in (steps := store.steps()):
            latest, problems = store.path(step), []
        else:
            raise CheckpointError(
                f"--resume-step is {step}, but {self.path} has no checkpoint of that step; it has "
                f"{', '.join(map(str, steps)) or 'none'}"
            )
        if latest is None and not problems:
            return None, TrainerState(0)
        if latest is None:
            raise CheckpointError(
                f"{problems[0]}; no other one is intact: restore the files from a copy, or start over with --fresh"
            )
        with self.with_remedy(store, latest):
            state = load_state(latest, contents=step is not None)
        self._check(latest, state.config_digest, config)
        self.check_records()
        for problem in problems:
            say(
                f"warning: {problem}; the run resumes from the intact {latest.name} before it, and the damaged one is "
                f"set aside beside it as damaged_step_..., to be removed"
            )
        return latest, state

    def check_config(self, config: TrainConfig) -> None:
        """Check that the run, if there is one, has the same configuration. Raises CheckpointError."""
        self._check(self.path, self.read().get("config_digest") or config_digest(config), config)

    def check_records(self) -> None:
        """Check that what earlier processes of a run with a checkpoint recorded is there. Raises CheckpointError."""
        for name in (RUN_FILE, JOURNAL, TRAJECTORIES, BATCHES, LEDGER):
            if not (self.path / name).is_file():
                raise CheckpointError(
                    f"{self.path / name} is missing, which records what the run's checkpoints were trained on: restore "
                    "it from a copy, or start over with --fresh"
                )

    @contextlib.contextmanager
    def with_remedy(self, store: CheckpointStore, checkpoint: Path | None) -> Iterator[None]:
        """Add a remedy to the error of a checkpoint that cannot be resumed from."""
        try:
            yield
        except (CheckpointError, TrainError) as error:
            if checkpoint is None:
                raise
            steps = ", ".join(str(step) for step in store.steps() if store.path(step) < checkpoint) or "none"
            raise CheckpointError(
                f"{error}; resume from an earlier one with --resume-step ({steps}), restore the files from a copy, or "
                "start over with --fresh"
            ) from error

    def check_removable(self, config: TrainConfig) -> None:
        """Reject a fresh start whose model is in the directory to remove. Raises ConfigError."""
        named: dict[str, object] = {
            f"rollout.frozen.{name}.model": frozen.model for name, frozen in config.rollout.frozen.items()
        }
        for name, policy in config.policies.items():
            kl = (policy.algorithm or config.algorithm).kl
            named |= {
                f"policies.{name}.model.path": policy.model.path,
                f"policies.{name}.model.lora.path": policy.model.lora and policy.model.lora.path,
                f"policies.{name}.critic.path": policy.critic and policy.critic.path,
                "algorithm.kl.reference": kl and kl.reference,
            }
        for key, model in named.items():
            if isinstance(model, Path) and self.path.resolve() in (model.resolve(), *model.resolve().parents):
                raise ConfigError(
                    f"{key} is {model}, inside the run {self.path} that --fresh would remove: choose another name, or "
                    "copy the model elsewhere"
                )

    def begin(self, config: TrainConfig, digest: str, *, fresh: bool) -> int:
        """Write the configuration, removing an earlier run if ``fresh``; return the number of earlier processes."""
        if fresh:
            for entry in self.path.iterdir():
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        with writing(self.path / "config.yaml"):
            write_private(self.path / "config.yaml", dump_config(config))
        notes = self.read()
        part = int(notes.get("parts", 0))
        self.note(id=notes.get("id") or uuid.uuid4().hex[:12], parts=part + 1, config_digest=digest)
        return part

    def read(self) -> dict[str, Any]:
        """Return the contents of ``run.json``, empty if missing.

        Raises:
            FormatError: It cannot be read.
        """
        if not self._file.exists():
            return {}
        try:
            record: dict[str, Any] = orjson.loads(self._file.read_bytes())
        except orjson.JSONDecodeError as error:
            raise FormatError(
                f"{self._file} is not JSON: {error}; restore it from a copy, start over with --fresh, or write "
                f'{{"parts": N}} into it, with N above each "part" in {JOURNAL}'
            ) from error
        return record

    def note(self, **values: Any) -> None:
        """Atomically update values of ``run.json``. Raises DiskError where the disk refuses."""
        with writing(self._file):
            replace_file(self._file, orjson.dumps({**self.read(), **values}, option=orjson.OPT_INDENT_2) + b"\n")

    def spend(self, wall_s: float, cpu_s: float) -> None:
        """Add the cost of a process to that of earlier ones; killed processes are not counted."""
        notes = self.read()
        self.note(wall_s=notes.get("wall_s", 0.0) + wall_s, cpu_s=notes.get("cpu_s", 0.0) + cpu_s)

    def _check(self, what: Path, digest: str, config: TrainConfig) -> None:
        if digest != config_digest(config):
            saved = self.path / "config.yaml"
            raise CheckpointError(
                f"{what} was trained with another configuration{changed_keys(saved, config)}; resume it with the one "
                f"in {saved}, choose another name, or start over with --fresh (only "
                f"{', '.join(_FREE_SECTIONS)}, and what decides speed and memory alone, such as rollout.concurrency, "
                "batch.max_tokens_per_micro_batch and model.threads, may differ)"
            )


def check_template(checkpoint: Path, renderer: Renderer, policy: str = MAIN) -> None:
    """Check that a policy resumes with the chat template of its checkpoint.

    Args:
        checkpoint: The policy's folder of the checkpoint.
        renderer: The policy's renderer.
        policy: Its name, for messages.

    Raises:
        CheckpointError: It was trained with another one.
    """
    trained, now = trained_digest(checkpoint), renderer.describe().get("template")
    if trained is not None and trained != now:
        raise CheckpointError(
            f"{checkpoint} was trained with another chat template (SHA-256 {trained[:12]}...) than the run would "
            f"resume with ({str(now)[:12]}...): make renderer.chat_template, or the template of "
            f"policies.{policy}.model.path, the one that is saved as {checkpoint / 'chat_template.jinja'}; or choose "
            "another name, or start over with --fresh"
        )


def open_store(run: Path, config: CheckpointConfig) -> CheckpointStore:
    """Open the checkpoints of a run.

    Raises:
        ConfigError: Nothing logs the metric of ``best``.
    """
    if config.best is not None and not config.best.metric.startswith("eval/") and meaning(config.best.metric) is None:
        raise ConfigError(
            f"checkpoint.best.metric is {config.best.metric!r}, which nothing logs: name a metric of docs/metrics.md, "
            "or eval/sampled or eval/greedy"
        )
    return CheckpointStore(run / CHECKPOINTS, keep=config.keep, best=config.best)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and its terminated children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass(frozen=True, slots=True)
class Start:
    """The inputs of a new or resumed run."""

    store: CheckpointStore
    state: TrainerState
    policies: dict[str, LoadedPolicy]
    tasks: TaskOrder
    eval_tasks: list[Task]
    frozen: dict[str, Renderer]
    began: float
    hooks: list[type[Hooks]]


async def read_start(
    config: TrainConfig, home: RunDirectory, console: Console, *, fresh: bool, resume_step: int | None
) -> Start:
    """Read and validate all inputs, without side effects."""
    began = time.monotonic()
    check_manager(config.rollout, config.custom)
    check_replay(config.replay, config.replay_facts)
    for algorithm in config.algorithms.values():
        load_credit(algorithm.credit)
    check_loggers(config.loggers)
    hooks = load_hooks(config.hooks)
    digest = config_digest(config)
    store = open_store(home.path, config.checkpoint)
    if fresh:
        home.check_removable(config)
        latest, state = None, TrainerState(0)
    else:
        warn = partial(console.print, style="yellow", highlight=False, markup=False, soft_wrap=True)
        latest, state = home.resume_point(store, config, resume_step, warn)
    state.config_digest = digest
    for host, names in config.served.items():
        check_shared_servers(config, host, names)
        check_layout(config, host)
    renderers = {name: _renderer(config, name, latest, console) for name in config.policies}
    renderer = next(iter(renderers.values()))
    frozen = load_renderers(config.rollout.frozen, Path(config.policy.model.path), config.renderer)
    for name, algorithm in config.algorithms.items():
        check_teacher(algorithm.distill, config.rollout.frozen, Path(config.policies[name].model.path))
    tasks, reports = await open_tasks(config, renderer, state)
    lines = [report.line for report in reports]
    eval_tasks: list[Task] = []
    if config.eval is not None:
        plan = config.eval
        held_out = await load_checked(
            plan.tasks, config.rollout, renderer, limit=plan.limit, max_prompt_tokens=plan.max_prompt_tokens
        )
        eval_tasks, reports = held_out.tasks, [*reports, *held_out.reports]
        lines += [f"held-out {report.line}" for report in held_out.reports]
    for line in lines:
        console.print(line, highlight=False, markup=False)
    with home.with_remedy(store, latest):
        policies = {
            name: LoadedPolicy.load(name, config, renderer, latest, state.kl_coefs.get(name))
            for name, renderer in renderers.items()
        }
        if latest is not None:
            restore_rng(state.rng)
            console.print(f"resuming {home.path} at step {state.step}", highlight=False)
    return Start(store, state, policies, tasks, eval_tasks, frozen, began, hooks)


def _renderer(config: TrainConfig, name: str, checkpoint: Path | None, console: Console) -> Renderer:
    """Return the renderer of a trained policy, after checks of its machine and of the checkpoint's template."""
    alone, whose = config.of_policy(name), f"{name}: " if len(config.policies) > 1 else ""
    for warning in check_machine(alone.policy, alone.inference, key=f"policies.{name}.model"):
        console.print(f"warning: {whose}{warning}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    renderer = alone.renderer.load(alone.policy.model.path)
    for line in format_lines(renderer):
        console.print(f"{whose}{line}", highlight=False, markup=False, soft_wrap=True)
    if checkpoint is not None:
        check_template(policy_folder(checkpoint, name, config.policies), renderer, name)
    return renderer


@dataclass
class RunFiles:
    """The files that a run writes.

    Attributes:
        journal: Finished episodes, and the steps that got them.
        batches: Trained rows.
        metrics: The log.
        diagnostics: Findings besides metrics.
        timeline: Spans of work.
    """

    journal: Journal
    batches: BatchWriter
    metrics: RunLog
    diagnostics: Diagnostics
    timeline: Timeline


def open_files(
    config: TrainConfig, directory: Path, start: Start, part: int, console: Console, stack: contextlib.AsyncExitStack
) -> RunFiles:
    """Open the files of a run; ``stack`` closes them, and ``console`` gets notices of failed loggers and torn files."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    cut, resumed_step = config.batch.max_tokens_per_row, start.state.step
    logged = LoggedRun(
        config.name, RunDirectory(directory).read()["id"], directory, config.model_dump(mode="json"), resumed_step
    )
    exact = any(policy.config.inference.exact for policy in start.policies.values())
    kernels = capability() if exact else None
    files = RunFiles(
        Journal.open(directory, part=part, after_step=resumed_step, say=say),
        BatchWriter(directory / BATCHES, part=part, after_step=resumed_step, max_tokens=cut, kernels=kernels),
        RunLog.open(logged, config.loggers, console, part=part),
        Diagnostics(directory, {name: (policy.config, policy.renderer) for name, policy in start.policies.items()}),
        Timeline(directory / "timeline.jsonl", part=part, mode=config.mode),
    )
    for file in (files.journal, files.batches, files.metrics, files.diagnostics, files.timeline):
        stack.callback(file.close)
    return files


def at_exit(stack: contextlib.AsyncExitStack, write: Callable[[], Awaitable[None]]) -> None:
    """Register a write for the end of the run.

    A disk error is suppressed if another one already ended the run; else it is combined with the run's error.
    """

    async def leave(kind: object, error: BaseException | None, trace: object) -> None:
        del kind, trace
        try:
            await write()
        except (CheckpointError, DiskError) as refused:
            if isinstance(error, (CheckpointError, DiskError)):
                return
            if isinstance(error, Exception):
                message = f"the run ended with {type(error).__name__}: {error}; besides, {refused}"
                raise type(refused)(message) from error
            raise

    stack.push_async_exit(leave)
