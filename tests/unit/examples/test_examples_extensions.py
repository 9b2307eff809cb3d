"""The extensions of ``examples/extensions``, named as a configuration names them: each does its whole work."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from support.chat.model_dirs import Family, renderer_for, write_model_dir
from turnwise.chat.formats import FORMATS, find_format, register_format
from turnwise.chat.renderer import load_renderer, save_format
from turnwise.envs.core import close_env, reset_env, schemas
from turnwise.envs.registration import make
from turnwise.envs.solution import play_solution
from turnwise.errors import ConfigError, RegistryError, RenderError
from turnwise.ext.checks.sandbox import check_sandbox
from turnwise.inference.config import RendererConfig
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import Renderer
from turnwise.plugins import load_extensions, load_object
from turnwise.rollout.config import RolloutConfig, SpecConfig
from turnwise.rollout.core import EpisodeSpec
from turnwise.rollout.runner import EpisodeRunner
from turnwise.sandboxes.config import SandboxConfig
from turnwise.sandboxes.local.boot import landlock
from turnwise.tasks import Task
from turnwise.tasks.mix import load_mix
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.weight_sync import open_transport
from turnwise.trajectory import Trajectory
from turnwise.types import ToolSchema, as_ids

FOLDER = Path(__file__).parents[3] / "examples" / "extensions"
FORMAT = f"{FOLDER}/chat_format.py:Brackets"
BACKEND = f"{FOLDER}/sandbox_backend.py:LoggedBackend"
TRANSPORT = f"{FOLDER}/weight_transport.py:FolderTransport"
pytestmark = pytest.mark.usefixtures("registries")
TEMPLATE = (FOLDER / "brackets.jinja").read_text()
LOOKUP = ToolSchema(
    "lookup", "", {"type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}}
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("brackets"), Family("brackets", source=TEMPLATE))


async def solved(renderer: Renderer, name: str, config: RolloutConfig) -> tuple[Trajectory, ScriptedClient]:
    """An episode of an environment's own solution, and the client that it was sampled from."""
    task: Task | None = load_mix(make(name).default_tasks, limit=1).tasks[0]
    env = make(name)
    await reset_env(env, task, seed=5)
    lines = [message for message, _ in await play_solution(env)]
    client = ScriptedClient(renderer, lines, tools=schemas(env))
    await close_env(env)
    with ThreadPoolExecutor(2) as executor:
        runner = EpisodeRunner(config, client, renderer, context_length=100_000, executor=executor)
        await runner.prepare()
        assert task is not None
        outcome = await runner.run(EpisodeSpec(task, f"0-val-{task.id}-e0", partition="val", env_seed=5))
        await runner.close()
    assert outcome.error is None
    return outcome.trajectories[0], client


@pytest.mark.parametrize("named", ["reference", "name", "auto"])
async def test_a_chat_format_records_an_episode_token_by_token(model: Path, named: str) -> None:
    if named == "reference":
        renderer = RendererConfig(format=FORMAT).load(model)
    else:
        register_format(load_object(FORMAT, "chat format"))
        renderer = RendererConfig(format="brackets" if named == "name" else "auto").load(model)
    description = renderer.describe()
    assert description["format"] == "brackets"
    assert {"answer", "one call", "two calls", "text and a call", "a call without arguments"} <= set(
        description["proof"]
    )
    config = RolloutConfig(env=SpecConfig(name="lookup"), max_turns=8)
    trajectory, client = await solved(renderer, "lookup", config)
    assert sum(value for _, _, value in trajectory.rewards) == 1.0
    # What each request sent is what was recorded before its turn: the sampled ids, never encoded again.
    turns = list(trajectory.turns())
    assert len(turns) == len(client.requests) >= 3
    for turn, request in zip(turns, client.requests, strict=True):
        prompt = itertools.chain(*(trajectory.segments[index].token_ids for index in turn.path))
        assert np.array_equal(request.prompt, list(prompt))
    assert "[[" in renderer.decode(turns[0].sampled.token_ids)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('[[lookup key="a b" n=7]]', [("lookup", {"key": "a b", "n": 7}, None)]),
        ('[[lookup key="]]"]][[lookup]]', [("lookup", {"key": "]]"}, None), ("lookup", {}, None)]),
        ("[[lookup key=a]]", [("lookup", {}, "the value of 'key' is not JSON")]),
        ('[[lookup key="a" and more]]', [("lookup", {}, "'and more' is no argument")]),
        ('[[lookup key="a"', [("lookup", {}, "the call was not closed with ]]")]),
        ("a list [[1, 2], [3]]", []),
    ],
)
def test_calls_in_texts_are_parsed(model: Path, text: str, calls: list[tuple[str, dict[str, Any], Any]]) -> None:
    renderer = load_renderer(model, format=FORMAT)
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(f"{text}<|im_end|>", add_special_tokens=False).ids
    tool_calls = renderer.parse(as_ids(ids), as_ids([]), [LOOKUP]).get("tool_calls") or []
    assert [(call.name, call.arguments) for call in tool_calls] == [(name, arguments) for name, arguments, _ in calls]
    for call, (_, _, error) in zip(tool_calls, calls, strict=True):
        assert (call.error is None) == (error is None)
        assert error is None or error in str(call.error)


