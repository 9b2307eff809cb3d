"""TRL's side of the step benchmark: GRPOTrainer over an environment, stopped at a gate after every step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.trl_gate import Gate
from harness.trl_lookup import PeerLookup, answers, people, question, task_id


def configuration(directory: Path, steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the GRPOConfig that corresponds to ours, with what is fastest on a CPU where TRL leaves a choice."""
    episodes = settings["groups"] * settings["group_size"]
    micro = settings["trl_micro_batch"]
    return {
        "output_dir": str(directory),
        "max_steps": steps,
        "seed": 0,
        "num_generations": settings["group_size"],
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": episodes // micro,
        "max_completion_length": settings["max_tokens_per_turn"] * settings["max_turns"],
        "max_tool_calling_iterations": settings["max_turns"] - 1,
        # TRL's own limit is that of a whole episode; ours is that of a turn.
        "generation_kwargs": {"max_new_tokens": settings["max_tokens_per_turn"]},
        "temperature": 1.0,
        "beta": 0.0,
        "loss_type": "dapo",
        "scale_rewards": "group",
        "epsilon": settings["clip_low"],
        "epsilon_high": settings["clip_high"],
        "max_grad_norm": settings["max_grad_norm"],
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings.get("trl", {}),
    }


def run(gate: Gate, model: Path, directory: Path, steps: int, settings: Mapping[str, Any]) -> None:
    """Train for so many steps, and report what was done."""
    import torch
    from datasets import Dataset, disable_progress_bars
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    disable_progress_bars()
    logging.disable_progress_bar()
    counts: dict[str, Any] = {}
    prompts: dict[str, list[int]] = {}
    calls: dict[str, dict[str, str]] = {}

    class Counted(GRPOTrainer):  # type: ignore[misc]
        """Notes what was generated."""

        def _generate(self, prompts: list[Any]) -> Any:
            generated = super()._generate(prompts)
            prompt_ids, _, mask = generated[:3]
            counts["prompt_ids"] = prompt_ids
            counts["episodes"] = len(mask)
            counts["sampled"] = sum(map(sum, mask))
            # A turn is a run of sampled tokens: what a tool answered stands between two.
            counts["turns"] = sum(
                sum(one and not before for before, one in zip([0, *row], row, strict=False)) for row in mask
            )
            return generated

    def reward(completions: Any, environments: Any, task: Any, **_: Any) -> list[float]:
        rewards = [each._reward(said) for each, said in zip(environments, completions, strict=True)]
        counts["reward"] = sum(rewards) / len(rewards)
        for name, said, ids in zip(task, completions, counts.pop("prompt_ids"), strict=True):
            if prompts.setdefault(name, ids) != ids:
                raise ValueError(f"task {name} was asked in two ways")
            calls.setdefault(name, {}).update(answers(said))
        return rewards

    class AtGate(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            gate.wait()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            gate.wait(**counts, updates=1)

    rows = [
        {"prompt": [{"role": "user", "content": question(person)}], "task": task_id(index), "person": person}
        for index, person in enumerate(people(steps * settings["groups"]))
    ]
    given = configuration(directory, steps, settings)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    # What optim="adamw_torch_fused" makes, but with the schedule of our side: TRL's warm-up would begin with a step of
    # rate 0, and from then on the policies, and with them the work of a step, would differ.
    rates = {"lr": settings["lr"], "betas": tuple(settings["betas"]), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(loaded.parameters(), **rates, fused=True)
    warmup = settings["warmup_steps"]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    trainer = Counted(
        model=loaded,
        args=GRPOConfig(**given),
        processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
        train_dataset=Dataset.from_list(rows),
        reward_funcs=reward,
        environment_factory=PeerLookup,
        callbacks=[AtGate()],
        optimizers=(optimizer, schedule),
    )
    trainer.train()
    attention = loaded.config._attn_implementation
    config = {"trainer": given, "optimizer": {"name": "AdamW, fused", **rates, "warmup_steps": warmup}}
    gate.finish(config={**config, "attention": attention}, prompts=prompts, answers=calls)
