"""Our side of the step benchmark: a training run, stopped at a gate after every step."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.trl_gate import Gate
from turnwise.trajectory_file import read_trajectories


def configuration(model: Path, directory: Path, steps: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of our run, as ``turnwise train`` takes it; ``ours`` among the settings goes over it."""
    game = importlib.import_module(settings["game"])
    given = _configuration(model, directory, steps, settings, game.__file__, game.ENVIRONMENT)
    return merged(given, settings.get("ours", {}))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return one configuration over another, section by section."""
    both = dict(below)
    for name, value in above.items():
        known = below.get(name)
        both[name] = merged(known, value) if isinstance(value, Mapping) and isinstance(known, Mapping) else value
    return both


def _configuration(
    model: Path, directory: Path, steps: int, settings: Mapping[str, Any], game: str | None, env: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "name": "run",
        "runs": str(directory),
        "seed": 0,
        "steps": steps,
        "tasks": f"{game}:tasks?n={steps * settings['groups']}",
        "shuffle": False,
        "policies": {
            "main": {
                "model": {"path": str(model), "device": "cpu", "threads": 1},
                "optim": {name: settings[name] for name in ("lr", "betas", "eps", "max_grad_norm")},
                "schedule": {"kind": "constant", "warmup_steps": settings["warmup_steps"]},
            }
        },
        "rollout": {
            "env": env,
            "group_size": settings["group_size"],
            "max_turns": settings["max_turns"],
            "max_tokens_per_turn": settings["max_tokens_per_turn"],
            "concurrency": settings["groups"] * settings["group_size"],
        },
        "inference": {"device": "cpu", "threads": 1},
        "algorithm": {
            "drop_zero_variance": False,
            "loss_options": {"clip_low": settings["clip_low"], "clip_high": settings["clip_high"]},
            "loss_aggregation": "token_mean",
        },
        "batch": {"groups": settings["groups"], "max_tokens_per_micro_batch": settings["our_micro_batch_tokens"]},
        # The last step's checkpoint is written after the last gate; TRL saves none.
        "checkpoint": {"every": steps},
    }


def run(gate: Gate, model: Path, directory: Path, steps: int, settings: Mapping[str, Any]) -> None:
    """Train for so many steps, and report what was done."""
    from rich.console import Console

    from turnwise.trainer.config.train import TrainConfig
    from turnwise.trainer.loops.modes import train_sync
    from turnwise.trainer.observe.run_log import RunLog
    from turnwise.trainer.run.run import open_run

    config = TrainConfig.model_validate(configuration(model, directory, steps, settings))
    home = config.runs / config.name

    class GatedLogger(RunLog):
        """Logs as always; the gate stands behind the line that a step logs last of all that it does."""

        def log(self, record: Mapping[str, Any]) -> None:
            super().log(record)
            if record["kind"] == "train":
                episodes = record["batch/trajectories"]
                gate.wait(
                    episodes=round(episodes),
                    turns=round(record["rollout/turns"] * episodes),
                    sampled=round(record["rollout/sampled_tokens"] * episodes),
                    reward=record["reward/mean"],
                    updates=round(record["train/updates"]),
                )

    async def train() -> None:
        # What `turnwise train` does: a run is opened, and the loop works on it.
        async with open_run(config, home, Console(stderr=True, quiet=True)) as opened:
            opened.metrics = GatedLogger(opened.metrics.path)
            gate.wait()
            await train_sync(opened)

    asyncio.run(train())
    gate.finish(config=config.model_dump(mode="json"), **_done(home, importlib.import_module(settings["game"]).answers))


def _done(home: Path, answers: Callable[[Sequence[Any]], dict[str, str]]) -> dict[str, Any]:
    """Return the ids of each task's prompt, and what tools answered, from the trajectories that the run wrote."""
    prompts: dict[str, list[int]] = {}
    calls: dict[str, dict[str, str]] = {}
    for trajectory in read_trajectories(home / "trajectories.twz"):
        ids = trajectory.segments[0].token_ids.tolist()
        if prompts.setdefault(trajectory.task_id, ids) != ids:
            raise ValueError(f"task {trajectory.task_id} was asked in two ways")
        messages = [message for segment in trajectory.segments for message in segment.messages]
        calls.setdefault(trajectory.task_id, {}).update(answers(messages))
    return {"prompts": prompts, "answers": calls}
