"""One class per boundary that an error can cross."""

from __future__ import annotations

from typing import ClassVar


class TurnwiseError(Exception):
    """Base of every error that this package raises on purpose.

    Attributes:
        retryable: Whether the same work may succeed when it is tried again (an infrastructure failure).
    """

    retryable: ClassVar[bool] = False


class ConfigError(TurnwiseError):
    """A configuration value is unknown or wrong. The message names its path, the value and the remedy."""


class MissingExtraError(TurnwiseError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}: pip install 'turnwise[{extra}]'")


class TaskError(TurnwiseError):
    """A dataset or one of its rows cannot be used. The message names file, row and field."""


class RegistryError(TurnwiseError):
    """A name is unknown in a registry, or already taken by something else."""


class ToolSchemaError(TurnwiseError):
    """A function's signature or a given schema cannot be offered to a model."""


class ToolError(TurnwiseError):
    """Raised by a tool; its text is answered to the model, which may recover."""


class EnvError(TurnwiseError):
    """An environment raised, or broke its contract. Never a reward of zero: an error on the trajectory."""

    retryable = True


class SandboxError(TurnwiseError):
    """A sandbox or its backend failed; what a command inside it did is a result instead."""

    retryable = True


class SandboxStartError(SandboxError):
    """A sandbox did not start."""


class SandboxDied(SandboxError):
    """A sandbox that ran is gone; the episode in it is lost and may be played anew."""


class SandboxUnavailable(SandboxError):
    """This machine cannot give what was asked for: no such backend, engine, image or isolation. Names the remedy."""

    retryable = False


class SandboxFileError(SandboxError):
    """A file inside a sandbox cannot be read or written; the sandbox itself is well."""

    retryable = False


class SandboxFileNotFound(SandboxFileError, FileNotFoundError):
    """There is no such file inside the sandbox."""


class SandboxFileTooLarge(SandboxFileError):
    """A file, or a folder that was to be downloaded, is larger than the caller takes."""


class AgentError(TurnwiseError):
    """An agent raised, or broke its contract."""


class RunnerDisconnected(AgentError):
    """The process that played an episode for a run is gone, or the run is gone from it. The episode is played anew."""

    retryable = True


class RenderError(TurnwiseError):
    """A chat template cannot render these messages, or no chat format could be decided."""


class SessionError(TurnwiseError):
    """A request that a session refuses by name, or a client that broke its contract."""


class BudgetExceeded(TurnwiseError):
    """Nothing is left to sample, or no unusable call is left.

    Attributes:
        stop_reason: With which the trajectory ends.
        used: How many tokens (or turns) are used; None where the reason is no number.
        limit: How many may be.
    """

    def __init__(self, stop_reason: str, message: str, *, used: int | None = None, limit: int | None = None) -> None:
        super().__init__(message)
        self.stop_reason = stop_reason
        self.used = used
        self.limit = limit


class InferenceError(TurnwiseError):
    """An inference server failed, vanished, or answered nonsense."""

    retryable = True


class RequestRefused(InferenceError):
    """An inference server understood the request and refused it: trying again changes nothing."""

    retryable = False


class StructuredOutputError(TurnwiseError):
    """A completion cannot be held to what was asked: not by this engine or chat format, or not to this schema.

    Who asked for it is told; nothing has failed.
    """


class EngineDied(InferenceError):
    """An inference server's process ended although nobody stopped it."""


class TrainError(TurnwiseError):
    """Training cannot start or go on."""


class DiskError(TrainError):
    """The disk refuses what a run must write down: it ends, and goes on when there is room."""


class CheckpointError(TurnwiseError):
    """A checkpoint is missing, incomplete, or does not fit the run."""


class FormatError(TurnwiseError):
    """Bytes on disk or on the wire do not hold what their schema version promises."""


class AuditError(TurnwiseError):
    """What a run left on disk contradicts an invariant."""


def shown(value: object, limit: int = 80) -> str:
    """Return a value as an error message quotes it: its ``repr``, cut in the middle to at most ``limit`` characters."""
    # A subclass of str (a text that knows its file, an enum's member) is quoted as the text that its writer knows.
    try:
        text = repr(str(value) if isinstance(value, str) else value)
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deep to be shown"
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail - 3]}...{text[-tail:]}"
