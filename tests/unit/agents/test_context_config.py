"""What is wrong with the configuration of a context is said when the agent is made: field, value and remedy."""

from __future__ import annotations

import pytest

from turnwise.agents import ReActAgent, make_agent
from turnwise.agents.context.config import ContextConfig, DropConfig, read_context
from turnwise.errors import ConfigError


@pytest.mark.parametrize(
    ("context", "words"),
    [
        ({"drop_results": {}}, ["context.drop_results", "did you mean", "drop_tool_results"]),
        ({"drop_tool_results": {"keep": -1}}, ["context.drop_tool_results.keep", "-1", "at least 0"]),
        ({"drop_tool_results": {"above": 1.0}}, ["context.drop_tool_results.above", "1.0", "less than 1"]),
        ({"drop_tool_results": {"above": 0.3, "until": 0.5}}, ["until of at most above", "0.3", "0.5"]),
        ({"compaction": {"above": 1.5}}, ["context.compaction.above", "1.5", "at most 1"]),
        ({"compaction": {"summary": "so far"}}, ["context.compaction", "{summary}"]),
        ({"compaction": {"prompt": ""}}, ["context.compaction.prompt", "''", "at least 1"]),
        ({"compaction": {"attempts": 0}}, ["context.compaction.attempts", "0", "more than 0"]),
        ({"sub_agent": {"name": "two words"}}, ["context.sub_agent.name", "two words", "matches"]),
        ({"sub_agent": {"max_depth": 0}}, ["context.sub_agent.max_depth", "0", "more than 0"]),
        ({"length": 0}, ["context.length", "0", "more than 0"]),
        ("yes", ["context", "'yes'", "a section"]),
    ],
)
def test_wrong_context_settings_raise_config_errors(context, words):
    with pytest.raises(ConfigError) as caught:
        make_agent("react", context=context)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_context_is_unchanged_by_default():
    assert read_context(None) == ContextConfig()
    assert ReActAgent() is not None


def test_drop_begins_defaults_to_its_end():
    assert DropConfig().begins == 0.0
    assert DropConfig(until=0.5).begins == 0.5
    assert DropConfig(until=0.5, above=0.8).begins == 0.8
