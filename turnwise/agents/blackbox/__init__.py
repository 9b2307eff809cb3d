"""Black-box agents: external programs that reach the policy only through a model API."""

from turnwise.agents.blackbox.agent import BlackBoxAgent
from turnwise.agents.blackbox.program import ProgramError
from turnwise.agents.blackbox.workdir import Recipe, recipe_of

__all__ = ["BlackBoxAgent", "ProgramError", "Recipe", "recipe_of"]
