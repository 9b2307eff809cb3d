"""Errors of the gateway: one class, and which of the package's own errors is answered how."""

from __future__ import annotations

import re

from turnwise.errors import (
    BudgetExceeded,
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
        status: The HTTP status.
        message: What is wrong and what to do.
        param: The field of the body that is wrong, or None.
        code: A word that programs compare, such as ``context_length_exceeded``, or None.
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


def invalid(param: str, message: str) -> ApiError:
    """Return the error of a field that is wrong."""
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_value")


def unsupported(param: str, message: str) -> ApiError:
    """Return the error of a field that asks for what cannot be done here."""
    return ApiError(400, f"{param} is not supported here: {message}", param=param, code="unsupported_parameter")


def too_deep() -> ApiError:
    """Return the error of a body that holds lists or objects in too many of their kind."""
    return ApiError(400, "the body is nested too deep: write it flatter", code="invalid_json")


def api_error(error: TurnwiseError, guide_field: str = "") -> ApiError:
    """Return how a request that raised an error of this package is answered.

    Args:
        error: What was raised.
        guide_field: The field of the request that its answer is held to something by.
    """
    if isinstance(error, StructuredOutputError):
        field = guide_field or "body"
        return unsupported(field, _without_address(error))
    if isinstance(error, BudgetExceeded):
        return ApiError(400, _spent(error), param="messages", code=CONTEXT)
    if isinstance(error, (SessionError, RenderError)):
        return ApiError(400, str(error), param="messages", code="invalid_request")
    if isinstance(error, RequestRefused):
        return ApiError(400, _without_address(error), code="request_refused")
    if isinstance(error, InferenceError):
        # Nothing was recorded: the same request may be sent again.
        return ApiError(503, _without_address(error), code="overloaded", retry_after=1)
    return ApiError(500, str(error), code="server_error")


def _without_address(error: TurnwiseError) -> str:
    """Return what an error says without the address of the server: nobody is asked for a key there."""
    told = str(error)
    found = _ADDRESS.match(told)
    return told.replace(found[0], _SERVER).replace(found["host"], _SERVER) if found else told


def _spent(error: BudgetExceeded) -> str:
    """Return what agents are told when nothing is left.

    A prompt that fills the context is told in the words by which they know that a shorter history helps, with the
    numbers that they read from them. Against every other budget it does not help, and they are not told that it does.
    """
    if error.stop_reason != StopReason.CONTEXT_OVERFLOW or error.used is None or error.limit is None:
        return str(error)
    # At least one token must be left to sample.
    most = error.limit - 1
    return (
        f"prompt is too long: {error.used} tokens > {most} maximum. This model's maximum context length is "
        f"{error.limit} tokens"
    )
