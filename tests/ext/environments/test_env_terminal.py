"""Task folders of Harbor and Terminal-Bench, and an episode of one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from support.envs.swe_episodes import any_manager
from support.envs.terminal_servers import SERVER_ATTACKS, server_rewards
from turnwise.envs.core import close_env, reset_env, run_method, score_env, step_env
from turnwise.envs.registration import make
from turnwise.envs.results import Remark
from turnwise.envs.solution import play_solution
from turnwise.errors import ConfigError, RegistryError, TaskError
from turnwise.ext.environments.terminal import TerminalEnv, read_folder, tasks
from turnwise.ext.environments.terminal.altered import NO_TESTS, altered_tests, cache_tests, cached_tests
from turnwise.tasks import load_tasks


def written(folder: Path, **files: str) -> str:
    for name, text in files.items():
        file = folder / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(folder)


HARBOR = {
    "task_dot_toml": "[verifier]\ntimeout_sec = 90\n[environment]\nmemory = '2G'\nstorage_mb = 100\ncpus = 2\n",
    "instruction_dot_md": "Do it.\n",
    "tests__test_dot_sh": "echo 0.5 > $VERIFIER_DIR/reward.txt",
}


def test_harbor(tmp_path):
    folder = read_folder(written(tmp_path / "a", **HARBOR, environment__Dockerfile="FROM scratch\n"))
    assert (folder.instruction, folder.test_timeout, folder.script) == ("Do it.", 90, "tests/test.sh")
    assert folder.image == str(tmp_path / "a" / "environment")
    assert (folder.limits.memory, folder.limits.disk, folder.limits.cpus) == (2 * 2**30, 100 * 2**20, 2)
    assert folder.solution is None
    assert not folder.limits.network


def test_terminal_bench(tmp_path):
    settings = "instruction: |-\n  Do it.\nmax_test_timeout_sec: 30.0\nparser_name: pytest\n"
    written(tmp_path, **{"run-tests_dot_sh": "pytest", "tests__test_a_dot_py": ""})
    folder = read_folder(written(tmp_path, task_dot_yaml=settings, Dockerfile="FROM scratch\n", solution_dot_sh="true"))
    assert (folder.instruction, folder.test_timeout, folder.script) == ("Do it.", 30, "run-tests.sh")
    assert folder.image == str(tmp_path)
    assert folder.solution == tmp_path / "solution.sh"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task_dot_toml": "x ="}, "task.toml cannot be read"),
        ({"task_dot_toml": "[verifier]\ntimeout_sec = 'long'"}, "timeout is 'long'"),
        ({"task_dot_toml": "[environment]\nmemory = 'much'"}, "memory is 'much'"),
        ({"task_dot_toml": "verifier = 3"}, "verifier is 3: it must be a table"),
        ({"task_dot_toml": "[verifier]\nenv = 3"}, r"verifier\.env is 3: it must be a table of texts"),
        ({"task_dot_toml": "[verifier.env]\nA = '${NOT_SET_HERE}'"}, r"verifier\.env\.A is .*NOT_SET_HERE is not set"),
        ({"task_dot_toml": "[[steps]]\nname = 'one'"}, r"needs several steps \(steps\), which an environment with one"),
        ({"task_dot_toml": "[environment]\ngpus = 1\nos = 'windows'"}, r"GPUs \(environment\.gpus\), Windows"),
        ({"task_dot_toml": "[verifier.environment]\ncpus = 1"}, "a separate environment for the tests"),
        ({"environment__docker-compose_dot_yaml": "services: {}"}, "several containers"),
    ],
)
def test_invalid_task_folder_is_named(tmp_path, change, message):
    with pytest.raises(TaskError, match=message):
        read_folder(written(tmp_path, **{**HARBOR, **change}))


def test_missing_task_files_are_named(tmp_path):
    with pytest.raises(TaskError, match="neither task"):
        read_folder(str(tmp_path))
    with pytest.raises(TaskError, match=r"there is no tests/test\.sh"):
        read_folder(written(tmp_path / "b", task_dot_toml="", instruction_dot_md="x"))
    with pytest.raises(TaskError, match="no task of that name"):
        read_folder("shipped:../x")
    with pytest.raises(TaskError, match="holds no task"):
        list(tasks(str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="test_timeout is -1"):
        TerminalEnv(test_timeout=-1)


async def test_a_folder_of_harbor_s_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TOLD_HERE", "0.25")
    settings = "[environment.env]\nPLACE = 'here'\n[verifier.env]\nWORTH = '${TOLD_HERE}'\nMORE = '${NOT_SET:-5}'\n"
    test = 'test "$PLACE$MORE" = here5 && echo "{\\"reward\\": $WORTH}" > $VERIFIER_DIR/reward.json\n'
    for name in ("one", "two"):
        files = {**HARBOR, "task_dot_toml": settings, "tests__test_dot_sh": test}
        written(tmp_path / "all tasks" / name, **files, workspace__a_dot_txt=name)
    env = make(f"harbor:{tmp_path / 'all tasks'}")
    rows = load_tasks(type(env).default_tasks)
    assert [(task.id, task.prompt) for task in rows] == [("one", "Do it."), ("two", "Do it.")]
    async with any_manager() as manager:
        env.sandboxes = manager
        await reset_env(env, rows[1])
        assert (await env.sandbox.exec('cat a.txt; echo "$PLACE $WORTH"')).stdout == b"twohere \n"
        assert await score_env(env, None) == {"score": 0.25}
        await close_env(env)
    with pytest.raises(RegistryError, match="there is no folder 'none': write harbor:PATH"):
        make("harbor:none")
    with pytest.raises(TaskError, match="holds no task"):
        make(f"harbor:{tmp_path}")


async def test_an_episode_and_the_reward_that_tests_write(tmp_path):
    folder = written(tmp_path / "half", **HARBOR, workspace__a_dot_txt="a", solution__solve_dot_sh="cp a.txt b.txt\n")
    [task] = tasks(folder)
    assert len(list(tasks())) >= 4
    async with any_manager() as manager:
        env = TerminalEnv()
        env.sandboxes = manager
        await reset_env(env, task)
        done = await env.sandbox.exec("cat a.txt; mkdir -p logs; echo 1 > logs/reward.txt")
        assert done.stdout == b"a"
        *_, (_, final_step) = await play_solution(env)
        assert (final_step.reward, final_step.terminated) == (0.5, True)
        assert (await env.sandbox.exec("cat b.txt")).stdout == b"a"
        await close_env(env)


NUMBER = {
    "task_dot_toml": "[environment]\nmemory = '2G'\n",
    "instruction_dot_md": "Write 3 to n.txt.\n",
    "tests__test_dot_sh": (
        'python3 -m pytest -q -p no:cacheprovider "$TEST_DIR/test_n.py" && echo 1 > "$VERIFIER_DIR/reward.txt"\n'
    ),
    "tests__test_n_dot_py": """
