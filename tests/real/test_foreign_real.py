"""Environments of other frameworks: their own rewards for recorded actions, and training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openenv_servers
import pytest
from tokenizers import Tokenizer

from support.chat.toy_renderer import ToyRenderer
from support.envs import foreign_plays
from support.trainer.lookup_run import MODEL, build_model, environment, lines, shared, silent, train_config
from turnwise.envs.core import close_env, fork_env, reset_env, schemas, score_env, step_env
from turnwise.envs.registration import make
from turnwise.errors import ConfigError, EnvError
from turnwise.ext.frameworks import foreign
from turnwise.ext.frameworks.foreign import tasks
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.tasks import Task
from turnwise.trainer.train import run_train
from turnwise.types import ToolCall

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
PLAYS = ROOT / "tests" / "support" / "envs" / "foreign_plays.py"
INTERPRETERS = {
    "reasoning-gym": ROOT / ".venv-foreign-games/bin/python",
    "textarena": ROOT / ".venv-foreign-games/bin/python",
    "gem": ROOT / ".venv-foreign-gem/bin/python",
    "openenv": ROOT / ".venv-foreign-openenv/bin/python",
    "verifiers": ROOT / ".venv-foreign-verifiers/bin/python",
}
VERIFIERS = PLAYS.with_name("verifiers_envs")


def interpreter(framework: str) -> str:
    python = INTERPRETERS[framework]
    if not python.exists():
        pytest.skip(f"{framework} is not installed: make test-real installs it into {python.parents[1].name}")
    return str(python)


@pytest.fixture
def installed_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the interpreters of the games have is importable here, too, after all that is installed here."""
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for name in ("reasoning-gym", "gem"):
        folder = Path(interpreter(name)).parents[1] / "lib" / version / "site-packages"
        monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return


@pytest.fixture(params=["in process", "own python"])
def placement(request: pytest.FixtureRequest) -> str:
    if request.param == "in process":
        request.getfixturevalue("installed_here")
    return request.param


@pytest.fixture(scope="session")
def plays() -> dict[str, list[dict[str, Any]]]:
    games = {}
    for framework in ("reasoning-gym", "textarena", "gem"):
        done = subprocess.run(
            [interpreter(framework), str(PLAYS), framework], capture_output=True, check=True, timeout=300
        )
        games[framework] = json.loads(done.stdout)
    return games


async def played(name: str, actions: list[Any], task: Task, **config: Any) -> list[Any]:
    renderer = ToyRenderer()
    rollout = RolloutConfig(env=SpecConfig(name=name, config=config), max_turns=64)
    runner = EpisodeRunner(rollout, ScriptedClient(renderer, actions), renderer, context_length=1_000_000)
    outcome = await runner.run(EpisodeSpec(task, "g", env_seed=foreign_plays.SEED))
    assert outcome.error is None, outcome.error
    return outcome.trajectories


def config_of(framework: str, placement: str) -> dict[str, Any]:
    return {"python": interpreter(framework)} if placement == "own python" else {}


@pytest.mark.alike("foreign plays", "reasoning-gym")
async def test_reasoning_gym_families_score_as_the_framework_does(plays, placement) -> None:
    recorded = plays["reasoning-gym"]
    assert len({play["name"].partition("/")[0] for play in recorded}) >= 20
    assert sum(len(play["actions"]) for play in recorded) >= 50
    for play in recorded:
        family, _, index = play["name"].partition("/")
        task = Task("t", "", {"seed": foreign_plays.SEED, "size": 4, "index": int(index)})
        name = f"reasoning-gym:{family}"
        [trajectory] = await played(name, play["actions"], task, **config_of("reasoning-gym", placement))
        assert [reward for _, _, reward in trajectory.rewards] == play["rewards"], play["name"]
        env = make(name, system_prompt=None, **config_of("reasoning-gym", placement))
        messages, _ = await reset_env(env, task, seed=1)
        assert messages == [{"role": "user", "content": play["first"]}]
        await close_env(env)


