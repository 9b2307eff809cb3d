"""SweEnv: a repository, an issue, and tools to fix it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from turnwise.envs.core import ResetResult, Solution, StepResult
from turnwise.envs.results import SANDBOX_VARIES, Remark, ScoreParts
from turnwise.envs.solution import tool_call
from turnwise.envs.tool_env import ToolEnv
from turnwise.errors import ConfigError, EnvError, TurnwiseError, shown
from turnwise.ext.environments.swe.judge import Judge, Verdict
from turnwise.ext.environments.swe.rows import Instance, instance_of
from turnwise.ext.environments.swe.twins import NO_TWINS, TwinPlan
from turnwise.ext.environments.swe.validation import PlanCache, make_plan, row_obstacle
from turnwise.ext.environments.swe.workspace import RepositoryPaths, hide_history, prepare, spec_of, submission
from turnwise.sandboxes.core import Sandbox, SandboxLimits
from turnwise.tasks import Task
from turnwise.tools.core import BaseTool
from turnwise.tools.sandboxed.base import SubmitTool
from turnwise.tools.sandboxed.editor import EditorTool
from turnwise.tools.sandboxed.patches import ApplyPatchTool
from turnwise.tools.sandboxed.shell import ShellTool
from turnwise.types import Message, with_system

INSTRUCTIONS: Final = (
    "You are a software engineer. The repository in {workdir} has the issue that the user describes: change its files "
    "such that the issue is resolved and nothing else breaks. Look at the code first, reproduce the issue, mend its "
    "cause, and run the tests. Your work is judged by tests that you do not see; changes to tests and to the settings "
    "of the test runner are not taken over. Nothing can be downloaded. When you are done, call submit."
)
TOOLS: Final[Mapping[str, type[BaseTool]]] = {
    "shell": ShellTool,
    "editor": EditorTool,
    "apply_patch": ApplyPatchTool,
    "submit": SubmitTool,
}
LIMITS: Final = SandboxLimits(memory=4 * 2**30, pids=512, disk=8 * 2**30)
_RULES: Final = ("resolved", "partial")
_MOST_PATCH: Final = 2**20
"""Bytes of a diff; a larger one counts as none."""


def check_settings(tools: Any, name: str, timeout: Any, twins: Any) -> tuple[tuple[BaseTool, ...], float]:
    """Return the tools of these names and a timeout of that name, or raise ConfigError."""
    unknown = [tools] if isinstance(tools, str) else [tool for tool in tools if tool not in TOOLS]
    if unknown:
        raise ConfigError(f"tools: {unknown[0]!r} is not one of {', '.join(TOOLS)}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ConfigError(f"{name} is {shown(timeout)}: it must be a number of seconds above 0")
    if not isinstance(twins, bool):
        raise ConfigError(f"twins is {shown(twins)}: it must be true or false")
    return tuple(TOOLS[tool]() for tool in tools), float(timeout)


def _without_twins(plan: TwinPlan) -> list[str]:
    """Return remarks on tests without twins, which cannot expose a solution that forges results."""
    if plan.reason:
        return [Remark(f"its tests have no contradictory twins: {plan.reason}")]
    if plan.lacking:
        return [Remark(f"{len(plan.lacking)} of its tests have no contradictory twin: {plan.lacking[0]}")]
    return []


class SweEnv(ToolEnv):
    """Asks for a patch that resolves an issue, graded by hidden tests.

    The agent works in a sandbox with the row's repository; its diff is graded in a second sandbox with a clean copy.
    The score is 1 where every test of FAIL_TO_PASS and PASS_TO_PASS passes, else 0; with ``reward="partial"`` the share
    of FAIL_TO_PASS, and 0 if a test of PASS_TO_PASS fails.

    Attributes:
        paths: Paths of the repository in the sandbox, and the base commit.
        verdict: Test results after scoring; None if there was nothing to grade.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "turnwise.ext.environments.swe:tasks"
    varies: ClassVar[Mapping[str, str]] = SANDBOX_VARIES

    instance: Instance
    paths: RepositoryPaths
    verdict: Verdict | None = None
    patch: bytes = b""

    def __init__(
        self,
        *,
        reward: Literal["resolved", "partial"] = "resolved",
        tools: Sequence[str] = ("shell", "editor", "submit"),
        instructions: str | None = INSTRUCTIONS,
        eval_timeout: float = 600.0,
        twins: bool = True,
        image: str = "{image}",
        cache: str | None = None,
    ) -> None:
        """Set reward, tools and limits.

        Args:
            reward: ``resolved`` (1 or 0), or ``partial``.
            tools: Which of ``shell``, ``editor``, ``apply_patch`` and ``submit`` the model has.
            instructions: The system prompt, with ``{workdir}`` for the repository's path; None: none.
            eval_timeout: Seconds for the tests.
            twins: Whether contradictory twins run together with the tests, if a row's tests can have some.
            image: Template of a row's image, ``{image}`` being the published one: ``registry.local/{image}``.
            cache: Folder of cached repositories; None: below ``$XDG_CACHE_HOME/turnwise``.
        """
        if reward not in _RULES:
            raise ConfigError(f"reward is {shown(reward)}: it must be {' or '.join(map(repr, _RULES))}")
        if "{image}" not in image:
            raise ConfigError(f"image is {shown(image)}: write {{image}} in place of the published name")
        self.reward: str = reward
        self.with_twins = twins
        self.tools, self.eval_timeout = check_settings(tools, "eval_timeout", eval_timeout, twins)
        self.instructions, self.image = instructions, image
        self.cache = None if cache is None else Path(cache).expanduser()

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:  # noqa: ARG002
        """Start a sandbox with the task's repository."""
        self.verdict, self.patch = None, b""
        self.instance = self._instance(task)
        box = await self.open_sandbox(spec_of(self.instance, LIMITS, self.cache))
        self.paths = await prepare(box, self.instance)
        if self.instance.snapshot is None:
            await hide_history(box)
        instructions = None if self.instructions is None else self.instructions.replace("{workdir}", self.paths.workdir)
        issue: Message = {"role": "user", "content": self.instance.problem}
        return with_system([issue], instructions), {"instance_id": self.instance.name}

    async def score(self, final: Message | None) -> ScoreParts:  # noqa: ARG002 - the repository is the answer
        """Grade the changed repository."""
        if self.sandbox is None:
            raise EnvError("SweEnv.score: the episode's sandbox is closed: call reset() first")
        self.patch, problem = await submission(self.sandbox, self.paths, max_bytes=_MOST_PATCH)
        if not self.patch.strip():
            self.verdict = None
            return ScoreParts({"score": 0.0}, {"resolved": 0.0, "empty_patch": 1.0, "no_diff": float(bool(problem))})
        self.verdict = verdict = await self.judge(self.patch)
        return ScoreParts(
            {"score": verdict.partial if self.reward == "partial" else float(verdict.resolved)},
            {
                "resolved": float(verdict.resolved),
                "tampered": float(bool(verdict.tampered)),
                "fail_to_pass": verdict.fixed,
                "pass_to_pass": verdict.kept,
                "empty_patch": 0.0,
                "patch_bytes": float(len(self.patch)),
                "dropped_files": float(len(verdict.dropped)),
                "eval_seconds": verdict.seconds,
            },
            notes={"tampered": verdict.tampered} if verdict.tampered else {},
        )

    async def judge(self, patch: bytes, *, reverse: bool = False) -> Verdict:
        """Grade a patch to the row of this episode, in a separate sandbox.

        Args:
            patch: A git diff; an empty one grades the repository as it is.
            reverse: Whether it is reverted instead of applied.
        """
        plan = await self.twins() if self.with_twins else NO_TWINS
        return await self._judge(plan).judge(patch, reverse=reverse)

    def _judge(self, plan: TwinPlan = NO_TWINS) -> Judge:
        return Judge(self.instance, self._fresh, timeout=self.eval_timeout, plan=plan)

    async def twins(self) -> TwinPlan:
        """Return the contradictory twins of this episode's row; they are made once for a row."""
        judge = self._judge()
        reason = row_obstacle(self.instance, reports=judge.reports)
        if reason:
            return TwinPlan(lacking=self.instance.fail_to_pass, reason=reason)
        plans = PlanCache(self.cache)
        async with plans.lock(self.instance):
            plan = plans.get(self.instance)
            if plan is None:
                async with self._fresh() as unsolved, self._fresh() as solved:
                    plan = await make_plan(judge, unsolved, solved)
                plans.put(self.instance, plan)
            return plan

    @asynccontextmanager
    async def _fresh(self) -> AsyncIterator[Sandbox]:
        """Open a separate sandbox with the row's repository."""
        box = await self.open_sandbox(spec_of(self.instance, LIMITS, self.cache))
        try:
            yield box
        finally:
            await self.close_sandbox(box)

    async def check_task(self, task: Task) -> list[str]:
        """Check that a row's solution resolves it, and the empty patch does not; remark on tests without twins."""
        try:
            self.instance = instance = self._instance(task)
            wrong = []
            if not instance.patch and not instance.expected:
                wrong.append("the row has no patch, so nothing shows that it can be resolved")
            elif instance.patch:
                gold = await self.judge(instance.patch.encode(), reverse=instance.reversed)
                if not gold.resolved:
                    wrong.append(f"its own solution does not resolve it: {gold.reason}")
            empty = await self.judge(b"")
            if empty.resolved:
                wrong.append("it is resolved without any change")
            if self.with_twins and not wrong:
                wrong += _without_twins(await self.twins())
        except TurnwiseError as error:
            if error.retryable:
                raise
            return [str(error)]
        return wrong

    async def final_step(self, final: Message, observation: Sequence[Message] = ()) -> StepResult:
        """Score the repository and end the episode; ``info`` holds the status of every test."""
        result = await super().final_step(final, observation)
        if self.verdict is not None:
            result.info.update(tests=self.verdict.tests(), reason=self.verdict.reason)
            result.info.update(tampered=self.verdict.tampered)
            result.info.update(dropped=list(self.verdict.dropped), eval_log=self.verdict.log)
        return result

    def solve(self) -> Solution | None:
        """Apply the row's solution, and submit; None without a shell."""
        return self._solution() if any(isinstance(tool, ShellTool) for tool in self.tools) else None

    def _solution(self) -> Solution:
        option = " --reverse" if self.instance.reversed else ""
        patch = self.instance.patch.rstrip("\n")
        yield tool_call(
            "shell", command=f"git apply{option} --whitespace=nowarn - <<'END_OF_PATCH'\n{patch}\nEND_OF_PATCH"
        )
        if any(isinstance(tool, SubmitTool) for tool in self.tools):
            yield tool_call("submit")
        yield "The issue is resolved."

    def _instance(self, task: Task | None) -> Instance:
        if task is None:
            raise EnvError("SweEnv.reset got no task: use tasks such as turnwise.ext.environments.swe:tasks")
        instance = instance_of(task)
        if instance.image is not None:
            instance = replace(instance, image=self.image.replace("{image}", instance.image))
        return instance
