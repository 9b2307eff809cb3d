"""The bars of learning jobs: how often a model succeeds before and after, and on how many episodes that is measured."""

from __future__ import annotations

from typing import Any

KINDS = ("sampled", "greedy")


def success(part: dict[str, Any], kind: str) -> float:
    """Share of successful episodes in one evaluation of a run's summary."""
    return part[kind]["success"]["mean"]


def hold_to_bars(
    summary: dict[str, Any], sampled: float, greedy: float, *, episodes: tuple[int, int] = (800, 200)
) -> None:
    """Print a summary's figures, and hold them to the least shares after training.

    Args:
        summary: ``summary.json`` of the run.
        sampled: Least share of sampled episodes that succeed.
        greedy: Least share of greedy ones.
        episodes: Sampled and greedy episodes of each evaluation.
    """
    figures = {f"{part} {kind}": success(summary[part], kind) for part in ("before", "after") for kind in KINDS}
    print(f"{figures}, {summary['wall_s']:.0f} s wall, {summary['cpu_s']:.0f} CPU-s")
    for part in ("before", "after"):
        assert tuple(summary[part][kind]["success"]["episodes"] for kind in KINDS) == episodes
    assert success(summary["after"], "sampled") >= sampled
    assert success(summary["after"], "greedy") >= greedy


def mostly_fails(summary: dict[str, Any]) -> None:
    """Assert that the model that a job begins with mostly fails, sampled and greedy."""
    assert max(success(summary["before"], kind) for kind in KINDS) <= 0.35