@pytest.mark.alike("foreign plays", "reasoning-gym")
async def test_levels_are_those_of_its_curriculum() -> None:
    config = {"python": interpreter("reasoning-gym")}
    env = make("reasoning-gym:spell_backward", system_prompt=None, **config)
    for level, length in enumerate((3, 5, 7, 9)):
        task = Task("t", "", {"seed": 1, "size": 4, "index": 2, "level": level})
        [message], _ = await reset_env(env, task, seed=1)
        assert len(message["content"].rpartition(" ")[2]) == length
    with pytest.raises(EnvError, match="spell_backward has no level 5; it has 0 to 4"):
        await reset_env(env, Task("t", "", {"level": 5}), seed=1)
    await close_env(env)


@pytest.mark.alike("foreign plays", "textarena")
async def test_games_of_textarena_end_as_they_do_there(plays, placement) -> None:
    recorded = plays["textarena"]
    assert len(recorded) >= 5
    assert sum(len(play["actions"]) for play in recorded) >= 50
    for play in recorded:
        name, config = f"textarena:{play['name']}", config_of("textarena", placement)
        env = make(name, **config)
        messages, info = await reset_env(env, None, seed=foreign_plays.SEED)
        assert messages == [{"role": "user", "content": play["first"].lstrip("\n")}]
        players = info.get("agents", ["main"])
        earned = dict.fromkeys(players, 0.0)
        for action in play["actions"]:
            actor = info.get("turn", "main")
            result = await step_env(env, {"role": "assistant", "content": action})
            earned[actor] += result.reward
            for player, parts in result.info.get("agent_rewards", {}).items():
                earned[player] += sum(parts.values())
            info = result.info
        assert result.terminated
        assert list(earned.values()) == play["rewards"], play["name"]
        await close_env(env)


@pytest.mark.alike("foreign plays", "textarena")
async def test_a_game_of_two_is_played_by_two_sessions(plays, placement) -> None:
    [recorded] = [play for play in plays["textarena"] if play["name"] == "TicTacToe-v0"]
    moves = {"player/0": recorded["actions"][::2], "player/1": recorded["actions"][1::2]}
    renderer, moved = ToyRenderer(), dict.fromkeys(moves, 0)

    def script(request):
        name = "player/0" if "You are Player 0" in request.text else "player/1"
        moved[name] += 1
        return moves[name][moved[name] - 1]

    spec = SpecConfig(name="textarena:TicTacToe-v0", config=config_of("textarena", placement))
    config = RolloutConfig(env=spec, agent=NamedConfig(name="turns"))
    runner = EpisodeRunner(config, ScriptedClient(renderer, script), renderer, context_length=100_000)
    outcome = await runner.run(EpisodeSpec(Task("t", ""), "g", env_seed=foreign_plays.SEED))
    assert outcome.error is None
    assert {trajectory.agent: trajectory.reward for trajectory in outcome.trajectories} == {
        "player/0": 1.0,
        "player/1": -1.0,
    }


@pytest.mark.alike("foreign plays", "gem")
async def test_environments_of_gem_reward_as_they_do_there(plays, placement) -> None:
    recorded = plays["gem"]
    assert len(recorded) >= 3
    for play in recorded:
        name, config = f"gem:{play['name']}", config_of("gem", placement)
        [trajectory] = await played(name, play["actions"], Task("t", ""), **config)
        rewards = [reward for _, _, reward in trajectory.rewards]
        # The runner notes no rewards of nothing.
        assert rewards == [reward for reward in play["rewards"] if reward], play["name"]
        assert sum(rewards) == sum(play["rewards"])


