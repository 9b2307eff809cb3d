"""The report of runs: one self-contained HTML file with curves, trajectories, tokens, branches and failures."""

from turnwise.report.page import Written, write_report

__all__ = ["Written", "write_report"]
