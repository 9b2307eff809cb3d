"""Every environment that ships keeps the contract."""

import subprocess
import sys

import pytest

from turnwise.envs import EnvSpec, check_env
from turnwise.envs.lookup import tasks
from turnwise.tasks import Task


def right_length(task, final):
    return float(final is not None and len(str(final.get("content"))) > task.data["least"])


CASES = {
    "lookup": [(EnvSpec("lookup"), None), (EnvSpec("lookup"), next(tasks(1, split="test")))],
    "single_turn": [
        (EnvSpec("single_turn", {"scorer": f"{__name__}:right_length"}), Task("a", "say much", {"least": 3}))
    ],
}


def test_every_shipped_environment_is_checked():
    # In a process of its own: other tests register theirs.
    code = "from turnwise.envs import env_names; print(*env_names())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == sorted(CASES)


@pytest.mark.parametrize(("spec", "task"), [case for cases in CASES.values() for case in cases])
async def test_it_keeps_the_contract(spec, task):
    report = await check_env(spec, task=task, seeds=(0, 1, 2))
    assert report.ok, str(report)
