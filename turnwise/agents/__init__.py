"""Agents: the code that acts in an episode."""

from turnwise.agents.core import Agent, Episode
from turnwise.agents.limits import EpisodeLimits
from turnwise.agents.outcome import current_episode, emit_reward, within_budget
from turnwise.agents.react import ReActAgent, SingleTurnAgent, TurnsAgent
from turnwise.agents.registry import LLM, Rollout, make_agent, register_agent, rollout

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
    "within_budget",
]
