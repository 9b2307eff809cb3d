"""What can be wrong with a black box is told before anything is started, and what a program is given is all it gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.agents.blackbox_episodes import CHAT_LOOP, LINES, running, spec
from turnwise.agents.registry import make_agent
from turnwise.envs.basic.lookup import LookupEnv
from turnwise.envs.core import ResetResult
from turnwise.errors import AgentError, ConfigError, RegistryError
from turnwise.ext.programs import BlackBoxAgent, Recipe, recipe_of
from turnwise.ext.programs.config import read_config, resolve_recipe
from turnwise.ext.programs.workdir import Workdir, check_arguments, fill, observation_values
from turnwise.rollout.config import NamedConfig, RolloutConfig, SpecConfig
from turnwise.rollout.preflight import check_env_and_agent
from turnwise.tasks import Task


class Given(LookupEnv):
    """Says where the program works, and what it finds there."""

    def reset(self, task: Task | None = None, *, seed: int | None = None) -> ResetResult:
        observation, info = super().reset(task, seed=seed)  # type: ignore[misc]
        assert task is not None
        return observation, {**info, "workspace": task.data["folder"], "files": {"given.txt": "from the environment"}}


MINE = Recipe(command=("sh", "-c", "true"), dialect="openai")
OTHER = 3


@pytest.mark.parametrize(
    ("config", "error", "problem"),
    [
        ({}, AgentError, "'command' is missing"),
        ({"command": "no-such-program {prompt}"}, AgentError, "'no-such-program' cannot be started: it is not on PATH"),
        ({"command": "/nowhere/x"}, AgentError, "it does not exist or is not executable"),
        ({"command": "sh", "env": {"PATH": "/nowhere"}}, AgentError, "not on PATH"),
        ({"command": "python3 -u no.py {prompt}"}, AgentError, "runs 'no.py', and .*/no.py is no file: give its path"),
        ({"command": "sh -c {promt}"}, AgentError, "no placeholder {promt}; did you mean 'prompt'"),
        ({"command": "sh", "comand": "x"}, AgentError, "comand: no such key; did you mean 'command'?"),
        ({"command": "sh", "timeout": -1}, AgentError, "timeout: .*greater than 0, not -1"),
        ({"command": "sh", "dialect": "gemini"}, AgentError, "dialect: .*not 'gemini'"),
        ({"command": "sh", "result": "file"}, AgentError, "result is 'file': write message, stdout"),
        ({"command": "sh", "workspace": "/nowhere"}, AgentError, "workspace is '/nowhere'"),
        ({"command": "sh", "pass_env": ["NO_SUCH_VARIABLE"]}, AgentError, "pass_env names NO_SUCH_VARIABLE"),
        ({"recipe": "claude"}, RegistryError, "did you mean 'claude_code'?"),
        ({"recipe": f"{__name__}:OTHER"}, ConfigError, "is a int, not a"),
        ({"recipe": f"{__name__}:NONE"}, ConfigError, "has no 'NONE'"),
    ],
)
def test_invalid_config_is_refused_at_once(config: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error, match=problem.replace("{", r"\{").replace("?", r"\?")):
        check_env_and_agent(
            RolloutConfig(env=SpecConfig(name="lookup"), agent=NamedConfig(name="blackbox", config=config))
        )


def test_script_is_looked_for_where_the_run_starts_unless_the_working_directory_has_it(monkeypatch, tmp_path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "agent.py").write_text("print('hello')\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "other.py").write_text("")
    monkeypatch.chdir(tmp_path / "start")

    def script(text: str, **config: Any) -> str:
        return resolve_recipe(read_config({"command": f"python3 -u {text} --config x.yaml", **config})).command[2]

    assert script("agent.py") == str(tmp_path / "start" / "agent.py")
    assert script("other.py", workspace=tmp_path / "folder") == "other.py"
    assert script("third.py", files={"third.py": ""}) == "third.py"
    assert script("{work}/fourth.py") == "{work}/fourth.py"
    assert script("in_the_image.py", sandbox=True) == "in_the_image.py"
    mounts = make_agent("blackbox", command="python3 agent.py", sandbox=True).sandbox_mounts()
    assert str(tmp_path / "start" / "agent.py") in [mount.target for mount in mounts]


def test_recipes_by_name_by_reference_and_as_data() -> None:
    for recipe in (MINE, f"{__name__}:MINE", {"command": ["sh"]}):
        assert isinstance(make_agent("blackbox", recipe=recipe), BlackBoxAgent)
    for name in ("claude_code", "codex", "mini_swe_agent", "opencode"):
        shipped = recipe_of(name)
        assert shipped.command
        values = dict.fromkeys(("home", "model", "openai_base_url", "api_key", "mcp_url", "context_length"), 'x"y')
        for path, text in {**shipped.files, **shipped.tool_files}.items():
            if path.endswith(".json"):
                quiet = {**values, "model": "m", "context_length": "7"}
                assert json.loads(fill(text, quiet)), path


def test_placeholders() -> None:
    values = {"prompt": 'say "hi"\n', "home": "/h"}
    assert fill("{home}/x {prompt!j} {unknown} {} {{home}}", values) == '/h/x "say \\"hi\\"\\n" {unknown} {} {/h}'
    observed = observation_values([{"role": "system", "content": "S"}, {"role": "user", "content": "a\0\ud800"}])
    assert observed == {"system": "S", "user": "a\ufffd?", "task": "S\n\na\ufffd?"}
    with pytest.raises(AgentError, match="prompt_file"):
        check_arguments(["x", "y" * 200_000])


def test_files_stay_below_the_folders_of_the_program(tmp_path: Path) -> None:
    workspace = tmp_path / "given"
    workspace.mkdir()
    (workspace / "seed.txt").write_text("seed")
    workdir = Workdir.make(tmp_path, workspace, None)
    assert (workdir.work / "seed.txt").read_text() == "seed"
    workdir.write({"a/b.txt": "x", f"{workdir.home}/c": "y"})
    assert (workdir.work / "a" / "b.txt").read_text() == "x"
    for path in ("../../escaped", "/etc/escaped"):
        with pytest.raises(AgentError, match="not below the program's own folders"):
            workdir.write({path: "x"})
    (workdir.work / "a").chmod(0)
    workdir.remove()
    assert not workdir.root.exists()
    with pytest.raises(AgentError, match="which is not a folder"):
        Workdir.make(tmp_path, None, str(tmp_path / "gone"))


SHOW = f"""
import json, os, sys, subprocess
with open({{out!r}}, "w") as file:
    json.dump([dict(os.environ), os.getcwd(), sorted(os.listdir(".")), sorted(os.listdir(os.environ["HOME"]))], file)
