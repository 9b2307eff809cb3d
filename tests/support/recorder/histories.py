"""Agents that edit their message history at random, and the recorder's invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from support.rollout import audited
from turnwise.inference.scripted import ScriptedClient
from turnwise.model.core import Renderer
from turnwise.recorder.ledger import LedgerClient, read_ledger
from turnwise.recorder.session import Session, SessionLimits
from turnwise.trajectory import Trajectory, to_samples
from turnwise.types import Message, SamplingParams, ToolCall, ToolSchema

NUMBER = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}}
TOOL = ToolSchema("look", "Looks.", NUMBER)
OTHER = ToolSchema("other", "Does else.", NUMBER)
TURNS = 8

texts = st.text(alphabet="abc ", min_size=0, max_size=6)
numbers = st.one_of(st.integers(0, 3), st.floats(0, 2))


def scripts(ids: st.SearchStrategy[int], *, reasoning: bool = True) -> st.SearchStrategy[list[Any]]:
    """What a model says in a session: answers, calls, or any ids at all."""
    answers = texts.map(lambda text: {"role": "assistant", "content": text or "x"})
    calls = st.builds(
        lambda thought, arguments: {
            "role": "assistant",
            "content": "",
            **({"reasoning_content": "hm"} if thought and reasoning else {}),
            "tool_calls": [ToolCall("", "look", arguments)],
        },
        st.booleans(),
        st.dictionaries(st.sampled_from("xy"), numbers, max_size=2),
    )
    anything = st.lists(ids, min_size=1, max_size=12)
    return st.lists(st.one_of(answers, calls, anything), min_size=TURNS, max_size=TURNS)


def plans() -> st.SearchStrategy[list[tuple[str, str]]]:
    """What an agent does after each turn."""
    actions = ("continue", "continue", "resample", "edit", "drop", "restart", "tools", "nobridge")
    return st.lists(st.tuples(st.sampled_from(actions), texts), min_size=1, max_size=TURNS - 1)


async def behave(
    renderer: Renderer, script: Sequence[Any], plan: Sequence[tuple[str, str]], cut: int, path: Path
) -> Trajectory:
    """Drive a session through a plan and check what it recorded against the ledger."""
    ledger = LedgerClient(ScriptedClient(renderer, script, tools=[TOOL, OTHER]), path)
    session = Session(ledger, renderer, id="s", limits=SessionLimits(context_length=100_000))
    messages: list[Message] = [{"role": "user", "content": "q"}]
    tools = [TOOL]
    for action, text in plan:
        answer = await session.chat(messages, tools, SamplingParams(max_tokens=cut))
        if action == "resample":
            continue
        messages = [*messages, answer]
        messages += [{"role": "tool", "tool_call_id": c.id, "content": text} for c in answer.get("tool_calls", ())]
        if action == "edit" and len(messages) > 2:
            messages[0] = {"role": "user", "content": f"edited {text}"}
        elif action == "drop" and len(messages) > 2:
            # The newest turn goes, with the answers to its calls.
            last_turn = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
            messages = messages[:last_turn]
        elif action == "restart":
            messages = []
        elif action == "tools":
            tools = [OTHER] if tools == [TOOL] else [TOOL]
        messages.append({"role": "user", "content": f"NOBRIDGE{text}" if action == "nobridge" else text})
    await ledger.close()
    trajectory = Trajectory.from_bytes(Trajectory("s", "e", "g", "t", segments=session.segments()).to_bytes())
    check_against_ledger(trajectory, path, len(plan))
    assert trajectory.sampled_tokens == session.metrics()["sampled_tokens"]
    return trajectory


def path_ids(trajectory: Trajectory, index: int) -> tuple[int, ...]:
    """The ids from a root to a segment."""
    return tuple(i for segment in trajectory.path(index) for i in segment.token_ids.tolist())


def check_against_ledger(trajectory: Trajectory, path: Path, calls: int) -> None:
    """Invariants 1 to 4, here and by the audit: ids are those the engine saw, trained once, forks are counted."""
    audited.assert_sound(path.parent, trajectory)
    recorded = Counter(
        (path_ids(trajectory, s.parent), tuple(s.token_ids.tolist()), tuple(s.logprobs.tolist()))
        for s in trajectory.segments
        if s.sampled and s.logprobs is not None
    )
    seen = Counter(
        (tuple(e.prompt_ids.tolist()), tuple(e.completion_ids.tolist()), tuple(e.logprobs.tolist()))
        for e in read_ledger(path).entries
    )
    assert recorded == seen
    assert sum(recorded.values()) == calls

    samples = to_samples(trajectory)
    assert sum(row.trained_tokens for row in samples.rows) == trajectory.sampled_tokens
    assert samples.unowned_tokens == 0
    for row in samples.rows:
        assert len(row.input_ids) == len(row.loss_mask) == len(row.rollout_logprobs)
        # Where a row trains, it was sampled: its logprob is one of the script's, which are never 0.
        assert (row.rollout_logprobs[row.loss_mask] < 0).all()
        assert (row.turn_ids[row.loss_mask] >= 0).all()
    for segment in trajectory.segments:
        assert segment.parent < segment.index
        assert (segment.parent < 0 or trajectory.segments[segment.parent].sampled) != segment.sampled
    children = Counter(segment.parent for segment in trajectory.segments)
    assert sum(trajectory.forks().values()) == sum(count - 1 for count in children.values())
