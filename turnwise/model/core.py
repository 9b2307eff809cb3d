"""The contracts of inference: who answers a prompt with ids, and who steers a server."""

from __future__ import annotations

import contextlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Protocol, TypeVar, runtime_checkable

from turnwise.errors import RequestRefused
from turnwise.model.canonical import Canonical, TemplateArguments
from turnwise.types import (
    Completion,
    Guide,
    Logprobs,
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
    """Close a stream when the block is left: one that is only forgotten samples on until it is collected."""
    try:
        yield stream
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a server says of the model that it serves.

    Attributes:
        name: The served name.
        context_length: Most tokens that prompt and completion may have together.
        weight_version: Version of the weights in use now.
        guides: Whether completions can be held to a :class:`~turnwise.types.Guide`.
    """

    name: str
    context_length: int
    weight_version: int = 0
    guides: bool = False


class LLMClient(ABC):
    """Token ids in, token ids out. The only thing that a Session asks of a model."""

    @abstractmethod
    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        """Sample one completion.

        Args:
            prompt: The ids the model is to see, exactly.
            params: How to sample. ``stop_token_ids`` is part of it.
            session_id: Requests with equal ids prefer the replica that holds their prefix.

        Returns:
            The completion. A completion that a weight update interrupted is continued by the client and
            comes back as one, with a version span for each part.

        Raises:
            InferenceError: The server failed; the same request may succeed later.
            RequestRefused: The server refused the request.
            GuideRefused: Its completion cannot be held to ``params.guide``.
        """

    @abstractmethod
    def stream(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> AsyncIterator[TokenDelta]:
        """Sample one completion, piece by piece. Same arguments and errors as :meth:`generate`."""

    async def score(self, token_ids: TokenIds, *, session_id: str = "") -> Logprobs:
        """Return how likely the model finds ids that it did not sample.

        Args:
            token_ids: int32 of shape [tokens], fewer than the context length.
            session_id: As for :meth:`generate`.

        Returns:
            float32 of shape [tokens]: log-probability of each id given those before it, at temperature 1; 0 for the
            first, which nothing predicts.

        Raises:
            InferenceError: The server failed, or answered nothing of the kind.
            RequestRefused: The server refused the request, or this client has no way to ask.
        """
        del token_ids, session_id
        raise RequestRefused(f"{type(self).__name__} cannot score given ids: ask a server of token ids")

    @abstractmethod
    async def model_info(self) -> ModelInfo:
        """Return what is served."""

    @abstractmethod
    async def close(self) -> None:
        """Release connections. Closing twice is no error."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a manifest.

    Attributes:
        name: The parameter's name in the Hugging Face state dict.
        shape: Its shape.
        dtype: Its torch dtype without the prefix (``float32``, ``bfloat16``).
        checksum: Of its bytes, 32 hexadecimal digits (``engine/weights.py``).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * max(1, int(bits.group()) // 8 if bits else 1)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What the tensors of a manifest are that holds low-rank adapters (LoRA) in the place of whole weights.

    For each target ``T``, a matrix ``T.weight`` of shape [out, in], there are ``T.lora_A.weight`` of shape [rank, in]
    and ``T.lora_B.weight`` of shape [out, rank], and nothing else. What is served is ``W0 + alpha / rank * B A``, W0
    being the matrix as the server was launched with it.

    Attributes:
        rank: How many columns B has.
        alpha: Divided by the rank it is the adapter's scale.
        targets: Names of the modules whose matrices change, as in the Hugging Face state dict.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """What the product of both factors is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Where a version of the weights lies and what it holds.

    Attributes:
        version: The version the server reports once these are loaded.
        path: A safetensors file (shared memory on one machine).
        tensors: What the file holds, all of it checked before any parameter changes.
        adapter: What the tensors are where they are adapters; None: all weights of the model.
    """

    version: int
    path: str
    tensors: tuple[TensorEntry, ...] = field(default=())
    adapter: AdapterInfo | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.tensors)

    def same_weights(self, other: WeightManifest | None) -> bool:
        """Return whether another version has the same file with the same content: only its number differs."""
        return other is not None and replace(other, version=self.version) == self


class Replica(ABC):
    """Control plane of one inference server."""

    @property
    @abstractmethod
    def url(self) -> str:
        """Base URL; valid after :meth:`launch`."""

    @abstractmethod
    async def launch(self) -> None:
        """Start the server and wait until it answers. Raises InferenceError with the end of its log."""

    @abstractmethod
    async def health(self) -> bool:
        """Return whether the server answers."""

    @abstractmethod
    async def pause(self, *, abort: bool = False) -> None:
        """Stop sampling; requests in flight are kept, or with ``abort`` answered with what they have."""

    @abstractmethod
    async def resume(self) -> None:
        """Sample again."""

    @abstractmethod
    async def abort(self) -> int:
        """Answer every request in flight with what it has. Returns how many there were."""

    @abstractmethod
    async def update_weights(self, manifest: WeightManifest) -> int:
        """Load a version in place, drop the KV cache of older ones. Returns the version now served.

        A version with the weights that are served (:meth:`WeightManifest.same_weights`) need not be loaded again.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the server and wait for its process. Closing twice is no error."""


class StructuralTags(Protocol):
    """What a completion is held to, as servers are sent it."""

    def tagged(self, guide: Guide, tail: TokenIds, tools: Sequence[ToolSchema]) -> Guide:
        """Return a guide with its tag, for what follows the context ``tail``.

        Raises:
            GuideRefused: The chat format has no grammar of its calls, or the schema is not one to hold a text to.
        """


@runtime_checkable
class Renderer(Protocol):
    """Messages to ids and back. Only new ids ever come back from :meth:`extend`.

    Implementations are stateless but for caches: the same arguments give the same ids, at any time and for
    any session. ``why`` is set by an :meth:`extend` that returned None, before anything else runs.
    """

    stop_ids: frozenset[int]
    why: str
    media: frozenset[str]
    """Kinds of media that it places besides text: ``image``, ``video``, ``audio``."""
    guides: StructuralTags
    """Grammars of completions in its chat format."""
    arguments: TemplateArguments
    """What the template is given besides messages, tools and what the run set: another value, another root."""

    @property
    def reads(self) -> frozenset[str]:
        """The arguments that a conversation may give the template; none where they are fixed."""

    def takes(self, name: str, value: Any) -> bool:
        """Return whether a conversation may give this argument, and the template knows this value of it."""

    def under(self, arguments: TemplateArguments) -> Renderer:
        """Return the renderer of conversations with these arguments and none besides; this one where it is.

        All these renderers stop at the same ids and count what they escape together.

        Raises:
            RenderError: The template takes no such argument, or raises on it.
        """

    def at(self, now: datetime) -> Renderer:
        """Return the renderer of conversations that begin at a time: the date that a template writes is that of then.
        This one where the template writes none, or another was set.
        """

    @property
    def escaped(self) -> int:
        """How many strings of control ids in messages were kept as text so far, by all renders and extensions."""

    def count(self, text: str) -> int:
        """Return how many ids a text takes inside a message."""

    def render(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> TokenIds:
        """Return the whole prompt, generation prompt included.

        Raises:
            RenderError: The template raised on these messages.
        """

    def extend(
        self,
        tail: TokenIds,
        completion: TokenIds,
        last: Canonical,
        new: Sequence[Canonical],
        tools: Sequence[ToolSchema],
    ) -> TokenIds | None:
        """Return the ids that follow ``tail + completion`` when ``new`` is said next.

        Args:
            tail: The context ids right before the completion (never the whole prompt).
            completion: The sampled ids.
            last: What they mean, with the ids and names issued for its calls.
            new: The messages to append; none of them was sampled.
            tools: The tools of this root.

        Returns:
            Close of the turn (as far as the completion lacks it) + new messages + generation prompt, or None
            with ``why`` set to one of ``stop_in_reasoning``, ``ids_after_stop``, ``message_dropped``,
            ``depends_on_history``, ``template_error: ...``, ``no_bridge``.
        """

    def parse(self, completion: TokenIds, tail: TokenIds, tools: Sequence[ToolSchema]) -> Message:
        """Return the assistant message that these ids mean: content, reasoning, calls with their errors.

        Never raises on sampled ids, whatever they are. Calls carry the model's own ids where the format has
        them, else an empty id (the session issues one).
        """

    def drops(self, messages: Sequence[Canonical], tools: Sequence[ToolSchema]) -> frozenset[int]:
        """Return the indices of messages whose reasoning the template drops when it renders them all."""

    def completion(self, message: Message, tools: Sequence[ToolSchema]) -> TokenIds:
        """Return what a model would sample to say ``message``: the ids that follow the generation prompt in
        the template's own render, stop id included. For scripts and demonstrations.
        """

    def decode(self, ids: TokenIds) -> str:
        """Return the text of ids, special tokens included (to show, never to re-encode)."""

    def describe(self) -> dict[str, Any]:
        """Return the chat format and how it was decided: what is printed at start and saved with a run."""


@dataclass(frozen=True, slots=True)
class FrozenPolicy:
    """A policy that samples and is not trained.

    Attributes:
        client: Who samples.
        renderer: Messages to ids and back, as this model has them.
        info: What it can take.
        temperature: At which it samples, whatever the run does; None follows the run.
    """

    client: LLMClient
    renderer: Renderer
    info: ModelInfo
    temperature: float | None = None
