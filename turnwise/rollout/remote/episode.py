"""RemoteEpisode: an agent's episode in a runner process, with environment, model and recorder at the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp

from turnwise.agents.core import Episode, EpisodeHost, EpisodeSetup
from turnwise.agents.limits import EpisodeLimits
from turnwise.envs.core import Env, StepResult
from turnwise.errors import RunnerDisconnected, SessionError, TurnwiseError
from turnwise.gateway.local import SessionEndpoint
from turnwise.gateway.proxy.session import NoTokens, TextRenderer
from turnwise.gateway.sessions import GatewaySession
from turnwise.recorder.session import Session, SessionLimits
from turnwise.recorder.tree import PromptPlacement
from turnwise.rollout.remote.protocol import PREFIX, dump, error_record, load, read_error, read_message, read_record
from turnwise.tasks.core import Task
from turnwise.tools.response import ToolResponse
from turnwise.types import Message, SamplingParams, StopReason, TokenDelta, ToolCall, ToolSchema


class LeaseClient:
    """Client of one lease at the run.

    Args:
        http: A pooled connection with the run's key.
        base: The URL of the run.
    """

    def __init__(self, http: aiohttp.ClientSession, base: str, runner: str, lease: str) -> None:
        self.base = base
        self._http = http
        self._url = f"{base}/{PREFIX}/{runner}/leases/{lease}"
        self._errors: list[tuple[TurnwiseError, int]] = []

    async def ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return its response.

        Raises:
            TurnwiseError: The error at the run.
            RunnerDisconnected: The run cannot be reached, or the attempt has ended.
        """
        try:
            async with self._http.post(f"{self._url}/{what}", data=dump(body)) as response:
                answer = load(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as gone:
            raise RunnerDisconnected(f"the run cannot be reached: {type(gone).__name__}: {gone}") from gone
        error = answer.get("error")
        if error is None:
            return answer
        if response.status == 400:
            # What the agent sent is wrong, and would be so again.
            raise read_error(error)
        if response.status != 200:
            raise RunnerDisconnected(str(error.get("message")))
        failure = read_error(error)
        self._errors.append((failure, int(error["known"])))
        raise failure

    def record(self, error: BaseException) -> dict[str, Any]:
        """Return an error for a result; one that came from the run by its reference."""
        cause: BaseException | None = error
        while cause is not None:
            for recorded, number in self._errors:
                if recorded is cause:
                    return {**error_record(recorded), "known": number}
            cause = cause.__cause__
        return error_record(error)


class RemoteSession(Session):
    """A session recorded at the run."""

    recorded_as: ClassVar[str] = "elsewhere"

    def __init__(self, lease: LeaseClient, name: str, policy: str, *, episode_id: str, limits: EpisodeLimits) -> None:
        session_limits = SessionLimits(limits.context_length, limits.max_tokens_per_turn, max_turns=limits.max_turns)
        session_id = episode_id if name == "main" else f"{episode_id}/{name}"
        super().__init__(NoTokens(), TextRenderer(), id=session_id, limits=session_limits)
        self._lease = lease
        self._who = {"session": name, "policy": policy}
        self._taken: list[str] = []
        self._calls: dict[str, str] = {}

    @property
    def turns(self) -> int:
        """Committed completions, as known to this runner."""
        return len(self._taken)

    def turn_of_call(self, call_id: str) -> str | None:
        """Return the id of the turn that made a call."""
        return self._calls.get(call_id)

    def context_left(self, turn_id: str) -> int | None:  # noqa: ARG002 - the run cuts answers to fit
        """Return None: only the run knows."""
        return None

    def measure(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None = None) -> int:  # noqa: ARG002
        """Refuse: the tokenizer is at the run."""
        raise SessionError(
            f"session {self.id} is recorded by a run elsewhere, and prompts cannot be measured at a runner: leave "
            "'context' out of the agent's configuration, or rollout.remote out of the run's"
        )

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        params: SamplingParams | None = None,
        *,
        fork: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> Message:
        """Sample a message; see :meth:`Session.chat`."""
        answer = await self._lease.ask(
            "chat",
            {
                **self._who,
                "messages": list(messages),
                "tools": [asdict(tool) for tool in tools or ()],
                "params": None if params is None else asdict(params),
                "fork": fork,
                "template_args": template_args,
            },
        )
        message = read_message(answer["message"])
        self._note(message)
        if message["turn_id"] not in self._taken:
            self._taken.append(message["turn_id"])
        return message

    def stream(
        self,
        messages: Sequence[Message],  # noqa: ARG002 - the signature of what it refuses
        tools: Sequence[ToolSchema] | None = None,  # noqa: ARG002
        params: SamplingParams | None = None,  # noqa: ARG002
        *,
        fork: str | None = None,  # noqa: ARG002
        template_args: Mapping[str, Any] | None = None,  # noqa: ARG002
        key: str = "",  # noqa: ARG002
    ) -> AsyncIterator[PromptPlacement | TokenDelta | Message]:
        """Refuse: a runner gets whole messages."""
        raise SessionError(
            f"session {self.id} is recorded by a run elsewhere, which sends whole messages: ask chat(), or stream from "
            "episode.address()"
        )

    async def taken(self) -> list[str]:
        """Return the ids of the recorded turns, in order."""
        answer = await self._lease.ask("taken", self._who)
        return [str(turn) for turn in answer["taken"]]

    async def refresh(self) -> dict[str, Any]:
        """Fetch what was recorded at the session's endpoint, and return the response."""
        answer = await self._lease.ask("state", self._who)
        self._taken = [str(turn) for turn in answer["taken"]]
        if answer["last"] is not None:
            self._note(read_message(answer["last"]))
        return answer

    def _note(self, message: Message) -> None:
        self.last = message
        self._calls |= {call.id: message["turn_id"] for call in message.get("tool_calls") or ()}

    async def open(self) -> str:
        """Return the base URL of the session's endpoint."""
        answer = await self._lease.ask("door", self._who)
        self.params = read_record(SamplingParams, answer["params"])
        url = str(answer["url"])
        return url if urlsplit(url).scheme else f"{self._lease.base}{url}"

    async def exhausted(self) -> None:
        """Wait until the session's budget is used up."""
        await self._lease.ask("exhausted", self._who)


class RemoteEndpoint(SessionEndpoint):
    """The endpoint of a remote session."""

    async def wait_settled(self) -> None:
        """Fetch the outcome of the requests there."""
        session = self.entry.session
        if isinstance(session, RemoteSession):
            failure = (await session.refresh())["failure"]
            self.entry.note_outcome(None)
            if failure is not None:
                error = read_error(failure)
                self.entry.note_outcome(error)
                if not self.entry.budget_error and not self.entry.request_error:
                    session.failure = error

    async def wait_exhausted(self) -> None:
        """Wait until a request is refused because all turns or tokens are used."""
        session = self.entry.session
        if isinstance(session, RemoteSession):
            await session.exhausted()


class RemoteEpisode(Episode):
    """An episode of a remote run."""

    def __init__(self, lease: LeaseClient, work: Mapping[str, Any]) -> None:
        """Parse the work item."""
        seconds = work["seconds"]
        limits = EpisodeLimits(**work["limits"])
        setup = EpisodeSetup(
            Task.from_record(work["task"]),
            int(work["seed"]),
            [read_message(message) for message in work["observation"]],
            dict(work["info"]),
            [ToolSchema(**tool) for tool in work["tools"]],
            limits,
            None if seconds is None else asyncio.get_running_loop().time() + float(seconds),
            str(work["id"]),
            str(work["partition"]),
            int(work["attempt"]),
            work["roles"],
        )

        def open_session(name: str, policy: str) -> Session:
            return RemoteSession(lease, name, policy, episode_id=setup.id, limits=limits)

        super().__init__(Env(), setup, EpisodeHost(open_session, _open_remote_endpoint, list_turns=_turns))
        self._lease = lease
        self._counted: list[tuple[dict[str, float], str | None, str]] = []
        self._finished = False

    async def step(self, message: Message, *, agent: str = "main", spare: int = 0) -> StepResult:  # noqa: ARG002
        """Pass an assistant message to the environment at the run."""
        answer = await self._lease.ask("step", {"session": agent, "message": message})
        observation, reward, terminated, truncated, info = answer["result"]
        if isinstance(observation, list):
            observation = [read_message(record) for record in observation]
        if terminated or truncated:
            self.ended, self.scored = True, bool(answer["scored"])
            self.stop_reason = StopReason(answer["stop_reason"])
            self.final = message if terminated else None
        return StepResult(observation, reward, terminated, truncated, info)

    async def call(self, call: ToolCall, *, agent: str = "main") -> ToolResponse:
        """Execute a tool call in the environment at the run."""
        answer = await self._lease.ask("call", {"session": agent, "call": asdict(call)})
        return ToolResponse(**answer["response"])

    def count(self, metrics: Mapping[str, float], turn_id: str | None = None, *, agent: str = "main") -> None:
        """Add to the episode's metrics."""
        super().count(metrics, turn_id, agent=agent)
        self._counted.append(({name: float(value) for name, value in metrics.items()}, turn_id, agent))

    def finish(self, reason: StopReason, final: Message | None = None) -> None:
        """Set the stop reason and the final message."""
        super().finish(reason, final)
        self._finished = True

    def result(self, error: BaseException | None) -> dict[str, Any]:
        """Return the result for the run."""
        return {
            "rewards": [[reward.agent, reward.turn_id, reward.name, reward.value] for reward in self.rewards],
            "rewarded": self.rewarded,
            "counted": self._counted,
            "finished": {"stop_reason": self.stop_reason.value, "final": self.final} if self._finished else None,
            "raised": None if error is None else self._lease.record(error),
        }


async def _turns(session: Session) -> list[str]:
    assert isinstance(session, RemoteSession)
    return await session.taken()


async def _open_remote_endpoint(session: Session) -> SessionEndpoint:
    assert isinstance(session, RemoteSession)
    url = await session.open()
    return RemoteEndpoint(url, GatewaySession(session.id, "", "", session, TextRenderer(), {}, math.inf))
