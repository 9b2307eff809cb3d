"""The environment checker reports each violation and nothing else, and nothing for a correct environment."""

import asyncio
import itertools
import json
import threading
import time

import pytest

from turnwise.envs import Env, EnvSpec, SingleTurnEnv, ToolEnv, tool_call
from turnwise.envs.basic.lookup import LookupEnv
from turnwise.envs.core import StepResult
from turnwise.envs.results import Remark
from turnwise.errors import ConfigError, EnvError, RegistryError, TaskError
from turnwise.ext.checks.environment import check_env
from turnwise.ext.checks.environment.core import CHECKS
from turnwise.tasks import Task
from turnwise.tools import BaseTool, ToolResponse, function_tool
from turnwise.types import ToolSchema, text_of


class Good(ToolEnv):
    score_range = (0.0, 1.0)

    def reset(self, task=None, *, seed=None):
        self.state = f"s{seed}x"
        return [{"role": "system", "content": "be good"}, {"role": "user", "content": "go"}], {}

    @function_tool(inline=True)
    def look(self, where: str, deep: bool = False) -> str:
        """Look somewhere."""
        return f"{where} {self.state}"

    def score(self, final):
        return float(final is not None and text_of(final) == f"seen {self.state}")

    def solve(self):
        (seen,) = yield tool_call("look", where="here")
        yield f"seen {text_of(seen).removeprefix('here ')}"


class Rewardless(ToolEnv):
    score_range = (0.0, 1.0)

    async def reset(self, task=None, *, seed=None):
        return "go", {}


COUNT = itertools.count()
SHARED: list[str] = []


class Unseeded(Good):
    def reset(self, task=None, *, seed=None):
        self.state = str(next(COUNT))
        return f"go {self.state}", {}


class UnseededTool(Good):
    @function_tool(inline=True)
    def look(self, where: str) -> str:
        """Look."""
        return str(next(COUNT))

    def solve(self):
        return None


class Leaky(Good):
    seen = 0

    @function_tool(inline=True)
    def look(self, where: str) -> str:
        """Look."""
        self.seen += 1
        return str(self.seen)

    def solve(self):
        return None


class Shares(Good):
    """Episodes that run at the same time see what each other did; one after the other they do not."""

    def reset(self, task=None, *, seed=None):
        SHARED.clear()
        return super().reset(task, seed=seed)

    @function_tool(inline=True)
    def look(self, where: str) -> str:
        """Look."""
        SHARED.append(where)
        return str(len(SHARED))

    def solve(self):
        return None


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


class AnswersUnusable(Good):
    async def call(self, call):
        from turnwise.tools import ToolResponse

        return ToolResponse("fine")


class ToolBroken(Good):
    """Its solution does not read the answer: without a look at the call it would seem whole."""

    @function_tool(inline=True)
    def look(self, where: str, deep: bool = False) -> str:
        """Look somewhere."""
        return f"{where} {self.sate}"

    def solve(self):
        yield tool_call("look", where="here")
        yield f"seen {self.state}"


class ToolRaises(ToolBroken):
    def solve(self):
        yield f"seen {self.state}"


class NotJson(Good):
    def reset(self, task=None, *, seed=None):
        super().reset(task, seed=seed)
        return [{"role": "user", "content": [{"type": "image", "image": object()}]}], {}


class HalfACharacter(Good):
    def reset(self, task=None, *, seed=None):
        super().reset(task, seed=seed)
        return "go \ud83d", {}


class InfoNotJson(Good):
    def reset(self, task=None, *, seed=None):
        return super().reset(task, seed=seed)[0], {"world": {1, 2}}


class Empty(Good):
    def reset(self, task=None, *, seed=None):
        super().reset(task, seed=seed)
        return [], {}


class LateSystem(Good):
    def reset(self, task=None, *, seed=None):
        super().reset(task, seed=seed)
        return [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}], {}


class ClosesOnce(Good):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True


