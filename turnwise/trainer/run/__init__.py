"""A training run: its parts, its directory, checkpoints, hooks and budget."""
