"""Training loops: the parts of a train step, and one loop per mode."""
