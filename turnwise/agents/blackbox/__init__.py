"""Programs that only speak an API of models, as agents."""

from turnwise.agents.blackbox.agent import BlackBoxAgent
from turnwise.agents.blackbox.program import ProgramError
from turnwise.agents.blackbox.workdir import Recipe, recipe_of

__all__ = ["BlackBoxAgent", "ProgramError", "Recipe", "recipe_of"]
