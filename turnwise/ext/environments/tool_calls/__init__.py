"""Tool-call environment: the right calls of given functions, as in BFCL."""

from turnwise.ext.environments.tool_calls.env import ToolCallsEnv, tasks

__all__ = ["ToolCallsEnv", "tasks"]
