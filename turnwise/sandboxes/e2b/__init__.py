"""Sandboxes in E2B's cloud; needs the extra ``e2b``."""

from turnwise.errors import requires_extra

with requires_extra("e2b", "e2b", "sandboxes of the backend 'e2b'"):
    import e2b  # noqa: F401

from turnwise.sandboxes.e2b.backend import E2BBackend

__all__ = ["E2BBackend"]
