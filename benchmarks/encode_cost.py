"""What encoding one more turn costs, early and late in a conversation of 64k tokens.

One conversation of 128 turns: every request adds a tool's answer, every completion says a sentence and makes a call,
some 500 new tokens a turn: lines of the standard library, drawn anew for each turn of each conversation. No text occurs
twice in a run (the script fails if one does), so that nothing is answered from what an encoder remembers of it. Ours is
a ``Session`` with a model that answers from a list: from the call of ``chat`` until the prompt's ids are handed to the
client ("encode"), and from the completion until the message is returned ("commit"). The peer is what a program does
that has no recorder: the tokenizer's own ``apply_chat_template`` over the whole conversation.

Both sides see the same messages, and the ids that both give must be the same at turn 8 and at turn 128, else the script
fails. A second pass hands every earlier message back as a server's client would: parsed from JSON, arguments as text.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

from harness.chat import chat_dir, corpus
from harness.measure import machine, parse, parser, report
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.inference.scripted import ScriptedClient, scripted_logprobs
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import Completion, Message, SamplingParams, TokenIds, TokenPrompt, ToolCall, ToolSchema

TURNS = 128
EARLY = 8
SHOWN = (EARLY, 16, 32, 64, TURNS)
TOKENS = 64_000
ANSWER_CHARACTERS = 1_950
SAID_CHARACTERS = 260
TOOLS = (
    ToolSchema(
        "read_lines",
        "Read lines of a file.",
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "start": {"type": "integer"}, "end": {"type": "integer"}},
            "required": ["path", "start", "end"],
        },
    ),
)


@dataclass
class Script:
    """The conversation: what is asked first, what the model says at each turn, and what its calls are answered."""

    first: list[Message]
    said: list[Message]
    sampled: list[Completion]
    answers: list[str]


@dataclass
class Passed:
    """CPU seconds by turn of one conversation, how many ids each added, and the prompts that are compared."""

    encode: dict[int, float] = field(default_factory=dict)
    commit: dict[int, float] = field(default_factory=dict)
    added: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, TokenIds] = field(default_factory=dict)
    forks: float = 0.0


class TimedClient(ScriptedClient):
    """Answers from a list, and notes the CPU clock when it is asked and when it answers."""

    asked = answered = 0.0

    async def generate(self, prompt: TokenPrompt, params: SamplingParams, *, session_id: str) -> Completion:
        self.asked = time.process_time()
        completion = await super().generate(prompt, params, session_id=session_id)
        self.answered = time.process_time()
        return completion


class Texts:
    """Texts of the standard library's lines, in a random order; none is given twice.

    Args:
        seed: Of the order.
    """

    def __init__(self, seed: int) -> None:
        self._lines = [line for line in corpus().splitlines(keepends=True) if line.strip()]
        self._random = random.Random(seed)
        self._given: set[str] = set()

    def draw(self, characters: int) -> str:
        """Return a new text of this length."""
        parts: list[str] = []
        while sum(map(len, parts)) < characters + 100:
            parts.append(self._random.choice(self._lines))
        text = "".join(parts).strip()[:characters].strip()
        if text in self._given:
            raise SystemExit(f"a text was drawn twice: {text[:80]!r}")
        self._given.add(text)
        return text


def make_script(renderer: TemplateRenderer, texts: Texts) -> Script:
    said: list[Message] = []
    answers: list[str] = []
    for turn in range(1, TURNS + 1):
        call = ToolCall("", "read_lines", {"end": turn * 40, "path": f"lib/module{turn}.py", "start": turn})
        said.append({"role": "assistant", "content": texts.draw(SAID_CHARACTERS), "tool_calls": [call]})
        answers.append(texts.draw(ANSWER_CHARACTERS))
    sampled = []
    for message in said:
        ids = renderer.completion(message, TOOLS)
        sampled.append(Completion(ids, scripted_logprobs(ids), "stop", ((0, 0, len(ids)),)))
    first: list[Message] = [
        {"role": "system", "content": texts.draw(ANSWER_CHARACTERS)},
        {"role": "user", "content": texts.draw(SAID_CHARACTERS)},
    ]
    return Script(first, said, sampled, answers)


async def ours(renderer: TemplateRenderer, script: Script, *, wire: bool) -> Passed:
    """Drive one session through the conversation."""
    client = TimedClient(renderer, script.sampled)
    session = Session(client, renderer, id="conversation", limits=SessionLimits(context_length=10 * TOKENS))
    messages: list[Any] = list(script.first)
    passed, known = Passed(), 0
    for turn in range(1, TURNS + 1):
        given = json.loads(json.dumps(messages)) if wire else messages
        started = time.process_time()
        message = await session.chat(given, TOOLS)
        ended = time.process_time()
        passed.encode[turn] = client.asked - started
        passed.commit[turn] = ended - client.answered
        prompt = client.requests[-1].prompt
        # What the session encodes in a turn is what follows the completion before it.
        passed.added[turn], known = len(prompt) - known, len(prompt) + len(script.sampled[turn - 1].token_ids)
        if turn in (EARLY, TURNS):
            passed.prompts[turn] = prompt
        messages.append(openai_form(message) if wire else message)
        call = message["tool_calls"][0]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": script.answers[turn - 1]})
    passed.forks = session.metrics()["forks"]
    return passed


def openai_form(message: Message) -> dict[str, Any]:
    """Return an assistant message as it comes back over HTTP."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in message["tool_calls"]
    ]
    return {"role": "assistant", "content": message["content"], "tool_calls": calls}


