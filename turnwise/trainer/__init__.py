"""Training: trajectories to weights, and weights to the inference servers."""
