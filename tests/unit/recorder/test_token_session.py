"""Requests of ids: found in the tree as messages are, recorded exactly, and accounts of them sampled against it."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.chat.toy_renderer import END, FIRST_CHARACTER, ToyRenderer
from support.property_tests import examples
from support.rollout.audited import assert_sound
from turnwise.errors import BudgetExceeded, InferenceError, SessionError
from turnwise.inference.scripted import ScriptedClient
from turnwise.recorder.ledger import LedgerClient
from turnwise.recorder.session import SessionLimits
from turnwise.recorder.token_session import TokenSession, TrainedBranch
from turnwise.trajectory import Segment, Trajectory, to_samples
from turnwise.types import SamplingParams

A, B, C, D = (FIRST_CHARACTER + ord(letter) for letter in "abcd")


def session_of(client, **limits) -> TokenSession:
    return TokenSession(client, ToyRenderer(), id="s", limits=SessionLimits(1000, **limits))


def scripted(*lines) -> TokenSession:
    return session_of(ScriptedClient(ToyRenderer(), list(lines)))


def kept(session: TokenSession) -> Trajectory:
    return Trajectory.from_bytes(Trajectory("s", "e", "g", "t", segments=session.segments()).to_bytes())


def shape(session: TokenSession) -> list[tuple[int, str, list[int], str | None]]:
    return [(segment.parent, segment.kind, segment.token_ids.tolist(), segment.fork) for segment in session.segments()]


async def test_prompt_extends_sampled_ids() -> None:
    session = scripted([A, END], [B, END])
    first = await session.generate([C])
    second = await session.generate([C, *first.completion.token_ids, D, D])
    assert shape(session) == [
        (-1, "context", [C], None),
        (0, "sampled", [A, END], None),
        (1, "context", [D, D], None),
        (2, "sampled", [B, END], None),
    ]
    # The completion was read, and what was put in between can be shown.
    assert (first.message["content"], second.message["content"]) == ("a", "b")
    assert session.last["turn_id"] == second.message["turn_id"] == "t1"
    assert session.segments()[2].messages == ({"role": "prompt", "content": "dd"},)
    assert session.metrics()["encoded_tokens"] == 3


async def test_forks_have_their_reasons() -> None:
    session = scripted(*[[A, END]] * 6)
    await session.generate([C])
    await session.generate([C])
    await session.generate([C, A, END, D])
    await session.generate([C, A, END, B])
    await session.generate([D])
    await session.generate([C, A, D])
    forks = [fork for _, _, _, fork in shape(session) if fork]
    assert forks == ["resample", "history_edited", "restart", "history_edited"]


async def test_a_completion_that_is_gone_on_with_as_a_prompt() -> None:
    session = scripted([A, A, A], [B, END])
    first = await session.generate([C], SamplingParams(max_tokens=2))
    assert first.message["finish_reason"] == "length"
    await session.generate([C, A, A])
    assert shape(session)[2:] == [(-1, "context", [C, A, A], "continuation"), (2, "sampled", [B, END], None)]
    session.train_only([TrainedBranch([C], [A, A, B, END], [1, 1, 1, 1])])
    assert [row.trained_tokens for row in to_samples(kept(session)).rows] == [2, 2]


async def test_a_later_completion_that_is_gone_on_with_is_a_continuation_too() -> None:
    session = scripted([A, END], [B, B], [D, END])
    await session.generate([C])
    cut = await session.generate([C, A, END, D], SamplingParams(max_tokens=2))
    assert cut.message["finish_reason"] == "length"
    await session.generate([C, A, END, D, B, B])
    assert shape(session)[4:] == [(1, "context", [D, B, B], "continuation"), (4, "sampled", [D, END], None)]


async def test_concurrent_requests_are_concurrent() -> None:
    gate = asyncio.Event()

    async def wait(request):
        if request.number == 0:
            await gate.wait()
        else:
            gate.set()
        return [A, END]

    session = session_of(ScriptedClient(ToyRenderer(), wait))
    await asyncio.gather(session.generate([C]), session.generate([C]))
    assert [fork for _, _, _, fork in shape(session) if fork] == ["concurrent"]


async def test_messages_and_ids_share_a_session() -> None:
    session = scripted("hi", [A, END], "again", [B, END])
    turn = await session.chat([{"role": "user", "content": "go"}])
    await session.generate([C])
    await session.chat([{"role": "user", "content": "go"}, turn, {"role": "user", "content": "on"}])
    await session.generate([C, A, END, D])
    assert session.metrics()["forks"] == 1
    assert [segment.parent for segment in session.segments()] == [-1, 0, -1, 2, 1, 4, 3, 6]
    # What was said in messages is trained, whatever is kept of the ids.
    session.train_only([TrainedBranch([C], [A, END], [1, 1])])
    assert [bool(segment.left_out) for segment in session.segments()] == [False] * 7 + [True]


async def test_limits_and_failures_hold() -> None:
    session = session_of(ScriptedClient(ToyRenderer(), [[A, END], InferenceError("gone")]), max_turns=2)
    await session.generate([C])
    with pytest.raises(InferenceError):
        await session.generate([C])
    assert str(session.failure) == "gone"
    assert session.turns == 1
    with pytest.raises(BudgetExceeded):
        await session.generate([C])
    for wrong in ([], [-1], [[1]], ["a"], [1 << 40]):
        with pytest.raises(SessionError, match="prompt_ids must be a list of"):
            await scripted([A, END]).generate(wrong)


# What an agent says of it


@pytest.fixture
async def talk() -> TokenSession:
    """Two turns in one branch, then another answer to the second."""
    session = scripted([A, B, END], [B, END], [D, END])
    for prompt in ([C, C], [C, C, A, B, END, D], [C, C, A, B, END, D]):
        await session.generate(prompt)
    return session


def left_out(session: TokenSession) -> list[tuple[tuple[int, int], ...] | None]:
    return [segment.left_out for segment in session.segments() if segment.sampled]


@pytest.mark.parametrize(
    ("branches", "expected"),
    [
        ([([A, B, END, D, B, END], [1, 1, 1, 0, 1, 1])], [None, None, ((0, 2),)]),
        # Cut behind the first id of the second turn; masked within the first one.
        ([([A, B, END, D, B], [1, 0, 1, 0, 1])], [((1, 2),), ((1, 2),), ((0, 2),)]),
        # Two branches that share a turn.
        ([([A, B, END, D, B, END], [1, 1, 1, 0, 1, 1]), ([A, B, END, D, D, END], [0, 0, 0, 0, 1, 1])], [None] * 3),
        # What the agent put in the place of the rest of a turn is its own.
        ([([A, C, C], [1, 0, 0])], [((1, 3),), ((0, 2),), ((0, 2),)]),
        # Ids behind the last request were never shown.
        ([([A, B, END, D, B, END, C, C], [1, 1, 1, 0, 1, 1, 0, 0])], [None, None, ((0, 2),)]),
        ([([], [])], [((0, 3),), ((0, 2),), ((0, 2),)]),
    ],
)
async def test_unreported_ids_are_not_trained(talk, branches, expected) -> None:
    talk.train_only([TrainedBranch([C, C], ids, mask) for ids, mask in branches])
    assert left_out(talk) == expected
    trained = sum(row.trained_tokens for row in to_samples(kept(talk)).rows)
    assert trained == 7 - sum(end - start for spans in expected for start, end in spans or ())


@pytest.mark.parametrize(
    ("prompt", "ids", "mask", "message"),
    [
        ([C, C], [A, B, END, D], [1, 1, 1, 1], "response_mask is 1 at 3 (id 200, 1 such ids)"),
        ([C, C], [A, A, END], [1, 1, 1], "it sampled 198"),
        ([C], [C, A, B], [1, 1, 1], "response_mask is 1 at 0 (id 199, 1 such ids), but the model did not sample it"),
        ([D], [A, B, END], [1, 1, 1], "the ids differ from what it saw from 0 on"),
        ([C, C], [A, B, END, END], [1, 1, 1, 1], "did not sample it"),
        ([C, C], [A, B], [1], "response_mask has 1 entries and response_ids 2"),
        ([C, C], [A], [2], "give one for each"),
        ([], [A], [1], "prompt_ids must be a list of"),
    ],
)
async def test_report_that_contradicts_sampled_ids_is_refused(talk, prompt, ids, mask, message) -> None:
    with pytest.raises(SessionError) as raised:
        talk.train_only([TrainedBranch(prompt, ids, mask)])
    assert message in str(raised.value)
    assert left_out(talk) == [None] * 3


async def test_the_same_answer_twice_is_two_answers() -> None:
    session = scripted([A, END], [A, END], [A, END])
    for _ in range(3):
        await session.generate([C])
    session.train_only([TrainedBranch([C], [A, END], [1, 1])])
    assert sum(spans is None for spans in left_out(session)) == 1
    session.train_only([TrainedBranch([C], [A, END], [1, 1])] * 3)
    assert left_out(session) == [None] * 3


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("later_is_longer", [False, True])
async def test_answer_that_is_a_prefix_of_another_is_distinct(order, later_is_longer) -> None:
    lengths = [1, 3] if later_is_longer else [3, 1]
    session = scripted([A, B, END], [A, B, END])
    for length in lengths:
        await session.generate([C], SamplingParams(max_tokens=length))
    session.train_only([TrainedBranch([C], [A, B, END][: lengths[n]], [1] * lengths[n]) for n in order])
    assert left_out(session) == [None, None]
    # The short one alone is the one that ended there, not the beginning of the other.
    session.train_only([TrainedBranch([C], [A], [1])])
    assert left_out(session) == [None if length == 1 else ((0, 3),) for length in lengths]


async def test_cut_answer_does_not_claim_longer_answers() -> None:
    session = scripted([A, B, END], [A, D, END])
    for _ in range(2):
        await session.generate([C])
    session.train_only([TrainedBranch([C], [A], [1]), TrainedBranch([C], [A, D, END], [1, 1, 1])])
    assert left_out(session) == [((1, 3),), None]
    # Where the answer is said to be cut twice, it is cut twice: each output has a sampled id of its own.
    session.train_only([TrainedBranch([C], [A], [1])] * 2)
    assert left_out(session) == [((1, 3),)] * 2


async def test_answer_contained_in_another_is_distinct() -> None:
    session = scripted([B, B, END], [B, END])
    await session.generate([A])
    await session.generate([A, B], SamplingParams(max_tokens=1))
    # The agent put an id behind it, with which the ids are those of the first answer.
    within = TrainedBranch([A, B], [B, END], [1, 0])
    session.train_only([within])
    assert left_out(session) == [((0, 3),), None]
    for branches in (
        [within, TrainedBranch([A], [B, B, END], [1] * 3)],
        [TrainedBranch([A], [B, B, END], [1] * 3), within],
    ):
        session.train_only(branches)
        assert left_out(session) == [None, None]


async def test_equal_branches_match_their_own_continuation() -> None:
    session = scripted([A, END], [A, END], [B, END], [B, END])
    for prompt in ([C], [C], [C, A, END, D], [C, A, END, D]):
        await session.generate(prompt)
    branch = TrainedBranch([C], [A, END, D, B, END], [1, 1, 0, 1, 1])
    session.train_only([branch] * 2)
    # Both were asked behind the second answer, which is trained once; nobody speaks of the first.
    assert left_out(session) == [((0, 2),), None, None, None]


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["on", "again", "back", "new", "cut"]), st.lists(st.integers(A, B), min_size=1, max_size=2)
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=examples(60))
@given(MOVES, st.lists(st.integers(0, 6), unique=True, max_size=7))
@example([("cut", [A]), ("again", [A]), ("back", [A])], [0, 1, 2])
def test_whatever_is_asked_is_recorded_and_trained_once(moves, keep) -> None:
    asyncio.run(_walk(moves, keep))


async def _walk(moves, keep) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = LedgerClient(
            ScriptedClient(ToyRenderer(), lambda request: [A + request.number % 2, B, END]),
            Path(folder) / "ledger.jsonl",
        )
        session = session_of(ledger)
        prompt, branches = [C], []
        for move, extra in moves:
            if move == "back":
                prompt = prompt[: max(1, len(prompt) - 3)]
            elif move == "new":
                prompt = list(extra)
            limit = 1 if move == "cut" else None
            recorded = await session.generate(prompt, SamplingParams(max_tokens=limit))
            sampled = recorded.completion.token_ids.tolist()
            branches.append((list(prompt), sampled))
            if move != "again":
                prompt = [*prompt, *sampled, *(extra if move == "on" else [])]
        await ledger.close()
        reported_numbers = [number for number in keep if number < len(branches)]
        if reported_numbers:
            reported = [(branches[n][0], branches[n][1]) for n in reported_numbers]
            session.train_only([TrainedBranch(prompt, ids, [1] * len(ids)) for prompt, ids in reported])
        trajectory = Trajectory("s", "e", "g", "t", segments=session.segments())
        report = assert_sound(Path(folder), trajectory)
        assert report.counts["turns equal to a call"] == len(moves)
        expected = sum(len(branches[n][1]) for n in reported_numbers) if reported_numbers else trajectory.sampled_tokens
        rows = to_samples(trajectory).rows
        assert sum(row.trained_tokens for row in rows) == expected
        assert report.counts["ids trained once"] == expected
        # Each of them is trained as a whole, behind the prompt that it answered; of the others nothing is.
        trained = [s for s in trajectory.segments if s.trained.any()]
        assert all(s.trained.all() for s in trained)
        reported_branches = Counter(
            (tuple(branches[n][0]), tuple(branches[n][1])) for n in reported_numbers or range(len(branches))
        )
        assert Counter((_prompt_of(trajectory, s), tuple(s.token_ids.tolist())) for s in trained) == reported_branches
        seen = Counter(tuple(ids) for _, ids in branches)
        sampled = Counter(tuple(s.token_ids.tolist()) for s in trajectory.segments if s.sampled)
        assert sampled == seen
        for row in rows:
            assert (row.rollout_logprobs[row.loss_mask] < 0).all()
            assert np.isfinite(row.rollout_logprobs).all()


def _prompt_of(trajectory: Trajectory, segment: Segment) -> tuple[int, ...]:
    ids: list[int] = []
    while segment.parent >= 0:
        segment = trajectory.segments[segment.parent]
        ids = segment.token_ids.tolist() + ids
    return tuple(ids)
