"""``turnwise train``: a run's directory, its parts, and how it starts, stops and resumes.

Owns: :class:`TrainRun` (what a loop works with) and :func:`run_train`. Refuses: the order of a step, which is the
loop's (``loops/``).

A run directory holds ``config.yaml``, ``run.json`` (how many processes worked on it and what they cost, the first
evaluation, a digest of what they share),
``metrics.jsonl``, ``trajectories.jsonl``, ``ledger.jsonl``, ``batches.jsonl``, ``checkpoints/``, ``logs/`` and at the
end ``summary.json``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import resource
import shutil
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from turnwise.config import dump_config
from turnwise.errors import CheckpointError, ConfigError, FormatError, InferenceError, RequestRefused, TrainError
from turnwise.evaluation.result import EvalResult, result_table
from turnwise.evaluation.runner import evaluate
from turnwise.inference.core import Renderer
from turnwise.inference.fleet import Fleet
from turnwise.inference.ledger import LedgerClient
from turnwise.inference.renderer import save_format
from turnwise.rollout.batches import BatchWriter
from turnwise.rollout.core import RolloutParts
from turnwise.rollout.producer import RolloutProducer
from turnwise.rollout.writer import TrajectoryWriter
from turnwise.tasks import Task, load_tasks
from turnwise.trainer.checkpoint import CheckpointStore, TrainerState, capture_rng, load_state, restore_rng
from turnwise.trainer.config import TrainConfig
from turnwise.trainer.data import TaskStream
from turnwise.trainer.learner import Learner
from turnwise.trainer.loggers import JSONLLogger, LiveDisplay
from turnwise.trainer.metrics import checked
from turnwise.trainer.replay import LocalReplayBuffer
from turnwise.trainer.weight_sync.core import WeightWriter
from turnwise.trainer.weight_sync.shared_memory import SharedMemoryWriter
from turnwise.trajectory import Trajectory

COLUMNS = {
    "reward": "reward/mean",
    "informative": "reward/informative",
    "turns": "rollout/turns",
    "success": "eval/sampled",
    "greedy": "eval/greedy",
    "tok/s": "time/sampled_tokens_per_s",
    "gap": "gap/max",
    "s": "time/step_s",
}
CHECKPOINTS = "checkpoints"
# What may differ between the parts of a run: how far, how often and with what machine, but not what is learned.
_FREE_SECTIONS = ("runs", "name", "steps", "eval", "checkpoint", "inference", "custom")


@dataclass(slots=True)
class TrainSummary:
    """What a run leaves, as ``summary.json`` holds it.

    Attributes:
        directory: The run directory.
        steps: Train steps done.
        before: Figures of the first evaluation: ``{"sampled": {...}, "greedy": {...}}``.
        after: Figures of the last one.
        wall_s: Seconds, all parts of the run together.
        cpu_s: CPU seconds of all its processes.
    """

    directory: Path
    steps: int
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    wall_s: float
    cpu_s: float

    def write(self) -> None:
        """Write ``summary.json``."""
        record = {
            "steps": self.steps,
            "before": self.before,
            "after": self.after,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
        }
        (self.directory / "summary.json").write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2) + b"\n")


@dataclass(slots=True)
class TrainRun:
    """The parts of a run. Loops read them, and move ``state`` on.

    Attributes:
        config: What was asked for.
        directory: Where everything is written.
        learner: The trained policy.
        renderer: Messages to ids and back.
        tasks: What is trained on, in order.
        eval_tasks: Held-out tasks; empty where nothing is evaluated.
        fleet: The inference servers.
        buffer: Where finished groups wait.
        manager: Makes groups of tasks.
        writer: How weights reach the servers.
        batches: Records what was trained.
        store: Checkpoints.
        metrics: The log.
        display: What a person sees.
        state: Where the run stands.
        first_eval: Figures of the first evaluation.
        last_eval: Figures of the last one.
        last_error: What ended the last episode that ended in an error.
    """

    config: TrainConfig
    directory: Path
    learner: Learner
    renderer: Renderer
    tasks: TaskStream
    eval_tasks: list[Task]
    fleet: Fleet
    buffer: LocalReplayBuffer
    manager: RolloutProducer
    writer: WeightWriter
    batches: BatchWriter
    store: CheckpointStore
    metrics: JSONLLogger
    display: LiveDisplay
    state: TrainerState
    first_eval: dict[str, Any] | None = None
    last_eval: dict[str, Any] | None = None
    last_error: str | None = None
    saved_step: int = 0
    torn: bool = False
    shown: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def updating(self, step: int) -> Iterator[None]:
        """Wrap the update of a step: after it the run stands at that step, and what failed inside is not saved."""
        self.torn = True
        yield
        self.state.step = step
        self.state.epoch, self.state.position = self.tasks.epoch, self.tasks.position
        self.torn = False

    async def sync_weights(self) -> None:
        """Bring the learner's weights to the servers, as the version of this step.

        A server that dies meanwhile is started again, and then gets them too.

        Raises:
            InferenceError: A server refuses them, or died a second time.
        """
        try:
            await self._write_weights()
        except RequestRefused:
            raise
        except InferenceError as error:
            await self.fleet.recover(error)
            await self._write_weights()
        self.state.weight_version = self.state.step

    async def _write_weights(self) -> None:
        await self.writer.sync(self.learner.export_weights(), self.fleet.replicas, self.state.step)

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the step that the run stands at."""
        self.state.metrics = checked(metrics)
        self.metrics.log({"kind": "train", "step": self.state.step, **self.state.metrics})
        self.display.step(self.state.step, {**self.state.metrics, **self.shown})
        self.shown = {}

    async def evaluate(self, label: str) -> EvalResult | None:
        """Evaluate on the held-out tasks and log the figures; None where there are none."""
        plan = self.config.eval
        if plan is None or not self.eval_tasks:
            return None
        self.display.status(f"{label}: evaluating {len(self.eval_tasks)} tasks")
        result = await evaluate(self.manager, plan, tasks=self.eval_tasks, label=label)
        self.last_eval = result.to_json()
        if self.first_eval is None:
            self.first_eval = self.last_eval
            _write_json(self.directory / "run.json", {**_read_run(self.directory), "first_eval": self.first_eval})
        self.metrics.log({"kind": "eval", "step": self.state.step, "label": label, **self.last_eval})
        self.shown = {f"eval/{name}": summary.success.mean for name, summary in result.parts.items()}
        return result

    def save(self) -> None:
        """Write a checkpoint of the step that the run stands at."""
        self.state.rng = capture_rng()
        self.store.save(
            self.state,
            lambda directory: self.learner.save(directory, extra=lambda model: save_format(self.renderer, model)),
        )
        self.saved_step = self.state.step


