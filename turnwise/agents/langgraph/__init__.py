"""LangGraph graphs as agents: a chat model on the recorder and the environment's tools.

The only folder that imports langchain-core and langgraph (the extra ``langgraph``).
"""

from turnwise.errors import MissingExtraError

try:
    import langgraph.graph  # noqa: F401 - to say at once what is missing
except ImportError as error:
    raise MissingExtraError("langgraph", "langgraph", "an agent that is a graph of LangGraph") from error

from turnwise.agents.langgraph.agent import LangGraphAgent
from turnwise.agents.langgraph.chat_model import ChatTurnwise
from turnwise.agents.langgraph.run import (
    EpisodeTool,
    GraphRun,
    current_run,
    env_tools,
    environment_node,
    episode_over,
    tools_of,
)

__all__ = [
    "ChatTurnwise",
    "EpisodeTool",
    "GraphRun",
    "LangGraphAgent",
    "current_run",
    "env_tools",
    "environment_node",
    "episode_over",
    "tools_of",
]
