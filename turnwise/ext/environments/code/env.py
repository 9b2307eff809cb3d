"""CodeEnv: a programming problem, graded by its tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from turnwise.envs.core import ResetResult, ScoreParts, Solution
from turnwise.envs.results import SANDBOX_VARIES
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, SandboxFileError, TaskError, shown
from turnwise.ext.environments.code.answers import code_of, program_of
from turnwise.ext.environments.code.builtin import task_from_seed
from turnwise.ext.environments.code.formats import problem_of
from turnwise.ext.environments.code.grading import Grader, Report
from turnwise.ext.environments.code.problems import Problem
from turnwise.sandboxes.core import Sandbox, SandboxLimits, SandboxSpec
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tasks.seeded import FIXED_HASHES
from turnwise.types import Message, text_of, with_system

_FILE: Final = "solution.py"
_ONE_ANSWER: Final = (
    "You solve programming problems in Python. Think first if you need to, then answer with your complete code in one "
    "```python block. It is judged by tests, some of which you are not shown."
)
_AGENTIC: Final = (
    f"You solve programming problems in Python in a sandbox. Write your code to the file {_FILE} in the working "
    "directory, try it out with your tools, and call submit when it is right. It is judged by tests, some of which you "
    "are not shown."
)
_MAX_CACHED: Final = 50_000
_cache: OrderedDict[int, Report] = OrderedDict()


class CodeEnv(ToolEnv):
    """Asks for code, and grades it by running its tests in sandboxes.

    The score is 1 where all tests pass, else 0; with ``partial`` the share that passes.

    Attributes:
        report: Test results; None before scoring.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.ext.environments.code:tasks"
    varies: ClassVar[Mapping[str, str]] = SANDBOX_VARIES

    task: Task
    problem: Problem
    report: Report | None = None

    def __init__(
        self,
        *,
        agentic: bool = False,
        tools: Sequence[str] = ("shell", "python", "editor", "submit"),
        partial: bool = False,
        time_limit: float = 10.0,
        memory: int = 1024,
        tolerance: float = 0.0,
        cache: bool = False,
        python: str = "python3",
        image: str | None = None,
        packages: bool = False,
    ) -> None:
        """Set how answers are given and graded.

        Args:
            agentic: Whether the model works in a sandbox and submits a file, instead of answering with code.
            tools: Its tools then.
            partial: Whether the score is the share of tests that pass.
            time_limit: Default seconds for a test.
            memory: Default MiB for a process of the solution; 0 is unlimited.
            tolerance: Absolute or relative tolerance of numbers.
            cache: Whether equal answers to equal problems are graded once in this process.
            python: The interpreter inside the sandboxes.
            image: The image of the sandboxes; None for the backend's default.
            packages: Whether this process's interpreter and packages (numpy, say) are mounted, as ``python3``.
        """
        if not time_limit > 0:
            raise ConfigError(f"time_limit is {shown(time_limit)}: it must be seconds, more than 0")
        if isinstance(memory, bool) or not isinstance(memory, int) or memory < 0:
            raise ConfigError(f"memory is {shown(memory)}: it must be MiB, 0 for no bound")
        if not tolerance >= 0:
            raise ConfigError(f"tolerance is {shown(tolerance)}: it must be at least 0")
        self.agentic, self.partial, self.cache = agentic, partial, cache
        self.tools = tuple(tools) if agentic else ()
        self._python, self._image, self._packages = python, image, packages
        self._time_limit, self._memory, self._tolerance = time_limit, memory * 2**20, tolerance

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Ask the task's problem; without a task, a built-in one is task_from_seed from the seed."""
        self.task = task_from_seed(seed) if task is None else task
        self.report = None
        prompt = self.task.prompt if isinstance(self.task.prompt, str) else ""
        try:
            self.problem = problem_of(self.task.data, prompt)
        except TaskError as error:
            raise TaskError(f"task {self.task.id!r}: {error}") from error
        if self.agentic:
            await self.open_sandbox(self._spec())
            if self.problem.starter.strip():
                await self._working().write_file(_FILE, f"{self.problem.starter.rstrip()}\n".encode())
        return with_system(self.task.messages(), _AGENTIC if self.agentic else _ONE_ANSWER), {}

    async def score(self, final: Message | None) -> ScoreParts:
        """Grade the code by its tests."""
        code = await self._code(final)
        program = program_of(self.problem, code)
        report = self.report = await self._graded(program)
        value = report.fraction if self.partial else float(report.ok)
        metrics = {
            "tests": float(len(report.results)),
            "tests_passed": float(report.passed),
            "test_timeouts": float(report.timeouts),
            "no_code": float(not program),
        }
        return ScoreParts({"score": value}, metrics)

    def solve(self) -> Solution:
        """Answer with the row's reference."""
        reference = self.problem.reference
        if reference is None:
            return
        if not self.agentic:
            yield f"```python\n{reference.rstrip()}\n```"
            return
        yield tool_call("editor", command="create", path=_FILE, file_text=reference)
        yield tool_call("submit")

    async def _code(self, final: Message | None) -> str:
        if not self.agentic:
            return "" if final is None else code_of(text_of(final))
        try:
            data = await self._working().read_file(_FILE, max_bytes=2**20)
        except SandboxFileError:
            data = b""
        code = data.decode("utf-8", "replace")
        if code.strip() and code.strip() != self.problem.starter.strip():
            return code
        return "" if final is None or final.get("tool_calls") else code_of(text_of(final))

    async def _graded(self, program: str) -> Report:
        limits = [self._time_limit, self._memory, self._tolerance, self._python, self._image]
        key = stable_hash("code", repr(self.problem), program, *map(str, limits))
        cached = _cache.get(key) if self.cache else None
        if cached is not None:
            return cached
        grader = Grader(self._clean, self.close_sandbox, self._python, self._time_limit, self._memory, self._tolerance)
        report = await grader.grade(self.problem, program)
        if self.cache and not report.timeouts:
            # A time-out is not cached: other processes may have caused it.
            _cache[key] = report
            while len(_cache) > _MAX_CACHED:
                _cache.popitem(last=False)
        return report

    def _working(self) -> Sandbox:
        assert self.sandbox is not None
        return self.sandbox

    def _spec(self) -> SandboxSpec:
        limits = SandboxLimits(memory=max(2 * self._memory, 2**30))
        if not self._packages:
            return SandboxSpec(image=self._image, limits=limits, env=FIXED_HASHES)
        from turnwise.sandboxes.local import host_python

        mounts, env = host_python()
        return SandboxSpec(image=self._image, limits=limits, mounts=tuple(mounts), env={**env, **FIXED_HASHES})

    async def _clean(self) -> Sandbox:
        """Return a sandbox in which no code of the model has run."""
        return await self.open_sandbox(self._spec())
