"""TerminalEnv: a shell in a sandbox, and tests that run after the agent ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import random
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final
from urllib.parse import quote

from turnwise.envs.core import ResetResult, Solution
from turnwise.envs.results import SANDBOX_VARIES, Remark, ScoreParts
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import (
    EnvError,
    RegistryError,
    SandboxError,
    SandboxFileError,
    SandboxUnavailable,
    TaskError,
    TurnwiseError,
    shown,
)
from turnwise.ext.environments.swe.env import check_settings
from turnwise.ext.environments.swe.logs import Statuses, parser_of
from turnwise.ext.environments.terminal.altered import NO_TESTS, AlteredTests, altered_tests, cache_tests, cached_tests
from turnwise.ext.environments.terminal.folder import TaskFolder, read_folder, tasks
from turnwise.ext.environments.terminal.services import shared_services
from turnwise.sandboxes.core import Sandbox, SandboxSpec
from turnwise.sandboxes.local import host_python
from turnwise.tasks import Task
from turnwise.tasks.seeded import FIXED_HASHES
from turnwise.types import Message, with_system

INSTRUCTIONS: Final = (
    "You work in a terminal. Do what the user asks, with the tools, and check the result: it is judged by tests that "
    "run when you are done. Call submit then."
)
_MOST_LOG: Final = 2**20
_LIVE_VERSIONS: Final = 7
"""Altered versions of tests that run beside the agent's processes, which can forge the result of one of eight runs."""
_PREPARE: Final = """
pwd
for pair in "tests /tests {own}/tests" "logs /logs/verifier {own}/logs"; do
  set -- $pair
  rm -rf "$2" 2>/dev/null && mkdir -p "$2" 2>/dev/null && [ -w "$2" ] || { mkdir -p "$3"; set -- "$1" "$3"; }
  echo "$2"
done
"""


@dataclass(frozen=True, slots=True)
class _Run:
    reward: float
    log: str
    tests: Statuses
    timed_out: bool
    seconds: float

    @property
    def passed(self) -> bool:
        return self.reward >= 1.0


