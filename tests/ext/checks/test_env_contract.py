"""Every environment that ships keeps the contract."""

import pytest
import tool_calls_env
import trail_env

from support.envs.shipped import SHIPPED
from turnwise.envs import EnvSpec
from turnwise.envs.basic.lookup import tasks
from turnwise.ext.checks.environment import check_env
from turnwise.ext.environments import calculator, math
from turnwise.tasks import Task


def right_length(task, final):
    return float(final is not None and len(str(final.get("content"))) > task.data["least"])


CASES = {
    "calculator": [
        (EnvSpec("calculator"), None),
        (EnvSpec("calculator", {"operations": 4, "largest": 500}), None),
        (EnvSpec("calculator"), next(calculator.tasks(1, split="test"))),
    ],
    # These take sandboxes: see tests/real/test_code_env_real.py, and test_env_swe.py and test_env_terminal.py.
    "code": [],
    "swe": [],
    "terminal": [],
    "guess_number": [
        (EnvSpec("guess_number"), None),
        (EnvSpec("guess_number", {"low": -5, "high": 5, "guesses": 1}), Task("a", "", {"number": -5})),
    ],
    "math": [
        (EnvSpec("math"), next(math.tasks(1, split="test"))),
        (EnvSpec("math", {"instructions": None}), Task("a", "What is $x$?", {"answer": "\\sqrt{2}"})),
    ],
    "lookup": [(EnvSpec("lookup"), None), (EnvSpec("lookup"), next(tasks(1, split="test")))],
    "gymnasium": [
        (EnvSpec("gymnasium", {"env_id": env_id}), None)
        for env_id in ("FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CartPole-v1")
    ],
    "gymnasium_tools": [(EnvSpec("gymnasium_tools", {"env_id": "FrozenLake-v1"}), None)],
    "task": [(EnvSpec("task"), Task("a", "say something"))],
    "tool": [(EnvSpec("tool", {"scorer": f"{__name__}:right_length"}), Task("a", "say much", {"least": 30}))],
    "single_turn": [
        (EnvSpec("single_turn", {"scorer": f"{__name__}:right_length"}), Task("a", "say much", {"least": 3}))
    ],
}

OF_EXAMPLES = [
    (EnvSpec("nim"), None),
    (EnvSpec("nim", {"opponent": "perfect"}), None),
    (EnvSpec("picture"), None),
    (EnvSpec("tool_calls"), None),
    (EnvSpec("tool_calls"), next(tool_calls_env.tasks(1, split="test"))),
    (EnvSpec("trail"), None),
    (EnvSpec("trail", {"steps": 30, "words": 0}), next(trail_env.tasks(1, split="test"))),
]


def test_every_shipped_environment_is_checked():
    assert sorted(CASES) == SHIPPED


@pytest.mark.parametrize("seeds", [(0,), pytest.param((1, 2), marks=pytest.mark.long)])
@pytest.mark.parametrize(("spec", "task"), [*(case for cases in CASES.values() for case in cases), *OF_EXAMPLES])
async def test_shipped_environment_passes_the_checker(spec, task, seeds):
    report = await check_env(spec, task=task, seeds=seeds)
    assert report.ok, str(report)
