"""Sessions of one episode: their samplers, endpoints, metrics and trajectories."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from turnwise.agents.core import Episode
from turnwise.agents.forks import BranchPoint
from turnwise.agents.notes import Reward
from turnwise.agents.roles import JUDGES, Compare, check_judge, compared_within
from turnwise.errors import AgentError, SessionError, TurnwiseError
from turnwise.gateway.endpoints import Place
from turnwise.gateway.local import LocalGateway, SessionEndpoint
from turnwise.gateway.proxy.client import HostedClient
from turnwise.gateway.proxy.session import TextSession
from turnwise.model.core import LLMClient, ModelInfo, Renderer, ServedPolicy
from turnwise.recorder.session import Session, SessionLimits
from turnwise.recorder.token_session import TokenSession
from turnwise.rollout.branching.branches import leave_out_failed
from turnwise.rollout.config import RolloutConfig
from turnwise.seeding import stable_hash
from turnwise.trajectory import Trajectory
from turnwise.types import Branch, SamplingParams


@dataclass(frozen=True, slots=True)
class Sampler:
    """Client and settings for the sessions of a policy.

    Attributes:
        context_length: Most tokens of prompt and completion together.
        info: What its servers said of the model.
    """

    client: LLMClient
    renderer: Renderer
    context_length: int
    gateway: LocalGateway
    info: ModelInfo
    temperature: float | None = None

    @classmethod
    def of(cls, policy: ServedPolicy, config: RolloutConfig, **address: Any) -> Self:
        """Return the sampler of a served policy; ``address`` is that of its gateway, by default a free port."""
        context = min(policy.info.context_length, config.context_length or policy.info.context_length)
        client, renderer = policy.client, policy.renderer
        endpoint = client.endpoint if isinstance(client, HostedClient) else None
        gateway = LocalGateway(
            renderer,
            context_length=context,
            endpoint=endpoint,
            guides=policy.info.guides,
            lenient=config.gateway.lenient,
            **address,
        )
        return cls(client, renderer, context, gateway, policy.info, policy.temperature)


class EpisodeSessions:
    """Opens sessions on demand.

    Args:
        samplers: Samplers of the policies by name; that of agents which no role maps is the first.
        config: How sessions are limited and sampled.
        episode_id: Id of the main session; others are ``<episode_id>/<name>``.
        seed: Sampling seed of the episode; each session derives its own from it and its name.
        trained: Whether its trajectories are trained, which fixes the temperature.

    Attributes:
        opened: Session and policy by the session's name, in the order of opening.
    """

    def __init__(
        self,
        samplers: Mapping[str, Sampler],
        config: RolloutConfig,
        *,
        episode_id: str,
        seed: int,
        temperature: float,
        trained: bool,
    ) -> None:
        self.opened: dict[str, tuple[Session, str]] = {}
        # Of a branch that begins at the reset: the sessions that it forks, and its number.
        self._origin: EpisodeSessions | None = None
        self._number = 0
        # Sessions that only branches have opened so far.
        self._forked_only: set[str] = set()
        main = next(iter(samplers.values()))
        self._gateway = main.gateway
        self._gateways: dict[str, LocalGateway] = {}
        self._endpoints: dict[str, SessionEndpoint] = {}
        self._samplers = samplers
        self._episode_id = episode_id
        self._rollout_id, _, self._attempt_id = episode_id.rpartition(".")
        self._base: str | None = None
        self._seed = seed
        self._trained = trained
        self._frozen = config.frozen
        self._reasoning = config.reasoning
        self._echo = config.echo
        self._params = SamplingParams(
            temperature=temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            sampling_mask=trained and config.sampling_mask == "keep",
        )
        self._limits = SessionLimits(
            context_length=main.context_length,
            max_tokens_per_turn=config.max_tokens_per_turn,
            max_total_tokens=config.max_total_tokens,
            max_turns=config.max_turns,
        )

    def from_reset(self, number: int) -> EpisodeSessions:
        """Return the sessions of the episode's n-th branch from its reset on, recorded in the same trees."""
        sessions = copy.copy(self)
        sessions._origin, sessions._number = self, number
        sessions.opened, sessions._gateways, sessions._endpoints, sessions._base = {}, {}, {}, None
        return sessions

    def open(self, name: str, policy: str) -> Session:
        """Open a session."""
        sampler = self._samplers.get(policy)
        if sampler is None:
            raise AgentError(
                f"session {name!r} has the policy {policy!r}, which does not exist: map its role in rollout.roles, or "
                f"name one of {', '.join(self._samplers)} (policies and rollout.frozen)"
            )
        if self._origin is not None:
            session = self._origin.fork(name, policy, None, self._number)
            self.opened[name] = (session, policy)
            self._gateways[session.id] = sampler.gateway
            return session
        if name in self._forked_only and self.opened[name][1] == policy:
            self._forked_only.discard(name)
            return self.opened[name][0]
        params = self._params
        if sampler.temperature is not None:
            params = replace(params, temperature=sampler.temperature)
        session_id = self._episode_id if name == "main" else f"{self._episode_id}/{name}"
        limits = self._limits
        if sampler.context_length != limits.context_length:
            limits = replace(limits, context_length=sampler.context_length)
        session = self._session(session_id, sampler, params, limits, name)
        self.opened[name] = (session, policy)
        self._gateways[session_id] = sampler.gateway
        return session

    def open_judge(self, policy: str, params: SamplingParams) -> Session:
        """Open a session of a frozen policy for one judgement, without the limits of agents. Raises ConfigError.

        A guide among ``params`` is left out where the engine has no structured output.
        """
        if self._origin is not None:
            return self._origin.open_judge(policy, params)
        check_judge(policy, self._frozen, "judge: policy")
        sampler = self._samplers[policy]
        number = sum(name.startswith(f"{JUDGES}/{policy}.") for name in self.opened)
        name = f"{JUDGES}/{policy}.{number}"
        params = params if sampler.info.guides else replace(params, guide=None)
        limits = SessionLimits(sampler.info.context_length)
        session = self._session(f"{self._episode_id}/{name}", sampler, params, limits, name)
        self.opened[name] = (session, policy)
        return session

    def _session(
        self, session_id: str, sampler: Sampler, params: SamplingParams, limits: SessionLimits, name: str
    ) -> Session:
        if isinstance(sampler.client, HostedClient):
            return sampler.client.open(
                id=session_id,
                params=params,
                max_turns=limits.max_turns,
                max_tokens_per_turn=limits.max_tokens_per_turn,
                max_total_tokens=limits.max_total_tokens,
                echo=self._echo,
            )
        return TokenSession(
            sampler.client,
            sampler.renderer,
            id=session_id,
            limits=limits,
            params=params,
            seed=stable_hash("session", self._seed, name),
            one_temperature=self._trained,
            reasoning=self._reasoning,
            echo=self._echo,
        )

    def fork(self, name: str, policy: str, point: BranchPoint | None, branch: int) -> Session:
        """Return a session of a branch: a fork at a point, also of one that the first branch has not opened yet.

        Without a point it is forked before its first turn.

        Raises:
            AgentError: The session has another policy, or is recorded as text and is to be forked at a point.
        """
        if name not in self.opened:
            self.open(name, policy)
            self._forked_only.add(name)
        session, opened_policy = self.opened[name]
        if opened_policy != policy or (point is not None and isinstance(session, TextSession)):
            what = (
                f"has the policy {opened_policy!r}, not {policy!r}"
                if opened_policy != policy
                else "is recorded as text"
            )
            raise AgentError(f"session {name!r} {what}: it cannot be forked")
        seed = stable_hash("branch", self._seed, name, branch)
        if point is None:
            return session.fork((), seed=seed)
        resampled = point.turn if point.session == name else None
        return session.fork(point.turns.get(name, ()), resample=resampled, seed=seed)

    def fork_all(self, episode: Episode, number: int) -> dict[str, Session]:
        """Return forks of an episode's sessions from here, the n-th that its agent makes. Raises AgentError."""
        try:
            return {
                name: session.fork(seed=stable_hash("own fork", self._seed, name, number))
                for name, session in episode.sessions.items()
            }
        except SessionError as error:
            raise AgentError(f"episode.fork: {error}") from error

    def open_beside(self, number: int, name: str, policy: str) -> Session:
        """Open a session of a fork that its agent drives: in the tree of an open one of that name, if any."""
        if name not in self.opened:
            return self.open(name, policy)
        session, opened_policy = self.opened[name]
        if opened_policy != policy:
            raise AgentError(
                f"session {name!r} is open with the policy {opened_policy!r}, not {policy!r}, in another fork"
            )
        return session.fork((), seed=stable_hash("own fork", self._seed, name, number))

    async def endpoint(self, session: Session) -> SessionEndpoint:
        """Return the endpoint of a session, always the same."""
        if session.id not in self._endpoints:
            gateway = self._gateways[session.id]
            if gateway is self._gateway and self._base is None:
                self._base = gateway.form.take()
            name = next(name for name, (opened, _) in self.opened.items() if opened is session)
            # A proxy in front of the run's gateway does not reach the gateway of a frozen policy.
            base = self._base if gateway is self._gateway else None
            rollout_id = self._rollout_id if self._origin is None else f"{self._rollout_id}~{self._number}"
            branch_session_id = None if self._origin is None else f"{session.id}~{self._number}"
            endpoint_path = Place(rollout_id, self._attempt_id, name, base)
            self._endpoints[session.id] = await gateway.open(session, endpoint_path, branch_session_id)
        return self._endpoints[session.id]

    @contextlib.asynccontextmanager
    async def acting(self) -> AsyncIterator[None]:
        """Watch over an agent; on exit its endpoints are closed.

        Raises:
            TurnwiseError: The last error at an endpoint, where that ended the agent: an exhausted budget, or an
                infrastructure failure.
        """
        try:
            try:
                yield
            except Exception as error:  # an agent's code may wrap a failure of its session in anything
                failure = self._failure()
                if failure is not None:
                    raise failure from error
                raise
            failure = self._failure()
            if failure is not None:
                raise failure
        finally:
            for session_id, endpoint in self._endpoints.items():
                await self._gateways[session_id].shut(endpoint)
            self._gateway.form.release(self._base)
            self._base = None

    def _failure(self) -> TurnwiseError | None:
        failures = [endpoint.failure for endpoint in self._endpoints.values()]
        return next((failure for failure in failures if failure is not None), None)


