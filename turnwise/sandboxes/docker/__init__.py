"""Sandboxes that are containers of a docker engine."""

from turnwise.sandboxes.docker.backend import DockerBackend
from turnwise.sandboxes.docker.settings import DockerOptions

__all__ = ["DockerBackend", "DockerOptions"]
