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
from turnwise.ext.checks.environment.context import CheckContext, CheckEpisode, usable_calls
from turnwise.types import Message, ToolSchema, text_of

_ANSWER_KEY: Final = re.compile(
    r"(^|_)(answers?|solutions?|truths?|ground_truths?|gold|labels?|expected|targets?|references?)($|_)", re.IGNORECASE
)
_CHOICE_KEY: Final = re.compile(r"(^|_)(choices?|options?|candidates?)($|_)", re.IGNORECASE)
_MAX_EPISODES: Final = 12
_SHORT_ANSWER: Final = 3
_MAX_MOVES: Final = 100


async def tools_shown(context: CheckContext) -> None:
    """Check that the chat template renders the tools."""
    if context.subject.prompt is None:
        return
    task, seed = context.episodes[0]
    async with context.new_episode(task, seed) as episode:
        tools = schemas(episode.env)
        if not tools:
            return
        with_tools, without = (list(context.subject.prompt(episode.messages, offered)) for offered in (tools, ()))
        if with_tools == without:
            context.add_finding(
                "tools shown",
                f"the chat template does not show tools: with and without {', '.join(tool.name for tool in tools)} the "
                "prompt is the same",
                "choose a template that shows them: --chat-template here, renderer.chat_template in a run",
                where=episode.where,
            )


async def lengths(context: CheckContext) -> None:
    """Check that the prompt and the longest tool result fit into the context."""
    count = context.subject.count_tokens
    prompts: list[int] = []
    longest = (0, "")
    for task, seed in context.episodes:
        async with context.new_episode(task, seed) as episode:
            tokens = sum(map(count, _texts(episode.messages))) + count(_tools_text(schemas(episode.env)))
            prompts.append(tokens)
            start = len(episode.messages)
            for call in usable_calls(episode.env):
                if episode.is_over:
                    break
                await context.step(episode, {"role": "assistant", "content": "", "tool_calls": [call]})
            if not episode.is_over:
                await context.step(episode, {"role": "assistant", "content": "I do not know."})
            for message in episode.messages[start:]:
                longest = max(longest, (count(text_of(message)), message.get("name") or message["role"]))
    context.report.figures |= {"prompt tokens, most": max(prompts), "answer tokens, most": longest[0]}
    limit = context.subject.context_length
    if limit is None:
        return
    if max(prompts) >= limit:
        text = f"the prompt with the tools has {max(prompts)} tokens, and the context {limit}"
        context.add_finding("lengths", text, "shorten the prompt or the tools' descriptions, or use a longer context")
    elif max(prompts) + longest[0] >= limit:
        text = f"the prompt has {max(prompts)} tokens and an answer of {longest[1]!r} {longest[0]}: the context {limit}"
        context.add_finding("lengths", text, "limit the tool's output: @function_tool(max_output=...)")
    elif 2 * max(prompts) > limit:
        text = f"the prompt with the tools has {max(prompts)} tokens: more than half of the context, {limit}"
        context.add_finding("lengths", text, "shorten it, or use a longer context", severity="warning")
    elif 4 * longest[0] > limit:
        text = f"an answer of {longest[1]!r} has {longest[0]} tokens: more than a quarter of the context, {limit}"
        context.add_finding("lengths", text, "limit it: @function_tool(max_output=...)", severity="warning")


def _texts(messages: Sequence[Message]) -> list[str]:
    return [text_of(message) for message in messages]


def _tools_text(tools: Sequence[ToolSchema]) -> str:
    return json.dumps([tool.to_json() for tool in tools]) if tools else ""


async def answers(context: CheckContext) -> None:
    """Check that the answer does not occur in the prompt or the tools' schemas.

    Single occurrences may be chance, and listed choices always contain the answer; so it is a leak if an episode's
    answers occur in its texts far more often than those of other episodes.
    """
    rows: list[tuple[set[str], dict[str, str]]] = []
    episodes = [(task, seed) for seed in context.subject.seeds for task in context.subject.tasks]
    if len(context.subject.tasks) == 1 and not context.single:
        episodes = [
            (context.subject.tasks[0], seed) for seed in (*context.subject.seeds, *range(1_000, 1_000 + _MAX_EPISODES))
        ]
    for task, seed in episodes[:_MAX_EPISODES]:
        async with context.new_episode(task, seed) as episode:
            texts_by_place = _searched_texts(episode.env, episode.messages)
            rows.append((await _answers_of(context, episode), texts_by_place))
    for location in sorted({location for _, texts_by_place in rows for location in texts_by_place}):
        texts = [texts_by_place.get(location, "") for _, texts_by_place in rows]
        leaked = [
            next((answer for answer in expected if _occurs(answer, text)), None)
            for (expected, _), text in zip(rows, texts, strict=True)
        ]
        has_answer = [bool(expected) for expected, _ in rows]
        if not any(has_answer):
            continue
        share = sum(answer is not None for answer in leaked) / sum(has_answer)
        if share - _chance_share(rows, texts) <= 0.5:
            continue
        leaks = [answer for answer in leaked if answer is not None]
        certain = max(map(len, leaks)) > _SHORT_ANSWER or len(set(leaks)) > 2
        context.add_finding(
            "answers",
            f"the answer occurs in the {location} in {len(leaks)} of {sum(has_answer)} episodes, such as {leaks[0]!r}",
            "remove it, or rename the field of task.data where it is not an answer",
            severity="error" if certain else "warning",
        )


def _chance_share(rows: Sequence[tuple[set[str], Any]], texts: Sequence[str]) -> float:
    """Return how often an episode's answers occur in the text of another one with other answers."""
    pairs = [
        any(_occurs(answer, text) for answer in expected - own_answers)
        for (own_answers, _), text in zip(rows, texts, strict=True)
        for expected, _ in rows
        if expected - own_answers
    ]
    return sum(pairs) / len(pairs) if pairs else 0.0


def _occurs(answer: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


async def _answers_of(context: CheckContext, episode: CheckEpisode) -> set[str]:
    task = episode.task
    strings = (
        set()
        if task is None
        else {*_strings(task.data, _ANSWER_KEY, False)} - {*_strings(task.data, _CHOICE_KEY, False)}
    )
    final = await _solution_text(context, episode)
    if final:
        strings.add(final)
    return {plain for plain in map(_normalise, strings) if plain}


async def _solution_text(context: CheckContext, episode: CheckEpisode) -> str:
    try:
        solver = solver_of(episode.env)
        if solver is None:
            return ""
        message = await context.run(solver.next(), "solve")
        while message is not None and message.get("tool_calls") and solver.moves < _MAX_MOVES:
            start = len(episode.messages)
            await context.step(episode, message)
            if episode.is_over:
                return ""
            message = await context.run(solver.next(episode.messages[start:]), "solve")
    except TurnwiseError:
        return ""  # reported by the check of the reference solution
    return "" if message is None or message.get("tool_calls") else text_of(message)


def _strings(value: Any, key: re.Pattern[str], selected: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _strings(inner, key, selected or key.search(str(name)) is not None)
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(_strings(inner, key, selected) for inner in value)
    elif selected and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield str(value)


def _searched_texts(env: Env, messages: Sequence[Message]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for message in messages:
        name = "system prompt" if message["role"] in ("system", "developer") else "prompt"
        texts[name] = f"{texts.get(name, '')}\n{_normalise(text_of(message))}"
    for tool in schemas(env):
        texts[f"description of the tool {tool.name!r}"] = _normalise(
            json.dumps([tool.description, tool.parameters], ensure_ascii=False)
        )
    return texts


def _normalise(text: str) -> str:
    return " ".join(text.casefold().split())
