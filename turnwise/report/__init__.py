"""The report of runs: one self-contained HTML file with curves, tasks, trajectories, tokens and failures."""

from turnwise.report.page import DEFAULT_SIZE, MEGABYTE, Written, write_report

__all__ = ["DEFAULT_SIZE", "MEGABYTE", "Written", "write_report"]
