"""The LangGraph agent: runs a compiled graph in each episode."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage
from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import GraphRecursionError
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from langgraph.types import Command, Interrupt

from turnwise.agents.core import Agent, Episode
from turnwise.agents.langgraph.chat_model import ChatTurnwise
from turnwise.agents.langgraph.messages import graph_messages, session_message, text_of_value
from turnwise.agents.langgraph.run import EpisodeOver, GraphRun, tools_of
from turnwise.errors import AgentError, shown
from turnwise.model.canonical import canonical_tools
from turnwise.plugins import load_object
from turnwise.types import Message, StopReason, text_of

_FILLED: Final = ("model", "tools")


class GraphFactory:
    """Builds graphs, one for each set of tools.

    Args:
        graph: A reference, a graph, or a function that makes one.
    """

    def __init__(self, graph: Any, options: Mapping[str, Any]) -> None:
        self._name = graph if isinstance(graph, str) else shown(graph)
        self._source = load_object(graph, "graph") if isinstance(graph, str) else graph
        self._options = dict(options)
        self._graphs: dict[Any, Runnable[Any, Any]] = {}
        if isinstance(self._source, StateGraph):
            self._source = self._source.compile()
        if isinstance(self._source, Runnable):
            if self._options:
                raise AgentError(
                    f"graph {self._name}: options {sorted(self._options)} are for a function that makes one"
                )
            return
        if not callable(self._source):
            raise AgentError(
                f"graph {self._name} is a {type(self._source).__name__}: it must be a graph of LangGraph, or a "
                "function that makes one of model and tools"
            )
        self._filled = self._check(self._source)

    async def graph_for(self, episode: Episode) -> Runnable[Any, Any]:
        """Return the graph for the tools of an episode."""
        if isinstance(self._source, Runnable):
            return self._source
        key = canonical_tools(episode.tools)
        if key not in self._graphs:
            arguments = {"model": ChatTurnwise(), "tools": tools_of(episode.tools)}
            graph = self._source(**{name: arguments[name] for name in self._filled}, **self._options)
            if inspect.isawaitable(graph):
                graph = await graph
            if isinstance(graph, StateGraph):
                graph = graph.compile()
            if not isinstance(graph, Runnable):
                raise AgentError(f"graph {self._name} made a {type(graph).__name__}: it must return a compiled graph")
            self._graphs[key] = graph
        return self._graphs[key]

    def _check(self, function: Any) -> list[str]:
        """Return which of ``model`` and ``tools`` a function takes."""
        parameters = inspect.signature(function).parameters.values()
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        keywords = {parameter.name: parameter for parameter in parameters if parameter.kind in by_name}
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        taken_parameters = [name for name in _FILLED if (name in keywords or takes_all) and name not in self._options]
        unknown = sorted(self._options.keys() - keywords.keys()) if not takes_all else []
        if unknown:
            raise AgentError(
                f"graph {self._name} takes no option {unknown[0]!r}; it takes {', '.join(sorted(keywords))}"
            )
        required = {name for name, parameter in keywords.items() if parameter.default is parameter.empty}
        missing = sorted(required - {*taken_parameters, *self._options})
        if missing:
            raise AgentError(f"graph {self._name} needs {missing[0]!r}: give it under options")
        return taken_parameters


INTERRUPTS = "__interrupt__"
GAVE_UP = "Sorry, need more steps to process this request."
"""The message that the prebuilt ReAct graph writes for the model where its recursion limit is near."""


class LangGraphAgent(Agent):
    """Runs any compiled LangGraph graph, unchanged, in each episode.

    The input is the observation; the last message of the output goes to the environment, as in the ReAct loop. While
    that does not end the episode, the graph runs again on the environment's answer.

    Args:
        graph: ``pkg.module:name`` or ``path/to/file.py:name`` of a graph, compiled or not, or of a function, plain or
            async, that makes one. It gets ``model`` and ``tools`` if it has such parameters, once for each set of
            tools; the graph runs in many episodes at the same time.
        options: Further arguments of that function.
        messages_key: State key of the conversation; None where there is none.
        question_key: State key that also gets the text of the observation's last message.
        answer_key: Output key of the answer; by default the last message.
        recursion_limit: Most steps of one run; by default the graph's own. Beyond it the stop reason is ``max_turns``.
        interrupts: Handler of interrupts: None ends the episode with ``interrupted``; ``step`` is the environment's
            ``step``, with the value as a message; any other name is a method of the environment, with the value.
        configurable: ``configurable`` of the graph's config.
        context: Runtime context of the graph.

    Raises:
        ConfigError: The graph cannot be found.
        AgentError: It is not a graph, or its function does not take the options.
    """

    def __init__(
        self,
        graph: Any,
        *,
        options: Mapping[str, Any] | None = None,
        messages_key: str | None = "messages",
        question_key: str | None = None,
        answer_key: str | None = None,
        recursion_limit: int | None = None,
        interrupts: str | None = None,
        configurable: Mapping[str, Any] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        if messages_key is None and question_key is None:
            raise AgentError("agent 'langgraph': give messages_key or question_key, or the graph has no input")
        if recursion_limit is not None and (type(recursion_limit) is not int or recursion_limit < 1):
            raise AgentError(f"agent 'langgraph': recursion_limit is {shown(recursion_limit)}: it must be 1 or more")
        self._factory = GraphFactory(graph, options or {})
        self._messages_key = messages_key
        self._question_key = question_key
        self._answer_key = answer_key
        self._recursion_limit = recursion_limit
        self._interrupts = interrupts
        self._configurable = dict(configurable or {})
        self._context = None if context is None else dict(context)

    async def run(self, episode: Episode) -> None:
        """Run one episode.

        Raises:
            TurnwiseError: A tool or the model ended the episode, even where the graph caught it.
        """
        graph = await self._factory.graph_for(episode)
        if self._interrupts is not None and isinstance(graph, Pregel) and graph.checkpointer is None:
            # Without one, a graph could not resume after an interrupt.
            graph = graph.copy({"checkpointer": InMemorySaver()})
        run = GraphRun(episode)
        play = _Play(graph, run, self._config(episode), self._context, self._interrupts)
        try:
            with run.as_current():
                await self._play(play, run)
        except EpisodeOver:
            pass
        except GraphRecursionError:
            if not episode.ended:
                episode.finish(StopReason.MAX_TURNS)
        except Exception as error:  # a graph's code wraps what failed in a session or tool
            if run.failure is not None and run.failure is not error:
                raise run.failure from error
            raise
        finally:
            await run.close()
            run.count_rewards()
            await play.forget()

    def inputs(self, messages: Sequence[AnyMessage], previous: Mapping[str, Any]) -> Any:
        """Return the input of a run; for subclasses with other state schemas.

        Args:
            messages: The conversation.
            previous: Output of the previous run where the graph has no checkpointer; empty for the first.
        """
        state = {**previous}
        if self._messages_key is not None:
            state[self._messages_key] = list(messages)
        if self._question_key is not None:
            state[self._question_key] = text_of_value(messages[-1]) if messages else ""
        return state

    def answer(self, output: Any) -> BaseMessage | str:
        """Return the answer in a run's output; for subclasses with other state schemas."""
        value = output
        if self._answer_key is not None:
            if not isinstance(output, Mapping) or self._answer_key not in output:
                raise _no_answer(self._answer_key, output)
            value = output[self._answer_key]
        elif isinstance(output, Mapping):
            value = output.get(self._messages_key or "messages")
            if not value:
                raise _no_answer(self._messages_key or "messages", output)
        if isinstance(value, list) and value and isinstance(value[-1], BaseMessage):
            value = value[-1]
        return value if isinstance(value, BaseMessage) else text_of_value(value)

    async def _play(self, play: _Play, run: GraphRun) -> None:
        episode = run.episode
        messages = graph_messages(episode.observation)
        state = self.inputs(messages, {})
        for _ in range(episode.limits.max_turns + 1):
            output = await play.run(state)
            if output is None or run.ended:
                return
            answer = self.answer(output)
            message = _final(answer, run)
            if message is None:
                episode.finish(StopReason.MAX_TURNS)
                return
            if message.get("finish_reason") == "length" and not message.get("tool_calls"):
                episode.finish(StopReason.MAX_TOKENS, final=message)
                return
            observation = await run.step(answer if isinstance(answer, BaseMessage) else message)
            if episode.ended:
                return
            if play.keeps:
                state = self.inputs(observation, {})
                continue
            plain = output if isinstance(output, Mapping) else {}
            history = plain.get(self._messages_key or "")
            reply = answer if isinstance(answer, BaseMessage) else AIMessage(answer)
            messages = [*(history or [*messages, reply]), *observation]
            state = self.inputs(messages, {key: plain[key] for key in plain if key != INTERRUPTS})
        # Each round asks the model at least once; one that does not would never end.
        episode.finish(StopReason.MAX_TURNS)

    def _config(self, episode: Episode) -> RunnableConfig:
        # Each attempt has its own thread: a store must not return the state of an earlier one.
        thread = f"{episode.session.id}/{uuid.uuid4().hex}"
        config = RunnableConfig(configurable={"thread_id": thread, **self._configurable})
        if self._recursion_limit is not None:
            config["recursion_limit"] = self._recursion_limit
        return config


