"""From finished groups to the packed training rows of a step."""
