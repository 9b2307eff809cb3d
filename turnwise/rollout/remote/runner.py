"""The runner process: connects to a run and plays its episodes with its own agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from turnwise.agents.core import Agent
from turnwise.errors import INTERRUPTS, AgentError, ConfigError, FormatError, InferenceError, RunnerDisconnected
from turnwise.rollout.remote.episode import LeaseClient, RemoteEpisode
from turnwise.rollout.remote.protocol import PREFIX, VERSION, dump, load

_BACKOFF = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Options of a runner.

    Attributes:
        url: URL of the run.
        wait: Seconds without a run before it exits; None waits for ever.
        stay: Whether to wait for another run after the end of one.
    """

    url: str
    key: str
    places: int = 8
    wait: float | None = None
    stay: bool = False
    name: str = f"{platform.node()}:{os.getpid()}"


def read_key(file: Path) -> str:
    """Read a key file."""
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--key-file {file} cannot be read: {error}") from error
    if not key or not key.isascii():
        raise ConfigError(f"--key-file {file} holds no key: copy the file that rollout.remote.key_file names")
    return key


async def serve_run(options: RunnerOptions, agent: Agent, say: Callable[[str], None]) -> None:
    """Play episodes until the run has ended.

    Args:
        options: Connection and concurrency.
        agent: The agent.
        say: Called with progress messages.

    Raises:
        ConfigError: The run refuses this runner.
        InferenceError: No run was reachable within ``wait``.
    """
    headers = {"Authorization": f"Bearer {options.key}"}
    # The line stays silent for as long as the run has nothing to say; its pings bound that.
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    seen, tries = time.monotonic(), 0
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as http:
        try:
            while True:
                try:
                    run_ended = await _RunConnection(http, options, agent, say).serve()
                    seen, tries = time.monotonic(), 0
                    if run_ended and not options.stay:
                        say("the run has ended")
                        return
                    say(
                        "the run has ended: waiting for another"
                        if run_ended
                        else "the connection is lost: reconnecting"
                    )
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    if tries == 0:
                        say(f"no run answers at {options.url} ({error}): waiting for one")
                if options.wait is not None and time.monotonic() - seen > options.wait:
                    raise InferenceError(f"no run was at {options.url} for {options.wait:g} s (--wait)")
                await asyncio.sleep(_BACKOFF[min(tries, len(_BACKOFF) - 1)])
                tries += 1
        finally:
            await agent.close()


class _RunConnection:
    """One connection to a run, with its work."""

    def __init__(
        self, http: aiohttp.ClientSession, options: RunnerOptions, agent: Agent, say: Callable[[str], None]
    ) -> None:
        self._http = http
        self._options = options
        self._agent = agent
        self._say = say
        self._working: dict[str, asyncio.Task[None]] = {}
        self._id = ""
        self._silence = 60.0

    async def serve(self) -> bool:
        """Work until the connection ends; return whether the run has ended."""
        options = self._options
        body = dump({"version": VERSION, "name": options.name, "places": options.places})
        beating: asyncio.Task[None] | None = None
        try:
            async with self._http.post(f"{options.url}/{PREFIX}/line", data=body) as response:
                if response.status != 200:
                    raise await _refusal(response, options.url)
                async for event in self._events(response):
                    match event["event"]:
                        case "hello":
                            self._id, beat = event["runner"], float(event["beat"])
                            self._silence = 6 * beat
                            beating = asyncio.create_task(self._beat(beat))
                            self._say(f"connected to {options.url}")
                        case "work":
                            lease = LeaseClient(self._http, options.url, self._id, event["lease"])
                            task = asyncio.create_task(self._work(lease, event))
                            self._working[event["lease"]] = task
                        case "cancel":
                            if event["lease"] in self._working:
                                self._working[event["lease"]].cancel()
                        case "bye":
                            return True
            return False
        finally:
            tasks = [*self._working.values(), *([beating] if beating is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        rest = b""
        while True:
            async with asyncio.timeout(self._silence):
                chunk = await response.content.readany()
            if not chunk:
                return
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield load(line)

    async def _beat(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            # A run that does not answer is noticed on the line.
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._http.post(f"{self._options.url}/{PREFIX}/{self._id}/beat", data=b"{}") as response:
                    await response.read()

    async def _work(self, lease: LeaseClient, work: dict[str, Any]) -> None:
        """Play one episode and report its result, unless cancelled by the run."""
        episode = RemoteEpisode(lease, work)
        error: BaseException | None = None
        try:
            await self._agent.run(episode)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The episode was not cancelled: if this were re-raised, the run would wait for a result that never comes.
            error = AgentError("the agent raised CancelledError without being cancelled")
        except INTERRUPTS:
            raise
        except BaseException as raised:  # noqa: BLE001 - an agent's own code: reported to the run
            error = raised
        try:
            await lease.ask("result", episode.result(error))
        except (RunnerDisconnected, FormatError) as refused:
            self._say(f"{episode.id}: the run refused the result: {refused}")
        finally:
            self._working.pop(work["lease"], None)


async def _refusal(response: aiohttp.ClientResponse, url: str) -> Exception:
    try:
        message = load(await response.read())["error"]["message"]
    except (FormatError, KeyError, TypeError):
        message = f"it answered {response.status}, so it accepts no runners: is rollout.remote set there?"
    if response.status >= 500:
        return aiohttp.ClientError(f"status {response.status}")
    return ConfigError(f"--connect {url}: {message}")
