"""Train an agent for word problems, in the form of Agent-Lightning 1.0: options of verl, rows, ``run_ppo``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from agentlightning.verl.entrypoint import run_ppo
from datasets import Dataset
from omegaconf import OmegaConf


def default_options() -> dict[str, Any]:
    """Return the options of the run."""
    return {
        "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False},
        "data": {"train_batch_size": 8, "max_prompt_length": 2048, "max_response_length": 1024},
        "actor_rollout_ref": {
            "model": {"path": "???", "use_remove_padding": True},
            "actor": {
                "ppo_mini_batch_size": "${data.train_batch_size}",
                "ppo_micro_batch_size_per_gpu": 1,
                "optim": {"lr": 1e-6},
                "use_kl_loss": False,
                "entropy_coeff": 0,
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.28,
            },
            "rollout": {"name": "vllm", "n": 4, "tensor_model_parallel_size": 1, "multi_turn": {"format": "hermes"}},
        },
        "reward": {"reward_model": {"rollout": {"name": "???"}}},
        "trainer": {
            "n_gpus_per_node": 1, "nnodes": 1, "logger": ["console"], "experiment_name": "gsm8k", "save_freq": -1,
            "test_freq": 10, "total_epochs": 2,
        },
        "agentlightning": {
            "agl_base_url": "http://localhost:8181",
            "agl_key": "dummy",
            "rollout_timeout_seconds": 300,
            "local": {
                "agent_class": "gsm8k_agent.ChatAgent",
                "env_map": {"QUESTION": "input.question", "ANSWER": "input.answer"},
            },
        },
    }  # fmt: skip


def build_config(model: str, api: str, overrides: Sequence[str]) -> Any:
    """Return the options for a model and an API of the agent."""
    options = default_options()
    options["actor_rollout_ref"]["model"]["path"] = model
    if api == "completion":
        local = options["agentlightning"]["local"]
        local["agent_class"] = "gsm8k_agent.CompletionAgent"
        local["env_map"]["GSM8K_MODEL"] = model
    return OmegaConf.merge(OmegaConf.create(options), OmegaConf.from_dotlist(list(overrides)))


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-file", required=True)
    parser.add_argument("--val-file", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--api", choices=("chat", "completion"), default="chat")
    arguments, overrides = parser.parse_known_args()
    run_ppo(
        build_config(arguments.model, arguments.api, overrides),
        train_dataset=Dataset.from_parquet(arguments.train_file).to_list(),
        val_dataset=Dataset.from_parquet(arguments.val_file).to_list(),
    )


if __name__ == "__main__":
    main()
