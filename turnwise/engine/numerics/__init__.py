"""Numerics of the engine and the trainer."""
