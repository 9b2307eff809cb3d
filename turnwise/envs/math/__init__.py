"""Word problems with a calculator: rows in the manner of GSM8K, from a file or made in place."""

from turnwise.envs.math.env import MathEnv
from turnwise.envs.math.rows import calculations, row, tasks

__all__ = ["MathEnv", "calculations", "row", "tasks"]
