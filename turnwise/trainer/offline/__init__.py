"""Objectives on data that is there: demonstrations, recorded trajectories, preferences. They share ``core.py``."""
