"""Agents that edit their history with several requests at a time, checked against the reference recorder.

``Wild.act`` takes one action after the other; ``Wild.check`` then holds the session's tree against the slow recorder's
and the ledger.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from support.recorder.histories import OTHER, TOOL, check_against_ledger
from support.recorder.reference_recorder import SlowRecorder
from turnwise.errors import InferenceError, RenderError
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import LLMClient, ModelInfo, Renderer
from turnwise.recorder.ledger import LedgerClient, LedgerEntry, LedgerWriter, read_calls
from turnwise.recorder.session import Session, SessionLimits
from turnwise.recorder.turn_record import TurnRecord
from turnwise.trajectory import Trajectory, segment_record
from turnwise.types import Completion, SamplingParams, ToolCall, ToolSchema

ACTIONS = (
    "continue", "continue", "continue", "resample", "edit", "edit_answer", "compact", "subagent", "rewrite", "reissue",
    "decorate", "drop_reasoning", "drop_empty", "truncate", "fewshot", "tools", "system", "cancel", "fail", "together",
    "twins", "drop_turn", "rewind", "rewind", "edit_reasoning", "rewrite", "drop_reasoning", "arguments",
)  # fmt: skip

# To a template 1 and True are different values.
GIVEN: tuple[dict[str, Any], ...] = (
    {}, {"enable_thinking": False}, {"enable_thinking": True}, {"reasoning_effort": "high"},
    {"reasoning_effort": "low"}, {"mood": 1}, {"mood": True}, {"mood": {"b": [1.5], "a": "x"}},
)  # fmt: skip

# What cannot be bridged to makes one kind of fork of all others, so it is rare.
_words = st.sampled_from(["", "a", "b", "ab", " a\n", "b b", "c", "d", "cd", "da", "NOBRIDGE"])
plans = st.lists(st.tuples(st.sampled_from(ACTIONS), _words, st.integers(0, 9)), min_size=4, max_size=14)
policies = st.tuples(st.sampled_from(["keep", "template"]), st.sampled_from(["same", "same", "strict"]))

_texts = st.sampled_from(["", "a", "b", " a", "a\n", "two words", "  "])
_arguments = st.dictionaries(
    st.sampled_from("xy"), st.one_of(st.integers(0, 2), st.sampled_from([1.0, 0.5, 1e20])), max_size=2
)


def lines(odd: st.SearchStrategy[int]) -> st.SearchStrategy[list[Any]]:
    """What a model says: messages (text, reasoning, up to two calls), or any ids at all."""
    message_lines = {"content": _texts, "reasoning_content": st.sampled_from(["", "", "hm"])}
    plain = st.fixed_dictionaries(message_lines)
    calling = st.fixed_dictionaries({**message_lines, "tool_calls": st.lists(_arguments, min_size=1, max_size=2)})
    anything = st.lists(odd, min_size=1, max_size=8)
    return st.lists(st.one_of(plain, plain, calling, calling, anything), min_size=3, max_size=6)


def ids_of(renderer: Renderer, line: Any) -> list[int]:
    """The ids of a line; what this chat format cannot say becomes something that it can."""
    if isinstance(line, list):
        return line
    calls = [ToolCall("", "look", arguments) for arguments in line.get("tool_calls", ())]
    for variant in ({**line, "tool_calls": calls}, {"content": "", "tool_calls": calls[:1]}, {"content": "x"}):
        try:
            return renderer.completion({"role": "assistant", **variant}, [TOOL]).tolist()
        except RenderError:
            continue
    raise AssertionError("this format can say nothing")


class Gate(LLMClient):
    """Holds each request until it is let through, and keeps the completion that was handed out last."""

    def __init__(self, inner: LLMClient) -> None:
        self.inner = inner
        self.held: list[asyncio.Event] = []
        self.closed = False
        self.failing = False
        self.expected: list[int] = []
        self.last: Completion | None = None

    async def generate(self, prompt: Any, params: SamplingParams, *, session_id: str) -> Completion:
        assert prompt.token_ids.tolist() == self.expected
        if self.closed:
            self.held.append(asyncio.Event())
            await self.held[-1].wait()
        if self.failing:
            raise InferenceError("the server is gone")
        self.last = await self.inner.generate(prompt, params, session_id=session_id)
        return self.last

    def stream(self, prompt: Any, params: SamplingParams, *, session_id: str) -> Any:
        return self.inner.stream(prompt, params, session_id=session_id)

    async def model_info(self) -> ModelInfo:
        return await self.inner.model_info()

    async def close(self) -> None:
        await self.inner.close()


class Wild:
    """One session, driven by actions.

    Args:
        renderer: Of the chat format.
        script: What the model says, over and over.
        path: Where the ledger is written.
        cut: Most tokens of a completion.
        reasoning: The session's policy.
        echo: The session's policy.
    """

    def __init__(
        self, renderer: Renderer, script: Sequence[Any], path: Path, cut: int, reasoning: Any, echo: Any
    ) -> None:
        scripted = [ids_of(renderer, line) for line in script]
        model = ScriptedClient(renderer, lambda request: scripted[request.number % len(scripted)])
        self.book = LedgerWriter(path)
        self.gate = Gate(LedgerClient(model, self.book))
        self.turns: dict[int, bytes] = {}
        limits = SessionLimits(context_length=100_000)
        self.open = functools.partial(
            Session, self.gate, renderer, id="s", limits=limits, reasoning=reasoning, echo=echo, seed=7
        )
        self.session = self.open()
        self.session.journal = self.keep
        self.slow = SlowRecorder(renderer, reasoning=reasoning, strict=echo == "strict")
        self.path = path
        self.params = SamplingParams(max_tokens=cut)
        self.tools = [TOOL]
        self.given: dict[str, Any] = {}
        self.renderer = renderer
        self.calls = 0
        self.messages: list[Any] = [{"role": "user", "content": "q"}]

    def keep(self, record: TurnRecord) -> None:
        """Write a turn down, as a process that is killed does."""
        self.turns[self.book.last_call("s")] = json.dumps(record.to_json()).encode()

    def restart(self) -> None:
        """Go on with a session rebuilt from what was written down."""
        restored = self.open()
        for entry in read_calls(self.path):
            if isinstance(entry, LedgerEntry):
                completion = Completion(
                    entry.completion_ids, entry.logprobs, entry.finish_reason, entry.weight_versions
                )
                restored.restore(TurnRecord.from_json(json.loads(self.turns[entry.at])), entry.prompt_ids, completion)
        if self.turns:
            # Failed requests of after the last turn were counted; the rest of a session is in its turns.
            restored.counters = self.session.counters
        assert whole(restored) == whole(self.session)
        assert restored.metrics() == self.session.metrics() or not self.turns
        restored.journal = self.keep
        self.session = restored

    async def ask(self, messages: Sequence[Any]) -> Any:
        """Send a request; None where the template refuses it, in which case both recorders must say so."""
        try:
            placed = self.slow.place(messages, self.tools, self.given)
        except RenderError:
            segments_before = len(self.session.segments())
            try:
                await self.session.chat(messages, self.tools, self.params, template_args=self.given)
            except RenderError:
                assert len(self.session.segments()) == segments_before
                return None
            raise AssertionError("the session rendered what cannot be rendered") from None
        # From here to the client nothing is suspended, nor from the client's answer to what is recorded.
        self.gate.expected = placed.prompt
        turn = await self.session.chat(messages, self.tools, self.params, template_args=self.given)
        assert self.gate.last is not None
        self.slow.commit(placed, self.gate.last.token_ids.tolist(), copy.deepcopy(turn))
        self.calls += 1
        return turn

    async def go_on(self, messages: list[Any], text: str) -> list[Any]:
        """Ask, and append what comes back, answers to its calls and a user's message."""
        turn = await self.ask(messages)
        if turn is None:
            return [{"role": "user", "content": f"again {text}"}]
        messages = [*messages, turn]
        messages += [{"role": "tool", "tool_call_id": c.id, "content": text} for c in turn.get("tool_calls", ())]
        if not turn.get("tool_calls") or text.startswith("a"):
            messages.append({"role": "user", "content": text})
        return messages

    async def act(self, action: str, text: str, number: int) -> None:
        """Do one thing to the history, or to the requests in flight."""
        if action in LATER:
            # What is done to the middle of a history needs one.
            for _ in range(2):
                self.messages = await self.go_on(self.messages, f"{text}!")
        change: Callable[[str, int], Any] | None = CHANGES.get(action)
        if change is not None:
            change.__get__(self)(text, number)
            self.messages = await self.go_on(self.messages, text)
        elif action == "resample":
            await self.ask(self.messages)
        elif action == "subagent":
            sub = [{"role": "system", "content": "sub"}, {"role": "user", "content": text}]
            for _ in range(1 + number % 2):
                sub = await self.go_on(sub, text)
        elif action == "fail":
            self.gate.failing = True
            with contextlib.suppress(InferenceError):
                await self.ask(self.messages)
            self.gate.failing = False
        elif action in ("cancel", "together", "twins"):
            await self._in_flight(action, text, number)
        else:
            self.messages = await self.go_on(self.messages, text)

    async def _in_flight(self, action: str, text: str, number: int) -> None:
        """Have several requests in flight; they end in another order, or one of them is given up."""
        other = [*self.messages, {"role": "user", "content": f"also {text}"}]
        several = [self.messages, self.messages if action == "twins" else other]
        self.gate.closed, self.gate.held = True, []
        tasks = [asyncio.ensure_future(self.go_on(messages, text)) for messages in several]
        for _ in range(4):
            await asyncio.sleep(0)
        self.gate.closed = False
        pairs = list(zip(tasks, self.gate.held, strict=False)) if len(self.gate.held) == len(tasks) else []
        pairs = pairs if number % 2 else pairs[::-1]
        if action == "cancel" and pairs:
            pairs.pop()[0].cancel()
        for task, event in pairs:
            event.set()
            await task
        for event in self.gate.held:
            event.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for messages in results:
            if isinstance(messages, Exception):
                raise messages
        self.messages = next(messages for messages in [results[number % 2], *results] if isinstance(messages, list))

    # What is done to a history

    def _edit(self, text: str, number: int) -> None:
        editable = [m for m in self.messages if m["role"] != "assistant"]
        # Not the first one, whose change shares nothing, nor the last one, which was not asked yet.
        editable = editable[1:-1] or editable
        editable[number % len(editable)]["content"] = f"edited {text}{number}"

    def _edit_answer(self, text: str, number: int) -> None:
        for message in [m for m in self.messages if m["role"] == "assistant"][-1 - number % 2 :]:
            message["content"] = f"edited {text}"

    def _compact(self, text: str, number: int) -> None:
        self.messages = [{"role": "user", "content": f"summary {text}"}, *self.messages[len(self.messages) :]]

    def _rewrite(self, text: str, number: int) -> None:
        for message in self.messages:
            calls = [call for call in message.get("tool_calls") or () if isinstance(call, ToolCall)]
            if calls:
                message["tool_calls"] = [ToolCall(c.id, c.name, {"z": number, **c.arguments}, c.raw) for c in calls]

    def _reissue(self, text: str, number: int) -> None:
        for index, message in enumerate(self.messages):
            calls = message.get("tool_calls") or ()
            new = {_id_of(call): f"new{index}-{n}-{number}" for n, call in enumerate(calls)}
            if calls:
                message["tool_calls"] = [_plain(call, new[_id_of(call)], indent=1) for call in calls]
            for later in self.messages[index + 1 :]:
                if later.get("tool_call_id") in new:
                    later["tool_call_id"] = new[later["tool_call_id"]]

    def _decorate(self, text: str, number: int) -> None:
        for index, message in enumerate(self.messages):
            content = message.get("content")
            if isinstance(content, str) and message["role"] == "assistant":
                message["content"] = f"\n {content} " if number % 2 else [{"type": "text", "text": content}]
                message["tool_calls"] = [_plain(c, _id_of(c), indent=number) for c in message.get("tool_calls") or ()]
            elif isinstance(content, str) and content.strip():
                half = (
                    len(content) // 2
                    if content[: len(content) // 2].strip() and content[len(content) // 2 :].strip()
                    else 0
                )
                parts = [content[:half], content[half:]] if half else [content]
                message["content"] = [{"type": "text", "text": part, "cache_control": {"at": index}} for part in parts]

    def _drop_reasoning(self, text: str, number: int) -> None:
        for message in self.messages:
            message.pop("reasoning_content", None)

    def _drop_empty(self, text: str, number: int) -> None:
        self.messages = [
            m for m in self.messages
            if m["role"] != "assistant" or m.get("tool_calls") or str(_text(m)).strip()
        ]  # fmt: skip

    def _truncate(self, text: str, number: int) -> None:
        ends = [n for n, message in enumerate(self.messages) if message["role"] != "assistant"]
        self.messages = self.messages[: ends[number % len(ends)] + 1]

    def _drop_turn(self, text: str, number: int) -> None:
        turns = [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]
        if turns:
            self.messages = [*self.messages[: turns[-1]], {"role": "user", "content": f"no {text}"}]

    def _rewind(self, text: str, number: int) -> None:
        users = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        users = users[1:-1] or users or [0]
        at = users[number % len(users)]
        self.messages = [*self.messages[:at], {"role": "user", "content": f"rather {text}{number}"}]

    def _edit_reasoning(self, text: str, number: int) -> None:
        for message in self.messages[1:]:
            if message["role"] == "assistant" and not message.get("tool_calls"):
                message["reasoning_content"] = f"other {text}{number}"

    def _fewshot(self, text: str, number: int) -> None:
        call = {"id": "mine", "type": "function", "function": {"name": "look", "arguments": '{"x": 1}'}}
        example = {"role": "assistant", "content": f"shown {text}"}
        self.messages += [example, {"role": "user", "content": text}] if number % 2 else [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "mine", "content": "r"},
        ]  # fmt: skip

    def _tools(self, text: str, number: int) -> None:
        if number > 4:  # To ``==`` these two are the same tool.
            self.tools = [_defaulting(1 if number % 2 else True)]
        else:
            self.tools = [] if number == 4 else [OTHER] if self.tools == [TOOL] else [TOOL]

    def _arguments(self, text: str, number: int) -> None:
        """Another argument of the template, of those that this one takes; or none any more."""
        accepted = [arguments for arguments in GIVEN if all(itertools.starmap(self.renderer.takes, arguments.items()))]
        self.given = accepted[number % len(accepted)]

    def _system(self, text: str, number: int) -> None:
        if self.messages[0]["role"] == "system":
            self.messages[0]["content"] = f"be {text}"
        else:
            self.messages.insert(0, {"role": "system", "content": f"be {text}"})

    async def check(self) -> Trajectory:
        """Hold the session against the slow recorder and the ledger."""
        await self.gate.close()
        self.book.close()
        segments = self.session.segments()
        assert [(s.kind, s.parent, s.token_ids.tolist(), s.fork) for s in segments] == list(self.slow.tree())
        trajectory = Trajectory.from_bytes(Trajectory("s", "e", "g", "t", segments=segments).to_bytes())
        check_against_ledger(trajectory, self.path, self.calls)
        return trajectory


