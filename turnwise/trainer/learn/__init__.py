"""Learners: gradients from micro-batches, and optimizer steps from gradients."""
