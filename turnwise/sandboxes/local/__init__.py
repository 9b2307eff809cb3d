"""Sandboxes on this machine: bubblewrap, or where it is named Landlock alone or no isolation."""

from turnwise.sandboxes.local.backend import LocalBackend
from turnwise.sandboxes.local.host_python import host_python

__all__ = ["LocalBackend", "host_python"]
