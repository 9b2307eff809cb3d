"""The configuration sections of training."""
