"""``turnwise train --dry-run``: validates all inputs of a run and prints its plan."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from turnwise.agents.roles import check_played
from turnwise.chat.model_dir import check_same_vocabulary, model_settings
from turnwise.engine.accelerator import require_device
from turnwise.engine.capacity import rope_limit
from turnwise.engine.lora import model_under
from turnwise.envs.core import Env, close_env, reset_env, schemas
from turnwise.envs.wrappers import wrap
from turnwise.errors import EnvError, TurnwiseError
from turnwise.gateway.frozen import load_renderers
from turnwise.inference.engines import engine_warnings, find_engine
from turnwise.model.canonical import canonical_messages
from turnwise.model.core import Renderer
from turnwise.placement.ray_cluster import check_ray
from turnwise.rollout.agent_table import AgentTable
from turnwise.rollout.config import GroupRewardConfig
from turnwise.rollout.managers import check_manager
from turnwise.rollout.preflight import PromptLimit, check_shows_tools, check_specs, make_task_env, task_source
from turnwise.rollout.producer import GroupRewarder
from turnwise.sandboxes.config import SandboxConfig
from turnwise.sandboxes.manager import SandboxManager
from turnwise.tasks.core import Task
from turnwise.tasks.mix import load_mix, open_order
from turnwise.tools.cancellation import cancel
from turnwise.tools.core import Tool, check_media
from turnwise.tools.selection import Toolbox
from turnwise.trainer.algorithms.credit import load_credit
from turnwise.trainer.config.policy import LoRAConfig, PolicyConfig
from turnwise.trainer.config.train import TrainConfig, TrainEvalConfig
from turnwise.trainer.learn.distill import check_teacher
from turnwise.trainer.learn.learner import check_engine
from turnwise.trainer.learn.reference import reference_path
from turnwise.trainer.model.policy import try_adapters
from turnwise.trainer.observe.run_log import check_loggers
from turnwise.trainer.run.budget import Budget
from turnwise.trainer.run.checkpoint import CheckpointStore, policy_folder
from turnwise.trainer.run.cluster import placement_text
from turnwise.trainer.run.directory import CHECKPOINTS, RunDirectory, check_template
from turnwise.trainer.run.hooks import load_hooks
from turnwise.trainer.run.machine import check_machine
from turnwise.trainer.run.policies import check_layout, check_shared_servers
from turnwise.trainer.scale.cluster import ClusterConfig, Placement
from turnwise.trainer.scale.plan import check_plan, fit_micro_batch

RESET_TIMEOUT = 60.0
"""Seconds that an environment may take to begin an episode."""

_EPISODES = 8


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        name: The checked subject.
        finding: The finding, or the error and its remedy.
        outcome: ``ok``, ``failed``, or ``not run`` where it depends on a failed check.
    """

    name: str
    finding: str
    outcome: Literal["ok", "failed", "not run"] = "ok"


