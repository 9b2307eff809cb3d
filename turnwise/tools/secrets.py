"""Redaction of secrets from tool errors.

A secret is declared as ``pydantic.SecretStr`` in a BaseTool's configuration or in ``tools_kwargs``, as ``{secret_env:
NAME}`` in a BaseTool's configuration (read from the environment as SecretStr), or in ``secrets`` of a tool or an
environment: names of environment variables, or SecretStr values.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import quote, quote_plus

from pydantic import BaseModel, SecretBytes, SecretStr

from turnwise.errors import ConfigError, ToolSchemaError, shown

Secret: TypeAlias = str | SecretStr
"""The name of an environment variable whose value is secret, or the value itself."""

REDACTED: Final = "***"
_ENV_KEY: Final = "secret_env"
_MOST_LEVELS: Final = 32


class Secrets:
    """Redacts secrets from texts: verbatim, and as JSON, ``repr`` and URLs encode them.

    ``holders`` are values that may hold SecretStr objects: dicts, lists, dataclasses, pydantic models.
    """

    __slots__ = ("_pattern",)

    def __init__(self, declared: Iterable[Secret] = (), *holders: Any) -> None:
        values = {
            os.environ.get(secret, "") if isinstance(secret, str) else secret.get_secret_value() for secret in declared
        }
        for holder in holders:
            _collect(holder, values, _MOST_LEVELS)
        forms = {form for value in values if value for form in _forms(value)}
        # Longer ones first: one secret may be the beginning of another.
        alternatives = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
        self._pattern = re.compile(alternatives) if forms else None

    def redact(self, text: str) -> str:
        """Return a text without secrets."""
        return text if self._pattern is None else self._pattern.sub(REDACTED, text)

    def scrub(self, error: BaseException) -> None:
        """Redact the arguments of an exception in place."""
        if self._pattern is not None:
            error.args = tuple(self.redact(text) if isinstance(text, str) else text for text in error.args)

    def cause(self, error: BaseException) -> BaseException | None:
        """Return an exception's cause if its traceback shows no secret."""
        return error if self._pattern is None or not self._pattern.search(str(error)) else None


def check_secrets(label: str, secrets: Iterable[Secret]) -> tuple[Secret, ...]:
    """Validate declared secrets; ToolSchemaError unless they are names and SecretStr values."""
    declared: tuple[Any, ...] = ("",) if isinstance(secrets, (str, SecretStr)) else tuple(secrets)
    if not all(isinstance(secret, SecretStr) or (isinstance(secret, str) and secret) for secret in declared):
        raise ToolSchemaError(
            f"{label}: secrets must be a list of names of environment variables or of SecretStr values, such as "
            'secrets=["SEARCH_API_KEY"]'
        )
    return declared


def with_secrets(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Replace every ``{secret_env: NAME}`` by the variable as a SecretStr; ConfigError if it is not set."""
    return {key: _resolve(value, f"{where}.{key}") for key, value in config.items()}


def _resolve(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {_ENV_KEY}:
            name = value[_ENV_KEY]
            if not isinstance(name, str) or not os.environ.get(name):
                raise ConfigError(
                    f"{where}: {_ENV_KEY} names the environment variable {shown(name)}, which is not set: set it, or "
                    "name another one"
                )
            return SecretStr(os.environ[name])
        return {key: _resolve(member, f"{where}.{key}") for key, member in value.items()}
    if isinstance(value, list):
        return [_resolve(member, f"{where}[{index}]") for index, member in enumerate(value)]
    return value


def _collect(value: Any, secrets: set[str], depth: int) -> None:
    if isinstance(value, SecretStr):
        secrets.add(value.get_secret_value())
    elif isinstance(value, SecretBytes):
        secrets.add(value.get_secret_value().decode("utf-8", "replace"))
    elif depth and isinstance(value, Mapping):
        for member in value.values():
            _collect(member, secrets, depth - 1)
    elif depth and isinstance(value, (list, tuple, set, frozenset)):
        for member in value:
            _collect(member, secrets, depth - 1)
    elif depth and isinstance(value, BaseModel):
        _collect(dict(value), secrets, depth - 1)
    elif depth and dataclasses.is_dataclass(value) and not isinstance(value, type):
        _collect({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, secrets, depth - 1)


def _forms(value: str) -> set[str]:
    text = value.encode("utf-8", "replace").decode()
    quoted = {quote(text), quote(text, safe=""), quote_plus(text)}
    return {value, repr(value)[1:-1], json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], *quoted}
