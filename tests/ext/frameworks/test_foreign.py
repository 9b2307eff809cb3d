"""Environments of a framework that the tests make up: in this process and in an interpreter of their own alike."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.processes.warm import run_command
from turnwise.envs.core import Env, close_env, fork_env, reset_env, schemas, score_env, step_env
from turnwise.envs.registration import EnvSpec, default_task_source, env_class, make, register_prefix
from turnwise.errors import ConfigError, EnvError, RegistryError, TaskError
from turnwise.ext.checks.environment.forks import shared
from turnwise.ext.frameworks.export.core import export_env
from turnwise.ext.frameworks.foreign import core, register_framework, tasks
from turnwise.ext.frameworks.foreign.pool import pools as worker_pools
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import RolloutParts, RolloutRequest
from turnwise.rollout.producer import RolloutProducer
from turnwise.tasks import Task, load_tasks
from turnwise.types import ToolCall

DRIVER = Path(__file__).parents[2] / "support" / "envs" / "tiny_driver.py"
register_framework("tiny", DRIVER, "turnwise-tiny==1.0", system_prompt="Count down.")

PLACES = pytest.mark.parametrize("python", [None, sys.executable], ids=["in process", "own python"])


def say(text: str):
    return {"role": "assistant", "content": text}


def tiny(python: str | None, trouble: str = "", **more) -> Env:
    return make("tiny:countdown", kwargs={"trouble": trouble} if trouble else {}, python=python, **more)


@PLACES
async def test_an_episode_has_the_framework_s_messages_rewards_and_end(python) -> None:
    env = tiny(python)
    messages, info = await reset_env(env, None, seed=2**40 + 3)
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"] == "Count down."
    assert messages[1]["content"].startswith("5 left, seed 3, lucky ")
    assert info == {"state": 5}
    assert [schema.name for schema in schemas(env)] == ["take"]
    first = await step_env(env, say("2"))
    assert (first.reward, first.terminated, first.truncated) == (2.0, False, False)
    assert first.info == {"metrics": {"taken": 2}, "notes": {"left": "3"}}
    ending = await step_env(env, say("3"))
    assert (ending.reward, ending.terminated) == (3.0, True)
    await close_env(env)
    await close_env(env)


@PLACES
async def test_draws_of_an_episode_depend_on_its_seed_alone(python) -> None:
    async def played(*interleaved: Env) -> list[str]:
        env = tiny(python)
        messages, _ = await reset_env(env, None, seed=11)
        seen = [messages[-1]["content"]]
        for _ in range(3):
            for other in interleaved:
                await step_env(other, say("0"))
            random.seed(5)
            seen.append((await step_env(env, say("1"))).observation[0]["content"])
        await close_env(env)
        return seen

    other = tiny(python)
    await reset_env(other, None, seed=4)
    state = random.getstate()
    assert await played() == await played(other)
    random.seed(5)
    number = random.random()
    random.setstate(state)
    random.seed(5)
    await step_env(other, say("0"))
    assert random.random() == number
    await close_env(other)


@PLACES
async def test_a_fork_goes_its_own_way(python) -> None:
    env = tiny(python)
    await reset_env(env, Task("t", "", {"start": 9}), seed=1)
    await step_env(env, say("4"))
    fork = await fork_env(env)
    assert not list(shared(env, fork))
    ours, theirs = await step_env(env, say("1")), await step_env(fork, say("1"))
    assert ours == theirs
    await close_env(env)
    assert (await step_env(fork, say("4"))).terminated
    await close_env(fork)


@PLACES
async def test_an_episode_that_a_limit_ends_has_the_framework_s_score(python) -> None:
    env = tiny(python)
    await reset_env(env, None, seed=1)
    await step_env(env, say("1"))
    assert await score_env(env, None) == {"left": -4.0}
    await close_env(env)


@PLACES
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("raise", "ArithmeticError: the counter broke"),
        ("exit", "SystemExit: enough"),
        ("nan", "the reward 'nan': it must be a finite number"),
        ("words", "the reward 'much': it must be a finite number"),
        ("missing", "the reward None: it must be a finite number"),
        ("mute", "Mute, whose text cannot be had (ValueError)"),
        ("partial", "the driver's step() gave no terminated, truncated: it returns a dict with them"),
    ],
)
async def test_error_in_a_step_fails_only_its_episode(python, trouble, message) -> None:
    bystander, env = tiny(python), tiny(python, trouble)
    await reset_env(bystander, None, seed=1)
    await reset_env(env, None, seed=1)
    with pytest.raises(EnvError) as caught:
        await step_env(env, say("1"))
    assert message in str(caught.value)
    await close_env(env)
    assert (await step_env(bystander, say("1"))).reward == 1.0
    await close_env(bystander)


@PLACES
async def test_a_reset_that_raises_is_an_error_and_leaves_nothing(python) -> None:
    env = tiny(python, "reset")
    with pytest.raises(EnvError, match="LookupError: no such level"):
        await reset_env(env, None, seed=1)
    await close_env(env)
    with pytest.raises(EnvError, match=r"no episode runs: call reset\(\) first"):
        await step_env(env, say("1"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("die", r"ended with exit status 7; its last output: last words"),
        ("hang", r"step did not end within 0\.5 s, so it was killed"),
        ("memory", r"MemoryError"),
        ("orphan", r"ended with exit status 7; its last output: last words"),
        ("cancel", r"CancelledError"),
    ],
)
async def test_lost_worker_fails_its_episode_and_no_later_episode(trouble, message) -> None:
    env = tiny(sys.executable, trouble, timeout=0.5 if trouble == "hang" else 100.0, memory=2**31)
    await reset_env(env, None, seed=1)
    # The first request of a worker has more time, since it imports the framework: reset was it.
    with pytest.raises(EnvError, match=message) as caught:
        await step_env(env, say("1"))
    assert caught.value.retryable
    assert "tiny:countdown" in str(caught.value)
    await close_env(env)
    other_worker = tiny(sys.executable, timeout=100.0, memory=2**31)
    await reset_env(other_worker, None, seed=1)
    assert (await step_env(other_worker, say("5"))).terminated
    await close_env(other_worker)


@pytest.mark.long
async def test_request_timeout_starts_after_earlier_answers() -> None:
    envs = [tiny(sys.executable, "slow", timeout=1.2) for _ in range(4)]
    for env in envs:
        await reset_env(env, None, seed=1)
    steps = await asyncio.gather(*(step_env(env, say("5")) for env in envs))
    assert all(result.terminated for result in steps)
    for env in envs:
        await close_env(env)


async def test_simultaneous_episodes_wait_for_one_import() -> None:
    # The driver loads each environment once: the other resets wait behind the load of the first.
    spec = {"timeout": 0.05, "memory": 2**32}
    envs = [tiny(sys.executable, **spec) for _ in range(4)]
    await asyncio.gather(*(reset_env(env, None, seed=1) for env in envs))
    for env in envs:
        await close_env(env)


@PLACES
async def test_an_environment_may_run_an_event_loop_of_its_own(python) -> None:
    env = tiny(python, "loop")
    await reset_env(env, None, seed=1)
    assert (await step_env(env, say("5"))).terminated
    await close_env(env)
    assert asyncio.current_task() is not None


async def test_messages_arrive_equal_in_both_processes() -> None:
    call = ToolCall("c", "take", {"much": 10**30, "word": "a\ud800b"}, "{}")
    action = {"role": "assistant", "content": "half \ud83d é", "tool_calls": [call]}
    seen = []
    for python in (None, sys.executable):
        env = tiny(python, "echo")
        await reset_env(env, None, seed=1)
        seen.append((await step_env(env, action)).observation[0]["content"])
        await close_env(env)
    assert seen[0] == seen[1]
    assert '"much": 1000000000000000000000000000000, "word": "a?b"' in seen[0]
    seen[0].encode()


@PLACES
async def test_call_nested_too_deeply_is_malformed(python) -> None:
    nested: Any = 1
    for _ in range(300):
        nested = [nested]
    calls = [
        ToolCall("a", "take", {"much": nested}, "{}"),
        ToolCall("b", "take", {}, "[" * 100_000, "no JSON"),
        ToolCall("c", "take", {"much": [[1]]}, "{}"),
    ]
    env = tiny(python, "echo")
    await reset_env(env, None, seed=1)
    answer = await step_env(env, {"role": "assistant", "content": "", "tool_calls": calls})
    deep, unparsed, shallow = json.loads(answer.observation[0]["content"].rstrip("?"))["tool_calls"]
    assert (deep["arguments"], deep["error"]) == ({}, "the arguments are nested too deeply")
    assert (unparsed["error"], set(unparsed["raw"])) == ("no JSON", {"["})
    assert len(unparsed["raw"]) <= 100
    assert (shallow["arguments"], shallow["error"]) == ({"much": [[1]]}, None)
    await close_env(env)


async def test_programs_of_an_environment_cannot_answer_in_its_place() -> None:
    env = tiny(sys.executable, "forge")
    await reset_env(env, None, seed=1)
    assert (await step_env(env, say("2"))).reward == 2.0
    await close_env(env)


async def test_a_flood_of_output_is_kept_in_part_and_harms_nothing() -> None:
    env = tiny(sys.executable, "flood")
    await reset_env(env, None, seed=1)
    assert (await step_env(env, say("5"))).terminated
    worker = env._worker
    assert 0 < len(worker._output) <= 16_384
    await close_env(env)


async def test_temporary_files_of_a_worker_end_with_it() -> None:
    env = tiny(sys.executable, "litter")
    await reset_env(env, None, seed=1)
    await step_env(env, say("5"))
    worker = env._worker
    files = Path(worker._temporary.name)
    assert len(list(files.iterdir())) == 1
    await close_env(env)
    await worker.close()
    assert not files.exists()


async def test_a_cancelled_step_still_ends_a_worker_that_hangs() -> None:
    env = tiny(sys.executable, "hang", timeout=0.5)
    await reset_env(env, None, seed=1)
    worker = env._worker
    step = asyncio.ensure_future(step_env(env, say("1")))
    done, _ = await asyncio.wait([step], timeout=0.05)
    assert not done
    step.cancel()
    await asyncio.wait([step])
    with pytest.raises(EnvError, match="did not end within"):
        await close_env(env)
    assert worker.ended is not None


async def test_episodes_are_spread_over_the_processes() -> None:
    envs = [tiny(sys.executable, processes=2) for _ in range(4)]
    for env in envs:
        await reset_env(env, None, seed=1)
    pids = [env._worker.pid for env in envs]
    assert sorted(pids.count(pid) for pid in set(pids)) == [2, 2]
    # Sets have one order in all of them.
    assert all(b"PYTHONHASHSEED=" in Path(f"/proc/{pid}/environ").read_bytes() for pid in pids)
    os.kill(pids[0], signal.SIGKILL)
    for env, pid in zip(envs, pids, strict=True):
        if pid == pids[0]:
            with pytest.raises(EnvError, match="was killed by SIGKILL"):
                await step_env(env, say("5"))
        else:
            assert (await step_env(env, say("5"))).terminated
        await close_env(env)


async def play_through_kills(kills: int, seed: int) -> None:
    """Run groups while their worker is killed at drawn requests; every member ends with its whole reward."""
    spec = SpecConfig(name="tiny:countdown", config={"python": sys.executable, "kwargs": {"start": 20}})
    config = RolloutConfig(env=spec, max_turns=64, retries=1000)
    renderer, written = ToyRenderer(), []
    draw, pool, killed = random.Random(seed), await worker_pools().get(), set()
    until_kill = draw.randint(1, 40)

    def answer(request: object) -> str:
        nonlocal until_kill
        until_kill -= 1
        if until_kill <= 0 and len(killed) < kills:
            until_kill = draw.randint(1, 40)
            for worker in [busy for listed in pool._workers.values() for busy in listed if busy.episodes]:
                if worker.ended is None and worker.pid not in killed:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.add(worker.pid)
        return "1"

    producer = await RolloutProducer.create(
        config, ScriptedClient(renderer, answer), None, RolloutParts(renderer, write=written.append)
    )
    groups = []
    while len(killed) < kills:
        groups += await producer.gather([RolloutRequest(Task(f"t{len(groups)}", ""), group_size=2)])
    await producer.close()
    assert [group.failed for group in groups] == [0] * len(groups)
    assert [trajectory.reward for group in groups for trajectory in group.trajectories] == [20.0] * 2 * len(groups)
    errors = [trajectory.error for trajectory in written if trajectory.error is not None]
    assert all("was killed by SIGKILL" in error or "the worker was closed" in error for error in errors)


async def test_a_killed_worker_costs_its_episodes_a_retry() -> None:
    await play_through_kills(3, seed=0)


@pytest.mark.long
async def test_thirty_kills_cost_retries_and_nothing_else() -> None:
    await play_through_kills(30, seed=1)


BAD: list[tuple[str, dict, type[Exception], str]] = [
    ("tiny:", {}, RegistryError, "'tiny' needs a name: write tiny:NAME"),
    ("tiny:countdwn", {}, RegistryError, "tiny has no 'countdwn'; did you mean 'countdown'?"),
    ("tiny:xyz", {}, RegistryError, "tiny has no 'xyz'; it has countdown, silent"),
    ("tiny:countdown", {"kwargs": {"broken": 1}}, ConfigError, r"refuses its arguments \(kwargs\): ValueError: broken"),
    ("tiny:countdown", {"kwargs": {"strt": 1}}, ConfigError, "unexpected keyword argument 'strt'"),
    ("tiny:countdown", {"args": {}}, RegistryError, "does not take"),
]


@PLACES
@pytest.mark.parametrize(("name", "config", "kind", "message"), BAD)
def test_unmakeable_environment_raises_before_any_episode(python, name, config, kind, message) -> None:
    # Only the first environments of a process are tried with their arguments, and other tests made many.
    core._check_openable.cache_clear()
    with pytest.raises(kind, match=message):
        make(name, **config, **({} if python is None else {"python": python}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"python": "/no/such/python"}, "python is '/no/such/python': there is no such program"),
        ({"python": str(Path(sys.executable).parents[1])}, "a folder: write .*bin/python"),
        ({"python": __file__}, "there is no such program"),
        ({"python": 5}, "python is 5: it must be the path of an interpreter"),
        ({"kwargs": 5}, "kwargs is 5: it must be a mapping"),
        ({"kwargs": {"a": {1}}}, "kwargs is .*: it must be of JSON values"),
        ({"system_prompt": 5}, "system_prompt is 5: it must be a text, or null"),
        ({"timeout": 0}, "timeout is 0: it must be a number of seconds above 0"),
        ({"memory": 5}, "memory is 5: it must be a number of bytes, at least"),
        ({"processes": 0}, "processes is 0: it must be a whole number of at least 1"),
    ],
)
def test_settings_out_of_range_are_named(config, message) -> None:
    with pytest.raises(ConfigError, match=message):
        make("tiny:countdown", **config)


def test_an_interpreter_that_is_none_is_an_error_with_its_output(tmp_path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho I am a shell >&2\nexit 3\n")
    fake.chmod(0o755)
    message = "tiny.*ended with exit status 3; its last output: I am a shell; is .* an interpreter.*python=PATH"
    with pytest.raises(EnvError, match=message):
        make("tiny:countdown", python=str(fake))


@pytest.mark.long
def test_interrupt_ends_a_starting_interpreter(tmp_path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nkill -INT $PPID\nexec sleep 600\n")
    fake.chmod(0o755)
    program = f"""
