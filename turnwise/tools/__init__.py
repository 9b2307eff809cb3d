"""Tools: functions, methods and objects that a model may call."""

from turnwise.tools.core import DEFAULT_MAX_OUTPUT, BaseTool, FunctionTool, Tool, as_tool, function_tool
from turnwise.tools.execute import Outcome, ToolRunner
from turnwise.tools.registry import get_tool, register_tool, tool_names
from turnwise.tools.response import INVALID_CALLS, ToolResponse
from turnwise.tools.schema import as_schema, function_schema
from turnwise.tools.threads import ToolThreads

__all__ = [
    "DEFAULT_MAX_OUTPUT",
    "INVALID_CALLS",
    "BaseTool",
    "FunctionTool",
    "Outcome",
    "Tool",
    "ToolResponse",
    "ToolRunner",
    "ToolThreads",
    "as_schema",
    "as_tool",
    "function_schema",
    "function_tool",
    "get_tool",
    "register_tool",
    "tool_names",
]
