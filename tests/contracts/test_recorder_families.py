"""The recorder's proofs over real chat formats: what an echo costs, what an edit shows, and how little is encoded."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import FAMILIES, model_dir, renderer_for
from support.property_tests import examples
from turnwise.chat.model_dir import read_model_dir
from turnwise.chat.renderer import TemplateRenderer, load_renderer
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Trajectory
from turnwise.types import Message, ToolCall, ToolSchema

# Its template writes no tools, and drops what it cannot place.
NAMES = tuple(name for name in sorted(FAMILIES) if name != "deepseekv3")
# Its tools stand before the last user message: behind one, nothing can be gone on from.
MOVED = "mistral"
LIMITS = SessionLimits(context_length=1_000_000)
LOOK = ToolSchema(
    "look", "Looks.", {"type": "object", "properties": {"n": {"type": "number"}, "t": {"type": "string"}}}
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def calling(number: float, text: str = "x", **more: Any) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "look", {"n": number, "t": text})], **more}


def answers(turn: Message, text: str) -> list[Message]:
    return [{"role": "tool", "tool_call_id": call.id, "content": text} for call in turn.get("tool_calls", ())]


def echoed(turn: Message, echo: int) -> dict[str, Any]:
    """A turn as a program sends it back: other spaces, other order, other blocks, without its reasoning."""
    text = turn["content"]
    calls = [
        {
            "type": "function",
            "id": call.id if echo % 2 else f"mine-{call.id}",
            "function": {
                "name": call.name,
                "arguments": json.dumps(dict(reversed(call.arguments.items())), indent=echo),
            },
        }
        for call in turn.get("tool_calls", ())
    ]
    content: Any = (
        [{"type": "text", "text": f"\n{text} ", "cache_control": {"type": "ephemeral"}}] if echo > 1 else text
    )
    return {"role": "assistant", "content": content, "tool_calls": calls, "annotations": [], "refusal": None}


def kept(session: Session) -> Trajectory:
    return Trajectory("s", "e", "g", "t", segments=session.segments())


# Echo


@pytest.mark.parametrize("family", NAMES)
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([1.0, 0.5, 3]), st.integers(0, 5)), min_size=2, max_size=5
    )
)
async def test_reserialised_history_has_one_leaf(family: str, turns: list[tuple[int, float, int]]) -> None:
    renderer = renderer_for(family)
    thinks = {"reasoning_content": "hm"} if "reasoning" in FAMILIES[family].says else {}
    lines: list[Message] = [
        calling(number, **thinks)
        if kind or family == MOVED
        else {"role": "assistant", "content": f"so {number}", **thinks}
        for kind, number, _ in turns
    ]
    client = ScriptedClient(renderer, lines, tools=[LOOK])
    session = Session(client, renderer, id="s", limits=LIMITS)
    history: list[Any] = [user("q")]
    for _, _, form in turns:
        given_turn = await session.chat(history, [LOOK])
        history.append(echo := echoed(given_turn, form))
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "r"} for call in echo["tool_calls"]]
        history += results or [user("and")]
    trajectory = kept(session)
    assert not trajectory.forks()
    assert len(trajectory.leaves()) == 1
    path = [number for segment in trajectory.path(trajectory.leaves()[0])[:-1] for number in segment.token_ids.tolist()]
    assert path == client.requests[-1].prompt.tolist()


# Edit


@pytest.mark.parametrize("family", NAMES)
async def test_edit_in_place_replaces_the_text_in_the_next_prompt(family: str) -> None:
    renderer = renderer_for(family)
    lines: list[Message] = [calling(1), *({"role": "assistant", "content": text} for text in ("told", "x", "y", "z"))]
    client = ScriptedClient(renderer, lines, tools=[LOOK])
    session = Session(client, renderer, id="s", limits=LIMITS)
    history: list[Any] = [user("first question")]
    history.append(copy.deepcopy(await session.chat(history, [LOOK])))
    history += copy.deepcopy(answers(history[1], "first result"))
    history += [copy.deepcopy(await session.chat(history, [LOOK])), user("more")]
    changes = [(2, "found", "history_edited"), (3, "said", "assistant_edited"), (0, "asked", "restart")]
    for index, text, reason in changes:
        unproven = family == MOVED and index > 0
        forks_before, was = kept(session).forks(), history[index]["content"]
        history[index]["content"] = f"qz{text}"
        await session.chat(history, [LOOK])
        prompt = client.requests[-1].text
        assert f"qz{text}" in prompt
        assert was not in prompt
        assert kept(session).forks() - forks_before == {
            "bridge_unproven: depends_on_history" if unproven else reason: 1
        }


# Cost


class Counting:
    """A tokenizer that counts the ids it makes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.made = 0

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any:
        encoding = self.inner.encode(sequence, add_special_tokens=add_special_tokens)
        self.made += len(encoding.ids)
        return encoding

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self.inner.decode(ids, skip_special_tokens=skip_special_tokens))

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        added: dict[int, Any] = self.inner.get_added_tokens_decoder()
        return added


