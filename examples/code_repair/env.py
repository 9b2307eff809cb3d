"""Small functions with one wrong operator: the model looks, edits, has the tests run, and hidden tests decide.

Owns: :class:`CodeRepair`, an environment with one sandbox per episode; :class:`Bench`, the process in it that runs
programs; and :func:`tasks`, which draws functions, plants a bug and knows what the right function returns. Programs
run in the sandbox and nowhere else: what is expected of them comes from how they were drawn.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turnwise.envs import ToolEnv
from turnwise.envs.solution import tool_call
from turnwise.errors import EnvError, TaskError, shown
from turnwise.sandboxes import Sandbox, SandboxLimits, SandboxProcess, SandboxSpec
from turnwise.seeding import stable_hash
from turnwise.tasks import Task
from turnwise.tools import ToolResponse, function_tool

WORKER = Path(__file__).with_name("worker.py").read_text()
SPEC = SandboxSpec(limits=SandboxLimits(memory=256 * 2**20, pids=16, disk=4 * 2**20, file_size=2**20))
# The worker gives a program two seconds; without an answer after these the worker is lost.
SECONDS = 10.0

ARITHMETIC, COMPARISON = ("+", "-", "*"), ("<", ">")
NAMES = "abcdmnxy"
INPUTS, LARGEST = 16, 2000
SPLITS = ("train", "test")
SHOWS = ("failure", "verdict", "nothing")


class Bench:
    """Runs programs in a sandbox, in a worker that is started once and again when a program took it along."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._worker: SandboxProcess | None = None
        self._rest = b""

    def __deepcopy__(self, memo: dict[int, Any]) -> Bench:
        """Return the bench of a fork: in the fork's sandbox, which has the files and no process."""
        return Bench(memo[id(self._sandbox)])

    async def start(self) -> None:
        """Start the worker; the first run waits for it."""
        self._worker = await self._sandbox.spawn(["python3", "-I", "-S", "-c", WORKER])
        self._rest = b""

    async def run(self, file: str, inputs: list[list[int]]) -> list[str]:
        """Return what ``f`` of a file returns for each input, or what it raises, as text."""
        if self._worker is None:
            await self.start()
        worker = self._worker
        assert worker is not None
        try:
            async with asyncio.timeout(SECONDS):
                await worker.write(json.dumps({"file": file, "inputs": inputs}).encode() + b"\n")
                return [str(output) for output in json.loads(await self._line(worker))]
        except (TimeoutError, BrokenPipeError, ValueError, TypeError):
            # A program that ends its worker, or writes into its answer, has passed nothing. The next one gets another.
            await worker.kill()
            self._worker = None
            return ["no answer"] * len(inputs)

    async def _line(self, worker: SandboxProcess) -> bytes:
        while b"\n" not in self._rest:
            got = await worker.read()
            if not got:
                raise BrokenPipeError
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class CodeRepair(ToolEnv):
    """Asks to repair a function. Every edit is one of the original file, so that it is one hypothesis about the bug."""

    score_range = (-0.3, 1.0)
    floor = 0.0
    default_tasks = f"{__file__}:tasks"

    def __init__(self, penalty: float = 0.1, shows: str = "failure") -> None:
        """Say what errors cost and what the tests tell.

        Args:
            penalty: Taken off for each of the first three calls that were answered with an error.
            shows: ``failure``: the first test that fails; ``verdict``: only whether all pass; ``nothing``: not even
                that. The other two are for finding out what a policy makes of the answers.
        """
        if shows not in SHOWS:
            raise EnvError(f"code_repair: shows is {shown(shows)}: write one of {', '.join(SHOWS)}")
        self.penalty, self.shows = penalty, shows

    async def reset(self, task=None, *, seed=None):
        """Open the sandbox and put the file there."""
        row = next(tasks(1, seed=seed or 0)) if task is None else task
        self.row = row.data
        self.file = self.original = self.row["file"]
        self.outcomes: dict[str, list[str]] = {}
        self.errors = 0
        self.bench = await self.open_bench()
        messages = [{"role": "system", "content": "Fix the bug."}, {"role": "user", "content": row.prompt}]
        return messages, {}

    async def open_bench(self) -> Bench:
        """Return where the episode's programs run."""
        bench = Bench(await self.open_sandbox(SPEC))
        await bench.start()
        return bench

    @function_tool
    async def edit(self, find: str, replace: str) -> ToolResponse:
        """Find a text in the original file, replace it and run the tests."""
        if self.original.count(find) != 1:
            return ToolResponse("error", error="no_match")
        self.file = self.original.replace(find, replace)
        return ToolResponse(await self.tested())

    @function_tool
    async def run_tests(self) -> str:
        """Run the tests."""
        return await self.tested()

    @function_tool
    async def view(self) -> str:
        """Show the file."""
        return self.file

    async def step(self, action):
        """Answer the calls of a message, and count those that were answered with an error."""
        result = await super().step(action)
        self.errors += int(result.info.get("metrics", {}).get("tool_errors", 0))
        return result

    async def call(self, call):
        """Answer one call, and count it where the answer is an error."""
        response = await super().call(call)
        self.errors += response.error is not None
        return response

    async def score(self, final) -> dict[str, float]:
        """1 for a file that passes the hidden tests, too, less the penalty for errors."""
        solved = self.file != self.original and not await self.failing(self.row["inputs"])
        return {"solved": float(solved), "errors": -self.penalty * min(3, self.errors)}

    async def tested(self) -> str:
        """Run the visible tests and describe the result as ``shows`` asks."""
        failing = await self.failing(self.row["inputs"][: self.row["visible"]])
        if self.shows == "failure":
            return failing or "all passed"
        if self.shows == "verdict":
            return "f(1, 1): expected 1, got 2" if failing else "all passed"
        return self.row["failure"]

    async def failing(self, inputs: list[list[int]]) -> str | None:
        """Return the first test that fails, or None. Both kinds of tests are run at once, a file only once."""
        if self.file not in self.outcomes:
            self.outcomes[self.file] = await self.bench.run(self.file, self.row["inputs"])
        for arguments, want, got in zip(inputs, self.row["expected"], self.outcomes[self.file], strict=False):
            if got != str(want):
                return f"f({', '.join(map(str, arguments))}): expected {want}, got {got}"
        return None

    async def solve(self):
        """Look, and make the edit that undoes the bug."""
        yield tool_call("view")
        find, replace = self.row["fix"]
        yield tool_call("edit", find=find, replace=replace)
        yield "Done."


