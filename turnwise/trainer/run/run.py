"""A training run: its parts, their assembly and their teardown.

A run directory holds ``config.yaml``, ``run.json`` (processes so far and their cost, the first evaluation),
``metrics.jsonl``, ``diagnostics.jsonl``, ``trajectories.twz``, ``journal.jsonl``, ``ledger.jsonl``,
``batches.jsonl``, ``timeline.jsonl``, ``manifest.json``, ``checkpoints/``, ``logs/`` and at the end ``summary.json``.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise.engine.accelerator import peak_bytes
from turnwise.errors import InferenceError
from turnwise.evaluation.metrics import EvalResult, success_and_reward
from turnwise.evaluation.runner import LINE_EVERY_S, EvalProgress, eval_requests, evaluate
from turnwise.gateway.frozen import FrozenPolicies, open_frozen
from turnwise.model.core import ServedPolicy
from turnwise.placement.ray_cluster import RayCluster
from turnwise.placement.usage import process_memory
from turnwise.recorder.ledger import LedgerWriter
from turnwise.rollout.core import ReplayBuffer, RolloutParts
from turnwise.rollout.managers import Rollouts, create_manager
from turnwise.rollout.preflight import check_room
from turnwise.rollout.replay.config import make_buffer
from turnwise.tasks.core import Task
from turnwise.tasks.order import TaskOrder
from turnwise.trainer.algorithms.gap import Gaps
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.learn.distill import Teacher
from turnwise.trainer.manifest import MANIFEST, write_manifest
from turnwise.trainer.observe.metrics import figures, finite_metrics, memory_metrics
from turnwise.trainer.observe.run_log import LiveDisplay
from turnwise.trainer.observe.timeline import CHECKPOINT, EVALUATION, GROUP
from turnwise.trainer.phases import DevicePhases, learners_of
from turnwise.trainer.run.budget import Budget
from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState, capture_rng, policy_folder
from turnwise.trainer.run.cluster import ClusterWorkers, open_cluster
from turnwise.trainer.run.directory import RunDirectory, RunFiles, Start, at_exit, cpu_seconds, open_files, read_start
from turnwise.trainer.run.hooks import STOPPED, HookCalls
from turnwise.trainer.run.policies import TrainedPolicy, serve_policies, serving_together, sync_weights
from turnwise.trainer.run.task_scheduler import TaskScheduler
from turnwise.trainer.scale.plan import fit_micro_batch
from turnwise.trainer.train_thread import TrainThread
from turnwise.trajectory import Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Servers:
    """The inference servers of a run.

    Attributes:
        policies: The trained policies, with their servers.
        frozen: The frozen policies.
    """

    policies: dict[str, TrainedPolicy]
    frozen: FrozenPolicies

    async def recover(self, error: InferenceError) -> None:
        """Wait until all servers run, after a failed request."""
        for policy in self.policies.values():
            await policy.fleet.recover(error)
        await self.frozen.recover(error)

    async def other_policies(self, first: str) -> dict[str, ServedPolicy]:
        """Return what episodes sample from besides the ``first`` policy."""
        others = {name: await policy.served() for name, policy in self.policies.items() if name != first}
        return {**others, **self.frozen.policies}


async def launch_servers(
    config: TrainConfig, directory: Path, start: Start, stack: contextlib.AsyncExitStack
) -> Servers:
    """Start the servers, those of frozen policies included; all requests are recorded in the ledger."""
    if config.layout == "colocated":
        for learner in learners_of(start.policies):
            learner.offload()
    model, logs = Path(config.policy.model.path), directory / "logs"
    ledger = LedgerWriter(directory / "ledger.jsonl")
    stack.push(ledger.leave)
    policies = await serve_policies(config, start.policies, logs, ledger, stack)
    frozen = await open_frozen(config.rollout.frozen, start.frozen, stack, start=model, logs=logs, ledger=ledger)
    for policy in policies.values():
        policy.teacher = Teacher.of(policy.config.algorithm.distill, frozen)
    return Servers(policies, frozen)


COLUMNS = {
    "reward": "reward/mean",
    "informative": "reward/informative",
    "turns": "rollout/turns",
    "success": "eval/sampled",
    "eval reward": "eval/sampled/reward",
    "greedy": "eval/greedy",
    "greedy reward": "eval/greedy/reward",
    "tok/s": "time/sampled_tokens_per_s",
    "gap": "gap/max",
    "GB": "memory/peak",
    "s": "time/step_s",
}
"""Heading and metric of each column."""


@dataclass
class TrainRun(RunFiles):
    """The parts of a run, and its files. Loops read them, and advance ``state``.

    Attributes:
        config: The run's configuration.
        directory: The run directory.
        policies: The trained policies by name, in the order of the configuration.
        frozen: The frozen policies.
        tasks: The training tasks, in order.
        eval_tasks: Held-out tasks; empty without evaluation.
        buffer: The replay buffer.
        manager: The rollout manager.
        scheduler: The scheduler of tasks, with the groups in flight.
        store: Checkpoints.
        display: The live display.
        train_thread: Where models compute and checkpoints are written.
        phases: What holds memory when, where trainer and servers share devices.
        state: The checkpointed state.
        budget: Limits and amounts spent.
        first_eval: Figures of the first evaluation.
        last_eval: Figures of the last evaluation.
        last_error: The last error that ended an episode.
        saved_step: The step of the newest checkpoint.
        torn: Whether an update is changing the weights, so that they belong to no step.
        scheduled: The step at which the learning-rate schedule was last updated.
        pending_figures: Evaluation figures that the display has not shown yet.
        figures: All figures of the current step.
        hooks: User hooks.
    """

    config: TrainConfig
    directory: Path
    policies: dict[str, TrainedPolicy]
    frozen: FrozenPolicies
    tasks: TaskOrder
    eval_tasks: list[Task]
    buffer: ReplayBuffer
    manager: Rollouts
    scheduler: TaskScheduler
    store: CheckpointStore
    display: LiveDisplay
    train_thread: TrainThread
    phases: DevicePhases
    state: TrainerState
    budget: Budget
    first_eval: dict[str, Any] | None = None
    last_eval: dict[str, Any] | None = None
    last_error: str | None = None
    saved_step: int = 0
    torn: bool = False
    scheduled: int = -1
    pending_figures: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    hooks: HookCalls = field(default_factory=HookCalls)
    counted_until: float = field(default_factory=time.monotonic)
    _counts: Counter[str] = field(default_factory=Counter)

    @property
    def policy(self) -> TrainedPolicy:
        """The first trained policy; often the only one."""
        return next(iter(self.policies.values()))

    @property
    def ended(self) -> str | None:
        """The limit that ends the run after the current step, ``hook`` where a hook stopped it, or None."""
        now = time.monotonic()
        self.budget.spend(wall_time=now - self.counted_until)
        self.counted_until = now
        return STOPPED if self.hooks.stopped else self.budget.ended

    @contextlib.contextmanager
    def updating(self) -> Iterator[Callable[[], None]]:
        """Wrap an update; yields a callback for the first change of the weights.

        An update that fails later leaves weights of no step, which are not saved.
        """
        if self.scheduled != self.state.step:
            self._schedule()

        def mark_torn() -> None:
            self.torn = True

        yield mark_torn
        self.torn = False

    def _schedule(self) -> None:
        """Update the expected number of optimizer steps, once per step."""
        self.scheduled = self.state.step
        # What the first part sampled is counted already, the step itself is not.
        groups = self.config.batch.groups
        first_part_share = math.ceil(groups / self.config.overlap.stream) / groups
        steps = self.budget.expected_steps(under_way={"sampled_tokens": first_part_share})
        for policy in self.policies.values():
            own_config = policy.config
            policy.learner.total_steps = max(1, steps - own_config.critic_alone) * own_config.updates_per_step
            if policy.critic is not None:
                policy.critic.total_steps = steps * own_config.updates_per_step

    def advance(self) -> None:
        """Advance to the next step after its updates."""
        self.state.step += 1
        self.budget.spend(steps=1)
        self.state.epoch, self.state.position = self.tasks.epoch, self.tasks.position
        self.state.tasks, self.state.feed = self.tasks.state(), self.scheduler.state()
        self.scheduler.mark_trained()
        # What a later step has sampled by the time of a checkpoint is sampled, or found, again.
        self.state.spent = {name: value for name, value in self.budget.spent.items() if name != "steps"}
        self.figures = {}

    async def pause_servers(self) -> None:
        """Pause the servers of all policies; see :meth:`~turnwise.trainer.run.policies.TrainedPolicy.pause`."""
        for first, *_ in serving_together(self.policies):
            await first.pause()

    async def sync_weights(self, *, pause: bool = False) -> dict[str, float]:
        """Send the weights of all policies to their servers as the version of this step; return metrics.

        See :func:`~turnwise.trainer.run.policies.sync_weights`.
        """
        step = self.state.step
        costs = [
            await sync_weights(policies, step, pause=pause, transfer=partial(self.phases.transfer, policies))
            for policies in serving_together(self.policies)
        ]
        await self.phases.end_training()
        self.state.weight_version = step
        return {name: sum(cost[name] for cost in costs) for name in costs[0]}

    async def wake_servers(self) -> None:
        """Have servers that sleep sample from the last step's weights: a loop of the user's resumes after a failure."""
        if self.phases.asleep:
            await self.sync_weights()

    async def memory(self) -> dict[str, float]:
        """Return the memory of the trainer and its servers as metrics."""
        by_fleet = serving_together(self.policies)
        servers = [memory for first, *_ in by_fleet for memory in await first.fleet.memory()]
        return memory_metrics(process_memory(device_peak=peak_bytes()), servers) | self.phases.figures

    async def truncation(self) -> dict[str, float]:
        """Return what truncation in the servers cut off since the last call, as metrics; none where it cut nothing."""
        counts: Counter[str] = Counter()
        for first, *_ in serving_together(self.policies):
            # The counters of a dead server are lost.
            with contextlib.suppress(InferenceError):
                counts.update(await first.fleet.stats())
        truncated, mass, sampled = (
            counts[name] - self._counts[name] for name in ("truncated_tokens", "cut_mass", "generated_tokens")
        )
        self._counts = counts
        # Less than before: a server was started again.
        if min(truncated, sampled) <= 0:
            return {}
        return {"sampling/truncated": truncated / sampled, "sampling/cut_mass": mass / truncated}

    def log(self, metrics: Mapping[str, float]) -> None:
        """Log metrics of the current step."""
        self.state.metrics = finite_metrics({**metrics, **self.metrics.counts()})
        self.figures |= self.state.metrics
        self.metrics.log({"kind": "train", "step": self.state.step, **self.state.metrics})
        self.display.step(self.state.step, {**self.state.metrics, **self.pending_figures}, share=self.budget.nearest[1])
        self.pending_figures = {}

    def diagnose(self, gaps: Mapping[str, Gaps], groups: Sequence[TrajectoryGroup]) -> None:
        """Record the gaps of the current step by policy, and print warnings."""
        step = self.state.step
        for warning in self.diagnostics.step(step, self.state.metrics, gaps, groups):
            self.metrics.log({"kind": "warning", "step": step, "name": warning.name, "text": warning.text})
            self.display.say(f"warning: step {step}: {warning.text}")

    async def evaluate(self, label: str) -> EvalResult | None:
        """Evaluate on the held-out tasks and log the figures; None if there are none."""
        eval_config = self.config.eval
        if eval_config is None or not self.eval_tasks:
            return None
        await self.wake_servers()
        self.display.report(f"{label}: evaluating {len(self.eval_tasks)} tasks")
        await self.hooks.call("on_validate_begin", partition="val")
        progress = EvalProgress(eval_config, eval_requests(eval_config, self.eval_tasks, label))
        progress.tell(
            lambda text: self.display.report(f"{label}: {text}"), 0.0 if self.display.redraws else LINE_EVERY_S
        )
        with self.timeline.span(EVALUATION, label):
            result = await evaluate(
                self.manager, eval_config, tasks=self.eval_tasks, label=label, on_group=progress.arrived
            )
        self.last_eval = result.to_json()
        if self.first_eval is None or self.state.step == 0:
            self.first_eval = self.last_eval
            RunDirectory(self.directory).note(first_eval=self.first_eval, eval=eval_config.model_dump(mode="json"))
        record = {"kind": "eval", "step": self.state.step, "label": label, **self.last_eval}
        self.metrics.log(record)
        self.figures |= figures(record)
        if self.saved_step == self.state.step:
            self.store.rate(self.state.step, self.figures)
        self.pending_figures = figures(record)
        self.display.say(f"{self.config.name} {label}: {success_and_reward(self.last_eval)}")
        await self.hooks.validate_end(result)
        return result

    def resume_first_eval(self) -> bool:
        """Whether an earlier process, which trained no step, finished the evaluation that precedes the first one."""
        evaluated = RunDirectory(self.directory).read().get("eval")
        if self.config.eval is None or evaluated != self.config.eval.model_dump(mode="json"):
            return False
        self.last_eval = self.first_eval
        return True

    async def save(self) -> None:
        """Write a checkpoint of the current step, in the train thread."""
        self.state.rng = capture_rng()
        self.state.spent["wall_time"] = self.budget.spent.get("wall_time", 0.0)
        # Episodes go on meanwhile, and change what is counted.
        state, figures = copy.deepcopy(self.state), dict(self.figures)
        with self.timeline.span(CHECKPOINT, state.step):
            # Groups that the checkpoint counts as trained must not become available again after a power cut.
            await self.journal.sync(self.train_thread)
            await self.train_thread(lambda: self.store.save(state, self._write_policies, figures))
        self.saved_step = state.step

    def _write_policies(self, checkpoint: Path) -> None:
        for name, policy in self.policies.items():
            policy.save(policy_folder(checkpoint, name, self.policies))


@contextlib.asynccontextmanager
async def open_run(
    config: TrainConfig, directory: Path, console: Console, *, fresh: bool = False, resume_step: int | None = None
) -> AsyncIterator[TrainRun]:
    """Assemble a run as a context manager, and tear it down whatever happens.

    At exit, also after an interrupt or an error, the last finished step is checkpointed, servers and environments are
    closed, and the ledger is marked complete. Nothing is written or removed before configuration, tasks and model were
    read. ``fresh`` and ``resume_step`` are those of :func:`turnwise.trainer.train.run_train`.
    """
    started = time.monotonic()
    home = RunDirectory(directory)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(home.lock())
        cluster = await open_cluster(config, directory, console, stack)
        fitting, line = fit_micro_batch(config)
        if line is not None:
            console.print(line, highlight=False, markup=False)
        start = await read_start(fitting, home, console, fresh=fresh, resume_step=resume_step)
        for policy in start.policies.values():
            if policy.learner.processes is not None:
                stack.callback(policy.learner.processes.close)
        part = home.begin(config, start.state.config_digest, fresh=fresh)
        if not (directory / MANIFEST).is_file():
            # Beside the start of servers: a model of many gigabytes is read for its digest.
            manifest = asyncio.create_task(asyncio.to_thread(write_manifest, directory, config))
            at_exit(stack, lambda: manifest)
        start.store.tidy(start.state.step, damaged=resume_step is None)
        # Called last, when the servers have ended: then their CPU time is that of children.
        at_exit(stack, partial(_spend, home, started))
        run = await _assemble(config, directory, start, part, console, stack, cluster)
        if not run.state.step:
            await _check_room(run, console)
        run.hooks = HookCalls.open(start.hooks, run)
        run.scheduler.restore(run.state.feed)
        run.first_eval = home.read().get("first_eval")
        at_exit(stack, partial(_save_unsaved, run))
        for first, *_ in serving_together(run.policies):
            first.fleet.resend = partial(first.republish, train_thread=run.train_thread)
        if run.state.step or any(policy.launched_elsewhere for policy in run.policies.values()):
            # Servers were launched with the model that the configuration names, or with none that is known.
            await run.sync_weights()
        yield run
        for together in serving_together(run.policies):
            policy_fields = {"policy": ", ".join(policy.name for policy in together)} if len(run.policies) > 1 else {}
            stats = await together[0].fleet.stats()
            run.metrics.log({"kind": "inference", "step": run.state.step, **policy_fields, **stats})


async def _check_room(run: TrainRun, console: Console) -> None:
    rollout = run.config.rollout
    policy = run.policy
    context = min(filter(None, (rollout.context_length, (await policy.served()).info.context_length)))
    warn = partial(console.print, style="yellow", highlight=False, markup=False, soft_wrap=True)
    await check_room(list(run.tasks.ahead()), rollout, policy.renderer, context, warn)


async def _assemble(
    config: TrainConfig,
    directory: Path,
    start: Start,
    part: int,
    console: Console,
    stack: contextlib.AsyncExitStack,
    cluster: RayCluster | None,
) -> TrainRun:
    """Open the files, start servers and rollouts; ``stack`` closes them in reverse order."""
    state = start.state
    files = open_files(config, directory, start, part, console, stack)
    servers = await launch_servers(config, directory, start, stack)
    first_name, policy = next(iter(servers.policies.items()))
    fleets = {name: trained.fleet for name, trained in servers.policies.items()}
    buffer = await stack.enter_async_context(make_buffer(config.replay, config.replay_facts, files.journal))

    def write(trajectory: Trajectory) -> None:
        files.journal.write(trajectory)
        run.last_error = trajectory.error or run.last_error
        run.scheduler.count_episode(trajectory)

    parts = RolloutParts(
        policy.renderer,
        run_seed=config.seed,
        run_part=str(part),
        write=write,
        journal=files.journal,
        rolling=lambda group_id: files.timeline.span(GROUP, group_id),
        recover=servers.recover,
        policy=first_name,
        policies=await servers.other_policies(first_name),
        search=None if config.eval is None else config.eval.search,
        custom=config.custom,
        notify=partial(console.print, highlight=False, markup=False, soft_wrap=True),
        workers=None if cluster is None else ClusterWorkers(cluster, config, directory, fleets, servers.frozen),
    )
    manager = await create_manager(config.rollout, policy.client, buffer, parts)
    stack.push_async_callback(manager.close)
    scheduler = TaskScheduler(config, start.tasks, manager, buffer, lambda: state.weight_version)
    budget = Budget.of(config.steps, config.budget, {**state.spent, "steps": state.step})
    steps_done, share = state.step, budget.nearest[1]
    display = LiveDisplay(config.name, config.steps, COLUMNS, console=console, done=steps_done, share_at_start=share)
    stack.enter_context(display)
    train_thread = await stack.enter_async_context(contextlib.aclosing(TrainThread()))
    run = TrainRun(
        **vars(files),
        **_start_fields(config, directory, start),
        policies=servers.policies,
        frozen=servers.frozen,
        buffer=buffer,
        manager=manager,
        scheduler=scheduler,
        store=start.store,
        display=display,
        train_thread=train_thread,
        phases=DevicePhases(config, servers.policies, train_thread),
        budget=budget,
    )
    return run


def _start_fields(config: TrainConfig, directory: Path, start: Start) -> dict[str, Any]:
    """Return the parts of a run that were read before it started."""
    return {
        "config": config,
        "directory": directory,
        "tasks": start.tasks,
        "eval_tasks": start.eval_tasks,
        "state": start.state,
        "counted_until": start.began,
        "saved_step": start.state.step,
    }


async def _spend(home: RunDirectory, started: float) -> None:
    home.spend(time.monotonic() - started, cpu_seconds())


async def _save_unsaved(run: TrainRun) -> None:
    """Save the last finished step, unless it is saved or the weights are torn or lost."""
    processes = [policy.learner.processes for policy in run.policies.values()]
    lost = any(ranks is not None and ranks.lost for ranks in processes)
    if run.state.step > run.saved_step and not run.torn and not lost:
        await run.save()
