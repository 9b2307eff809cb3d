"""Sandboxes on this machine: bubblewrap, else Landlock, else (opt-in) no isolation."""

from turnwise.sandboxes.local.backend import LocalBackend
from turnwise.sandboxes.local.host_python import host_python

__all__ = ["LocalBackend", "host_python"]
