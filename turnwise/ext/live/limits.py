"""Who may send requests, and how often: accepted API keys, and a rate for each of them."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final

from turnwise.errors import ConfigError
from turnwise.gateway.errors import ApiError

_DIGEST: Final = re.compile("[0-9a-f]{64}")
_MOST_BUCKETS: Final = 100_000
_MINUTE: Final = 60.0


def key_digest(key: str) -> str:
    """Return the SHA-256 of an API key, in hexadecimal digits."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> frozenset[str]:
    """Return the digests of the API keys of a file.

    A line is a key or its SHA-256 in hexadecimal digits; empty ones do not count.

    Raises:
        ConfigError: The file cannot be read, or names no key.
    """
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"custom.live.keys is {path}, which cannot be read: {error}") from error
    digests = frozenset(line if _DIGEST.fullmatch(line) else key_digest(line) for line in lines if line)
    if not digests:
        raise ConfigError(
            f"custom.live.keys is {path}, which names no key: write one a line, or remove custom.live.keys"
        )
    return digests


class KeyLimits:
    """The limits of API keys: of each a token bucket, which holds the requests of a minute and refills within it.

    Memory is bounded: of many keys those that sent nothing for the longest are forgotten, whose buckets are full again
    in all but a flood of keys.
    """

    def __init__(
        self, keys: Path | None, requests_per_minute: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the accepted keys, by default any. Raises ConfigError."""
        self._accepted = None if keys is None else read_keys(keys)
        self._most = requests_per_minute
        self._clock = clock
        # Of a key the requests that it may send, and since when.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def admit(self, key: str) -> None:
        """Count a request. Raises ApiError for a key that is not accepted, or sent too many."""
        digest = key_digest(key)
        if self._accepted is not None and digest not in self._accepted:
            raise ApiError(
                401, "this API key is not accepted: send one that the operator issued", code="invalid_api_key"
            )
        if self._most is None:
            return
        now = self._clock()
        tokens, since = self._buckets.pop(digest, (float(self._most), now))
        tokens = min(float(self._most), tokens + (now - since) * self._most / _MINUTE)
        admitted = tokens >= 1.0
        self._buckets[digest] = tokens - admitted, now
        if len(self._buckets) > _MOST_BUCKETS:
            self._buckets.popitem(last=False)
        if not admitted:
            seconds = math.ceil((1.0 - tokens) * _MINUTE / self._most)
            problem = f"this API key may send {self._most} requests a minute: retry in {seconds} s"
            raise ApiError(429, problem, code="rate_limited", retry_after=seconds)