def run_train(config: TrainConfig, *, fresh: bool = False, console: Console | None = None) -> TrainSummary:
    """Train, from the beginning or from the last checkpoint of the run directory.

    Ctrl-C (or SIGTERM) ends the run in order: a checkpoint of the last finished step is written, and no process is
    left behind. The same command goes on from there.

    Args:
        config: What to do.
        fresh: Remove an earlier run of this name first, once it is known that this one can start.
        console: Where the display goes; by default standard error.

    Raises:
        TurnwiseError: What is wrong with the configuration, the data, the model or the run directory, before any
            work starts; or why training cannot go on.
        KeyboardInterrupt: The run was interrupted; it can be resumed.
    """
    console = console or Console(stderr=True)
    try:
        return asyncio.run(_run(config, fresh, console))
    except (KeyboardInterrupt, asyncio.CancelledError):
        # Of SIGTERM asyncio says that the task was cancelled; to a caller it is an interrupt like Ctrl-C.
        steps = CheckpointStore(config.runs / config.name / CHECKPOINTS).steps()
        found = f"the same command goes on after step {steps[-1]}" if steps else "no step was finished"
        console.print(f"interrupted: {found}", highlight=False)
        raise KeyboardInterrupt from None


async def _run(config: TrainConfig, fresh: bool, console: Console) -> TrainSummary:
    from turnwise.trainer.loops.sync import train_sync

    directory = config.runs / config.name
    with _sigterm_cancels():
        async with open_run(config, directory, console, fresh=fresh) as run:
            if run.state.step == 0:
                await run.evaluate("step-0")
            await train_sync(run)
            result = await run.evaluate(f"step-{run.state.step}-final")
    spent = _read_run(directory)
    summary = TrainSummary(directory, run.state.step, run.first_eval, run.last_eval, spent["wall_s"], spent["cpu_s"])
    summary.write()
    if result is not None:
        console.print(result_table(result, f"{config.name} after {run.state.step} steps"))
    return summary


