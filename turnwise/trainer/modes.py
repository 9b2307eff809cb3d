"""Which loop trains, and what goes on at the same time: ``mode`` and ``overlap`` of ``turnwise train``.

Owns: :class:`OverlapConfig` and :func:`check_mode`. Refuses: the loops (``loops/``), how far rollouts run ahead and how
old a group may be when it is trained (``replay``).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

Mode: TypeAlias = Literal["sync", "colocate_async", "separate_async"]


class OverlapConfig(BaseModel):
    """What goes on while the trainer updates, in the two asynchronous modes.

    Attributes:
        sampling: ``colocate_async``: whether servers ``continue`` to sample during an update, or ``pause`` because both
            do not fit the device. Tools and environments go on in either case.
        stream: ``separate_async``: in how many parts a batch is trained, each by one optimizer step as soon as its
            groups are there.
    """

    model_config = ConfigDict(extra="forbid")

    sampling: Literal["continue", "pause"] = "continue"
    stream: Annotated[int, Field(ge=1)] = 1


def check_mode(mode: Mode, overlap: OverlapConfig, *, groups: int, passes: int) -> None:
    """Refuse keys of ``overlap`` that the mode does not read.

    Args:
        mode: Which loop trains.
        overlap: What goes on at the same time.
        groups: Groups of a batch.
        passes: Optimizer steps of a batch that comes whole: epochs times minibatches.

    Raises:
        ValueError: What is wrong, and what to do.
    """
    if mode == "sync" and overlap != OverlapConfig():
        raise ValueError(
            "overlap is given, but mode is sync, where nothing overlaps: remove it, or set mode to colocate_async or "
            "separate_async"
        )
    if overlap.sampling == "pause" and mode != "colocate_async":
        raise ValueError(
            f"overlap.sampling is pause, but mode is {mode}, whose servers never stand still: remove it, or set "
            "mode to colocate_async"
        )
    if overlap.stream == 1:
        return
    if mode != "separate_async":
        raise ValueError(f"overlap.stream is {overlap.stream}, but mode is {mode}: only separate_async streams")
    if overlap.stream > groups:
        raise ValueError(f"overlap.stream is {overlap.stream}, but a batch has {groups} groups (batch.groups)")
    if passes > 1:
        raise ValueError(
            f"overlap.stream is {overlap.stream}, and each part is gone through once by one optimizer step: set "
            "algorithm.epochs and algorithm.minibatches to 1"
        )
