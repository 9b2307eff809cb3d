"""The report of runs: curves, tasks, trajectories, tokens and failures, in one HTML file or served while they run."""
