"""Searches: several ways through an episode of an evaluation, one of which a scorer chooses."""