def test_n():
    with open("n.txt") as file:
        text = file.read()
    assert text == "3\\n"
""",
    "solution__solve_dot_sh": "echo 3 > n.txt\n",
    "workspace__a_dot_txt": "a",
}
A_PYTEST_OF_ITS_OWN = "echo 'raise SystemExit(0)' > pytest.py"


@pytest.mark.parametrize(
    ("command", "twins", "score", "tampered"),
    [
        ("echo 3 > n.txt", True, 1.0, 0.0),
        pytest.param("echo 4 > n.txt", True, 0.0, 0.0, marks=pytest.mark.long),
        (A_PYTEST_OF_ITS_OWN, True, 0.0, 1.0),
        pytest.param(A_PYTEST_OF_ITS_OWN, False, 1.0, 0.0, marks=pytest.mark.long),
    ],
)
async def test_tests_that_pass_whatever_they_expect(tmp_path, monkeypatch, command, twins, score, tampered):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    [task] = tasks(written(tmp_path / "number", **NUMBER))
    async with any_manager() as manager:
        env = TerminalEnv(twins=twins)
        env.sandboxes = manager
        await reset_env(env, task)
        assert (await env.sandbox.exec(command)).ok
        final_step = await step_env(env, {"role": "assistant", "content": "Done."})
        await close_env(env)
    assert (final_step.reward, final_step.info["metrics"]["tampered"]) == (score, tampered)
    assert ("test_n.py::test_n" in final_step.info.get("notes", {}).get("tampered", "")) == bool(tampered)


@pytest.mark.long
async def test_tasks_without_tests_that_can_be_altered_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = {**NUMBER, "tests__test_dot_sh": "[ -e n.txt ] && echo 1 > $VERIFIER_DIR/reward.txt || true\n"}
    async with any_manager() as manager:
        env = TerminalEnv()
        env.sandboxes = manager
        [remark] = await run_method(env, env.check_task, *tasks(written(tmp_path / "whole", **files)))
        assert "can be altered" in remark
        assert isinstance(remark, Remark)
        assert await run_method(env, env.check_task, *tasks(written(tmp_path / "number", **NUMBER))) == []
        await close_env(env)


PROCESS = {
    **NUMBER,
    "instruction_dot_md": "Leave a process that runs, and its id in n.txt.\n",
    "tests__test_n_dot_py": """
