"""The contract of agents: what runs in an episode, and what it is given."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, TypeVar, cast

from turnwise.agents.roles import TRAINED, check_name
from turnwise.envs.core import Env, StepResult, in_thread, invoke
from turnwise.envs.results import ScoreParts, agent_parts
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import AgentError, BudgetExceeded, EnvError, SandboxError, TurnwiseError
from turnwise.recorder.session import Session
from turnwise.sandboxes.core import Mount, Sandbox
from turnwise.tasks.core import Task
from turnwise.tools.response import CountTokens, OutputLimit, call_counts
from turnwise.types import Message, StopReason, ToolCall, ToolSchema

if TYPE_CHECKING:
    from turnwise.gateway.local import Door
    from turnwise.tools.response import ToolResponse


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """What an agent may use; the session and the runner enforce it.

    Attributes:
        max_turns: Model calls per session.
        max_tokens_per_turn: Tokens of one completion, None up to the context.
        context_length: Tokens of prompt and completion together.
    """

    max_turns: int
    max_tokens_per_turn: int | None
    context_length: int


async def recorded_turns(session: Session) -> list[str]:
    """Return the ids of the turns that a session of this process has recorded, in order."""
    return [each.turn_id for each in session.segments(messages=False) if each.sampled and each.turn_id is not None]


States: TypeAlias = dict[tuple[str, str | None], str]
"""The state after a turn, by session and turn id; the id is None for the one that the session begins in."""


def first_state(info: Mapping[str, Any]) -> States:
    """Return what ``reset`` said, for the session that moves first."""
    state = _named(info)
    return {} if state is None else {(info.get("turn") or "main", None): state}


def note_state(
    states: States, info: Mapping[str, Any], agent: str, turn: str | None, last_turn: Callable[[str], str | None]
) -> None:
    """Note what a step said, for the session that moves next.

    Args:
        states: What is known so far; added to.
        info: What the step returned.
        agent: The session whose message it was.
        turn: Its turn; without one nothing is noted.
        last_turn: Tells the last turn of another session, None where it had none.
    """
    state, mover = _named(info), info.get("turn") or agent
    if state is not None and turn is not None:
        states[mover, turn if mover == agent else last_turn(mover)] = state


def _named(info: Mapping[str, Any]) -> str | None:
    """Return a name; what is no text and no whole number is the environment's own affair."""
    state = info.get("state")
    return str(state) if isinstance(state, (str, int)) and not isinstance(state, bool) else None


MARKUP: Final = 64
"""Tokens that are reckoned for what a chat template writes around one message, in a context of at least 1,024."""
_ANSWER_SHARE: Final = 8


