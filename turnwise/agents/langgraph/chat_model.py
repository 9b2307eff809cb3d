"""ChatTurnwise: LangChain's chat model interface in front of a recording session."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Final, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall
from langchain_core.messages.ai import UsageMetadata, add_usage
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough, ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from turnwise.agents.langgraph.messages import REASONING, IssuedTurns, session_message
from turnwise.agents.langgraph.request import ModelRequest, read_model_request, schema_format, schema_of
from turnwise.agents.langgraph.run import GraphRun, current_run, run_blocking
from turnwise.chat.formats.live import LiveTurn
from turnwise.errors import SessionError, shown
from turnwise.gateway.dialects.core import Reader
from turnwise.gateway.proxy.session import TextSession
from turnwise.model.canonical import template_arguments
from turnwise.recorder.session import PromptPlacement, Session
from turnwise.tools.response import ToolResponse
from turnwise.types import Message, TokenDelta, text_of

_CONNECTION_FIELDS: Final = frozenset(("api_key", "timeout", "max_retries"))


async def session_messages(
    messages: Sequence[BaseMessage], issued: IssuedTurns, agent: str, run: GraphRun | None
) -> list[Message]:
    """Convert a graph's messages, with an answer for each tool call.

    Args:
        messages: The graph's messages.
        issued: Turns and calls issued to the graph.
        agent: Session that is asked.
        run: The episode; None outside of one.
    """
    converted = [session_message(message, issued, agent) for message in messages]
    # From behind: what is put in moves what follows.
    for index in reversed(range(len(messages) - 1)):
        message = messages[index]
        if isinstance(message, AIMessage) and message.invalid_tool_calls:
            end = next(
                (position for position in range(index + 1, len(converted)) if converted[position]["role"] != "tool"),
                len(converted),
            )
            call_ids = [call.id for call in converted[index].get("tool_calls") or ()]
            converted[index + 1 : end] = await _complete_answers(
                converted[index + 1 : end], call_ids, message, agent, issued, run
            )
    return converted


async def _complete_answers(
    answers: list[Message],
    call_ids: list[str],
    message: AIMessage,
    agent: str,
    issued: IssuedTurns,
    run: GraphRun | None,
) -> list[Message]:
    """Return the answers to a message's calls in order, including those the graph did not give."""
    answered_ids = {answer.get("tool_call_id") for answer in answers}
    complete_answers = list(answers)
    for invalid_call in message.invalid_tool_calls:
        call_id = invalid_call.get("id") or ""
        call = issued.calls.get(call_id)
        agent_call_id = call_id if call is None else call.named(agent)
        if agent_call_id not in answered_ids:
            answer = await run.refusal(call) if run is not None and call is not None else _plain_refusal(invalid_call)
            complete_answers.append({**answer, "tool_call_id": agent_call_id})
    return sorted(complete_answers, key=lambda answer: _position(answer, call_ids))


def _position(answer: Message, call_ids: list[str]) -> int:
    call_id = answer.get("tool_call_id", "")
    return call_ids.index(call_id) if call_id in call_ids else len(call_ids)


def _plain_refusal(call: InvalidToolCall) -> Message:
    reason = call.get("error") or "it could not be parsed"
    response = ToolResponse.failure("unusable_call", f"this call was not executed: {reason}")
    return {"role": "tool", "name": call.get("name") or "", "content": response.content()}


