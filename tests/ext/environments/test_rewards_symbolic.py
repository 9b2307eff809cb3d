"""Symbolic comparison: by meaning, in processes that a hostile answer cannot hold up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from turnwise.envs import SingleTurnEnv, reset_env, score_env
from turnwise.envs.rewards import Part, Rubric, Symbolic
from turnwise.envs.rewards.core import ready_part
from turnwise.errors import ConfigError, EnvError, MissingExtraError
from turnwise.ext.environments.math import symbolic
from turnwise.tasks import Task

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOSTILE = r"\boxed{9^{9^{9^9}}}"


def workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any("symbolic_worker" in word for word in child.cmdline())]


@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("1/2", r"so \boxed{0.5}", 1),
        ("0.5", r"\boxed{\frac{2}{4}}", 1),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", 1),
        (r"\frac{\sqrt{2}}{2}", r"\boxed{\frac{1}{\sqrt{2}}}", 1),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1),
        ("(1, 2)", r"\boxed{(2, 1)}", 0),
        ("6 * 7 is 42\n#### 42", "#### 42", 1),
        ("1,234", "The answer is 1234.", 1),
        (["7", "8"], "The answer is 8.", 1),
        (4, r"\boxed{4}", 1),
        ("3", r"\boxed{3} or \boxed{4}", 0),
        (r"\sqrt{2}", r"\boxed{1=\sqrt{2}}", 0),
        (r"\sqrt{2}", r"\boxed{x=1=\sqrt{2}}", 0),
        ("x+1", r"\boxed{1 \equiv x+1}", 0),
        ("x=3", r"\boxed{1 \to x=3}", 0),
        (r"2\sqrt{2}", r"\boxed{AB=\sqrt{8}=2\sqrt{2}}", 1),
        ("x+1", r"\boxed{f(x)=x+1}", 1),
        ("x=3", r"\boxed{3}", 1),
        ("3", "I do not know", 0),
        ("3", "", 0),
    ],
)
async def test_answers_are_compared_by_meaning(gold, text, right):
    assert await Symbolic()(text, {"answer": gold}) == (right, {"undecided": 0.0})


@pytest.mark.long
async def test_a_hostile_answer_holds_nothing_up():
    compare = Symbolic(cpu_seconds=0.5)
    async with asyncio.timeout(90):
        hostile, *plain = await asyncio.gather(
            compare(HOSTILE, {"answer": "3"}), *(compare(rf"\boxed{{{n}}}", {"answer": "3"}) for n in range(6))
        )
    assert hostile == (0.0, {"undecided": 1.0})
    assert [value for value, _ in plain] == [0, 0, 0, 1, 0, 0]


async def test_waiting_behind_hostile_answers_is_no_time_out():
    """A process compares one answer at a time, and the time-out of a part counts from when it is asked."""
    assert ready_part("correct", Symbolic(), None).timeout == 600
    assert ready_part("correct", Part(Symbolic(), timeout=5), None).timeout == 5


@pytest.mark.long
async def test_an_undecided_comparison_may_be_an_error():
    with pytest.raises(EnvError, match=r"was not compared within 0.5 s of CPU time"):
        await Symbolic(cpu_seconds=0.5, undecided="error")(HOSTILE, {"answer": "3"})


@pytest.mark.long
async def test_a_wall_clock_time_out_is_an_error_and_ends_the_process():
    env = SingleTurnEnv(Rubric({"math": Symbolic(cpu_seconds=300)}, timeout=0.5))
    await reset_env(env, Task("t", "?", {"answer": "3"}))
    with pytest.raises(EnvError, match=r"'math' .*took longer than 0.5 s"):
        await score_env(env, {"role": "assistant", "content": HOSTILE})
    assert await Symbolic()(r"\boxed{3}", {"answer": "3"}) == (1.0, {"undecided": 0.0})
    assert all(worker.status() != psutil.STATUS_ZOMBIE for worker in workers())


@pytest.mark.long
async def test_a_process_that_somebody_killed_is_replaced():
    compare = Symbolic()
    assert (await compare(r"\boxed{3}", {"answer": "3"}))[0] == 1
    for worker in workers():
        worker.kill()
        worker.wait(30)
    assert (await compare(r"\boxed{3}", {"answer": "3"}))[0] == 1


async def test_a_right_answer_that_says_nothing_is_an_error():
    with pytest.raises(EnvError, match=r"task.data\['answer'\] holds '': math-verify cannot parse it"):
        await Symbolic()(r"\boxed{3}", {"answer": ""})
    with pytest.raises(EnvError, match=r"task\.data has no 'answer'"):
        await Symbolic()(r"\boxed{3}", {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cpu_seconds": 0}, "cpu_seconds is 0"),
        ({"undecided": "zero"}, "undecided is 'zero'"),
        ({"extract": "x"}, "extract"),
    ],
)
async def test_bad_settings(options, words):
    with pytest.raises(ConfigError, match=words):
        Symbolic(**options)


async def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setattr(symbolic.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'turnwise-rl\[rewards\]'"):
        Symbolic()


@pytest.mark.long
@pytest.mark.parametrize("mode", ["done", "busy"])
async def test_processes_end_with_the_loop_and_when_everything_is_killed(mode):
    """A parent that is killed leaves idle processes without input, and busy ones without CPU time."""
    code = textwrap.dedent(
        r"""
        import asyncio, sys
        from turnwise.envs.rewards import Symbolic

        async def main():
            compare = Symbolic(cpu_seconds=1)
            await compare(r"\boxed{3}", {"answer": "3"})
            print("ready", flush=True)
            if sys.argv[1] == "busy":
                await compare(r"\boxed{9^{9^{9^9}}}", {"answer": "3"})

        asyncio.run(main())
        """
    )
    parent = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs meanwhile
        [sys.executable, "-c", code, mode], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    if mode == "busy":
        os.kill(parent.pid, signal.SIGKILL)
    code_of_parent = parent.wait(60)
    assert code_of_parent == (-signal.SIGKILL if mode == "busy" else 0)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
