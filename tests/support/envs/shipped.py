"""The names of the environments that the package registers."""

from turnwise.envs import env_names

# ``tests/conftest.py`` imports this before any test module, which may register more.
SHIPPED = env_names()
