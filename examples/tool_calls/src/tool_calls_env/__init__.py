"""Tool-call environment: the right calls of given functions, as in BFCL."""

from tool_calls_env.bfcl import BFCL
from tool_calls_env.env import ToolCallsEnv, tasks

__all__ = ["BFCL", "ToolCallsEnv", "tasks"]
