"""ToolCallsEnv: a request and functions; the answer is one message with the right calls."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from tool_calls_env.matching import OMITTED, Allowed, same_calls
from turnwise.envs.core import Env, ResetResult, Solution, StepResult, score_env
from turnwise.envs.results import ScoreParts
from turnwise.envs.solution import tool_call
from turnwise.errors import EnvError, TaskError, shown
from turnwise.seeding import stable_hash
from turnwise.tasks.core import Task
from turnwise.tasks.seeded import check_split, in_split
from turnwise.tools.core import FunctionTool
from turnwise.types import Message, with_system

_NOTED: Final = "noted"


class ToolCallsEnv(Env):
    """Gives a request and functions of the task, and scores which of them the first message calls, and how.

    Nothing is executed: every call is answered by "noted". Its tasks are rows of BFCL, or made ones.

    Attributes:
        expected: Names and allowed arguments of the right calls; None where any call is right.
    """

    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    default_tasks: ClassVar[str] = "tool_calls_env:tasks"

    expected: list[tuple[str, Allowed]] | None
    _over: bool = True

    def __init__(self, system: str | None = None) -> None:
        """Set the system prompt.

        Args:
            system: The system prompt of tasks without one, or None.
        """
        self._system = system

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        """Make the request of the task; without a task, one is drawn from the seed."""
        task = _drawn(random.getrandbits(63) if seed is None else seed, "train", "drawn") if task is None else task
        where = f"task {task.id!r}: data"
        self.tools = [_tool(schema, where) for schema in _listed(task.data.get("functions"), f"{where}['functions']")]
        self.expected = None if task.data.get("any_call") else _calls(task.data.get("calls"), f"{where}['calls']")
        self._over = False
        return with_system(task.messages(), self._system), {}

    async def step(self, action: Message) -> StepResult:
        """Note the calls, and end the episode."""
        if self._over:
            raise EnvError("tool_calls: no episode runs: call reset() first")
        self._over = True
        answers: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": _NOTED}
            for call in action.get("tool_calls") or ()
        ]
        parts: ScoreParts = await score_env(self, action)
        return StepResult(answers, sum(parts.values()), True, False, parts.info())

    def score(self, final: Message | None) -> float:
        """1 for exactly the right calls, in any order, else 0."""
        if final is None:
            return 0.0
        calls = final.get("tool_calls") or ()
        if self.expected is None:
            return float(any(call.error is None and call.name in self.toolset() for call in calls))
        return float(same_calls(calls, self.expected))

    def solve(self) -> Solution:
        """Make the calls, with the first of the allowed values."""
        if self.expected is None:
            yield tool_call(next(iter(self.toolset())))
            return
        calls = [tool_call(name, **_first(allowed)) for name, allowed in self.expected]
        yield calls or "None of these functions does that."


def _first(allowed: Allowed) -> dict[str, Any]:
    return {name: _value(values[0]) for name, values in allowed.items() if values and values[0] != OMITTED}


def _value(allowed: Any) -> Any:
    if not isinstance(allowed, Mapping):
        return [_value(element) for element in allowed] if isinstance(allowed, list) else allowed
    return {
        name: _value(values[0] if isinstance(values, list) else values)
        for name, values in allowed.items()
        if values != [OMITTED]
    }


def _tool(schema: Any, where: str) -> FunctionTool:
    if not isinstance(schema, Mapping):
        raise TaskError(f"{where}['functions'] has {shown(schema)}: it must be a schema with name and parameters")
    return FunctionTool(_noted_by_step, schema=dict(schema))


async def _noted_by_step(**arguments: Any) -> None:
    del arguments
    raise EnvError("calls of tool_calls are noted by whole messages (Episode.step), not one by one")


def _listed(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TaskError(f"{where} is {shown(value)}: it must be a list of objects")
    return value


def _calls(value: Any, where: str) -> list[tuple[str, Allowed]]:
    calls: list[tuple[str, Allowed]] = []
    for entry in _listed(value, where):
        name = entry.get("name") if isinstance(entry, Mapping) else None
        allowed = entry.get("allowed") if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or not isinstance(allowed, Mapping):
            raise TaskError(f'{where} has {shown(entry)}: write {{"name": ..., "allowed": {{argument: [values]}}}}')
        calls.append((name, allowed))
    return calls


_CITIES: Final = ("Lisbon", "Oslo", "Quito", "Hanoi", "Dakar", "Perth", "Turin", "Leeds")
_COINS: Final = ("EUR", "USD", "JPY", "CHF", "SEK", "INR")
_FUNCTIONS: Final[dict[str, dict[str, Any]]] = tomllib.loads(
    Path(__file__).with_name("functions.toml").read_text("utf-8")
)


def _weather(rng: random.Random) -> tuple[str, dict[str, list[Any]]]:
    city = rng.choice(_CITIES)
    return f"What is the weather in {city}?", {"city": [city], "unit": [OMITTED, "celsius"]}


def _money(rng: random.Random) -> tuple[str, dict[str, list[Any]]]:
    amount, (source, target) = rng.randint(2, 900), rng.sample(_COINS, 2)
    return f"How much are {amount} {source} in {target}?", {"amount": [amount], "given": [source], "wanted": [target]}


def _timer(rng: random.Random) -> tuple[str, dict[str, list[Any]]]:
    minutes = rng.randint(2, 90)
    return f"Set a timer for {minutes} minutes.", {"minutes": [minutes]}


_MAKERS: Final = {"get_weather": _weather, "convert_money": _money, "set_timer": _timer}


def _drawn(seed: int, split: str, name: str) -> Task:
    """Return a request for one to three calls; about a quarter of all requests are ``test``."""
    rng = random.Random(stable_hash("tool calls", seed))
    while True:
        names = [rng.choice(list(_MAKERS)) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        requests = [(name, *_MAKERS[name](rng)) for name in names]
        prompt = " ".join(text for _, text, _ in requests)
        if in_split(split, prompt):
            break
    offered = rng.sample(sorted(_FUNCTIONS), rng.randint(2, 3))
    shown_names = sorted({*offered, *names})
    functions = [{"name": function, **_FUNCTIONS[function]} for function in shown_names]
    calls = [{"name": function, "allowed": allowed} for function, _, allowed in requests]
    return Task(name, prompt, {"functions": functions, "calls": calls})


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` made requests of a split."""
    check_split("tool_calls", split)
    for index in range(n):
        yield _drawn(stable_hash(split, seed, index), split, f"tool_calls-{split}-{seed}-{index}")
