"""Offline training on demonstrations and recorded trajectories."""
