"""Which finished groups a train step learns from."""

from turnwise.rollout.strategies.core import Choice, Flight, GroupFacts, Strategy
from turnwise.rollout.strategies.fresh import Arrival, Bounded, OnPolicy
from turnwise.rollout.strategies.weighed import Mixed, Prioritised

__all__ = ["Arrival", "Bounded", "Choice", "Flight", "GroupFacts", "Mixed", "OnPolicy", "Prioritised", "Strategy"]