from turnwise.envs import make
from turnwise.ext.frameworks.foreign import register_framework
register_framework("tiny", {str(DRIVER)!r})
make("tiny:countdown", python={str(fake)!r})
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode != 0
    assert "KeyboardInterrupt" in ran.stderr


ABSENT = """
PACKAGE = "absent"
from turnwise_foreign.core import framework
def names(): return framework("no_such_framework").NAMES
def load(name, kwargs, system_prompt): raise AssertionError
"""


@PLACES
def test_a_framework_that_is_not_installed_is_named_with_its_pip_line(python, tmp_path, request) -> None:
    driver = tmp_path / "absent_driver.py"
    driver.write_text(ABSENT)
    prefix = "absent-here" if python is None else "absent-there"
    if prefix not in core._FRAMEWORKS:
        register_framework(prefix, driver, "absent==2.1")
    with pytest.raises(ConfigError, match=r"has no no_such_framework .*pip install 'absent==2\.1'"):
        make(f"{prefix}:x", python=python)


def test_untested_version_warns_once(caplog) -> None:
    framework = core.Framework("versioned", "reasoning_gym", "pytest==0.1")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            core._warn_of_version(framework, "9.9")
        core._warn_of_version(framework, "0.1")
    [record] = caplog.records
    assert "version 9.9 of pytest is installed, and 0.1 is what the adapter is tested with" in record.getMessage()