class ClosesAfterResetOnly(Good):
    def reset(self, task=None, *, seed=None):
        self.connection = {"open": True}
        return super().reset(task, seed=seed)

    def close(self):
        self.connection.clear()


class LosesItsConnection(Good):
    """What a failing tool leaves behind cannot be closed."""

    broken = False

    async def step(self, action):
        try:
            return await super().step(action)
        except EnvError:
            self.broken = True
            raise

    def close(self):
        if self.broken:
            raise RuntimeError("the connection is broken")


class Odd(BaseTool):
    @property
    def schema(self):
        return ToolSchema("odd", "Says a schema that is none.", {"type": "object", "properties": {"a": {"type": 5}}})

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(""), None, {}


class NoSchema(Good):
    tools = (Odd({}, {"name": "odd", "description": "", "parameters": {"type": "object", "properties": {}}}),)


class NoDescription(Good):
    @function_tool(inline=True)
    def bare(self) -> str:
        return ""


class LeaksThreads(Good):
    async def reset(self, task=None, *, seed=None):
        self.ended = threading.Event()
        THREADS.append(self.ended)
        threading.Thread(target=self.ended.wait, daemon=True).start()
        return super().reset(task, seed=seed)


class LeaksFiles(Good):
    file = None

    def reset(self, task=None, *, seed=None):
        if self.file is None:
            self.file = open(__file__)  # noqa: SIM115
        return super().reset(task, seed=seed)


THREADS: list[threading.Event] = []


class LongPrompt(Good):
    def reset(self, task=None, *, seed=None):
        super().reset(task, seed=seed)
        return "word " * 3_000, {}


class LongAnswers(Good):
    @function_tool(inline=True, max_output=None)
    def look(self, where: str) -> str:
        """Look."""
        return f"{where} {self.state} {'word ' * 3_000}"

    def solve(self):
        return None


class AnswerInPrompt(Good):
    def reset(self, task=None, *, seed=None):
        super().reset(task, seed=seed)
        return f"go; the answer is: seen {self.state}", {}


class AnswerInTool(Good):
    state = "?"

    def toolset(self):
        tools = super().toolset()
        tools["look"].schema.parameters["properties"]["where"]["description"] = f"by the way: seen {self.state}"
        return tools


class Generous(Good):
    def score(self, final):
        return 0.5 if final is not None and text_of(final) == "" else super().score(final)


class PaysSilence(Good):
    def score(self, final):
        return 1.0 if final is None else super().score(final)


class PaysEcho(Good):
    def score(self, final):
        return 0.5 if final is not None and text_of(final) == "go" else super().score(final)


class PaysCalls(Good):
    @function_tool(inline=True)
    def look(self, where: str):
        """Look."""
        return f"{where} {self.state}", 0.4


class Unsolved(Good):
    def solve(self):
        yield "I give up"


class Endless(Good):
    def solve(self):
        while True:
            yield tool_call("look", where="here")


class SolveRaises(Good):
    def solve(self):
        yield tool_call("look", where="here")
        raise KeyError("route")


class SolvesOddly(Good):
    def solve(self):
        yield 3


class Hangs(Good):
    async def reset(self, task=None, *, seed=None):
        await asyncio.Event().wait()


class HoldsThreads(Good):
    """Blocks its event loop for ever."""

    def reset(self, task=None, *, seed=None):
        while not RELEASE.wait(0.01):
            pass


class HangsInStep(Good):
    async def step(self, action):
        await asyncio.Event().wait()


class HangsInClose(Good):
    async def close(self):
        await asyncio.Event().wait()


class HangsInInit(Good):
    def __init__(self):
        while not RELEASE.wait(0.01):
            pass


RELEASE = threading.Event()


class Exits(Good):
    def reset(self, task=None, *, seed=None):
        raise SystemExit(3)


class ExitsInInit(Good):
    def __init__(self):
        raise SystemExit("no licence")


class ExitsInTool(Good):
    @function_tool(inline=True)
    def look(self, where: str) -> str:
        """Look."""
        raise SystemExit(3)

    def solve(self):
        return None


