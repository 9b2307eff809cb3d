"""What long sessions cost: the rows of a long conversation, and finding the next request in one.

``ms_128_turns``: a conversation of 128 turns and 64,000 tokens becomes training rows: the session's segments with what
they mean, and the row with its mask, log-probabilities, versions and turns. ``ms_match_1000``: an agent that keeps its
message objects asks again in a session of 1,000 messages: from the request to its prompt's ids, which holds the
canonical form of what is new, the search in the tree, the encoding of the new messages and the joined prompt. Both are
CPU of the process; the median over all measured is quoted.

The script fails unless the row holds the ids that the engine saw and trains exactly those that it sampled, and unless
each matched request extended the one before. No peer is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from harness.chat import chat_dir, corpus
from harness.measure import machine, parse, parser, report
from turnwise import Message, Trajectory, to_samples
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.inference.scripted import ScriptedClient, scripted_logprobs
from turnwise.recorder.session import PromptPlacement, Session, SessionLimits
from turnwise.types import Completion, ToolCall, ToolSchema

TURNS, TOKENS = 128, 64_000
MESSAGES = 1_000
TOOL = ToolSchema("read", "Read some lines of a file.", {"type": "object", "properties": {"line": {"type": "integer"}}})
BARS = {"ms_128_turns": 50.0, "ms_match_1000": 2.5}
_LIMITS = SessionLimits(context_length=10_000_000)


def completions(renderer: TemplateRenderer) -> list[Completion]:
    """Return what the model says, over and over: a few words and a call."""
    answers = []
    for line in range(8):
        call = ToolCall("", "read", {"line": 100 * line})
        message: Message = {"role": "assistant", "content": f"I read on from line {100 * line}.", "tool_calls": [call]}
        ids = renderer.completion(message, [TOOL])
        answers.append(Completion(ids, scripted_logprobs(ids), "stop", ((0, 0, len(ids)),)))
    return answers


class Talk:
    """A session and the agent that keeps its messages."""

    def __init__(self, renderer: TemplateRenderer, characters: int) -> None:
        answers = completions(renderer)
        self.client = ScriptedClient(renderer, lambda request: answers[request.number % len(answers)])
        self.session = Session(self.client, renderer, id="s", limits=_LIMITS)
        self.messages: list[Message] = [{"role": "user", "content": "Read the file and tell what it does."}]
        self._text = corpus()
        self._characters = characters

    async def turn(self) -> float:
        """Take a turn; return the CPU seconds from the request to its prompt."""
        stream = self.session.stream(self.messages, [TOOL])
        start = time.process_time()
        opened = await anext(stream)
        seconds = time.process_time() - start
        assert isinstance(opened, PromptPlacement)
        message: Any = [item async for item in stream][-1]
        at = len(self.messages) * 37 % (len(self._text) - self._characters)
        [call] = message["tool_calls"]
        answer: Message = {"role": "tool", "tool_call_id": call.id, "content": self._text[at : at + self._characters]}
        self.messages += [message, answer]
        return seconds

    def trajectory(self) -> Trajectory:
        """Return what it leaves."""
        return Trajectory("s", "s", "g", "t", segments=self.session.segments())


async def long_talk(renderer: TemplateRenderer) -> Talk:
    """Return a talk of 128 turns and about 64,000 tokens."""
    characters = 1000
    while True:
        talk = Talk(renderer, characters)
        for _ in range(TURNS):
            await talk.turn()
        tokens = sum(len(segment.token_ids) for segment in talk.session.segments(messages=False))
        if abs(tokens - TOKENS) < TOKENS / 50:
            return talk
        characters = round(characters * TOKENS / tokens)


async def assemble(renderer: TemplateRenderer, repeats: int) -> tuple[list[float], int]:
    """Return the milliseconds of each assembly, and how many tokens the row has."""
    talk = await long_talk(renderer)
    milliseconds = []
    for _ in range(repeats):
        start = time.process_time()
        samples = to_samples(talk.trajectory())
        milliseconds.append((time.process_time() - start) * 1e3)
    [row] = samples.rows
    last_prompt = talk.client.requests[-1].prompt
    sampled = [segment.token_ids for segment in talk.session.segments() if segment.sampled]
    if not np.array_equal(row.input_ids[: len(last_prompt)], last_prompt):
        raise SystemExit("the row does not hold the ids of the last prompt")
    if not np.array_equal(row.input_ids[row.loss_mask], np.concatenate(sampled)):
        raise SystemExit("the row does not train exactly what was sampled")
    return milliseconds, len(row.input_ids)


async def match(renderer: TemplateRenderer, repeats: int) -> list[float]:
    """Return the milliseconds of each request from 1,000 messages on."""
    talk = Talk(renderer, 200)
    while len(talk.messages) < MESSAGES:
        await talk.turn()
    milliseconds = [await talk.turn() * 1e3 for _ in range(repeats)]
    metrics = talk.session.metrics()
    if metrics["branches"] != 1 or metrics["forks"]:
        raise SystemExit(f"a request did not extend the one before: {metrics}")
    return milliseconds


async def measure(repeats: int) -> dict[str, Any]:
    renderer = load_renderer(chat_dir())
    assembled, tokens = await assemble(renderer, repeats)
    matched = await match(renderer, repeats)
    figures = {
        "ms_128_turns": round(statistics.median(assembled), 2),
        "ms_match_1000": round(statistics.median(matched), 3),
    }
    table = Table(title=f"CPU, median of {repeats}")
    for column in ("what", "ms", "at most"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for key, value in figures.items():
        table.add_row(key, str(value), str(BARS[key]))
    Console(stderr=True).print(table)
    return {
        **figures,
        "bars": BARS,
        "held": {key: value <= BARS[key] for key, value in figures.items()},
        "config": {"turns": TURNS, "tokens": tokens, "messages": MESSAGES, "template": "qwen2_5", "repeats": repeats},
        "machine": machine("turnwise-rl", "tokenizers", "jinja2", "numpy"),
        "samples": {
            "ms_128_turns": [round(milliseconds, 2) for milliseconds in assembled],
            "ms_match_1000": [round(milliseconds, 3) for milliseconds in matched],
        },
    }


def main() -> None:
    arguments = parse(parser(__doc__ or "", repeats=50, quick_repeats=15))
    report(asyncio.run(measure(arguments.repeats)))


if __name__ == "__main__":
    sys.exit(main())
