"""Errors of the gateway's wire APIs, and the mapping of the package's own errors to them."""

from __future__ import annotations

import re
from typing import Literal

from turnwise.errors import (
    BudgetExceeded,
    DiskError,
    InferenceError,
    RenderError,
    RequestRefused,
    SessionError,
    StructuredOutputError,
    TurnwiseError,
)
from turnwise.types import StopReason

_ADDRESS = re.compile(r"https?://(?P<host>[^\s/]+)\S*")
_SERVER = "the model server"


class ApiError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        message: The problem and its remedy.
        param: The offending field of the body, or None.
        code: Machine-readable code, such as ``context_length_exceeded``, or None.
        retry_after: Seconds after which the same request may succeed, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after


CONTEXT = "context_length_exceeded"
Lenient = Literal["tool_choice", "server_tools"]
"""What can be ignored of a request: a forced call without structured output; tools that the provider runs."""
LENIENT: tuple[Lenient, ...] = ("server_tools",)
"""What is ignored by default: programs offer such tools unasked."""


def invalid(param: str, message: str) -> ApiError:
    """Return the error of an invalid field."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """Return the error of an unsupported field."""
    return ApiError(400, f"{param} is not supported here: {message}", param=param, code="unsupported_parameter")


def not_found(message: str) -> ApiError:
    """Return the error of a missing resource."""
    return ApiError(404, message, code="not_found")


_INSTEAD = (
    ("completions", "a text is no conversation; use /v1/chat/completions (lm-eval: local-chat-completions)"),
    ("responses/input_tokens", "use POST /v1/messages/count_tokens"),
    ("responses/compact", "nothing is compacted here; compact in the agent"),
    ("responses", "stored responses are only continued; send the id as previous_response_id to POST /v1/responses"),
    ("messages/batches", "use POST /v1/messages for each request"),
    ("tokenize", "use POST /v1/messages/count_tokens, or the tokenizer in the directory of the model"),
    ("detokenize", "use the tokenizer in the directory of the model"),
)
_ROUTES = (
    "a session has POST /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens, GET /v1/models"
)


def missing_route(method: str, route: str) -> ApiError:
    """Return the error of a route that does not exist, with the one to use."""
    path = route.removeprefix("v1/") + "/"
    instead = next((text for start, text in _INSTEAD if path.startswith(f"{start}/")), _ROUTES)
    return not_found(f"{method} /{route} is not a route here: {instead}")


def too_deep() -> ApiError:
    """Return the error of a body that is nested too deep."""
    return ApiError(400, "the body is nested too deeply: reduce its nesting", code="invalid_json")


def api_error(error: TurnwiseError, guide_field: str = "") -> ApiError:
    """Map an error of this package; ``guide_field`` is the request's field for structured output."""
    if isinstance(error, StructuredOutputError):
        field = guide_field or "body"
        return unsupported(field, _without_address(error))
    if isinstance(error, BudgetExceeded):
        return ApiError(400, _budget_message(error), param="messages", code=CONTEXT)
    if isinstance(error, (SessionError, RenderError)):
        return ApiError(400, str(error), param="messages", code="invalid_request")
    if isinstance(error, RequestRefused):
        return ApiError(400, _without_address(error), code="request_refused")
    if isinstance(error, InferenceError):
        # Nothing was recorded: the same request may be sent again.
        return ApiError(503, _without_address(error), code="overloaded", retry_after=1)
    if isinstance(error, DiskError):
        return ApiError(507, str(error), code="disk_full", retry_after=10)
    return ApiError(500, str(error), code="server_error")


def _without_address(error: TurnwiseError) -> str:
    """Return the message without the server's address, which has no authentication."""
    message = str(error)
    match = _ADDRESS.match(message)
    return message.replace(match[0], _SERVER).replace(match["host"], _SERVER) if match else message


def _budget_message(error: BudgetExceeded) -> str:
    """Return the message for an exhausted budget; for a full context in the words on which agents compact."""
    if error.stop_reason != StopReason.CONTEXT_OVERFLOW or error.used is None or error.limit is None:
        return str(error)
    # At least one token must be left to sample.
    maximum = error.limit - 1
    qualifier = "" if error.exact else "at least "
    return (
        f"prompt is too long: {qualifier}{error.used} tokens > {maximum} maximum. "
        f"This model's maximum context length is {error.limit} tokens"
    )