class Function:
    """A function of one of four kinds, drawn at random: its text, and what it returns.

    Attributes:
        operators: One for each place where a bug may be, in the order of the text.
    """

    def __init__(self, rng: random.Random) -> None:
        self.kind = rng.choice(("seq", "branch", "loop", "clamp"))
        self.names = rng.sample(NAMES, 4)
        self.numbers = (rng.randint(1, 9), rng.randint(1, 9))
        self.rounds, self.by_index = rng.randint(2, 4), rng.random() < 0.5
        kinds = {"seq": "aa", "branch": "caa", "loop": "aa", "clamp": "aca"}[self.kind]
        self.operators = [rng.choice(ARITHMETIC if operand_kind == "a" else COMPARISON) for operand_kind in kinds]

    @property
    def shape(self) -> str:
        """Its text but for the names: what decides which split it belongs to."""
        names, self.names = self.names, list("abci")
        text, self.names = self.text(self.operators), names
        return text

    def text(self, operators: list[str]) -> str:
        """Return the file, with these operators."""
        (a, b, c, i), (k, n) = self.names, self.numbers
        if self.kind == "seq":
            body = [f"{c} = {a} {operators[0]} {k}", f"return {c} {operators[1]} {b}"]
        elif self.kind == "branch":
            test, first, second = operators
            body = [f"if {a} {test} {b}:", f"    return {a} {first} {k}", f"return {b} {second} {n}"]
        elif self.kind == "loop":
            term = i if self.by_index else b
            body = [f"{c} = {a} {operators[0]} {k}", f"for {i} in range({self.rounds}):"]
            body += [f"    {c} = {c} {operators[1]} {term}", f"return {c}"]
        else:
            first, test, second = operators
            body = [f"{c} = {a} {first} {b}", f"if {c} {test} {k}:", f"    {c} = {c} {second} {n}", f"return {c}"]
        return "\n".join([f"def f({a}, {b}):", *(f"    {line}" for line in body), ""])

    def value(self, operators: list[str], a: int, b: int) -> int:
        """Return what it returns, with these operators. This is how it was drawn, not a run of its text."""
        k, n = self.numbers
        if self.kind == "seq":
            return apply(operators[1], apply(operators[0], a, k), b)
        if self.kind == "branch":
            test, first, second = operators
            return apply(first, a, k) if apply(test, a, b) else apply(second, b, n)
        if self.kind == "loop":
            value = apply(operators[0], a, k)
            for index in range(self.rounds):
                value = apply(operators[1], value, index if self.by_index else b)
            return value
        first, test, second = operators
        value = apply(first, a, b)
        return apply(second, value, n) if apply(test, value, k) else value