class OldGym(Env):
    def reset(self, task=None, *, seed=None):
        return "go", {}

    def step(self, action):
        return "next", 0.0, False, {}


class Blocks(Good):
    def reset(self, task=None, *, seed=None):
        self.slow = seed == 5  # one of the episodes whose cost is measured
        return super().reset(task, seed=seed)

    def score(self, final):
        if self.slow:
            time.sleep(0.3)
        return 0.0

    def solve(self):
        return None


class Grows(Good):
    def reset(self, task=None, *, seed=None):
        SHARED.append(str(len(SHARED)) * 3_000_000)
        return super().reset(task, seed=seed)


class NoRange(Good):
    score_range = None


class Typed(Env):
    """An environment without tools, whose answer is a number."""

    score_range = (0.0, 1.0)
    floor = 0.0

    def reset(self, task=None, *, seed=None):
        self.number = str(1_000 + (seed or 0))
        return "which number?", {}

    def step(self, action):
        answers = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "there are no tools"}
            for call in action.get("tool_calls") or ()
        ]
        if answers:
            return StepResult(answers, 0.0, False, False, {})
        return StepResult([], float(text_of(action) == self.number), True, False, {})

    async def solve(self):
        await asyncio.sleep(0)
        yield self.number


@pytest.mark.parametrize(
    "env",
    ["lookup", EnvSpec("lookup"), Good, lambda: Good.__new__(Good), Typed],
    ids=["name", "spec", "class", "function", "without tools"],
)
async def test_correct_environment_has_no_findings(env):
    report = await check_env(env, context_length=4096)
    assert report.findings == [], str(report)
    assert report.checks == list(CHECKS)
    assert report.skipped == {}
    assert report.figures["reference solution, worst score"] == 1.0
    report.raise_for_findings()


async def test_correct_instance_has_no_findings():
    report = await check_env(Good())
    assert report.findings == [], str(report)


async def test_missing_task_is_a_finding_of_reset():
    def make():
        return SingleTurnEnv(lambda task, final: float(final is not None and text_of(final) == task.data["word"]))

    assert (await check_env(make, task=Task("a", "hi", {"word": "ho"}))).ok
    report = await check_env(make)
    assert [finding.check for finding in report.findings] == ["reset"]
    assert "got no task" in str(report)
    assert "calls" in report.skipped


