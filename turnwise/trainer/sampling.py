"""How a train step comes to its groups, in every mode.

Owns: :func:`sample_groups`: waiting for them, the hooks before and after, and filling a batch again of which hooks
dropped something. Refuses: asking for the groups in the first place (the loops), and choosing among finished ones
(``rollout/strategies.py``).
"""

from __future__ import annotations

from turnwise.errors import TrainError
from turnwise.trainer.apart import uninterrupted
from turnwise.trainer.run import TrainRun
from turnwise.trajectory import TrajectoryGroup

# Of several samplings of a step these are added up; of the others the last one counts.
_SUMMED = ("replay/wait_s", "replay/failed", "replay/reissued", "replay/reused", "replay/dropped/", "straggler/")


async def sample_groups(
    run: TrainRun, wanted: int, *, refill: bool = True, settles: bool = True
) -> tuple[list[TrajectoryGroup], dict[str, float]]:
    """Wait for the groups of the next train step; what the strategy or hooks left out is replaced.

    Args:
        run: The run.
        wanted: How many groups.
        refill: Whether groups that hooks drop are replaced by those of the next tasks.
        settles: Whether the step waits for no further groups: what it left is carried or cancelled then.

    Returns:
        The groups, and what was measured while they were waited for.

    Raises:
        TrainError: Hooks left nothing, or one of them raised.
        InferenceError: A server died more often than ``inference.max_restarts``.
    """
    step = run.state.step + 1
    # Only a function of the user's may want to read what was said.
    said = bool(run.config.algorithm.credit.custom or run.config.hooks)
    fields = ("tokens", "rewards", "metrics", *(("messages",) if said else ()))
    await run.hooks.step_begin()
    groups: list[TrajectoryGroup] = []
    metrics: dict[str, float] = {}
    missing, refills = wanted, 0
    while missing:
        await run.hooks.sample_begin()
        ref, found = await run.buffer.sample(step, "train", missing)
        # What the buffer handed out is trained, whatever interrupts the run from here on.
        fetched = await uninterrupted(run.buffer.fetch(ref, fields))
        await uninterrupted(run.buffer.release(ref))
        run.feed.done(ref, fetched)
        for name, value in found.items():
            metrics[name] = value + (metrics.get(name, 0.0) if name.startswith(_SUMMED) else 0.0)
        run.hooks.timing_raw["rollout_s"] = metrics["replay/wait_s"]
        groups = await run.hooks.sample_end([*groups, *fetched])
        missing = run.hooks.refills if refill and refills < run.hooks.max_refills else 0
        refills += 1
        if missing:
            run.feed.issue(run.feed.next(missing))
    if settles:
        metrics |= await uninterrupted(run.feed.settle(step))
    if not groups:
        raise TrainError(
            f"step {step}: the hooks left no group of {wanted}, after {refills - 1} refills: a step needs something to "
            "learn from; let some pass, or raise max_refills"
        )
    if len(groups) < wanted:
        metrics["replay/short"] = float(wanted - len(groups))
    for why, count in run.hooks.dropped.items():
        name = f"replay/dropped/{why.replace('/', '_')}"
        metrics[name] = metrics.get(name, 0.0) + count
    return groups, metrics
