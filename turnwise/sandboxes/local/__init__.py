"""Sandboxes on this machine: bubblewrap, else Landlock, else (asked for by name) nothing at all."""

from turnwise.sandboxes.local.backend import LocalBackend
from turnwise.sandboxes.local.mount_plan import host_python

__all__ = ["LocalBackend", "host_python"]
