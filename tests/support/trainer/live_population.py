"""A population of scripted users of a live policy, which is killed under them: they talk by two SDKs and rate answers.

They ask for two of the colours that the model knows. One user in four gives feedback, and one in ten of those lies.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
import anthropic
import httpx2
import openai

from support.rollout.record_files import read_records
from support.trainer.live_run import COLOURS
from support.trainer.lookup_run import Turnwise, silent, wait_until
from turnwise.config import dump_config
from turnwise.ext.live.arms import APPROVED, STATE
from turnwise.ext.live.sessions import session_digest
from turnwise.recorder.ledger import read_ledgers
from turnwise.rollout.audit import DELETED
from turnwise.rollout.journal.state import read_journal
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.audit import audit_run
from turnwise.trainer.run.checkpoint import CheckpointStore, load_state

T = TypeVar("T")
RIGHT: Final = {word: COLOURS[word] for word in ("sun", "sea")}
FEEDBACK: Final = 1 / 4
LIES: Final = 1 / 10
_USERS: Final = 8
_GONE: Final = (aiohttp.ClientError, openai.APIConnectionError, anthropic.APIConnectionError, httpx2.TransportError)
"""Of the last a stream that has begun."""


class KilledService:
    """``turnwise live`` in a process that is killed at events of its users, and started again.

    Attributes:
        lives: Number of processes so far.
        url: Base URL of the one that runs.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.directory = config.runs / config.name
        self.lives = 0
        self._file = config.runs / "live.yaml"
        self._file.write_text(dump_config(config))
        self._runs = asyncio.Event()
        self._until_kill: int | None = None

    async def __aenter__(self) -> KilledService:
        await self._start()
        return self

    async def __aexit__(self, *exception: Any) -> None:
        self._process.__exit__(*exception)

    async def _start(self) -> None:
        self.lives += 1
        self._process = process = Turnwise(self._file.with_suffix(".log"), "live", self._file)
        await asyncio.to_thread(wait_until, lambda: "serving users at" in process.output(), "the service", process)
        address = re.search(r"serving users at (http://[\w.:]+)", process.output())
        assert address is not None
        self.url = address[1]
        self._runs.set()

    def kill_after(self, events: int) -> None:
        """Kill it after so many events of its users."""
        self._until_kill = events

    async def note_event(self) -> None:
        """Count an event; the last before a kill kills it, and starts it again."""
        if self._until_kill is None:
            return
        self._until_kill -= 1
        if self._until_kill > 0:
            return
        self._until_kill = None
        self._runs.clear()
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        await self._start()

    async def repeat(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Return what a request returns; one that a kill breaks off is sent again to the next process."""
        while True:
            await self._runs.wait()
            life = self.lives
            try:
                answer = await ask()
            except _GONE:
                # A kill, and nothing else, breaks off requests.
                assert not self._runs.is_set() or self.lives > life, self._process.output()
            else:
                await self.note_event()
                return answer

    async def stop(self) -> None:
        """Stop it in order."""
        self._process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(self._process.wait) in (0, 130, 143), self._process.output()


@dataclass
class Talk:
    """A session of a user.

    Attributes:
        name: What the user calls it.
        key: API key of the user.
        word: What is asked for.
        is_right: Whether the answer was right.
        is_rated: Whether it was rated.
        is_deleted: Whether its user deleted it.
    """

    name: str
    key: str
    word: str
    is_right: bool = False
    is_rated: bool = False
    is_deleted: bool = False

    @property
    def digest(self) -> str:
        """What stands for it on disk."""
        return session_digest(self.key, self.name)


@dataclass
class Population:
    """Users who talk to a service, and what they remember.

    Attributes:
        service: The service.
        http: Client of what no SDK has.
        groups: ``batch.groups``.
        draw: What they are drawn by.
        talks: Sessions that ended.
    """

    service: KilledService
    http: aiohttp.ClientSession
    groups: int
    draw: random.Random
    talks: list[Talk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = count()
        options: dict[str, Any] = {"max_retries": 0, "timeout": 300}
        self._openai = openai.AsyncOpenAI(base_url="http://unset", api_key="unset", **options)
        self._anthropic = anthropic.AsyncAnthropic(base_url="http://unset", api_key="unset", **options)

    async def talk(self, waves: int, *, size: int, lies: float = LIES, feedback: float = FEEDBACK) -> list[Talk]:
        """Let so many waves of users come, of whom some rate and of those some lie; return their sessions.

        The next wave comes when the policy has learned from what was rated.
        """
        talks: list[Talk] = []
        for _ in range(waves):
            numbers = iter(range(size))
            wave: list[Talk] = []
            # Users are drawn before they come: their order is not that of their answers.
            queue = [self._draw_user(lies, feedback) for _ in numbers]

            async def serve(queue: list[tuple[Talk, bool, bool]] = queue, wave: list[Talk] = wave) -> None:
                while queue:
                    talk, rates, lies = queue.pop()
                    await self._talk(talk, rates=rates, lies=lies)
                    wave.append(talk)

            await asyncio.gather(*(serve() for _ in range(_USERS)))
            talks += wave
            await self.wait_until(lambda health: health["waiting"] < self.groups)
        self.talks += talks
        return talks

    def _draw_user(self, lies: float, feedback: float) -> tuple[Talk, bool, bool]:
        number = next(self._numbers)
        talk = Talk(f"s{number}", f"user-{number % _USERS}", self.draw.choice(list(RIGHT)))
        return talk, self.draw.random() < feedback, self.draw.random() < lies

    async def _talk(self, talk: Talk, *, rates: bool, lies: bool) -> None:
        """Ask, rate the answer and end the session."""
        ask = self._ask_openai if talk.key[-1] in "02468" else self._ask_anthropic
        talk.is_right = await self.service.repeat(lambda: ask(talk)) == RIGHT[talk.word]
        if rates:
            thumbs = "up" if talk.is_right is not lies else "down"
            await self.post(talk, "rewards", {"thumbs": thumbs, "id": "1"})
            talk.is_rated = True
        await self.post(talk, "finish", {})

    async def _ask_openai(self, talk: Talk) -> str:
        client = self._openai.with_options(base_url=f"{self.service.url}/v1", api_key=talk.key)
        answer = await client.chat.completions.create(
            model="live", messages=question(talk), extra_headers=headers(talk)
        )
        return str(answer.choices[0].message.content)

    async def _ask_anthropic(self, talk: Talk) -> str:
        client = self._anthropic.with_options(base_url=self.service.url, api_key=talk.key)
        options: dict[str, Any] = {"model": "live", "max_tokens": 4, "extra_headers": headers(talk)}
        async with client.messages.stream(messages=question(talk), **options) as events:
            return str(await events.get_final_text())

    async def post(self, talk: Talk, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request about a session; a repeated end may come too late."""

        async def send() -> tuple[int, dict[str, Any]]:
            address = f"{self.service.url}/sessions/{talk.name}/{route}"
            async with self.http.post(address, json=body, headers={"authorization": f"Bearer {talk.key}"}) as response:
                answer: dict[str, Any] = await response.json()
                return response.status, answer

        status, answer = await self.service.repeat(send)
        assert status == 200 or (route == "finish" and answer["error"]["code"] == "session_ended"), answer
        return answer

    async def delete(self, talks: Sequence[Talk]) -> None:
        """Delete sessions, and wait until their texts are gone."""
        for talk in talks:

            async def send(talk: Talk = talk) -> int:
                address = f"{self.service.url}/sessions/{talk.name}"
                async with self.http.delete(address, headers={"authorization": f"Bearer {talk.key}"}) as response:
                    return response.status

            assert await self.service.repeat(send) == 200
            talk.is_deleted = True
        count = sum(talk.is_deleted for talk in self.talks)
        await self.wait_until(lambda health: health["deleted"] == count)

    async def health(self) -> dict[str, Any]:
        """Return the counts of the service; an event."""

        async def send() -> dict[str, Any]:
            async with self.http.get(f"{self.service.url}/health") as response:
                counts: dict[str, Any] = await response.json()
                return counts

        return await self.service.repeat(send)

    async def wait_until(self, holds: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until the counts of the service fulfil a condition."""
        while not holds(await self.health()):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


def question(talk: Talk) -> Any:
    """Return the messages of a session."""
    return [{"role": "user", "content": f"Colour of {talk.word}?"}]


def headers(talk: Talk) -> dict[str, str]:
    """Return the headers of a session."""
    return {"x-session-id": talk.name, "x-session-consent": "yes", "x-task-type": talk.word}


def success(talks: Sequence[Talk]) -> float:
    """Return the share of sessions whose answer is right."""
    return sum(talk.is_right for talk in talks) / len(talks)


def check_nothing_lost(run: Path, talks: Sequence[Talk]) -> None:
    """Check that each session was recorded once, and its feedback; of deleted ones nothing is there."""
    remaining = [talk for talk in talks if not talk.is_deleted]
    records = [record for record in read_records(run / "trajectories.twz") if record["partition"] == "train"]
    assert Counter(record["id"].partition("-")[2] for record in records) == Counter(talk.digest for talk in remaining)
    with_feedback = Counter(name.partition("-")[2] for name in sessions_with_feedback(run))
    assert with_feedback == Counter(talk.digest for talk in remaining if talk.is_rated)
    called = {entry.session.partition("-")[2] for entry in read_ledgers(run).entries}
    assert called & {talk.digest for talk in talks} == {talk.digest for talk in remaining}


def sessions_with_feedback(run: Path) -> list[str]:
    """Return the ids of sessions in the order of their feedback, without deleted ones."""
    return [record["session"] for record in read_records(run / "feedback.jsonl") if "session" in record]


def check_learned_once(run: Path, waiting: int, deleted: int) -> None:
    """Check an audit, and that checkpoints name the sessions that were trained; all with feedback but ``waiting``.

    Sessions of approved weights are named by none.
    """
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    assert report.counts["sessions deleted by their users"] == deleted
    rows_by_step: dict[int, set[str]] = {}
    for record in read_records(run / "batches.jsonl"):
        if "rows" in record:
            rows_by_step[record["step"]] = {row["trajectory"] for row in record["rows"]}
        elif record.get("event") == "start":
            # Steps after the checkpoint of this start were undone.
            rows_by_step = {step: names for step, names in rows_by_step.items() if step <= record["after_step"]}
    assert set(Counter(name for names in rows_by_step.values() for name in names).values()) == {1}
    trained = {name: step for step, names in rows_by_step.items() for name in names}
    store = CheckpointStore(run / "checkpoints")
    sessions: dict[str, int] = {}
    for checkpoint in store.steps():
        sessions = load_state(store.path(checkpoint)).tasks[STATE]["sessions"]
        assert max(sessions.values()) == checkpoint
        named = {name: step for name, step in trained.items() if step <= checkpoint}
        # A session whose advantage is 0 has no row, nor has one of a step that went back.
        assert named.items() <= sessions.items()
    records = read_records(run / "trajectories.twz")
    approved = {record["id"] for record in records if record["policy"] == APPROVED}
    assert not approved & sessions.keys()
    gone = {str(event["id"]) for _, event in read_journal(run / DELETED).events}
    assert len(gone) == deleted
    with_feedback = set(sessions_with_feedback(run))
    assert sessions.keys() - gone <= with_feedback
    assert len(with_feedback - approved - sessions.keys()) == waiting
