"""The asynchronous loop for one device: rollouts go on during training, and are interrupted around the weight update.

Owns: :func:`train_colocate_async`. Refuses: what a step is made of (``steps.py``), and how old a group may be when it
is trained (``rollout/strategies.py``).

    rollouts  ====================|  |====================|  |=====     groups, replay.ahead batches of them
    trainer        [update step 1]          [update step 2]             each as soon as a batch of groups is there
    weights                        v1                      v2           what is being sampled is answered as it is,
                                                                        and gone on with under the new weights
"""

from __future__ import annotations

from turnwise.trainer.apart import Apart
from turnwise.trainer.loops.steps import ask_ahead, finish_step, learn, publish, wait_for
from turnwise.trainer.run import TrainRun


async def train_colocate_async(run: TrainRun) -> None:
    """Train until the budget is spent, while further groups are on their way.

    A batch is what the replay strategy takes of the groups that have finished. With ``overlap.sampling: pause`` the
    servers stand still during an update; tools and environments of the episodes go on.

    Raises:
        TrainError: Every episode of a step failed.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    pauses = run.config.overlap.sampling == "pause"
    with Apart() as apart:
        while not run.ended:
            step = run.state.step + 1
            ask_ahead(run, step)
            batch = await wait_for(run, run.config.batch.groups)
            ask_ahead(run, step + 1)
            if pauses:
                await run.pause_servers()
            learned = await learn(run, batch, apart)
            run.advance()
            await publish(run, [learned], still=True)
            ask_ahead(run, step + 1)
            await finish_step(run)
