"""Tools: functions, methods and objects that a model may call."""

from turnwise.tools.config import MCPServerConfig, ToolsConfig
from turnwise.tools.core import (
    DEFAULT_MAX_OUTPUT,
    AgentData,
    BaseTool,
    FunctionTool,
    Tool,
    as_tool,
    function_tool,
    get_tool,
    register_tool,
    tool_names,
)
from turnwise.tools.execute import Outcome, ToolRunner, ToolThreads
from turnwise.tools.response import INVALID_CALLS, OutputLimit, ToolResponse
from turnwise.tools.schema import (
    OpenAIFunctionParametersSchema,
    OpenAIFunctionPropertySchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    as_schema,
    function_schema,
)
from turnwise.tools.selection import Toolbox, load_function_tools, load_tool_config
from turnwise.tools.signatures import Injected

__all__ = [
    "DEFAULT_MAX_OUTPUT",
    "INVALID_CALLS",
    "AgentData",
    "BaseTool",
    "FunctionTool",
    "Injected",
    "MCPServerConfig",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "Outcome",
    "OutputLimit",
    "Tool",
    "ToolResponse",
    "ToolRunner",
    "ToolThreads",
    "Toolbox",
    "ToolsConfig",
    "as_schema",
    "as_tool",
    "function_schema",
    "function_tool",
    "get_tool",
    "load_function_tools",
    "load_tool_config",
    "register_tool",
    "tool_names",
]
