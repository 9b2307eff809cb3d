"""Training algorithms: rewards, credit, advantage estimators, losses, corrections and their configuration."""
