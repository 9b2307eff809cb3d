"""Forks of environments: equal answers, nothing in common, and refusals by name."""

from __future__ import annotations

import random
import sqlite3
import weakref
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.envs.shipped import SHIPPED
from support.envs.unshipped import UNSHIPPED
from turnwise.envs import Env, StepResult, ToolEnv, wrap
from turnwise.envs.core import call_env, close_env, fork_env, reset_env, step_env
from turnwise.envs.registration import make, register
from turnwise.errors import EnvError
from turnwise.ext.checks.environment import check_env
from turnwise.ext.checks.environment.context import some_calls
from turnwise.ext.checks.environment.forks import shared, slow_copy
from turnwise.tasks.core import Task
from turnwise.tasks.reader import load_tasks
from turnwise.tools import BaseTool, function_tool
from turnwise.tools.core import AgentData
from turnwise.tools.sandboxed.editor import EditorTool
from turnwise.tools.sandboxed.python import PythonTool
from turnwise.tools.sandboxed.shell import ShellTool
from turnwise.tools.schema import ToolSchema
from turnwise.types import Message, ToolCall

# What needs arguments: each is a way to make an environment, tried below.
CONFIGS: dict[str, dict[str, Any]] = {
    "gymnasium": {"env_id": "FrozenLake-v1"},
    "gymnasium_tools": {"env_id": "FrozenLake-v1"},
    "single_turn": {"scorer": "turnwise.envs.basic.task_env:only_tools"},
    "tool": {"scorer": "turnwise.envs.basic.task_env:only_tools"},
}
SANDBOXED = ("code", "swe", "terminal")
TASK = Task(id="t", prompt="Say something.", data={})
TASKS: dict[str, Task] = {}
LAST: Message = {"role": "assistant", "content": "1"}


def called(name: str, **arguments: Any) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", name, arguments)]}


def actions(env: Env) -> list[Message]:
    calls = some_calls(env)
    return [*({"role": "assistant", "content": "", "tool_calls": [call]} for call in calls), LAST]  # type: ignore[list-item]


def seen(result: StepResult) -> list[Any]:
    return [list(result.observation), *result[1:4], result.info.get("rewards")]


async def play(env: Env, moves: Sequence[Message]) -> list[Any]:
    answers = []
    for action in moves:
        if not env._running:
            break
        answers.append(seen(await step_env(env, action)))
    return answers


def first_task(name: str, env: Env) -> Task | None:
    return TASKS.get(name, TASK) if env.default_tasks is None else load_tasks(env.default_tasks, limit=1)[0]


async def fork_at_random(name: str, seed: int) -> None:
    """Fork at a random turn: other actions change nothing in the original, the same ones are answered equally."""
    draw = random.Random(seed)
    envs = [make(name, **CONFIGS.get(name, {})) for _ in range(2)]
    try:
        task = first_task(name, envs[0])
        for env in envs:
            env.max_invalid_calls = 0  # type: ignore[attr-defined]
            await reset_env(env, task, seed=seed)
        moves = [draw.choice(actions(envs[0])[:-1]) for _ in range(4)] + [LAST]
        played_alone = await play(envs[1], moves)
        # Before any of the steps that the episode has: no environment gets away without a fork.
        turn = draw.randrange(min(4, len(played_alone)))
        played = await play(envs[0], moves[:turn])
        envs += [await fork_env(envs[0]), await fork_env(envs[0])]
        same, other = envs[2:]
        assert not list(shared(envs[0], same))
        await play(other, [draw.choice(actions(other)) for _ in range(3)])
        assert played + await play(same, moves[turn:]) == played_alone
        assert played + await play(envs[0], moves[turn:]) == played_alone
    finally:
        for env in envs:
            await close_env(env)


@given(seed=st.integers(0, 2**20))
@settings(max_examples=3, deadline=None)
@pytest.mark.parametrize("name", [shipped for shipped in SHIPPED if shipped not in SANDBOXED])
async def test_every_shipped_environment_forks(name: str, seed: int) -> None:
    await fork_at_random(name, seed)


def test_no_shipped_environment_refuses() -> None:
    assert set(SANDBOXED) < set(SHIPPED)
    assert "tool_calls" in UNSHIPPED
    assert [name for name in (*SHIPPED, *UNSHIPPED) if not make(name, **CONFIGS.get(name, {})).supports_fork] == []


