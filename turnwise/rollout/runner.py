"""EpisodeRunner: runs one episode from reset to close, and turns errors into data."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from turnwise.agents.core import Agent, Episode, OpenSession, ToolThreadLost, check_owners
from turnwise.agents.forks import BranchPoint, EpisodeRecord
from turnwise.agents.limits import EpisodeLimits
from turnwise.agents.outcome import within_budget
from turnwise.agents.roles import MAIN, check_played
from turnwise.envs.core import Env, invoke, schemas
from turnwise.envs.multi_agent import MultiAgentEnv
from turnwise.envs.registration import make
from turnwise.envs.wrappers import wrap
from turnwise.errors import (
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
from turnwise.gateway.local import LocalGateway
from turnwise.gateway.proxy.client import HostedClient
from turnwise.model.canonical import clean
from turnwise.model.core import LLMClient, Renderer, ServedPolicy
from turnwise.recorder.history import snapshot
from turnwise.recorder.session import Session
from turnwise.rollout.agent_table import AgentTable
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import EpisodeOutcome, EpisodeSpec
from turnwise.rollout.growth import ForkAt, Grown, OwnFork, fold, grow, with_own_forks
from turnwise.rollout.search.config import SearchConfig
from turnwise.rollout.search.core import Searcher, check_forks
from turnwise.rollout.sessions import EpisodeSessions, Sampler, session_trajectories
from turnwise.sandboxes.manager import SandboxManager
from turnwise.seeding import stable_hash
from turnwise.tools.core import check_media
from turnwise.tools.selection import Toolbox
from turnwise.trajectory import WHY_UNFORKED, Trajectory
from turnwise.types import Branch, Message, Search, StopReason


@dataclass(slots=True)
class _Run:
    """State of one running episode, or of a branch of one."""

    spec: EpisodeSpec
    sessions: EpisodeSessions
    agent: Agent | None = None
    record: EpisodeRecord | None = None
    fork: ForkAt | None = None
    branches: dict[str, list[Branch]] = field(default_factory=dict)
    search: Search | None = None
    # Of the environment, at the points of the tree; closed with it.
    forks: list[Env] = field(default_factory=list)
    # Those that the agent made itself.
    own_forks: list[OwnFork] = field(default_factory=list)
    env: Env | None = None
    episode: Episode | None = None
    stop_reason: StopReason = StopReason.COMPLETED
    error: Exception | None = None
    metrics: dict[str, float] = field(default_factory=dict)


def _branch_of(run: _Run, fork: ForkAt) -> _Run:
    """Return the state of a branch of a running episode."""
    assert fork.of.record is not None
    return _Run(run.spec, run.sessions, run.agent, fork.of.record.fork(fork.point), fork)


class EpisodeRunner:
    """Runs episodes concurrently.

    Args:
        guides: Whether the server supports structured output.
        executor: Runs sync tools and blocking environments.
        write: Called with every trajectory, failed and cancelled ones included.
        policy: Name of the policy that client and renderer belong to.
        policies: Further policies by name; those of ``rollout.frozen`` are never trained.
        search: How sampled episodes of evaluations are searched.
        recover: Awaited after an inference failure in a branch of a tree, before it is grown again; without it such a
            failure is that of the episode.
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
        self._search = None if search is None else Searcher(search, executor)
        self._policy = policy
        self._recover = recover
        # As many branches as episodes: those of one tree grow at the same time.
        self._branch_slots = asyncio.Semaphore(config.concurrency)
        self._further = {name: Sampler.of(each, config) for name, each in (policies or {}).items()}
        self._config = config
        self._client = client
        self._renderer = renderer
        self._executor = executor
        self._write = write
        self._context_length = min(context_length, config.context_length or context_length)
        self.gateway = LocalGateway(
            renderer,
            context_length=self._context_length,
            host=config.gateway.host,
            port=config.gateway.port,
            form=EndpointTemplate(config.address, config.gateway.public_urls),
            endpoint=client.endpoint if isinstance(client, HostedClient) else None,
            guides=guides,
            lenient=config.gateway.lenient,
        )
        self._agents = AgentTable(config)
        self._held: set[str] = set()
        self._toolbox = Toolbox(config.env.tools)
        self._sandboxes = SandboxManager(config.sandbox)
        self._spare: Env | None = None

    @property
    def lost_threads(self) -> int:
        """None elsewhere: all are those of ``executor``."""
        return 0

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
            self._hold(name, self._spare)
            self._check_roles(self._spare)
            search = None if self._search is None else self._search.config
            check_forks(self._config, search, self._spare, self._agents.own())
        except ConfigError:
            await self.close()
            raise
        except TurnwiseError:
            await self._close_spare()

    def _check_roles(self, env: Env) -> None:
        """Check that each agent that the environment names has a policy, unless the agent's code names policies."""
        if not isinstance(env, MultiAgentEnv) or self._config.remote is not None or self._agents.own().policies():
            return
        check_played(env.agents, self._config.roles, [self._policy, *self._further])

    async def close(self) -> None:
        """Close agents, tools, an unused environment and the gateway."""
        await self._agents.close()
        for gateway in (self.gateway, *(each.gateway for each in self._further.values())):
            await gateway.close()
        await self._close_spare()
        await self._sandboxes.close()
        await self._toolbox.close()

    async def _close_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(TurnwiseError, TimeoutError):
                async with asyncio.timeout(self._config.close_timeout):
                    await invoke(spare, "close", executor=self._executor)

    async def run(self, spec: EpisodeSpec, agent: Agent | None = None) -> EpisodeOutcome:
        """Run one episode.

        Raises:
            CancelledError: The caller was cancelled; raised after the environment is closed and the trajectories are
                written.
        """
        run = _Run(spec, self._sessions(spec), agent)
        trained, search = spec.partition == "train" and not spec.baseline, self._searched(spec)
        if (self._config.tree is not None and trained) or (search is not None and search.config.forks):
            run.record = EpisodeRecord()
        started = time.monotonic()
        try:
            if search is not None:
                await self._recorded(run, self._find(run, search))
            else:
                await self._play(run)
                if run.record is not None and run.error is None:
                    await self._recorded(run, self._grow(run))
        finally:
            run.forks += [] if run.record is None else [point.env for point in run.record.points]
            interrupted = await self._close(run)
            run.metrics["seconds"] = time.monotonic() - started
            run.metrics["temperature"] = self._temperature(spec)
            trajectories = self._trajectories(run)
            if self._write is not None:
                for trajectory in trajectories:
                    self._write(trajectory)
            if interrupted:
                raise asyncio.CancelledError
        return EpisodeOutcome(trajectories, run.error)

    def _searched(self, spec: EpisodeSpec) -> Searcher | None:
        """Return what searches an episode: a sampled one of an evaluation; a greedy one has no other ways."""
        return self._search if spec.partition != "train" and spec.temperature is None and not spec.baseline else None

    async def _play(self, run: _Run) -> None:
        """Act and score; what is raised becomes the run's error, but for the cancellation of the caller."""
        try:
            await self._act(run)
            await self._score(run)
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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an agent's own code: what it raises becomes data
            run.stop_reason = StopReason.ERROR
            run.error = AgentError(f"the agent raised {type(error).__name__}: {error}")
            run.error.__cause__ = error

    async def _grow(self, run: _Run, search: Searcher | None = None) -> None:
        """Grow the branches of a tree, or the ways of a search, and note them in the episode."""
        assert run.episode is not None
        first = Grown(run.episode, run.stop_reason)

        async def branch(parent: Grown, index: int, point: BranchPoint, number: int) -> Grown | None:
            fork = ForkAt(parent.episode, point, number)
            async with self._branch_slots:
                return await self._way(run, partial(_branch_of, run, fork), index, fork)

        async def again(number: int) -> Grown | None:
            async with self._branch_slots:
                return await self._way(run, lambda: _Run(run.spec, run.sessions.way(number), run.agent), 0)

        config = self._config.tree if search is None else search.config
        assert config is not None
        if isinstance(config, SearchConfig) and config.samples is not None:
            unfit = 0
            async with asyncio.TaskGroup() as tasks:
                asked = [tasks.create_task(again(number)) for number in range(1, config.samples)]
            tree = [first, *(grown for task in asked if (grown := task.result()) is not None)]
        else:
            seed = stable_hash("tree", run.spec.sampling_seed)
            config = config.tree() if isinstance(config, SearchConfig) else config
            tree, unfit = await grow(first, config, seed, branch)
        try:
            if search is not None:
                await self._choose(run, search, tree)
        finally:
            self._fold(run, tree, unfit)

    def _fold(self, run: _Run, tree: Sequence[Grown], unfit: int = 0) -> None:
        """Note the ways through an episode in it, and how many did not fit the budget."""
        assert run.episode is not None
        if len(tree) > 1 or run.metrics.get("tree/failures"):
            # What a branch sampled that failed for good is in the session, and in none of these.
            run.branches = fold(tree)
        records = [grown.episode.record for grown in tree if grown.episode.record is not None]
        refusals = sum(record.refusals for record in records)
        if refusals and len(tree) == 1:
            run.episode.turn_notes.setdefault(("main", None), {}).setdefault(WHY_UNFORKED, records[0].refused)
        counts = {"tree/branches": len(tree), "tree/refusals": refusals, "tree/over_budget": unfit}
        run.metrics |= {name: float(count) for name, count in counts.items()}

    async def _find(self, run: _Run, search: Searcher) -> None:
        """Play the ways of a search, and choose one."""
        await self._play(run)
        if run.error is None:
            await self._grow(run, search)

    async def _recorded(self, run: _Run, playing: Awaitable[None]) -> None:
        """Await a part of an episode; a failure becomes the run's error."""
        try:
            await playing
        except (TurnwiseError, ExceptionGroup) as error:
            run.stop_reason, run.error = StopReason.ERROR, first_of(error)
        except asyncio.CancelledError:
            run.stop_reason = StopReason.CANCELLED
            raise

    async def _choose(self, run: _Run, search: Searcher, tree: Sequence[Grown]) -> None:
        frozen = {name for name, (_, policy) in run.sessions.opened.items() if policy in self._config.frozen}
        run.search = await search.choose(run.spec.task, tree, frozen)
        run.stop_reason = tree[run.search.chosen].stop_reason

    async def _way(self, run: _Run, make: Callable[[], _Run], index: int, fork: ForkAt | None = None) -> Grown | None:
        """Play a way, again from its beginning after an infrastructure failure; None where it failed for good."""
        noted = run.episode if fork is None else fork.of
        assert noted is not None
        for _ in range(self._config.retries + 1):
            branch = make()
            try:
                await self._play(branch)
            finally:
                # Later branches may begin at its points.
                keeps = run if branch.error is None else branch
                keeps.forks += [] if branch.record is None else [point.env for point in branch.record.points]
                if await self._close(branch):
                    raise asyncio.CancelledError
            error = branch.error
            if error is None and branch.episode is not None:
                return Grown(branch.episode, branch.stop_reason, index, None if fork is None else fork.point)
            run.metrics["tree/failures"] = run.metrics.get("tree/failures", 0.0) + 1
            noted.turn_notes.setdefault(("main", None), {})[WHY_UNFORKED] = f"{type(error).__name__}: {error}"
            if isinstance(error, InferenceError):
                if self._recover is None:
                    raise error
                await self._recover(error)
            if not (isinstance(error, TurnwiseError) and error.retryable):
                break
        return None

    async def _act(self, run: _Run) -> None:
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
            for episode in (run.episode, *(fork.episode for fork in run.own_forks)):
                if not episode.ended:
                    episode.finish(StopReason.TIMEOUT)

    async def _reset(self, run: _Run, agent: Agent, deadline: float | None) -> Episode:
        spec, config = run.spec, self._config
        name = spec.task.env or config.env.name
        run.env = await self._make(name, spec.task.env_config)
        self._hold(name, run.env)
        run.env.guest_mounts = agent.sandbox_mounts()
        observation, info = await invoke(run.env, "reset", spec.task, seed=spec.env_seed, executor=self._executor)
        if run.record is not None:
            run.record.observation = snapshot(observation)
        forked = run.record is not None or self._searched(run.spec) is not None
        own = None if forked else partial(self._fork, run)
        # A fork that the agent makes may have opened a session of the name before.
        opens = partial(run.sessions.open_beside, -1)
        return self._episode(run, run.env, observation, info, opens, deadline, open_fork=own)

    async def _fork(self, run: _Run, origin: Episode) -> Episode:
        """Return a fork of a running episode, which its agent drives."""
        env = await invoke(origin.env, "fork", executor=self._executor)
        run.forks.append(env)
        made = run.sessions.fork_all(origin, len(run.own_forks))
        fork = self._episode(
            run,
            env,
            snapshot(origin.observation),
            dict(origin.info),
            partial(run.sessions.open_beside, len(run.own_forks)),
            origin.deadline,
            open_fork=partial(self._fork, run),
            origin=origin,
            sessions=made,
        )
        run.own_forks.append(OwnFork.of(fork, origin, run.own_forks))
        return fork

    async def _forked(self, run: _Run, agent: Agent, deadline: float | None) -> Episode:
        """Return the episode of a branch, in a fork of the environment at its point."""
        del agent
        fork, record = run.fork, run.record
        assert fork is not None
        assert record is not None

        def open_session(name: str, policy: str) -> Session:
            return run.sessions.fork(name, policy, fork.point, fork.number)

        run.env = await invoke(fork.point.env, "fork", executor=self._executor)
        return self._episode(run, run.env, record.observation, dict(fork.of.info), open_session, deadline)

    def _episode(
        self,
        run: _Run,
        env: Env,
        observation: Sequence[Message],
        info: dict[str, Any],
        open_session: OpenSession,
        deadline: float | None,
        **own: Any,
    ) -> Episode:
        spec, config = run.spec, self._config
        return Episode(
            env,
            spec.task,
            spec.env_seed,
            observation=observation,
            info=info,
            tools=schemas(env),
            limits=EpisodeLimits(config.max_turns, config.max_tokens_per_turn, self._context_length),
            open_session=open_session,
            open_endpoint=None if "origin" in own else run.sessions.endpoint,
            deadline=deadline,
            executor=self._executor,
            id=spec.episode_id,
            partition=spec.partition,
            attempt=spec.attempt,
            roles=config.roles,
            record=run.record,
            **own,
        )

    async def _make(self, name: str, own: Mapping[str, Any]) -> Env:
        """Make an environment; ``own`` is the task's configuration of it."""
        configured = name == self._config.env.name
        tools = await self._toolbox.tools() if configured else ()
        if configured and not own and self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        with user_code(EnvError, f"environment {name!r} cannot be made:"):
            env = make(name, **{**(self._config.env.config if configured else {}), **own})
        if tools:
            env.add_tools(tools)
        for wrapper in self._config.env.wrappers if configured else ():
            env = wrap(env, wrapper.name, **wrapper.config)
        env.count_tokens, env.sandboxes = self._renderer.count, self._sandboxes
        return env

    def _hold(self, name: str, env: Env) -> None:
        if name not in self._held:
            for renderer in (self._renderer, *(each.renderer for each in self._further.values())):
                check_media(name, env.toolset(), renderer.media)
            self._held.add(name)

    def _sessions(self, spec: EpisodeSpec) -> EpisodeSessions:
        return EpisodeSessions(
            self._client,
            self._renderer,
            self._config,
            episode_id=spec.episode_id,
            seed=spec.sampling_seed,
            temperature=self._temperature(spec),
            trained=spec.partition == "train",
            context_length=self._context_length,
            gateway=self.gateway,
            policy=self._policy,
            policies=self._further,
        )

    def _temperature(self, spec: EpisodeSpec) -> float:
        return self._config.temperature if spec.temperature is None else spec.temperature

    async def _score(self, run: _Run) -> None:
        if (episode := run.episode) is None:
            return
        run.stop_reason = episode.stop_reason
        try:
            async with asyncio.timeout(self._config.score_timeout) as scope:
                for each in (episode, *(fork.episode for fork in run.own_forks if fork.used(run.own_forks))):
                    await each.score()
                    check_owners(each.rewards, each.sessions)
        except TimeoutError:
            if not scope.expired():
                raise
            raise EnvError(f"scoring did not end within {self._config.score_timeout} s") from None
        ways = with_own_forks(Grown(episode, run.stop_reason), run.own_forks)
        if len(ways) > 1:
            run.branches = fold(ways)

    async def _close(self, run: _Run) -> bool:
        """Close the environment within its timeout, also under cancellation; return whether cancelled meanwhile."""
        if run.env is None:
            return False
        closing = asyncio.ensure_future(self._close_all([run.env, *run.forks]))
        interrupted = False
        # Once for close, and once for its cleanup when it is cancelled. After that it is abandoned.
        for _ in range(2):
            until = time.monotonic() + self._config.close_timeout
            while not closing.done() and (left := until - time.monotonic()) > 0:
                try:
                    await asyncio.wait([closing], timeout=left)
                except asyncio.CancelledError:
                    interrupted = True
                    run.stop_reason = StopReason.CANCELLED
            if not closing.done():
                closing.cancel()
        if not closing.done() or closing.cancelled() or closing.exception() is not None:
            run.metrics["close_errors"] = 1.0
        return interrupted

    async def _close_all(self, envs: Sequence[Env]) -> None:
        """Close environments; the first error is raised when all are closed."""
        if len(envs) == 1:
            await invoke(envs[0], "close", executor=self._executor)
            return
        calls = [invoke(env, "close", executor=self._executor) for env in envs]
        errors = [each for each in await asyncio.gather(*calls, return_exceptions=True) if each is not None]
        if errors:
            raise errors[0]

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
            save_messages=self._config.save_messages,
            frozen=self._config.frozen,
            branches=run.branches,
        )
