"""The routes of users, below their own API keys: the three dialects, the end of a session, and feedback on it.

``/v1/...`` with the header ``x-session-id``, or ``/s/TOKEN/v1/...`` after ``POST /sessions``; ``POST
/sessions/ID/finish``, ``/sessions/ID/rewards``; ``DELETE /sessions/ID``; ``GET /health``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, PositiveInt

from turnwise.config import ConfigPath, Section, load_config
from turnwise.errors import ConfigError, DiskError, TaskError, TurnwiseError, shown
from turnwise.ext.live.arms import CanaryConfig
from turnwise.ext.live.deletion import Deletions
from turnwise.ext.live.feedback import MOST_SCORE, Feedback, FeedbackLog
from turnwise.ext.live.limits import KeyLimits
from turnwise.ext.live.sessions import RecordedSessions, session_digest, session_opener
from turnwise.ext.live.sources import DerivedFeedback, Judges, load_sources, session_task
from turnwise.gateway.app import GatewayApp, read_json
from turnwise.gateway.config import GatewayLimits
from turnwise.gateway.dialects.anthropic import Anthropic
from turnwise.gateway.dialects.fields import Fields
from turnwise.gateway.dialects.openai_chat import OpenAIChat
from turnwise.gateway.dialects.response_format import abilities_of
from turnwise.gateway.errors import ApiError, api_error, invalid, missing_route, not_found, too_deep
from turnwise.gateway.exchange import Exchange
from turnwise.gateway.sessions import FIXED_SAMPLING, GatewaySession, Sessions, check_known, read_id
from turnwise.inference.process import Receive, Scope, Send
from turnwise.plugins import load_object
from turnwise.recorder.ledger import LedgerClient, LedgerWriter
from turnwise.rollout.sessions import Sampler
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.directory import RunDirectory
from turnwise.types import StopReason

if TYPE_CHECKING:
    from turnwise.ext.live.canary import Canary
    from turnwise.trainer.run.run import TrainRun

_MOST_BATCHES: Final = 16
_LONGEST_TYPE: Final = 64
_MOST_TASK: Final = 65_536
_RETRY: Final = 10.0
"""Seconds between attempts to erase what the disk refused."""
_THUMBS: Final = {"up": 1.0, "down": 0.0}
_NO_CONTENT: Final = frozenset(
    {"id", "type", "role", "model", "tool_call_id", "tool_use_id", "call_id", "previous_response_id"}
)
"""Fields of a request that name things of the API: no redactor reads them."""


class LiveConfig(Section):
    """How users are served: ``custom.live`` of a run's configuration.

    Attributes:
        host: Address to bind.
        port: Port to bind; 0 for a free one.
        swap: When weights change under traffic: between two ``token``s, or between two ``turn``s: those that run end
            first, and later ones wait.
        canary: Rails: some sessions are served by the last approved weights, against which newer ones are tested.
        redact: Functions ``pkg.mod:function`` from text to text, applied to requests and feedback of consented sessions
            before the model reads them.
        next_message: A function ``pkg.mod:function`` from the text of a user's message to the score of the turn before
            it, or None.
        reward: The reward of an ended session, in the form of an environment's ``scorer`` or ``rubric``.
        group_size: Members of a group that ``rollout.env`` and its agent sample from the task of each session that is
            learned from, to be learned from beside it; None for no group.
        keys: File of the accepted API keys, or of their SHA-256, one a line; None accepts any.
        requests_per_minute: Most requests of a key.
        limits: Resource limits; ``idle_seconds`` ends sessions.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    swap: Literal["token", "turn", "session"] = "turn"
    canary: CanaryConfig | None = None
    redact: tuple[str, ...] = ()
    next_message: str | None = None
    reward: str | dict[str, Any] | None = None
    group_size: Annotated[int, Field(ge=2)] | None = None
    keys: ConfigPath | None = None
    requests_per_minute: PositiveInt | None = None
    limits: GatewayLimits = GatewayLimits(idle_seconds=1800.0)

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        """Return the section. Raises ConfigError."""
        live = load_config(cls, defaults=config.custom.get("live", {}))
        if live.swap == "session":
            raise ConfigError(
                f"custom.live.swap is session, which serves two versions at once, but inference.engine "
                f"{config.inference.engine} holds one: set turn or token"
            )
        for reference in live.redact:
            load_object(reference, "custom.live.redact")
        load_sources(live.next_message, live.reward, config.rollout.frozen)
        KeyLimits(live.keys, live.requests_per_minute)
        return live


