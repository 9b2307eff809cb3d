"""Training loops: one file for each way in which rollouts and updates share time."""
