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
from turnwise.ext.environments.code.inside.tests import isolate_statements
from turnwise.ext.environments.code.inside.wire import decode, encode
from turnwise.ext.environments.code.problems import Case, Problem
from turnwise.sandboxes.core import Sandbox, SandboxProcess

_LONGEST_LINE: Final = 16 * 2**20
_WRITE_S: Final = 30.0
_MOST_DEATHS: Final = 2
"""Sandboxes that may die under one solution: the first may be the machine's fault, the second is the solution's."""


class ProgramEnded(Exception):
    """The program ended before it answered; it is restarted for the next question."""


class ProgramUnusable(Exception):
    """The program cannot answer anything."""


class SandboxedProgram:
    """One program, restarted across processes and sandboxes.

    Args:
        open_sandbox: Returns a clean, started sandbox.
        opening: First message, written when the process starts.
        start: Seconds for its answer, ``{"ok": null}`` or ``{"err": [name, text]}``; None where it has no answer.
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
            ProgramEnded: The program ended.
            ProgramUnusable: It does not start, or kills its sandboxes.
            SandboxError: A sandbox failed.
        """
        await self.write_line(json.dumps(question).encode() + b"\n")
        line = await self.read_line(timeout)
        if line is None:
            await self.restart()
            return None
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            await self.restart()
            raise ProgramEnded("the answer cannot be parsed")
        return answer

    async def write_line(self, line: bytes) -> None:
        """Write a line. Raises as :meth:`ask`."""
        process = await self._running_process()
        try:
            async with asyncio.timeout(_WRITE_S):
                await process.write(line)
        except (BrokenPipeError, TimeoutError):
            await self.restart()
            raise ProgramEnded("the process of the solution ended") from None
        except SandboxDied as error:
            await self._count_death(error)

    async def read_line(self, timeout: float) -> bytes | None:
        """Return the next line with its line break; None after a timeout."""
        process = await self._running_process()
        try:
            async with asyncio.timeout(timeout):
                while b"\n" not in self._buffer:
                    data = await process.read(2**20)
                    if not data or len(self._buffer) > _LONGEST_LINE:
                        await self.restart()
                        raise ProgramEnded("the process of the solution ended" if not data else "too much was written")
                    self._buffer += data
        except TimeoutError:
            return None
        except SandboxDied as error:
            await self._count_death(error)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"

    async def start(self) -> None:
        """Start the process early; errors other than SandboxError are raised by the first question."""
        with contextlib.suppress(ProgramEnded, ProgramUnusable):
            await self._running_process()

    async def restart(self) -> None:
        """Kill the process; the next question starts a new one."""
        process, self._process, self._buffer = self._process, None, b""
        if process is not None:
            try:
                await process.kill()
            except SandboxDied:
                await self._close_sandbox()

    async def close(self) -> None:
        """Kill the process and close the sandbox."""
        self._process = None
        await self._close_sandbox()

    async def _close_sandbox(self) -> None:
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._close(sandbox)

    async def _count_death(self, error: SandboxDied) -> NoReturn:
        self._deaths += 1
        self._process, self._buffer = None, b""
        await self._close_sandbox()
        if self._deaths >= _MOST_DEATHS:
            raise ProgramUnusable("the solution ended its sandbox") from error
        raise ProgramEnded("the sandbox of the solution ended") from error

    async def _running_process(self) -> SandboxProcess:
        if self._process is not None:
            return self._process
        if self._deaths >= _MOST_DEATHS:
            raise ProgramUnusable("the solution ended its sandbox")
        if self._sandbox is None:
            self._sandbox = await self._open()
        self._buffer = b""
        try:
            process = self._process = await self._sandbox.spawn(self._command, env={"PYTHONHASHSEED": "0"})
            await process.write(self._opening)
        except SandboxDied as error:
            await self._count_death(error)
        except BrokenPipeError:
            await self.restart()
            raise ProgramUnusable("Python does not run in this sandbox, or the solution ended it at once") from None
        if self._start is not None:
            line = await self.read_line(self._start)
            status = {} if line is None else _parse_object(line)
            if "ok" not in status:
                await self.restart()
                parts = status.get("err", ["TimeoutError", "the solution was not loaded in time"])
                raise ProgramUnusable(": ".join(str(part) for part in parts)[:500])
        return process


def _parse_object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


