"""The report of runs: curves, tasks, trajectories, tokens and failures, in one HTML file or served while they go on."""

from turnwise.report.page import DEFAULT_SIZE, MEGABYTE, Written, write_report

__all__ = ["DEFAULT_SIZE", "MEGABYTE", "Written", "write_report"]