def apply(operator: str, left: int, right: int) -> int:
    """Return the value of one operation."""
    if operator in COMPARISON:
        return left < right if operator == "<" else left > right
    return left + right if operator == "+" else left - right if operator == "-" else left * right


def drawn(seed: int, split: str) -> dict[str, Any]:
    """Draw a function with a bug: the data of a task."""
    rng = random.Random(seed)
    while True:
        function = Function(rng)
        if (stable_hash("code_repair", function.shape) % 8 == 0) != (split == "test"):
            continue
        right = function.operators
        position = rng.randrange(len(right))
        wrong = list(right)
        wrong[position] = rng.choice([operator for operator in alike(right[position]) if operator != right[position]])
        file = function.text(wrong)
        inputs = list(dict.fromkeys((rng.randint(1, 9), rng.randint(1, 9)) for _ in range(INPUTS)))
        expected = [function.value(right, *pair) for pair in inputs]
        got = [function.value(wrong, *pair) for pair in inputs]
        failing = [at for at in range(len(inputs)) if expected[at] != got[at]]
        # Each operator occurs once in the file, so it alone identifies the place of an edit.
        if (
            len(failing) < 2
            or any(file.count(operator) != 1 for operator in wrong)
            or max(map(abs, expected)) > LARGEST // 10
        ):
            continue
        if max(map(abs, got)) > LARGEST:
            continue
        shown_first = list(dict.fromkeys([*failing[:2], *range(4)]))
        order = [*shown_first, *(at for at in range(len(inputs)) if at not in shown_first)]
        first = order[0]
        failure = f"f({', '.join(map(str, inputs[first]))}): expected {expected[first]}, got {got[first]}"
        return {
            "file": file,
            "inputs": [list(inputs[at]) for at in order],
            "expected": [expected[at] for at in order],
            "visible": len(shown_first),
            "failure": failure,
            "fix": [wrong[position], right[position]],
        }


def alike(operator: str) -> tuple[str, ...]:
    """Return the operators that may replace one, itself included."""
    return ARITHMETIC if operator in ARITHMETIC else COMPARISON


def tasks(n: int = 200, *, split: str = "train", seed: int = 0) -> Iterator[Task]:
    """Yield ``n`` functions to repair. A shape of function belongs to one split only."""
    if split not in SPLITS:
        raise TaskError(f"code_repair has no split {split!r}: {', '.join(SPLITS)}")
    for index in range(n):
        data = drawn(stable_hash("code_repair", split, seed, index), split)
        yield Task(f"code-repair-{split}-{seed}-{index}", "Fix f.", data)