class TerminalEnv(ToolEnv):
    """Asks for a task in a terminal.

    After the agent ended, the task's tests run in a copy of its sandbox. The score is the reward that they write
    (``/logs/verifier/reward.txt`` or ``reward.json``), or 1 if all tests of their log pass.

    Attributes:
        log: Tail of the tests' output; "" before they ran.
        tests: The status of each test in the log.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.ext.environments.terminal:tasks"
    varies: ClassVar[Mapping[str, str]] = SANDBOX_VARIES

    folder: TaskFolder
    log: str = ""
    tests: Statuses

    def __init__(
        self,
        *,
        tools: Sequence[str] = ("shell", "submit"),
        instructions: str | None = INSTRUCTIONS,
        test_timeout: float = 300.0,
        twins: bool = True,
    ) -> None:
        """Set tools and limits.

        Args:
            tools: Which of ``shell``, ``editor``, ``apply_patch`` and ``submit`` the model has.
            instructions: The system prompt; None: none.
            test_timeout: Default seconds for tests.
            twins: Whether tests that pass run again with altered checks, which must fail.
        """
        self.tools, self.test_timeout = check_settings(tools, "test_timeout", test_timeout, twins)
        self.names, self.with_twins, self.instructions = tuple(tools), twins, instructions

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # noqa: ARG002
        """Start a sandbox with the task's files."""
        self.log, self.tests = "", {}
        self.folder = _folder_of(task)
        await self.open_sandbox(_spec(self.folder))
        request: Message = {"role": "user", "content": self.folder.instruction}
        return with_system([request], self.instructions), {"task": self.folder.name}

    async def score(self, final: Message | None) -> ScoreParts:  # noqa: ARG002 - what was done is the answer
        """Run the tests."""
        box = self.sandbox
        if box is None:
            raise EnvError("TerminalEnv.score: the episode's sandbox is closed: call reset() first")
        tests = await self._altered()
        if not self.with_twins:
            tests = replace(NO_TESTS, served=tests.served, live=tests.live)
        first = tests.altered if tests.live else tests.altered[:1]
        run, *contradictory = await self._run_versions(box, [tests.plain, *first], tests)
        reward = run.reward
        # In the sandbox itself a process would know the versions again.
        if not tests.live and contradictory and reward > tests.floor >= contradictory[0].reward:
            # Once more, so that a guess which tests these are hardly ever holds.
            versions = [tests.plain, tests.altered[0], tests.altered[-1]]
            again, *contradictory = await self._run_versions(box, versions, tests)
            reward = min(reward, again.reward)
        tampered = reward > tests.floor and any(other.reward > tests.floor for other in contradictory)
        self.log, self.tests = run.log[-4_000:], run.tests
        passed = sum(status.passes for status in run.tests.values())
        metrics = {
            "tests": float(len(run.tests)),
            "tests_passed": float(passed),
            "timed_out": float(run.timed_out),
            "test_seconds": run.seconds,
            "tampered": float(tampered),
        }
        what = f"the tests pass, and also where they expect something else: {', '.join(tests.names)}"
        return ScoreParts({"score": 0.0 if tampered else reward}, metrics, notes={"tampered": what} if tampered else {})

    async def _run_versions(
        self, box: Sandbox, versions: Sequence[Mapping[str, str]], tests: AlteredTests
    ) -> list[_Run]:
        """Run versions of the tests, given as texts of files that differ from the task's.

        Each runs in a copy of the sandbox, without the agent's processes and at the same time as the others, so that
        neither what a run leaves nor a clock tells which one it is. Where the agent's files or processes keep them from
        running, they fail. Those that need its services reach them from copies, one after the other in random order.

        Args:
            box: The sandbox.
            versions: The versions.
            tests: Says what they need. Those that need its processes run in the sandbox itself.
        """
        order = random.SystemRandom().sample(range(len(versions)), len(versions))
        copies: list[Sandbox] = []
        try:
            if tests.live:
                runs = [await self._run(box, versions[number]) for number in order]
            elif tests.served:
                copies, runs = await self.copy_sandbox(box, len(versions)), []
                for fork, number in zip(copies, order, strict=True):
                    async with shared_services(box, fork):
                        runs.append(await self._run(fork, versions[number]))
            else:
                copies = await self.copy_sandbox(box, len(versions))
                runs = await asyncio.gather(
                    *(self._run(fork, versions[number]) for fork, number in zip(copies, order, strict=True))
                )
        except SandboxUnavailable:
            raise
        except SandboxError as error:
            # It is the machine's failure where a new sandbox fails, too, which raises.
            await self.close_sandbox(await self.open_sandbox(_spec(self.folder)))
            return [_Run(0.0, f"the tests cannot run in the agent's sandbox: {error}", {}, False, 0.0)] * len(versions)
        finally:
            for fork in copies:
                await self.close_sandbox(fork)
        return [run for _, run in sorted(zip(order, runs, strict=True), key=lambda pair: pair[0])]

    async def copy_sandbox(self, sandbox: Sandbox, count: int = 1) -> list[Sandbox]:
        """Return sandboxes with the files of an open one and none of its processes, closed as those that it opens.

        Raises:
            SandboxError: It cannot be copied, or a copy did not start.
        """
        if sandbox.capabilities.fork_processes:
            snapshot = await sandbox.snapshot()
            spec = replace(sandbox.spec, snapshot=snapshot, workspace=None)
            return [await self.open_sandbox(spec) for _ in range(count)]
        manager = next(manager for manager, opened in self._in_use if opened is sandbox)
        copies = await manager.fork(sandbox, count)
        self._in_use = (*self._in_use, *((manager, fork) for fork in copies))
        return copies

    async def _run(self, box: Sandbox, texts: Mapping[str, str]) -> _Run:
        """Run the tests.

        Args:
            box: The sandbox.
            texts: Texts of test files that differ from the task's.
        """
        workdir, tests, logs = await self._upload_tests(box, texts)
        timeout = self.folder.test_timeout or self.test_timeout
        script = f"{tests}/{self.folder.script.rpartition('/')[2]}"
        env = {**self.folder.test_env, "TEST_DIR": tests, "VERIFIER_DIR": logs, "PYTHONDONTWRITEBYTECODE": "1"}
        command = ["bash", "-c", f"exec 2>&1; cd {shlex.quote(workdir)}; exec bash {shlex.quote(script)}"]
        done = await box.exec(command, timeout=timeout, env=env, max_output=_MOST_LOG)
        log = done.stdout.decode("utf-8", "replace")
        statuses = parser_of(self.folder.parser)(log)
        reward = None if done.timed_out else await _reward(box, logs)
        if reward is None:
            passed = bool(statuses) and all(status.passes for status in statuses.values())
            reward = float(passed and not done.timed_out)
        return _Run(min(max(reward, 0.0), 1.0), log, statuses, done.timed_out, done.duration)

    async def _altered(self) -> AlteredTests:
        """Return the task's altered tests, cached; none unless its solution passes the tests and fails these.

        The reference solution runs in a separate sandbox.
        """
        tests = cached_tests(self.folder)
        if tests is None:
            tests = NO_TESTS
            if self.folder.solution is not None:
                box = await self.open_sandbox(_spec(self.folder))
                try:
                    await box.exec(self.folder.solution.read_text("utf-8"), timeout=self.test_timeout)
                    tests = await self._validate(box, altered_tests(self.folder))
                finally:
                    await self.close_sandbox(box)
            cache_tests(self.folder, tests)
        return tests

    async def _validate(self, box: Sandbox, tests: AlteredTests) -> AlteredTests:
        """Return altered tests with the facts that the solved sandbox ``box`` shows, or none."""
        for needs in (NO_TESTS, replace(NO_TESTS, served=True), replace(NO_TESTS, live=True)):
            # A backend that cannot listen in a sandbox shares no services.
            with contextlib.suppress(SandboxUnavailable) if needs.served else contextlib.nullcontext():
                [run] = await self._run_versions(box, [tests.plain], needs)
                if run.passed:
                    break
        else:
            return NO_TESTS
        if needs.live:
            tests = altered_tests(self.folder, _LIVE_VERSIONS)
        plain, *altered = await self._run_versions(box, [tests.plain, *tests.altered], needs)
        if not altered or not plain.passed or any(run.passed for run in altered):
            return needs
        return replace(tests, floor=max(run.reward for run in altered), served=needs.served, live=needs.live)

    async def _upload_tests(self, box: Sandbox, texts: Mapping[str, str]) -> tuple[str, str, str]:
        """Copy the tests in, replacing leftovers; return working directory, tests' path and reward path."""
        fallback = f"${{TMPDIR:-/tmp}}/turnwise-{secrets.token_hex(8)}"
        done = await box.exec(_PREPARE.replace("{own}", fallback))
        if not done.ok:
            raise SandboxFileError(f"no folder for the tests can be made: {done.text.strip()[-300:]}")
        workdir, tests, logs = done.stdout.decode().splitlines()
        if self.folder.tests.is_dir():
            await box.upload(self.folder.tests, tests)
        for path, text in texts.items():
            await box.write_file(f"{tests}/{path}", text.encode())
        script = self.folder.path / self.folder.script
        await box.write_file(f"{tests}/{script.name}", script.read_bytes(), mode=0o755)
        return workdir, tests, logs

    async def check_task(self, task: Task) -> list[str]:
        """Check that a task's solution scores 1, and doing nothing scores less."""
        try:
            problems = []
            for solved in (True, False):
                self.log, self.tests, self.folder = "", {}, _folder_of(task)
                if solved and self.folder.solution is None:
                    return ["it has no solution, so it cannot be shown to be solvable"]
                await self.close_sandboxes()
                box = await self.open_sandbox(_spec(self.folder))
                if solved and self.folder.solution is not None:
                    await box.exec(self.folder.solution.read_text("utf-8"), timeout=self.test_timeout)
                score = sum((await self.score(None)).values())
                if solved != (score >= 1.0):
                    what = "its own solution is" if solved else "doing nothing is"
                    problems.append(f"{what} worth {score:g}; the tests say: {self.log.strip()[-300:]}")
        except TurnwiseError as error:
            if error.retryable:
                raise
            return [str(error)]
        if problems or not self.with_twins:
            return problems
        tests = await self._altered()
        if not tests.names:
            problems.append(Remark("none of its tests is a Python test with a check that can be altered"))
        if tests.live:
            problems.append(
                Remark("its tests need processes that its solution leaves: a process could forge what they see")
            )
        return problems

    def solve(self) -> Solution | None:
        """Run the task's solution, and submit; None without a shell."""
        return self._solution() if "shell" in self.names else None

    def _solution(self) -> Solution:
        if self.folder.solution is not None:
            yield tool_call("shell", command=self.folder.solution.read_text("utf-8"))
        if "submit" in self.names:
            yield tool_call("submit")
        yield "It is done."