class _Play:
    """The runs of a graph in one episode, with their interrupts.

    Attributes:
        keeps: Whether the graph has a checkpointer.
    """

    def __init__(
        self,
        graph: Any,
        run: GraphRun,
        config: RunnableConfig,
        context: Mapping[str, Any] | None,
        interrupts: str | None,
    ) -> None:
        self._graph = graph
        self._run = run
        self._config = config
        self._context = {} if context is None else {"context": context}
        self._interrupts = interrupts
        saver = graph.checkpointer if isinstance(graph, Pregel) else None
        self._saver = saver if isinstance(saver, BaseCheckpointSaver) else None
        self.keeps = self._saver is not None

    async def run(self, state: Any) -> Any:
        """Return the graph's output, None where it ended the episode."""
        while True:
            output = await self._graph.ainvoke(state, self._config, **self._context)
            interrupts = _interrupts(output)
            if not interrupts:
                return output
            if self._interrupts is None:
                if not self._run.ended:
                    self._run.episode.finish(StopReason.INTERRUPTED)
                return None
            answers: dict[str, Any] = {}
            for interrupt in interrupts:
                answers[interrupt.id] = await self._answer(interrupt.value)
                if self._run.ended:
                    return None
            state = Command(resume=answers)

    async def _answer(self, value: Any) -> Any:
        if self._interrupts != "step":
            return await self._run.ask(str(self._interrupts), value)
        message: BaseMessage | Message = (
            value if isinstance(value, AIMessage) else {"role": "assistant", "content": text_of_value(value)}
        )
        observation = await self._run.step(message)
        return "\n".join(text_of_value(message_part) for message_part in observation)

    async def forget(self) -> None:
        if self._saver is not None:
            await self._saver.adelete_thread(self._config["configurable"]["thread_id"])


def _interrupts(output: Any) -> Sequence[Interrupt]:
    interrupts = output.get(INTERRUPTS) if isinstance(output, Mapping) else None
    return list(interrupts or ())


def _final(answer: BaseMessage | str, run: GraphRun) -> Message | None:
    """Return the answer as a message; None for the prebuilt graph's recursion-limit message."""
    if isinstance(answer, str):
        return {"role": "assistant", "content": answer}
    turn = run.issued.turn_of(answer)
    message = session_message(answer, run.issued, "main" if turn is None else turn[0])
    if turn is not None and isinstance(answer, AIMessage):
        if text_of(message) == GAVE_UP != text_of(turn[1]):
            return None
        message["turn_id"], message["finish_reason"] = turn[1]["turn_id"], turn[1]["finish_reason"]
    return message


def _no_answer(key: str, output: Any) -> AgentError:
    keys = ", ".join(sorted(map(str, output))) if isinstance(output, Mapping) else type(output).__name__
    return AgentError(
        f"the graph's output has no {key!r} (it has {keys or 'nothing'}): set answer_key to the key of the answer"
    )
