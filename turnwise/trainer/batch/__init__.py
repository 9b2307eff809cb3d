"""From finished groups to the training rows of a step."""
