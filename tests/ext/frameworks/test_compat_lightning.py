"""Agents written for Agent-Lightning 1.0 run as programs, and its entry point trains them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from support.agents.blackbox_episodes import run_episode
from support.chat.model_dirs import model_dir, renderer_for
from support.trainer.lookup_run import MODEL, build_model, lines, shared
from turnwise.errors import ConfigError

# In Agent-Lightning: from agentlightning.verl.entrypoint import run_ppo.
from turnwise.ext.frameworks.compat.lightning import run_ppo
from turnwise.ext.frameworks.convert.agent_lightning import translate_agent_lightning
from turnwise.ext.frameworks.convert.options import options_of
from turnwise.ext.programs.workdir import fill, row_values
from turnwise.tasks import Task
from turnwise.trainer.run.audit import audit_run
from turnwise.trajectory import Trajectory

AGENTS = "support.agents.lightning_agents"
TESTS = str(Path(__file__).parents[2])
ROW = {"question": "6 times 7?", "answer": "42", "extra": {"fails": False, "sources": ["a", "b"]}}


async def play(agent: str, script: list[Any], row: dict[str, Any] = ROW, **config: Any) -> Trajectory:
    env = {"QUESTION": "{input.question}", "ANSWER": "{input.answer}", "ROW": "{input}", "PYTHONPATH": TESTS}
    program = {"recipe": "agent_lightning", "arguments": [f"{AGENTS}.{agent}"], "nonzero_exit": "error", **config}
    program["env"] = {**env, **config.get("env", {})}
    outcome = await run_episode(script, program, task=Task("t", "", row), env="task", retries=0)
    [trajectory] = outcome.trajectories
    return trajectory


async def test_last_reward_event_of_a_chat_agent_counts() -> None:
    trajectory = await play("ChatAgent", ["42"])
    assert (trajectory.error, trajectory.rewards) == (None, [(None, "reward", 1.0)])
    assert sum(segment.sampled for segment in trajectory.segments) == 1


async def test_agent_that_encodes_its_prompt_gets_the_sampled_ids() -> None:
    model = model_dir("qwen3")
    renderer = renderer_for("qwen3")
    completion = [*renderer.text.encode("42").tolist(), min(renderer.stop_ids)]
    trajectory = await play("CompletionAgent", [completion], env={"GSM8K_MODEL": str(model)})
    assert (trajectory.error, trajectory.rewards) == (None, [(None, "reward", 1.0)])
    context, sampled = trajectory.segments
    assert not context.sampled
    assert sampled.sampled
    from transformers import AutoTokenizer

    # The prompt is what the agent encoded, without a template around it.
    ids = AutoTokenizer.from_pretrained(model).encode(ROW["question"], add_special_tokens=False)
    assert context.token_ids.tolist() == ids


async def test_agent_that_fails_is_an_error_and_one_without_a_reward_is_worth_nothing() -> None:
    trajectory = await play("PlainAgent", ["42"])
    assert (trajectory.error, trajectory.rewards, trajectory.reward) == (None, [], 0.0)
    failed = await play("PlainAgent", ["42"], {**ROW, "extra": {"fails": True}})
    assert "the row says so" in (failed.error or "")


async def test_column_that_the_row_lacks_is_named() -> None:
    trajectory = await play("ChatAgent", ["42"], env={"QUESTION": "{input.query}"})
    assert "{input.query}: the task has no such column; it has id, prompt, question, answer" in (trajectory.error or "")


def test_placeholders_of_a_row_equal_the_values_of_an_env_map() -> None:
    values = row_values(ROW)
    # What Agent-Lightning's env_map gives for the same paths.
    expected = {
        "{input.question}": "6 times 7?",
        "{input.extra}": '{"fails": false, "sources": ["a", "b"]}',
        "{input.extra.fails}": "false",
        "{input.extra.sources.1}": "b",
    }
    assert {text: fill(text, values) for text in expected} == expected


def config(model: Path, runs: Path, **section: Any) -> dict[str, Any]:
    """Return a configuration as the example of gsm8k makes it: options of verl, and the agent."""
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 2, "max_prompt_length": 200, "max_response_length": 12},
        "actor_rollout_ref": {
            "rollout": {"tensor_model_parallel_size": 1, "n": 4, "name": "hf", "multi_turn": {"format": "hermes"}},
            "actor": {"ppo_mini_batch_size": 2, "optim": {"lr": 1e-3}, "use_kl_loss": False, "entropy_coeff": 0},
            "model": {"path": str(model), "use_remove_padding": True},
        },
        "trainer": {
            "n_gpus_per_node": 1, "nnodes": 1, "logger": ["console"], "experiment_name": "gsm8k", "save_freq": -1,
            "test_freq": -1, "total_epochs": 1, "default_local_dir": str(runs),
        },
        "agentlightning": {
            "agl_base_url": "http://localhost:8181",
            "agl_key": "dummy",
            "rollout_timeout_seconds": 60,
            "local": {
                "agent_class": f"{AGENTS}.ChatAgent",
                "env_map": {"QUESTION": "input.question", "ANSWER": "input.answer", "MODE": "fixed"},
            },
            **section,
        },
    }  # fmt: skip


@pytest.mark.long
def test_run_ppo_trains_a_chat_agent(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", TESTS)
    model = shared(tmp_path_factory, "lookup-model", build_model) / MODEL
    rows = [{"question": f"Who is person {number}?", "answer": str(number)} for number in range(4)]
    summary = run_ppo(config(model, tmp_path), train_dataset=rows, val_dataset=rows[:1])
    assert (summary.steps, summary.directory) == (2, tmp_path / "gsm8k")
    steps = [record for record in lines(summary.directory / "metrics.jsonl") if record["kind"] == "train"]
    assert [step["batch/trajectories"] for step in steps] == [8, 8]
    report = audit_run(summary.directory, recompute=False)
    assert report.contradictions == []


def test_options_of_agent_lightning_are_translated_or_named() -> None:
    section = {"hooks": "hooks.py", "async_rollout": {"enabled": False}, "trace_aggregator": {"level": "trajectory"}}
    translation = translate_agent_lightning(options_of(config(Path("model"), Path("runs"), **section)))
    agent = translation.config["rollout"]["agent"]["config"]
    assert agent["arguments"] == [f"{AGENTS}.ChatAgent"]
    assert {name: agent["env"][name] for name in ("QUESTION", "MODE")} == {
        "QUESTION": "{input.question}",
        "MODE": "fixed",
    }
    assert agent["timeout"] == 60
    assert translation.config["rollout"]["env"] == {"name": "task"}
    assert translation.config["algorithm"]["loss_aggregation"] == "trajectory_mean"
    assert "write them as hooks" in translation.remedies["agentlightning.hooks"]
    assert "agentlightning.async_rollout.enabled" in translation.harmless
    assert not [option for option in translation.remedies if option.startswith("reward.")]


def test_run_ppo_names_what_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"question": "q", "answer": "a"}]
    with pytest.raises(ConfigError, match="val_dataset holds no row"):
        run_ppo(config(tmp_path, tmp_path), rows, [])
    with pytest.raises(ConfigError, match=r"train_batch_size is 2, and train_dataset has 1 rows"):
        run_ppo(config(tmp_path, tmp_path), rows, rows)
    with pytest.raises(ConfigError, match=r"agentlightning.local.agent_class is None: name the class"):
        run_ppo(config(tmp_path, tmp_path, local={}), rows * 2, rows)
    with caplog.at_level(logging.WARNING), pytest.raises(ConfigError):
        run_ppo(config(tmp_path / "none", tmp_path, hooks="hooks.py"), rows * 2, rows)
    assert "agentlightning.hooks: write them as hooks of the run" in caplog.text
