"""Real agent programs in their own network namespace, behind a gateway over a scripted model.

``caged()`` serves a gateway, from the test's process, on a socket that exists only in that namespace; ``Caged.run()``
runs one program there, ends its session and audits what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from support.agents import loopback_only
from support.chat.model_dirs import renderer_for
from support.gateway.broken_streams import Cut, Stumble, StumblingClient, cutting
from turnwise.gateway.app import GatewayApp
from turnwise.gateway.config import SessionSettings
from turnwise.gateway.dialects.response_format import abilities_of
from turnwise.gateway.sessions import GatewayLimits, Sessions
from turnwise.inference.process import server_without_signal_handlers
from turnwise.inference.scripted import Line, Script, ScriptedClient, ScriptedRequest
from turnwise.model.core import Renderer
from turnwise.recorder.ledger import LedgerClient, LedgerWriter, read_ledger
from turnwise.recorder.session import Session, SessionLimits
from turnwise.rollout.audit import audit_files
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import Message, SamplingParams, ToolCall

ROOT = Path(__file__).parents[3]
MODEL = "turnwise-tiny"
CONTEXT = 400_000
LIMIT_S = 100.0
"""Seconds that a program may take."""


def program(name: str, *folders: str) -> str:
    """Return where a program was installed; the test is skipped where it was not (``make test-real`` installs it)."""
    for folder in folders:
        if (ROOT / folder / name).exists():
            return str(ROOT / folder / name)
    pytest.skip(f"{name} is not installed: make test-real installs it")


def says(text: str = "", *calls: ToolCall, thinks: str = "") -> Message:
    """Return an assistant message for a script."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinks:
        message["reasoning_content"] = thinks
    if calls:
        message["tool_calls"] = list(calls)
    return message  # type: ignore[return-value]


def call(name: str, **arguments: Any) -> ToolCall:
    """Return a call for a script."""
    return ToolCall("", name, arguments)


@dataclass(frozen=True)
class ProgramRun:
    """The outcome of a program that ran to its end.

    Attributes:
        code: The program's exit status.
        stdout: What it wrote.
        stderr: What it wrote there.
        trajectories: What was recorded, of each session.
        requests: What the model was asked, in order.
        routes: What was posted to, and how it was answered: ``/v1/messages whole``, or ``stream``, or a status.
    """

    code: int
    stdout: str
    stderr: str
    trajectories: list[Trajectory]
    requests: list[ScriptedRequest]
    routes: set[str]

    @property
    def trajectory(self) -> Trajectory:
        """What was recorded of the only session."""
        (only,) = self.trajectories
        return only

    @property
    def shape(self) -> tuple[int, dict[str, int]]:
        """How many branches there are, and each fork's reason."""
        return len(self.trajectory.leaves()), dict(self.trajectory.forks())


@dataclass
class Caged:
    """A gateway that only one program can reach.

    Attributes:
        bases: The URLs of the program's sessions.
        home: An empty folder for the program's settings.
        work: The folder in which it works.
    """

    bases: list[str]
    home: Path
    work: Path
    client: ScriptedClient
    ledger: LedgerWriter
    sessions: Sessions
    session_ids: list[str]
    process: asyncio.subprocess.Process
    control: socket.socket
    run_dir: Path
    routes: set[str]

    @property
    def base(self) -> str:
        """The URL of the only session."""
        (only,) = self.bases
        return only

    async def run(self, argv: Sequence[str], env: Mapping[str, str]) -> ProgramRun:
        """Run a program to its end, end its session, and check that every sampled token was recorded exactly once."""
        settled = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LANG": "C.UTF-8", "NO_COLOR": "1", **env}
        line = json.dumps({"argv": list(argv), "cwd": str(self.work), "env": settled})
        self.control.sendall(line.encode() + b"\n")
        try:
            out, err = await asyncio.wait_for(self.process.communicate(), LIMIT_S)
        except TimeoutError:
            turns = [self.sessions.of_id(session_id).session.turns for session_id in self.session_ids]
            pytest.fail(f"{argv[0]} did not end within {LIMIT_S:g} s; it took {turns} turns")
        trajectories = [await self.sessions.end(session_id) for session_id in self.session_ids]
        self.ledger.close()
        assert self.process.returncode is not None
        outputs = (out.decode(), err.decode())
        run = ProgramRun(self.process.returncode, *outputs, trajectories, self.client.requests, self.routes)
        self._check(run)
        return run

    def _check(self, run: ProgramRun) -> None:
        """Hold what was recorded against what was sampled, on disk and by hand."""
        report = audit_files(self.run_dir)
        assert report.contradictions == []
        turns = sum(trajectory.metrics["turns"] for trajectory in run.trajectories)
        assert report.counts["turns equal to a call"] == turns > 0, run.stdout + run.stderr
        calls = sorted(
            (entry.session, entry.prompt_ids.tolist(), entry.completion_ids.tolist(), entry.logprobs.tolist())
            for entry in read_ledger(self.run_dir / "ledger.jsonl").entries
        )
        assert sorted(turn for trajectory in run.trajectories for turn in _turns(trajectory)) == calls
        for trajectory in run.trajectories:
            assert sum(row.trained_tokens for row in to_samples(trajectory).rows) == trajectory.sampled_tokens


