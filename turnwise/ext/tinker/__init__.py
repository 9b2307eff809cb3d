"""Tinker's API on this machine: the protocol of the ``tinker`` SDK in front of our learner and built-in server."""
