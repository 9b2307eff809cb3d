"""Word problems with a calculator: rows in the manner of GSM8K, from a file or made in place."""

from turnwise.envs.library.math.env import MathEnv, calculations, row, tasks

__all__ = ["MathEnv", "calculations", "row", "tasks"]
