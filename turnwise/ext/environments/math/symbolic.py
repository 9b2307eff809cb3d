r"""Symbolic comparison of mathematical answers: ``\frac{1}{2}`` is ``0.5``, and ``(x+1)^2`` is ``x^2+2x+1``."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import orjson

from turnwise.envs.rewards.core import RewardFunction
from turnwise.envs.rewards.endpoint import PerLoop
from turnwise.envs.rewards.matching import extract_answer, extractor, gold_answers
from turnwise.errors import ConfigError, EnvError, MissingExtraError, shown
from turnwise.inference.guard.turnwise_guard import child_environment

_WORKER = Path(__file__).with_name("symbolic_worker.py")
_MOST_CHARACTERS = 4000


class Symbolic(RewardFunction):
    """1 where the answer is mathematically equal to the right one, as ``math-verify`` decides, else 0.

    A comparison beyond ``cpu_seconds`` of CPU time (``9**9**9**9``) is undecided: 0, counted in the metric
    ``undecided``. CPU time does not depend on the machine's load. Other failures of the process are errors, never a 0.
    """

    # Comparisons wait for a process: those of other answers, hostile ones among them, take their CPU time first.
    timeout: ClassVar[float | None] = 600.0

    def __init__(
        self,
        *,
        column: str = "answer",
        extract: str = "auto",
        cpu_seconds: float = 3.0,
        undecided: Literal["wrong", "error"] = "wrong",
    ) -> None:
        r"""Say what is compared.

        Args:
            column: Entry of ``task.data`` with the right answer in LaTeX or plain text (also one that ends in
                ``#### 42``), or a list of answers that are all right.
            extract: Where the model's answer stands: ``auto`` takes the last ``\boxed{...}``, else the last
                ``#### ...``, else leaves it to math-verify to find it at the end of the text; the other forms are those
                of :func:`~turnwise.envs.rewards.matching.extractor`.
            cpu_seconds: CPU time of one comparison.
            undecided: What a comparison is that takes longer: ``wrong``, or an ``error`` of the episode.

        Raises:
            ConfigError: A setting is out of range.
            MissingExtraError: ``math-verify`` is not installed.
        """
        if isinstance(cpu_seconds, bool) or not isinstance(cpu_seconds, (int, float)) or not 0 < cpu_seconds < 3600:
            raise ConfigError(f"symbolic: cpu_seconds is {shown(cpu_seconds)}: it must be a number above 0")
        if undecided not in ("wrong", "error"):
            raise ConfigError(f"symbolic: undecided is {shown(undecided)}: it must be wrong or error")
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtraError("math-verify", "rewards", "comparing answers symbolically")
        self._column = column
        self._extract = None if extract == "auto" else extractor(extract, "symbolic")
        self._seconds = float(cpu_seconds)
        self._undecided_is_wrong = undecided == "wrong"

    async def __call__(self, text: str, data: Mapping[str, Any]) -> tuple[float, dict[str, float]]:
        """Compare the answer."""
        answers = map(str, gold_answers(data, self._column, "symbolic"))
        gold = [extract_answer(text_of_gold, "hash") or text_of_gold for text_of_gold in answers]
        answer = self._answer(text)
        if not answer:
            return 0.0, {"undecided": 0.0}
        pool = await _pools().get()
        verdict = await pool.compare(gold, answer, self._seconds)
        kind = verdict["verdict"]
        if kind == "gold":
            raise EnvError(
                f"symbolic: task.data[{self._column!r}] holds {shown(verdict['text'])}: math-verify cannot parse it"
            )
        if kind == "undecided" and not self._undecided_is_wrong:
            raise EnvError(f"symbolic: {shown(answer)} was not compared within {self._seconds:g} s of CPU time")
        return float(kind == "equal"), {"undecided": float(kind == "undecided")}

    def _answer(self, text: str) -> str:
        if self._extract is not None:
            return (self._extract(text) or "")[-_MOST_CHARACTERS:]
        boxed = extract_answer(text, "boxed")
        if boxed is not None:
            return f"\\boxed{{{boxed[:_MOST_CHARACTERS]}}}"
        hashed = extract_answer(text, "hash")
        if hashed and "\\" in hashed and "$" not in hashed:
            # LaTeX after #### is bare, and math-verify parses it between delimiters only.
            hashed = f"${hashed}$"
        return (hashed or text)[-_MOST_CHARACTERS:]


class _Pool:
    """Worker processes, started on demand and stopped with the event loop."""

    def __init__(self, size: int) -> None:
        self._slots = asyncio.Semaphore(size)
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()

    async def compare(self, gold: list[str], answer: str, seconds: float) -> dict[str, Any]:
        request = orjson.dumps({"gold": gold, "answer": answer, "seconds": seconds}) + b"\n"
        async with self._slots:
            # A second one is asked where the first had died before, by whatever hand.
            for _ in range(2):
                process = self._idle.pop() if self._idle else await self._start()
                line = await self._ask(process, request)
                if line.endswith(b"\n"):
                    self._idle.append(process)
                    verdict: dict[str, Any] = orjson.loads(line)
                    return verdict
                self._all.discard(process)
                code = await process.wait()
                if code == -signal.SIGPROF:
                    return {"verdict": "undecided"}
        raise EnvError(f"symbolic: two comparison processes died on {shown(answer)}, the last with exit status {code}")

    async def close(self) -> None:
        for process in self._all:
            _kill(process)
        for process in self._all:
            await process.wait()

    async def _ask(self, process: asyncio.subprocess.Process, request: bytes) -> bytes:
        reader, writer = process.stdout, process.stdin
        if reader is None or writer is None:
            raise EnvError("symbolic: a process was started without pipes")
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(request)
                await writer.drain()
            return await reader.readline()
        except BaseException:  # also a cancellation
            # This answer has no waiter any more, and must not be read as the next one.
            _kill(process)
            self._all.discard(process)
            raise

    async def _start(self) -> asyncio.subprocess.Process:
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                # -P: the folder of the script holds modules of this package, which must not pass for others.
                *(sys.executable, "-P", str(_WORKER)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
                env=child_environment(),
            )
            self._all.add(process)
            if not (await self._ask(process, b"")).endswith(b"\n"):
                self._all.discard(process)
                code = await process.wait()
                errors.seek(0)
                log = errors.read()[-2000:].decode("utf-8", "replace").strip()
                raise EnvError(f"symbolic: a comparison process did not start (exit status {code}): {log}")
        return process


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()


async def _open_pool() -> _Pool:
    return _Pool(max(1, min(4, (os.cpu_count() or 2) // 2)))


@functools.cache
def _pools() -> PerLoop[_Pool]:
    """Return the pools of all Symbolic functions: one per event loop."""
    return PerLoop(_open_pool, _Pool.close)
