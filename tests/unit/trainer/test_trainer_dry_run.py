"""``turnwise train --dry-run``: everything that is wrong is found at once, and nothing is changed."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from support.rollout.custom_managers import EXAMPLE
from support.trainer.lookup_run import example
from turnwise.chat.renderer import save_format
from turnwise.cli import main
from turnwise.config import load_config
from turnwise.envs import ToolEnv
from turnwise.errors import CheckpointError, ConfigError
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.small_model import make_model
from turnwise.trainer.run import dry_run as module
from turnwise.trainer.run.checkpoint import CheckpointStore, TrainerState
from turnwise.trainer.run.directory import RunDirectory, config_digest, read_start
from turnwise.trainer.run.dry_run import DryRun, dry_run

NOTED = "support.sandboxes.noted_backend:NotedBackend"
EXAMPLES = Path(__file__).parents[3] / "examples"
GSM8K = {"question": "2 apples and 3 pears?", "answer": "<<2+3=5>>5\n#### 5"}


class Broken(ToolEnv):
    def reset(self, task=None, *, seed=None):
        raise ValueError("no database")


class Hanging(ToolEnv):
    async def reset(self, task=None, *, seed=None):
        await asyncio.Event().wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = list(asyncio.run(example("teacher").demonstrations(40, 0)))
    directory = tmp_path_factory.mktemp("dry-run") / "model"
    make_model(directory, rows, 0)
    return directory


def config(model: Path, runs: Path, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate({
        "name": "run",
        "runs": runs,
        "steps": 3,
        "tasks": "turnwise.envs.basic.lookup:tasks?n=20",
        "policies": {"main": {"model": {"path": model}}},
        "rollout": {"env": {"name": "lookup"}, "group_size": 4, "max_turns": 4},
        "batch": {"groups": 2},
        **changes,
    })  # fmt: skip


def by_name(report: DryRun) -> dict[str, str]:
    return {check.name: f"{check.outcome}: {check.finding}" for check in report.checks}


async def test_dry_run_of_a_valid_configuration_passes_and_writes_nothing(model: Path, tmp_path: Path) -> None:
    held_out = {"tasks": "turnwise.envs.basic.lookup:tasks?n=5&split=test", "samples": 2, "every": None}
    report = await dry_run(config(model, tmp_path / "runs", eval=held_out))
    assert report.ok
    checks = by_name(report)
    assert checks["run directory"] == f"ok: {tmp_path / 'runs' / 'run'}: a new run"
    assert "Qwen3ForCausalLM, context 512" in checks["model"]
    assert checks["inference"] == "ok: builtin, 1 server"
    assert checks["chat format"] == "ok: hermes"
    assert "20 tasks" in checks["tasks"]
    assert "5 tasks" in checks["held-out tasks"]
    assert "13 begun; the model may call team_of, manager_of; the longest prompt takes" in checks["episodes"]
    assert checks["agent"] == "ok: react"
    assert report.plan[0] == "3 steps of 2 tasks x 4 episodes = 8 episodes, 24 in all"
    assert "2 sampled and 1 greedy per held-out task" in "\n".join(report.plan)
    assert not (tmp_path / "runs").exists()


async def test_the_engines_of_all_policies_are_checked(model: Path, tmp_path: Path) -> None:
    away = {"engine": "vllm", "server": {"python": str(tmp_path / "python")}}
    checks = by_name(await dry_run(config(model, tmp_path / "runs", inference=away)))
    assert checks["inference"] == (
        f"failed: inference.server.python is {tmp_path / 'python'}, which cannot be executed: name the interpreter of "
        "an environment with vLLM"
    )

    def rollout(inference: dict[str, Any]) -> dict[str, Any]:
        frozen = {"judge": {"start": True, "inference": inference}}
        return {"env": {"name": "lookup"}, "group_size": 4, "frozen": frozen}

    checks = by_name(await dry_run(config(model, tmp_path / "runs", rollout=rollout({"replicas": 2}))))
    assert checks["inference"] == "ok: builtin, 1 server; judge: builtin, 2 servers"
    checks = by_name(await dry_run(config(model, tmp_path / "runs", rollout=rollout(away))))
    assert checks["inference"].startswith("failed: inference.server.python is")


async def test_initial_model_of_a_critic_is_checked(model: Path, tmp_path: Path) -> None:
    def judged(**critic: Any) -> TrainConfig:
        policies = {"main": {"model": {"path": model}, "critic": critic}}
        return config(model, tmp_path / "runs", policies=policies, algorithm={"advantage": "gae"})

    assert by_name(await dry_run(judged()))["critic"] == f"ok: {model}: a separate model"
    nowhere = by_name(await dry_run(judged(path=tmp_path / "nowhere")))
    assert nowhere["critic"].startswith(
        f"failed: policies.main.critic.path is {tmp_path / 'nowhere'}: there is no such"
    )


async def test_adapters_are_put_on_the_model_without_its_weights(model: Path, tmp_path: Path) -> None:
    def adapted(**lora: Any) -> TrainConfig:
        return config(model, tmp_path / "runs", policies={"main": {"model": {"path": model, "lora": lora}}})

    checks = by_name(await dry_run(adapted(rank=4, targets=["q_proj", "v_proj"])))
    assert re.fullmatch(r"ok: new, of rank 4 on \d+ matrices \(q_proj, v_proj\)", checks["adapters"])
    checks = by_name(await dry_run(adapted(targets=["q_proj", "v_prj"])))
    assert checks["adapters"].startswith("failed: model.lora.targets is ['q_proj', 'v_prj']: no linear layer's name")


async def test_base_model_of_an_adapter_is_checked(model: Path, tmp_path: Path) -> None:
    # As peft leaves it: without the settings of its model.
    folder = tmp_path / "adapter"
    folder.mkdir()
    adapter_settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(model)}
    (folder / "adapter_config.json").write_text(json.dumps(adapter_settings))
    checks = by_name(await dry_run(config(folder, tmp_path / "runs")))
    assert "Qwen3ForCausalLM, context 512" in checks["model"]
    (folder / "adapter_config.json").write_text(json.dumps({**adapter_settings, "base_model_name_or_path": "nowhere"}))
    checks = by_name(await dry_run(config(folder, tmp_path / "runs")))
    assert "which does not exist" in checks["model"]


async def test_dry_run_reports_all_errors_at_once(tmp_path: Path) -> None:
    wrong = config(
        tmp_path / "nowhere",
        tmp_path / "runs",
        tasks=str(tmp_path / "rows.jsonl"),
        eval={"tasks": "turnwise.envs.basic.lookup:tusks"},
        rollout={"env": {"name": "lookup"}, "agent": {"name": "reakt"}, "group_size": 4},
        inference={"device": "cuda:97"},
    )
    checks = by_name(await dry_run(wrong))
    assert f"failed: policies.main.model.path is {tmp_path / 'nowhere'}: there is no such folder" in checks["model"]
    assert checks["devices"].startswith("failed: ")
    assert "cuda:97" in checks["devices"]
    assert checks["chat format"] == "not run: wants a model"
    assert "failed" in checks["tasks"]
    assert "rows.jsonl: there is no such file" in checks["tasks"]
    assert "did you mean 'tasks'" in checks["held-out tasks"]
    assert checks["episodes"] == "not run: want tasks"
    assert "did you mean 'react'" in checks["agent"]


async def test_wrappers_and_group_reward_are_checked(model: Path, tmp_path: Path) -> None:
    limit = {"name": "turn_limit", "config": {"max_turns": 3}}

    async def checked(wrappers: list[Any], group_reward: Any) -> dict[str, str]:
        env = {"name": "lookup", "wrappers": wrappers}
        rollout = {"env": env, "group_size": 4, "max_turns": 4, "group_reward": group_reward}
        return by_name(await dry_run(config(model, tmp_path / "runs", rollout=rollout)))

    wrong = await checked([{"name": "turn_limits"}], "rank_bye")
    assert wrong["wrappers"].startswith("failed: there is no wrapper 'turn_limits'; did you mean 'turn_limit'")
    assert wrong["group reward"].startswith("failed: rollout.group_reward: there is no reward function 'rank_bye'")
    assert "did you mean 'rank_by'" in wrong["group reward"]
    right = await checked([limit], {"function": "rank_by", "arguments": {"metric": "turns"}})
    assert right["wrappers"] == "ok: turn_limit"
    assert right["group reward"] == "ok: rank_by"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "no config.json is in it"),
        ({"config.json": "{"}, "its config.json is not JSON"),
        ({"config.json": "[]"}, "holds no JSON object"),
        ({"config.json": "{}"}, "no *.safetensors is in it"),
    ],
)
async def test_directory_without_a_model_fails_the_check(tmp_path: Path, files: dict[str, str], words: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert words in by_name(await dry_run(config(tmp_path, tmp_path / "runs")))["model"]


async def test_failing_or_hanging_reset_fails_the_check(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    monkeypatch.setattr(module, "RESET_TIMEOUT", 0.05)
    for cls, words in ((Broken, "reset raised ValueError: no database"), (Hanging, "did not reset within 0.05 s")):
        rollout = {"env": {"name": f"{__name__}:{cls.__name__}"}, "group_size": 4}
        episodes = by_name(await dry_run(config(model, runs, rollout=rollout)))["episodes"]
        assert episodes.startswith("failed: ")
        assert words in episodes
    rollout = {"env": {"name": "lookup", "config": {"size": 3}}, "group_size": 4}
    assert "does not take {'size': 3}" in by_name(await dry_run(config(model, runs, rollout=rollout)))["episodes"]


async def test_prompt_that_fills_the_context_fails_the_check(model: Path, tmp_path: Path) -> None:
    rollout = {"env": {"name": "math"}, "group_size": 4}
    row = {**GSM8K, "question": "apples " * 600}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tasks = {"source": str(tmp_path / "rows.jsonl"), "map": "turnwise.ext.environments.math:row"}
    checks = by_name(await dry_run(config(model, tmp_path / "runs", rollout=rollout, tasks=tasks)))
    assert "of 512 tokens of the context, and no room is left to answer" in checks["episodes"]


async def test_an_earlier_run_is_seen_and_left_alone(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "run.json").write_text('{"config_digest": "another"}')
    files_before = sorted(tmp_path.rglob("*"))
    settings = config(model, tmp_path / "runs")
    assert "was trained with another configuration" in by_name(await dry_run(settings))["run directory"]
    assert "an earlier run there is removed" in by_name(await dry_run(settings, fresh=True))["run directory"]
    settings_inside = config(run, tmp_path / "runs")
    assert "that --fresh would remove" in by_name(await dry_run(settings_inside, fresh=True))["run directory"]
    assert sorted(tmp_path.rglob("*")) == files_before


async def test_resumed_run_with_another_chat_template_fails_the_check(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    shutil.copyfile(model / "chat_template.jinja", template)
    settings = config(model, tmp_path / "runs", renderer={"chat_template": template})
    home = RunDirectory(tmp_path / "runs" / "run")
    state = TrainerState(2, config_digest=config_digest(settings))
    renderer = settings.renderer.load(model)
    store = CheckpointStore(home.path / "checkpoints")
    checkpoint = store.save(state, lambda folder: save_format(renderer, folder) and None)
    assert "run.json is missing, which records" in by_name(await dry_run(settings))["run directory"]
    for name in ("run.json", "journal.jsonl", "trajectories.twz", "batches.jsonl", "ledger.jsonl"):
        (home.path / name).write_text("{}")
    checks = by_name(await dry_run(settings))
    assert "resumes after step 2" in checks["run directory"]
    assert checks["chat format"] == "ok: hermes"

    template.write_text(template.read_text().replace("Tools:", "What you may call:"))
    words = "was trained with another chat template .* than the run would resume with .*: make renderer.chat_template"
    assert re.search(f"failed: .*step_000002 {words}", by_name(await dry_run(settings))["chat format"])
    assert by_name(await dry_run(settings, fresh=True))["chat format"] == "ok: hermes"
    with pytest.raises(CheckpointError, match=words):
        await read_start(settings, home, Console(quiet=True), fresh=False, resume_step=None)
    # The checkpoint holds what is to be put back.
    shutil.copyfile(checkpoint / "chat_template.jinja", template)
    assert by_name(await dry_run(settings))["chat format"] == "ok: hermes"


async def test_tools_that_no_prompt_shows_are_found_before_the_run(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "silent.jinja"
    template.write_text((model / "chat_template.jinja").read_text().replace("{%- if tools %}", "{%- if false %}"))
    settings = config(model, tmp_path / "runs", renderer={"chat_template": template})
    finding = by_name(await dry_run(settings))["episodes"]
    assert finding.startswith("failed: environment 'lookup' offers the model tools (team_of, manager_of), but the chat")
    assert "Set renderer.chat_template to one that shows tools: hermes, hermes-short, or a jinja file" in finding
    with pytest.raises(ConfigError, match="environment 'lookup' offers the model tools"):
        await read_start(
            settings, RunDirectory(tmp_path / "runs" / "run"), Console(quiet=True), fresh=False, resume_step=None
        )
    for name in ("hermes", "hermes-short"):
        mended = await dry_run(config(model, tmp_path / "runs", renderer={"chat_template": name}))
        assert by_name(mended)["episodes"].startswith("ok: ")


def rows_for(folder: Path) -> list[str]:
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text(json.dumps(GSM8K) + "\n")
    return [f"tasks.source={folder / 'train.jsonl'}", f"eval.tasks.source={folder / 'test.jsonl'}"]


def test_the_config_of_math_is_complete(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a model and rows in the places of those that it names, the run could start; without them the check fails."""
    file = EXAMPLES / "math" / "train.yaml"
    arguments = ["train", str(file), "--dry-run", f"runs={tmp_path / 'runs'}"]
    room = ["rollout.context_length=512", "inference.max_context=512"]
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, f"policies.main.model.path={model}", *room, *rows_for(tmp_path)])
    assert exit_.value.code == 0
    output = capsys.readouterr().out
    assert "the model may call calculator" in output
    assert "math: ready to start" in output
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, f"policies.main.model.path={tmp_path / 'nowhere'}"])
    assert exit_.value.code == 1
    output = capsys.readouterr().out
    assert "✗ model: policies.main.model.path is" in output
    assert "✗ tasks: " in output
    assert "✗ held-out tasks: " in output
    assert "3 of 10 checks failed, the run cannot start" in output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*/train.yaml")), ids=lambda file: file.parent.name)
