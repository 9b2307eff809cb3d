"""Kills at chosen moments of a run, each recognised in the process where it happens.

:class:`CrashSchedule` is the hooks that a configuration names to arm the moments. Restarts are the test's.

``custom.crash`` says ``victim`` and ``folder``. The moments come in their order, each once: ``folder/struck.jsonl``
says which have been, so that a process that goes on takes the next one. The process stands still while its victim
dies. When all have been the run goes on for two more steps, and ends in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from support.envs.run_envs import Graded
from turnwise import append_file
from turnwise.agents.react import ReActAgent
from turnwise.errors import ToolError
from turnwise.inference.guard.turnwise_guard import CONTROL_KEY, KEY_HEADER
from turnwise.tools.core import function_tool
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.run.hooks import Hooks

RESET, MID_TOOL, MID_GENERATION = "reset", "mid-tool", "mid-generation"
MID_STEP, MID_SYNC, MID_CHECKPOINT, MID_JOURNAL = "mid-step", "mid-sync", "mid-checkpoint", "mid-journal"
MOMENTS: Final = (RESET, MID_TOOL, MID_GENERATION, MID_STEP, MID_SYNC, MID_CHECKPOINT, MID_JOURNAL)

# The process of the run itself: it trains, it carries the gateway that programs talk to, and it owns the sandboxes.
ITSELF: Final = ("trainer", "gateway", "host")
# Before the run's servers start: a moment pauses them.
_KEY: Final = os.environ.setdefault(CONTROL_KEY, "moments")
# So many episodes have begun in this process before one of the first three moments comes: some have ended by then.
_RIPE: Final = 4
_POLL_S: Final = 0.001


def children(word: str) -> list[psutil.Process]:
    """Return the processes below this one that run and have a word in their command line."""
    processes = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and any(word in part for part in process.cmdline()):
                processes.append(process)
    return processes


def listening(server: psutil.Process) -> int | None:
    """Return the port that a server takes requests at; None where it does not yet."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for connection in server.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN:
                return int(connection.laddr.port)
    return None


def _engine() -> psutil.Process | None:
    # A forked server has its parent's command line; no other process below a run takes requests.
    return next((process for process in children("") if listening(process)), None)


def _sandboxes() -> psutil.Process | None:
    return next(iter(children("boot.launcher")), None)


def _runner(folder: Path) -> psutil.Process | None:
    """Return the runner that plays, by the number that its agent noted."""
    with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess, ValueError):
        process = psutil.Process(int((folder / "runner.pid").read_text()))
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None