def template_messages(script: Script, turn: int) -> list[dict[str, Any]]:
    """Return what request number ``turn`` holds, in the form that chat templates expect."""
    messages: list[dict[str, Any]] = [dict(message) for message in script.first]
    for said, answer in zip(script.said[: turn - 1], script.answers[: turn - 1], strict=True):
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in said["tool_calls"]
        ]
        messages.append({"role": "assistant", "content": said["content"], "tool_calls": calls})
        messages.append({"role": "tool", "name": "read_lines", "content": answer})
    return messages


def peer(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> tuple[float, list[int]]:
    """Return the CPU seconds of encoding a whole conversation, and its ids."""
    tools = [tool.to_json() for tool in TOOLS]
    started = time.process_time()
    ids = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
    return time.process_time() - started, ids


def check(passed: Passed, theirs: dict[int, list[int]]) -> None:
    """Fail unless both sides encoded the same conversations, without forks, to the wanted length."""
    for turn, ids in theirs.items():
        mine = passed.prompts[turn].tolist()
        if mine != ids:
            at = next((n for n, (a, b) in enumerate(zip(mine, ids, strict=False)) if a != b), min(len(mine), len(ids)))
            raise SystemExit(f"turn {turn}: our {len(mine)} ids and the template's {len(ids)} differ from id {at} on")
    if passed.forks:
        raise SystemExit(f"the conversation forked {passed.forks:.0f} times: turns were not extended")
    if len(theirs[TURNS]) < TOKENS:
        raise SystemExit(f"the conversation has {len(theirs[TURNS])} tokens at turn {TURNS}, wanted {TOKENS}")


def median_us(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e6


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=40, quick_repeats=7))
    folder = chat_dir()
    renderer = load_renderer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    texts = Texts(seed=0)
    turns: dict[str, list[Passed]] = {"ours": [], "wire": []}
    theirs: dict[int, list[float]] = {EARLY: [], TURNS: []}
    for repeat in range(arguments.repeats + 1):
        for name in turns:
            # Each pass has its own texts: one that heard those of another would find them in the encoder's memory.
            script = make_script(renderer, texts)
            measured = {turn: peer(tokenizer, template_messages(script, turn)) for turn in theirs}
            passed = asyncio.run(ours(renderer, script, wire=name == "wire"))
            check(passed, {turn: ids for turn, (_, ids) in measured.items()})
            # The first one warms caches up: the proof of the shapes is made once per model.
            if repeat:
                turns[name].append(passed)
                for turn, (seconds, _) in measured.items():
                    theirs[turn].append(seconds)
    report(result(turns, theirs, folder, renderer, arguments.repeats))


def result(
    turns: dict[str, list[Passed]],
    theirs: dict[int, list[float]],
    folder: Path,
    renderer: TemplateRenderer,
    repeats: int,
) -> dict[str, Any]:
    encode = {name: {t: median_us([p.encode[t] for p in passed]) for t in SHOWN} for name, passed in turns.items()}
    commit = {name: {t: median_us([p.commit[t] for p in passed]) for t in SHOWN} for name, passed in turns.items()}
    whole = {turn: median_us(seconds) for turn, seconds in theirs.items()}
    table = Table(title=f"CPU microseconds to encode one more turn (medians of {repeats} conversations)")
    for column in ("turn", "session", "session, from JSON", "commit", "apply_chat_template"):
        table.add_column(column, justify="right")
    for turn in SHOWN:
        other = f"{whole[turn]:.0f}" if turn in whole else ""
        figures = (encode["ours"][turn], encode["wire"][turn], commit["ours"][turn])
        table.add_row(str(turn), *(f"{figure:.0f}" for figure in figures), other)
    Console(stderr=True).print(table)
    passes = [passed for name in turns for passed in turns[name]]
    tokens = {turn: statistics.median(len(p.prompts[turn]) for p in passes) for turn in (EARLY, TURNS)}
    added = {turn: statistics.median(p.added[turn] for p in passes) for turn in (EARLY, TURNS)}
    return {
        "ratio_turn128_turn8": round(encode["ours"][TURNS] / encode["ours"][EARLY], 3),
        "ratio_wire_turn128_turn8": round(encode["wire"][TURNS] / encode["wire"][EARLY], 3),
        "peer_ratio_turn128_turn8": round(whole[TURNS] / whole[EARLY], 3),
        "us_encode": {name: {str(t): round(us, 1) for t, us in by.items()} for name, by in encode.items()},
        "us_commit": {name: {str(t): round(us, 1) for t, us in by.items()} for name, by in commit.items()},
        "peer_us": {str(turn): round(us, 1) for turn, us in whole.items()},
        "peer_over_ours_at_128": round(whole[TURNS] / encode["ours"][TURNS], 1),
        "prompt_tokens": {str(turn): count for turn, count in tokens.items()},
        "new_tokens": {str(turn): count for turn, count in added.items()},
        "config": {
            "turns": TURNS,
            "repeats": repeats,
            "ours": {"what": "Session.chat until the client is asked", "renderer": renderer.describe()["format"]},
            "peer": {"what": "PreTrainedTokenizerFast.apply_chat_template, whole conversation", "tools": len(TOOLS)},
            "model": {"template": "qwen2_5 of trl", "folder": folder.name},
        },
        "machine": machine("turnwise-rl", "transformers", "tokenizers", "trl", "numpy"),
        "samples": {
            "ours_us": {str(t): [round(p.encode[t] * 1e6) for p in turns["ours"]] for t in (EARLY, TURNS)},
            "wire_us": {str(t): [round(p.encode[t] * 1e6) for p in turns["wire"]] for t in (EARLY, TURNS)},
            "peer_us": {str(t): [round(s * 1e6) for s in seconds] for t, seconds in theirs.items()},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
