"""Black-box agents: external programs that reach the policy only through a model API."""

from turnwise.ext.programs.agent import BlackBoxAgent
from turnwise.ext.programs.program import ProgramError
from turnwise.ext.programs.recipes import Recipe, recipe_of

__all__ = ["BlackBoxAgent", "ProgramError", "Recipe", "recipe_of"]