def metrics_of(session: Session, episode: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a session and its episode.

    Args:
        session: The session.
        episode: Metrics of the episode; its temperature does not apply to a hosted endpoint, whose requests set their
            own.
    """
    if isinstance(session, TextSession):
        episode = {name: value for name, value in episode.items() if name != "temperature"}
    elif "temperature" in episode:
        # A frozen policy may have another temperature.
        episode = {**episode, "temperature": session.params.temperature}
    return {**session.metrics(), **episode}


def turn_metrics(session: Session, name: str, episode: Episode | None) -> dict[str, dict[str, float]]:
    """Return the metrics of a session's turns, by turn id."""
    reported = session.turn_metrics if isinstance(session, TextSession) else {}
    metrics = {turn: dict(values) for turn, values in reported.items()}
    for (agent, turn), values in episode.turn_metrics.items() if episode else ():
        if agent == name:
            metrics.setdefault(turn, {}).update(values)
    return metrics


def session_trajectories(
    blank: Trajectory,
    opened: Mapping[str, tuple[Session, str]],
    episode: Episode | None,
    *,
    compare: Compare,
    frozen: Collection[str] = (),
    branches: Mapping[str, list[Branch]] | None = None,
) -> list[Trajectory]:
    """Return one trajectory for each session, the main one first, the others in the order of opening.

    Args:
        blank: The common fields; the result where no session was opened.
        opened: Session and policy by the session's name.
        episode: Holds rewards and metrics; None where the reset failed.
        compare: See :func:`~turnwise.agents.roles.compared_within`.
        frozen: The policies that are never trained.
        branches: Of a forked episode, by the session's name.
    """
    rewards = episode.rewards if episode is not None else []
    metrics = episode.metrics if episode is not None else {}
    if not opened:
        return [replace(blank, rewards=_events(rewards, "main"), metrics=blank.metrics | metrics)]
    result: list[Trajectory] = []
    notes = episode.turn_notes if episode is not None else {}
    episode_note = {"": notes["main", None]} if ("main", None) in notes else {}
    for name, (session, policy) in sorted(opened.items(), key=lambda item: item[0] != "main"):
        # Metrics and notes of the episode are recorded once, in its first trajectory.
        counted = metrics_of(session, blank.metrics) | ({} if result else metrics)
        segments, session_branches = session.segments(), (branches or {}).get(name, [])
        result.append(
            replace(
                blank,
                id=session.id,
                group_id=compared_within(blank.group_id, name, policy, compare, frozen=policy in frozen),
                agent=name,
                policy=policy,
                frozen=policy in frozen,
                reasoning=session.reasoning,
                echo=session.echo,
                recorded=session.recorded_as,
                segments=leave_out_failed(segments, session_branches) if session_branches else segments,
                branches=session_branches,
                rewards=_events(rewards, name),
                metrics=counted,
                turn_metrics=turn_metrics(session, name, episode),
                turn_times=dict(session.turn_times),
                turn_notes=({} if result else episode_note) | _of_agent(notes, name),
                states=_of_agent(episode.states if episode is not None else {}, name),
            )
        )
    return result


def _events(rewards: Sequence[Reward], agent: str) -> list[tuple[str | None, str, float]]:
    return [(reward.turn_id, reward.name, reward.value) for reward in rewards if reward.agent == agent]


_T = TypeVar("_T")


def _of_agent(by_turn: Mapping[tuple[str, str | None], _T], agent: str) -> dict[str, _T]:
    return {turn or "": value for (name, turn), value in by_turn.items() if name == agent}