def openenv_config(app: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> tuple[str, dict[str, Any]]:
    monkeypatch.setenv("PYTHONPATH", str(PLAYS.parent))
    return f"openenv:openenv_apps:{app}", {"python": interpreter("openenv"), **more}


OPENENV_CLIENT = """
import asyncio, json, sys
import uvicorn, socket, importlib
from openenv.core.generic_client import GenericEnvClient
async def main(app, seed, actions):
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(getattr(importlib.import_module("openenv_apps"), app), log_level="error"))
    serving = asyncio.ensure_future(server.serve(sockets=[bound]))
    rewards = []
    async with GenericEnvClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}") as client:
        await client.reset(seed=seed)
        for action in actions:
            result = await client.step(action)
            rewards.append(result.reward)
            if result.done:
                break
    server.should_exit = True
    await serving
    print(json.dumps(rewards))
asyncio.run(main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])))
"""


def openenv_rewards(app: str, actions: list[dict[str, Any]]) -> list[float]:
    """Return what OpenEnv's own client gets."""
    command = [interpreter("openenv"), "-c", OPENENV_CLIENT, app, str(foreign_plays.SEED), json.dumps(actions)]
    environment = {**os.environ, "PYTHONPATH": str(PLAYS.parent)}
    done = subprocess.run(command, capture_output=True, check=True, timeout=120, env=environment)
    rewards: list[float] = json.loads(done.stdout)
    return rewards


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", name, arguments)]}


@pytest.mark.alike("foreign plays", "openenv")
async def test_openenv_by_messages(monkeypatch) -> None:
    name, config = openenv_config("guessing", monkeypatch)
    guesses = ["4", "6", "2", "1"]
    [trajectory] = await played(name, guesses, Task("t", ""), **config)
    expected = openenv_rewards("guessing", [{"message": guess} for guess in guesses])
    assert [reward for _, _, reward in trajectory.rewards] == expected
    env = make(name, **config, kwargs={"reset": {"most": 3}})
    messages, _ = await reset_env(env, None, seed=1)
    assert messages[-1]["content"] == "guess from 1 to 3"
    with pytest.raises(EnvError, match="cannot fork"):
        await fork_env(env)
    await close_env(env)


@pytest.mark.alike("foreign plays", "openenv")
async def test_openenv_by_an_action_of_several_fields(monkeypatch) -> None:
    name, config = openenv_config("walking", monkeypatch)
    [trajectory] = await played(
        name, [call("act", x=1, y=2), call("act", x="wide"), call("act", x=2)], Task("t", ""), **config
    )
    assert [reward for _, _, reward in trajectory.rewards] == openenv_rewards("walking", [{"x": 1, "y": 2}, {"x": 2}])
    env = make(name, **config)
    await reset_env(env, None, seed=1)
    [schema] = schemas(env)
    assert (schema.name, schema.parameters["required"]) == ("act", ["x"])
    answered = await step_env(env, call("act", x="wide"))
    assert "invalid_arguments" in answered.observation[0]["content"]
    assert json.loads((await step_env(env, call("act", x=3))).observation[0]["content"]) == {"x": 3, "y": 0}
    await close_env(env)


@pytest.mark.alike("foreign plays", "openenv")
async def test_openenv_by_mcp_tools(monkeypatch) -> None:
    name, config = openenv_config("counting", monkeypatch)
    env = make(name, **config)
    await reset_env(env, None, seed=1)
    [schema] = schemas(env)
    assert (schema.name, schema.description, sorted(schema.parameters["properties"])) == (
        "add",
        "Add two numbers.",
        ["a", "b"],
    )
    result = await step_env(env, call("add", a=2, b=40))
    assert result.observation[0]["role"] == "tool"
    assert result.observation[0]["content"] == "42"
    wrong = await step_env(env, call("subtract", a=1))
    assert "there is no tool 'subtract'; there are add" in wrong.observation[0]["content"]
    await close_env(env)


async def test_openenv_without_a_reward_is_an_error(monkeypatch) -> None:
    name, config = openenv_config("unpaid", monkeypatch)
    env = make(name, **config)
    await reset_env(env, None, seed=1)
    with pytest.raises(EnvError, match="the server gave no reward in all of it"):
        await step_env(env, {"role": "assistant", "content": "1"})
    await close_env(env)


def test_openenv_is_not_imported_by_the_check() -> None:
    code = (
        "import sys, inside, inside.core; "
        "sys.modules.update({'turnwise_foreign': inside, 'turnwise_foreign.core': inside.core}); "
        f"sys.path.append({str(Path(openenv_servers.__file__).parent)!r}); import driver; assert driver.names() == []; "
        "assert driver.load('http://127.0.0.1:9', {}, None).is_url; assert 'openenv.core' not in sys.modules"
    )
    folder = Path(foreign.__file__).parent
    subprocess.run([interpreter("openenv"), "-c", code], cwd=folder, check=True, timeout=120)


async def test_openenv_at_a_url_that_no_server_answers_at() -> None:
    env = make("openenv:http://127.0.0.1:9", python=interpreter("openenv"))
    with pytest.raises(EnvError, match=r"127\.0\.0\.1:9/schema does not answer as an OpenEnv server"):
        await reset_env(env, None, seed=1)


def said(message: dict[str, Any]) -> Any:
    """Return a recorded message for a scripted client or a step."""
    calls = [
        ToolCall(tool_call["id"], tool_call["name"], tool_call["arguments"])
        for tool_call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}


def asked(wire: dict[str, Any]) -> dict[str, Any]:
    """Return a message that verifiers asked its model with, as an observation says it."""
    message = {key: wire[key] for key in ("role", "tool_call_id", "name") if key in wire}
    return {**message, "content": wire.get("content") or ""}


@pytest.fixture(scope="session")
def verifiers_plays() -> list[dict[str, Any]]:
    command = [interpreter("verifiers"), str(PLAYS.with_name("verifiers_plays.py"))]
    done = subprocess.run(command, capture_output=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr.decode()
    games: list[dict[str, Any]] = json.loads(done.stdout)
    return games


# Its interpreter takes seconds to import it, and each environment is tried in one of its own.
@pytest.mark.timeout(600)
@pytest.mark.alike("foreign plays", "verifiers")
async def test_environments_of_verifiers_ask_and_reward_as_they_do_there(verifiers_plays) -> None:
    python, recorded = interpreter("verifiers"), verifiers_plays
    assert len({play["name"] for play in recorded}) >= 3
    assert sum(len(play["messages"]) for play in recorded) >= 50
    names = {play["name"]: f"verifiers:{VERIFIERS / play['name']}.py" for play in recorded}
    envs = {name: make(reference, python=python) for name, reference in names.items()}
    for play in recorded:
        env, row = envs[play["name"]], Task("t", "", {"task": play["row"]})
        seen, _ = await reset_env(env, row, seed=1)
        offered = [tool["function"] for tool in play["asked"][0]["tools"] or ()]
        assert [schema.name for schema in schemas(env)] == [tool["name"] for tool in offered]
        assert [schema.parameters for schema in schemas(env)] == [tool["parameters"] for tool in offered]
        conversation = list(seen)
        for number, message in enumerate(play["messages"]):
            assert [asked(message) for message in play["asked"][number]["messages"]] == [
                {
                    "role": message["role"],
                    **{key: message[key] for key in ("tool_call_id", "name", "content") if key in message},
                }
                for message in conversation
            ]
            result = await step_env(env, said(message))
            conversation += [said(message), *result.observation]
        assert (result.reward, result.info["rewards"]) == (play["reward"], play["rewards"])
        assert result.info["notes"] == {"stop": play["stop"]}
        assert (result.terminated, result.truncated) == (not play["truncated"], play["truncated"])
        assert result.info.get("metrics", {}) == play["metrics"]
        await close_env(env)
    # The same by the runner, and an episode that its limit ends.
    guessing = next(play for play in recorded if play["name"] == "vf_guess" and play["rewards"]["found"])
    [trajectory] = await played(
        names["vf_guess"],
        [message["content"] for message in guessing["messages"]],
        Task("t", "", {"task": guessing["row"]}),
        python=python,
    )
    assert sum(reward for _, _, reward in trajectory.rewards) == guessing["reward"]
    env = envs["vf_guess"]
    await reset_env(env, None, seed=3)
    await step_env(env, {"role": "assistant", "content": "99"})
    assert await score_env(env, None) == {"patience": 0.0625, "found": 0.0}
    await close_env(env)


@pytest.mark.timeout(600)
@pytest.mark.alike("foreign plays", "verifiers")
async def test_dead_tool_server_of_verifiers_fails_no_later_episode() -> None:
    env = make(f"verifiers:{VERIFIERS / 'vf_store.py'}", python=interpreter("verifiers"))
    await reset_env(env, None, seed=0)
    with pytest.raises(EnvError, match="HarnessError"):
        await step_env(env, _call("shelf_take", name="shelf"))
    await reset_env(env, None, seed=0)
    await step_env(env, _call("shelf_take", name="apple"))
    assert (await step_env(env, _call("shelf_pay"))).reward == 3.0
    await close_env(env)


def _call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("c", tool, arguments)]}


