"""The public names of the package, each with the module that it comes from."""

from turnwise.agents.core import Agent as Agent
from turnwise.agents.core import Episode as Episode
from turnwise.agents.limits import EpisodeLimits as EpisodeLimits
from turnwise.agents.outcome import current_episode as current_episode
from turnwise.agents.outcome import emit_reward as emit_reward
from turnwise.agents.outcome import within_budget as within_budget
from turnwise.agents.react import ReActAgent as ReActAgent
from turnwise.agents.react import SingleTurnAgent as SingleTurnAgent
from turnwise.agents.react import TurnsAgent as TurnsAgent
from turnwise.agents.registry import LLM as LLM
from turnwise.agents.registry import Rollout as Rollout
from turnwise.agents.registry import make_agent as make_agent
from turnwise.agents.registry import register_agent as register_agent
from turnwise.agents.registry import rollout as rollout