def test_registered_prefixes_come_before_references(tmp_path, monkeypatch) -> None:
    (tmp_path / "tiny.py").write_text("class countdown: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert env_class("tiny:countdown").__qualname__ == "countdown"
    assert issubclass(env_class("tiny:countdown"), core.ForeignEnv)
    with pytest.raises(RegistryError, match="must be a subclass"):
        env_class(f"{tmp_path / 'tiny.py'}:countdown")
    with pytest.raises(RegistryError, match="the prefix 'tiny' is taken"):
        register_prefix("tiny", "pkg:function")
    with pytest.raises(RegistryError, match="is no prefix"):
        register_prefix("a.b", "pkg:function")
    with pytest.raises(RegistryError, match="of another framework it is reasoning-gym:chain_sum"):
        env_class("reasoninggym:chain_sum")
    with pytest.raises(RegistryError, match=r"those of other frameworks by .*reasoning-gym:NAME"):
        env_class("countdown")


async def test_a_spec_travels_as_json() -> None:
    spec = EnvSpec("tiny:countdown", {"python": sys.executable, "kwargs": {"start": 2}})
    env = EnvSpec(**json.loads(json.dumps(spec.to_record()))).make()
    messages, _ = await reset_env(env, None, seed=1)
    assert messages[-1]["content"].startswith("2 left")
    await close_env(env)


async def test_an_export_names_the_interpreter_from_anywhere_and_refuses_several_agents(tmp_path) -> None:
    (tmp_path / "out").mkdir()
    spec = EnvSpec("tiny:countdown", {"python": os.path.relpath(sys.executable)})
    await export_env(spec, "mcp", tmp_path / "out", limit=2)
    written = json.loads((tmp_path / "out" / "env.json").read_text())
    assert written["config"] == {"python": os.path.abspath(os.path.relpath(sys.executable))}
    with pytest.raises(ConfigError, match="has several agents, and mcp one"):
        await export_env(EnvSpec("tiny:countdown", {"kwargs": {"trouble": "two"}}), "mcp", tmp_path / "two")


def test_seeded_tasks_of_splits_share_no_seed() -> None:
    seeds = {}
    for split in core.SPLITS:
        rows = list(tasks("tiny:countdown", split=split, size=50, seed=7))
        assert [row.id for row in rows[:2]] == [f"countdown-{split}-7", f"countdown-{split}-8"]
        seeds[split] = {row.data["seed"] + row.data["index"] for row in rows}
    assert (
        not seeds["train"] & seeds["test"] | seeds["train"] & seeds["validation"] | seeds["test"] & seeds["validation"]
    )
    default = load_tasks(env_class("tiny:countdown").default_tasks)
    assert len(default) == 1000
    assert default[20] == next(tasks("tiny:countdown", start=20))


@PLACES
async def test_a_task_s_seed_is_that_of_its_episode(python) -> None:
    task = next(tasks("tiny:countdown", split="test", seed=7, start=2))
    observed = []
    for seed in (1, 2):
        env = tiny(python)
        messages, _ = await reset_env(env, task, seed=seed)
        observed.append(messages[-1]["content"])
        await close_env(env)
    assert observed[0] == observed[1]
    assert f"seed {core.SPLITS['test'] + 9}," in observed[0]


def test_levels_of_a_framework_s_curriculum_are_taken_in_turn() -> None:
    rows = list(tasks("reasoning-gym:spell_backward", size=4, seed=2, levels=[0, 3]))
    assert [row.data["level"] for row in rows] == [0, 3, 0, 3]
    assert [row.id for row in rows[:2]] == ["spell_backward-train-2-level-0", "spell_backward-train-3-level-3"]
    with pytest.raises(TaskError, match="tiny has no levels: remove levels"):
        list(tasks("tiny:countdown", levels=[0]))
    for wrong in ([], [-1], ["a"], 3):
        with pytest.raises(TaskError, match=r"levels is .*: it must be a list of numbers from 0"):
            list(tasks("reasoning-gym:spell_backward", levels=wrong))


def test_framework_of_one_run_per_process_needs_an_interpreter() -> None:
    with pytest.raises(ConfigError, match=r"inspect needs a separate process.*inspect-ai==0\.3\.285.*python=PATH"):
        make("inspect:tasks.py@sums")


@PLACES
def test_rows_of_a_framework_s_dataset_are_tasks(python, monkeypatch) -> None:
    monkeypatch.setitem(core._FRAMEWORKS, "tiny", core.Framework("tiny", str(DRIVER), "turnwise-tiny", has_rows=True))
    rows = list(tasks("tiny:countdown", python=python))
    assert len(rows) == 700
    assert rows[300] == Task("countdown-train-300", "from 303", {"start": 303})
    assert rows[650:] == list(tasks("tiny:countdown", python=python, start=650))
    assert len(list(tasks("tiny:countdown", split="test", python=python))) == 2
    assert len(list(tasks("tiny:countdown", size=260, python=python))) == 260
    env = make("tiny:countdown", python=python, kwargs={"padding": 1})
    assert default_task_source("tiny:countdown", {"python": python, "kwargs": {"padding": 1}}) == env.default_tasks
    assert load_tasks(env.default_tasks)[300].prompt == "from 303 "


def test_long_rows_are_sent_in_parts_and_endless_rows_need_a_number(monkeypatch) -> None:
    monkeypatch.setitem(core._FRAMEWORKS, "tiny", core.Framework("tiny", str(DRIVER), "turnwise-tiny", has_rows=True))
    rows = list(tasks("tiny:countdown", kwargs={"padding": 20_000}))
    assert [row.data["start"] for row in rows] == list(range(3, 703))
    with pytest.raises(TaskError, match=r"its dataset has no end: give their number \(size\)"):
        next(tasks("tiny:countdown", kwargs={"trouble": "endless"}))
    assert len(list(tasks("tiny:countdown", kwargs={"trouble": "endless"}, size=5))) == 5


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"env": "nowhere:x"}, RegistryError, "such names begin with verifiers:"),
        ({"env": "tiny:countdown", "split": "dev"}, TaskError, "split is 'dev': it must be one of train, validation"),
        ({"env": "tiny:countdown", "size": 0}, TaskError, "size is 0"),
        ({"env": "tiny:countdown", "seed": -1}, TaskError, "seed is -1"),
        ({"env": "tiny:countdown", "seed": 499_999_500}, TaskError, "it must be from 0 to 499999000"),
    ],
)
def test_invalid_task_arguments_raise_task_error(arguments, kind, message) -> None:
    with pytest.raises(kind, match=message):
        next(tasks(**arguments))


def test_worker_ends_with_its_parent(tmp_path) -> None:
    program = f"""
import asyncio, os, signal
from turnwise.envs import make, reset_env
from turnwise.ext.frameworks.foreign import register_framework
register_framework("tiny", {str(DRIVER)!r})
async def main():
    env = make("tiny:countdown", python={sys.executable!r})
    await reset_env(env, None, seed=1)
    print(env._worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    ran = run_command([sys.executable, "-c", program], capture_output=True, text=True)
    pid = int(ran.stdout)
    # SIGKILL reaches it with the parent's death: only its reaping takes a moment.
    for _ in range(1000):
        if not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            return
        os.sched_yield()
    pytest.fail(f"the worker {pid} lives on")
