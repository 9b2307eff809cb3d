"""A first model for an environment, from its own reference solutions."""
