"""check_env finds what it is there to find, and nothing in an environment that keeps the contract."""

import itertools

import pytest

from turnwise.envs import Env, EnvSpec, SingleTurnEnv, ToolEnv, check_env
from turnwise.errors import EnvError, RegistryError
from turnwise.tasks import Task
from turnwise.tools import function_tool
from turnwise.types import text_of


class Good(ToolEnv):
    score_range = (0.0, 1.0)

    def reset(self, task=None, *, seed=None):
        self.state = seed
        return [{"role": "system", "content": "be good"}, {"role": "user", "content": f"go {seed}"}], {}

    @function_tool(inline=True)
    def look(self, where: str, deep: bool = False) -> str:
        """Look somewhere."""
        return f"{where} {self.state}"

    def score(self, final):
        return float(final is not None and text_of(final) == "yes")


COUNT = itertools.count()


class Unseeded(Good):
    def reset(self, task=None, *, seed=None):
        self.state = next(COUNT)
        return f"go {self.state}", {}


class UnseededTool(Good):
    @function_tool(inline=True)
    def look(self, where: str) -> str:
        """Look."""
        return str(next(COUNT))


class Leaky(Good):
    seen = 0

    @function_tool(inline=True)
    def look(self, where: str) -> str:
        """Look."""
        self.seen += 1
        return str(self.seen)


class NoSeed(Good):
    def reset(self, task=None):
        return "go", {}


class RaisesOnGarbage(Good):
    def score(self, final):
        return float(final["content"].strip() == "yes")


class OutOfRange(Good):
    def score(self, final):
        return 2.0


class NotFinite(Good):
    def score(self, final):
        return float("nan")


class AnswersLess(Good):
    async def step(self, action):
        result = await super().step(action)
        return result._replace(observation=result.observation[:-1])


class AnswersInDisorder(Good):
    async def step(self, action):
        result = await super().step(action)
        return result._replace(observation=result.observation[::-1])


class NotJson(Good):
    def reset(self, task=None, *, seed=None):
        return [{"role": "user", "content": [{"type": "image", "image": object()}]}], {}


class Empty(Good):
    def reset(self, task=None, *, seed=None):
        return [], {}


class LateSystem(Good):
    def reset(self, task=None, *, seed=None):
        return [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], {}


class ClosesOnce(Good):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class NoDescription(Good):
    @function_tool(inline=True)
    def bare(self) -> str:
        return ""


class Hangs(Good):
    async def reset(self, task=None, *, seed=None):
        import asyncio

        await asyncio.Event().wait()


class OldGym(Env):
    def reset(self, task=None, *, seed=None):
        return "go", {}

    def step(self, action):
        return "next", 0.0, False, {}


@pytest.mark.parametrize(
    "env",
    ["lookup", EnvSpec("lookup"), Good, lambda: Good.__new__(Good)],
    ids=["name", "spec", "class", "function"],
)
async def test_a_good_one(env):
    report = await check_env(env)
    assert report.ok, str(report)
    assert len(report.checks) == 9
    report.raise_for_findings()


async def test_an_instance_of_a_good_one():
    assert (await check_env(Good())).ok


async def test_one_that_needs_a_task():
    def make():
        return SingleTurnEnv(lambda task, final: 1.0)

    assert (await check_env(make, task=Task("a", "hi"))).ok
    report = await check_env(make)
    assert [finding.check for finding in report.findings] == ["reset"]
    assert "got no task" in str(report)


@pytest.mark.parametrize(
    ("env", "check", "words"),
    [
        (Unseeded, "determinism", "observation of reset differs"),
        (UnseededTool, "determinism", "step 3 differs"),
        (Leaky, "reuse", "differs"),
        (NoSeed, "signature", "reset(self, task=None, *, seed=None)"),
        (RaisesOnGarbage, "final messages", "score(None) raised"),
        (OutOfRange, "score", "2.0 lies outside score_range (0.0, 1.0)"),
        (NotFinite, "final messages", "finite"),
        (AnswersLess, "calls", "exactly one tool message"),
        (AnswersInDisorder, "calls", "in call order"),
        (NotJson, "reset", "not JSON"),
        (Empty, "reset", "nothing to answer"),
        (LateSystem, "reset", "system message"),
        (ClosesOnce, "close", "closed already"),
        (NoDescription, "tools", "'bare' has no description"),
        (OldGym, "final messages", "StepResult"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
async def test_what_is_wrong_is_found_and_named(env, check, words):
    report = await check_env(env)
    assert any(finding.check == check and words in finding.message for finding in report.findings), str(report)
    with pytest.raises(EnvError, match=env.__name__):
        report.raise_for_findings()


async def test_one_that_hangs():
    report = await check_env(Hangs, timeout=0.05)
    assert [finding.check for finding in report.findings] == ["reset"]
    assert "longer than 0.05 s" in str(report)


async def test_one_that_does_not_exist():
    with pytest.raises(RegistryError, match="lookup"):
        await check_env("lookupp")