@pytest.mark.parametrize(
    "name", [name if name == "code" else pytest.param(name, marks=pytest.mark.long) for name in SANDBOXED]
)
async def test_environments_with_sandboxes_fork(name: str) -> None:
    await fork_at_random(name, 3)


class Counter(ToolEnv):
    """Counts, draws and writes down."""

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.random, self.notes, self.total = random.Random(seed), [[0]], 0
        return "Count.", {}

    @function_tool
    def add(self, n: int) -> str:
        """Add."""
        self.total += n
        self.notes[0].append(n)
        return f"{self.total} {self.random.random()} {self.notes}"

    def score(self, final: Message | None) -> float:
        return float(self.total)


async def started(env: Env, **config: Any) -> Env:
    await reset_env(env, None, seed=0, **config)
    return env


async def test_forks_go_on_independently() -> None:
    env = await started(Counter())
    await step_env(env, called("add", n=1))
    fork = await fork_env(env)
    for one in (env, fork):
        assert len(one.conversation) == 3
    twice = [seen(await step_env(one, called("add", n=2))) for one in (env, fork)]
    assert twice[0] == twice[1]
    await step_env(fork, called("add", n=5))
    assert (env.total, fork.total) == (3, 8)  # type: ignore[attr-defined]
    assert (await step_env(env, LAST)).reward == 3
    with pytest.raises(EnvError, match="no episode runs: fork it between"):
        await fork_env(env)
    assert (await step_env(fork, LAST)).reward == 8


async def test_wrappers_fork_with_their_environment() -> None:
    env = await started(wrap(wrap(Counter(), "turn_limit", max_turns=2), "turn_limit", max_turns=9))
    await step_env(env, called("add", n=1))
    fork = await fork_env(env)
    for one, n in ((env, 1), (fork, 4)):
        result = await step_env(one, called("add", n=n))
        assert result.truncated
        await close_env(one)
    assert [one.unwrapped.total for one in (env, fork)] == [2, 5]


class Pad(BaseTool):
    """Keeps lines by instance."""

    def __init__(self, forkable: bool = True) -> None:
        super().__init__(
            None, ToolSchema("pad", "Write.", {"type": "object", "properties": {"text": {"type": "string"}}})
        )
        self.lines: dict[str, list[str]] = {}
        self.forkable = forkable

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        instance, response = await super().create(instance_id)
        self.lines[instance] = []
        return instance, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.lines[instance_id].append(parameters["text"])
        return "/".join(self.lines[instance_id]), None, {}

    async def fork(self, instance_id: str, agent_data: AgentData) -> str:
        if not self.forkable:
            return await super().fork(instance_id, agent_data)
        instance, _ = await self.create()
        self.lines[instance] = list(self.lines[instance_id])
        return instance

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.lines[instance_id]


class Padded(Counter):
    def __init__(self, tool: Any) -> None:
        self.tools = (tool,)


