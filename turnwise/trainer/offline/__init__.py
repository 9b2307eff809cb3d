"""Offline training on demonstrations, recorded trajectories and preferences."""
