"""EpisodeRunner: runs one episode from reset to close, and turns errors into data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from turnwise.agents.core import Agent, Episode, EpisodeHost, EpisodeSetup, ToolThreadLost
from turnwise.agents.forks import EpisodeRecord
from turnwise.agents.limits import EpisodeLimits
from turnwise.agents.notes import check_owners
from turnwise.agents.outcome import within_budget
from turnwise.agents.roles import MAIN, check_played
from turnwise.envs.core import Env, close_env, fork_env, reset_env, schemas
from turnwise.envs.multi_agent import MultiAgentEnv
from turnwise.envs.registration import make
from turnwise.envs.wrappers import wrap
from turnwise.errors import (
    INTERRUPTS,
    AgentError,
    ConfigError,
    EnvError,
    InferenceError,
    TurnwiseError,
    first_of,
    undo_on_error_async,
    user_code,
)
from turnwise.gateway.endpoints import EndpointTemplate
from turnwise.model.canonical import clean
from turnwise.model.core import LLMClient, ModelInfo, Renderer, ServedPolicy
from turnwise.recorder.history import snapshot
from turnwise.recorder.session import Session
from turnwise.rollout.agent_table import AgentTable
from turnwise.rollout.branching.branches import AgentFork, TreeBranch, merge_branches, tree_metrics, tree_of_forks
from turnwise.rollout.branching.search import SearchConfig
from turnwise.rollout.branching.strategies import (
    BranchAttempt,
    BranchingStrategy,
    BranchLimits,
    BranchRunner,
    ForkPoint,
)
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import CLOSE_TIMEOUT_S, EpisodeOutcome, EpisodeSpec
from turnwise.rollout.sessions import EpisodeSessions, Sampler, session_trajectories
from turnwise.sandboxes.manager import SandboxManager
from turnwise.tools.cancellation import abandon, wait_bounded
from turnwise.tools.core import check_media
from turnwise.tools.selection import Toolbox
from turnwise.trajectory import Trajectory
from turnwise.types import Branch, Search, StopReason


@dataclass(slots=True)
class _Run:
    """State of one running episode, or of a branch of one.

    Attributes:
        forked_envs: Forks of its environment, at branch points and of the agent's own forks; closed with it.
    """

    spec: EpisodeSpec
    sessions: EpisodeSessions
    agent: Agent | None = None
    record: EpisodeRecord | None = None
    fork: ForkPoint | None = None
    branches: dict[str, list[Branch]] = field(default_factory=dict)
    search: Search | None = None
    forked_envs: list[Env] = field(default_factory=list)
    agent_forks: list[AgentFork] = field(default_factory=list)
    env: Env | None = None
    episode: Episode | None = None
    stop_reason: StopReason = StopReason.COMPLETED
    error: Exception | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class EpisodeRunner:
    """Runs episodes concurrently.

    Args:
        guides: Whether the server supports structured output.
        executor: Runs sync tools and blocking environments.
        write: Called with every trajectory, failed and cancelled ones included.
        policy: Name of the policy that client and renderer belong to.
        policies: Further policies by name; those of ``rollout.frozen`` are never trained.
        search: How sampled episodes of evaluations are searched.
        recover: Awaited after an inference failure in a branch, before its next attempt; without it such a failure is
            that of the episode.
    """

    def __init__(
        self,
        config: RolloutConfig,
        client: LLMClient,
        renderer: Renderer,
        *,
        context_length: int,
        guides: bool = False,
        executor: Executor | None = None,
        write: Callable[[Trajectory], None] | None = None,
        policy: str = MAIN,
        policies: Mapping[str, ServedPolicy] | None = None,
        search: SearchConfig | None = None,
        recover: Callable[[InferenceError], Awaitable[None]] | None = None,
    ) -> None:
        self._tree = None if config.tree is None else BranchingStrategy(config.tree)
        self._search = None if search is None else BranchingStrategy(search, executor)
        # As many branches as episodes: those of one tree run at the same time.
        self._branch_limits = BranchLimits(asyncio.Semaphore(config.concurrency), config.retries, recover)
        main = Sampler.of(
            ServedPolicy(client, renderer, ModelInfo(policy, context_length, guides=guides)),
            config,
            host=config.gateway.host,
            port=config.gateway.port,
            form=EndpointTemplate(config.address, config.gateway.public_urls),
        )
        other_samplers = {name: Sampler.of(served, config) for name, served in (policies or {}).items()}
        self._samplers = {policy: main, **other_samplers}
        self.gateway = main.gateway
        self._config = config
        self._renderer = renderer
        self._executor = executor
        self._write = write
        self._context_length = main.context_length
        self._agents = AgentTable(config)
        self._registered_envs: set[str] = set()
        self._toolbox = Toolbox(config.env.tools)
        self._sandboxes = SandboxManager(config.sandbox)
        self._spare: Env | None = None
        self._abandoned = 0

    @property
    def lost_threads(self) -> int:
        """Episodes whose code was abandoned; threads are counted by ``executor``."""
        return self._abandoned

    async def prepare(self) -> None:
        """Load the configured tools, check the environment's media against the renderer, and probe the sandboxes.

        The environment made for it serves the first episode; its other faults show in trajectories.
        """
        name = self._config.env.name
        async with undo_on_error_async(self.close):
            await self._toolbox.tools()
            await self._sandboxes.check()
        try:
            self._spare = await self._make(name, {})
            self._register_env(name, self._spare)
            self._check_roles(self._spare)
            for strategy in (self._tree, self._search):
                if strategy is not None:
                    strategy.check(self._spare, name, self._agents.default(), self._config.agent.name)
        except ConfigError:
            await self.close()
            raise
        except TurnwiseError:
            await self._close_spare()

    def _check_roles(self, env: Env) -> None:
        """Check that each agent that the environment names has a policy, unless the agent's code names policies."""
        if not isinstance(env, MultiAgentEnv) or self._config.remote is not None or self._agents.default().policies():
            return
        check_played(env.agents, self._config.roles, [*self._samplers])

    async def close(self) -> None:
        """Close agents, tools, an unused environment and the gateway."""
        await self._agents.close()
        for sampler in self._samplers.values():
            await sampler.gateway.close()
        await self._close_spare()
        await self._sandboxes.close()
        await self._toolbox.close()

    async def _close_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            closing = asyncio.ensure_future(close_env(spare, executor=self._executor))
            await wait_bounded(closing, CLOSE_TIMEOUT_S)
            if closing.done() and not closing.cancelled():
                closing.exception()  # retrieved: it was never played in

    async def run(self, spec: EpisodeSpec, agent: Agent | None = None) -> EpisodeOutcome:
        """Run one episode.

        Raises:
            CancelledError: The caller was cancelled; raised after the environment is closed and the trajectories are
                written.
        """
        run = _Run(spec, self._open_sessions(spec), agent)
        strategy = self._strategy(spec)
        if strategy is not None and strategy.forks:
            run.record = EpisodeRecord()
        started = time.monotonic()
        try:
            await self._run_and_score(run)
            if strategy is not None and run.error is None:
                await self._expand(run, strategy)
        finally:
            run.forked_envs += _point_envs(run)
            interrupted = await self._close_run(run)
            run.metrics["seconds"] = time.monotonic() - started
            run.metrics["temperature"] = self._temperature(spec)
            trajectories = self._trajectories(run)
            if self._write is not None:
                for trajectory in trajectories:
                    self._write(trajectory)
            if interrupted:
                raise asyncio.CancelledError
        return EpisodeOutcome(trajectories, run.error)

    def _strategy(self, spec: EpisodeSpec) -> BranchingStrategy | None:
        """Return what adds branches to an episode: a tree in training, a search to a sampled one of an evaluation."""
        if spec.baseline:
            return None
        if spec.partition == "train":
            return self._tree
        # All branches of a greedy episode would be the same.
        return self._search if spec.temperature is None else None

    async def _run_and_score(self, run: _Run) -> None:
        """Run the agent and score; an exception becomes the run's error, except the cancellation of the caller."""
        try:
            await self._run_bounded(run, self._run_agent(run), self._config.episode_timeout)
            await self._run_bounded(run, self._score(run), self._config.score_timeout)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                run.stop_reason = StopReason.CANCELLED
                raise
            # The episode was not cancelled: if this were re-raised, the member would end without an error.
            run.stop_reason = StopReason.ERROR
            run.error = AgentError("the agent or its environment raised CancelledError without being cancelled")
            run.error.__cause__ = error
        except ToolThreadLost as error:
            run.stop_reason, run.error = StopReason.TIMEOUT, error
        except TurnwiseError as error:
            run.stop_reason, run.error = StopReason.ERROR, error
        except INTERRUPTS:
            raise
        except BaseException as error:  # noqa: BLE001 - an agent's own code: what it raises becomes data
            run.stop_reason = StopReason.ERROR
            run.error = AgentError(f"the agent raised {type(error).__name__}: {error}")
            run.error.__cause__ = error

    async def _run_bounded(self, run: _Run, work: Coroutine[Any, Any, None], timeout: float | None) -> None:
        """Run an agent's or environment's code, and abandon it where it swallows its cancellation.

        Raises:
            ToolThreadLost: It was abandoned after its time-out. It is counted, and its environment is not reused.
        """

        async def settle() -> SystemExit | None:
            # A task that raises it ends the event loop.
            try:
                await work
            except SystemExit as error:
                return error
            return None

        task = asyncio.ensure_future(settle())
        try:
            await wait_bounded(task, timeout)
        finally:
            if not task.done():
                self._abandoned += 1
                run.metrics["abandoned"] = 1.0
                if run.env is not None:
                    run.env.lost_thread = True
        if not task.done():
            raise ToolThreadLost(
                f"the agent or {type(run.env).__name__} swallowed its cancellation after the time-out and still runs: "
                "the episode is abandoned; catch exceptions by name, or raise asyncio.CancelledError again"
            )
        if (error := task.result()) is not None:
            raise error

    async def _expand(self, run: _Run, strategy: BranchingStrategy) -> None:
        """Run an episode's branches and merge them into it; a failure becomes the run's error."""
        assert run.episode is not None
        branches = BranchRunner(run.episode, partial(self._run_branch, run), self._branch_limits)
        first = TreeBranch(run.episode, run.stop_reason)
        try:
            tree, over_budget = await strategy.expand(first, run.spec.sampling_seed, branches)
            try:
                frozen = {name for name, (_, policy) in run.sessions.opened.items() if policy in self._config.frozen}
                run.search = await strategy.choose(run.spec.task, tree, frozen)
            finally:
                if len(tree) > 1 or branches.failures:
                    # Tokens of a branch that failed for good are in the session, and in none of the branches.
                    run.branches = merge_branches(tree)
                run.metrics |= tree_metrics(tree, over_budget)
            if run.search is not None:
                run.stop_reason = tree[run.search.chosen].stop_reason
        except (TurnwiseError, ExceptionGroup) as error:
            run.stop_reason, run.error = StopReason.ERROR, first_of(error)
        except asyncio.CancelledError:
            run.stop_reason = StopReason.CANCELLED
            raise
        finally:
            if branches.failures:
                run.metrics["tree/failures"] = float(branches.failures)

    async def _run_branch(self, run: _Run, number: int, fork: ForkPoint | None) -> BranchAttempt:
        """Run a branch of an episode once, from a fork on or from its reset."""
        if fork is None:
            branch = _Run(run.spec, run.sessions.from_reset(number), run.agent)
        else:
            assert fork.origin.record is not None
            branch = _Run(run.spec, run.sessions, run.agent, fork.origin.record.fork(fork.point), fork)
        try:
            await self._run_and_score(branch)
        finally:
            # Further branches may begin at the points of one that succeeded: they are closed with the episode.
            (run if branch.error is None else branch).forked_envs += _point_envs(branch)
            if await self._close_run(branch):
                raise asyncio.CancelledError
        return BranchAttempt(branch.episode, branch.stop_reason, branch.error)

    async def _run_agent(self, run: _Run) -> None:
        agent = run.agent or self._agents.of(run.spec.task)
        timeout = self._config.episode_timeout
        scope = asyncio.timeout(timeout)
        try:
            async with scope:
                begin = self._reset if run.fork is None else self._forked
                run.episode = episode = await begin(run, agent, None if timeout is None else scope.when())
                with within_budget(episode):
                    async with run.sessions.acting():
                        await agent.run(episode)
        except TimeoutError:
            if not scope.expired():
                raise
            if run.episode is None:
                name = run.spec.task.env or self._config.env.name
                raise EnvError(f"environment {name!r} did not reset within {timeout} s") from None
            for episode in (run.episode, *(fork.episode for fork in run.agent_forks)):
                if not episode.ended:
                    episode.finish(StopReason.TIMEOUT)

    async def _reset(self, run: _Run, agent: Agent, deadline: float | None) -> Episode:
        spec, config = run.spec, self._config
        name = spec.task.env or config.env.name
        run.env = await self._make(name, spec.task.env_config)
        self._register_env(name, run.env)
        run.env.guest_mounts = agent.sandbox_mounts()
        observation, info = await reset_env(run.env, spec.task, seed=spec.env_seed, executor=self._executor)
        if run.record is not None:
            run.record.observation = snapshot(observation)
        setup = EpisodeSetup(
            spec.task,
            spec.env_seed,
            observation,
            info,
            schemas(run.env),
            EpisodeLimits(config.max_turns, config.max_tokens_per_turn, self._context_length),
            deadline,
            spec.episode_id,
            spec.partition,
            spec.attempt,
            config.roles,
        )
        host = EpisodeHost(
            # A fork that the agent makes may have opened a session of the name before.
            partial(run.sessions.open_beside, -1),
            run.sessions.endpoint,
            None if self._strategy(spec) is not None else partial(self._fork, run),
            run.sessions.open_judge,
            executor=self._executor,
        )
        return Episode(run.env, setup, host, record=run.record)

    async def _fork(self, run: _Run, origin: Episode) -> Episode:
        """Return a fork of a running episode, which its agent drives."""
        env = await fork_env(origin.env, executor=self._executor)
        run.forked_envs.append(env)
        number = len(run.agent_forks)
        sessions = run.sessions.fork_all(origin, number)
        setup = replace(origin.setup, observation=snapshot(origin.observation), info=dict(origin.info))
        open_session = partial(run.sessions.open_beside, number)
        host = EpisodeHost(
            open_session, None, partial(self._fork, run), run.sessions.open_judge, executor=self._executor
        )
        fork = Episode(env, setup, host, origin=origin, sessions=sessions)
        run.agent_forks.append(AgentFork.of(fork, origin, run.agent_forks))
        return fork

    async def _forked(self, run: _Run, agent: Agent, deadline: float | None) -> Episode:
        """Return the episode of a branch, in a fork of the environment at its point."""
        del agent
        fork, record = run.fork, run.record
        assert fork is not None
        assert record is not None

        def open_session(name: str, policy: str) -> Session:
            return run.sessions.fork(name, policy, fork.point, fork.number)

        run.env = await fork_env(fork.point.env, executor=self._executor)
        origin = fork.origin
        setup = replace(origin.setup, observation=record.observation, info=dict(origin.info), deadline=deadline)
        host = EpisodeHost(open_session, run.sessions.endpoint, None, run.sessions.open_judge, executor=self._executor)
        return Episode(run.env, setup, host, record=record)

    async def _make(self, name: str, task_config: Mapping[str, Any]) -> Env:
        """Make an environment; ``task_config`` is the task's configuration of it."""
        configured = name == self._config.env.name
        tools = await self._toolbox.tools() if configured else ()
        if configured and not task_config and self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        with user_code(EnvError, f"environment {name!r} cannot be made:"):
            env = make(name, **{**(self._config.env.config if configured else {}), **task_config})
        if tools:
            env.add_tools(tools)
        for wrapper in self._config.env.wrappers if configured else ():
            env = wrap(env, wrapper.name, **wrapper.config)
        env.count_tokens, env.sandboxes = self._renderer.count, self._sandboxes
        return env

    def _register_env(self, name: str, env: Env) -> None:
        if name not in self._registered_envs:
            for sampler in self._samplers.values():
                check_media(name, env.toolset(), sampler.renderer.media)
            self._registered_envs.add(name)

    def _open_sessions(self, spec: EpisodeSpec) -> EpisodeSessions:
        return EpisodeSessions(
            self._samplers,
            self._config,
            episode_id=spec.episode_id,
            seed=spec.sampling_seed,
            temperature=self._temperature(spec),
            trained=spec.partition == "train",
        )

    def _temperature(self, spec: EpisodeSpec) -> float:
        return self._config.temperature if spec.temperature is None else spec.temperature

    async def _score(self, run: _Run) -> None:
        if (episode := run.episode) is None:
            return
        run.stop_reason = episode.stop_reason
        try:
            async with asyncio.timeout(self._config.score_timeout) as scope:
                for scored in (episode, *(fork.episode for fork in run.agent_forks if fork.used(run.agent_forks))):
                    await scored.score()
                    check_owners(scored.rewards, scored.sessions)
        except TimeoutError:
            if not scope.expired():
                raise
            raise EnvError(f"scoring did not end within {self._config.score_timeout} s") from None
        tree = tree_of_forks(TreeBranch(episode, run.stop_reason), run.agent_forks)
        if len(tree) > 1:
            run.branches = merge_branches(tree)

    async def _close_run(self, run: _Run) -> bool:
        """Close the environment within its timeout, also under cancellation; return whether cancelled meanwhile."""
        if run.env is None:
            return False
        closing = [
            asyncio.ensure_future(close_env(env, executor=self._executor)) for env in (run.env, *run.forked_envs)
        ]
        interrupted = False
        # Once for close, and once for its cleanup when it is cancelled. After that it is abandoned.
        for _ in range(2):
            until = time.monotonic() + CLOSE_TIMEOUT_S
            while (pending := [task for task in closing if not task.done()]) and until > time.monotonic():
                try:
                    await asyncio.wait(pending, timeout=until - time.monotonic())
                except asyncio.CancelledError:
                    interrupted = True
                    run.stop_reason = StopReason.CANCELLED
            for task in pending:
                task.cancel()
        for task in closing:
            if not task.done():
                abandon(task)
            if not task.done() or task.cancelled() or task.exception() is not None:
                run.metrics["close_errors"] = 1.0
        return interrupted

    def _trajectories(self, run: _Run) -> list[Trajectory]:
        spec, episode = run.spec, run.episode
        error = None if run.error is None else clean(f"{type(run.error).__name__}: {run.error}")
        blank = Trajectory(
            id=spec.episode_id,
            episode_id=spec.episode_id,
            group_id=spec.group_id,
            task_id=spec.task.id,
            stop_reason=run.stop_reason,
            error=error,
            partition=spec.partition,
            attempt=spec.attempt,
            seed=spec.env_seed,
            metrics=dict(run.metrics),
            baseline=spec.baseline,
            search=run.search,
        )
        return session_trajectories(
            blank,
            run.sessions.opened,
            episode,
            compare=self._config.compare,
            frozen=self._config.frozen,
            branches=run.branches,
        )


def _point_envs(run: _Run) -> list[Env]:
    """Return the forks of an environment that were made at the points where an episode may branch."""
    return [] if run.record is None else [point.env for point in run.record.points]
