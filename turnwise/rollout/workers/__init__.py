"""Rollout workers: processes of a cluster that play the episodes of a run."""
