"""Remote runners: the hub of a run, and the processes that run its episodes."""
