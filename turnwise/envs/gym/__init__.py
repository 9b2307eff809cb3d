"""Gymnasium, both ways: its environments as ours, and ours as its."""