@dataclass(slots=True)
class DryRun:
    """The result of a dry run: checks in order, and lines that describe the run."""

    checks: list[Check] = field(default_factory=list)
    plan: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the run could start."""
        return all(check.outcome == "ok" for check in self.checks)


async def dry_run(config: TrainConfig, *, fresh: bool = False, cluster: ClusterConfig | None = None) -> DryRun:
    """Check the inputs of a run, and begin an episode of each of its first tasks; errors become failed checks.

    Args:
        config: The run's configuration.
        fresh: Whether an earlier run of its name would be removed.
        cluster: The devices of another machine on which it is to run; by default this machine's. Number and memory of
            devices are then estimated by formula, and neither weights nor engines need to be here.
    """
    checker = _Checker(config, cluster)
    await checker.run("run directory", lambda: checker.directory(fresh))
    first, *further_names = config.policies
    await _check_policy(checker, config.of_policy(first), first, weights=cluster is None)
    for name in further_names:
        further = _Checker(config, cluster, name)
        further.resumed = checker.resumed
        await _check_policy(further, config.of_policy(name), name, weights=cluster is None)
        await further.run("chat format", further.chat_format)
        checker.checks += [replace(check, name=f"{name}: {check.name}") for check in further.checks]
    if config.placement == "ray":
        await checker.run("placement", lambda: _placement(config, here=cluster is None))
    if cluster is None:
        await checker.run("inference", lambda: check_inference(config))
    else:
        await checker.run("memory", lambda: _memory(config, cluster))
    await checker.run("chat format", checker.chat_format)
    await checker.run("tasks", checker.tasks)
    if (plan := config.eval) is not None:
        await checker.run("held-out tasks", lambda: checker.eval_tasks(plan))
    sandboxes = SandboxManager(config.rollout.sandbox.model_copy(update={"prewarm": 0}))
    try:
        if config.rollout.sandbox != SandboxConfig():
            await checker.run("sandboxes", lambda: _sandboxes(sandboxes))
        async with Toolbox(config.rollout.env.tools) as toolbox:
            await checker.run("tools", lambda: checker.tools(toolbox))
            await checker.run("episodes", lambda: checker.episodes(sandboxes))
    finally:
        await sandboxes.close()
    await checker.run("agent", checker.agent)
    if config.loggers:
        await checker.run("loggers", lambda: check_loggers(config.loggers))
    if config.rollout.env.wrappers:
        await checker.run("wrappers", checker.wrappers)
    if (reward := config.rollout.group_reward) is not None:
        await checker.run("group reward", lambda: _group_reward(reward))
    if config.hooks:
        await checker.run("hooks", lambda: ", ".join(cls.__qualname__ for cls in load_hooks(config.hooks)))
    return DryRun(checker.checks, list(_plan(config)))


async def _check_policy(checker: _Checker, config: TrainConfig, name: str, *, weights: bool) -> None:
    """Check model, adapters, critic and devices of a trained policy, by its own configuration."""
    await checker.run("model", checker.model)
    if (lora := config.policy.model.lora) is not None:
        await checker.run("adapters", lambda: _adapters(config.policy.model.path, lora))
    if config.policy.critic is not None:
        await checker.run("critic", lambda: _critic(config.policy, f"policies.{name}.critic.path", weights=weights))
    await checker.run("devices", checker.devices)


async def check_inference(config: TrainConfig) -> str:
    """Check the engines that are to serve the trained policy and the frozen ones, without starting a server.

    Returns:
        Each policy's engine and number of servers, and warnings about settings that work, and badly.

    Raises:
        ConfigError: An engine cannot be used as configured.
    """
    trained = {name: config.of_policy(name) for name in config.policies}
    if not all(model_under(policy_config.policy.model.path).is_dir() for policy_config in trained.values()):
        raise _MissingInput("wants a model")
    several, start = len(trained) > 1, config.policy.model.path
    served = []
    for host, names in config.served.items():
        check_shared_servers(config, host, names)
        check_layout(config, host)
        host_config = trained[host]
        served.append(
            (f"{', '.join(names)}: " if several else "", host_config.policy.model.path, host_config.inference)
        )
    for name, frozen in config.rollout.frozen.items():
        if frozen.hosted is None and not frozen.urls:
            served.append((f"{name}: ", frozen.model or start, frozen.inference))
    texts = []
    for whose, model, inference in served:
        warnings = await engine_warnings(model_under(model), inference)
        count = len(inference.urls) or inference.replicas
        texts.append("; ".join((f"{whose}{inference.engine}, {count} server{'s' * (count > 1)}", *warnings)))
    return "; ".join(texts)


def _placement(config: TrainConfig, *, here: bool) -> str:
    if here:
        check_ray()
    return placement_text(config)


def _memory(config: TrainConfig, cluster: ClusterConfig) -> str:
    if not (model_under(config.policy.model.path) / "config.json").is_file():
        raise _MissingInput("wants a model")
    plan = check_plan(config, cluster)
    sizes = "; ".join(
        f"devices {devices} {max(plan.phases(parts).values()) / 1e9:,.1f} GB" for devices, parts in plan.memory()
    )
    return f"{sizes}; {cluster.usable_bytes / 1e9:,.1f} GB of each are usable"


class _MissingInput(TurnwiseError):
    """A check depends on one that failed."""


class _Checker:
    def __init__(self, config: TrainConfig, cluster: ClusterConfig | None = None, policy: str | None = None) -> None:
        self._config = config
        self._cluster = cluster
        # What is checked of a policy is that of the first, unless another is named.
        self._policy = policy or next(iter(config.policies))
        self._own = config.of_policy(self._policy)
        self.checks: list[Check] = []
        self._context: int | None = config.rollout.context_length
        self._has_model = False
        self._warnings: list[str] = []
        self._renderer: Renderer | None = None
        self._first: list[Task] = []
        self._loaded: list[Tool] | None = None
        self.resumed: Path | None = None

    async def run(self, name: str, check: Callable[[], str | Awaitable[str]]) -> None:
        try:
            finding = check()
            self.checks.append(Check(name, finding if isinstance(finding, str) else await finding))
        except _MissingInput as error:
            self.checks.append(Check(name, str(error), "not run"))
        except TurnwiseError as error:
            self.checks.append(Check(name, str(error), "failed"))

    def directory(self, fresh: bool) -> str:
        config, home = self._config, RunDirectory(self._config.runs / self._config.name)
        if fresh:
            home.check_removable(config)
            return f"{home.path}: {'an earlier run there is removed' if home.path.exists() else 'a new run'}"
        home.check_config(config)
        store = CheckpointStore(home.path / CHECKPOINTS)
        if steps := store.steps():
            home.check_records()
        self.resumed = store.path(steps[-1]) if steps else None
        return f"{home.path}: {f'resumes after step {steps[-1]}' if steps else 'a new run'}"

    def model(self) -> str:
        config, key = self._own, f"policies.{self._policy}.model"
        path = config.policy.model.path
        here = self._cluster is None
        settings = model_settings(model_under(path), f"{key}.path", weights=here)
        if here:
            self._warnings = check_machine(config.policy, config.inference, key=key)
        ropes = rope_limit(settings.get("text_config") or settings)
        limits = [self._context, config.inference.max_context, settings.get("max_position_embeddings")]
        limits.append(None if ropes is None else ropes.tokens)
        context_lengths = [limit for limit in limits if type(limit) is int]
        self._context = min(context_lengths, default=None)
        self._has_model = True
        names = ", ".join(settings.get("architectures") or ["unknown architecture"])
        kl = config.algorithm.kl
        reference = "" if kl is None else f", held to {reference_path(kl, config.policy.model)}"
        return f"{path}: {names}, context {self._context or 'unknown'}{reference}"

    def devices(self) -> str:
        config = self._own
        if self._cluster is not None:
            cluster, placement = self._cluster, Placement.of(config)
            engine = find_engine(config.inference.engine).__name__
            return (
                f"{len(placement.devices)} of {cluster.count} x {cluster.device}: trains on {len(placement.trainer)}, "
                f"samples with {len(placement.servers)} servers of {len(placement.servers[0])} ({engine})"
            )
        trainer, server = config.policy.model.device, config.inference.device
        trains = check_engine(config.policy) or require_device(trainer, "model.device")
        samples = require_device(server, "inference.device")
        lines = f"trains on {trains}, samples on {samples}", fit_micro_batch(self._config)[1]
        return "; ".join((*filter(None, lines), *self._warnings))

    async def chat_format(self) -> str:
        if not self._has_model:
            raise _MissingInput("wants a model")
        config = self._own
        path = config.policy.model.path
        self._renderer = config.renderer.load(path)
        if self.resumed is not None:
            folder = policy_folder(self.resumed, self._policy, self._config.policies)
            check_template(folder, self._renderer, self._policy)
        # Whether the endpoints of frozen policies answer is known when the run starts.
        start = self._config.policy.model.path
        frozen = load_renderers(self._config.rollout.frozen, start, self._config.renderer)
        check_teacher(config.algorithm.distill, self._config.rollout.frozen, path)
        further = [f"{renderer.describe()['format']} of {name}" for name, renderer in frozen.items()]
        return ", ".join([str(self._renderer.describe()["format"]), *further])

    async def tasks(self) -> str:
        config = self._config
        order, reports = open_order(
            task_source(config.tasks, config.rollout, "tasks"),
            seed=config.seed,
            shuffle=config.shuffle,
            keep=await self._prompt_limit(config.max_prompt_tokens),
            curriculum=config.curriculum,
        )
        await check_specs(order.ahead(), config.rollout)
        self._first = list(itertools.islice(order.ahead(), _EPISODES)) or [order.next()[0]]
        return "; ".join(map(str, reports))

    async def eval_tasks(self, plan: TrainEvalConfig) -> str:
        source = task_source(plan.tasks, self._config.rollout, "eval.tasks")
        held_out = load_mix(source, limit=plan.limit, keep=await self._prompt_limit(plan.max_prompt_tokens))
        await check_specs(held_out.tasks, self._config.rollout)
        self._first += held_out.tasks[:_EPISODES]
        return "; ".join(map(str, held_out.reports))

    async def _prompt_limit(self, max_tokens: int | None) -> PromptLimit | None:
        if self._renderer is None:
            return None
        return await PromptLimit.create(max_tokens, self._renderer, self._config.rollout)

    async def tools(self, toolbox: Toolbox) -> str:
        self._loaded = list(await toolbox.tools())
        return ", ".join(tool.name for tool in self._loaded) or "none beside the environment's own"

    async def episodes(self, sandboxes: SandboxManager) -> str:
        """Begin an episode of each first task, which validates environment construction and reset."""
        if not self._first or self._loaded is None:
            raise _MissingInput("want tasks" if self._loaded is not None else "want the configured tools")
        names: dict[str, None] = {}
        longest = 0
        for task in self._first:
            env = make_task_env(task, self._config.rollout)
            env.sandboxes = sandboxes
            try:
                longest = max(longest, await self._begin(env, task))
                names |= dict.fromkeys(schema.name for schema in schemas(env))
            finally:
                await close_env(env)
        text = f"{len(self._first)} begun; the model may call {', '.join(names) or 'nothing'}"
        if self._renderer is None:
            return f"{text}; prompts were not counted without a chat format"
        room = f" of {self._context}" if self._context else ""
        if self._context is not None and longest >= self._context:
            raise EnvError(
                f"rollout.context_length: a prompt takes {longest}{room} tokens of the context, and no room is left to "
                "answer: raise it, choose a model with a longer context, or shorten prompt and tools"
            )
        return f"{text}; the longest prompt takes {longest}{room} tokens"

    async def _begin(self, env: Env, task: Task) -> int:
        """Reset an environment; return the tokens of the first prompt, where known."""
        name = task.env or self._config.rollout.env.name
        if name == self._config.rollout.env.name and self._loaded:
            env.add_tools(self._loaded)
        resetting = asyncio.ensure_future(reset_env(env, task, seed=0))
        await asyncio.wait({resetting}, timeout=RESET_TIMEOUT)
        if not resetting.done():
            await cancel(resetting)
            raise EnvError(f"environment {name!r} did not reset within {RESET_TIMEOUT:g} s (task {task.id!r})")
        messages, info = resetting.result()
        rollout = self._config.rollout
        try:
            agent = AgentTable(rollout).of(task)
            names_policies, offers_tools = bool(agent.policies()), agent.offers_tools
        except TurnwiseError:
            # The check of the agent says why there is none.
            names_policies, offers_tools = True, False
        if not names_policies and rollout.remote is None:
            check_played(info.get("agents") or (), rollout.roles, [*self._config.policies, *rollout.frozen])
        if self._renderer is None:
            return 0
        check_media(name, env.toolset(), self._renderer.media)
        if offers_tools:
            check_shows_tools(name, messages, schemas(env), self._renderer)
        return len(self._renderer.render(canonical_messages(messages), schemas(env)))

    def agent(self) -> str:
        agents = AgentTable(self._config.rollout)
        agents.default()
        agents.check()
        name = self._config.rollout.agent.name
        for algorithm in self._config.algorithms.values():
            load_credit(algorithm.credit)
        manager = check_manager(self._config.rollout, self._config.custom)
        return name if manager is None else f"{name}, rolled out by {manager.__qualname__}"

    def wrappers(self) -> str:
        # Around an environment of no episode: one that resets may write what it records.
        env = Env()
        for wrapper in self._config.rollout.env.wrappers:
            env = wrap(env, wrapper.name, **wrapper.config)
        return ", ".join(wrapper.name for wrapper in self._config.rollout.env.wrappers)


def _group_reward(config: GroupRewardConfig) -> str:
    GroupRewarder(config, write=None, executor=None)
    return config.function


async def _sandboxes(manager: SandboxManager) -> str:
    capabilities = await manager.probe()
    return "; ".join((f"{manager.config.name}, isolated by {capabilities.isolation}", *capabilities.notes))


def _adapters(path: Path, lora: LoRAConfig) -> str:
    info = try_adapters(path, lora)
    kinds = sorted({target.rpartition(".")[2] for target in info.targets})
    begin = "new" if lora.path is None else str(lora.path)
    return f"{begin}, of rank {info.rank} on {len(info.targets)} matrices ({', '.join(kinds)})"


def _critic(policy: PolicyConfig, key: str, *, weights: bool) -> str:
    if policy.critic is None or policy.critic.kind == "shared":
        return "a head on the policy's model"
    path = policy.critic.path or policy.model.path
    model_settings(path, key, weights=weights)
    check_same_vocabulary(path, policy.model.path, key)
    return f"{path}: a separate model"


def _plan(config: TrainConfig) -> Iterator[str]:
    rollout, greedy = config.rollout, config.greedy_baseline
    episodes = config.batch.groups * (rollout.group_size + greedy)
    size = f"{rollout.group_size}{' + 1 greedy' * greedy}"
    batch = f"{config.batch.groups} tasks x {size} episodes = {episodes} episodes"
    if config.steps is None:
        yield f"steps of {batch}"
    else:
        yield f"{config.steps} steps of {batch}, {config.steps * episodes:,} in all"
    if config.budget.limits:
        yield f"it ends with the step after {Budget.of(config.steps, config.budget, {}).describe()}, whichever is first"
    turn = "" if rollout.max_tokens_per_turn is None else f" of at most {rollout.max_tokens_per_turn} tokens"
    yield f"episodes: {rollout.env.name}, up to {rollout.max_turns} turns{turn}, temperature {rollout.temperature:g}"
    for name, policy in config.policies.items():
        algorithm, whose = config.algorithms[name], f" of {name}" if len(config.policies) > 1 else ""
        yield (
            f"updates{whose}: {algorithm.advantage}, {policy.optim.name} at {policy.optim.lr:g} "
            f"({policy.schedule.kind}), {algorithm.epochs * algorithm.minibatches} per step, "
            f"{policy.model.compute_dtype}"
        )
    if config.eval is None:
        yield "no evaluation"
    else:
        between = f", every {config.eval.every} steps" if config.eval.every else ""
        parts = [f"{config.eval.samples} sampled"] * (config.eval.samples > 0) + ["1 greedy"] * config.eval.greedy
        yield f"evaluation before and after{between}: {' and '.join(parts)} per held-out task"
    yield f"a checkpoint every {config.checkpoint.every} steps, in {config.runs / config.name}"
