"""Math environment: word problems in GSM8K's format, from a file or generated, with a calculator."""

from turnwise.ext.environments.math.env import MathEnv, calculations, row, tasks

__all__ = ["MathEnv", "calculations", "row", "tasks"]
