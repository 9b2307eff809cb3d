"""A session without ids, beside one with ids: whatever agents do to a history, both tell the same of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st

from support.chat.toy_renderer import ToyRenderer
from support.property_tests import examples
from support.recorder.random_agents import Wild, lines, plans
from turnwise.gateway.proxy.session import TextSession


class Twofold(Wild):
    """Asks a session, and tells one of a hosted endpoint what was asked and said."""

    def __init__(self, script: Sequence[Any], path: Path, cut: int, echo: Any) -> None:
        super().__init__(ToyRenderer(), script, path, cut, "keep", echo)
        self.text = TextSession(id="s", echo=echo)

    async def ask(self, messages: Sequence[Any]) -> Any:
        placed = self.text.place(messages, self.tools)
        try:
            message = await super().ask(messages)
        except BaseException:
            self.text.withdraw([placed])
            raise
        sent = {key: value for key, value in copy.deepcopy(message).items() if key not in ("turn_id", "finish_reason")}
        cut = message["finish_reason"] == "length"
        assert self.text.commit(placed, sent, cut=cut, usage=None, sampling={}) == message
        return message


@settings(max_examples=examples(150), deadline=None)
@given(
    script=lines(st.integers(100, 220)),
    plan=plans,
    cut=st.sampled_from([4, 20, 200, 200]),
    echo=st.sampled_from(["same", "same", "strict"]),
)
async def test_text_session_records_the_same_tree_as_a_token_session(
    tmp_path_factory: Any, script: list[Any], plan: list[tuple[str, str, int]], cut: int, echo: str
) -> None:
    wild = Twofold(script, tmp_path_factory.mktemp("wild") / "ledger.jsonl", cut, echo)
    for action, text, number in plan:
        # An endpoint has no template that could be given anything, or could not go on from something.
        if action != "arguments":
            await wild.act(action, text.replace("NOBRIDGE", "e"), number)
    trajectory = await wild.check()
    text_shape, theirs = (
        [
            (segment.kind, segment.parent, segment.messages, segment.turn_id, segment.fork, segment.tools)
            for segment in segments
        ]
        for segments in (wild.text.segments(), wild.session.segments())
    )
    assert text_shape == theirs
    assert not any(len(segment.token_ids) for segment in wild.text.segments())
    metrics, counters = wild.text.metrics(), wild.session.metrics()
    for name in ("turns", "branches", "forks", "rewritten_echoes"):
        assert metrics[name] == counters[name], name
    for reason in trajectory.forks():
        event(reason)
