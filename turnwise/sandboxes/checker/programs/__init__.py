"""The programs of the attacks. They run inside a sandbox, with nothing of this package, by the Python that is there."""
