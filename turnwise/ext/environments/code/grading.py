"""Grader: runs a solution and its tests in separate sandboxed processes."""

from __future__ import annotations

import ast
import asyncio
import base64
import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from turnwise.errors import EnvError, SandboxDied
from turnwise.ext.environments.code.answers import same_output, same_value
from turnwise.ext.environments.code.inside import source
from turnwise.ext.environments.code.inside.tests import split
from turnwise.ext.environments.code.inside.wire import decode, encode
from turnwise.ext.environments.code.problems import Case, Problem
from turnwise.sandboxes.core import Sandbox, SandboxProcess

_LONGEST_LINE: Final = 16 * 2**20
_WRITE_S: Final = 30.0
_MOST_DEATHS: Final = 2
"""So many sandboxes may end under a solution. One may be the machine's doing; the second is the solution's."""


class Ended(Exception):
    """The program ended before it answered; it is restarted for the next question."""


class Hopeless(Exception):
    """The program cannot answer anything."""


class Programs:
    """One program, restarted across processes and sandboxes.

    Args:
        open_sandbox: Returns a clean, started sandbox.
        start: Seconds for the answer to that, ``{"ok": null}`` or ``{"err": [name, text]}``; None: there is none.
    """

    def __init__(
        self,
        open_sandbox: Callable[[], Awaitable[Sandbox]],
        close_sandbox: Callable[[Sandbox], Awaitable[None]],
        command: Sequence[str],
        opening: Mapping[str, Any],
        *,
        start: float | None = None,
    ) -> None:
        self._open, self._close = open_sandbox, close_sandbox
        self._command = list(command)
        self._opening = json.dumps(opening).encode() + b"\n"
        self._start = start
        self._sandbox: Sandbox | None = None
        self._process: SandboxProcess | None = None
        self._buffer = b""
        self._deaths = 0

    async def ask(self, question: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
        """Write a line and return the answer; None after a timeout, which kills the program.

        Raises:
            Ended: The program ended.
            Hopeless: It does not start, or kills its sandboxes.
            SandboxError: A sandbox failed.
        """
        await self.put(json.dumps(question).encode() + b"\n")
        line = await self.line(timeout)
        if line is None:
            await self.restart()
            return None
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            await self.restart()
            raise Ended("the answer cannot be parsed")
        return found

    async def put(self, line: bytes) -> None:
        """Write a line. Raises as :meth:`ask`."""
        process = await self._running()
        try:
            async with asyncio.timeout(_WRITE_S):
                await process.write(line)
        except (BrokenPipeError, TimeoutError):
            await self.restart()
            raise Ended("the process of the solution ended") from None
        except SandboxDied as error:
            await self._died(error)

    async def line(self, timeout: float) -> bytes | None:
        """Return the next line with its line break; None after a timeout."""
        process = await self._running()
        try:
            async with asyncio.timeout(timeout):
                while b"\n" not in self._buffer:
                    data = await process.read(2**20)
                    if not data or len(self._buffer) > _LONGEST_LINE:
                        await self.restart()
                        raise Ended("the process of the solution ended" if not data else "too much was written")
                    self._buffer += data
        except TimeoutError:
            return None
        except SandboxDied as error:
            await self._died(error)
        found, _, self._buffer = self._buffer.partition(b"\n")
        return found + b"\n"

    async def begin(self) -> None:
        """Start ahead of time; failures but SandboxError surface with the first question."""
        with contextlib.suppress(Ended, Hopeless):
            await self._running()

    async def restart(self) -> None:
        """Kill the process; the next question starts a new one."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            try:
                await process.kill()
            except SandboxDied:
                await self._drop()

    async def end(self) -> None:
        """Kill the process and close the sandbox."""
        self._process = None
        await self._drop()

    async def _drop(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._close(sandbox)

    async def _died(self, error: SandboxDied) -> NoReturn:
        self._deaths += 1
        self._process, self._buffer = None, b""
        await self._drop()
        if self._deaths >= _MOST_DEATHS:
            raise Hopeless("the solution ended its sandbox") from error
        raise Ended("the sandbox of the solution ended") from error

    async def _running(self) -> SandboxProcess:
        if self._process is not None:
            return self._process
        if self._deaths >= _MOST_DEATHS:
            raise Hopeless("the solution ended its sandbox")
        if self._sandbox is None:
            self._sandbox = await self._open()
        self._buffer = b""
        try:
            process = self._process = await self._sandbox.spawn(self._command, env={"PYTHONHASHSEED": "0"})
            await process.write(self._opening)
        except SandboxDied as error:
            await self._died(error)
        except BrokenPipeError:
            await self.restart()
            raise Hopeless("Python does not run in this sandbox, or the solution ended it at once") from None
        if self._start is not None:
            line = await self.line(self._start)
            told = {} if line is None else _object(line)
            if "ok" not in told:
                await self.restart()
                parts = told.get("err", ["TimeoutError", "the solution was not loaded in time"])
                raise Hopeless(": ".join(str(part) for part in parts)[:500])
        return process


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


_MOST_TIMEOUTS: Final = 3
"""So many tests may run into their time-outs; the others are not run, and count as failed."""
_MOST_OUTPUT: Final = 4 * 2**20
_START_S: Final = 10.0
"""Seconds that a solution may take at least to be loaded, and its runner to answer behind its time-out."""
_JUDGE_S: Final = 30.0
"""Seconds that tests may take themselves between two calls of the solution."""


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one test.

    Attributes:
        ok: Whether it passed.
        error: The failure, in a few words.
        hidden: Whether the model was not shown it.
    """

    ok: bool
    error: str = ""
    hidden: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all tests of an answer."""

    results: tuple[Result, ...] = ()
    timeouts: int = 0

    @property
    def passed(self) -> int:
        """Number of passed tests."""
        return sum(result.ok for result in self.results)

    @property
    def fraction(self) -> float:
        """Share of passed tests; 0 without tests."""
        return self.passed / len(self.results) if self.results else 0.0

    @property
    def ok(self) -> bool:
        """Whether there are tests and all passed."""
        return bool(self.results) and self.passed == len(self.results)


@dataclass(slots=True)
class Grader:
    """Runs tests.

    Attributes:
        open: Returns a clean, started sandbox.
        memory: Bytes for a process of the solution; 0 leaves only the sandbox's limit.
    """

    open: Callable[[], Awaitable[Sandbox]]
    close: Callable[[Sandbox], Awaitable[None]]
    python: str = "python3"
    seconds: float = 10.0
    memory: int = 2**30
    tolerance: float = 0.0
    _timeouts: int = field(default=0, init=False)
    _spent: float = field(default=0.0, init=False)

    async def grade(self, problem: Problem, program: str) -> Report:
        """Run all tests of a problem.

        Raises:
            SandboxError: A sandbox failed, not through what ran in it.
            EnvError: The row's own tests cannot run.
        """
        self._timeouts, self._spent = 0, 0.0
        if not program:
            return Report(tuple(Result(False, "there is no code") for _ in range(_count(problem))))
        works = {"asserts": self._asserts, "calls": self._calls, "programs": self._programs}
        results = await works[problem.kind](problem, program)
        return Report(tuple(results), self._timeouts)

    def _solution(self, problem: Problem, program: str) -> Programs:
        memory = problem.memory or self.memory
        opening = {"code": program, "memory": memory}
        command = [self.python, "-u", "-c", source("solution")]
        return Programs(self.open, self.close, command, opening, start=max(self._limit(problem), _START_S))

    def _limit(self, problem: Problem) -> float:
        return problem.seconds or self.seconds

    async def _each(self, cases: Sequence[Case], run: Callable[[Case], Awaitable[Result]]) -> list[Result]:
        results: list[Result] = []
        hopeless = ""
        for case in cases:
            if self._timeouts >= _MOST_TIMEOUTS:
                hopeless = f"not run: {_MOST_TIMEOUTS} tests ran out of time"
            if hopeless:
                results.append(Result(False, hopeless, case.hidden))
                continue
            try:
                results.append(await run(case))
            except Hopeless as error:
                hopeless = str(error)
                results.append(Result(False, hopeless, case.hidden))
        return results

    async def _programs(self, problem: Problem, program: str) -> list[Result]:
        seconds, memory = self._limit(problem), problem.memory or self.memory
        command = [self.python, "-u", "-c", source("programs")]
        programs = Programs(self.open, self.close, command, {"code": program})

        async def run(case: Case) -> Result:
            given = base64.b64encode(str(case.given).encode("utf-8", "surrogateescape")).decode()
            request = {"stdin": given, "seconds": seconds, "memory": memory, "output": _MOST_OUTPUT}
            try:
                answer = await programs.ask(request, seconds + _START_S)
            except Ended as error:
                return Result(False, str(error), case.hidden)
            if answer is None or answer.get("timed_out"):
                self._timeouts += 1
                return Result(False, f"not finished within {seconds:g} s", case.hidden)
            return self._judged(answer, case)

        try:
            return await self._each(problem.cases, run)
        finally:
            await programs.end()

    def _judged(self, answer: dict[str, Any], case: Case) -> Result:
        # Whatever answers may be the solution itself in disguise: it can say nothing here but an output, and a right
        # one is right.
        try:
            output = base64.b64decode(str(answer.get("stdout", ""))).decode("utf-8", "replace")
        except ValueError:
            return Result(False, "no output", case.hidden)
        if answer.get("exit") != 0:
            said = str(answer.get("stderr", "")).strip().split("\n")[-1][:300]
            return Result(False, f"exit code {str(answer.get('exit'))[:20]}: {said}", case.hidden)
        if not same_output(output, str(case.wanted), self.tolerance):
            return Result(False, "wrong output", case.hidden)
        return Result(True, "", case.hidden)

    async def _calls(self, problem: Problem, program: str) -> list[Result]:
        seconds = self._limit(problem)
        solution = self._solution(problem, program)
        target = {"name": problem.entry}

        async def run(case: Case) -> Result:
            request = {"do": "call", "on": target, "args": [encode(each) for each in case.given], "kwargs": {}}
            try:
                answer = await solution.ask(request, seconds)
            except Ended as error:
                return Result(False, str(error), case.hidden)
            if answer is None:
                self._timeouts += 1
                return Result(False, f"no result within {seconds:g} s", case.hidden)
            if "ok" not in answer:
                return Result(False, _told(answer.get("err", "no result")), case.hidden)
            try:
                right = same_value(decode(answer["ok"]), case.wanted, self.tolerance)
            except (ValueError, TypeError, KeyError, IndexError, RecursionError, ArithmeticError):
                return Result(False, "the result is not a plain value", case.hidden)
            return Result(right, "" if right else "wrong result", case.hidden)

        try:
            return await self._each(problem.cases, run)
        finally:
            await solution.end()

    async def _asserts(self, problem: Problem, program: str) -> list[Result]:
        solution = self._solution(problem, program)
        nonce = secrets.token_hex(16)
        tests = problem.asserts
        opening = {
            "nonce": nonce,
            "prelude": tests.prelude,
            "imports": list(tests.imports),
            "entry": problem.entry if tests.check else "",
            "check": tests.check,
            "tests": list(tests.tests),
        }
        judge = Programs(self.open, self.close, [self.python, "-u", "-c", source("tests")], opening)
        try:
            await asyncio.gather(judge.begin(), solution.begin())
            verdicts = await self._held(judge, solution, nonce, self._limit(problem))
        finally:
            await judge.end()
            await solution.end()
        shown = len(verdicts) - tests.hidden
        every_hidden = bool(tests.check)
        return [Result(ok, error, every_hidden or number >= shown) for number, (ok, error) in enumerate(verdicts)]

    async def _held(self, judge: Programs, solution: Programs, nonce: str, seconds: float) -> list[tuple[bool, str]]:
        """Relay messages between tests and solution until the tests are done."""
        count, asked = 0, False
        found: dict[int, tuple[bool, str]] = {}
        why = "not run"
        while True:
            try:
                line = await judge.line(_JUDGE_S)
                if line is not None and line[:1] == b"C":
                    asked = True
                    await judge.put(await self._relayed(solution, line[1:], seconds))
                    continue
            except Ended:
                line = None
            except Hopeless as error:
                why = str(error)
                break
            if line is None:
                if not count and not asked:
                    raise EnvError("the tests of this row did not start: check its test columns")
                why = f"the tests ended, or took more than {_JUDGE_S:g} s themselves"
                break
            verdict = _verdict(line, nonce)
            self._spent = 0.0 if "begin" in verdict else self._spent
            count = int(verdict.get("count", count))
            if "number" in verdict:
                found[verdict["number"]] = (bool(verdict["ok"]), str(verdict["error"]))
            # Where the solution was asked already, it may be what broke them.
            if "broken" in verdict and not count and not asked:
                raise EnvError(f"the tests of this row cannot run: {verdict['broken']}")
            if "broken" in verdict or "done" in verdict:
                why = str(verdict.get("broken", why))
                break
        return [found.get(number, (False, why)) for number in range(max(count, 1))]

    async def _relayed(self, solution: Programs, line: bytes, seconds: float) -> bytes:
        """Relay a call to the solution and return its answer. Raises Hopeless."""
        if self._timeouts >= _MOST_TIMEOUTS:
            raise Hopeless(f"not run: {_MOST_TIMEOUTS} tests ran out of time")
        began = time.monotonic()
        try:
            await solution.put(line)
            # A test may call often, and the solution may call back: together they have the test's time.
            reply = await solution.line(max(seconds - self._spent, 0.0))
        except Ended as error:
            return _error_line("ChildProcessError", str(error))
        finally:
            self._spent += time.monotonic() - began
        if reply is None:
            self._spent = 0.0
            self._timeouts += 1
            await solution.restart()
            return _error_line("TimeoutError", f"no result within {seconds:g} s")
        return reply


def _error_line(name: str, text: str) -> bytes:
    return json.dumps({"err": [name, text]}).encode() + b"\n"


def _count(problem: Problem) -> int:
    if problem.asserts.check:
        return max(1, split(ast.parse(problem.asserts.check), "check"))
    return len(problem.cases) or len(problem.asserts.tests)


def _verdict(line: bytes, nonce: str) -> dict[str, Any]:
    try:
        given, verdict = json.loads(line[1:])
    except (ValueError, TypeError):
        return {}
    return verdict if line[:1] == b"V" and given == nonce and isinstance(verdict, dict) else {}


def _told(error: Any) -> str:
    parts = error if isinstance(error, list) else [error]
    return ": ".join(str(part) for part in parts)[:500]
