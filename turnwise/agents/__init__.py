"""Agents: what acts in an environment."""

from turnwise.agents.core import Agent, Episode, EpisodeLimits, make_agent, register_agent
from turnwise.agents.react import ReActAgent
from turnwise.agents.single_turn import SingleTurnAgent

__all__ = [
    "Agent",
    "Episode",
    "EpisodeLimits",
    "ReActAgent",
    "SingleTurnAgent",
    "make_agent",
    "register_agent",
]