CHANGES = {
    name: getattr(Wild, f"_{name}")
    for name in (
        "edit", "edit_answer", "compact", "rewrite", "reissue", "decorate", "drop_reasoning", "drop_empty", "truncate",
        "fewshot", "tools", "system", "arguments", "drop_turn", "rewind", "edit_reasoning",
    )
}  # fmt: skip

LATER = ("edit", "rewind", "rewrite", "edit_reasoning")


def whole(session: Session) -> list[str]:
    """All of a session's segments, ids and log-probabilities as they are."""
    return [
        repr({**segment_record(segment), "token_ids": segment.token_ids.tobytes()}) for segment in session.segments()
    ]


def _defaulting(value: Any) -> ToolSchema:
    return ToolSchema("look", "Looks.", {"type": "object", "properties": {"x": {"default": value}}})


def _id_of(call: Any) -> str:
    return call.id if isinstance(call, ToolCall) else call["id"]


def _text(message: Any) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _plain(call: Any, call_id: str, *, indent: int) -> dict[str, Any]:
    """A call in OpenAI's form, its arguments written in another way."""
    if isinstance(call, ToolCall):
        name = call.name
        arguments = (
            call.raw if call.error is not None else json.dumps(dict(reversed(call.arguments.items())), indent=indent)
        )
    else:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