def _turns(trajectory: Trajectory) -> Iterator[tuple[str, list[int], list[int], list[float]]]:
    for segment in trajectory.segments:
        if segment.sampled:
            assert segment.logprobs is not None
            prefix = np.concatenate([segment_before.token_ids for segment_before in trajectory.path(segment.parent)])
            yield trajectory.id, prefix.tolist(), segment.token_ids.tolist(), segment.logprobs.tolist()


def _noting(app: GatewayApp, routes: set[str]) -> Any:
    """Return the application, which notes what is posted to it and how it answers."""

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        async def answer(message: Any) -> None:
            if message["type"] == "http.response.start" and scope["method"] == "POST":
                kind = dict(message["headers"])[b"content-type"]
                how = "stream" if kind.startswith(b"text/event-stream") else "whole"
                route = scope["path"].split("/", 3)[-1]
                routes.add(f"/{route} {how if message['status'] == 200 else message['status']}")
            await send(message)

        await app(scope, receive, answer)

    return noting


def _scripted(renderer: Renderer, script: Script | Sequence[Line | Stumble], guides: bool) -> ScriptedClient:
    if callable(script):
        return ScriptedClient(renderer, script, context_length=CONTEXT, guides=guides)
    lines = [line for line in script if not isinstance(line, Stumble)]
    if len(lines) == len(script):
        return ScriptedClient(renderer, lines, context_length=CONTEXT, guides=guides)
    return StumblingClient(renderer, script, context_length=CONTEXT)


@contextlib.asynccontextmanager
async def caged(
    tmp_path: Path,
    script: Script | Sequence[Line | Stumble],
    *,
    sessions: int = 1,
    limits: GatewayLimits | None = None,
    cuts: Sequence[Cut] = (),
    guides: bool = False,
) -> AsyncIterator[Caged]:
    """Serve sessions in a new namespace until the block is left; what was started there is killed then.

    ``guides``: whether the model has structured output.
    """
    home, work, run_dir = (tmp_path / name for name in ("home", "work", "run"))
    for folder in (home, work, run_dir):
        folder.mkdir()
    renderer = renderer_for("qwen3")
    client = _scripted(renderer, script, guides)
    book = LedgerWriter(run_dir / "ledger.jsonl")
    ledger = LedgerClient(client, book)

    def open_session(session_id: str, settings: SessionSettings, began: datetime) -> Any:
        limits = SessionLimits(context_length=CONTEXT)
        return Session(ledger, renderer, id=session_id, limits=limits, params=SamplingParams(), began=began), renderer

    served = Sessions(open_session, limits or GatewayLimits(), run_dir / "trajectories.twz", book)
    routes: set[str] = set()
    abilities = abilities_of(renderer, guides=guides)
    app = GatewayApp(served, admin_key="unused", model=MODEL, context_length=CONTEXT, abilities=abilities)
    process, control, listener = await start_isolated()
    server = server_without_signal_handlers(
        uvicorn.Config(
            _noting(cutting(app, cuts), routes),
            log_config=None,
            lifespan="off",
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=1,
        )
    )
    running = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        entries = [served.create(None, {}) for _ in range(sessions)]
        bases = [f"http://127.0.0.1:{listener.getsockname()[1]}/s/{entry.token}" for entry in entries]
        ids = [entry.id for entry in entries]
        yield Caged(bases, home, work, client, book, served, ids, process, control, run_dir, routes)
    finally:
        with contextlib.suppress(ProcessLookupError):
            # The group of what this function started, which began a session of its own.
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        server.should_exit = True
        await running
        await served.close()
        control.close()
        listener.close()


async def start_isolated(
    stdin: int = asyncio.subprocess.DEVNULL,
) -> tuple[asyncio.subprocess.Process, socket.socket, socket.socket]:
    """Start a process in a namespace of its own; return it with what it is told its program by, and a socket there."""
    control, theirs = socket.socketpair()
    user_flags = [] if os.geteuid() == 0 else ["--map-root-user"]
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--net", *user_flags, sys.executable, str(loopback_only.__file__), str(theirs.fileno())),
        pass_fds=[theirs.fileno()],
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    theirs.close()
    handed = await asyncio.to_thread(socket.recv_fds, control, 1, 1)
    if not handed[1]:
        _, err = await process.communicate()
        pytest.fail(f"no network namespace could be made (unshare --net): {err.decode()}")
    return process, control, socket.socket(fileno=handed[1][0])
