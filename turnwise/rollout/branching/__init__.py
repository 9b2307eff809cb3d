"""Branches of an episode: trees in training, searches in evaluations, and forks that an agent makes."""
