"""The journal of a run: durable events of finished and trained groups."""
