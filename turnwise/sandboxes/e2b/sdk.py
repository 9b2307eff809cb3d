"""The SDK's errors as this package's.

Owns: :func:`mapped` and :func:`starting`. Refuses: when to try again (``manager.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import e2b

from turnwise.errors import SandboxDied, SandboxError, SandboxStartError, SandboxUnavailable

_GONE = (e2b.SandboxNotFoundException, e2b.SandboxNotRunningException)


@contextlib.contextmanager
def mapped(sandbox: str) -> Iterator[None]:
    """Raise what the SDK raises in the block as an error of a sandbox that runs.

    Raises:
        SandboxDied: It is not there any more.
        SandboxUnavailable: The key is not taken.
        SandboxError: E2B, or the way to it, failed.
    """
    try:
        yield
    except SandboxError:
        raise
    except e2b.AuthenticationException as error:
        raise SandboxUnavailable(f"E2B does not take the API key: {error}") from error
    except _GONE as error:
        raise SandboxDied(f"E2B sandbox {sandbox} is gone: {error}") from error
    except Exception as error:  # the SDK also raises plain ones, and what an answer that is no JSON gives
        raise SandboxError(f"E2B sandbox {sandbox}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def starting(what: str) -> Iterator[None]:
    """Raise what the SDK raises in the block as an error of a start.

    Raises:
        SandboxUnavailable: There is no such template, or the key is not taken: trying again does not help.
        SandboxStartError: It may help.
    """
    try:
        yield
    except e2b.AuthenticationException as error:
        raise SandboxUnavailable(f"E2B does not take the API key: {error}") from error
    except Exception as error:
        status = error.status_code if isinstance(error, e2b.SandboxException) else None
        wrong = isinstance(error, e2b.NotFoundException | e2b.InvalidArgumentException | e2b.TemplateException)
        if wrong or status in {400, 403, 404}:
            raise SandboxUnavailable(f"E2B has no {what} that this key may use: {error}") from error
        raise SandboxStartError(f"E2B did not start {what}: {type(error).__name__}: {error}") from error
