"""Prompt checks: tools in the rendered prompt, lengths, and leaked answers."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from turnwise.envs.core import Env, schemas
from turnwise.envs.solution import solver_of
from turnwise.errors import TurnwiseError
from turnwise.ext.checks.environment.context import CheckContext, Played, usable_calls
from turnwise.types import Message, ToolSchema, text_of

_ANSWER_KEY: Final = re.compile(
    r"(^|_)(answers?|solutions?|truths?|ground_truths?|gold|labels?|expected|targets?|references?)($|_)", re.IGNORECASE
)
_CHOICE_KEY: Final = re.compile(r"(^|_)(choices?|options?|candidates?)($|_)", re.IGNORECASE)
_MOST_EPISODES: Final = 12
_SHORT: Final = 3
_MOST_MOVES: Final = 100


async def tools_shown(exam: CheckContext) -> None:
    """Check that the chat template renders the tools."""
    if exam.of.prompt is None:
        return
    task, seed = exam.episodes[0]
    async with exam.episode(task, seed) as played:
        tools = schemas(played.env)
        if not tools:
            return
        with_tools, without = (list(exam.of.prompt(played.messages, offered)) for offered in (tools, ()))
        if with_tools == without:
            exam.find(
                "tools shown",
                f"the chat template does not show tools: with and without {', '.join(tool.name for tool in tools)} the "
                "prompt is the same",
                "choose a template that shows them: --chat-template here, renderer.chat_template in a run",
                where=played.where,
            )


async def lengths(exam: CheckContext) -> None:
    """Check that the prompt and the longest tool result fit into the context."""
    count = exam.of.count_tokens
    prompts: list[int] = []
    longest = (0, "")
    for task, seed in exam.episodes:
        async with exam.episode(task, seed) as played:
            tokens = sum(map(count, _texts(played.messages))) + count(_tools_text(schemas(played.env)))
            prompts.append(tokens)
            begun = len(played.messages)
            for call in usable_calls(played.env):
                if played.over:
                    break
                await exam.step(played, {"role": "assistant", "content": "", "tool_calls": [call]})
            if not played.over:
                await exam.step(played, {"role": "assistant", "content": "I do not know."})
            for message in played.messages[begun:]:
                longest = max(longest, (count(text_of(message)), message.get("name") or message["role"]))
    exam.report.figures |= {"prompt tokens, most": max(prompts), "answer tokens, most": longest[0]}
    limit = exam.of.context_length
    if limit is None:
        return
    if max(prompts) >= limit:
        text = f"the prompt with the tools has {max(prompts)} tokens, and the context {limit}"
        exam.find("lengths", text, "shorten the prompt or the tools' descriptions, or use a longer context")
    elif max(prompts) + longest[0] >= limit:
        text = f"the prompt has {max(prompts)} tokens and an answer of {longest[1]!r} {longest[0]}: the context {limit}"
        exam.find("lengths", text, "limit the tool's output: @function_tool(max_output=...)")
    elif 2 * max(prompts) > limit:
        text = f"the prompt with the tools has {max(prompts)} tokens: more than half of the context, {limit}"
        exam.find("lengths", text, "shorten it, or use a longer context", severity="warning")
    elif 4 * longest[0] > limit:
        text = f"an answer of {longest[1]!r} has {longest[0]} tokens: more than a quarter of the context, {limit}"
        exam.find("lengths", text, "limit it: @function_tool(max_output=...)", severity="warning")


def _texts(messages: Sequence[Message]) -> list[str]:
    return [text_of(message) for message in messages]


def _tools_text(tools: Sequence[ToolSchema]) -> str:
    return json.dumps([tool.to_json() for tool in tools]) if tools else ""


async def answers(exam: CheckContext) -> None:
    """Check that the answer does not occur in the prompt or the tools' schemas.

    Single occurrences may be chance, and listed choices always contain the answer; so a leak is where an episode's
    answers stand in its own texts far more often than those of other episodes do.
    """
    seen: list[tuple[set[str], dict[str, str]]] = []
    episodes = [(task, seed) for seed in exam.of.seeds for task in exam.of.tasks]
    if len(exam.of.tasks) == 1 and not exam.single:
        episodes = [(exam.of.tasks[0], seed) for seed in (*exam.of.seeds, *range(1_000, 1_000 + _MOST_EPISODES))]
    for task, seed in episodes[:_MOST_EPISODES]:
        async with exam.episode(task, seed) as played:
            places = _places(played.env, played.messages)
            seen.append((await _answers_of(exam, played), places))
    for place in sorted({place for _, places in seen for place in places}):
        texts = [places.get(place, "") for _, places in seen]
        own = [
            next((each for each in wanted if _stands(each, text)), None)
            for (wanted, _), text in zip(seen, texts, strict=True)
        ]
        asked = [bool(wanted) for wanted, _ in seen]
        if not any(asked):
            continue
        share = sum(each is not None for each in own) / sum(asked)
        if share - _by_chance(seen, texts) <= 0.5:
            continue
        found = [each for each in own if each is not None]
        certain = max(map(len, found)) > _SHORT or len(set(found)) > 2
        exam.find(
            "answers",
            f"the answer occurs in the {place} in {len(found)} of {sum(asked)} episodes, such as {found[0]!r}",
            "remove it, or rename the field of task.data where it is not an answer",
            severity="error" if certain else "warning",
        )


def _by_chance(seen: Sequence[tuple[set[str], Any]], texts: Sequence[str]) -> float:
    """Return how often an episode's answers occur in the text of another one with other answers."""
    pairs = [
        any(_stands(each, text) for each in wanted - mine)
        for (mine, _), text in zip(seen, texts, strict=True)
        for wanted, _ in seen
        if wanted - mine
    ]
    return sum(pairs) / len(pairs) if pairs else 0.0


def _first(wanted: set[str], text: str) -> str | None:
    return next((each for each in sorted(wanted) if _stands(each, text)), None)


def _stands(answer: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


async def _answers_of(exam: CheckContext, played: Played) -> set[str]:
    task = played.task
    found = (
        set()
        if task is None
        else {*_strings(task.data, _ANSWER_KEY, False)} - {*_strings(task.data, _CHOICE_KEY, False)}
    )
    final = await _solution_text(exam, played)
    if final:
        found.add(final)
    return {plain for plain in map(_plain, found) if plain}


async def _solution_text(exam: CheckContext, played: Played) -> str:
    try:
        solver = solver_of(played.env)
        if solver is None:
            return ""
        message = await exam.run(solver.next(), "solve")
        while message is not None and message.get("tool_calls") and solver.moves < _MOST_MOVES:
            begun = len(played.messages)
            await exam.step(played, message)
            if played.over:
                return ""
            message = await exam.run(solver.next(played.messages[begun:]), "solve")
    except TurnwiseError:
        return ""  # reported by the check of the reference solution
    return "" if message is None or message.get("tool_calls") else text_of(message)


def _strings(value: Any, key: re.Pattern[str], wanted: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, key, wanted or key.search(str(name)) is not None)
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(_strings(inner, key, wanted) for inner in value)
    elif wanted and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield str(value)


def _places(env: Env, messages: Sequence[Message]) -> dict[str, str]:
    places: dict[str, str] = {}
    for message in messages:
        name = "system prompt" if message["role"] in ("system", "developer") else "prompt"
        places[name] = f"{places.get(name, '')}\n{_plain(text_of(message))}"
    for tool in schemas(env):
        places[f"description of the tool {tool.name!r}"] = _plain(
            json.dumps([tool.description, tool.parameters], ensure_ascii=False)
        )
    return places


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())
