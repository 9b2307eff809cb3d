"""Session URLs: their template, their base URLs, and the routing of requests back to their session."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

from turnwise.errors import ConfigError
from turnwise.inference.process import Application, Receive, Scope, Send

DEFAULT_FORM = "{base}/s/{token}"
"""The default form of an address."""
FIELDS = ("base", "host", "port", "rollout_id", "attempt_id", "session", "token")
_FIELD = re.compile(r"\{([^{}]*)\}")
_GATEWAY_ROUTES = frozenset(("s", "v1", "health", "sessions"))


@dataclass(frozen=True, slots=True)
class Place:
    """The owner of a session URL: episode, attempt, session name, and the base URL chosen for the episode."""

    rollout_id: str
    attempt_id: str
    session: str = "main"
    base: str | None = None


@dataclass(slots=True)
class EndpointTemplate:
    """Template of session URLs.

    Attributes:
        template: The URL, with fields of :data:`FIELDS` in braces.
        bases: Base URLs of proxies in front of the gateway; each episode gets the least used one.
        open: Number of open episodes per base.
    """

    template: str = DEFAULT_FORM
    bases: Sequence[str] = ()
    open: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        check_template(self.template)
        self.bases = [base.rstrip("/") for base in self.bases]
        for base in self.bases:
            check_base(base)
        if self.bases and "{base}" not in self.template:
            raise ConfigError(f"an address {self.template!r} has no {{base}}, so base URLs would never be used")

    @property
    def hosts(self) -> list[str]:
        """Host names of the URLs, with ``*`` for fields; without those of the gateway."""
        is_gateway_url = self.template.startswith(("{base}", "http://{host}", "https://{host}"))
        urls = [*self.bases, *([] if is_gateway_url else [self.template])]
        return [urlsplit(_FIELD.sub("*", url)).hostname or "" for url in urls]

    def take(self) -> str | None:
        """Assign a base URL to an episode; None for the gateway's."""
        if not self.bases:
            return None
        base_url = min(self.bases, key=lambda base: self.open[base])
        self.open[base_url] += 1
        return base_url

    def release(self, base: str | None) -> None:
        """Release an episode's base URL."""
        if base is not None:
            self.open[base] -= 1

    def url(self, owner: Place, token: str, *, host: str, port: int) -> str:
        """Return the URL of a session.

        Args:
            owner: Owner of the URL.
            token: The session's token.
            host: Host of the gateway, in URL form.
            port: Port of the gateway.
        """
        parts = {
            "rollout_id": owner.rollout_id,
            "attempt_id": owner.attempt_id,
            "session": owner.session,
            "token": token,
        }
        values = {
            "base": owner.base or f"http://{host}:{port}",
            "host": host,
            "port": str(port),
            **{name: quote(value, safe="") for name, value in (parts | {"token": token}).items()},
        }
        return _FIELD.sub(lambda match: values[match.group(1)], self.template)

    def prefix(self, owner: Place, token: str) -> tuple[str, ...]:
        """Return the path segments before the token, percent-decoded."""
        path = unquote(urlsplit(self.url(owner, token, host="host", port=1)).path)
        parts = [part for part in path.split("/") if part]
        return tuple(parts[: parts.index(token)])


def check_template(template: str) -> None:
    """Validate a URL template. Raises ConfigError for unknown fields, a missing token or an invalid URL."""
    for name in _FIELD.findall(template):
        if name not in FIELDS:
            raise ConfigError(f"{{{name}}} in {template!r} is not a field of an address; fields: {', '.join(FIELDS)}")
    rest = _FIELD.sub("x", template)
    if "{" in rest or "}" in rest or "?" in rest or "#" in rest or re.search(r"\s", rest):
        raise ConfigError(f"{template!r} holds a brace, '?', '#' or a space, which a base URL cannot contain")
    if not template.startswith(("{base}", "http://", "https://")):
        raise ConfigError(f"{template!r} is not a URL: begin it with {{base}}, http:// or https://")
    if template.split("/").count("{token}") != 1 or template.count("{token}") != 1:
        raise ConfigError(f"{template!r} must contain /{{token}} once, as a path segment: it authorises requests")


def check_base(base: str) -> None:
    """Validate a base URL. Raises ConfigError."""
    try:
        parts = urlsplit(base)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment or re.search(r"\s", base):
        raise ConfigError(
            f"{base!r} is not a base URL: write http://host:port or https://host/path, without '?' or '#'"
        )


class EndpointRouter:
    """ASGI middleware that maps session URLs to the application's own paths.

    A proxy may have stripped a prefix of the path. What remains before the token must match the token's session
    (``before``, by token): mixed URLs are refused.
    """

    def __init__(self, app: Application) -> None:
        self._app = app
        self.prefixes: dict[str, tuple[str, ...]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http":
            scope = self._to_session(scope)
        await self._app(scope, receive, send)

    def _to_session(self, scope: Scope) -> Scope:
        parts = [part for part in scope["path"].split("/") if part]
        at = next((index for index, part in enumerate(parts) if part in self.prefixes), None)
        if at is None:
            if parts and parts[0] in _GATEWAY_ROUTES:
                return scope
            # An address that has ended gets the same answer as an unknown one.
            return _at(scope, ["s", "-", *_route(parts)])
        prefix, expected = tuple(parts[:at]), self.prefixes[parts[at]]
        length = min(len(prefix), len(expected))
        agree = prefix[len(prefix) - length :] == expected[len(expected) - length :] or prefix == ("s",)
        return _at(scope, ["s", parts[at] if agree else "-", *parts[at + 1 :]])


def _route(parts: Sequence[str]) -> Sequence[str]:
    """Return the most likely route of a path."""
    start = next((index for index, part in enumerate(parts) if part in ("v1", "chat", "messages", "responses")), None)
    return () if start is None else parts[start:]


def _at(scope: Mapping[str, object], parts: Sequence[str]) -> Scope:
    return {**scope, "path": "/" + "/".join(parts)}
