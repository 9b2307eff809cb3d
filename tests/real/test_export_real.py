"""Exported environments under the real OpenEnv, Inspect and verifiers, and installed for Gymnasium by pip."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from support.envs.exported import NAMES, SEED, Play, plays_of
from turnwise.envs.core import close_env, reset_env, step_env
from turnwise.envs.registration import make

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "tests" / "support" / "envs" / "openenv_client.py"
EVALUATION = CLIENT.with_name("inspect_eval.py")
INSPECT = ROOT / ".venv-frameworks" / "bin" / "python"
OPENENV = ROOT / ".venv-foreign-openenv" / "bin" / "python"
VERIFIERS = ROOT / ".venv-foreign-verifiers" / "bin" / "python"
HERE = [str(ROOT), sysconfig.get_path("purelib")]
GYMNASIUM = """
import json, sys
import gymnasium
env = gymnasium.make("turnwise_calculator:turnwise_calculator/calculator-v0")
found = []
for task, actions in json.loads(sys.argv[2]):
    env.reset(seed=int(sys.argv[1]), options={"task": task})
    found.append([env.step(action)[1] for action in actions])
env.close()
print(json.dumps(found))
"""


def openenv() -> str:
    if not OPENENV.exists():
        pytest.skip("OpenEnv is not installed: make test-real installs it into .venv-foreign-openenv")
    return str(OPENENV)


def run(*command: str, **variables: str) -> str:
    """Return what a program prints, with its errors where it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env={**os.environ, **variables}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def jobs_of(folder: Path, form: str) -> list[tuple[str, list[Play]]]:
    """Export the three environments: folders with the episodes to be played in them."""
    return [(str(folder / name), await plays_of(name, folder / name, form)) for name in NAMES]


def played_by(python: Path, script: Path, jobs: list[tuple[str, list[Play]]]) -> list[list]:
    """Return what a script prints of the episodes, run by another framework's interpreter."""
    if not python.exists():
        pytest.skip(f"{python} does not exist: make test-real installs it")
    plays_json = json.dumps([[folder, [[play.task, play.actions] for play in plays]] for folder, plays in jobs])
    recordings: list[list] = json.loads(run(str(python), str(script), str(SEED), plays_json, *HERE).splitlines()[-1])
    return recordings


@pytest.mark.alike("exports", "openenv")
def test_the_client_of_openenv_is_rewarded_as_here(tmp_path) -> None:
    jobs = asyncio.run(jobs_of(tmp_path, "openenv"))
    expected = [[play.rewards for play in plays] for _, plays in jobs]
    assert played_by(OPENENV, CLIENT, jobs) == expected


@pytest.mark.alike("exports", "inspect")
def test_inspect_scores_as_here(tmp_path) -> None:
    jobs = asyncio.run(jobs_of(tmp_path, "inspect"))
    expected = [[sum(play.rewards) for play in plays] for _, plays in jobs]
    assert played_by(INSPECT, EVALUATION, jobs) == expected


@pytest.mark.timeout(600)
@pytest.mark.alike("exports", "verifiers")
def test_verifiers_rewards_as_here(tmp_path) -> None:
    jobs = asyncio.run(jobs_of(tmp_path, "verifiers"))
    expected = [[sum(play.rewards) for play in plays] for _, plays in jobs]
    assert played_by(VERIFIERS, CLIENT.with_name("verifiers_eval.py"), jobs) == expected


@pytest.mark.alike("exports", "openenv")
def test_openenv_finds_the_folder_valid(tmp_path) -> None:
    asyncio.run(plays_of("calculator", tmp_path / "calculator", "openenv"))
    # The lock is what uv makes of the dependencies where it is deployed.
    (tmp_path / "calculator" / "uv.lock").write_text("version = 1\n")
    printed = run(str(Path(openenv()).with_name("openenv")), "validate", str(tmp_path / "calculator"))
    assert "[OK]" in printed


@pytest.mark.alike("exports", "openenv")
async def test_environment_exported_for_openenv_pays_the_same_rewards(tmp_path, monkeypatch) -> None:
    right, _ = await plays_of("guess_number", tmp_path / "guess_number", "openenv")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(tmp_path / "path")]))
    # What this interpreter has comes after what OpenEnv's has.
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(f"import sys\nsys.path += {HERE!r}\n")
    kwargs = {"observation_field": "text", "reset": {"task": right.task}}
    env = make("openenv:guess_number.server.app", python=openenv(), kwargs=kwargs)
    await reset_env(env, None, seed=SEED)
    rewards = [(await step_env(env, {"role": "assistant", "content": action["content"]})) for action in right.actions]
    assert [result.reward for result in rewards] == right.rewards
    assert rewards[-1].terminated
    await close_env(env)


@pytest.mark.alike("exports", "gymnasium")
def test_a_package_that_pip_installs_is_made_by_gymnasium(tmp_path) -> None:
    plays = asyncio.run(plays_of("calculator", tmp_path / "out", "gymnasium"))
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(sys.executable, *install, "--target", str(tmp_path / "site"), str(tmp_path / "out"))
    plays_json = json.dumps([[play.task, play.actions] for play in plays])
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    printed = run(sys.executable, "-c", GYMNASIUM, str(SEED), plays_json, PYTHONPATH=path)
    assert json.loads(printed) == [play.rewards for play in plays]