@functools.cache
def harbor_class(prefix: str, name: str) -> type[TerminalEnv]:
    """Return the class of ``harbor:PATH``: the tasks of a folder of Harbor tasks, or of a single one.

    Raises:
        RegistryError: There is no such folder.
        TaskError: It holds no task.
    """
    path = Path(name).expanduser()
    if not name or not path.is_dir():
        raise RegistryError(f"{prefix}:{name}: there is no folder {name!r}: write {prefix}:PATH of a folder of tasks")
    source = f"turnwise.ext.environments.terminal:tasks?path={quote(str(path.absolute()))}"
    next(tasks(str(path)))
    # Module and qualified name together form its registered name.
    attributes = {"__module__": prefix, "__qualname__": name, "__doc__": f"Tasks of {name}."}
    return type(name, (TerminalEnv,), {**attributes, "default_tasks": source})


def _folder_of(task: Task | None) -> TaskFolder:
    if task is None:
        raise EnvError("TerminalEnv.reset got no task: use tasks such as turnwise.ext.environments.terminal:tasks")
    name = task.data.get("folder")
    if not isinstance(name, str):
        raise TaskError(f"task {task.id!r}: folder is {shown(name)}: it must be the path of a task's folder")
    return read_folder(name)


def _spec(folder: TaskFolder) -> SandboxSpec:
    labels = {"terminal": folder.name}
    if folder.image is not None:
        return SandboxSpec(
            image=folder.image,
            workspace=folder.workspace,
            workdir=folder.workdir,
            user="root",
            env={**FIXED_HASHES, **folder.env},
            limits=folder.limits,
            labels=labels,
        )
    mounts, env = host_python()
    return SandboxSpec(
        workspace=folder.workspace,
        workdir=folder.workdir,
        env={**env, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **FIXED_HASHES, **folder.env},
        mounts=tuple(mounts),
        limits=folder.limits,
        labels=labels,
    )


async def _reward(box: Sandbox, logs: str) -> float | None:
    for name in ("reward.txt", "reward.json"):
        try:
            text = (await box.read_file(f"{logs}/{name}", max_bytes=65_536)).decode()
            content: Any = json.loads(text) if name.endswith(".json") else text
            value = float(content["reward"] if isinstance(content, dict) else content)
        except (SandboxFileError, ValueError, TypeError, KeyError):
            continue
        if math.isfinite(value):
            return value
    return None
