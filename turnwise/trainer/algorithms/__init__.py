"""Algorithms: rewards, credit, advantage estimators, losses, off-policy correction, and their configuration."""
