"""verl's agent loops: token ids in and out, and an AgentLoopOutput at the end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from turnwise.agents.core import Agent, Episode
from turnwise.agents.outcome import use_episode
from turnwise.agents.registry import register_agent
from turnwise.chat.renderer import TemplateRenderer
from turnwise.errors import AgentError, RenderError, SessionError, shown
from turnwise.model.canonical import canonical_messages, template_arguments
from turnwise.model.core import Renderer
from turnwise.recorder.session import Session
from turnwise.recorder.token_session import TokenSession, TrainedBranch
from turnwise.tools.schema import as_schema
from turnwise.tools.selection import load_tool_config
from turnwise.types import Message, SamplingParams, StopReason, ToolSchema, as_ids

register = register_agent
initialize_tools_from_config = load_tool_config

_TAKEN_AS_READ: Mapping[str, tuple[Any, ...]] = {
    "repetition_penalty": (1.0, None), "presence_penalty": (0.0, None), "frequency_penalty": (0.0, None),
    "n": (1, None), "logprobs": (True, False, 0, 1, None), "skip_special_tokens": (True, False, None),
}  # fmt: skip


class TokenOutput(list[int]):
    """Sampled ids: a list for older loops, with the fields that newer ones read.

    Attributes:
        log_probs: One for each id.
        stop_reason: ``completed``, or ``length`` where a limit cut it.
        message: The parsed message; its ``tool_calls`` are ready for ``episode.call``.
        extra_fields: Weight versions, by verl's names.
        num_preempted: -1, unknown.
        routed_experts: None.
    """

    routed_experts: None = None
    num_preempted: int = -1

    def __init__(self, ids: Sequence[int], log_probs: list[float], message: Message, versions: Sequence[int]) -> None:
        super().__init__(ids)
        self.log_probs = log_probs
        self.message = message
        self.stop_reason = "length" if message["finish_reason"] == "length" else "completed"
        # No weights sampled an empty turn.
        oldest, newest = min(versions, default=-1), max(versions, default=-1)
        self.extra_fields: dict[str, Any] = {
            "global_steps": newest, "min_global_steps": oldest, "max_global_steps": newest
        }  # fmt: skip

    @property
    def token_ids(self) -> list[int]:
        """The ids, as a plain list."""
        return list(self)


class LoopServer:
    """The ``server_manager`` of loops: samples in the episode's session.

    Args:
        prompt_length: Most ids of the prompt, or None.
        response_length: Most ids of all that follows, or None.
    """

    def __init__(
        self, episode: Episode, session: TokenSession, prompt_length: int | None, response_length: int | None
    ) -> None:
        self.episode = episode
        self.session = session
        self.prompt_length = prompt_length or episode.limits.context_length
        self.response_length = response_length or episode.limits.context_length
        self._bounded = response_length is not None

    def sampling_params(self) -> dict[str, Any]:
        """Return the run's sampling parameters in verl's names."""
        params = self.session.params
        return {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "repetition_penalty": 1.0,
            "logprobs": True,
        }

    async def generate(
        self,
        request_id: str | None = None,  # noqa: ARG002 - the ids decide which branch a prompt continues
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - without media there is none
        priority: int = 0,  # noqa: ARG002 - the engine's own order
    ) -> TokenOutput:
        """Sample a continuation of these ids.

        Raises:
            AgentError: A sampling parameter is unknown or unsupported, or there are media.
            SessionError: The ids are invalid, or the temperature is not the run's.
            BudgetExceeded: The budget is used up; let it propagate.
            InferenceError: The server failed.
        """
        no_media({"image_data": image_data, "video_data": video_data, "audio_data": audio_data})
        params = _params(sampling_params or {}, self.session.params)
        if params.max_tokens is None and self._bounded:
            room = self.prompt_length + self.response_length - len(prompt_ids)
            params = replace(params, max_tokens=max(1, min(self.response_length, room)))
        recorded = await self.session.generate(prompt_ids, params, tools=self.episode.tools)
        completion = recorded.completion
        versions = [version for version, _, _ in completion.weight_versions]
        return TokenOutput(completion.token_ids.tolist(), completion.logprobs.tolist(), recorded.message, versions)


def _params(requested: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """Return a loop's sampling parameters, by default the run's."""
    names = {"temperature", "top_p", "top_k", "min_p", "max_tokens", "max_new_tokens", "stop", "stop_token_ids", "seed"}
    arguments: dict[str, Any] = {}
    for name, value in requested.items():
        if name in _TAKEN_AS_READ:
            if value not in _TAKEN_AS_READ[name]:
                raise AgentError(f"sampling_params: {name} is {shown(value)}: it must be {_TAKEN_AS_READ[name][0]}")
        elif name not in names:
            accepted = ", ".join(sorted({*names, *_TAKEN_AS_READ}))
            raise AgentError(f"sampling_params: {name!r} is unknown; known: {accepted}")
        elif value is not None:
            arguments["max_tokens" if name == "max_new_tokens" else name] = value
    if arguments.get("top_k", 0) == -1:
        arguments["top_k"] = 0
    if "stop" in arguments:
        arguments["stop"] = (arguments["stop"],) if isinstance(arguments["stop"], str) else tuple(arguments["stop"])
    if "stop_token_ids" in arguments:
        arguments["stop_token_ids"] = tuple(arguments["stop_token_ids"])
    return replace(base, **arguments)


def no_media(media: Mapping[str, Any]) -> None:
    """Refuse media."""
    for name, value in media.items():
        if value is not None and len(value):
            raise AgentError(f"{name}: this model's renderer places text only, so a loop cannot show it media")


class LoopTokenizer:
    """A tokenizer with the interface that agent loops use."""

    def __init__(self, renderer: Renderer) -> None:
        if not isinstance(renderer, TemplateRenderer):
            raise AgentError(
                f"token ids are read by a model's chat template, and {type(renderer).__qualname__} is none"
            )
        self.renderer = renderer
        self._text = renderer.text

    @property
    def eos_token_id(self) -> int:
        """An id that ends a turn; the least of ``renderer.stop_ids``."""
        return min(self.renderer.stop_ids)

    # Nothing is padded here.
    pad_token_id = eos_token_id

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:  # noqa: ARG002 - none are added
        """Encode a text. Special tokens in it become their ids; none are added."""
        return [int(number) for number in self._text.encode(text)]

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Decode ids."""
        numbers = [ids] if isinstance(ids, int) else [int(number) for number in ids]
        return self._text.decode_plain(numbers) if skip_special_tokens else self.renderer.decode(as_ids(numbers))

    def batch_decode(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Decode rows of ids."""
        return [self.decode(row, skip_special_tokens) for row in rows]

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        tools: Sequence[ToolSchema | Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_args: Any,
    ) -> Any:
        """Render a conversation to ids, as the session does.

        Args:
            conversation: The messages.
            tools: Tools offered: schemas, or OpenAI's format.
            add_generation_prompt: Whether to append the generation prompt.
            tokenize: False returns text.
            return_dict: Whether to return ``{"input_ids": ...}``.
            **template_args: Arguments of the template (``enable_thinking``).
        """
        schemas = [as_schema(tool) for tool in tools or ()]
        renderer = self.renderer.under(template_arguments(template_args)) if template_args else self.renderer
        try:
            messages = canonical_messages(conversation)
            if add_generation_prompt:
                rendered = renderer.render(messages, schemas)
            else:
                rendered = renderer.text.closed(messages, schemas)
        except RenderError as error:
            raise AgentError(f"apply_chat_template: {error}") from error
        ids = [int(number) for number in rendered]
        if not tokenize:
            return self.decode(ids)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)} if return_dict else ids


F = TypeVar("F")
_LENGTHS = ("prompt_length", "response_length")


@dataclass(slots=True)
class AgentLoopMetrics:
    """Seconds that a loop spent; -1 preemptions: unknown."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass(slots=True)
class AgentLoopOutput:
    """Result of a loop, for its episode or one branch of it.

    Attributes:
        prompt_ids: The first prompt.
        response_ids: All that follows: sampled ids and inserted ones.
        response_mask: 1 for sampled ids, 0 elsewhere. Sampled ids with 0, or in no output, are not trained.
        response_logprobs: One for each response id, or None. Training uses those of the engine.
        reward_score: Reward of the episode; None leaves it to the environment. Of several outputs the last counts.
        num_turns: A metric.
        metrics: :class:`AgentLoopMetrics`, or a dict of its fields.
        extra_fields: Numbers in its ``reward_extra_info`` become metrics.
        multi_modal_data: Must be empty.
        mm_processor_kwargs: Ignored.
        routed_experts: Ignored; the engine reports them.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics | Mapping[str, float] = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    multi_modal_data: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    routed_experts: Any = None


LAST_OUTPUTS: WeakKeyDictionary[Session, AgentLoopOutput] = WeakKeyDictionary()
"""The output of a session's loop that is scored."""


class AgentLoopBase(ABC):
    """Base class of loops, one object for each episode.

    Attributes:
        config: ``config.actor_rollout_ref.rollout`` is ``rollout_config``.
        rollout_config: ``prompt_length``, ``response_length``, ``max_model_len``, ``temperature``, ``top_p``, ``top_k``
            and ``multi_turn`` with ``max_assistant_turns`` and ``max_user_turns``.
        server_manager: Samples.
        tokenizer: Encodes, decodes and renders conversations.
        processor: None: media are not supported.
        episode: The episode: tools (``episode.call``), environment (``episode.step``), rewards.
        loop: The event loop.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: LoopServer,
        tokenizer: LoopTokenizer,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,  # noqa: ARG002 - subclasses hand on what they were given
    ) -> None:
        self.config = trainer_config
        self.rollout_config = trainer_config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.episode = server_manager.episode
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = data_config or {}
        self.apply_chat_template_kwargs: dict[str, Any] = {}
        self.loop = asyncio.get_running_loop()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Act in the episode.

        Args:
            sampling_params: The run's sampling; pass it to ``server_manager.generate``.
            **kwargs: The columns of the row, and ``raw_prompt``: the initial messages.

        Returns:
            One output, or one for each branch.
        """

    @functools.cached_property
    def system_prompt(self) -> list[int]:
        """The ids that the template itself puts before the first message."""
        empty: Message = {"role": "user", "content": ""}
        one = self.tokenizer.apply_chat_template([empty], **self.apply_chat_template_kwargs)
        two = self.tokenizer.apply_chat_template([empty, empty], **self.apply_chat_template_kwargs)
        prefix: list[int] = one[: len(one) - (len(two) - len(one))]
        return prefix

    async def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema | Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        audios: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,  # noqa: ARG002 - without media there is none
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Render messages to ids, generation prompt included.

        Args:
            messages: The messages.
            tools: Tools offered; ``episode.tools`` are the environment's.
            images: Must be empty, as must be ``videos`` and ``audios``.
            videos: See images.
            audios: See images.
            mm_processor_kwargs: Ignored.
            remove_system_prompt: Whether to leave out the template's own prefix: for messages that follow others.

        Raises:
            AgentError: There are media, or the template fails.
        """
        no_media({"images": images, "videos": videos, "audios": audios})
        kwargs = self.apply_chat_template_kwargs
        ids: list[int] = self.tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, **kwargs)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Message]) -> dict[str, Any]:  # noqa: ARG002 - rendering tells
        """Return no media: rendering refuses messages that hold some."""
        return {}

    process_multi_modal_info = process_vision_info

    @classmethod
    def make_agent(cls, **config: Any) -> Agent:
        """Return the agent that runs these loops.

        Args:
            **config: Arguments of the constructor besides those of the base class, and ``prompt_length`` and
                ``response_length``.

        Raises:
            AgentError: The class does not take them.
        """
        return LoopAgent(cls, config)


class LoopAgent(Agent):
    """Makes and runs one loop for each episode."""

    def __init__(self, cls: type[AgentLoopBase], config: dict[str, Any]) -> None:
        name = cls.__qualname__
        if inspect.isabstract(cls):
            raise AgentError(f"agent loop {name} defines no run()")
        for key in _LENGTHS:
            value = config.get(key)
            if value is not None and (type(value) is not int or value < 1):
                raise AgentError(f"agent loop {name}: {key} is {shown(value)}: it must be an integer above 0")
        self._cls = cls
        self._lengths = {key: config.get(key) for key in _LENGTHS}
        self._own = {key: value for key, value in config.items() if key not in _LENGTHS}
        if self._own and cls.__init__ is AgentLoopBase.__init__:
            raise AgentError(f"agent loop {name} has no constructor that takes {', '.join(map(repr, self._own))}")
        try:
            inspect.signature(cls).bind(**_base_arguments(None, None, None), **self._own)
        except TypeError as error:
            raise AgentError(f"agent loop {name} does not take its configuration {config}: {error}") from error

    async def run(self, episode: Episode) -> None:
        """Run one episode."""
        session = episode.session
        if not isinstance(session, TokenSession):
            raise AgentError(
                f"agent loop {self._cls.__qualname__} works with token ids, which a hosted endpoint does not return: "
                "use a model server that you run, or an agent that works with messages"
            )
        server = LoopServer(episode, session, **self._lengths)
        arguments = _base_arguments(_config_of(episode, server), server, LoopTokenizer(session.renderer))
        loop = self._cls(**arguments, **self._own)
        row = {"tools_kwargs": {}, **episode.task.data, "uid": episode.id, "agent_name": episode.task.agent}
        messages = [dict(message) for message in episode.observation]
        with use_episode(episode):
            result = await loop.run(server.sampling_params(), **row, raw_prompt=messages)
        self._settle(episode, session, result)

    def _settle(self, episode: Episode, session: TokenSession, result: object) -> None:
        returned = result if isinstance(result, list) else [result]
        name = self._cls.__qualname__
        outputs = [output for output in returned if isinstance(output, AgentLoopOutput)]
        if not outputs or len(outputs) < len(returned):
            raise AgentError(f"{name}.run returned {shown(result)}: it must return AgentLoopOutput, or a list of them")
        for output in outputs:
            no_media(output.multi_modal_data or {})
            if output.response_logprobs is not None and len(output.response_logprobs) != len(output.response_ids):
                raise AgentError(
                    f"{name}.run returned {len(output.response_logprobs)} response_logprobs for "
                    f"{len(output.response_ids)} response_ids: give one for each, or None"
                )
        try:
            branches = [
                TrainedBranch(output.prompt_ids, output.response_ids, output.response_mask) for output in outputs
            ]
            session.train_only(branches)
        except SessionError as error:
            raise AgentError(f"{name}.run returned what the model did not sample: {error}") from error
        last_output = LAST_OUTPUTS[session] = outputs[-1]
        if last_output.reward_score is not None:
            episode.reward(last_output.reward_score)
        episode.count(_metrics(outputs))
        completion = session.last
        if episode.ended or completion is None or completion["finish_reason"] != "length":
            return
        if not completion.get("tool_calls"):
            episode.finish(StopReason.MAX_TOKENS, final=completion)


@contextlib.contextmanager
def simple_timer(name: str, timing: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to an entry of a dict."""
    started = time.monotonic()
    try:
        yield
    finally:
        timing[name] = timing.get(name, 0.0) + time.monotonic() - started


def rollout_trace_op(function: F) -> F:
    """Return the function unchanged: the session records every call."""
    return function


def _base_arguments(config: Any, server: Any, tokenizer: Any) -> dict[str, Any]:
    return {
        "trainer_config": config, "server_manager": server, "tokenizer": tokenizer, "processor": None,
        "dataset_cls": None, "data_config": {},
    }  # fmt: skip


def _config_of(episode: Episode, server: LoopServer) -> SimpleNamespace:
    limits, params = episode.limits, server.session.params
    rollout = SimpleNamespace(
        prompt_length=server.prompt_length,
        response_length=server.response_length,
        max_model_len=limits.context_length,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k or -1,
        multi_turn=SimpleNamespace(max_assistant_turns=limits.max_turns, max_user_turns=limits.max_turns),
    )
    return SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))


def _metrics(outputs: Sequence[AgentLoopOutput]) -> dict[str, float]:
    metrics = {"num_turns": float(sum(output.num_turns for output in outputs))}
    for output in outputs:
        spent = output.metrics if isinstance(output.metrics, Mapping) else asdict(output.metrics)
        for name in ("generate_sequences", "tool_calls", "compute_score"):
            seconds = f"loop/{name}_seconds"
            metrics[seconds] = metrics.get(seconds, 0.0) + float(spent.get(name, 0.0))
    extra = outputs[-1].extra_fields.get("reward_extra_info")
    for name, value in extra.items() if isinstance(extra, Mapping) else ():
        if isinstance(value, (int, float)):
            metrics[f"loop/{name}"] = float(value)
    return metrics
