"""What is shown of a turn while it is sampled is at any time the beginning of what its whole says."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.chat.model_dirs import FAMILIES, renderer_for
from support.property_tests import examples
from turnwise.chat.formats.core import TurnText
from turnwise.chat.formats.live import LiveScan, LiveTurn, StreamedTurn
from turnwise.chat.tokens import Marks
from turnwise.errors import RenderError
from turnwise.types import as_ids, text_of

FAMILY_NAMES = sorted(FAMILIES)


def tail_of(family: str, *, thinking: bool | None = None) -> Any:
    renderer = renderer_for(family)
    return as_ids(renderer._tokens.encode(renderer._facts.prompt))


def shown(family: str, ids: list[int], cuts: list[int], stops: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """What is shown of ids that come in pieces, after each piece."""
    live = renderer_for(family).live(tail_of(family), stops)
    message = {"text": "", "reasoning": ""}
    states = []
    bounds = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    for start, end in itertools.pairwise(bounds):
        for piece in live.feed(ids[start:end]):
            assert piece.text
            message[piece.kind] += piece.text
        states.append((message["text"], message["reasoning"]))
    return states


def pieces_of(family: str) -> list[list[int]]:
    """Ids that turns of a family may be made of: its markers, whole calls, words, blanks and broken characters."""
    renderer = renderer_for(family)
    encode = renderer._tokens.encode
    markers = {text for value in renderer._format.markers.values() for text in [value, value.strip()] if text}
    words = [
        "Hello",
        " world",
        "\n",
        "\n\n",
        "  ",
        "{",
        "[",
        "[f(",
        '{"name": "f", "arguments": {}}',
        "🎉",
        "é",
        "<",
        "<th",
    ]
    words += ["a: b", "f", "]", "}", "1", "assistant", " to=functions.f", "analysis", "final", "commentary"]
    pieces = [encode(text) for text in [*sorted(markers), *words]]
    party = encode("🎉")
    if len(party) > 1:
        pieces += [party[:1], party[1:]]
    call = {"function": {"name": "f", "arguments": {"qz": 1}}}
    message: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    with contextlib.suppress(RenderError):
        pieces.append(renderer.completion(message, ()).tolist()[:-1])
    pieces.append([min(renderer.stop_ids)])
    pieces += [[number] for number in sorted(renderer._format.marks._ids)]
    return [piece for piece in pieces if piece]


@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_streamed_text_is_a_prefix_of_the_parsed_text(family: str, data: st.DataObject) -> None:
    pieces = pieces_of(family)
    indices = data.draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=14))
    ids = [number for index in indices for number in pieces[index]]
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=20))
    for end in {len(ids), cuts[0] % len(ids) + 1 if cuts else len(ids)}:
        full = renderer_for(family).parse(as_ids(ids[:end]), tail_of(family), ())
        for text, reasoning in shown(family, ids[:end], cuts):
            assert text_of(full).startswith(text), (renderer_for(family).decode(as_ids(ids[:end])), text, full)
            assert (full.get("reasoning_content") or "").startswith(reasoning), (
                renderer_for(family).decode(as_ids(ids[:end])),
                reasoning,
                full,
            )


@pytest.mark.parametrize("family", FAMILY_NAMES)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_a_stop_string_is_never_shown(family: str, data: st.DataObject) -> None:
    encode = renderer_for(family)._tokens.encode
    parts = data.draw(
        st.lists(st.sampled_from(["STOP", "ST", "OP", "S", " ", "\n", "word", "\n\nEnd"]), min_size=1, max_size=12)
    )
    text = "Well. " + "".join(parts)
    stops = ("STOP", "\n\nEnd")
    cuts = data.draw(st.lists(st.integers(0, 200), max_size=20))
    expected = text.strip()
    expected = expected[: min([at for stop in stops if (at := expected.find(stop)) >= 0], default=len(expected))]
    for shown_text, _ in shown(family, encode(text), cuts, stops):
        assert expected.startswith(shown_text)


# The prompt, what is sampled, and what is shown of it before its end: (text, reasoning).
AT_ONCE = [
    ("qwen3", "<think>\nHm, so\n", ("", "Hm, so")),
    ("qwen3", "<think>\nHm.\n</think>\n\nThe answer is", ("The answer is", "Hm.")),
    ("qwen3", "<think>Hm.</think>Let me see.\n<tool_call>\n{", ("Let me see.", "Hm.")),
    # As long as nobody opened reasoning, a closing marker could still make reasoning of all this.
    ("qwen3", "The answer is", ("", "")),
    ("qwen3", "It was reasoning</think>The answer", ("The answer", "It was reasoning")),
    ("llama3_1", "The answer is 3", ("The answer is 3", "")),
    ("llama3_1", '{"answer": 3}', ("", "")),
    ("bare_pythonic", "[1, 2", ("[1, 2", "")),
    ("bare_pythonic", "[lookup(", ("", "")),
    ("bare_pythonic", "[look", ("", "")),
    ("gptoss", "<|channel|>analysis<|message|>Hm, so ", ("", "Hm, so")),
    (
        "gptoss",
        "<|channel|>analysis<|message|>Hm. <|end|><|start|>assistant<|channel|>analysis<|message|> So.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It is",
        ("It is", "Hm.\nSo."),
    ),
    ("gptoss", "<|channel|>commentary to=functions.f<|message|>{}<|call|>", ("", "")),
]


@pytest.mark.parametrize(("family", "text", "expected"), AT_ONCE)
def test_certain_text_is_streamed_at_once(family: str, text: str, expected: tuple[str, str]) -> None:
    ids = renderer_for(family)._tokens.encode(text)
    assert shown(family, ids, list(range(len(ids))))[-1] == expected


# What is sampled, in pieces; those of reasoning begin with a bar.
REASONED = [
    ("qwen3", ["<think>", "|\nHm 🎉, so.\n", "</think>", "\n\nIt is."]),
    ("qwen3", ["<think>", "|\nHm, so"]),
    ("qwen3", ["|It was 🎉 reasoning", "</think>", "The answer"]),
    ("qwen3", ["<think>", "|One.", "</think>", "So.", "<think>", "|Two.", "</think>", "Yes."]),
    ("qwen3", ["It is."]),
    ("qwen3", []),
    (
        "gptoss",
        [
            *("<|channel|>", "analysis", "<|message|>", "|Hm 🎉. analysis", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "analysis", "<|message|>", "| So.", "<|end|>", "<|start|>", "assistant"),
            *("<|channel|>", "final", "<|message|>", "It is"),
        ],
    ),
    ("gptoss", ["<|channel|>", "final", "<|message|>", "analysis"]),
]


@pytest.mark.parametrize(("family", "pieces"), REASONED)
def test_tokens_of_reasoning_are_counted_as_sampled(family: str, pieces: list[str]) -> None:
    renderer = renderer_for(family)
    coded = [(text[:1] == "|", renderer._tokens.encode(text.removeprefix("|"))) for text in pieces]
    ids = as_ids([number for _, numbers in coded for number in numbers])
    expected = sum(len(numbers) for reasoned, numbers in coded if reasoned)
    assert renderer.live(tail_of(family)).reasoning_tokens(ids) == expected
    full = renderer.parse(ids, tail_of(family), ())
    assert bool(full.get("reasoning_content")) == bool(expected)


def test_text_before_an_empty_section_may_become_reasoning() -> None:
    renderer = renderer_for("deepseekv3")
    # Behind a prompt that opens no reasoning, as that of another template may be.
    chat_format, tokens = renderer._format, renderer._tokens
    ids = tokens.encode("Let me see.<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>")
    live = LiveTurn(tokens, chat_format.live(""), renderer.stop_ids)
    assert [turn for number in ids for turn in live.feed([number])] == []
    text = chat_format.marks.read(tokens, [*ids, *tokens.encode("</think>So.")])
    message = chat_format.parse(TurnText(text, "", opened=False, stopped=False), ()).message()
    assert (text_of(message), message["reasoning_content"]) == ("So.", "Let me see.")


@pytest.mark.parametrize("step", [1, 3, 100])
def test_an_answer_behind_reasoning_that_nobody_opened_may_be_a_call(step: int) -> None:
    def begins(text: str) -> bool | None:
        return None if text == "{" else text.startswith("{c")

    def walked(text: str) -> list[StreamedTurn]:
        scan = LiveScan(Marks({}, ()), ("<think>", "</think>"), (), begins, opened=False, settled=False, bare=True)
        return [piece for at in range(0, len(text), step) for piece in scan.feed(text[at : at + step])]

    assert "".join(piece.text for piece in walked("Hm, so</think>{call}")) == "Hm, so"
    assert {piece.kind for piece in walked("Hm, so</think>{call}")} == {"reasoning"}
    pieces_ = walked("Hm, so</think>{no call}")
    assert "".join(piece.text for piece in pieces_ if piece.kind == "text") == "{no call}"
    # What begins as a call is held back even though its reasoning is not.
    assert walked("{call} so</think>") == []


def test_reading_costs_the_new_ids_only() -> None:
    encode = renderer_for("qwen3")._tokens.encode
    live = renderer_for("qwen3").live(tail_of("qwen3"))
    live.feed(encode("<think>"))
    word = encode(" word")
    read: list[int] = []
    tokens = renderer_for("qwen3")._tokens
    decode = type(tokens).decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tokens), "decode", lambda self, ids: read.append(len(ids)) or decode(self, ids))
        for _ in range(500):
            live.feed(word)
    assert max(read) <= 2 * len(word) + 2


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_text_after_an_id_that_ends_the_turn_is_neither_parsed_nor_streamed(family: str) -> None:
    renderer = renderer_for(family)
    encode, stop = renderer._tokens.encode, min(renderer.stop_ids)
    ids = [*encode("Hello"), stop]
    longer = [*ids, *encode(" and later"), stop]
    assert renderer.parse(as_ids(longer), tail_of(family), ()) == renderer.parse(as_ids(ids), tail_of(family), ())
    assert shown(family, longer, list(range(len(longer))))[-1] == shown(family, ids, [])[-1]