_MOST_TIMEOUTS: Final = 3
"""Tests that may time out; after them the remaining tests are not run and count as failed."""
_MOST_OUTPUT: Final = 4 * 2**20
_START_S: Final = 10.0
"""Lower bound of the seconds for loading a solution, and the grace of its runner after a time-out."""
_JUDGE_S: Final = 30.0
"""Seconds that the tests may compute between two calls of the solution."""


@dataclass(frozen=True, slots=True)
class CaseResult:
    """Result of one test case.

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

    results: tuple[CaseResult, ...] = ()
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
            return Report(tuple(CaseResult(False, "there is no code") for _ in range(_test_count(problem))))
        graders = {"asserts": self._grade_asserts, "calls": self._grade_calls, "programs": self._grade_programs}
        results = await graders[problem.kind](problem, program)
        return Report(tuple(results), self._timeouts)

    def _solution_program(self, problem: Problem, program: str) -> SandboxedProgram:
        memory = problem.memory or self.memory
        opening = {"code": program, "memory": memory}
        command = [self.python, "-u", "-c", source("solution")]
        return SandboxedProgram(self.open, self.close, command, opening, start=max(self._time_limit(problem), _START_S))

    def _time_limit(self, problem: Problem) -> float:
        return problem.seconds or self.seconds

    async def _run_cases(self, cases: Sequence[Case], run: Callable[[Case], Awaitable[CaseResult]]) -> list[CaseResult]:
        results: list[CaseResult] = []
        skip_reason = ""
        for case in cases:
            if self._timeouts >= _MOST_TIMEOUTS:
                skip_reason = f"not run: {_MOST_TIMEOUTS} tests ran out of time"
            if skip_reason:
                results.append(CaseResult(False, skip_reason, case.hidden))
                continue
            try:
                results.append(await run(case))
            except ProgramUnusable as error:
                skip_reason = str(error)
                results.append(CaseResult(False, skip_reason, case.hidden))
        return results

    async def _grade_programs(self, problem: Problem, program: str) -> list[CaseResult]:
        seconds, memory = self._time_limit(problem), problem.memory or self.memory
        command = [self.python, "-u", "-c", source("programs")]
        programs = SandboxedProgram(self.open, self.close, command, {"code": program})

        async def run(case: Case) -> CaseResult:
            stdin = base64.b64encode(str(case.input).encode("utf-8", "surrogateescape")).decode()
            request = {"stdin": stdin, "seconds": seconds, "memory": memory, "output": _MOST_OUTPUT}
            try:
                answer = await programs.ask(request, seconds + _START_S)
            except ProgramEnded as error:
                return CaseResult(False, str(error), case.hidden)
            if answer is None or answer.get("timed_out"):
                self._timeouts += 1
                return CaseResult(False, f"not finished within {seconds:g} s", case.hidden)
            return self._judge_output(answer, case)

        try:
            return await self._run_cases(problem.cases, run)
        finally:
            await programs.close()

    def _judge_output(self, answer: dict[str, Any], case: Case) -> CaseResult:
        # The solution may forge this answer. That gains nothing: it can only state an output, which is compared.
        try:
            output = base64.b64decode(str(answer.get("stdout", ""))).decode("utf-8", "replace")
        except ValueError:
            return CaseResult(False, "no output", case.hidden)
        if answer.get("exit") != 0:
            last_line = str(answer.get("stderr", "")).strip().split("\n")[-1][:300]
            return CaseResult(False, f"exit code {str(answer.get('exit'))[:20]}: {last_line}", case.hidden)
        if not same_output(output, str(case.expected), self.tolerance):
            return CaseResult(False, "wrong output", case.hidden)
        return CaseResult(True, "", case.hidden)

    async def _grade_calls(self, problem: Problem, program: str) -> list[CaseResult]:
        seconds = self._time_limit(problem)
        solution = self._solution_program(problem, program)
        target = {"name": problem.entry}

        async def run(case: Case) -> CaseResult:
            request = {"do": "call", "on": target, "args": [encode(argument) for argument in case.input], "kwargs": {}}
            try:
                answer = await solution.ask(request, seconds)
            except ProgramEnded as error:
                return CaseResult(False, str(error), case.hidden)
            if answer is None:
                self._timeouts += 1
                return CaseResult(False, f"no result within {seconds:g} s", case.hidden)
            if "ok" not in answer:
                return CaseResult(False, _error_text(answer.get("err", "no result")), case.hidden)
            try:
                right = same_value(decode(answer["ok"]), case.expected, self.tolerance)
            except (ValueError, TypeError, KeyError, IndexError, RecursionError, ArithmeticError):
                return CaseResult(False, "the result is not a plain value", case.hidden)
            return CaseResult(right, "" if right else "wrong result", case.hidden)

        try:
            return await self._run_cases(problem.cases, run)
        finally:
            await solution.close()

    async def _grade_asserts(self, problem: Problem, program: str) -> list[CaseResult]:
        solution = self._solution_program(problem, program)
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
        judge = SandboxedProgram(self.open, self.close, [self.python, "-u", "-c", source("tests")], opening)
        try:
            await asyncio.gather(judge.start(), solution.start())
            verdicts = await self._relay_until_done(judge, solution, nonce, self._time_limit(problem))
        finally:
            await judge.close()
            await solution.close()
        visible = len(verdicts) - tests.hidden
        every_hidden = bool(tests.check)
        return [CaseResult(ok, error, every_hidden or number >= visible) for number, (ok, error) in enumerate(verdicts)]

    async def _relay_until_done(
        self, judge: SandboxedProgram, solution: SandboxedProgram, nonce: str, seconds: float
    ) -> list[tuple[bool, str]]:
        """Relay messages between tests and solution until the tests are done."""
        count, solution_called = 0, False
        verdicts: dict[int, tuple[bool, str]] = {}
        failure = "not run"
        while True:
            try:
                line = await judge.read_line(_JUDGE_S)
                if line is not None and line[:1] == b"C":
                    solution_called = True
                    await judge.write_line(await self._relay_call(solution, line[1:], seconds))
                    continue
            except ProgramEnded:
                line = None
            except ProgramUnusable as error:
                failure = str(error)
                break
            if line is None:
                if not count and not solution_called:
                    raise EnvError("the tests of this row did not start: check its test columns")
                failure = f"the tests ended, or took more than {_JUDGE_S:g} s themselves"
                break
            verdict = _verdict(line, nonce)
            self._spent = 0.0 if "begin" in verdict else self._spent
            count = int(verdict.get("count", count))
            if "number" in verdict:
                verdicts[verdict["number"]] = (bool(verdict["ok"]), str(verdict["error"]))
            # Once the solution was called, it may itself have broken the tests.
            if "broken" in verdict and not count and not solution_called:
                raise EnvError(f"the tests of this row cannot run: {verdict['broken']}")
            if "broken" in verdict or "done" in verdict:
                failure = str(verdict.get("broken", failure))
                break
        return [verdicts.get(number, (False, failure)) for number in range(max(count, 1))]

    async def _relay_call(self, solution: SandboxedProgram, line: bytes, seconds: float) -> bytes:
        """Relay a call to the solution and return its answer. Raises ProgramUnusable."""
        if self._timeouts >= _MOST_TIMEOUTS:
            raise ProgramUnusable(f"not run: {_MOST_TIMEOUTS} tests ran out of time")
        began = time.monotonic()
        try:
            await solution.write_line(line)
            # All calls of one test, callbacks included, share the time limit of the test.
            answer = await solution.read_line(max(seconds - self._spent, 0.0))
        except ProgramEnded as error:
            return _error_line("ChildProcessError", str(error))
        finally:
            self._spent += time.monotonic() - began
        if answer is None:
            self._spent = 0.0
            self._timeouts += 1
            await solution.restart()
            return _error_line("TimeoutError", f"no result within {seconds:g} s")
        return answer


def _error_line(name: str, text: str) -> bytes:
    return json.dumps({"err": [name, text]}).encode() + b"\n"


def _test_count(problem: Problem) -> int:
    if problem.asserts.check:
        return max(1, isolate_statements(ast.parse(problem.asserts.check), "check"))
    return len(problem.cases) or len(problem.asserts.tests)


def _verdict(line: bytes, nonce: str) -> dict[str, Any]:
    try:
        line_nonce, verdict = json.loads(line[1:])
    except (ValueError, TypeError):
        return {}
    return verdict if line[:1] == b"V" and line_nonce == nonce and isinstance(verdict, dict) else {}


def _error_text(error: Any) -> str:
    parts = error if isinstance(error, list) else [error]
    return ": ".join(str(part) for part in parts)[:500]