@contextlib.asynccontextmanager
async def open_run(
    config: TrainConfig, directory: Path, console: Console, *, fresh: bool = False
) -> AsyncIterator[TrainRun]:
    """Assemble a run, and take it apart whatever happens.

    On the way out, also after an interrupt or an error, the last finished step gets a checkpoint, servers and
    environments are closed, and the ledger is marked as complete. Nothing is written, and no earlier run is removed,
    before configuration, tasks and model were read.

    Args:
        config: What to do.
        directory: The run directory.
        console: Where the display goes.
        fresh: Begin anew, whatever the directory holds.
    """
    started = time.monotonic()
    digest = config_digest(config)
    store = CheckpointStore(directory / CHECKPOINTS, keep=config.checkpoint.keep)
    if fresh:
        _check_removable(directory, config)
        latest, state = None, TrainerState(0)
    else:
        latest, state = _resume_point(directory, store, digest)
    state.config_digest = digest
    policy = config.policy
    renderer = config.renderer.load(policy.model.path)
    console.print(f"chat format: {renderer.describe()['format']} ({renderer.describe()['proof']})", highlight=False)
    tasks = TaskStream(
        load_tasks(config.tasks, limit=config.task_limit),
        seed=config.seed,
        shuffle=config.shuffle,
        epoch=state.epoch,
        position=state.position,
    )
    eval_tasks = [] if config.eval is None else load_tasks(config.eval.tasks, limit=config.eval.limit)
    learner = Learner.create(policy, config.optimizer_steps, model_path=latest)
    if latest is not None:
        learner.load(latest)
        restore_rng(state.rng)
        console.print(f"resuming {directory} at step {state.step}", highlight=False)
    part = _begin_part(directory, config, digest, fresh=fresh)

    async with contextlib.AsyncExitStack() as stack:
        # Called last, when the servers have ended: then their CPU time is that of children.
        stack.callback(_note_spent, directory, started)
        trajectories = TrajectoryWriter(directory / "trajectories.jsonl")
        stack.callback(trajectories.close)
        batches = BatchWriter(
            directory / "batches.jsonl", part=part, after_step=state.step, max_tokens=config.batch.max_tokens_per_row
        )
        stack.callback(batches.close)
        metrics = JSONLLogger(directory / "metrics.jsonl")
        stack.callback(metrics.close)
        writer = SharedMemoryWriter()
        stack.callback(writer.close)
        fleet = Fleet(config.inference, Path(policy.model.path), logs=directory / "logs")
        stack.push_async_callback(fleet.close)
        await fleet.launch()
        client = LedgerClient(fleet.client, directory / "ledger.jsonl")
        stack.push_async_callback(client.close)
        buffer = LocalReplayBuffer(order="id")
        run: TrainRun

        def write(trajectory: Trajectory) -> None:
            trajectories.write(trajectory)
            if trajectory.error is not None:
                run.last_error = trajectory.error

        parts = RolloutParts(
            renderer,
            run_seed=config.seed,
            run_part=str(part),
            write=write,
            recover=fleet.recover,
            custom=config.custom,
        )
        manager = await RolloutProducer.create(config.rollout, client, buffer, parts)
        stack.push_async_callback(manager.close)
        display = stack.enter_context(
            LiveDisplay(config.name, config.steps, COLUMNS, curve="reward/mean", console=console, done=state.step)
        )
        run = TrainRun(
            config=config,
            directory=directory,
            learner=learner,
            renderer=renderer,
            tasks=tasks,
            eval_tasks=eval_tasks,
            fleet=fleet,
            buffer=buffer,
            manager=manager,
            writer=writer,
            batches=batches,
            store=store,
            metrics=metrics,
            display=display,
            state=state,
            first_eval=_read_run(directory).get("first_eval"),
            saved_step=state.step,
        )
        stack.callback(_save_unsaved, run)
        if state.step:
            await run.sync_weights()
        yield run
        metrics.log({"kind": "inference", "step": run.state.step, **await fleet.stats()})


