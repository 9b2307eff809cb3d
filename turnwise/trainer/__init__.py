"""Training: from trajectories to weights, and from weights back to the inference servers."""
