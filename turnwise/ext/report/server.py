"""The served report: a page on a loopback address that follows its runs as they are written."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from turnwise.errors import ConfigError, FormatError, InferenceError, TurnwiseError
from turnwise.ext.report.live import LiveRun, Position
from turnwise.ext.report.page import FORMAT, live_page, unique_names
from turnwise.ext.report.trajectories import dumped
from turnwise.inference.guard.turnwise_guard import is_loopback
from turnwise.inference.process import bind
from turnwise.version import __version__

HOST: Final = "127.0.0.1"
_LOOK_S = 0.5
"""Seconds between two looks at the files of the runs."""
_REST_S = 0.05
"""Seconds between two readings of what is there already: pages that are open come first."""
_WAIT_S = 20.0
"""Seconds that a request for news waits for some."""
_PAUSE_S = 0.5
"""Least seconds between two parts of news."""
_JSON = "application/json"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ReportServer:
    """Serves the report of runs, to whoever knows its :attr:`url`; an asynchronous context manager.

    Args:
        runs: Directories of runs, or files of trajectories.
        port: Port to bind; 0 takes a free one.

    Attributes:
        url: Address of the page. Its path has a random key, since other users of a machine reach its ports.

    Raises:
        ConfigError: No run is given, or the port cannot be bound.
        FormatError: A run does not exist, or its files cannot be read.
    """

    def __init__(self, runs: Sequence[Path], port: int = 0) -> None:
        if not runs:
            raise ConfigError("no run is given: name at least one directory of a run")
        self._runs = [LiveRun(run, name) for run, name in zip(runs, unique_names(runs), strict=True)]
        try:
            self._listener = bind(HOST, port)
        except (InferenceError, OverflowError) as error:
            raise ConfigError(
                f"--port is {port}, which cannot be bound on {HOST}: end what listens there, choose another port, or "
                "leave it out, which takes a free one"
            ) from error
        self._key = secrets.token_urlsafe(16)
        self.url = f"http://{HOST}:{self._listener.getsockname()[1]}/{self._key}/"
        names = [run.facts.name for run in self._runs]
        self._page = live_page({"format": FORMAT, "version": __version__, "live": True, "runs": names})
        # One thread reads the runs and says what is new: they are not for several at a time.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="report")
        self._news = asyncio.Condition()
        self._first = asyncio.Event()

    async def __aenter__(self) -> ReportServer:
        """Start to serve and to read."""
        app = web.Application(middlewares=[_guard])
        app.router.add_get(f"/{self._key}/", self._get_page)
        app.router.add_get(f"/{self._key}/news", self._get_news)
        run = f"/{self._key}/runs/{{run:\\d{{1,6}}}}"
        app.router.add_get(run + r"/trajectories/{offset:\d{1,18}}", self._get_trajectory)
        app.router.add_get(run + r"/trajectories/{offset:\d{1,18}}/words", self._get_words)
        app.router.add_get(run + "/search", self._get_search)
        self._server = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._server.setup()
        await web.SockSite(self._server, self._listener).start()
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Stop both."""
        self._reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reading
        await self._server.cleanup()
        self._reader.shutdown()

    async def _on_reader(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._reader, call, *arguments)

    async def _read(self) -> None:
        """Read the runs again and again, and wake the requests that wait for news."""
        while True:
            more = False
            for run in self._runs:
                previous = run.position
                more |= await self._on_reader(run.read)
                if run.position != previous:
                    async with self._news:
                        self._news.notify_all()
            self._first.set()
            await asyncio.sleep(_REST_S if more else _LOOK_S)

    async def _get_page(self, _: web.Request) -> web.Response:
        return web.Response(text=self._page, content_type="text/html")

    async def _get_news(self, request: web.Request) -> web.Response:
        """Answer with what is new since a position, at once or when there is something."""
        texts = request.query.get("since", "").split("_")
        positions = [Position.parse(text) for text in texts] if len(texts) == len(self._runs) else []
        positions = positions or [Position()] * len(self._runs)
        await self._first.wait()
        if positions != [Position()] * len(self._runs):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAIT_S), self._news:
                    await self._news.wait_for(lambda: [run.position for run in self._runs] != positions)
                # What else comes at this moment goes along.
                await asyncio.sleep(_PAUSE_S)
        return web.Response(body=await self._on_reader(self._news_since, positions), content_type=_JSON)

    def _news_since(self, positions: Sequence[Position]) -> bytes:
        news_by_run = [(run.news_since(seen), run.position) for run, seen in zip(self._runs, positions, strict=True)]
        news = [{"run": number, **new} for number, (new, _) in enumerate(news_by_run) if new is not None]
        return dumped({"position": "_".join(str(position) for _, position in news_by_run), "runs": news})

    async def _get_trajectory(self, request: web.Request) -> web.Response:
        run = self._run(request)
        data = await asyncio.to_thread(run.record, int(request.match_info["offset"]))
        return web.Response(body=data, content_type=_JSON)

    async def _get_words(self, request: web.Request) -> web.Response:
        run = self._run(request)
        words = await asyncio.to_thread(run.words, int(request.match_info["offset"]))
        return web.Response(body=dumped(words), content_type=_JSON)

    async def _get_search(self, request: web.Request) -> web.Response:
        text, begin = request.query.get("text", ""), request.query.get("from", "0")
        if not text or not (begin.isascii() and begin.isdigit()):
            raise ConfigError("a search needs a text, and the number of a row to start at")
        matches = await asyncio.to_thread(self._run(request).search, text, int(begin[:18]))
        return web.Response(body=dumped(matches), content_type=_JSON)

    def _run(self, request: web.Request) -> LiveRun:
        number = int(request.match_info["run"])
        if number >= len(self._runs):
            raise FormatError(f"there is no run {number}: the report has {len(self._runs)}")
        return self._runs[number]


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer requests of this machine alone, and errors as JSON."""
    # A web page can have its own name resolve to 127.0.0.1 (DNS rebinding); its requests still carry that name.
    if not is_loopback(request.url.host or ""):
        return _error_response(403, f"Host is {request.host}: open the report as {HOST} or localhost")
    try:
        answer = await handler(request)
    except web.HTTPException as error:
        answer = _error_response(
            error.status, "there is no such page: the address begins with the key that was printed"
        )
    except TurnwiseError as error:
        answer = _error_response(404 if isinstance(error, FormatError) else 400, str(error))
    except OSError as error:
        answer = _error_response(404, f"{error.filename}: {error.strerror or error}")
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["Referrer-Policy"] = "no-referrer"
    answer.headers["X-Content-Type-Options"] = "nosniff"
    return answer


def _error_response(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=dumped({"error": message}), content_type=_JSON)


async def serve_report(server: ReportServer, ready: Callable[[str], object]) -> None:
    """Serve until cancelled; ``ready`` is given the address once the page can be opened."""
    async with server:
        ready(server.url)
        await asyncio.Event().wait()