@pytest.mark.timeout(600)
@pytest.mark.alike("foreign plays", "verifiers")
def test_rows_of_a_taskset_of_verifiers_are_tasks() -> None:
    source = {"env": f"verifiers:{VERIFIERS / 'vf_sums.py'}", "python": interpreter("verifiers")}
    kwargs = {"taskset": {"size": 3}}
    rows = list(tasks(**source, split="test", kwargs=kwargs))
    assert [row.id.rpartition("/")[2] for row in rows] == [f"vf_sums.py-test-{number}" for number in range(3)]
    sums = [[int(word) for word in row.prompt.split() if word.isdigit()][-2:] for row in rows]
    assert [sum(numbers) for numbers in sums] == [row.data["task"]["answer"] for row in rows]


@pytest.mark.alike("foreign plays", "verifiers")
def test_an_environment_of_verifiers_with_two_free_seats_cannot_be_made(monkeypatch) -> None:
    monkeypatch.chdir(VERIFIERS)
    with pytest.raises(ConfigError, match=r"2 of its seats \(assistant, user\) have no client"):
        make("verifiers:user_sim+vf_sums.py", python=interpreter("verifiers"))


@pytest.mark.timeout(600)
def test_the_example_of_a_curriculum_takes_every_level(tmp_path) -> None:
    main = str(ROOT / "examples/curriculum/main.py")
    # As where the package examples/games is installed.
    code = f"import runpy; from support.envs import unshipped; runpy.run_path({main!r}, run_name='__main__')"
    options = ("--python", interpreter("reasoning-gym"), "--runs", str(tmp_path), "--name", "smoke", "--smoke")
    done = subprocess.run(
        [sys.executable, "-c", code, *options, "batch.groups=4", "rollout.group_size=2"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "level 3" in done.stdout
    [step] = [line for line in lines(tmp_path / "smoke" / "metrics.jsonl") if line["kind"] == "train"]
    assert {f"curriculum/rate/{level}" for level in range(4)} <= set(step)
    # Of tokens of several letters none would be the same forward and backward.
    tokenizer = Tokenizer.from_file(str(tmp_path / "smoke" / "initial" / "tokenizer.json"))
    row = json.loads((tmp_path / "smoke" / "demonstrations.jsonl").read_text().splitlines()[3])
    question, answer = (tokenizer.encode(message["content"]).tokens for message in row["messages"])
    word, spelled = row["messages"][0]["content"][-9:], row["messages"][1]["content"][len("<answer>") :][:9]
    assert sorted(spelled) == sorted(word)
    assert question[-9:] == list(word)
    assert list(spelled) in [answer[at : at + 9] for at in range(len(answer))]


@pytest.mark.timeout(600)
@pytest.mark.alike("foreign trainings")
@pytest.mark.parametrize(
    "name",
    [
        *("reasoning-gym:chain_sum", "textarena:GuessTheNumber-v0", "gem:game:GuessTheNumber-v0-easy", "openenv"),
        pytest.param(f"verifiers:{VERIFIERS / 'vf_guess.py'}", id="verifiers"),
    ],
)
def test_a_step_of_training(name, tmp_path, tmp_path_factory, monkeypatch) -> None:
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    env = {"name": name, "config": {}}
    if name == "openenv":
        env["name"], env["config"] = openenv_config("guessing", monkeypatch)
    else:
        env["config"]["python"] = interpreter(name.partition(":")[0])
    source = f"turnwise.ext.frameworks.foreign.core:tasks?env={env['name']}&size=4"
    if name.startswith("verifiers"):
        # A task of each: a seed chooses its row.
        rows = [
            {"id": reference, "prompt": "", "env": {**env, "name": f"verifiers:{VERIFIERS / reference}.py"}}
            for reference in ("vf_guess", "vf_sums", "vf_store")
        ]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = str(tmp_path / "rows.jsonl")
    rollout = {"env": env, "group_size": 2, "max_turns": 2, "max_tokens_per_turn": 8}
    changes = {"batch": {"groups": 3}} if name.startswith("verifiers") else {}
    run_train(train_config(model, tmp_path, steps=1, tasks=source, rollout=rollout, **changes), console=silent())
    [step] = [line for line in lines(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert step["step"] == 1
    if name.startswith("verifiers"):
        assert step["batch/failed"] == 0.0
        named = {key.rpartition("/")[2] for key in step if key.startswith("reward/by_name/")}
        assert {"brief", "correct", "found", "paid", "patience"} <= named


def test_tasks_are_its_own_questions() -> None:
    first, second = list(tasks("reasoning-gym:chain_sum", size=2, seed=5))
    assert (first.data, second.data) == ({"seed": 5, "size": 2, "index": 0}, {"seed": 5, "size": 2, "index": 1})
