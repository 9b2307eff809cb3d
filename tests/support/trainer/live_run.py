"""A policy that serves scripted users: which colour belongs to a word, of which it says any at first."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from support.trainer.lookup_run import Turnwise, merged, train_on_rows, wait_until
from turnwise.config import dump_config, load_config
from turnwise.ext.live.canary import Canary
from turnwise.ext.live.command import DEFAULTS
from turnwise.ext.live.learning import serve_and_learn
from turnwise.tasks import Task
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.small_model import make_model
from turnwise.trainer.train import train
from turnwise.types import Message

COLOURS = {"sun": "yellow", "sea": "blue", "leaf": "green", "rose": "red"}


def build_colour_model(directory: Path, *, context: int = 512, guesses: int = 1) -> None:
    """Make a model in ``directory / "sft" / "model"`` by showing it the right colour and so many guesses of all four.

    After one guess it answers two times in five with the right colour, after two three times in nine.
    """
    rows = [
        {
            "messages": [{"role": "user", "content": f"Colour of {word}?"}, {"role": "assistant", "content": colour}],
            "tools": [],
        }
        for word, right in COLOURS.items()
        for colour in (right, *list(COLOURS.values()) * guesses)
    ]
    make_model(
        directory / "base",
        rows * 8,
        0,
        width=64,
        layers=2,
        context=context,
        words="|".join([*COLOURS, *COLOURS.values()]),
    )
    train_on_rows(directory, directory / "base", rows * 8, steps=150)


def colour_tasks(words: str = ",".join(COLOURS)) -> list[Task]:
    """Return held-out tasks: the colour of each word."""
    return [Task(word, f"Colour of {word}?", {"answer": COLOURS[word]}) for word in words.split(",")]


def redact_digits(text: str) -> str:
    """Replace digits; fail on a text that says so."""
    if "fail" in text:
        raise ValueError(text)
    return re.sub(r"\d", "#", text)


def score_reply(text: str) -> float | None:
    """Score a reply to a turn: by its mood, or not at all."""
    if text == "hm":
        raise ValueError("no mood")
    return {"thanks": 1.0, "wrong": -1.0}.get(text)


def score_colour(text: str, data: dict[str, str]) -> float:
    """Score the last answer of a session by its task's colour."""
    return float(text.strip() == data["colour"])


def count_calls(messages: Sequence[Message]) -> float:
    """Count the calls of a conversation that name a colour."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return float(sum(call.name == "paint" and call.arguments["colour"] in COLOURS.values() for call in calls))


def live_config(model: Path, runs: Path, **changes: Any) -> TrainConfig:
    """Return the configuration of a live policy; ``changes`` are laid over it, sections key by key."""
    plain: dict[str, Any] = {
        "name": "live",
        "runs": str(runs),
        "policies": {"main": {"model": {"path": str(model), "threads": 1}, "optim": {"lr": 2e-3}}},
        "rollout": {"max_tokens_per_turn": 4},
        "inference": {"threads": 1},
        "batch": {"groups": 4},
        "checkpoint": {"every": 2, "keep": None},
        "custom": {"live": {"port": 0, "redact": ["support.trainer.live_run:redact_digits"]}},
    }
    return load_config(TrainConfig, defaults=merged(merged(DEFAULTS, plain), changes))


@dataclass
class Live:
    """A live policy that runs.

    Attributes:
        task: Its run; to be cancelled.
        directory: Its run directory.
    """

    url: str
    http: aiohttp.ClientSession
    task: asyncio.Task[Any]
    directory: Path

    async def post(self, path: str, body: Any, key: str = "user", **headers: str) -> tuple[int, Any]:
        """Return status and body of an answer; ``x_session_id`` is the header ``x-session-id``."""
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        all_headers = {"authorization": f"Bearer {key}", **names}
        async with self.http.post(self.url + path, json=body, headers=all_headers) as answer:
            return answer.status, await answer.json()

    async def converse(self, session: str, *texts: str, **headers: str) -> list[str]:
        """Return the answers of one conversation to a user's texts."""
        messages: list[dict[str, str]] = []
        headers |= {"x_session_id": session, "x_session_consent": "yes"}
        for text in texts:
            messages.append({"role": "user", "content": text})
            status, answer = await self.post("/v1/chat/completions", {"model": "live", "messages": messages}, **headers)
            assert status == 200, answer
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        return [message["content"] for message in messages[1::2]]

    async def ask(self, session: str, word: str, *, consent: str = "yes", **headers: str) -> str:
        """Return what the policy says the colour of a word is, or the code of an error."""
        body = {"model": "live", "messages": [{"role": "user", "content": f"Colour of {word}?"}]}
        headers |= {"x_session_id": session, "x_session_consent": consent}
        status, answer = await self.post("/v1/chat/completions", body, **headers)
        return str(answer["choices"][0]["message"]["content"] if status == 200 else answer["error"]["code"])

    async def rate(self, session: str, **feedback: Any) -> Any:
        """Return what feedback is answered with: the step that learned from it, or the code of an error."""
        status, answer = await self.post(f"/sessions/{session}/rewards", feedback)
        return answer["learned_in_step"] if status == 200 else answer["error"]["code"]

    async def finish(self, session: str) -> str:
        """End a session; return its status, or the code of an error."""
        status, answer = await self.post(f"/sessions/{session}/finish", {})
        return str(answer["status"] if status == 200 else answer["error"]["code"])

    async def delete(self, session: str, key: str = "user") -> tuple[int, Any]:
        """Delete a session; return status and body of the answer, or the code of an error."""
        async with self.http.delete(
            f"{self.url}/sessions/{session}", headers={"authorization": f"Bearer {key}"}
        ) as answer:
            body = await answer.json()
            return answer.status, body if answer.status == 200 else body["error"]["code"]

    async def health(self) -> dict[str, Any]:
        """Return the counts of the service."""
        async with self.http.get(f"{self.url}/health") as answer:
            counts: dict[str, Any] = await answer.json()
            return counts


@contextlib.asynccontextmanager
async def serving_live(config: TrainConfig, resume_step: int | None = None) -> AsyncIterator[Live]:
    """Serve in the context, and stop in order after it, unless the run has ended."""
    text, address = io.StringIO(), None
    console = Console(file=text, width=200)
    task = asyncio.create_task(train(config, resume_step=resume_step, console=console, loop=serve_and_learn))
    while address is None:
        if task.done():
            task.result()
        await asyncio.sleep(0.02)
        address = re.search(r"serving users at (\S+)", text.getvalue())
    async with aiohttp.ClientSession() as http:
        try:
            yield Live(address[1], http, task, config.runs / config.name)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def start_live(config: TrainConfig, *, dies_after: str = "") -> tuple[Turnwise, str]:
    """Start ``turnwise live`` in a process of its own; return it with its URL.

    ``dies_after`` names a method of its canary, at whose first return it is killed.
    """
    file = config.runs / "live.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(dump_config(config))
    before = (
        f"import turnwise.cli; from support.trainer.live_run import die_after; die_after({dies_after!r})"
        if dies_after
        else ""
    )
    process = Turnwise(config.runs / "live.log", "live", file, before=before)
    wait_until(lambda: "serving users at" in process.output(), "the service", process)
    address = re.search(r"serving users at (http://[\w.:]+)", process.output())
    assert address is not None
    return process, address[1]


def die_after(method: str) -> None:
    """Kill this process when a method of a canary returns."""
    survived = getattr(Canary, method)

    async def die(*arguments: Any) -> None:
        await survived(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Canary, method, die)
