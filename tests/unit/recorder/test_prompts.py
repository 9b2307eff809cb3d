"""Large requests: off the event loop, the same ids as small ones, and refused by their bytes where that is certain."""

from __future__ import annotations

import asyncio
import threading
import unicodedata
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from support.chat.model_dirs import FAMILIES, renderer_for
from support.chat.toy_renderer import ToyRenderer
from support.property_tests import examples
from turnwise.chat.tokens import Tokens
from turnwise.errors import BudgetExceeded, PromptTooLong, RenderError
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.canonical import canonical_messages
from turnwise.recorder.prompts import LONG, is_heavy, render_prompt, run_unsuspended
from turnwise.recorder.session import Session, SessionLimits
from turnwise.types import Message, StopReason, ToolCall, ToolSchema

LONG_TEXT = "One line of many, with 12 numbers and <|im_end|> in it.\n" * 4000
assert len(LONG_TEXT) > LONG


class Watched(ToyRenderer):
    """Notes the threads that render, and waits there for the event loop if a gate is given."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        super().__init__()
        self.threads: list[int] = []
        self.gate = gate

    def _note(self) -> None:
        self.threads.append(threading.get_ident())
        if self.gate is not None and self.threads[-1] != threading.main_thread().ident:
            assert self.gate.wait(60)

    def render(self, messages: Sequence[Any], tools: Sequence[ToolSchema]) -> Any:
        self._note()
        return super().render(messages, tools)

    def extend(self, *arguments: Any) -> Any:
        self._note()
        return super().extend(*arguments)


def session(renderer: Any, context: int = 10_000_000) -> Session:
    return Session(
        ScriptedClient(renderer, ["yes"] * 20), renderer, id="s", limits=SessionLimits(context_length=context)
    )


def user(text: str) -> Message:
    return {"role": "user", "content": text}


async def test_only_long_prompts_are_rendered_in_a_thread() -> None:
    renderer = Watched()
    recorder = session(renderer)
    here = threading.get_ident()
    history = [user("Go.")]
    history.append(await recorder.chat(history))
    history.append(user(LONG_TEXT))
    history.append(await recorder.chat(history))
    history.append(user("And?"))
    await recorder.chat(history)
    assert [thread == here for thread in renderer.threads] == [True, False, True]
    assert recorder.metrics()["branches"] == 1


async def test_rendering_a_long_prompt_blocks_no_other_request() -> None:
    gate = threading.Event()
    recorder = session(Watched(gate))
    history = [user("Go.")]
    history.append(await recorder.chat(history))
    long = asyncio.ensure_future(recorder.chat([*history, user(LONG_TEXT)]))
    await asyncio.sleep(0)
    short = await recorder.chat([*history, user("And?")])
    await recorder.chat([*history, user("And?"), short, user("Then?")])
    assert not long.done()
    gate.set()
    answer = await long
    await recorder.chat([*history, user(LONG_TEXT), answer, user("Again?")])
    metrics = recorder.metrics()
    assert (metrics["turns"], metrics["branches"]) == (5, 2)


@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_a_copied_renderer_gives_the_same_ids_and_counts(family: str) -> None:
    renderer = renderer_for(family)
    messages = canonical_messages([user(LONG_TEXT)])
    escaped_before = renderer.escaped
    inline = run_unsuspended(render_prompt(renderer, messages, [], threaded=False))
    escaped = renderer.escaped - escaped_before
    threaded = await render_prompt(renderer, messages, [])
    assert inline.token_ids is not None
    assert threaded.token_ids is not None
    assert threaded.token_ids.tolist() == inline.token_ids.tolist()
    assert threaded.escaped == inline.escaped == escaped
    assert renderer.escaped - escaped_before == escaped, "the loop's renderer counted what another thread escaped"


async def test_a_prompt_that_cannot_fit_is_refused_without_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = renderer_for("qwen3")
    recorder = session(renderer, context=1000)
    history = [user("Go.")]
    history.append(await recorder.chat(history))
    lengths: list[int] = []
    encode = Tokens.encode

    def counted(self: Tokens, text: str, *, prompt: bool = False) -> list[int]:
        token_ids = encode(self, text, prompt=prompt)
        lengths.append(len(text))
        return token_ids

    monkeypatch.setattr(Tokens, "encode", counted)
    for messages in ([user(LONG_TEXT)], [*history, user(LONG_TEXT)]):
        with pytest.raises(BudgetExceeded) as error:
            await recorder.chat(messages)
        assert error.value.stop_reason == StopReason.CONTEXT_OVERFLOW
        assert not error.value.exact
        assert "at least" in str(error.value)
        assert error.value.used is not None
        assert error.value.used > 1000
    assert max(lengths, default=0) < LONG
    assert recorder.metrics()["turns"] == 1
    history.append(user("Still there?"))
    assert await recorder.chat(history)


def tokenizer(normalizer: Any = None, *, added: AddedToken | None = None) -> Tokenizer:
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    if normalizer is not None:
        model.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    model.train_from_iterator(["the words of the words of the text " * 20, " " * 64, "é" * 50], trainer)
    if added is not None:
        model.add_special_tokens([added])
    return model


TOKENS = {"none": Tokens(tokenizer()), "nfc": Tokens(tokenizer(normalizers.NFC()))}
ANY_TEXT = st.text(max_size=300) | st.text(alphabet=" the words\n", max_size=300)


@settings(max_examples=examples(200))
@given(which=st.sampled_from(sorted(TOKENS)), text=ANY_TEXT)
def test_no_text_has_fewer_ids_than_its_lower_bound(which: str, text: str) -> None:
    tokens = TOKENS[which]
    for variant in (text, unicodedata.normalize("NFD", text), text * 20):
        escaped = tokens.escape(variant)
        assert tokens.fewest(escaped) <= len(tokens.encode(escaped))


def test_nfc_shrinks_no_character_more_than_the_bound_allows() -> None:
    assert TOKENS["nfc"].fewest("\u212a" * 3000) > 0
    for number in [*range(0xD800), *range(0xE000, 0x30000)]:
        for text in (chr(number), unicodedata.normalize("NFD", chr(number))):
            assert 3 * len(unicodedata.normalize("NFC", text).encode()) >= len(text.encode()), hex(number)


@pytest.mark.parametrize(
    "model",
    [
        tokenizer(normalizers.NFKC()),
        tokenizer(normalizers.Sequence([normalizers.Strip()])),
        tokenizer(added=AddedToken("<|eats|>", rstrip=True)),
        Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")),
    ],
)
def test_tokenizers_that_drop_bytes_have_no_bound(model: Tokenizer) -> None:
    assert Tokens(model).fewest("x" * 1_000_000) == 0


def test_a_bound_that_is_exceeded_stops_the_encoding() -> None:
    tokens = TOKENS["none"].copy()
    tokens.room = 10
    assert tokens.encode("the words") == TOKENS["none"].encode("the words")
    with pytest.raises(PromptTooLong, match="at least"):
        tokens.encode("x" * 10_000)


class Panicking:
    """A tokenizer whose encoder fails as Rust code does."""

    def __init__(self, error: BaseException) -> None:
        self._error = error
        self._real = tokenizer()

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any:
        if len(sequence) > 1000:
            raise self._error
        return self._real.encode(sequence, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_a_panic_of_the_tokenizer_is_an_error_of_the_text_and_an_interrupt_is_not() -> None:
    panic = type("PanicException", (BaseException,), {})("retry-limit-in-match over")
    with pytest.raises(RenderError, match=r"2000 characters.*retry-limit.*shorten"):
        Tokens(Panicking(panic)).encode("x" * 2000)
    with pytest.raises(KeyboardInterrupt):
        Tokens(Panicking(KeyboardInterrupt())).encode("x" * 2000)


def test_long_histories_arguments_and_tools_are_heavy() -> None:
    assert not is_heavy({"role": "user", "content": "x" * 1000}, user("y"))
    assert not is_heavy()
    assert is_heavy(*[user("m")] * 10_000)
    assert is_heavy({"role": "assistant", "tool_calls": [{"function": {"arguments": "[" + "1," * 100_000 + "1]"}}]})
    assert is_heavy(ToolCall("c", "f", {"x": [0] * 30_000}))
    assert is_heavy(ToolSchema("f", "d", {"type": "object", "enum": [""] * 30_000}))


async def test_large_histories_and_tools_are_reduced_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = session(renderer_for("qwen3"))
    threads: dict[str, int] = {}
    for owner, name in ((recorder._history, "reduce"), (recorder._request_tools, "update")):
        real = getattr(type(owner), name)

        def noted(self: Any, *arguments: Any, real: Any = real, name: str = name) -> Any:
            threads[name] = threading.get_ident()
            return real(self, *arguments)

        monkeypatch.setattr(type(owner), name, noted)
    here = threading.get_ident()
    history = [user("Go.")]
    history.append(await recorder.chat(history))
    assert set(threads.values()) == {here}
    tools = [ToolSchema("f", "d", {"type": "object", "properties": {"x": {"enum": ["v"] * 30_000}}})]
    messages: list[Message] = [
        *history,
        *({"role": "user", "content": [{"type": "text", "text": "a"}] * 10} for _ in range(1500)),
    ]
    await recorder.chat(messages, tools)
    assert here not in threads.values()
    assert recorder.metrics()["turns"] == 2
