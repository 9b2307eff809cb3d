"""Sandboxes in E2B's cloud; needs the extra ``e2b``."""

from turnwise.errors import MissingExtraError

try:
    import e2b  # noqa: F401
except ImportError as error:
    raise MissingExtraError("e2b", "e2b", "sandboxes of the backend 'e2b'") from error

from turnwise.sandboxes.e2b.backend import E2BBackend

__all__ = ["E2BBackend"]
