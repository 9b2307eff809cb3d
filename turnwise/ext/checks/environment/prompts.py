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
_SHORT_ANSWER_LENGTH: Final = 3
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
        with_tools, without_tools = (list(context.subject.prompt(episode.messages, offered)) for offered in (tools, ()))
        if with_tools == without_tools:
            context.add_finding(
                "tools shown",
                f"the chat template does not show tools: with and without {', '.join(tool.name for tool in tools)} the "
                "prompt is the same",
                "choose a template that shows them: --chat-template here, renderer.chat_template in a run",
                where=episode.where,
            )


async def lengths(context: CheckContext) -> None:
    """Check that the prompt and the longest tool result fit into the context."""
    count_tokens = context.subject.count_tokens
    prompts: list[int] = []
    longest_answer = (0, "")
    for task, seed in context.episodes:
        async with context.new_episode(task, seed) as episode:
            tokens = sum(map(count_tokens, _texts(episode.messages))) + count_tokens(_tools_text(schemas(episode.env)))
            prompts.append(tokens)
            start = len(episode.messages)
            for call in usable_calls(episode.env):
                if episode.is_over:
                    break
                await context.step(episode, {"role": "assistant", "content": "", "tool_calls": [call]})
            if not episode.is_over:
                await context.step(episode, {"role": "assistant", "content": "I do not know."})
            for message in episode.messages[start:]:
                longest_answer = max(
                    longest_answer, (count_tokens(text_of(message)), message.get("name") or message["role"])
                )
    answer_tokens, answer_name = longest_answer
    context.report.figures |= {"prompt tokens, most": max(prompts), "answer tokens, most": answer_tokens}
    limit = context.subject.context_length
    if limit is None:
        return
    if max(prompts) >= limit:
        text = f"the prompt with the tools has {max(prompts)} tokens, and the context {limit}"
        context.add_finding("lengths", text, "shorten the prompt or the tools' descriptions, or use a longer context")
    elif max(prompts) + answer_tokens >= limit:
        sizes = f"the prompt has {max(prompts)} tokens and an answer of {answer_name!r} {answer_tokens}"
        text = f"{sizes}: the context {limit}"
        context.add_finding("lengths", text, "limit the tool's output: @function_tool(max_output=...)")
    elif 2 * max(prompts) > limit:
        text = f"the prompt with the tools has {max(prompts)} tokens: more than half of the context, {limit}"
        context.add_finding("lengths", text, "shorten it, or use a longer context", severity="warning")
    elif 4 * answer_tokens > limit:
        text = f"an answer of {answer_name!r} has {answer_tokens} tokens: more than a quarter of the context, {limit}"
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
    episodes_searched: list[tuple[set[str], dict[str, str]]] = []
    episodes = [(task, seed) for seed in context.subject.seeds for task in context.subject.tasks]
    if len(context.subject.tasks) == 1 and not context.single:
        episodes = [
            (context.subject.tasks[0], seed) for seed in (*context.subject.seeds, *range(1_000, 1_000 + _MAX_EPISODES))
        ]
    for task, seed in episodes[:_MAX_EPISODES]:
        async with context.new_episode(task, seed) as episode:
            texts_by_location = _searched_texts(episode.env, episode.messages)
            episodes_searched.append((await _answers_of(context, episode), texts_by_location))
    constant = _constant_answers(episodes_searched)
    episodes_searched = [(episode_answers - constant, texts) for episode_answers, texts in episodes_searched]
    for location in sorted({location for _, texts_by_location in episodes_searched for location in texts_by_location}):
        texts = [texts_by_location.get(location, "") for _, texts_by_location in episodes_searched]
        leaked = [
            next((answer for answer in episode_answers if _occurs(answer, text)), None)
            for (episode_answers, _), text in zip(episodes_searched, texts, strict=True)
        ]
        has_answer = [bool(episode_answers) for episode_answers, _ in episodes_searched]
        if not any(has_answer):
            continue
        share = sum(answer is not None for answer in leaked) / sum(has_answer)
        if share - _chance_share(episodes_searched, texts) <= 0.5:
            continue
        leaks = [answer for answer in leaked if answer is not None]
        is_certain = max(map(len, leaks)) > _SHORT_ANSWER_LENGTH or len(set(leaks)) > 2
        context.add_finding(
            "answers",
            f"the answer occurs in the {location} in {len(leaks)} of {sum(has_answer)} episodes, such as {leaks[0]!r}",
            "remove it, or where it is no answer rename the field of task.data, or let solve() end with another text",
            severity="error" if is_certain else "warning",
        )


def _constant_answers(episodes_searched: Sequence[tuple[set[str], dict[str, str]]]) -> set[str]:
    """Return what all of several different questions are answered with, such as ``done``: it answers none of them."""
    prompts = {texts.get("prompt", "") for _, texts in episodes_searched}
    return (
        set.intersection(*(episode_answers for episode_answers, _ in episodes_searched)) if len(prompts) > 1 else set()
    )


def _chance_share(episodes_searched: Sequence[tuple[set[str], Any]], texts: Sequence[str]) -> float:
    """Return how often an episode's answers occur in the text of another one with other answers."""
    occurrences = [
        any(_occurs(answer, text) for answer in other_answers - own_answers)
        for (own_answers, _), text in zip(episodes_searched, texts, strict=True)
        for other_answers, _ in episodes_searched
        if other_answers - own_answers
    ]
    return sum(occurrences) / len(occurrences) if occurrences else 0.0


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
    return {normalised for normalised in map(_normalise, strings) if normalised}


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
        for name, member in value.items():
            yield from _strings(member, key, selected or key.search(str(name)) is not None)
    elif isinstance(value, (list, tuple)):
        yield from itertools.chain.from_iterable(_strings(member, key, selected) for member in value)
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
