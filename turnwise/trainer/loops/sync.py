"""The synchronous loop: roll out a batch, train on it, sync the weights, again. Strictly on-policy."""

from __future__ import annotations

import time

from turnwise.errors import TrainError
from turnwise.trainer.experience import build_experience, collect
from turnwise.trainer.run import TrainRun
from turnwise.trainer.update import update_policy


async def train_sync(run: TrainRun) -> None:
    """Train until ``steps`` steps are done.

    Tasks -> groups of trajectories -> advantages and rows -> packed micro-batches -> loss -> new weights -> server.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: The inference server died twice.
    """
    config, learner = run.config, run.learner
    while run.state.step < config.steps:
        started = time.monotonic()
        step = run.state.step + 1
        run.display.status(f"step {step}: rolling out")
        size, greedy = config.rollout.group_size, config.algorithm.greedy_baseline
        run.manager.generate_sequences(run.tasks.take(config.batch.groups, size, greedy_baseline=greedy))
        ref, metrics = await run.buffer.sample(step, "train", config.batch.groups)
        # Only a function of the user's may want to read what was said.
        fields = ("tokens", "rewards", "metrics", *(("messages",) if config.algorithm.credit.custom else ()))
        groups = await run.buffer.fetch(ref, fields)
        sampled = time.monotonic()

        run.display.status(f"step {step}: updating")
        collected = collect(groups, max_tokens_per_row=config.batch.max_tokens_per_row)
        if not collected.metrics["batch/trajectories"]:
            raise TrainError(f"step {step}: every episode ended in an error; the last one: {run.last_error}")
        experience = build_experience(collected, config.algorithm, temperature=config.rollout.temperature)
        with run.updating(step):
            for epoch in range(config.algorithm.epochs):
                run.batches.write(step, [row.sample for row in experience.rows], epoch=epoch)
            metrics |= update_policy(learner, experience.rows, config.algorithm, config.batch, seed=step)
        updated = time.monotonic()

        await run.sync_weights()
        await run.buffer.release(ref)
        synced = time.monotonic()
        metrics |= experience.metrics | run.tasks.metrics()
        metrics |= {
            "time/rollout_s": sampled - started,
            "time/update_s": updated - sampled,
            "time/sync_s": synced - updated,
            "time/step_s": synced - started,
            "time/sampled_tokens_per_s": metrics["rollout/sampled_tokens"]
            * metrics["batch/trajectories"]
            / (sampled - started),
        }
        run.log(metrics)
        if config.eval and config.eval.every and step % config.eval.every == 0 and step < config.steps:
            await run.evaluate(f"step-{step}")
        if step % config.checkpoint.every == 0 or step == config.steps:
            run.save()
