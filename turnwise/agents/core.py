"""The contract of agents: the Agent base class, and the Episode that it acts in."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from turnwise.agents.forks import EpisodeRecord, ForkGate
from turnwise.agents.limits import EpisodeLimits, fit_messages, tool_result_budget
from turnwise.agents.notes import Reward, check_finite, first_state, note_state
from turnwise.agents.roles import check_name, policy_of
from turnwise.envs.core import Env, StepResult, call_env, fork_env, in_thread, score_env, step_env
from turnwise.envs.results import agent_parts
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, BudgetExceeded, EnvError, InferenceError, SandboxError, TurnwiseError
from turnwise.recorder.session import Session
from turnwise.sandboxes.core import Mount, Sandbox
from turnwise.tasks.core import Task
from turnwise.tools.response import CountTokens, call_counts
from turnwise.types import Message, SamplingParams, StopReason, ToolCall, ToolSchema

if TYPE_CHECKING:
    from turnwise.gateway.local import SessionEndpoint
    from turnwise.tools.response import ToolResponse


async def recorded_turns(session: Session) -> list[str]:
    """Return the ids of the recorded turns of a local session, in order."""
    segments = session.segments(messages=False)
    return [segment.turn_id for segment in segments if segment.sampled and segment.turn_id is not None]


T = TypeVar("T")
Action = TypeVar("Action", Message, ToolCall)
OpenSession = Callable[[str, str], Session]
OpenFork = Callable[["Episode"], Awaitable["Episode"]]
OpenEndpoint = Callable[[Session], Awaitable["SessionEndpoint"]]
ListTurns = Callable[[Session], Awaitable[list[str]]]


class ToolThreadLost(EnvError):
    """A tool's or environment's thread was abandoned and cannot be stopped: its environment must not be reused."""

    retryable: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """What a runner prepares for an episode.

    Attributes:
        task: The dataset row.
        seed: Seed of the environment's ``reset``.
        observation: Messages from ``reset``: the head of the conversation.
        info: Info from ``reset``.
        tools: The tools offered to the model.
        limits: Limits of the episode.
        deadline: Event loop time of the timeout, or None.
        id: Unique in the run; each attempt at a task is an episode.
        partition: ``train`` or ``val``.
        attempt: Counts from 0; a retry follows an infrastructure failure.
        roles: Policy of an agent or role (``rollout.roles``).
    """

    task: Task
    seed: int
    observation: Sequence[Message]
    info: dict[str, Any]
    tools: Sequence[ToolSchema]
    limits: EpisodeLimits
    deadline: float | None = None
    id: str = ""
    partition: str = "train"
    attempt: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeHost:
    """What the process that runs an episode does for it.

    Attributes:
        open_session: Opens a session, of a name and a policy.
        open_endpoint: Serves a session's model endpoint; None without a gateway.
        open_fork: Forks the episode; None where its agent cannot.
        open_judge: Opens a session of a frozen policy for a judgement; None where there are no policies.
        list_turns: Returns a session's turn ids; the recorder may be remote.
        executor: Runs sync tools and blocking environments.
    """

    open_session: OpenSession
    open_endpoint: OpenEndpoint | None = None
    open_fork: OpenFork | None = None
    open_judge: Callable[[str, SamplingParams], Session] | None = None
    list_turns: ListTurns = recorded_turns
    executor: Executor | None = None


class Episode:
    """One episode, as an agent sees it. The runner resets the environment before and closes it after.

    Attributes:
        setup: What the runner prepared; ``task``, ``seed``, ``observation``, ``info``, ``tools``, ``limits``,
            ``deadline``, ``id``, ``partition``, ``attempt`` and ``roles`` are its fields.
        rewards: Reward events so far.
        metrics: Metrics so far; ``turn_metrics`` by session and turn id.
        states: Environment states after turns, by session and turn id; the id is None after ``reset``.
        rewarded: Whether the agent set the reward itself (:meth:`reward`); the environment then does not score.
        record: What forks of the episode need; None where the run makes no branches of it.
        origin: The episode that this is a fork of (:meth:`fork`), or None.
        list_turns: Returns a session's turn ids; the recorder may be remote.
    """

    def __init__(
        self,
        env: Env,
        setup: EpisodeSetup,
        host: EpisodeHost,
        *,
        record: EpisodeRecord | None = None,
        origin: Episode | None = None,
        sessions: Mapping[str, Session] | None = None,
    ) -> None:
        self.setup = setup
        self.id, self.partition, self.attempt = setup.id, setup.partition, setup.attempt
        self.task, self.seed = setup.task, setup.seed
        self.observation, self.info = list(setup.observation), setup.info
        self.tools, self.limits, self.deadline = tuple(setup.tools), setup.limits, setup.deadline
        self.roles = dict(setup.roles)
        self.record = record
        self.origin = origin
        self.scored = self.ended = False
        self.rewarded: bool = origin is not None and origin.rewarded
        self.stop_reason = StopReason.COMPLETED
        self.final: Message | None = None
        self.states = first_state(setup.info)
        self._clear_notes()
        self._env = env
        env.main_session = lambda: self._sessions.get("main")
        env.open_judge = host.open_judge
        self._host = host
        self.list_turns = host.list_turns
        self._env_calls = 0
        self._sessions: dict[str, Session] = dict(sessions or {})
        self._policies: dict[str, str] = {} if origin is None else dict(origin._policies)
        self._failure: TurnwiseError | None = None

    def _clear_notes(self) -> None:
        self.rewards: list[Reward] = []
        self.metrics: dict[str, float] = {}
        self.turn_metrics: dict[tuple[str, str], dict[str, float]] = {}
        self.turn_notes: dict[tuple[str, str | None], dict[str, str]] = {}

    @property
    def env(self) -> Env:
        """The environment, for its additional methods; all others go through the episode."""
        self._check_live("env")
        return self._env

    @property
    def sandbox(self) -> Sandbox | None:
        """The environment's sandbox, or None."""
        self._check_live("sandbox")
        return self._env.sandbox

    def _check_live(self, what: str) -> None:
        if self.record is not None and not self.record.live:
            raise AgentError(
                f"episode.{what} cannot be used before the fork of an episode: it is in the state of the fork already, "
                "where what is done would be done twice; act through episode.step and episode.call"
            )

    @property
    def session(self) -> Session:
        """The main session."""
        return self.session_for("main")

    @property
    def sessions(self) -> dict[str, Session]:
        """All open sessions, by name."""
        return dict(self._sessions)

    def session_for(self, name: str, policy: str | None = None) -> Session:
        """Return the session of that name; the first request opens it.

        Args:
            name: Name of the session; each makes a trajectory. ``solver/0`` and ``solver/1`` share the role ``solver``.
            policy: Policy that samples, of ``policies`` or ``rollout.frozen``; by default that of ``rollout.roles``,
                else ``main``.

        Raises:
            AgentError: The name is invalid, the session has another policy, or the policy is unknown.
        """
        named_policy = policy or policy_of(name, self.roles)
        if name not in self._sessions:
            session = self._sessions[name] = self._host.open_session(check_name(name), named_policy)
            self._policies[name] = named_policy
            if self.record is not None:
                self.record.sessions = self._sessions
                session.gate = ForkGate(self.record, name, self._save_state)
        elif policy is not None and policy != self._policies[name]:
            raise AgentError(
                f"session {name!r} is open with the policy {self._policies[name]!r}, not {policy!r}: a session has "
                "one policy and its tokenizer: open another session for the other policy"
            )
        return self._sessions[name]

    async def _save_state(self, record: EpisodeRecord, name: str, *, first: bool) -> None:
        """Keep the state before a model call; the first call of a fork ends the repetition of what was before it."""
        if first:
            # The original has noted all that came before.
            self._clear_notes()
            self.states = {}
        if not record.idle:
            return
        try:
            fork = await fork_env(self._env, executor=self._host.executor)
        except (EnvError, SandboxError) as error:
            record.refused, record.refusals = str(error), record.refusals + 1
            return
        record.add_point(name, fork, len(self.rewards))

    async def address(self, name: str = "main", policy: str | None = None) -> str:
        """Return a base URL of the session's model endpoint, valid until the agent returns.

        It serves OpenAI Chat and Responses (under ``/v1``) and Anthropic Messages, records every token, and holds an
        unguessable token. Sampling is the run's, whatever a request asks for.

        Raises:
            AgentError: The episode has no gateway.
        """
        return (await self.endpoint(name, policy)).url

    async def endpoint(self, name: str = "main", policy: str | None = None) -> SessionEndpoint:
        """Return that endpoint with its accounts of requests; raises as :meth:`address`."""
        self._check_live("endpoint")
        if self._host.open_endpoint is None:
            raise AgentError("episode.address: this episode has no gateway; ask episode.session.chat instead")
        return await self._host.open_endpoint(self.session_for(name, policy))

    async def step(self, message: Message, *, agent: str = "main", spare: int = 0) -> StepResult:
        """Pass an assistant message to the environment.

        Rewards and metrics are noted on the message's turn. Tool results are cut to the room left in the context, plus
        ``spare`` tokens that the agent frees before its next request.

        Returns:
            The step's result; its observation is always a list of messages.

        Raises:
            EnvError: The environment raised or broke its contract.
            AgentError: The episode has ended already.
        """
        if self.ended:
            raise AgentError("episode.step was called after the episode ended: stop when a step ends it")
        try:
            result = await self._act(step_env, message, agent)
        except asyncio.CancelledError:
            if self._env.pending_score is not None:
                # The message was the answer and is being judged: what interrupts that does not change how it ended.
                self.ended, self.final = True, message
            raise
        info = result.info
        turn = message.get("turn_id")
        rewards = info.get("rewards") or ({"step": result.reward} if result.reward else {})
        for name, value in rewards.items():
            self.note(name, value, turn, agent=agent)
        for other, parts in agent_parts(info.get("agent_rewards"), "step").items():
            for name, value in parts.items():
                self.note(name, value, turn if other == agent else self._last_turn(other), agent=other)
        self.count(info.get("metrics") or {}, turn, agent=agent)
        for notes in ("tool_notes", "notes"):
            self._note_texts(info.get(notes) or {}, turn, agent)
        note_state(self.states, info, agent, turn, self._last_turn)
        self._check_threads()
        if result.terminated or result.truncated:
            self.ended = True
            self.scored = result.terminated
            self.final = message if result.terminated else None
            reason = info.get("stop_reason") or StopReason.ENV_TRUNCATED
            self.stop_reason = StopReason.COMPLETED if result.terminated else StopReason(reason)
            return result
        calls = len(message.get("tool_calls") or ())
        answers = cast("list[Message]", result.observation)
        fitted = fit_results(self, answers, turn, calls, agent, spare=spare)
        return result if fitted is answers else result._replace(observation=fitted)

    async def call(self, call: ToolCall, *, agent: str = "main") -> ToolResponse:
        """Execute one tool call outside of a step. Its reward is noted on the calling turn.

        Raises:
            EnvError: The environment raised or broke its contract.
            BudgetExceeded: Too many invalid calls in a row; let it propagate to the runner.
            AgentError: The episode has ended, or the environment does not take single calls.
        """
        if not isinstance(self._env, ToolEnv):
            raise AgentError(
                f"episode.call: {type(self._env).__qualname__} is not a ToolEnv and answers whole messages only: hand "
                "them to episode.step, or choose another agent"
            )
        if self.ended and self.stop_reason is not StopReason.INVALID_CALLS:
            raise AgentError("episode.call was called after the episode ended: stop when a step ends it")
        self._check_invalid(self._env)
        response = await self._act(call_env, call, agent)
        session = self.session_for(agent)
        turn = session.turn_of_call(call.id)
        if response.reward is not None:
            self.note(f"tool/{call.name}", response.reward, turn, agent=agent)
        measured = {f"{call.name}/{name}": value for name, value in response.metrics.items()}
        measured |= call_counts(call.name, response, [tool.name for tool in self.tools])
        self.count(measured, turn, agent=agent)
        self._note_texts({f"{call.name}/{name}": text for name, text in response.notes.items()}, turn, agent)
        self._check_threads()
        self._check_invalid(self._env)
        if response.text:
            # Its sibling calls are answered one by one: each gets an equal share.
            calls = session.issued.count_sibling_calls(call.id)
            text: Message = {"role": "tool", "content": response.text}
            [answer] = fit_results(self, [text], turn, calls, agent, share=True)
            response.text = str(answer["content"])
        return response

    async def fork(self) -> Episode:
        """Return an independent episode in the same state: a fork of the environment and of every open session.

        The agent drives both, with copies of its messages; it copies its variables itself. They are two branches of
        one episode. What was sampled and noted until here counts in both and is recorded once; a fork begins without
        metrics and rewards, and samples with other seeds. When the agent returns, each is
        scored and closed; a fork in which nothing was sampled is left out.

        Raises:
            AgentError: The episode has ended, a call of its environment runs, a session has no token ids, or it is one
                that its agent cannot fork.
            EnvError: The environment cannot be forked.
        """
        if self._host.open_fork is None:
            raise AgentError(
                "episode.fork: the agent cannot fork this episode: with rollout.tree or a search the run does that "
                "(leave it out), and a runner elsewhere (rollout.remote) has neither its environment nor its sessions"
            )
        if self.ended or self.scored:
            raise AgentError("episode.fork was called after the episode ended: fork it before the step that ends it")
        if self._env_calls:
            raise AgentError("episode.fork was called while episode.step or episode.call runs: await that first")
        return await self._host.open_fork(self)

    @property
    def count_tokens(self) -> CountTokens | None:
        """Counts the tokens of a text as the model's tokenizer does; None where that is unknown."""
        return self._env.count_tokens

    def note(self, name: str, value: float, turn_id: str | None = None, *, agent: str = "main") -> None:
        """Note a reward on a turn, or on the episode (None). Raises AgentError where it is not finite."""
        check_finite(f"episode.note: reward {name!r}", value)
        self.rewards.append(Reward(agent, turn_id, name, float(value)))

    def reward(self, value: float, turn_id: str | None = None, *, name: str = "reward", agent: str = "main") -> None:
        """Add a reward to the episode, or to a turn, in place of the environment's score.

        Raises:
            AgentError: The environment has scored the episode already, or the value is not finite.
        """
        if self.scored:
            raise AgentError(
                f"episode.reward: the environment has scored this episode already, so {value} cannot be its reward: "
                "leave it out, or note it beside the score (episode.note)"
            )
        self.note(name, value, turn_id, agent=agent)
        self.rewarded = True

    async def in_thread(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run a plain function in one of the run's threads.

        A thread cannot be stopped: at the end of the episode it is abandoned and counted, as a tool's is.
        """
        result: T = await in_thread(self._env, function, args, kwargs)
        return result

    def count(self, metrics: Mapping[str, float], turn_id: str | None = None, *, agent: str = "main") -> None:
        """Add to the metrics of the episode, and of a turn if given.

        Raises:
            AgentError: A value is not finite.
        """
        for name, value in metrics.items():
            check_finite(f"episode.count: metric {name!r}", value)
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
            if turn_id is not None and value:
                of_turn = self.turn_metrics.setdefault((agent, turn_id), {})
                of_turn[name] = of_turn.get(name, 0.0) + float(value)

    def _note_texts(self, notes: Mapping[str, str], turn_id: str | None, agent: str) -> None:
        if notes and isinstance(notes, Mapping):
            texts = self.turn_notes.setdefault((agent, turn_id), {})
            texts.update((str(name), str(text)) for name, text in notes.items())

    def finish(self, reason: StopReason, final: Message | None = None) -> None:
        """Set the stop reason and the final message.

        By default an agent that returns has completed, with its last message, if without calls, as the answer.
        """
        self.stop_reason = reason
        self.final = final

    async def score(self) -> None:
        """Score the episode, unless a step did. Called once, by the runner.

        Raises:
            EnvError: The environment raised or broke its contract, now or in a step whose error the agent caught.
            InferenceError: A session's last request failed and the agent caught the error; the policy is not at fault.
        """
        if self.scored:
            return
        self._check_threads()
        failures = [self._failure, *(session.failure for session in self._sessions.values())]
        for failure in failures:
            if failure is not None:
                raise failure
        self.scored = True
        if self.rewarded:
            return
        parts = await score_env(self._env, self.answer, executor=self._host.executor)
        for name, value in parts.items():
            self.note(name, value)
        for agent, scores in agent_parts(parts.agents, "score").items():
            for name, value in scores.items():
                self.note(name, value, agent=agent)
        self.count(parts.metrics)
        self._note_texts(parts.notes, None, "main")
        self._check_threads()

    @property
    def answer(self) -> Message | None:
        """The scored message: that of :meth:`finish`, else a last message without calls."""
        if self.final is not None or self.stop_reason is not StopReason.COMPLETED:
            return self.final
        main = self._sessions.get("main")
        last_message = main.last if main is not None else None
        return last_message if last_message is not None and not last_message.get("tool_calls") else None

    def _last_turn(self, agent: str) -> str | None:
        last_message = self._sessions[agent].last if agent in self._sessions else None
        return None if last_message is None else last_message["turn_id"]

    async def _act(self, function: Callable[..., Awaitable[T]], action: Action, agent: str) -> T:
        """Pass a message or call to the environment, or repeat the recorded answer before a fork."""
        record = self.record
        if record is not None and not record.live:
            answer = await record.repeat(action, agent)
            if answer is not None:
                return cast("T", answer.result)
        self._env_calls += 1
        try:
            with contextlib.nullcontext() if record is None else record.env_call():
                result = await function(self._env, action, executor=self._host.executor)
        except (EnvError, InferenceError, SandboxError) as error:
            self._failure = error
            raise
        finally:
            self._env_calls -= 1
        if record is not None:
            record.note(action, agent, result)
        return result

    def _check_threads(self) -> None:
        if self._env.lost_thread:
            raise ToolThreadLost(
                f"a sync tool or method of {type(self._env).__name__} outran its time-out: its thread cannot be "
                "stopped, so the episode ends; make it async, or set a time-out on what it waits for"
            )

    def _check_invalid(self, env: ToolEnv) -> None:
        """End the episode after too many invalid calls, for agents that answer call by call."""
        if 0 < env.max_invalid_calls <= env.invalid_in_a_row:
            self.ended = True
            self.finish(StopReason.INVALID_CALLS)
            problem = f"{env.invalid_in_a_row} calls in a row did not reach a tool"
            raise BudgetExceeded(StopReason.INVALID_CALLS, f"{problem}; max_invalid_calls is {env.max_invalid_calls}")


def fit_results(
    episode: Episode,
    messages: list[Message],
    turn: str | None,
    calls: int,
    agent: str,
    *,
    share: bool = False,
    spare: int = 0,
) -> list[Message]:
    """Cut a turn's tool results (``share`` for a single call) to the room left plus ``spare``."""
    session, count_tokens, limits = episode.sessions.get(agent), episode.count_tokens, episode.limits
    context_left = None if session is None or turn is None or not calls else session.context_left(turn)
    if context_left is None or count_tokens is None:
        return messages
    room = tool_result_budget(context_left + spare, limits.context_length, limits.max_tokens_per_turn, calls)
    fitted, cut = fit_messages(messages, room // calls if share else room, count_tokens)
    if cut:
        episode.count({"tool_answers_cut": float(cut)}, turn, agent=agent)
    return fitted


class Agent(ABC):
    """Acts in episodes; its sessions record the actions.

    Constructed once per run from the configuration's keyword arguments. ``run`` is called concurrently, once per
    episode: keep state in local variables.
    """

    # Whether its prompts hold the environment's tools, which the chat template must then show.
    offers_tools: ClassVar[bool] = True
    # Whether it asks its model by ``session.chat`` only, so that a hosted endpoint's model must be configured.
    asks_by_chat: ClassVar[bool] = False
    # Whether it repeats itself when it runs again and sees the same answers, so that its episodes can be forked.
    forkable: ClassVar[bool] = True

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """Act until the environment ends the episode or nothing is left to do; let BudgetExceeded propagate."""

    async def close(self) -> None:  # noqa: B027 - most agents hold nothing
        """Release shared resources. Called once, after the last episode."""

    def policies(self) -> frozenset[str]:
        """The policies that it names for sessions, checked before the run; others follow ``rollout.roles``."""
        return frozenset()

    def sandbox_mounts(self) -> tuple[Mount, ...]:
        """Read-only host mounts that its program needs in the episode's sandbox."""
        return ()