@pytest.mark.parametrize(
    ("env", "check", "words"),
    [
        (Rewardless, "rewards", "nothing can earn a reward: define score(self, final)"),
        (Unseeded, "group", "different observation"),
        (UnseededTool, "determinism", "step 3 differs"),
        (Leaky, "reuse", "second reset"),
        (Shares, "isolation", "another episode runs"),
        (NoSeed, "signature", "reset(self, task=None, *, seed=None)"),
        (RaisesOnGarbage, "final messages", "score(None) raised"),
        (OutOfRange, "score", "2 lies outside score_range (0.0, 1.0)"),
        (NotFinite, "final messages", "finite"),
        (AnswersLess, "calls", "exactly one tool message"),
        (AnswersInDisorder, "calls", "in call order"),
        (AnswersUnusable, "single calls", "without an error"),
        (NotJson, "json", "message 0 (user) is not JSON"),
        (HalfACharacter, "json", "surrogate"),
        (InfoNotJson, "json", "the info of reset is not JSON"),
        (Empty, "reset", "observation is empty"),
        (LateSystem, "reset", "system message"),
        (ClosesOnce, "close", "closed already"),
        (ClosesAfterResetOnly, "close after errors", "before reset"),
        (LosesItsConnection, "close after errors", "after a tool raised"),
        (LeaksThreads, "leaks", "6 more threads"),
        (LeaksFiles, "leaks", "6 more files"),
        (NoSchema, "tools", "tool 'odd': its parameters are not a JSON schema"),
        (LongPrompt, "lengths", "and the context 2000"),
        (LongAnswers, "lengths", "an answer of 'look'"),
        (AnswerInPrompt, "answers", "occurs in the prompt"),
        (AnswerInTool, "answers", "description of the tool 'look'"),
        (Generous, "null policy", "empty messages scores 0.5: the floor is 0"),
        (PaysSilence, "null policy", "without an answer, score(None), scores 1: the floor is 0"),
        (PaysEcho, "repeat policy", "repeating the question scores 0.5"),
        (PaysCalls, "random policy", "on average"),
        (Unsolved, "reference", "scores 0 of 1"),
        (Endless, "reference", "does not end the episode within 1000 messages"),
        (ToolBroken, "reference", "the tool 'look' raised in the reference solution and answered"),
        (SolveRaises, "reference", "solve raised KeyError: 'route'"),
        (SolvesOddly, "reference", "solve yielded 3"),
        (OldGym, "calls", "StepResult"),
        (Exits, "reset", "reset raised SystemExit: 3"),
        (ExitsInInit, "construct", "the constructor raised SystemExit: no licence"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
async def test_violation_is_reported_and_no_other(env, check, words):
    SHARED.clear()
    try:
        report = await check_env(env, context_length=2_000)
    finally:
        while THREADS:
            THREADS.pop().set()
    also = {OldGym: "final messages", Shares: "fork"}
    expected = {check} | ({also[env]} if env in also else set())
    assert {finding.check for finding in report.errors} == expected, str(report)
    assert any(finding.check == check and words in str(finding) for finding in report.errors), str(report)
    assert not report.ok
    with pytest.raises(EnvError, match=env.__name__):
        report.raise_for_findings()


@pytest.mark.parametrize(
    ("env", "check", "words"),
    [
        (ToolRaises, "single calls", "the tool 'look' raised, called with"),
        (Blocks, "cost", "held the event loop"),
        (Grows, "cost", "MB after it was closed"),
        (NoRange, "score", "no score_range is declared"),
        (NoDescription, "tools", "'bare' has no description"),
    ],
)
async def test_suspicions_are_warnings(env, check, words):
    SHARED.clear()
    report = await check_env(env, seeds=(0,))
    SHARED.clear()
    assert report.ok, str(report)
    assert any(finding.check == check and words in finding.message and finding.remedy for finding in report.warnings), (
        str(report)
    )


async def test_tool_that_exits_is_answered():
    report = await check_env(ExitsInTool)
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("env", "check", "ran"),
    [
        (Hangs, "reset", 4),
        (HoldsThreads, "reset", 4),
        (HangsInStep, "final messages", 6),
        (HangsInClose, "reset", 4),
        (HangsInInit, "construct", 0),
    ],
)
async def test_stalled_call_ends_the_check(env, check, ran, monkeypatch):
    # A thread that is blocked by plain code is abandoned after this time.
    monkeypatch.setattr("turnwise.ext.checks.environment.context._GRACE_S", 0.1)
    RELEASE.clear()
    try:
        report = await check_env(env, timeout=0.5)
    finally:
        RELEASE.set()
    assert [finding.check for finding in report.findings] == [check], str(report)
    assert "longer than 0.5 s" in str(report)
    assert len(report.checks) == ran
    assert len(report.checks) + len(report.skipped) == (len(CHECKS) if ran else 0)


async def test_factory_without_an_environment_is_a_finding():
    report = await check_env(lambda: 3)
    assert [finding.check for finding in report.errors] == ["construct"]
    assert "made 3: it must make an environment" in str(report)


async def test_empty_seeds_and_timeouts_raise():
    with pytest.raises(ConfigError, match="no seeds"):
        await check_env(LookupEnv, seeds=())
    with pytest.raises(ConfigError, match=r"timeout is 0: it must be more than 0"):
        await check_env(LookupEnv, timeout=0)


async def test_unknown_environment_raises():
    with pytest.raises(RegistryError, match="lookup"):
        await check_env("lookupp")


class OwnTasks(Good):
    default_tasks = f"{__name__}:rows"

    def reset(self, task=None, *, seed=None):
        super().reset(task, seed=seed)
        self.state = task.data["answer"]
        return f"go {task.data['hint']}", {}


def rows():
    for number in range(100):
        yield Task(f"r{number}", "", {"answer": f"word{number}", "hint": "none"})


def leaked_answers():
    for row in rows():
        yield Task(row.id, "", {**row.data, "hint": row.data["answer"]})


def with_choices():
    for row in rows():
        yield Task(row.id, "", {**row.data, "choices": ["other", row.data["answer"]], "hint": row.data["answer"]})


def all_answers_listed():
    # All answers occur in every prompt: a list of choices leaks nothing.
    hint = " ".join(row.data["answer"] for row in rows())
    for row in rows():
        yield Task(row.id, "", {**row.data, "hint": hint})


async def test_default_tasks_are_played_and_leaked_answers_found():
    from turnwise.tasks import load_tasks

    assert (await check_env(OwnTasks)).findings == []
    report = await check_env(OwnTasks, tasks=load_tasks(leaked_answers, limit=3))
    assert [finding.check for finding in report.errors] == ["answers"]
    assert "'word0'" in str(report)
    assert (await check_env(OwnTasks, tasks=load_tasks(with_choices, limit=3))).ok
    assert (await check_env(OwnTasks, tasks=load_tasks(all_answers_listed, limit=3))).ok


class Confirms(Good):
    """The state earns its reward, and the last message of every solution is one that the question asks for."""

    def reset(self, task=None, *, seed=None):
        messages, info = super().reset(task, seed=seed)
        return f"{messages} of {seed}: then say done", info

    def score(self, final):
        return 0.0

    def solve(self):
        yield "done"


async def test_last_message_that_is_the_same_for_every_question_is_no_leaked_answer():
    assert "answers" not in {finding.check for finding in (await check_env(Confirms)).findings}


class NoTasks(Good):
    default_tasks = f"{__name__}:nothing"


def nothing():
    return []


async def test_empty_default_tasks_raise():
    with pytest.raises(TaskError, match="it contains no tasks"):
        await check_env(NoTasks)


async def test_lengths_are_counted_by_the_tokenizer():
    report = await check_env(Good, context_length=4_000, count_tokens=len)
    counted = report.figures["prompt tokens, most"]
    assert counted > 100
    assert report.notes == []
    estimated = await check_env(Good, context_length=4_000)
    assert estimated.figures["prompt tokens, most"] < counted
    assert "estimated" in estimated.notes[0]


async def test_report_converts_to_json():
    report = await check_env(Generous)
    read = json.loads(json.dumps(report.to_json()))
    assert read["ok"] is False
    [finding] = read["findings"]
    assert finding["check"] == "null policy"
    assert finding["severity"] == "error"
    assert finding["where"] == "seed 0"
    assert "floor" in finding["remedy"]


class Rows(Good):
    def check_task(self, task):
        if task.id == "odd":
            raise EnvError("its repository is gone")
        if task.data.get("remark"):
            return [Remark("it is easy")]
        return [] if task.data.get("good") else ["it is solved before anything is done"]


async def test_check_task_is_run_on_every_row():
    rows = [Task(str(number), "go", {"good": number != 3, "remark": number == 5}) for number in range(6)]
    rows.append(Task("odd", "go"))
    report = await check_env(Rows, tasks=rows[:1], looked_at=rows, seeds=(0,))
    assert [(finding.check, finding.message) for finding in report.errors] == [
        ("tasks", "task '3': it is solved before anything is done"),
        ("tasks", "task 'odd': it cannot be checked: its repository is gone"),
    ]
    assert [finding.message for finding in report.warnings if finding.check == "tasks"] == ["task '5': it is easy"]
    assert (report.figures["tasks looked at"], report.figures["broken tasks"]) == (7, 2)
    assert "tasks looked at" not in (await check_env(Good, tasks=rows[:1], looked_at=rows, seeds=(0,))).figures
