"""Checkers of environments, sandboxes and learners."""