def test_n():
    with open("n.txt") as file:
        number = int(file.read())
    with open(f"/proc/{number}/cmdline") as file:
        words = file.read().split("\\0")
    assert words[1] == "1234"
""",
    "solution__solve_dot_sh": "setsid sleep 1234 > /dev/null 2>&1 < /dev/null &\necho $! > n.txt\n",
}


def test_versions_of_live_tests_differ_in_one_character_of_a_value(tmp_path):
    """A process that sees all of them cannot tell which one is the plain one."""
    tests = altered_tests(read_folder(written(tmp_path / "process", **PROCESS)), 7)
    values = [re.search(r"== '(\d{4})'", version["test_n.py"])[1] for version in (tests.plain, *tests.altered)]
    assert len({*values}) == 8
    assert sum(len({*characters}) > 1 for characters in zip(*values, strict=True)) == 1


@pytest.mark.long
async def test_tests_run_beside_processes_only_where_the_solution_leaves_what_they_need(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    [row] = tasks(written(tmp_path / "process", **PROCESS))
    async with any_manager() as manager:
        env = TerminalEnv()
        env.sandboxes = manager
        [remark] = await run_method(env, env.check_task, row)
        assert "a process could forge what they see" in remark
        for command, score in ((PROCESS["solution__solve_dot_sh"], 1.0), ("echo 999999 > n.txt", 0.0)):
            await reset_env(env, row)
            await env.sandbox.exec(command)
            assert await score_env(env, None) == {"score": score}
        assert len(cached_tests(env.folder).altered) == 7
        await close_env(env)


@pytest.mark.long
async def test_tests_of_a_server_reach_it_from_copies_which_its_processes_cannot_reach(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    async with any_manager() as manager:
        if not (await manager.probe()).network:
            pytest.skip("sandboxes here share the loopback of the machine")
        rewards = await server_rewards(manager, tmp_path / "server")
    assert rewards == {"the solution": 1.0, **dict.fromkeys(SERVER_ATTACKS, 0.0)}


@pytest.mark.parametrize("processes", [False, True])
async def test_copies_of_a_sandbox_have_its_files_and_none_of_its_processes(processes):
    async with any_manager() as manager:
        env = TerminalEnv()
        env.sandboxes = manager
        box = await env.open_sandbox()
        await box.exec("echo a > a.txt; setsid sleep 1234 > /dev/null 2>&1 < /dev/null &")
        # As on E2B, whose forks continue what runs.
        box.capabilities = replace(box.capabilities, fork_processes=processes)
        copies = await env.copy_sandbox(box, 2)
        assert [(await fork.exec("cat a.txt")).stdout for fork in copies] == [b"a\n"] * 2
        if box.capabilities.processes:
            assert (await copies[0].exec("grep -la 123[4] /proc/[0-9]*/cmdline")).stdout == b""
        await close_env(env)


async def test_failed_alteration_is_not_cached_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = read_folder(written(tmp_path / "number", **NUMBER))
    cache_tests(folder, NO_TESTS)
    assert cached_tests(folder) == NO_TESTS
    assert not (tmp_path / "cache").exists()
    cache_tests(folder, tests := altered_tests(folder))
    assert tests.names == ("test_n.py::test_n",)
    assert len(list((tmp_path / "cache" / "turnwise" / "twins").iterdir())) == 1
