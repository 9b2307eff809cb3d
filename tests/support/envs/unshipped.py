"""Environments of examples, by the names that they have where their packages are installed."""

import sys
from pathlib import Path

from turnwise.envs import register
from turnwise.envs.registration import register_prefix

EXAMPLES = Path(__file__).parents[3] / "examples"
FOLDERS = (
    "sql/src",
    "published/search",
    "two_player",
    "long_task",
    "picture",
    "tool_calls/src",
    "art/src",
    "inspect/src",
    "openenv/src",
    "games/src",
)
UNSHIPPED = ("nim", "picture", "tool_calls", "trail")
"""Those without a dependency: they are checked and replayed as what ships."""

sys.path += [str(EXAMPLES / folder) for folder in FOLDERS]
# ``tests/conftest.py`` imports ``shipped`` before this: these environments ship in no wheel.
register("sql", "sql_env:SqlEnv")
register("search", "search_env:SearchEnv")
register("nim", "nim_env:NimEnv")
register("trail", "trail_env:TrailEnv")
register("picture", "picture_env:PictureEnv")
register("tool_calls", "tool_calls_env:ToolCallsEnv")
register_prefix("inspect", "inspect_tasks:inspect_class")
register_prefix("openenv", "openenv_servers:openenv_class")
for prefix in ("gem", "reasoning-gym", "textarena"):
    register_prefix(prefix, "game_frameworks:game_class")
