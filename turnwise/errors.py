"""The exception hierarchy, one class per boundary that an error can cross, and what undoes and names at a boundary."""

from __future__ import annotations

import re
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from difflib import get_close_matches
from typing import ClassVar

INTERRUPTS = (CancelledError, KeyboardInterrupt, GeneratorExit)
"""What ends a user's code from outside. It is raised on, where whatever else that code raises becomes data."""


class TurnwiseError(Exception):
    """Base of every error raised on purpose; ``retryable`` if repeating the same work may succeed, ``at_start`` if an
    episode's agent never began.
    """

    retryable: ClassVar[bool] = False
    at_start: ClassVar[bool] = False


class ConfigError(TurnwiseError):
    """A configuration value is unknown or invalid. The message names path, value and remedy."""


class MissingExtraError(TurnwiseError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'turnwise-rl[{extra}]'")


class TaskError(TurnwiseError):
    """A dataset or one of its rows cannot be used. The message names file, row and field."""


class RegistryError(TurnwiseError):
    """A name is unknown in a registry, or already taken."""


class ToolSchemaError(TurnwiseError):
    """A function's signature or a given schema cannot be expressed as a tool schema."""


class ToolError(TurnwiseError):
    """Raised by a tool; its text is returned to the model, which may recover."""


class EnvError(TurnwiseError):
    """An environment raised or broke its contract: an error on the trajectory, never a reward of zero."""

    retryable = True


class ScorerError(EnvError):
    """The scorer of a search raised, or returned no finite number: an error of that episode alone."""

    retryable = False


class SandboxError(TurnwiseError):
    """A sandbox or its backend failed; a failed command is a result instead."""

    retryable = True


class SandboxStartError(SandboxError):
    """A sandbox did not start."""


class SandboxDied(SandboxError):
    """A running sandbox is gone; its episode is lost and may be retried."""


class SandboxUnavailable(SandboxError):
    """This machine lacks a backend, engine, image or isolation. The message names the remedy."""

    retryable = False


class SandboxFileError(SandboxError):
    """A file inside a sandbox cannot be read or written; the sandbox itself works."""

    retryable = False


class SandboxFileNotFound(SandboxFileError, FileNotFoundError):
    """There is no such file inside the sandbox."""


class SandboxFileTooLarge(SandboxFileError):
    """A file, or a folder to be downloaded, exceeds the caller's limit."""


class AgentError(TurnwiseError):
    """An agent raised or broke its contract."""


class RunnerDisconnected(AgentError):
    """The connection between a remote runner and its run is lost. The episode is retried."""

    retryable = True


class RenderError(TurnwiseError):
    """A chat template cannot render these messages, or no chat format was detected."""


class GatewayError(TurnwiseError):
    """A request failed in the gateway's own code. The message names what was raised there."""


class PromptTooLong(TurnwiseError):
    """A text has at least ``tokens`` ids, more than the caller has room for; it was not tokenized."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"a text has at least {tokens} tokens")
        self.tokens = tokens


class SessionError(TurnwiseError):
    """A session refuses a request, or a client broke its contract."""


class BudgetExceeded(TurnwiseError):
    """No tokens or turns are left (``used`` of ``limit``), or too many calls were unusable.

    ``exact`` is False where ``used`` is a lower bound: a text that is certainly too long is not tokenized.
    """

    def __init__(
        self, stop_reason: str, message: str, *, used: int | None = None, limit: int | None = None, exact: bool = True
    ) -> None:
        super().__init__(message)
        self.stop_reason = stop_reason
        self.used = used
        self.limit = limit
        self.exact = exact


class InferenceError(TurnwiseError):
    """An inference server failed, disconnected, or sent a malformed response."""

    retryable = True


class PlacementError(TurnwiseError):
    """A process cannot be placed on a cluster: nothing has room for it, or its node was lost."""

    retryable = True


class DeadlineExceeded(InferenceError):
    """A completion took longer than its client allows, waiting for a server included."""


class RequestRefused(InferenceError):
    """An inference server rejected a request that it understood: retrying does not help."""

    retryable = False


class EndpointUnusable(RequestRefused):
    """A hosted endpoint answers no request of this run: it refuses the key, or no model is named."""


class StructuredOutputError(TurnwiseError):
    """The requested structured output is unsupported by this engine, chat format or schema."""


class EngineDied(InferenceError):
    """An inference server's process ended unexpectedly."""


class TrainError(TurnwiseError):
    """Training cannot start or continue."""


class DiskError(TrainError):
    """A run cannot write to disk: it stops, and resumes once there is room."""


class RankDied(TrainError):
    """A rank process of a learner ended unexpectedly, and its share of the weights with it."""


class CheckpointError(TurnwiseError):
    """A checkpoint is missing, incomplete, or does not fit the run."""


class FormatError(TurnwiseError):
    """Bytes on disk or on the wire do not match their schema version."""


class ReplayError(TurnwiseError):
    """A recorded episode cannot be played again as it was."""


class AuditError(TurnwiseError):
    """The files of a run contradict an invariant."""


def shown(value: object, limit: int = 80) -> str:
    """Return a value as error messages quote it: its ``repr``, cut in the middle to ``limit`` characters."""
    # A subclass of str (a text that knows its file, an enum's member) is quoted as the text that its writer knows.
    try:
        text = repr(str(value) if isinstance(value, str) else value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep to be shown"
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail - 3]}...{text[-tail:]}"


