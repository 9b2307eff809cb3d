"""Retail environment: customer service over a SQLite shop, scored by the final state."""

from turnwise.ext.environments.retail.env import RetailEnv

__all__ = ["RetailEnv"]
