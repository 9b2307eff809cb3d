"""Contracts of inference: LLM client, replica control plane, weight manifest and renderer."""

from __future__ import annotations

import contextlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from turnwise.errors import EngineDied, RequestRefused
from turnwise.model.canonical import Canonical, TemplateArguments
from turnwise.types import (
    Completion,
    Guide,
    Logprobs,
    Media,
    Message,
    SamplingParams,
    TokenDelta,
    TokenIds,
    TokenPrompt,
    ToolSchema,
)

Item = TypeVar("Item")


@contextlib.asynccontextmanager
async def closing(stream: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """Close a stream on exit; an abandoned one would keep sampling until garbage collection."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model; ``context_length`` bounds prompt plus completion, ``guides``: it supports structured output."""

    name: str
    context_length: int
    weight_version: int = 0
    guides: bool = False


class LLMClient(ABC):
    """Client of an inference server: token ids in, token ids out."""

    @abstractmethod
    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Sample one completion.

        Args:
            prompt: The exact ids that the model sees.
            params: Sampling parameters, ``stop_token_ids`` included.
            session_id: Requests with equal ids prefer the replica that caches their prefix.

        Returns:
            The completion; one that a weight update interrupted is resumed, with a version span for each part.

        Raises:
            InferenceError: The server failed; the same request may succeed later.
            RequestRefused: The server refused the request.
            StructuredOutputError: The completion cannot be constrained to ``params.guide``.
        """

    async def stream(
        self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str
    ) -> AsyncIterator[TokenDelta]:
        """Sample one completion incrementally, by default at once; same arguments and errors as :meth:`generate`."""
        answer = await self.generate(prompt, params, session_id=session_id)
        versions = answer.weight_versions
        latest = versions[-1][0] if versions else None
        yield TokenDelta(
            answer.token_ids, answer.logprobs, latest, answer.finish_reason, versions, answer.routed_experts
        )

    async def score(self, token_ids: TokenIds, *, session_id: str = "") -> Logprobs:
        """Return the log-probabilities of given ids under the model.

        Args:
            token_ids: int32 of shape [tokens], fewer than the context length.
            session_id: As for :meth:`generate`.

        Returns:
            float32 of shape [tokens]: log-probability of each id given its prefix, at temperature 1; 0 for the first.

        Raises:
            InferenceError: The server failed, or returned no scores.
            RequestRefused: The server refused the request, or the client does not support scoring.
        """
        del token_ids, session_id
        raise RequestRefused(f"{type(self).__name__} cannot score given ids: use a server of token ids")

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """Return the served model's description."""

    @abstractmethod
    async def close(self) -> None:
        """Release connections; idempotent."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a weight manifest.

    Attributes:
        name: Parameter name in the Hugging Face state dict.
        dtype: torch dtype without the prefix (``float32``, ``bfloat16``).
        checksum: Of its bytes, 32 hexadecimal digits (``engine/weights.py``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * max(1, int(bits.group()) // 8 if bits else 1)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """LoRA parameters of a manifest that carries adapters instead of full weights.

    For each target ``T``, a matrix ``T.weight`` of shape [out, in], the manifest holds exactly ``T.lora_A.weight`` of
    shape [rank, in] and ``T.lora_B.weight`` of shape [out, rank]; for the matrices ``T`` of experts, [experts, rows,
    columns], stacks of them. The server serves ``W0 + alpha / rank * B A``, where W0 is the matrix at launch.

    Attributes:
        targets: Names of the adapted modules, or of experts' matrices, as in the Hugging Face state dict.
        name: Name under which requests ask for it, on a server of several adapters; None puts it into the served model.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    name: str | None = None

    @property
    def scale(self) -> float:
        """``alpha / rank``."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where the processes of one update meet, of which the first sends weights to all others.

    Attributes:
        backend: What moves the bytes: ``gloo``, ``nccl`` or ``ipc``.
        host: Address of the store that they meet at.
        port: Its port.
        size: Number of processes.
        rank: Number of this one, or of the first process of a server.
    """

    backend: str
    host: str
    port: int
    size: int
    rank: int = 0


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """One version of the weights: file and tensors.

    Attributes:
        version: Version that the server reports once these weights are loaded.
        path: A safetensors file (shared memory on one machine); empty where a version is announced, or sent to a group.
        tensors: Contents of the file, all checked before any parameter changes.
        adapter: LoRA parameters; None for full weights.
        group: Where the weights are sent, once; None where they are in a file.
    """

    version: int
    path: str
    tensors: tuple[TensorEntry, ...] = field(default=())
    adapter: AdapterInfo | None = None
    group: GroupAddress | None = None

    @property
    def nbytes(self) -> int:
        """Total size in bytes."""
        return sum(entry.nbytes for entry in self.tensors)

    def same_weights(self, other: WeightManifest | None) -> bool:
        """Return whether another version has the same file and content, and only its number differs."""
        return other is not None and replace(other, version=self.version) == self


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory of a process or several, in bytes.

    Attributes:
        resident: Resident set now, shared pages included.
        peak: Largest resident set since the start of the process.
        device_peak: Largest memory allocated on its GPU; 0 without one.
    """

    resident: int
    peak: int
    device_peak: int = 0


@dataclass(frozen=True, slots=True)
class ServedName:
    """How requests to a server name what samples.

    Attributes:
        model: The name; None for the model that it serves.
        version: Version of the weights under this name, where the server does not report it.
    """

    model: str | None = None
    version: int | None = None


class SleepMode(ABC):
    """Gives the memory of a server back while it is idle, and takes it again, in parts."""

    @abstractmethod
    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Give back the memory of keys, values and weights, which are lost unless kept in main memory; requests wait.

        Idempotent. A server that is restarted meanwhile sleeps again. Raises InferenceError.
        """

    @abstractmethod
    async def wake(self, part: Literal["weights", "kv_cache"]) -> None:
        """Take memory again: for ``weights``, which have to be loaded unless kept; then for ``kv_cache``. Idempotent.

        Raises InferenceError, also where a restart lost what was woken and loaded before: then all is done again.
        """


class Replica(ABC):
    """Control plane of one inference server.

    An engine's class is constructed as ``Class(model, config, name=..., weight_version=..., log_file=..., number=...,
    url=...)``; see :class:`turnwise.inference.replica.ServerReplica`, from which most engines derive.
    """

    serves_adapters: ClassVar[bool] = False
    """Whether one server samples from several adapters by name, each with its own versions."""
    served_names: Mapping[str, ServedName] = MappingProxyType({})
    """How requests name an adapter, where it is not by its own name."""
    can_sleep: ClassVar[bool] = False
    """Whether servers of the engine have a :attr:`sleep_mode`."""
    sleep_mode: SleepMode | None = None
    """Gives its memory back; None where it cannot."""
    sleeps: bool = False
    """Whether it is going to be used; set before the launch."""
    group_ranks: int = 0
    """Processes of the server that receive weights in a group, once updates are prepared; 0 where it cannot."""
    outdated: bool = False
    """Whether a restart does not bring back the last weights: they are in no file, or came meanwhile."""
    paused_s: float = 0.0
    """Seconds for which updates paused its requests so far."""

    @classmethod
    async def check(cls, model: Path, config: Any) -> list[str]:
        """Check what can be checked before a server of ``config`` (an ``InferenceConfig``) is started.

        Returns:
            Warnings. Errors are raised as ConfigError, naming key, value and remedy.
        """
        del model, config
        return []

    @property
    @abstractmethod
    def url(self) -> str:
        """Base URL; valid after :meth:`launch`."""

    @abstractmethod
    async def launch(self) -> None:
        """Start the server and wait until it is ready. Raises InferenceError with the end of its log."""

    @abstractmethod
    async def wait_died(self) -> EngineDied:
        """Wait until the server ends unexpectedly; return the error that describes it."""

    @abstractmethod
    async def restart(self) -> None:
        """Start a server that died again, with its last weights; requests wait. Raises InferenceError."""

    @abstractmethod
    async def health(self) -> bool:
        """Return whether the server responds."""

    @abstractmethod
    async def pause(self, *, abort: bool = False) -> None:
        """Pause sampling; requests in flight are kept, or with ``abort`` finished with what they have."""

    @abstractmethod
    async def resume(self) -> None:
        """Resume sampling."""

    async def prepare_updates(self, announced: Sequence[WeightManifest]) -> None:  # noqa: B027 - most need nothing
        """Check that weights can be updated, before the first update.

        Args:
            announced: What updates will bring, without a path and checksums, where that is known.

        Raises:
            InferenceError: They cannot; it names the remedy.
        """

    @abstractmethod
    async def update_weights(self, manifest: WeightManifest) -> int:
        """Load a version in place and return the version now served; the KV cache of other weights is dropped.

        An adapter with a name replaces the last one of that name; others, and what they sample, are not touched.
        On RequestRefused the server has kept its weights. After any other failure it serves none: it counts as dead,
        and :meth:`restart` brings back the last version that was loaded.
        """

    async def stats(self) -> dict[str, Any]:
        """Return the counters that the engine has, of ``COUNTERS`` in ``inference/replica_set.py``, and others."""
        return {}

    async def memory(self) -> MemoryUse | None:
        """Return the memory of the server; None where it is not known."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """Stop the server and wait for its process; idempotent."""


class StructuralTags(Protocol):
    """Structural tags (grammars) for structured output in a chat format."""

    def tagged(self, guide: Guide, tail: TokenIds, tools: Sequence[ToolSchema]) -> Guide:
        """Return ``guide`` with its structural tag, for a completion after ``tail``. Raises StructuredOutputError."""


@runtime_checkable
class Renderer(Protocol):
    """Renders messages to ids and parses ids to messages; :meth:`extend` returns new ids only.

    Implementations are stateless except for caches and counters: equal arguments give equal ids. ``copy.copy`` returns
    an equal renderer that another thread may use. ``why`` is set by an :meth:`extend`
    that returned None, before anything else runs.
    """

    stop_ids: frozenset[int]
    why: str
    media: frozenset[str]
    """Kinds of media that it places besides text: ``image``, and ``video`` as a list of images."""
    placed: tuple[Media, ...]
    """Media of the last :meth:`render` or :meth:`extend`, at their places in its ids; read at once."""
    guides: StructuralTags
    """Grammars of completions in its chat format."""
    arguments: TemplateArguments
    """What the template is given besides messages, tools and what the run set: another value, another root."""
    room: int | None
    """Ids that a text may have: PromptTooLong is raised instead of tokenizing a text that certainly has more."""

    @property
    def reads(self) -> frozenset[str]:
        """Template arguments that a conversation may set; empty where they are fixed."""

    def takes(self, name: str, value: Any) -> bool:
        """Return whether a conversation may set this template argument to this value."""

    def under(self, arguments: TemplateArguments) -> Renderer:
        """Return the renderer for exactly these template arguments, with shared counters. Raises RenderError."""

    def at(self, now: datetime) -> Renderer:
        """Return the renderer for conversations that begin at ``now``, for templates that write the date."""

    @property
    def escaped(self) -> int:
        """Number of control-token strings in messages that were kept as text, over all renders and extensions."""

    def count(self, text: str) -> int:
        """Return the number of ids of a text inside a message."""

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the whole prompt, generation prompt included.

        Raises RenderError if the template raises, or an image cannot be read or placed.
        """

    def extend(
        self,
        tail: TokenIds,
        completion: TokenIds,
        last: Canonical,
        new: Sequence[Canonical],
        tools: Sequence[ToolSchema],
    ) -> TokenIds | None:
        """Return the ids that follow ``tail + completion`` when ``new`` is appended.

        Args:
            tail: The context ids right before the completion (never the whole prompt).
            completion: The sampled ids.
            last: Their canonical message, with the ids and names issued for its calls.
            new: The messages to append; none was sampled.
            tools: The tools of this root.

        Returns:
            Close of the turn (as far as the completion lacks it), new messages and generation prompt; or None with
            ``why`` set to ``stop_in_reasoning``, ``ids_after_stop``, ``message_dropped``, ``depends_on_history``,
            ``template_error: ...`` or ``no_bridge``.
        """

    def parse(self, completion: TokenIds, tail: TokenIds, tools: Sequence[ToolSchema]) -> Message:
        """Parse sampled ids into an assistant message: content, reasoning, calls with their errors.

        Never raises. Calls carry the model's own ids where the format has them, else an empty id.
        """

    def drops(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> frozenset[int]:
        """Return the indices of messages whose reasoning the template drops from the history."""

    def completion(self, message: Message, tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the ids a model would sample for ``message`` after the generation prompt, stop id included."""

    def decode(self, token_ids: TokenIds) -> str:
        """Return the text of ids, special tokens included (for display, never to re-encode)."""

    def describe(self) -> dict[str, Any]:
        """Return the chat format and how it was chosen, as printed at start and saved with a run."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy that is served, beside the first one of a run.

    Attributes:
        client: Inference client.
        renderer: Renderer of its model.
        info: Description of its model.
        temperature: Sampling temperature; None follows the run.
    """

    client: LLMClient
    renderer: Renderer
    info: ModelInfo
    temperature: float | None = None