class ChatTurnwise(BaseChatModel):
    """The policy as a LangChain chat model that records every token seen or sampled.

    Without a session it belongs to whichever episode its graph runs in, so one object serves all of them.

    Attributes:
        session: Recording session, for use outside of an episode.
        agent: Session of the episode; each makes a trajectory.
        policy: Policy of that session: ``main`` (default, trained) or one of ``rollout.frozen``.
        temperature: Overrides the session's; a trained session refuses another one.
        top_p: Overrides the session's.
        top_k: Overrides the session's.
        min_p: Overrides the session's.
        max_tokens: Most tokens of one answer.
        seed: Overrides the session's own for each request.
        stop: Stop strings.
        template_args: Arguments of the chat template, such as ``{"enable_thinking": False}``.
        streaming: Whether ``ainvoke`` streams too, for the callbacks that watch it.

    ``api_key``, ``timeout`` and ``max_retries`` are dropped: the session has its connection and limits.
    """

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    session: Session | None = Field(default=None, exclude=True, repr=False)
    agent: str = "main"
    policy: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    template_args: dict[str, Any] | None = None
    streaming: bool = False

    _issued: IssuedTurns = PrivateAttr(default_factory=IssuedTurns)
    _loop: asyncio.AbstractEventLoop | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _without_connection(cls, values: Any) -> Any:
        return (
            {name: values[name] for name in values if name not in _CONNECTION_FIELDS}
            if isinstance(values, dict)
            else values
        )

    @model_validator(mode="after")
    def _disable_cache(self) -> Self:
        self.cache = False
        return self

    @property
    def _llm_type(self) -> str:
        return "turnwise"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": "turnwise", "agent": self.agent, "policy": self.policy, "streaming": self.streaming}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return LangSmithParams(
            **{**super()._get_ls_params(stop, **kwargs), "ls_model_name": kwargs.get("model", "turnwise")}
        )

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Offer tools to the model.

        Args:
            tools: In any form of LangChain: dicts, classes, functions, tools.
            tool_choice: ``auto`` or None, ``none``, ``any`` or ``required``, or a tool (name or dict). Forced calls
                need an engine and a chat format with structured output.
            **kwargs: ``parallel_tool_calls``, ``response_format``, or sampling parameters.

        Raises:
            SessionError: One is not a tool.
        """
        schemas = [schema_of(tool).to_json() for tool in tools]
        return self.bind(tools=schemas, tool_choice=tool_choice, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: Literal["json_schema", "function_calling", "json_mode"] = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, dict[str, Any] | BaseModel]:
        """Return the model with structured output.

        Args:
            schema: A pydantic class, a TypedDict or a JSON schema.
            include_raw: Whether to return ``{"raw", "parsed", "parsing_error"}``, without raising on parse errors.
            method: ``json_schema`` constrains the text; ``function_calling`` forces a call of a tool with that schema;
                ``json_mode`` constrains it to an object, parsed by the schema.
            strict: Ignored: the whole schema is always enforced.
            **kwargs: Sampling parameters.

        Raises:
            SessionError: The method is unknown, or the schema invalid.
        """
        del strict
        # Also a class of pydantic.v1.
        pydantic_class: Any = schema if isinstance(schema, type) and is_basemodel_subclass(schema) else None
        tracing_options = {"ls_structured_output_format": {"kwargs": {"method": method}, "schema": schema}}
        parser: Runnable[Any, Any]
        if method == "function_calling":
            name = schema_of(schema).name
            model_call = self.bind_tools([schema], tool_choice=name, **tracing_options, **kwargs)
            parser = (
                PydanticToolsParser(tools=[pydantic_class], first_tool_only=True)
                if pydantic_class is not None
                else JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
            )
        elif method in ("json_schema", "json_mode"):
            response_format = schema_format(schema) if method == "json_schema" else {"type": "json_object"}
            model_call = self.bind(response_format=response_format, **tracing_options, **kwargs)
            parser = (
                JsonOutputParser() if pydantic_class is None else PydanticOutputParser(pydantic_object=pydantic_class)
            )
        else:
            methods = "json_schema, function_calling or json_mode"
            raise SessionError(f"with_structured_output: method is {shown(method)}: it must be {methods}")
        if not include_raw:
            return model_call | parser
        parsed_output = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        unparsed_output = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model_call) | parsed_output.with_fallbacks(
            [unparsed_output], exception_key="parsing_error"
        )

    def get_num_tokens(self, text: str) -> int:
        """Return the number of tokens of a text inside a message."""
        return self._session(self._run()).renderer.count(text)

    def get_token_ids(self, text: str) -> list[int]:
        """Refuse: agents never handle ids, and LangChain would fetch another model's tokenizer."""
        raise SessionError(f"ChatTurnwise does not return token ids (of {shown(text)}): use get_num_tokens")

    # Asking

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        node = _node(run_manager)
        run = self._run()
        asking = self._ask(run, messages, self._read_request(run, stop, kwargs), node)
        return run.block(asking) if run is not None else run_blocking(asking, self._loop)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        run = self._run()
        asking = self._ask(run, messages, self._read_request(run, stop, kwargs), _node(run_manager))
        if run is not None:
            return await run.run_on_loop(asking)
        self._loop = asyncio.get_running_loop()
        return await asking

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        # Plain code waits for the whole answer.
        result = self._generate(messages, stop, run_manager, **kwargs)
        yield ChatGenerationChunk(message=_as_chunk(result.generations[0].message))

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        run = self._run()
        request, node = self._read_request(run, stop, kwargs), _node(run_manager)
        if run is None:
            self._loop = asyncio.get_running_loop()
        session = self._session(run)
        if session.recorded_as != "tokens" or (run is not None and not run.on_own_loop):
            asking = self._ask(run, messages, request, node)
            result = await (asking if run is None else run.run_on_loop(asking))
            yield ChatGenerationChunk(message=_as_chunk(result.generations[0].message))
            return
        with run.working() if run is not None else contextlib.nullcontext():
            async with contextlib.aclosing(self._stream_turn(run, session, messages, request, node)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _ask(
        self, run: GraphRun | None, messages: list[BaseMessage], request: ModelRequest, node: str
    ) -> ChatResult:
        with run.working() if run is not None else contextlib.nullcontext():
            message = await self._record(run, messages, request, node)
        return ChatResult(generations=[ChatGeneration(message=message)])

    async def _record(
        self, run: GraphRun | None, messages: list[BaseMessage], request: ModelRequest, node: str
    ) -> AIMessage:
        session = self._session(run)
        prompt = await session_messages(messages, self._issued_by(run), self._name(run), run)
        if isinstance(session, TextSession):
            answer = await session.chat(prompt, request.tools, request.params, template_args=request.template_args)
            metrics = session.turn_metrics.get(answer["turn_id"], {})
            token_counts = [
                int(metrics.get(name, 0)) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
            ]
        elif session.recorded_as != "tokens":
            # Sessions recorded elsewhere return whole messages, without their tokens.
            answer = await session.chat(
                prompt, request.tools, request.params, fork=request.fork, template_args=request.template_args
            )
            token_counts = [0, 0, 0]
        else:
            turn = await session.record(
                prompt, request.tools, request.params, fork=request.fork, template_args=request.template_args
            )
            answer, placement = turn.message, turn.placement
            token_counts = [placement.prompt_tokens, len(turn.completion.token_ids), placement.known_tokens]
        return self._to_message(run, session, answer, request, node, _usage(*token_counts))

    async def _stream_turn(
        self, run: GraphRun | None, session: Session, messages: list[BaseMessage], request: ModelRequest, node: str
    ) -> AsyncGenerator[ChatGenerationChunk, None]:
        """Stream settled text, then the calls and the finish reason."""
        issued = self._issued_by(run)
        message_id = issued.stream_id(session.id)
        prompt = await session_messages(messages, issued, self._name(run), run)
        reader = session.renderer
        if request.template_args:
            reader = reader.under(template_arguments(request.template_args))
        stops = (request.params or session.params).stop
        live_turn: LiveTurn | None = None
        usage, streamed_characters = _usage(0, 0, 0), {"text": 0, "reasoning": 0}
        stream = session.stream(
            prompt, request.tools, request.params, fork=request.fork, template_args=request.template_args
        )
        async with contextlib.aclosing(stream) as events:  # type: ignore[type-var]
            async for event in events:
                if isinstance(event, PromptPlacement):
                    usage = _usage(event.prompt_tokens, 0, event.known_tokens)
                    live_turn = reader.live(event.tail, stops) if isinstance(reader, Reader) else None
                elif isinstance(event, TokenDelta):
                    usage = add_usage(usage, _usage(0, len(event.token_ids), 0))
                    for piece in live_turn.feed(event.token_ids.tolist()) if live_turn is not None else ():
                        streamed_characters[piece.kind] += len(piece.text)
                        yield _chunk(message_id, piece.kind, piece.text)
                else:
                    last_chunk = _as_chunk(self._to_message(run, session, event, request, node, usage, message_id))
                    last_chunk.content = text_of(event)[streamed_characters["text"] :]
                    reasoning = (event.get("reasoning_content") or "")[streamed_characters["reasoning"] :]
                    last_chunk.additional_kwargs = {REASONING: reasoning} if reasoning else {}
                    yield ChatGenerationChunk(message=last_chunk)

    def _to_message(
        self,
        run: GraphRun | None,
        session: Session,
        answer: Message,
        request: ModelRequest,
        node: str,
        usage: UsageMetadata,
        message_id: str | None = None,
    ) -> AIMessage:
        name = message_id or f"{session.id}/{answer['turn_id']}"
        usable, unusable = self._issued_by(run).register_turn(
            answer, agent=self._name(run), message_id=name, offered=request.offered
        )
        if run is not None:
            run.record_node(self.agent, answer, node, usage["output_tokens"])
        reasoning = answer.get("reasoning_content")
        return AIMessage(
            content=text_of(answer),
            id=name,
            tool_calls=usable,
            invalid_tool_calls=unusable,
            additional_kwargs={REASONING: reasoning} if reasoning else {},
            usage_metadata=usage,
            response_metadata={
                "finish_reason": "tool_calls" if answer.get("tool_calls") else answer["finish_reason"],
                "model_name": "turnwise",
                "turn_id": answer["turn_id"],
            },
        )

    # What is asked

    def _run(self) -> GraphRun | None:
        return None if self.session is not None else current_run()

    def _issued_by(self, run: GraphRun | None) -> IssuedTurns:
        return self._issued if run is None else run.issued

    def _name(self, run: GraphRun | None) -> str:
        return "main" if run is None else self.agent

    def _session(self, run: GraphRun | None) -> Session:
        if run is not None:
            return run.episode.session_for(self.agent, self.policy)
        assert self.session is not None
        return self.session

    def _read_request(self, run: GraphRun | None, stop: list[str] | None, arguments: dict[str, Any]) -> ModelRequest:
        defaults = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "template_args": self.template_args,
        }
        return read_model_request({**defaults, **arguments}, stop or self.stop, self._session(run).params)


