"""``turnwise convert-config``: a command of verl becomes a configuration and three lists."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from turnwise.cli.app import app
from turnwise.config import load_config
from turnwise.errors import ConfigError
from turnwise.ext.frameworks.convert.options import RULES, Options, read_options
from turnwise.ext.frameworks.convert.translation import Translation
from turnwise.ext.frameworks.convert.verl_running import translate_verl
from turnwise.trainer.algorithms.advantages import ADVANTAGES
from turnwise.trainer.algorithms.gae import CRITIC_ADVANTAGES
from turnwise.trainer.algorithms.losses import LOSSES
from turnwise.trainer.config.train import TrainConfig

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COMMAND = [
    "python3", "-m", "verl.trainer.main_ppo",
    "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False",
    "data.train_files=['/data/a.parquet', '/data/b.parquet']", "data.val_files=/data/test.parquet",
    "data.train_batch_size=512", "data.max_prompt_length=400", "data.max_response_length=600",
    "data.filter_overlong_prompts=True", "data.truncation=error",
    "actor_rollout_ref.model.path=models/qwen", "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    f"{ACTOR}.optim.lr=3e-6", f"{ACTOR}.ppo_mini_batch_size=128", f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=9000", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01",
    f"{ACTOR}.kl_loss_type=low_var_kl", f"{ACTOR}.entropy_coeff=0.002", f"{ACTOR}.clip_ratio_high=0.28",
    f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.gpu_memory_utilization=0.6",
    f"{ROLLOUT}.n=5", f"{ROLLOUT}.enforce_eager=True", "trainer.logger=['console','wandb']",
    "trainer.project_name=mine", "trainer.experiment_name=first try", "trainer.n_gpus_per_node=4", "trainer.nnodes=2",
    "trainer.save_freq=20", "trainer.test_freq=5", "trainer.total_training_steps=90", "trainer.balance_batch=True",
    "+ray_kwargs.ray_init.num_cpus=8", f"{ACTOR}.fsdp_config.param_offload=True",
    "reward.custom_reward_function.path=score.py", "reward.custom_reward_function.name=judge",
]  # fmt: skip
EXPECTED = {
    "name": "first-try", "steps": 90, "batch.groups": 512, "batch.max_tokens_per_micro_batch": 9000,
    "max_prompt_tokens": 400, "rollout.max_tokens_per_turn": 600, "rollout.group_size": 5,
    "policies.main.model.path": "models/qwen", "policies.main.model.gradient_checkpointing": False,
    "policies.main.optim.lr": 3e-6, "policies.main.optim.betas": [0.9, 0.999],
    "policies.main.optim.weight_decay": 0.01, "policies.main.engine": "fsdp",
    "policies.main.engine_options": {"ranks": 8, "cpu_offload": True},
    "algorithm.advantage": "grpo", "algorithm.drop_zero_variance": False, "algorithm.minibatches": 4,
    "algorithm.kl": {"where": "loss", "coef": 0.01, "estimator": "k3"}, "algorithm.entropy_coef": 0.002,
    "algorithm.loss": "ppo_clip", "algorithm.loss_options": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
    "algorithm.loss_aggregation": "token_mean", "algorithm.old_logprobs": "recompute",
    "inference.engine": "vllm", "inference.replicas": 8,
    "inference.server.arguments": ["--gpu-memory-utilization=0.6", "--enforce-eager"],
    "placement": "ray", "layout": "colocated", "checkpoint.every": 20, "eval.every": 5, "eval.greedy": True,
    "loggers": [{"name": "wandb", "config": {"project": "mine"}}],
    "tasks": [{"source": f"/data/{name}.parquet", "format": "verl"} for name in "ab"],
    "eval.tasks": {"source": "/data/test.parquet", "format": "verl"},
    "rollout.env.config.scorer.score.arguments.compute_score": "score.py:judge",
}  # fmt: skip


def value_at(config: dict[str, Any], key: str) -> Any:
    section: Any = config
    for name in key.split("."):
        section = section[name]
    return section


def without(options: list[str], name: str) -> list[str]:
    return [option for option in options if not option.startswith(f"{name}=")]


def translated(*changes: str) -> Translation:
    return translate_verl(read_options([*COMMAND, *changes]))


@pytest.mark.parametrize(("key", "value"), EXPECTED.items())
def test_option_becomes_the_key_that_means_the_same(key: str, value: object) -> None:
    assert value_at(translated().config, key) == value


def test_configuration_is_one_of_turnwise_train(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(translated().yaml())
    config = load_config(TrainConfig, file)
    assert config.batch.groups * config.rollout.group_size == 512 * 5
    assert config.policy.engine_options == {"ranks": 8, "cpu_offload": True}


def test_every_option_is_in_exactly_one_list() -> None:
    lists = translated(f"{ACTOR}.megatron.pipeline_model_parallel_size=4", "no.such.option=3").report()
    names = [name for options in lists.values() for name in options]
    options = [option.lstrip("+").partition("=")[0] for option in COMMAND if "=" in option]
    assert sorted(names) == sorted([*options, f"{ACTOR}.megatron.pipeline_model_parallel_size", "no.such.option"])
    remedies = lists["no counterpart, matters"]
    assert set(remedies) == {f"{ACTOR}.megatron.pipeline_model_parallel_size", "no.such.option"}
    assert remedies["no.such.option"] == "no rule for it, and so 3 is not in the configuration"


@given(
    st.dictionaries(st.from_regex(r"\A(actor|rollout|ref|data|trainer|algorithm|x)\.[a-z_]{1,9}\Z"), st.integers(2, 9))
)
def test_no_option_is_lost_whatever_it_is(options: dict[str, int]) -> None:
    lists = translate_verl(Options({**options, "model.path": "m"})).report()
    assert set(options) <= {name for names in lists.values() for name in names}


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ([f"{ACTOR}.policy_loss.loss_mode=gspo"], "algorithm.loss_options", {"clip_low": 0.2, "clip_high": 0.28}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], "algorithm.advantage_options", {"norm_by_std": False}),
        (["algorithm.adv_estimator=gae"], "policies.main.critic.lr", 1e-5),
        (["algorithm.rollout_correction.bypass_mode=True"], "algorithm.old_logprobs", "rollout"),
        (["algorithm.filter_groups.enable=True"], "replay.filter_groups", {}),
        (["actor_rollout_ref.model.lora_rank=32"], "policies.main.model.lora", {"rank": 32}),
        ([f"{ROLLOUT}.multi_turn.tool_config_path=tools.yaml"], "rollout.env.name", "tool"),
        ([f"{ROLLOUT}.top_k=-1"], "rollout.top_k", 0),
        ([f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"], "algorithm.loss_scale", 600),
        ([f"{ROLLOUT}.val_kwargs.do_sample=True", f"{ROLLOUT}.val_kwargs.n=4"], "eval.samples", 4),
        ([f"{ACTOR}.use_dynamic_bsz=False", f"{ACTOR}.ppo_micro_batch_size_per_gpu=3"],
         "batch.max_tokens_per_micro_batch", 3000),
    ],
)  # fmt: skip
def test_option_changes_what_depends_on_it(changes: list[str], key: str, value: object) -> None:
    assert value_at(translated(*changes).config, key) == value


@pytest.mark.parametrize(
    ("change", "option", "remedy"),
    [
        ("algorithm.adv_estimator=none_such", "algorithm.adv_estimator", "no estimator none_such"),
        (f"{ACTOR}.policy_loss.loss_mode=made_up", "actor.policy_loss.loss_mode", "there is no loss made_up"),
        ("data.truncation=left", "data.truncation", "not cut at the left"),
        ("data.prompt_key=question", "data.prompt_key", "rename question"),
        (f"{ROLLOUT}.tensor_model_parallel_size=2", "rollout.tensor_model_parallel_size", "need 8 GPUs each"),
        ("trainer.resume_mode=disable", "trainer.resume_mode", "--fresh"),
    ],
)  # fmt: skip
def test_what_matters_and_is_missing_has_a_remedy(change: str, option: str, remedy: str) -> None:
    assert remedy in translated(change).remedies[option]


def test_estimators_and_losses_are_those_of_the_trainer() -> None:
    assert set(RULES["estimators"]) == {*ADVANTAGES, *CRITIC_ADVANTAGES}
    names = ("clip_low", "clip_high", "dual_clip", "tau_pos", "tau_neg")
    parameters = {loss: inspect.signature(entry.function).parameters for loss, entry in LOSSES.items()}
    assert {loss: set(options) for loss, options in RULES["loss_options"].items()} == {
        loss: {name for name in names if name in taken} for loss, taken in parameters.items()
    }


def test_epochs_are_steps_where_the_rows_can_be_counted(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "sums", "reward_model": {"ground_truth": "2"}}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(10)))
    options = without(without(COMMAND, "trainer.total_training_steps"), "data.train_files")
    options += ["trainer.total_epochs=3", "data.train_batch_size=4"]
    readable = translate_verl(read_options([*options, f"data.train_files={tmp_path / 'rows.jsonl'}"]))
    assert readable.config["steps"] == 6
    unreadable = translate_verl(read_options([*options, "data.train_files=/nowhere.parquet"]))
    assert "steps" not in unreadable.config
    assert unreadable.remedies["trainer.total_epochs"].startswith("set steps to 3 times the rows of /nowhere.parquet")


def test_script_is_read_without_starting_a_program(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"""set -xeuo pipefail
DEVICE=$(python3 -c 'import accelerator' 2>/dev/null && echo other || echo gpu)
touch {tmp_path}/touched
rm -rf {tmp_path}/precious
size=${{SIZE:-64}}
[ "$DEVICE" = gpu ] && EXTRA=(trainer.n_gpus_per_node=$((1 + 1)))
DATA=(data.train_batch_size=${{size}} data.train_files="['a.parquet']" actor_rollout_ref.model.path="$MODEL")
LAUNCH=(uv run --frozen python3)
ulimit -n 1048576
"${{LAUNCH[@]}}" -m verl.trainer.main_ppo "${{DATA[@]}}" "${{EXTRA[@]}}" "$@"
"""
    )
    (tmp_path / "precious").mkdir()
    result = CliRunner(env={"MODEL": "models/of mine"}).invoke(app, ["convert-config", str(script), "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["config"]["batch"]["groups"] == 64
    assert report["config"]["policies"]["main"]["model"]["path"] == "models/of mine"
    assert report["config"]["policies"]["main"]["engine_options"] == {"ranks": 2}
    assert report["translated"]["data.train_batch_size"] == "batch.groups"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "run.sh"]


def test_resolved_file_equals_its_command(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "data: {train_files: a.parquet, train_batch_size: 32}\n"
        "actor_rollout_ref: {model: {path: m}, rollout: {n: 3, engine_kwargs: {vllm: {}}}}\n"
    )
    command = ["data.train_files=a.parquet", "data.train_batch_size=32", "actor_rollout_ref.model.path=m"]
    expected = translate_verl(read_options([*command, "actor_rollout_ref.rollout.n=3"]))
    assert translate_verl(read_options([str(file)])).config == expected.config


def test_declared_option_that_is_not_set_has_its_default(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text('trainer: {experiment_name: first, project_name: "???"}\n')
    options = read_options([str(file)])
    assert "trainer.project_name" not in options
    assert options.read("trainer.experiment_name") == "first"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.yaml", "data: {train_batch_size: '${oc.select:x}'}", "refers to another option.*--cfg job --resolve"),
        ("job.yaml", "[1, 2]", "a list, where a configuration of verl is a mapping"),
        (
            "run.sh",
            "python3 -m verl.trainer.sft_trainer model.path=x",
            "starts verl.trainer.sft_trainer, and not the RL",
        ),
        ("run.sh", "set -u\necho $NOT_GIVEN", "NOT_GIVEN: unbound variable.*give the variables that it reads"),
    ],
)
def test_unreadable_source_is_refused_with_its_remedy(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_options([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("source", "message"), [(["gone.yaml"], "no such file"), (["a", "b"], "no option of the form")]
)
def test_what_is_no_command_is_refused(source: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_options(source)
