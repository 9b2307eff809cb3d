"""Agents: what acts in an environment."""

from turnwise.agents.core import Agent, Episode, EpisodeLimits
from turnwise.agents.functions import rollout
from turnwise.agents.outcome import current_episode, emit_reward
from turnwise.agents.react import ReActAgent
from turnwise.agents.registry import make_agent, register_agent
from turnwise.agents.resources import LLM, Rollout
from turnwise.agents.single_turn import SingleTurnAgent
from turnwise.agents.turns import TurnsAgent

__all__ = [
    "LLM",
    "Agent",
    "Episode",
    "EpisodeLimits",
    "ReActAgent",
    "Rollout",
    "SingleTurnAgent",
    "TurnsAgent",
    "current_episode",
    "emit_reward",
    "make_agent",
    "register_agent",
    "rollout",
]
