"""The SWE environment, in whatever sandbox this machine gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.envs.swe_episodes import any_manager, episode, task, worth
from turnwise.envs.core import reset_env, score_env
from turnwise.envs.solution import play_solution
from turnwise.errors import ConfigError, EnvError
from turnwise.ext.environments.swe import SweEnv
from turnwise.ext.environments.swe.judge import decide
from turnwise.ext.environments.swe.logs import TestStatus
from turnwise.ext.environments.swe.rows import instance_of

ROW = "ledgerly__half-units"
F2P = "tests/test_money.py::test_half_a_unit_goes_to_the_even_neighbour"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repositories")


@pytest.mark.long
async def test_solution_scores_1_and_no_answer_scores_0(cache: Path) -> None:
    async with any_manager() as manager:
        async with episode(manager, task(ROW), cache=str(cache)) as env:
            assert await score_env(env, None) == {"score": 0.0}
            assert env.verdict is None
            await reset_env(env, task(ROW), seed=0)
            *_, (_, final_step) = await play_solution(env)
        assert (final_step.reward, final_step.terminated) == (1.0, True)
        assert final_step.info["tests"]["FAIL_TO_PASS"][F2P] == "PASSED"
        assert final_step.info["metrics"]["resolved"] == 1.0
        assert final_step.info["reason"] == ""


@pytest.mark.long
async def test_files_that_control_the_test_run_are_restored(cache: Path) -> None:
    cheat = (
        "rm -r tests; echo 'import os; os._exit(0)' > conftest.py; echo x > pytest.py; printf '[pytest]\\n' > tox.ini"
    )
    async with any_manager() as manager:
        score, env = await worth(manager, task(ROW), cheat, cache=str(cache))
    assert score == 0.0
    assert {"conftest.py", "pytest.py", "tox.ini", "tests/test_money.py"} <= set(env.verdict.dropped)
    assert env.verdict.kept == 1.0
    assert env.verdict.reason.startswith("2 of 2 tests still fail")


async def test_a_pytest_that_was_changed_is_not_believed(cache: Path) -> None:
    # The bug is mended; what is told of it is not to be trusted.
    mended = "sed -i 's/cls(int(scaled), /cls(int(scaled.quantize(Decimal(1))), /' ledgerly/money.py"
    changed = f"{mended}; echo 'import pytest; pytest.raises = None' >> ledgerly/__init__.py"
    async with any_manager() as manager:
        score, env = await worth(manager, task(ROW), changed, cache=str(cache), reward="partial")
    assert score == 0.0
    assert env.verdict.reason == "the run was tampered with: replaced: pytest.raises"


def test_verdict_counts_fixed_and_broken_tests():
    instance = instance_of(task(ROW))
    passing = dict.fromkeys((*instance.fail_to_pass, *instance.pass_to_pass), TestStatus.PASSED)
    assert decide(instance, passing).resolved
    one = decide(instance, passing | {instance.fail_to_pass[0]: TestStatus.FAILED})
    assert (one.resolved, one.partial, one.kept) == (False, 0.5, 1.0)
    broken = decide(instance, passing | {instance.pass_to_pass[0]: TestStatus.SKIPPED})
    assert (broken.resolved, broken.fixed, broken.partial) == (False, 1.0, 0.0)
    assert "tests that passed fail now" in broken.reason
    missing = decide(instance, {})
    assert set(missing.fail_to_pass.values()) == {TestStatus.ERROR}
    assert not decide(instance, passing, reason="the report was forged").resolved


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"reward": "half"}, "reward is 'half'"),
        ({"tools": ["bash"]}, "'bash' is not one of shell"),
        ({"eval_timeout": 0}, "eval_timeout is 0"),
        ({"image": "x"}, "image is 'x'"),
    ],
)
def test_wrong_settings_raise_config_error(config, message):
    with pytest.raises(ConfigError, match=message):
        SweEnv(**config)


async def test_reset_without_a_task_raises_env_error():
    with pytest.raises(EnvError, match="got no task"):
        await reset_env(SweEnv(), None)
