"""What a run reports: metrics, warnings, timeline, audit and loggers."""