def test_checkpoint_names_its_format_and_missing_parts_raise(model: Path, tmp_path: Path) -> None:
    copied = write_model_dir(tmp_path, Family("brackets", source=TEMPLATE))
    save_format(load_renderer(model, format=FORMAT), copied)
    assert load_renderer(copied).describe()["format"] == "brackets"
    del FORMATS["brackets"]
    with pytest.raises(RenderError, match=r"format 'brackets' .* TURNWISE_EXTERNAL_MODULES"):
        load_renderer(copied)


def test_a_format_is_an_entry_point(tmp_path: Path, installed: Callable[[str, str], None]) -> None:
    (tmp_path / "ext_brackets.py").write_text((FOLDER / "chat_format.py").read_text())
    installed("ext_brackets", "ext_brackets")
    assert load_extensions() == ["ext_brackets"]
    assert find_format("brackets").__module__ == "ext_brackets"
    with pytest.raises(ConfigError, match=r"'brackets' is taken by ext_brackets:Brackets; .* needs another"):
        find_format(FORMAT)
    with pytest.raises(RegistryError, match=r"'bracket' is unknown; did you mean 'brackets'\?; allowed: auto, hermes"):
        find_format("bracket")
    with pytest.raises(RegistryError, match="must derive from"):
        find_format("ext_brackets:ToolCall")


ISOLATION = "landlock" if landlock.version() else "plain"
# A few of each kind; the whole contract is in test_the_whole_contract.
QUICK = (
    "exec: exit",
    "exec: streams",
    "spawn: streams",
    "files: round",
    "trees: download",
    "life: fork",
    "life: expose",
)


def logged(log: Path) -> SandboxConfig:
    return SandboxConfig(name=BACKEND, config={"log": str(log), "isolation": ISOLATION, "unsafe": ISOLATION == "plain"})


@pytest.mark.long
async def test_a_sandbox_backend_keeps_the_contract_and_logs_an_episode(tmp_path: Path) -> None:
    report = await check_sandbox(logged(tmp_path / "checked.jsonl"), only=QUICK, attacks=False)
    report.raise_for_failures()
    assert len(report.outcomes) >= len(QUICK)
    log = tmp_path / "episode.jsonl"
    config = RolloutConfig(env=SpecConfig(name="terminal", config={"twins": False}), sandbox=logged(log))
    task = Task("csv-merge", "", {"folder": "shipped:csv-merge"})
    client = ScriptedClient(renderer_for("qwen3"), ["Nothing."])
    with ThreadPoolExecutor(2) as executor:
        runner = EpisodeRunner(config, client, renderer_for("qwen3"), context_length=100_000, executor=executor)
        await runner.prepare()
        outcome = await runner.run(EpisodeSpec(task, "0-val-a-e0", partition="val", env_seed=5))
        await runner.close()
    assert outcome.error is None
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert any("bash" in str(record["command"]) and record["exit_code"] is not None for record in records)


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_the_whole_contract(tmp_path: Path) -> None:
    report = await check_sandbox(logged(tmp_path / "log.jsonl"))
    report.raise_for_failures()


def test_a_weight_transport_is_checked_with_the_configuration(tmp_path: Path) -> None:
    def policy(transport: Any) -> PolicyConfig:
        return PolicyConfig.model_validate({"model": {"path": tmp_path}, "weight_transport": transport})

    configured = policy({"name": TRANSPORT, "config": {"directory": str(tmp_path), "keep": 3}})
    opened = open_transport(configured.weight_transport)
    assert [path.name.startswith("weights-") for path in tmp_path.iterdir()] == [True]
    opened.close()
    assert list(tmp_path.iterdir()) == []
    # The module registered its class, too.
    assert policy({"name": "folder", "config": {"directory": str(tmp_path)}}).weight_transport.name == "folder"
    for transport, message in (
        ("shared", r"weight_transport\.name is 'shared'; did you mean 'shared_memory'\?"),
        ({"name": TRANSPORT}, r"directory"),
        ({"name": TRANSPORT, "config": {"directory": str(tmp_path), "kept": 1}}, r"weight_transport\.config.*kept"),
        (f"{FOLDER}/chat_format.py:Brackets", "must derive from turnwise.trainer.weight_sync.WeightTransport"),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            policy(transport)