class _Schedule:
    """Which moments have been, and what happens at the next one."""

    def __init__(self, victim: str, folder: Path) -> None:
        self.victim, self.folder = victim, folder
        self._notes = os.open(folder / "struck.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._left = list(MOMENTS[len((folder / "struck.jsonl").read_text().splitlines()) :])
        self._lock = threading.Lock()
        self._watching: threading.Thread | None = None
        self.begun = 0

    @property
    def due(self) -> str | None:
        """The moment that is waited for."""
        return self._left[0] if self._left else None

    def begin(self) -> None:
        """Note that an episode begins."""
        self.begun += 1
        if self.due == MID_GENERATION and self.begun >= _RIPE and self._watching is None:
            self._watching = threading.Thread(target=self._watch_server, daemon=True)
            self._watching.start()

    def ripe(self, moment: str) -> bool:
        """Return whether a moment is the next one, and enough has been done before it."""
        return self.due == moment and (moment not in (RESET, MID_TOOL) or self.begun >= _RIPE)

    def invalidate(self, moment: str) -> None:
        """Kill the victim, and wait for its end; where there is none just now, the moment comes once more."""
        with self._lock:
            if self.due != moment or (victim := self._find()) is None:
                return
            self._note(moment, victim)
            with ended(victim):
                victim.kill()

    def strike_when_sent(self, moment: str) -> None:
        """Kill the victim when the server was sent something that it has not read."""
        if self.due != moment or (server := _engine()) is None or (port := listening(server)) is None:
            return
        server.suspend()

        def wait() -> None:
            while not _unread(port):
                threading.Event().wait(_POLL_S)
            if self.victim != "engine":
                server.resume()
            self.invalidate(moment)

        threading.Thread(target=wait, daemon=True).start()

    def _find(self) -> psutil.Process | None:
        if self.victim in ITSELF:
            return psutil.Process()
        if self.victim == "runner":
            return _runner(self.folder)
        return {"engine": _engine, "sandboxes": _sandboxes}[self.victim]()

    def _note(self, moment: str, victim: psutil.Process) -> None:
        below = [[process.pid, process.create_time()] for process in victim.children(recursive=True)]
        record = {"moment": moment, "victim": self.victim, "pid": victim.pid, "below": below}
        os.write(self._notes, json.dumps(record).encode() + b"\n")
        self._left.pop(0)

    def _watch_server(self) -> None:
        """Strike when the server is sampling: it is held meanwhile, so that nothing ends between look and kill."""
        while self.due == MID_GENERATION:
            server = _engine()
            port = None if server is None else listening(server)
            if port is None:
                threading.Event().wait(_POLL_S)
                continue
            with contextlib.suppress(OSError, http.client.HTTPException):
                if not _ask(port, "GET", "/stats")["running"]:
                    continue
                _ask(port, "POST", "/pause?mode=keep")
                if _ask(port, "GET", "/stats")["running"]:
                    self.invalidate(MID_GENERATION)
                _ask(port, "POST", "/resume")


@contextlib.contextmanager
def ended(process: psutil.Process) -> Iterator[None]:
    """Wait for the end of a process that is killed inside."""
    descriptor = os.pidfd_open(process.pid)
    try:
        yield
        select.select([descriptor], [], [])
    finally:
        os.close(descriptor)


def _unread(port: int) -> bool:
    """Return whether a connection of a port of this machine holds what nobody has read, or waits to be accepted."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and int(fields[4].rpartition(":")[2], 16):
            return True
    return False


def _ask(port: int, method: str, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={"connection": "close", KEY_HEADER: _KEY})
        answer: dict[str, Any] = json.loads(connection.getresponse().read() or b"{}")
        return answer
    finally:
        connection.close()


# One run to a process.
_ARMED: list[_Schedule] = []


def moment(name: str) -> None:
    """Say that a moment is here: whoever is to die at it dies now."""
    for schedule in _ARMED:
        if schedule.ripe(name):
            schedule.invalidate(name)


def is_due(name: str) -> bool:
    """Return whether a moment would be struck now."""
    return any(schedule.ripe(name) for schedule in _ARMED)


def _append_in_halves(append: Callable[[int, bytes], None]) -> Callable[[int, bytes], None]:
    """Return what appends lines as ``append`` does, but a journal's line of a finished member half by half when due."""

    def halves(file: int, data: bytes) -> None:
        if is_due(MID_JOURNAL) and data.startswith(b'{"event":"member"'):
            half = len(data) // 2
            os.write(file, data[:half])
            moment(MID_JOURNAL)
            data = data[half:]
        append(file, data)

    return halves


class CrashSchedule(Hooks):
    """Arms the moments of ``custom.crash`` when the run is put together."""

    after = 0

    def on_init_end(self) -> None:
        crash = self.config.custom["crash"]
        _ARMED[:] = [_Schedule(crash["victim"], Path(crash["folder"]))]
        # No file of the run can be written half by other means than by whoever writes it.
        append_file.append_whole = _append_in_halves(append_file.append_whole)

    def on_step_end(self) -> None:
        [schedule] = _ARMED
        if schedule.due is None:
            self.after += 1
        if self.after == 2:
            self.stop("everything was struck")


class Struck(Graded):
    """Lookup with moments."""

    async def reset(self, task=None, *, seed=None):
        for schedule in _ARMED:
            schedule.begin()
        moment(RESET)
        return await super().reset(task, seed=seed)

    @function_tool(inline=True)
    def team_of(self, person: str) -> str:
        """The team of a person."""
        moment(MID_TOOL)
        return self.team(person)

    def team(self, person: str) -> str:
        if person not in self.table.teams:
            raise ToolError(f"there is no person {person!r}")
        return self.table.teams[person]


class Boxed(Struck):
    """Looks teams up inside a sandbox of the episode."""

    async def reset(self, task=None, *, seed=None):
        await self.open_sandbox()
        return await super().reset(task, seed=seed)

    @function_tool
    async def team_of(self, person: str) -> str:
        """The team of a person."""
        assert self.sandbox is not None
        if not is_due(MID_TOOL):
            looked = await self.sandbox.exec("echo looked > up; cat up")
            assert looked.stdout == b"looked\n", looked
            return self.team(person)
        # A command that is running, with a child in a session of its own, when the moment comes.
        running = self.sandbox.exec("(setsid sleep 7919 &); touch begun; exec sleep 7919", timeout=600)
        return await self.struck_while(running, person)

    async def struck_while(self, running: Any, person: str) -> str:
        task = asyncio.ensure_future(running)
        try:
            while not (await self.sandbox.exec("test -e begun")).ok:
                pass
            moment(MID_TOOL)
            if is_due(MID_TOOL):
                return self.team(person)
            # Its sandbox is gone, which it says by an error.
            await task
            raise AssertionError("a command outlived its sandbox")
        finally:
            task.cancel()


class StruckLearner(TorchLearner):
    """A learner with moments: gradients that no optimizer step has seen, weights that were sent and not loaded, and a
    checkpoint of which half is written.
    """

    def forward_backward(self, batches, objective, normalizer):
        stats = super().forward_backward(batches, objective, normalizer)
        moment(MID_STEP)
        return stats

    def export_weights(self, dtype=None):
        yield from super().export_weights(dtype)
        for schedule in _ARMED:
            schedule.strike_when_sent(MID_SYNC)

    def _save_weights(self, directory):
        super()._save_weights(directory)
        moment(MID_CHECKPOINT)


class NotedAgent(ReActAgent):
    """A runner's agent, which notes its process when it begins to play."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.file = Path(folder) / "runner.pid"

    async def run(self, episode):
        if not self.file.exists() or self.file.read_text() != str(os.getpid()):
            draft = self.file.with_suffix(f".{os.getpid()}")
            draft.write_text(str(os.getpid()))
            draft.rename(self.file)
        await super().run(episode)