def _save_unsaved(run: TrainRun) -> None:
    """Save the last finished step, unless it is saved or an update failed half way."""
    if run.state.step > run.saved_step and not run.torn:
        run.save()


def _resume_point(directory: Path, store: CheckpointStore, digest: str) -> tuple[Path | None, TrainerState]:
    """Return the checkpoint to go on from and where it stands; None and the beginning where there is none.

    Raises:
        CheckpointError: The run has another configuration, or its checkpoint is not whole.
    """
    _check_digest(directory, directory, _read_run(directory).get("config_digest", digest), digest)
    latest = store.latest()
    if latest is None:
        return None, TrainerState(0)
    state = load_state(latest)
    _check_digest(directory, latest, state.config_digest, digest)
    return latest, state


def _check_digest(directory: Path, what: Path, found: str, digest: str) -> None:
    if found != digest:
        raise CheckpointError(
            f"{what} was trained with another configuration; resume it with the one in {directory / 'config.yaml'}, "
            f"choose another name, or start over with --fresh (only {', '.join(_FREE_SECTIONS)} may differ)"
        )


def _check_removable(directory: Path, config: TrainConfig) -> None:
    model = Path(config.policy.model.path)
    if directory.resolve() in (model.resolve(), *model.resolve().parents):
        raise ConfigError(
            f"policies.main.model.path is {model}, inside the run {directory} that --fresh would remove: choose "
            "another name, or copy the model elsewhere"
        )


def config_digest(config: TrainConfig) -> str:
    """Return a digest of the parts of a configuration that a resumed run must share."""
    kept = config.model_dump(mode="json", exclude=set(_FREE_SECTIONS))
    return hashlib.blake2b(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


def _begin_part(directory: Path, config: TrainConfig, digest: str, *, fresh: bool) -> int:
    """Make or enter the run directory; return how many processes worked in it before."""
    if fresh and directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.yaml").write_text(dump_config(config))
    known = _read_run(directory)
    part = int(known.get("parts", 0))
    _write_json(directory / "run.json", {**known, "parts": part + 1, "config_digest": digest})
    return part


def _note_spent(directory: Path, started: float) -> None:
    """Add what this process cost to what those before it did; one that was killed is missing."""
    known = _read_run(directory)
    known["wall_s"] = known.get("wall_s", 0.0) + time.monotonic() - started
    known["cpu_s"] = known.get("cpu_s", 0.0) + cpu_seconds()
    _write_json(directory / "run.json", known)


def _read_run(directory: Path) -> dict[str, Any]:
    file = directory / "run.json"
    if not file.exists():
        return {}
    try:
        record: dict[str, Any] = orjson.loads(file.read_bytes())
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{file} is not JSON: {error}") from error
    return record


def _write_json(file: Path, record: Mapping[str, Any]) -> None:
    draft = file.with_suffix(".draft")
    draft.write_bytes(orjson.dumps(dict(record), option=orjson.OPT_INDENT_2) + b"\n")
    draft.rename(file)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of all its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextlib.contextmanager
def _sigterm_cancels() -> Iterator[None]:
    """Let SIGTERM end the run as Ctrl-C does. Signals are the main thread's: elsewhere this changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:
        raise TrainError("a run needs an asyncio task")

    def cancel() -> None:
        # Once: another one must not cut off the checkpoint and the end of the servers that the first began.
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
