"""Agent loops as verl has them: ids in, ids out, and an account of the episode at the end.

Owns: :class:`AgentLoopBase` and what its loops are given and return, under verl's names. Refuses: trusting the account:
what is trained is what the session recorded; an output that claims other ids to be sampled is an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

from turnwise.agents.core import Agent, Episode
from turnwise.agents.loop_server import LoopServer, no_media
from turnwise.agents.loop_server import TokenOutput as TokenOutput
from turnwise.agents.loop_tokenizer import LoopTokenizer
from turnwise.agents.outcome import acting
from turnwise.agents.registry import register_agent
from turnwise.errors import AgentError, SessionError, shown
from turnwise.inference.token_session import Kept, TokenSession
from turnwise.types import Message, StopReason, ToolSchema

F = TypeVar("F")
LoopClass = TypeVar("LoopClass", bound="type[AgentLoopBase]")
_LENGTHS = ("prompt_length", "response_length")


@dataclass(slots=True)
class AgentLoopMetrics:
    """Seconds that a loop spent; -1 preemptions are not known."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass(slots=True)
class AgentLoopOutput:
    """What a loop says of its episode, or of one branch of it.

    Attributes:
        prompt_ids: What the model was shown first.
        response_ids: What followed: sampled ids, and those that the loop put in between.
        response_mask: 1 where an id was sampled, 0 elsewhere. A sampled id with 0, or one that is not in any output,
            is not trained.
        response_logprobs: One for each response id, or None. What is trained with are those that the engine returned.
        reward_score: What the episode is worth; None asks the environment. Of several outputs the last one's counts.
        num_turns: For the metrics.
        metrics: For the metrics; a dict is read as :class:`AgentLoopMetrics`.
        extra_fields: Numbers of ``reward_extra_info`` in it become metrics.
        multi_modal_data: Must be empty.
        mm_processor_kwargs: Taken, and not kept.
        routed_experts: The same; the engine reports them.
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


class AgentLoopBase(ABC):
    """Base class of loops: one object for each episode.

    Attributes:
        config: ``config.actor_rollout_ref.rollout`` is ``rollout_config``.
        rollout_config: ``prompt_length``, ``response_length``, ``max_model_len``, ``temperature``, ``top_p``, ``top_k``
            and ``multi_turn`` with ``max_assistant_turns`` and ``max_user_turns``.
        server_manager: Samples.
        tokenizer: Encodes and decodes, and renders conversations.
        processor: None: no media is placed.
        episode: The episode: its tools (``episode.call``), its environment (``episode.step``), its rewards.
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
            sampling_params: How the run samples; hand it to ``server_manager.generate``.
            **kwargs: The columns of the row, and ``raw_prompt``: the messages that the episode begins with.

        Returns:
            One output, or one for each branch.
        """

    @functools.cached_property
    def system_prompt(self) -> list[int]:
        """The ids that the template puts before the first message by itself."""
        empty: Message = {"role": "user", "content": ""}
        one = self.tokenizer.apply_chat_template([empty], **self.apply_chat_template_kwargs)
        two = self.tokenizer.apply_chat_template([empty, empty], **self.apply_chat_template_kwargs)
        found: list[int] = one[: len(one) - (len(two) - len(one))]
        return found

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
        """Return the ids of messages, up to where the assistant is to speak.

        Args:
            messages: The messages.
            tools: What the model is told that it may call; ``episode.tools`` are the environment's.
            images: Must be empty, as must be ``videos`` and ``audios``.
            videos: See images.
            audios: See images.
            mm_processor_kwargs: Taken, and not kept.
            remove_system_prompt: Whether what the template puts before the first message is left out: for messages
                that follow others.

        Raises:
            AgentError: There are media, or the template does not render this.
        """
        no_media({"images": images, "videos": videos, "audios": audios})
        given = self.apply_chat_template_kwargs
        ids: list[int] = self.tokenizer.apply_chat_template(messages, tools, add_generation_prompt=True, **given)
        return ids[len(self.system_prompt) :] if remove_system_prompt else ids

    async def process_vision_info(self, messages: Sequence[Message]) -> dict[str, Any]:  # noqa: ARG002 - rendering tells
        """Return no media: a message that holds some is refused when it is rendered."""
        return {}

    async def process_multi_modal_info(self, messages: Sequence[Message]) -> dict[str, Any]:
        """Return no media; see :meth:`process_vision_info`."""
        return await self.process_vision_info(messages)

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
    """Makes a loop for each episode and runs it.

    Args:
        cls: The class of the loops.
        config: See :meth:`AgentLoopBase.make_agent`.
    """

    def __init__(self, cls: type[AgentLoopBase], config: dict[str, Any]) -> None:
        name = cls.__qualname__
        if inspect.isabstract(cls):
            raise AgentError(f"agent loop {name} writes no run()")
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
                f"agent loop {self._cls.__qualname__} works with token ids, which a hosted endpoint does not tell: "
                "choose a server of your own, or an agent that works with messages"
            )
        server = LoopServer(episode, session, **self._lengths)
        given = _base_arguments(_config_of(episode, server), server, LoopTokenizer(session.renderer))
        loop = self._cls(**given, **self._own)
        row = {"tools_kwargs": {}, **episode.task.data, "uid": episode.id, "agent_name": episode.task.agent}
        messages = [dict(message) for message in episode.observation]
        with acting(episode):
            result = await loop.run(server.sampling_params(), **row, raw_prompt=messages)
        self._settle(episode, session, result)

    def _settle(self, episode: Episode, session: TokenSession, result: object) -> None:
        returned = result if isinstance(result, list) else [result]
        name = self._cls.__qualname__
        outputs = [each for each in returned if isinstance(each, AgentLoopOutput)]
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
            session.keep([Kept(each.prompt_ids, each.response_ids, each.response_mask) for each in outputs])
        except SessionError as error:
            raise AgentError(f"{name}.run returned what the model did not sample: {error}") from error
        last = outputs[-1]
        if last.reward_score is not None:
            episode.reward(last.reward_score)
        episode.count(_metrics(outputs))
        said = session.last
        if not episode.ended and said is not None and said["finish_reason"] == "length" and not said.get("tool_calls"):
            episode.finish(StopReason.MAX_TOKENS, final=said)


def register(name: str) -> Callable[[LoopClass], LoopClass]:
    """Register a class of loops under a name, as a decorator.

    Raises:
        RegistryError: The name is taken, or is none.
    """
    return register_agent(name)


@contextlib.contextmanager
def simple_timer(name: str, timing: dict[str, float]) -> Iterator[None]:
    """Add the seconds of a block to an entry of a dict."""
    started = time.monotonic()
    try:
        yield
    finally:
        timing[name] = timing.get(name, 0.0) + time.monotonic() - started


def rollout_trace_op(function: F) -> F:
    """Return the function as it is: the session records every call."""
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
    found = {"num_turns": float(sum(output.num_turns for output in outputs))}
    for output in outputs:
        spent = output.metrics if isinstance(output.metrics, Mapping) else asdict(output.metrics)
        for name in ("generate_sequences", "tool_calls", "compute_score"):
            seconds = f"loop/{name}_seconds"
            found[seconds] = found.get(seconds, 0.0) + float(spent.get(name, 0.0))
    told = outputs[-1].extra_fields.get("reward_extra_info")
    for name, value in told.items() if isinstance(told, Mapping) else ():
        if isinstance(value, (int, float)):
            found[f"loop/{name}"] = float(value)
    return found