class LiveService:
    """Serves users, each with the sessions of its own API key.

    Attributes:
        feedback: Feedback on sessions.
        derived: Feedback that functions derive.
        learned: The step that learned from a session, by its id.
        canary: The rails, if any.
    """

    def __init__(
        self,
        run: TrainRun,
        config: LiveConfig,
        learned: Mapping[str, int],
        sampler: Sampler,
        ledger: LedgerWriter,
        canary: Canary | None,
        deletions: Deletions,
    ) -> None:
        self._run, self._gateway = run, sampler.gateway
        self._config = config
        self._part = int(RunDirectory(run.directory).read()["parts"]) - 1
        self._redactors: dict[str, Callable[[str], str]] = {
            name: load_object(name, "custom.live.redact") for name in config.redact
        }
        self.learned, self.feedback, self.canary = learned, FeedbackLog(run.directory), canary
        self._deletions = deletions
        self._learning: Sequence[str] = ()
        sources = load_sources(config.next_message, config.reward, run.config.rollout.frozen, Judges(run))
        self.derived = DerivedFeedback(self.feedback, sources, run.display.say)
        approved = sampler if canary is None else replace(sampler, client=canary.policy.client.inner)
        samplers = {True: approved, False: sampler}
        recording = {
            arm: replace(server, client=LedgerClient(server.client, ledger)) for arm, server in samplers.items()
        }
        opener = session_opener(run.config, lambda name: recording[self._is_approved(name)], trained=True)
        self.recorded = RecordedSessions(run, opener, config.limits, ledger, self.derived, self._is_approved)
        opener = session_opener(run.config, lambda name: samplers[self._is_approved(name)], trained=False)
        self.unrecorded = Sessions(opener, config.limits)
        self._apps = {
            True: self._app(self.recorded, sampler, FIXED_SAMPLING),
            False: self._app(self.unrecorded, sampler, frozenset()),
        }
        self._limits = KeyLimits(config.keys, config.requests_per_minute)
        self._dropped = 0
        self._turns = 0
        self._no_turn, self._may_begin = asyncio.Event(), asyncio.Event()
        self._no_turn.set()
        self._may_begin.set()

    def _app(self, sessions: Sessions, sampler: Sampler, fixed: frozenset[str]) -> GatewayApp:
        abilities = abilities_of(sampler.renderer, guides=sampler.info.guides, lenient=())
        name, context = self._run.config.name, sampler.context_length
        return GatewayApp(sessions, admin_key="", model=name, context_length=context, abilities=abilities, fixed=fixed)

    def _is_approved(self, session_id: str) -> bool:
        canary = self._config.canary
        return canary is not None and canary.serves_approved(self._run.config.seed, session_id)

    @classmethod
    @contextlib.asynccontextmanager
    async def listening(
        cls, run: TrainRun, config: LiveConfig, learned: Mapping[str, int], ledger: LedgerWriter, canary: Canary | None
    ) -> AsyncIterator[Self]:
        """Serve in the context. Raises InferenceError where the port cannot be bound, FormatError or DiskError."""
        served = await run.policy.served()
        unlogged = replace(served, client=run.policy.client.inner)
        address = {"host": config.host, "port": config.port, "limits": config.limits}
        sampler = Sampler.of(unlogged, run.config.rollout, **address)
        async with contextlib.AsyncExitStack() as stack:
            deletions = Deletions(run)
            await deletions.erase()
            service = cls(run, config, learned, sampler, ledger, canary, deletions)
            stack.callback(service.feedback.close)
            stack.push_async_callback(deletions.erase)
            stack.push_async_callback(service.derived.close)
            stack.push_async_callback(service.recorded.close)
            for prefix in ("v1", "s", "sessions", "health"):
                sampler.gateway.mount(prefix, service)
            await sampler.gateway.start()
            stack.push_async_callback(sampler.gateway.close)
            sweeper = asyncio.create_task(service._sweep())
            stack.callback(sweeper.cancel)
            yield service

    @property
    def url(self) -> str:
        """Base URL."""
        return self._gateway.url

    async def next_sessions(self, count: int) -> Sequence[str]:
        """Wait until so many sessions can be learned from; return all, so that none grows old, but at most 16 times.

        Those of the approved weights come besides, to be compared with.
        """
        self._learning = ()
        while True:
            with contextlib.suppress(DiskError):
                await self._deletions.erase()
            if len(ready := self.recorded.ready()) >= count:
                break
            with contextlib.suppress(TimeoutError):
                # What the disk refuses is tried again.
                await asyncio.wait_for(self.feedback.changed.wait(), _RETRY if self._deletions.pending else None)
            self.feedback.changed.clear()
        self._learning = [*ready[: _MOST_BATCHES * count], *self.recorded.ready(approved=True)]
        return self._learning

    @contextlib.asynccontextmanager
    async def swapping(self) -> AsyncIterator[None]:
        """Change weights in the context: by ``swap: turn`` while no turn runs."""
        if self._config.swap == "token":
            yield
            return
        self._may_begin.clear()
        try:
            await self._no_turn.wait()
            yield
        finally:
            self._may_begin.set()

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        while not self._may_begin.is_set():
            await self._may_begin.wait()
        self._turns += 1
        self._no_turn.clear()
        try:
            yield
        finally:
            self._turns -= 1
            if not self._turns:
                self._no_turn.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        exchange = Exchange(scope, receive, send, self._config.limits)
        try:
            if scope["path"] != "/health":
                self._limits.admit(exchange.key())
            match exchange.method, [part for part in scope["path"].split("/") if part]:
                case "GET", ["health"]:
                    learned, waiting = len(self.learned), len(self.recorded.ready())
                    deleted = len(self._deletions.ids) - len(self._deletions.pending)
                    counts = {"learned": learned, "waiting": waiting, "dropped": self._dropped, "deleted": deleted}
                    counts["underived"] = self.derived.failures
                    rails = {} if self.canary is None else self.canary.counts()
                    await exchange.answer(200, {"status": "ok", "step": self._run.state.step, **counts, **rails})
                case "DELETE", ["sessions", name]:
                    await exchange.answer(200, await self._delete(session_digest(exchange.key(), name), name))
                case "POST", ["sessions", *parts]:
                    fields = Fields(read_json(await exchange.body() or b"{}"))
                    await exchange.answer(200, await self._manage(exchange.key(), parts, fields))
                case _, ["s" | "v1", *_] as parts:
                    await self._converse(exchange, parts, scope, receive, send)
                case method, parts:
                    raise missing_route(method, "/".join(parts))
        except (ApiError, TurnwiseError, RecursionError) as error:
            refusal = api_error(error) if isinstance(error, TurnwiseError) else error
            refusal = refusal if isinstance(refusal, ApiError) else too_deep()
            await exchange.refuse(Anthropic() if exchange.speaks_anthropic else OpenAIChat(), refusal)

    async def _manage(self, key: str, parts: list[str], fields: Fields) -> dict[str, Any]:
        """Open a session, end one, or add feedback to one."""
        match parts:
            case []:
                check_known(fields, {"id", "consent", "task_type", "task"})
                name = read_id(fields, "id")
                if not name or "/" in name:
                    raise invalid("id", f"is {shown(name)}: give a name without '/'")
                consent, task_type = fields.flag("consent"), read_id(fields, "task_type")
                task = self._read_task(fields)
                entry = self._open(self._deletions.digest(key, name), consent=consent, task_type=task_type)
                if task is not None and consent:
                    self.feedback.add_task(entry.id, task)
                return {"id": name, "path": f"/s/{entry.token}", "consent": consent}
            case [name, "finish"]:
                check_known(fields, set())
                entry = self._entry(self._deletions.digest(key, name))
                sessions = self.recorded if entry.log is not None else self.unrecorded
                await sessions.end(entry.id)
                return {"id": name, "status": "finished"}
            case [name, "rewards"]:
                return self._reward(self._deletions.digest(key, name), name, fields)
        raise missing_route("POST", "/".join(("sessions", *parts)))

    async def _delete(self, digest: str, name: str) -> dict[str, Any]:
        """Delete a session, or close it if nothing of it was written; return what learned from it."""
        session_id = self._deletions.ids.get(digest) or self.recorded.ids.get(digest, "")
        under_way = self._run.state.step + 1 if session_id in self._learning else None
        step = self.learned.get(session_id, under_way)
        if not session_id:
            await self.unrecorded.end(self._entry(digest).id)
        elif digest not in self._deletions.ids:
            self._deletions.add(session_id, step)
            await self.recorded.remove(session_id)
            # Its requests have written their last.
            self._deletions.pending.add(session_id)
            self.feedback.changed.set()
        until = math.inf if self.canary is None else self.canary.undone.get(session_id, math.inf)
        steps = [saved for saved in self._run.store.steps() if step is not None and step <= saved < until]
        return {"id": name, "status": "deleted", "learned_in_step": step, "checkpoints": steps}

    def _read_task(self, fields: Fields) -> dict[str, Any] | None:
        """Return the redacted task row of a session to open, or None."""
        row = fields.get("task")
        if row is None:
            return None
        if (size := len(json.dumps(row))) > _MOST_TASK:
            raise invalid("task", f"must have at most {_MOST_TASK} bytes as JSON, not {size}")
        redacted: dict[str, Any] = self._redact_json(row, frozenset())
        try:
            session_task("task", redacted)
        except TaskError as error:
            raise invalid("task", str(error)) from error
        return redacted

    def _open(self, digest: str, *, consent: bool, task_type: str) -> GatewaySession:
        if len(task_type) > _LONGEST_TYPE:
            raise invalid("task_type", f"must have at most {_LONGEST_TYPE} characters, not {len(task_type)}")
        if digest in self.recorded.ids:
            raise ApiError(409, "this session exists already: take another id", code="session_exists")
        if consent:
            return self.recorded.open(self._part, digest, task_type or "default")
        return self.unrecorded.create(digest, {})

    def _entry(self, digest: str) -> GatewaySession:
        """Return an open session. Raises ApiError by name for one that ended, and for an unknown one."""
        session_id = self.recorded.ids.get(digest)
        if session_id in self.recorded.turns:
            raise ApiError(409, "this session has ended: open another one", code="session_ended")
        try:
            return self.unrecorded.of_id(digest) if session_id is None else self.recorded.of_id(session_id)
        except ApiError as error:
            raise not_found("no session of this key has this id: open it, or send the key that opened it") from error

    def _reward(self, digest: str, name: str, fields: Fields) -> dict[str, Any]:
        check_known(fields, {"id", "turn", "score", "thumbs", "text", "correction"})
        session_id = self.recorded.ids.get(digest)
        if session_id is None:
            self._entry(digest)
            raise ApiError(409, "this session was opened without consent: nothing of it is kept", code="not_consented")
        turns = self.recorded.turns.get(session_id)
        turns = self.recorded.of_id(session_id).session.turns if turns is None else turns
        if not turns:
            raise ApiError(409, "this session has no turn to learn from, or was dropped", code="nothing_to_learn")
        score, thumbs, text = fields.get("score"), fields.text("thumbs", ""), fields.text("text", "")
        correction = fields.text("correction", "")
        if (thumbs and score is not None) or not (thumbs or text or correction or score is not None):
            raise invalid("score", "give score or thumbs, a text, a correction, or several of them")
        if thumbs and thumbs not in _THUMBS:
            raise invalid("thumbs", f"must be up or down, not {shown(thumbs)}")
        value = _THUMBS[thumbs] if thumbs else fields.number("score", -MOST_SCORE, MOST_SCORE)
        turn = fields.integer("turn", 0, turns - 1)
        if correction and turn is None:
            raise invalid("turn", "is required with a correction: give the index of the corrected turn")
        texts = {"text": self._redacted(text), "correction": self._redacted(correction)}
        self.feedback.add(session_id, Feedback(read_id(fields, "id"), turn, value, **texts))
        return {"id": name, "learned_in_step": self.learned.get(session_id)}

    async def _converse(self, exchange: Exchange, parts: list[str], scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request of a session's agent on, redacted if it will be recorded."""
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in exchange.all_headers}
        entry, route = self._addressed(exchange, parts, headers)
        if entry.log is not None and self._redactors:
            receive = await self._receive_redacted(exchange, entry, receive)
        async with self._turn():
            app = self._apps[entry.log is not None]
            await app({**scope, "path": "/".join(("", "s", entry.token, *route))}, receive, send)
        if headers.get("x-session-end") == "yes":
            # The answer is sent: what cannot be ended now ends when it is idle.
            with contextlib.suppress(ApiError):
                await app.sessions.end(entry.id)

    def _addressed(
        self, exchange: Exchange, parts: list[str], headers: dict[str, str]
    ) -> tuple[GatewaySession, list[str]]:
        """Return the session of a request, opened if a header names a new one, and the route below it."""
        if parts[0] == "s":
            for sessions in (self.recorded, self.unrecorded):
                with contextlib.suppress(ApiError):
                    return sessions.of_token(parts[1] if len(parts) > 1 else ""), parts[2:]
            raise not_found("no open session has this address; it may have ended")
        name, answer = headers.get("x-session-id", ""), headers.get("x-session-consent")
        if not name:
            raise invalid("x-session-id", "send this header with the name of the session, or POST /sessions for a path")
        if answer not in (None, "yes", "no"):
            raise invalid("x-session-consent", f"must be yes or no, not {shown(answer)}")
        digest = self._deletions.digest(exchange.key(), name)
        try:
            entry = self._entry(digest)
        except ApiError as error:
            if error.status != 404 or exchange.method != "POST":
                raise
            entry = self._open(digest, consent=answer == "yes", task_type=headers.get("x-task-type", ""))
        if answer is not None and (answer == "yes") is not (entry.log is not None):
            raise ApiError(409, "consent is given when a session opens: open another one", code="consent_differs")
        return entry, parts

    async def _receive_redacted(self, exchange: Exchange, entry: GatewaySession, receive: Receive) -> Receive:
        """Return what receives a request's redacted body; a redactor that fails drops the session."""
        raw = await exchange.body()
        try:
            body = json.dumps(self._redact_json(read_json(raw))).encode() if raw else raw
        except ApiError as error:
            if error.code == "redactor_failed":
                self._dropped += 1
                await self.recorded.end(entry.id, StopReason.ERROR, error.message)
            raise
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_redacted() -> Any:
            return messages.pop() if messages else await receive()

        return receive_redacted

    def _redact_json(self, value: Any, unread: Set[str] = _NO_CONTENT) -> Any:
        if isinstance(value, str):
            return self._redacted(value)
        if isinstance(value, dict):
            # The names in the arguments of a call are its tool's.
            within = {
                key: frozenset() if key == "input" and isinstance(item, dict) else unread for key, item in value.items()
            }
            return {key: item if key in unread else self._redact_json(item, within[key]) for key, item in value.items()}
        return [self._redact_json(item, unread) for item in value] if isinstance(value, list) else value

    def _redacted(self, text: str) -> str:
        for name, redact in self._redactors.items():
            try:
                text = redact(text)
            except Exception as error:  # noqa: BLE001 - a user's function, whose message may hold what it should hide
                problem = f"the redactor {name} raised {type(error).__name__}: nothing was written"
                raise ApiError(500, problem, code="redactor_failed") from None
        return text

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.limits.sweep_seconds)
            await self.recorded.sweep()
            await self.unrecorded.sweep()
