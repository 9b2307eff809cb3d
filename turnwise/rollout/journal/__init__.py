"""The journal of a run: what was rolled out, written down before it counts."""
