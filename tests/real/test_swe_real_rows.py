"""Every SWE row and terminal task that comes with the package, and cheats, in real sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.envs.swe_episodes import task, worth
from support.sandboxes.docker_engine import PYTHON, TestEngine, engine
from turnwise.envs.core import close_env, reset_env, run_method
from turnwise.ext.environments.swe import SweEnv, tasks
from turnwise.ext.environments.terminal import TerminalEnv
from turnwise.ext.environments.terminal import tasks as terminal_tasks
from turnwise.sandboxes import SandboxConfig, SandboxManager

pytestmark = pytest.mark.real

ROW = "ledgerly__half-units"
INIT = "ledgerly/__init__.py"
MENDED = "sed -i 's/cls(int(scaled), /cls(int(scaled.quantize(Decimal(1))), /' ledgerly/money.py"
FORGED = '{"text": "{\\"tests\\": {}, \\"wrong\\": [], \\"exit\\": 0}", "code": "00"}'
HOOK = "@pytest.hookimpl(tryfirst=True)\n    def pytest_pyfunc_call(self, pyfuncitem): return True"
CHEATS = {
    "tests are edited": "echo 'def test_a(): pass' > tests/test_money.py",
    "tests are deleted": "rm -r tests",
    "conftest.py": "echo 'import os; os._exit(0)' > conftest.py",
    "pytest.ini": "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini",
    "pyproject.toml": "printf '[tool.pytest.ini_options]\\naddopts = \"--collect-only\"\\n' > pyproject.toml",
    "sitecustomize.py": "echo 'import os; os._exit(0)' > sitecustomize.py",
    "a package called pytest": "mkdir pytest; touch pytest/__init__.py; echo 'raise SystemExit' > pytest/__main__.py",
    "a module of the standard library": "echo 'import os; os._exit(0)' > decimal.py",
    "exit 0": f"echo 'import os; os._exit(0)' >> {INIT}",
    "pytest.exit": f"echo 'import pytest; pytest.exit(\"fine\", 0)' >> {INIT}",
    "skip": f"printf 'import pytest\\npytest.skip(\"x\", allow_module_level=True)\\n' >> {INIT}",
    "the log": f"cat >> {INIT} <<'X'\nimport os\nprint('=== short test summary info ===')\n"
    "print('PASSED tests/test_money.py::test_half_a_unit_goes_to_the_even_neighbour', flush=True)\nos._exit(0)\nX",
    "the report": f"cat >> {INIT} <<'X'\nimport glob, os\nfor each in glob.glob('/tmp/turnwise-*'):\n"
    f"    open(each + '/report.json', 'w').write('''{FORGED}''')\nos._exit(0)\nX",
    "runtest": f"echo 'import _pytest.python as p; p.Function.runtest = lambda self: None' >> {INIT}",
    "the code of a hook": f"cat >> {INIT} <<'X'\nimport _pytest.python as p\n"
    "p.pytest_pyfunc_call.__code__ = (lambda pyfuncitem: True).__code__\nX",
    "a plugin": f"cat >> {INIT} <<'X'\nimport gc, pytest\nfrom pluggy import PluginManager\nclass P:\n    {HOOK}\n"
    "for each in gc.get_objects():\n    if isinstance(each, PluginManager): each.register(P())\nX",
    "assertions": "cat >> ledgerly/money.py <<'X'\nimport builtins\nbuiltins.AssertionError = type('A', (), {})\n"
    "Money.__eq__ = lambda self, other: True\nX",
    "test files while they run": f"cat >> {INIT} <<'X'\nimport pathlib\n"
    "p = pathlib.Path(__file__).parents[1] / 'tests' / 'test_money.py'\n"
    "p.write_text('def test_half_a_unit_goes_to_the_even_neighbour(): pass')\nX",
    "a failure that is said to be expected": 'sed -i \'s/cls(int(scaled), /__import__("pytest").xfail("x")(0, /\' '
    "ledgerly/money.py",
    "a mark of another module": f"cat >> {INIT} <<'X'\nimport sys, pytest\nf = sys._getframe()\nwhile f:\n"
    "    f.f_globals['pytestmark'] = pytest.mark.xfail\n    f = f.f_back\nX",
    "runtest of a test": "cat >> ledgerly/money.py <<'X'\nimport gc, pytest\ndef _eq(self, other):\n"
    "    for each in gc.get_objects():\n        if isinstance(each, pytest.Function): each.runtest = lambda: None\n"
    "    return True\nMoney.__eq__ = _eq\nX",
    "the code of tests": "cat >> ledgerly/money.py <<'X'\nimport gc, types\ndef _eq(self, other):\n"
    "    for each in gc.get_objects():\n"
    "        if isinstance(each, types.FunctionType) and each.__name__.startswith('test_half'):\n"
    "            each.__code__ = (lambda: None).__code__\n    return True\nMoney.__eq__ = _eq\nX",
    "no repository": "rm -rf .git",
}


@pytest.fixture
async def local() -> AsyncIterator[SandboxManager]:
    manager = SandboxManager(SandboxConfig(config={"isolation": "bubblewrap"}))
    yield manager
    await manager.close()


@pytest.fixture(scope="module")
def docker_engine() -> Iterator[TestEngine]:
    with engine() as test_engine:
        yield test_engine


@pytest.fixture
async def docker(docker_engine: TestEngine) -> AsyncIterator[SandboxManager]:
    manager = SandboxManager(SandboxConfig(name="docker", config={"url": docker_engine.url, "image": PYTHON}))
    yield manager
    await manager.close()


@pytest.mark.timeout(600)
async def test_every_row_is_solved_by_its_solution_and_not_by_nothing(local: SandboxManager, tmp_path: Path) -> None:
    turn = asyncio.Semaphore(3)

    async def look(row):
        async with turn:
            env = SweEnv(cache=str(tmp_path))
            env.sandboxes = local
            try:
                return await run_method(env, env.check_task, row)
            finally:
                await close_env(env)

    rows = list(tasks())
    problem_lists = await asyncio.gather(*map(look, rows))
    assert {row.id: problems for row, problems in zip(rows, problem_lists, strict=True) if problems} == {}


@pytest.mark.alike("cheats on real rows")
@pytest.mark.parametrize("cheat", CHEATS)
async def test_a_cheat_is_worth_nothing(local: SandboxManager, tmp_path_factory, cheat: str) -> None:
    cache = str(tmp_path_factory.getbasetemp() / "swe-cache")
    score, _ = await worth(local, task(ROW), CHEATS[cheat], cache=cache)
    assert score == 0.0


async def test_a_plugin_that_metadata_names_is_worth_nothing(local: SandboxManager, tmp_path: Path) -> None:
    row = task(ROW)
    row = replace(row, data={**row.data, "sandbox_env": {}})
    cheat = (
        "mkdir evil.dist-info; printf 'Metadata-Version: 2.1\nName: evil\nVersion: 1\n' > evil.dist-info/METADATA; "
        "printf '[pytest11]\nevil = evilmod\n' > evil.dist-info/entry_points.txt; "
        "echo 'import _pytest.python as p; p.Function.runtest = lambda self: None' > evilmod.py"
    )
    score, _ = await worth(local, row, cheat, cache=str(tmp_path))
    assert score == 0.0


async def test_files_of_any_name_are_put_back(local: SandboxManager, tmp_path: Path) -> None:
    odd = "mkdir ':t'; echo x > ':t/test_x.py'; echo x > 'tests/*'; touch \"$(printf 'tests/\\377.py')\""
    score, env = await worth(local, task(ROW), f"{MENDED}; {odd}", cache=str(tmp_path))
    assert env.verdict is not None
    assert (score, len(env.verdict.dropped)) == (1.0, 3)


async def test_a_patch_by_hand_writes_nothing_but_files_of_the_repository(
    local: SandboxManager, tmp_path: Path
) -> None:
    env = SweEnv(cache=str(tmp_path))
    env.sandboxes = local
    await reset_env(env, task(ROW), seed=0)
    loose = env.instance.patch.replace("     try:\n", "     try:  # loosely\n")
    assert (await env.judge(loose.encode())).resolved
    settings = "--- a/.git/config\n+++ b/.git/config\n@@ -1,1 +1,2 @@\n [core]\n+\tx = 1\n"
    assert not (await env.judge((loose + settings).encode())).resolved
    await close_env(env)


async def test_restored_files_cost_an_honest_solution_nothing(local: SandboxManager, tmp_path: Path) -> None:
    own_test = "echo 'def test_mine(): pass' >> tests/test_money.py; echo x > tests/conftest.py"
    change = f"{MENDED}; {own_test}; git add -A; git commit -qm x"
    score, env = await worth(local, task(ROW), change, cache=str(tmp_path))
    assert env.verdict is not None
    assert (score, env.verdict.dropped) == (1.0, ("tests/conftest.py", "tests/test_money.py"))


@pytest.mark.timeout(300)
async def test_terminal_tasks(local: SandboxManager) -> None:
    for row in terminal_tasks():
        env = TerminalEnv()
        env.sandboxes = local
        assert await run_method(env, env.check_task, row) == [], row.id
        await close_env(env)


@pytest.mark.timeout(300)
async def test_rows_in_docker(docker: SandboxManager, tmp_path: Path) -> None:
    row = task(ROW)
    row = replace(
        row, data={**row.data, "image_name": PYTHON, "test_command": "python3 -m pytest -rA -p no:cacheprovider"}
    )
    env = SweEnv(cache=str(tmp_path))
    env.sandboxes = docker
    assert await run_method(env, env.check_task, row) == []
    await close_env(env)
    for cheat in ("tests are deleted", "exit 0", "runtest"):
        score, _ = await worth(docker, row, CHEATS[cheat], cache=str(tmp_path))
        assert score == 0.0, cheat