sys.exit(subprocess.call([{sys.executable!r}, "-I", "-S", {CHAT_LOOP.split()[-1]!r}, "x"]))
"""


async def test_a_program_gets_its_own_folders_and_nothing_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "the secret")
    monkeypatch.setenv("WANTED", "yes")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-real")
    scratch, out = tmp_path / "scratch", tmp_path / "out.json"
    scratch.mkdir()
    agent = {
        "command": [sys.executable, "-c", SHOW.format(out=str(out))],
        "files": {"note.txt": "for {model}", "{home}/.rc": "x"},
        "env": {"WHERE": "{work}", "NAME": "{model}"},
        "pass_env": ["WANTED"],
        "scratch": str(scratch),
        "dialect": "openai",
        "model": "small",
    }
    async with running(LINES, agent) as runner:
        first = await runner.run(spec(0))
        env, cwd, work, home = json.loads(out.read_text())
        second = await runner.run(spec(1))
        repeated = json.loads(out.read_text())
    assert (first.error, second.error) == (None, None)
    assert "the secret" not in json.dumps(env)
    assert (env["WANTED"], env["WHERE"], env["NAME"], env["OPENAI_MODEL"]) == ("yes", cwd, "small", "small")
    assert env["OPENAI_API_KEY"] == "turnwise"
    assert not any(name.startswith("ANTHROPIC") for name in env)
    assert set(env) <= {
        *("PATH", "HOME", "TMPDIR", "LANG", "TERM", "NO_COLOR", "WANTED", "WHERE", "NAME", "LC_CTYPE"),
        *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_MODEL"),
        *("TURNWISE_MODEL", "TURNWISE_TOOLS_URL", "TURNWISE_MCP_URL", "TURNWISE_PROGRAM"),
    }
    assert (work, home) == (["note.txt"], [".rc"])
    # Each episode has its own, and none is left.
    assert repeated[1] != cwd
    assert list(scratch.iterdir()) == []


async def test_folders_of_failed_episodes_stay_where_that_is_wanted(tmp_path: Path) -> None:
    for keep, fails, expected in (("failed", True, 1), ("failed", False, 0), ("always", False, 1)):
        scratch = tmp_path / f"{keep}-{fails}"
        scratch.mkdir()
        agent = {"command": f"sh -c '{CHAT_LOOP} x; exit {int(fails)}'", "keep": keep, "scratch": str(scratch)}
        async with running(LINES, agent) as runner:
            await runner.run(spec())
        assert len(list(scratch.glob("*/stdout"))) == expected


async def test_the_environment_may_give_the_folder_and_files(tmp_path: Path) -> None:
    agent = {"command": f"sh -c '{CHAT_LOOP} x > said.txt; cp given.txt copy.txt'"}
    async with running(LINES, agent, env=f"{__name__}:Given") as runner:
        outcome = await runner.run(spec(task=Task("t", "go", {"folder": str(tmp_path)})))
    assert outcome.error is None
    assert (tmp_path / "copy.txt").read_text() == "from the environment"
    assert (tmp_path / "said.txt").exists()


async def test_secrets_of_this_process_are_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HANDED", "s3cret-value")
    agent = {"command": "sh -c 'echo $HANDED >&2; exit 2'", "pass_env": ["HANDED"]}
    async with running(LINES, agent) as runner:
        outcome = await runner.run(spec())
    assert "<HANDED>" in str(outcome.error)
    assert "s3cret-value" not in str(outcome.error)