class Listening(Pad):
    """Answers how many times the model spoke."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], agent_data: AgentData, **kwargs: Any) -> Any:
        return str(agent_data.assistant_turns), None, {}


async def test_tools_of_a_fork_see_its_conversation() -> None:
    env = await started(Padded(Listening()))
    await step_env(env, called("pad", text="a"))
    fork = await fork_env(env)
    heard = [(await step_env(one, called("pad", text="b"))).observation[0]["content"] for one in (fork, fork, env)]
    assert heard == ["2", "3", "2"]


class Remembering(Counter):
    """Keeps the conversation in an attribute."""

    @function_tool
    def add(self, n: int) -> str:
        """Add."""
        self.heard = self.conversation
        return str(n)


async def test_messages_of_the_conversation_are_no_state_that_a_fork_shares() -> None:
    env = await started(Remembering())
    await step_env(env, called("add", n=1))
    fork = await fork_env(env)
    assert fork.heard is fork.conversation
    assert fork.heard is not env.heard  # type: ignore[attr-defined]
    assert list(shared(env, fork)) == []


async def test_instances_of_tools_fork_and_are_released_once() -> None:
    pad = Pad()
    env = await started(Padded(pad))
    await step_env(env, called("pad", text="a"))
    fork = await fork_env(env)
    results = [await step_env(one, called("pad", text=text)) for one, text in ((env, "b"), (fork, "c"))]
    assert [result.observation[0]["content"] for result in results] == ["a/b", "a/c"]
    assert len(pad.lines) == 2
    for one in (env, fork):
        await close_env(one)
    assert not pad.lines


async def test_a_tool_with_instances_that_cannot_fork_is_named() -> None:
    env = await started(Padded(Pad(forkable=False)))
    await step_env(env, called("pad", text="a"))
    with pytest.raises(
        EnvError, match=r"tool 'pad' cannot fork: Pad has its own instances.*write fork\(instance_id, agent_data\)"
    ):
        await fork_env(env)
    await close_env(env)


class Lazy(Pad):
    """Keeps lines of instances that it did not create."""

    create, release = BaseTool.create, BaseTool.release

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.lines.setdefault(instance_id, [])
        return await super().execute(instance_id, parameters, **kwargs)


async def test_tool_with_state_but_no_create_is_refused_by_name() -> None:
    env = await started(Padded(Lazy(forkable=False)))
    await close_env(await fork_env(env))
    await step_env(env, called("pad", text="a"))
    with pytest.raises(EnvError, match=r"tool 'pad' cannot fork: Lazy has state of its instance in 'lines'"):
        await fork_env(env)
    await close_env(env)


class Closed(Counter):
    def __init__(self) -> None:
        self.tools = [function_tool(self.made())]

    def made(self) -> Any:
        def double() -> str:
            """Double."""
            self.total *= 2
            return str(self.total)

        return double


class Connected(Counter):
    def __init__(self) -> None:
        self.rows = sqlite3.connect(":memory:")


class Handled(Counter):
    """Finds its methods in a table."""

    def __init__(self) -> None:
        def handle() -> int:
            return self.total

        self.table = {"total": [handle]}


class Looking(Counter):
    def __init__(self) -> None:
        self.parts = [weakref.ref(self)]


class Filed(Counter):
    def __init__(self) -> None:
        self.folder = TemporaryDirectory()


class Slotted(Counter):
    """Keeps part of its state in slots."""

    __slots__ = ("__own", "seen")

    def __init__(self) -> None:
        self.__own, self.seen = [1], [2]

    def state(self) -> tuple[list[int], list[int]]:
        return self.__own, self.seen


class Never(Counter):
    forks = None


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (Closed(), "Closed cannot fork: tools holds .* a closure over the environment.*make it a method"),
        (Connected(), "Connected cannot fork: its attribute 'rows' holds .*Connection.*`fork_shares`"),
        (Handled(), "Handled cannot fork: its attribute 'table' holds .*handle.* a closure over the environment"),
        (Looking(), "Looking cannot fork: its attribute 'parts' holds .*a weak reference"),
        (Filed(), "Filed cannot fork: its attribute 'folder' holds .*a folder that a fork would share.*sandbox"),
        (Never(), "its class says that it cannot"),
    ],
)
async def test_unforkable_environments_raise_errors_by_name(env: Env, why: str) -> None:
    await started(env)
    with pytest.raises(EnvError, match=why):
        await fork_env(env)


async def test_slots_are_copied() -> None:
    env = await started(Slotted())
    fork = await fork_env(env)
    assert fork.state() == env.state() == ([1], [2])
    for value, other in zip(env.state(), fork.state(), strict=True):
        value.append(3)
        assert 3 not in other


async def test_environment_without_a_running_episode_cannot_fork() -> None:
    with pytest.raises(EnvError, match="no episode runs"):
        await fork_env(Counter())


@register("test/replayed")
class Replayed(Counter):
    forks = "replay"
    drift = 0

    def __init__(self) -> None:
        self.rows = sqlite3.connect(":memory:")

    @function_tool
    def drifting(self) -> int:
        """Return what no seed determines."""
        Replayed.drift += 1
        return Replayed.drift


async def test_replay_leads_another_environment_to_the_same_state() -> None:
    env = await started(make("test/replayed"))
    await step_env(env, called("add", n=1))
    await call_env(env, ToolCall("c", "add", {"n": 2}))
    fork = await fork_env(env)
    second_fork = await fork_env(fork)
    answers = [seen(await step_env(one, called("add", n=3))) for one in (env, fork, second_fork)]
    assert answers[0] == answers[1] == answers[2]
    assert len({id(one.rows) for one in (env, fork, second_fork)}) == 3


async def test_a_replay_that_is_answered_otherwise_is_refused() -> None:
    env = await started(make("test/replayed"))
    await step_env(env, called("add", n=1))
    await step_env(env, called("drifting"))
    with pytest.raises(EnvError, match=r"step 2 \(drifting\) answered .*draw all randomness from the seed"):
        await fork_env(env)
    with pytest.raises(EnvError, match="it must be made by"):
        await fork_env(await started(Replayed()))


class Leaky(Counter):
    """Shares its notes with forks."""

    fork_shares = ()

    async def fork(self) -> Env:
        fork = await super().fork()
        fork.notes = self.notes  # type: ignore[attr-defined]
        return fork


class Hidden(Counter):
    """Shares the closures of its functions and of a tool."""

    def __init__(self) -> None:
        texts: list[str] = []
        counts: dict[str, int] = {}

        def say(text: str) -> int:
            """Say something."""
            texts.append(text)
            return 0

        self.count = [lambda: counts]
        self.tools = [function_tool(say)]


class Heavy(Counter):
    """Takes its corpus along."""

    def __init__(self) -> None:
        self.corpus = [[number] for number in range(12_000)]


def test_a_slow_copy_is_named() -> None:
    warning = slow_copy(Heavy(), 0.7)
    assert warning is not None
    assert "a fork takes 0.7 s" in warning
    assert "the copy of 'corpus', which holds 24," in warning
    assert slow_copy(Heavy(), 0.01) is slow_copy(Counter(), 0.7) is None


async def test_checker_reports_state_shared_by_forks() -> None:
    report = await check_env(Leaky)
    messages = [message.message for message in report.errors]
    assert "a fork and its original share Leaky.notes, which can change" in messages
    assert any("answered differently after its fork received other messages" in message for message in messages)
    messages = [message.message for message in (await check_env(Hidden)).warnings]
    assert [message for message in messages if "fork" in message] == [
        f"functions in Hidden.{name} have variables that a fork shares with its original, and can change"
        for name in ("count", "tools")
    ]
    assert "fork" in (await check_env(Counter)).checks
    assert not (await check_env(Counter)).errors


class Bench(ToolEnv):
    """A sandbox with the tools that work in it."""

    def __init__(self) -> None:
        self.tools = (ShellTool(), PythonTool(), EditorTool())

    async def reset(self, task: Task | None = None, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        await self.open_sandbox()
        return "Work.", {}


async def told(env: Env, name: str, **arguments: Any) -> str:
    result = await step_env(env, called(name, **arguments))
    return str(result.observation[0]["content"])


async def test_a_shell_session_goes_on_in_a_fork() -> None:
    env = await started(Bench())
    try:
        await told(env, "shell", command="mkdir -p a && cd a && export X=1 && y='2 3' && f() { echo f $y; } && set -f")
        await told(env, "editor", command="create", path="b.txt", file_text="one\n")
        fork = await fork_env(env)
        try:
            await told(fork, "shell", command="y=9; echo two > b.txt; cd /")
            assert await told(env, "shell", command='echo "$X" *; f; basename "$PWD"') == "1 *\nf 2 3\na"
            assert await told(fork, "shell", command='echo "$X" *; f; echo "$PWD"') == "1 *\nf 9\n/"
            await told(fork, "editor", command="insert", path="b.txt", insert_line=1, new_str="two")
            assert "two" in await told(fork, "editor", command="view", path="b.txt")
            assert "two" not in await told(env, "editor", command="view", path="b.txt")
        finally:
            await close_env(fork)
        await told(env, "shell", command="sleep 60 &")
        with pytest.raises(EnvError, match=r"tool 'shell' cannot fork: jobs run in the background \(\d+\)"):
            await fork_env(env)
        await told(env, "shell", command="kill %1; wait")
        await told(env, "python", code="x = 1")
        with pytest.raises(EnvError, match="tool 'python' cannot fork: its interpreter runs"):
            await fork_env(env)
    finally:
        await close_env(env)


async def test_the_last_of_forks_closes_the_sandbox_manager() -> None:
    env = await started(Bench())
    fork = await fork_env(env)
    second_fork = await fork_env(fork)
    manager = env._own_manager
    assert manager is not None
    for one in (env, fork):
        await close_env(one)
    assert await told(second_fork, "shell", command="echo here") == "here"
    await close_env(second_fork)
    assert not manager.users