def tool_result_budget(room: int, context_length: int, max_tokens_per_turn: int | None, answers: int) -> int:
    """Return how many tokens the texts of answers may take together.

    Args:
        room: Tokens left of the context behind the turn that called.
        context_length: Tokens of prompt and completion together.
        max_tokens_per_turn: Tokens of one completion. As many are kept free for the next one, but at most an eighth of
            the context.
        answers: How many answers there are.
    """
    eighth = max(1, context_length // _ANSWER_SHARE)
    markup = min(MARKUP, context_length // 16)
    return room - min(max_tokens_per_turn or eighth, eighth) - markup * (answers + 1)


def truncate_tool_results(texts: Sequence[str], room: int, count_tokens: CountTokens) -> list[str]:
    """Return texts that take at most ``room`` tokens together: shorter ones whole, longer ones cut to equal shares.

    Args:
        texts: Any texts.
        room: Tokens. Where it is not even one for each text, nothing is cut: the context is full.
        count_tokens: Counts the tokens of a text.
    """
    # No text has more tokens than bytes (a prefix aside, which the markup covers): nearly always nothing is counted.
    if room < len(texts) or sum(len(text.encode("utf-8", "replace")) for text in texts) <= room:
        return list(texts)
    sizes = [count_tokens(text) for text in texts]
    if sum(sizes) <= room:
        return list(texts)
    found = list(texts)
    left = room
    for number, index in enumerate(sorted(range(len(texts)), key=sizes.__getitem__)):
        share = left // (len(texts) - number)
        if sizes[index] > share:
            found[index] = OutputLimit(share, "tokens").cut(texts[index], count_tokens)
            sizes[index] = share
        left -= sizes[index]
    return found


def fit_messages(messages: Sequence[Message], room: int, count_tokens: CountTokens) -> tuple[list[Message], int]:
    """Return messages whose tool answers fit (see :func:`truncate_tool_results`), and how many of them were cut."""
    places = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "tool" and isinstance(message.get("content"), str)
    ]
    texts = [str(messages[index]["content"]) for index in places]
    found: list[Message] = list(messages)
    cut = 0
    for index, before, after in zip(places, texts, truncate_tool_results(texts, room, count_tokens), strict=True):
        if after != before:
            found[index] = {**messages[index], "content": after}
            cut += 1
    return found, cut


@dataclass(slots=True)
class Reward:
    """A reward event: which session and turn it belongs to (None: to the episode), its name and value."""

    agent: str
    turn_id: str | None
    name: str
    value: float


def finite(what: str, value: float) -> None:
    """Refuse a number that is none.

    Raises:
        AgentError: It is not finite.
    """
    if not math.isfinite(value):
        raise AgentError(f"{what} is {value}: it must be a finite number")


def check_owners(rewards: Iterable[Reward], sessions: Collection[str]) -> None:
    """See that every reward has a session whose trajectory holds it. Where there is none at all, that of ``main`` does.

    Raises:
        AgentError: A reward would be lost.
    """
    owners = set(sessions) or {"main"}
    lost = [reward for reward in rewards if reward.agent not in owners and reward.value]
    if lost:
        held = ", ".join(sorted(sessions)) or "none"
        raise AgentError(
            f"the reward {lost[0].name!r} ({lost[0].value:g}) is for {lost[0].agent!r}, which has no session; the "
            f"episode's sessions: {held}. Name one of them (info['agent_rewards'], ScoreParts(agents=...), "
            "episode.note(agent=...)), or open a session for it with episode.session_for, also where it may never speak"
        )


T = TypeVar("T")
OpenSession = Callable[[str, str], Session]
OpenDoor = Callable[[Session], Awaitable["Door"]]
ListTurns = Callable[[Session], Awaitable[list[str]]]


class ToolThreadLost(EnvError):
    """Code of a tool or an environment was given up and cannot be stopped: its environment must not be used again."""

    retryable: ClassVar[bool] = False


class Episode:
    """What an agent is given. Made by the runner, which resets the environment before and closes it after.

    Attributes:
        id: Names the episode in this run; each attempt at a task is an episode of its own.
        partition: ``train`` or ``val``.
        attempt: 0 at first, counted up when an infrastructure failure ended the one before.
        task: The dataset row.
        seed: The seed with which the environment was reset.
        observation: Messages that ``reset`` returned: the beginning of the conversation.
        info: What else ``reset`` returned.
        tools: What the model may call.
        limits: What the agent may use.
        deadline: Event loop time at which the runner ends the episode, or None.
        rewards: Reward events so far.
        metrics: Counts and times so far; ``turn_metrics`` by session and turn id.
        states: What the environment called the state after a turn, by session and turn id; after reset the id is None.
        rewarded: Whether the agent says itself what the episode is worth (:meth:`reward`): the environment is not
            asked to score it.
        list_turns: Tells the turns of a session by their ids; the recorder may be elsewhere.
    """

    def __init__(
        self,
        env: Env,
        task: Task,
        seed: int,
        *,
        observation: Sequence[Message],
        info: dict[str, Any],
        tools: Sequence[ToolSchema],
        limits: EpisodeLimits,
        open_session: OpenSession,
        open_door: OpenDoor | None = None,
        list_turns: ListTurns | None = None,
        deadline: float | None = None,
        executor: Executor | None = None,
        id: str = "",  # noqa: A002 - the field's name for it
        partition: str = "train",
        attempt: int = 0,
    ) -> None:
        self.id = id
        self.partition = partition
        self.attempt = attempt
        self.task = task
        self.seed = seed
        self.observation = list(observation)
        self.info = info
        self.tools = tuple(tools)
        self.limits = limits
        self.deadline = deadline
        self.rewards: list[Reward] = []
        self.metrics: dict[str, float] = {}
        self.turn_metrics: dict[tuple[str, str], dict[str, float]] = {}
        self.scored = self.rewarded = self.ended = False
        self.stop_reason = StopReason.COMPLETED
        self.final: Message | None = None
        self._env = env
        self._executor = executor
        self._open_session = open_session
        self._open_door = open_door
        self.list_turns = list_turns or recorded_turns
        self._sessions: dict[str, Session] = {}
        self._policies: dict[str, str] = {}
        self.states = first_state(info)
        self._failure: TurnwiseError | None = None

    @property
    def env(self) -> Env:
        """The environment, for methods that only it has; what others have goes through the episode."""
        return self._env

    @property
    def sandbox(self) -> Sandbox | None:
        """Where the episode's commands run; None where its environment opened none."""
        return self._env.sandbox

    @property
    def session(self) -> Session:
        """The main session."""
        return self.session_for("main")

    @property
    def sessions(self) -> dict[str, Session]:
        """All sessions that were opened, by name."""
        return dict(self._sessions)

    def session_for(self, name: str, policy: str | None = None) -> Session:
        """Return the session of that name, opened when it is first asked for.

        Args:
            name: Whose session: each leaves a trajectory of its own. ``solver/0`` and ``solver/1`` are of one role.
            policy: Who samples in it: ``main``, the trained one and the default, or one of ``rollout.frozen``.

        Raises:
            AgentError: It cannot be called so, another policy samples in it, or there is no such policy.
        """
        if name not in self._sessions:
            self._sessions[name] = self._open_session(check_name(name), policy or TRAINED)
            self._policies[name] = policy or TRAINED
        elif policy is not None and policy != self._policies[name]:
            raise AgentError(f"session {name!r} is open with the policy {self._policies[name]!r}, not {policy!r}")
        return self._sessions[name]

    async def address(self, name: str = "main", policy: str | None = None) -> str:
        """Return a base URL at which a program talks to the model in that session, until the agent returns.

        It speaks OpenAI Chat and Responses (with ``/v1`` behind it) and Anthropic Messages, records every token, and
        holds a token that cannot be guessed. How it samples is the run's to say, whatever a program asks for.

        Raises:
            AgentError: This episode was made without a gateway.
        """
        return (await self.door(name, policy)).url

    async def door(self, name: str = "main", policy: str | None = None) -> Door:
        """Return that address together with what becomes of requests there; raises what :meth:`address` does."""
        if self._open_door is None:
            raise AgentError("episode.address: this episode has no gateway; ask episode.session.chat instead")
        return await self._open_door(self.session_for(name, policy))

    async def step(self, message: Message, *, agent: str = "main", spare: int = 0) -> StepResult:
        """Hand an assistant message to the environment.

        Rewards and metrics of the step are noted on the turn whose message this is. Answers are cut to the room that
        the context has left, and ``spare`` tokens that the agent frees before it asks again.

        Returns:
            The step's result; its observation is always a list of messages.

        Raises:
            EnvError: The environment raised or broke its contract.
            AgentError: The episode has ended already.
        """
        if self.ended:
            raise AgentError("episode.step was called after the episode ended: stop when a step says so")
        try:
            result: StepResult = await self._invoke("step", message)
        except asyncio.CancelledError:
            if self._env.pending_score is not None:
                # The message was the answer and is being judged: what interrupts that does not change how it ended.
                self.ended, self.final = True, message
            raise
        info = result.info
        turn = message.get("turn_id")
        named = info.get("rewards") or ({"step": result.reward} if result.reward else {})
        for name, value in named.items():
            self.note(name, value, turn, agent=agent)
        for other, parts in agent_parts(info.get("agent_rewards"), "step").items():
            for name, value in parts.items():
                self.note(name, value, turn if other == agent else self._last_turn(other), agent=other)
        self.count(info.get("metrics") or {}, turn, agent=agent)
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
        truncate_tool_results = self.fit(answers, turn, calls, agent, spare=spare)
        return result if truncate_tool_results is answers else result._replace(observation=truncate_tool_results)

    async def call(self, call: ToolCall, *, agent: str = "main") -> ToolResponse:
        """Answer one tool call, outside of a step. Its reward is noted on the turn that made the call.

        Raises:
            EnvError: The environment raised or broke its contract.
            BudgetSpent: So many calls in a row were unusable that the episode ends; let it pass, the runner knows
                what it means.
            AgentError: The episode has ended already, or its environment answers no single calls.
        """
        if not isinstance(self._env, ToolEnv):
            raise AgentError(
                f"episode.call: {type(self._env).__qualname__} is no ToolEnv and answers whole messages only: hand "
                "them to episode.step, or choose another agent"
            )
        if self.ended and self.stop_reason is not StopReason.INVALID_CALLS:
            raise AgentError("episode.call was called after the episode ended: stop when a step says so")
        self._check_invalid(self._env)
        response: ToolResponse = await self._invoke("call", call)
        session = self.session_for(agent)
        turn = session.turn_of_call(call.id)
        if response.reward is not None:
            self.note(f"tool/{call.name}", response.reward, turn, agent=agent)
        measured = {f"{call.name}/{name}": value for name, value in response.metrics.items()}
        measured |= call_counts(call.name, response, [tool.name for tool in self.tools])
        self.count(measured, turn, agent=agent)
        self._check_threads()
        self._check_invalid(self._env)
        if response.text:
            # Its siblings are answered by calls of their own: each gets an equal share.
            calls = session.calls_beside(call.id)
            [answer] = self.fit([{"role": "tool", "content": response.text}], turn, calls, agent, share=True)
            response.text = str(answer["content"])
        return response

    def fit(
        self, messages: list[Message], turn: str | None, calls: int, agent: str, *, share: bool = False, spare: int = 0
    ) -> list[Message]:
        """Cut answers to a turn's calls (one's: ``share``) to the room behind it and ``spare``, soon to be freed."""
        session, count_tokens = self._sessions.get(agent), self._env.count_tokens
        left = None if session is None or turn is None or not calls else session.room_behind(turn)
        if left is None or count_tokens is None:
            return messages
        room = tool_result_budget(left + spare, self.limits.context_length, self.limits.max_tokens_per_turn, calls)
        found, cut = fit_messages(messages, room // calls if share else room, count_tokens)
        if cut:
            self.count({"tool_answers_cut": float(cut)}, turn, agent=agent)
        return found

    def note(self, name: str, value: float, turn_id: str | None = None, *, agent: str = "main") -> None:
        """Note a reward on a turn, or with None on the episode. Raises AgentError where it is not finite."""
        finite(f"episode.note: reward {name!r}", value)
        self.rewards.append(Reward(agent, turn_id, name, float(value)))

    def reward(self, value: float, turn_id: str | None = None, *, name: str = "reward", agent: str = "main") -> None:
        """Say what the episode is worth, or with a turn what that was worth, in the place of the environment.

        The environment is not asked to score the episode any more. Rewards add up.

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
        """Run a plain function in one of the run's threads, and return what it returns.

        A thread cannot be stopped. Where the episode ends first, it is given up and counted, as a tool's would be.
        """
        result: T = await in_thread(self._env, function, args, kwargs)
        return result

    def count(self, metrics: Mapping[str, float], turn_id: str | None = None, *, agent: str = "main") -> None:
        """Add to the episode's metrics, and to those of a turn where one is named.

        Raises:
            AgentError: One is not finite.
        """
        for name, value in metrics.items():
            finite(f"episode.count: metric {name!r}", value)
            self.metrics[name] = self.metrics.get(name, 0.0) + float(value)
            if turn_id is not None and value:
                of_turn = self.turn_metrics.setdefault((agent, turn_id), {})
                of_turn[name] = of_turn.get(name, 0.0) + float(value)

    def finish(self, reason: StopReason, final: Message | None = None) -> None:
        """Say how the agent's run ended, and which message is its answer.

        Without this call an agent that returns has completed, and its last message, if it makes no calls, is
        the answer.
        """
        self.stop_reason = reason
        self.final = final

    async def score(self) -> None:
        """Score the episode, unless a step did. Called once, by the runner.

        Raises:
            EnvError: The environment raised or broke its contract, now or in a step whose error the agent caught.
            InferenceError: The last request of a session failed, and the agent caught the error: what is missing
                then is no fault of the policy.
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
        parts: ScoreParts = await invoke(self._env, "score", self.answer, executor=self._executor)
        for name, value in parts.items():
            self.note(name, value)
        for agent, own in agent_parts(parts.agents, "score").items():
            for name, value in own.items():
                self.note(name, value, agent=agent)
        self.count(parts.metrics)
        self._check_threads()

    @property
    def answer(self) -> Message | None:
        """The message that is scored: what :meth:`finish` was given, else a last message without calls."""
        if self.final is not None or self.stop_reason is not StopReason.COMPLETED:
            return self.final
        main = self._sessions.get("main")
        last = main.last if main is not None else None
        return last if last is not None and not last.get("tool_calls") else None

    def _last_turn(self, agent: str) -> str | None:
        last = self._sessions[agent].last if agent in self._sessions else None
        return None if last is None else last["turn_id"]

    async def _invoke(self, method: str, *args: Any) -> Any:
        try:
            return await invoke(self._env, method, *args, executor=self._executor)
        except (EnvError, SandboxError) as error:
            self._failure = error
            raise

    def _check_threads(self) -> None:
        if self._env.lost_thread:
            raise ToolThreadLost(
                f"a sync tool or method of {type(self._env).__name__} outran its time-out: its thread cannot be "
                "stopped, so the episode ends; make it async, or give what it waits for a time-out of its own"
            )

    def _check_invalid(self, env: ToolEnv) -> None:
        """End the episode as a step would: an agent that answers call by call sees no step that says so."""
        if 0 < env.max_invalid_calls <= env.invalid_in_a_row:
            self.ended = True
            self.finish(StopReason.INVALID_CALLS)
            counted = f"{env.invalid_in_a_row} calls in a row did not reach a tool"
            raise BudgetExceeded(StopReason.INVALID_CALLS, f"{counted}; max_invalid_calls is {env.max_invalid_calls}")


class Agent(ABC):
    """Acts in an episode. What it did is what the sessions recorded.

    Subclasses are constructed from keyword arguments of the configuration, once per run; ``run`` is called once
    per episode, many at the same time, so it keeps its state in local variables.
    """

    # Whether its prompts hold the environment's tools, which the chat template must then show.
    offers_tools: ClassVar[bool] = True

    @abstractmethod
    async def run(self, episode: Episode) -> None:
        """Act until the environment ends the episode or nothing is left to do; let a BudgetSpent pass to the runner."""

    async def close(self) -> None:  # noqa: B027 - most agents hold nothing
        """Release what the agent holds between episodes. Called once, when no episode runs any more."""

    def policies(self) -> frozenset[str]:
        """The policies that its sessions name: a run sees beforehand whether they are there."""
        return frozenset({TRAINED})

    def sandbox_mounts(self) -> tuple[Mount, ...]:
        """What of the host it needs to see, read-only, in the sandbox of its episodes, where its program runs there."""
        return ()