def test_training_configs_of_the_examples_are_valid(file: Path) -> None:
    loaded = load_config(TrainConfig, file)
    assert loaded.name == file.parent.name == yaml.safe_load(file.read_text())["name"]


async def test_custom_rollout_manager_is_checked(model: Path, tmp_path: Path) -> None:
    rollout = {"env": {"name": "lookup"}, "group_size": 4}
    for named, custom, finding in (
        (EXAMPLE, {"groups": {"at_once": 2}}, "ok: react, rolled out by WholeGroups"),
        (EXAMPLE, {"groups": {"at_one": 2}}, "did you mean groups.at_once?"),
        (EXAMPLE.removesuffix("s"), {}, "failed: rollout.agent_loop_manager_class"),
    ):
        changes = {"rollout": {**rollout, "agent_loop_manager_class": named}, "custom": custom}
        assert finding in by_name(await dry_run(config(model, tmp_path, **changes)))["agent"]


class Boxed(ToolEnv):
    async def reset(self, task=None, *, seed=None):
        sandbox = await self.open_sandbox()
        return f"limits.pids is {sandbox.spec.limits.pids}", {}


async def test_configured_sandboxes_are_probed(model: Path, tmp_path: Path) -> None:
    for sandbox, finding in (
        ({"name": "doker"}, "failed: sandbox.name 'doker' is not registered; did you mean 'docker'?"),
        ({"config": {"isolaton": "auto"}}, "failed: sandbox.config of 'local': "),
        ({"name": "docker", "config": {"url": f"unix://{tmp_path}/none.sock"}}, "failed: no container engine answers"),
        ({"name": NOTED, "prewarm": 2}, f"ok: {NOTED}"),
    ):
        rollout = {"env": {"name": f"{__name__}:Boxed"}, "group_size": 4, "sandbox": sandbox}
        checks = by_name(await dry_run(config(model, tmp_path, rollout=rollout)))
        assert finding in checks["sandboxes"]
        assert checks["episodes"].partition(":")[0] == checks["sandboxes"].partition(":")[0]