def _node(manager: AsyncCallbackManagerForLLMRun | CallbackManagerForLLMRun | None) -> str:
    """Return the path of the calling node, outermost graph first; empty outside of a graph."""
    metadata = manager.metadata if manager is not None else ensure_config().get("metadata") or {}
    path = metadata.get("langgraph_checkpoint_ns") or metadata.get("langgraph_node") or ""
    # Each part is name:task; a number alone counts the graphs that one node ran.
    names = [part.partition(":")[0] for part in str(path).split("|")]
    return "/".join(name for name in names if not name.isdigit())


def _usage(prompt: int, sampled: int, cached: int) -> UsageMetadata:
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=sampled,
        total_tokens=prompt + sampled,
        input_token_details={"cache_read": cached},
    )


def _chunk(message_id: str, kind: str, text: str) -> ChatGenerationChunk:
    if kind == "text":
        return ChatGenerationChunk(message=AIMessageChunk(content=text, id=message_id))
    return ChatGenerationChunk(message=AIMessageChunk(content="", id=message_id, additional_kwargs={REASONING: text}))


def _as_chunk(message: BaseMessage) -> AIMessageChunk:
    assert isinstance(message, AIMessage)
    calls = [
        tool_call_chunk(
            name=call["name"], args=json.dumps(call["args"], ensure_ascii=False), id=call["id"], index=index
        )
        for index, call in enumerate(message.tool_calls)
    ]
    # Chunks are read again when they are joined: arguments given as text count as none, whatever they contain.
    calls += [
        tool_call_chunk(name=call["name"], args=json.dumps(call["args"] or ""), id=call["id"], index=index)
        for index, call in enumerate(message.invalid_tool_calls, len(calls))
    ]
    return AIMessageChunk(
        content=message.content,
        id=message.id,
        tool_call_chunks=calls,
        additional_kwargs=message.additional_kwargs,
        response_metadata=message.response_metadata,
        usage_metadata=message.usage_metadata,
        chunk_position="last",
    )
