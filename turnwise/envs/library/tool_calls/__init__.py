"""Tool-call environment: the right calls of given functions, as in BFCL."""

from turnwise.envs.library.tool_calls.env import ToolCallsEnv, tasks

__all__ = ["ToolCallsEnv", "tasks"]