def nearest(name: str, names: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` with the closest known name, ignoring case and marks, or an empty text."""
    by_normalised_key = {re.sub(r"[\W_]", "", key.lower()): key for key in sorted(names)}
    spelled = re.sub(r"[\W_]", "", name.lower())
    longer = [key for key in by_normalised_key if len(spelled) > 2 and key.startswith(spelled)]
    close = sorted(longer, key=len) or get_close_matches(spelled, by_normalised_key, n=1)
    return f"; did you mean {by_normalised_key[close[0]]!r}?" if close else ""


def first_of(error: BaseException) -> Exception:
    """Return the first error of a group, of nested groups too, or the error itself; no Exception: as an AgentError."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, Exception):
        return error
    agent_error = AgentError(f"{type(error).__name__}: {error}")
    agent_error.__cause__ = error
    return agent_error


@contextmanager
def undo_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` if the block raises anything, a cancellation included; the error is raised again."""
    try:
        yield
    except BaseException:  # raised again: only what was begun is undone
        undo()
        raise


@asynccontextmanager
async def undo_on_error_async(undo: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Await ``undo`` if the block raises anything, a cancellation included; the error is raised again."""
    try:
        yield
    except BaseException:  # raised again: only what was begun is undone
        await undo()
        raise


@contextmanager
def requires_extra(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Name the extra that brings an import of the block, where it is missing. Raises MissingExtraError."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra, purpose) from error


@contextmanager
def user_code(kind: type[TurnwiseError], what: str) -> Iterator[None]:
    """Name what a user's code raises in the block: as ``kind``, ``what`` and the error. A TurnwiseError passes."""
    try:
        yield
    except (TurnwiseError, *INTERRUPTS):
        raise
    except BaseException as error:  # a user's code may raise anything, such as SystemExit or the panic of an extension
        raise kind(f"{what} {raised_text(error)}") from error


def raised_text(error: BaseException) -> str:
    """Return type and message of what a user's code raised; of SQLite's error about threads, the remedy."""
    name = type(error).__name__
    if name == "ProgrammingError" and "same thread" in str(error):
        # Its own message numbers the threads: no two episodes would be equal.
        return (
            f"{name}: a connection of SQLite is used in another thread than it was opened in, and plain tools and "
            "reward functions run in threads: run the tool on the event loop (@function_tool(inline=True)), or open "
            "the connection with sqlite3.connect(..., check_same_thread=False)"
        )
    return f"{name}: {error}".removesuffix(": ")
