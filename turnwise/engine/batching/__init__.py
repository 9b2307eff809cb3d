"""Continuous batching: what runs in a step, the state of its sequences, and their keys and values."""
