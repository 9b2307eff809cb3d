"""The configuration section of a hosted endpoint.

Owns: :class:`HostedConfig`, and how a base URL and the environment are read. Refuses: holding a key.
"""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict

from turnwise.errors import ConfigError

SECRET_HEADERS = frozenset({"authorization", "x-api-key", "api-key", "x-goog-api-key", "cookie"})
"""Headers that carry keys: an agent's never leave, and none is configured in a file."""
_LEAST_KEY = 8


def _no_secrets(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if not name.isascii() or not name.replace("-", "").isalnum() or not value.isprintable():
            raise ValueError(f"headers of letters, digits and hyphens with a printable value, not {name!r}")
        if name.lower() in SECRET_HEADERS:
            raise ValueError(f"no {name} here, where everybody can read it: name an environment variable in key_env")
    return headers


class HostedConfig(BaseModel):
    """A hosted endpoint, to which requests are passed on as they came; what it answers is recorded as text.

    Attributes:
        key_env: Name of the environment variable that holds the endpoint's key. None sends no key.
        key_header: Header that carries the key; by default the one of a request's own API: ``x-api-key`` for Anthropic
            Messages, else ``authorization``.
        model: Model that requests are sent with, whatever they name; by default what they name.
        headers: Further headers of all requests. They stand in ``config.yaml``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    key_env: str | None = None
    key_header: Literal["authorization", "x-api-key", "api-key"] | None = None
    model: str | None = None
    headers: Annotated[dict[str, str], AfterValidator(_no_secrets)] = {}

    def key(self) -> str:
        """Return the endpoint's key; empty where none is sent.

        Raises:
            ConfigError: The environment does not hold it. What it holds is not told.
        """
        if self.key_env is None:
            return ""
        key = os.environ.get(self.key_env, "").strip()
        if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
            state = "is not set" if not key else "holds no key (a printable text without blanks)"
            raise ConfigError(f"hosted.key_env is {self.key_env!r}, but that environment variable {state}")
        return key


def without_model(data: Any) -> Any:
    """Return what a configuration says, with no model where its endpoint is hosted; elsewhere the model is required."""
    return {"model": None, **data} if isinstance(data, dict) and data.get("hosted") is not None else data


def base_url(url: str | None) -> str:
    """Return what stands before ``/chat/completions``, ``/responses`` and ``/messages``; without a path it is ``/v1``.

    Raises:
        ValueError: It is no URL of one endpoint, or it holds a secret.
    """
    wanted = "url of one endpoint for hosted, such as https://api.openai.com/v1 or https://api.anthropic.com"
    try:
        parts = urlsplit((url or "").strip())
        host = parts.hostname if parts.port != 0 else None
    except ValueError as error:
        raise ValueError(f"{wanted} ({error})") from None
    if parts.scheme not in ("http", "https") or not host or "," in parts.netloc:
        raise ValueError(wanted)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"{wanted}, without user, query and fragment: the key comes from hosted.key_env")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}"
