"""Placement of a run's processes: on this machine, or on the nodes of a Ray cluster."""
