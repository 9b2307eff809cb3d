"""A policy that serves users: ``turnwise live`` in a process, its traffic, and when its weights were updated."""

from __future__ import annotations

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from harness.http_load import Connection, request
from harness.measure import ROOT, clean_environment
from turnwise.config import dump_config
from turnwise.trainer.config.train import TrainConfig

START_S = 120.0
SESSION_TURNS, PERIOD_S = 4, 3.0
QUESTION = "Look up the value of item {} and say it."
UPDATES = ("update", "sync", "checkpoint")
"""Spans of the timeline in which a step is learned."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A served turn.

    Attributes:
        due: Unix time at which the user wanted to send it.
        seconds: From then to the end of its answer.
        tokens: Sampled tokens.
    """

    due: float
    seconds: float
    tokens: int


@dataclass(slots=True)
class LiveSide:
    """A service that runs.

    Attributes:
        directory: Its run directory.
        opened: Number of sessions so far.
    """

    process: subprocess.Popen[bytes]
    port: int
    directory: Path
    opened: int = 0
    _children: list[psutil.Process] = field(default_factory=list)

    @classmethod
    async def start(cls, config: TrainConfig) -> LiveSide:
        """Start a service. Raises RuntimeError if it ends at once."""
        folder = config.runs
        folder.mkdir(parents=True)
        file, log = folder / "live.yaml", folder / "live.log"
        file.write_text(dump_config(config))
        command = [sys.executable, "-m", "turnwise", "live", str(file)]
        with log.open("wb") as output:
            environment = clean_environment({"PYTHONPATH": str(ROOT)})
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)  # noqa: ASYNC220 - once
        deadline = time.monotonic() + START_S
        while (address := re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"turnwise live ended or took {START_S:g} s:\n{log.read_text()[-4000:]}")
            await asyncio.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
        return cls(process, int(address[1]), folder / config.name, 0, children)

    def cpu_s(self) -> float:
        """Return the CPU seconds so far of all its processes."""
        times = [process.cpu_times() for process in (psutil.Process(self.process.pid), *self._children)]
        return sum(process.user + process.system for process in times)

    async def settle(self, batch: int) -> int:
        """Wait until no step can be learned and none runs; return the number of steps."""
        connection = await Connection.open(self.port)
        while True:
            _, raw = await connection.ask(request("/health", b"", method="GET"))
            health = json.loads(raw)
            steps = len([line for line in self._metrics() if line["kind"] == "train"])
            if health["waiting"] < batch and health["step"] == steps:
                await connection.close()
                return steps
            await asyncio.sleep(0.05)

    def updates(self) -> list[tuple[float, float]]:
        """Return begin and end, in Unix time, of the spans in which steps were learned."""
        spans: list[tuple[float, float]] = []
        began = 0.0
        for line in (self.directory / "timeline.jsonl").read_text().splitlines():
            match json.loads(line):
                case {"at": at}:
                    began = at
                case [what, _, begin, float(end)] if what in UPDATES:
                    spans.append((began + begin, began + end))
        return sorted(spans)

    def _metrics(self) -> Iterator[dict[str, Any]]:
        for line in (self.directory / "metrics.jsonl").read_text().splitlines():
            yield json.loads(line)

    def stop(self) -> None:
        """End the service in order."""
        self.process.terminate()
        self.process.wait(60)


async def talk(side: LiveSide, users: int, turns: int, *, consent: bool) -> list[Turn]:
    """Let users talk at the same time, each so many turns in one session after the other; return their turns.

    Turns are due on a schedule that is the same for both sides: one a period for each user, at a random time within it.
    One whose predecessor is unanswered then is sent as soon as that is answered, and its wait counts.
    """
    start, first = time.time() + 0.1, side.opened
    side.opened += users * turns

    async def converse(user: int) -> list[Turn]:
        draw, served, messages = random.Random(user), list[Turn](), list[Any]()
        connection = await Connection.open(side.port)
        name = str(first + user * turns)
        for turn in range(turns):
            due = start + PERIOD_S * (turn + draw.random())
            await asyncio.sleep(max(0.0, due - time.time()))
            messages.append({"role": "user", "content": QUESTION.format(draw.randint(0, 99))})
            body = {"model": "live", "messages": messages}
            answer = await post(connection, "/v1/chat/completions", body, name, consent=consent)
            served.append(Turn(due, time.time() - due, answer["usage"]["completion_tokens"]))
            messages.append(answer["choices"][0]["message"])
            # The users' sessions begin and end at different times.
            if (turn + user) % SESSION_TURNS == SESSION_TURNS - 1:
                if consent:
                    await post(connection, f"/sessions/{name}/rewards", {"score": draw.randint(0, 1)}, name)
                await post(connection, f"/sessions/{name}/finish", {}, name)
                name, messages = str(int(name) + 1), []
        if messages:
            await post(connection, f"/sessions/{name}/finish", {}, name)
        await connection.close()
        return served

    return [turn for served in await asyncio.gather(*map(converse, range(users))) for turn in served]


async def post(
    connection: Connection, path: str, body: dict[str, Any], session: str, *, consent: bool = True
) -> dict[str, Any]:
    """Post to a route of a user, and return the answer. Raises RuntimeError for an error."""
    headers = f"authorization: Bearer user\r\nx-session-id: {session}\r\n"
    headers += f"x-session-consent: {'yes' if consent else 'no'}\r\n"
    status, raw = await connection.ask(request(path, json.dumps(body).encode(), headers=headers))
    if status != 200:
        raise RuntimeError(f"{path}: status {status}: {raw[:500]!r}")
    answer: dict[str, Any] = json.loads(raw)
    return answer