def counting(family: str) -> tuple[TemplateRenderer, Counting]:
    """The renderer of a family, and what counts the ids that it makes."""
    files = read_model_dir(model_dir(family))
    assert files.template is not None
    counter = Counting(files.tokenizer)
    return load_renderer(replace(files, tokenizer=counter)), counter


def other_words(number: int) -> str:
    """Return a text that no other number has, of equally many ids: what was encoded before would cost nothing."""
    words = ["found", "it", "here", "and", "there", "or", "near", "far", "away", "again", "once", "more"]
    return " ".join(["so", *words[number:], *words[:number]])


@pytest.mark.parametrize("family", NAMES)
async def test_request_encodes_only_new_ids(family: str) -> None:
    renderer, counter = counting(family)
    lines = [calling(2), calling(2) if family == MOVED else {"role": "assistant", "content": "so it is"}]
    completions = [renderer_for(family).completion(line, [LOOK]) for line in lines]
    session = Session(
        ScriptedClient(renderer, lambda request: completions[request.number % 2]), renderer, id="s", limits=LIMITS
    )
    history: list[Any] = [user("a long question " * 50)]
    costs: list[tuple[int, int]] = []
    for turn in range(12):
        count_before, segments = counter.made, len(session.segments())
        given_turn = await session.chat(history, [LOOK])
        added = [segment for segment in session.segments()[segments:] if not segment.sampled]
        costs.append((counter.made - count_before, sum(len(segment.token_ids) for segment in added)))
        history.append(given_turn)
        history += answers(given_turn, other_words(turn)) or [user(other_words(turn))]
    assert not kept(session).forks()
    # Each shape was seen and proven once by then. What closes a turn is encoded although it was sampled.
    for encoded, new in costs[3:]:
        assert new <= encoded <= new + 1, costs
    # Nor does it grow.
    assert costs[-1] == costs[-3] == costs[-5]


@pytest.mark.parametrize("family", ["qwen3", "llama3_1", "gptoss"])
async def test_sibling_branch_encodes_only_its_tokens(family: str) -> None:
    renderer, counter = counting(family)
    completion = renderer_for(family).completion({"role": "assistant", "content": "so it is"}, [])
    session = Session(ScriptedClient(renderer, lambda request: completion), renderer, id="s", limits=LIMITS)
    history: list[Any] = [user("a long question " * 50)]
    for _ in range(4):
        history += [await session.chat(history), user("go on")]
    for text in ("this form", "that form"):
        count_before = counter.made
        await session.chat([*history[:-1], user(text)])
        new = session.segments()[-2]
        assert new.kind == "context"
        assert len(new.token_ids) <= counter.made - count_before <= len(new.token_ids) + 1
    # To ask again costs nothing at all.
    count_before = counter.made
    await session.chat([*history[:-1], user("that form")])
    assert counter.made == count_before
