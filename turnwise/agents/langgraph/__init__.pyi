"""The public names of the package, each with the module that it comes from."""

from turnwise.agents.langgraph.agent import LangGraphAgent as LangGraphAgent
from turnwise.agents.langgraph.chat_model import ChatTurnwise as ChatTurnwise
from turnwise.agents.langgraph.run import EpisodeTool as EpisodeTool
from turnwise.agents.langgraph.run import GraphRun as GraphRun
from turnwise.agents.langgraph.run import current_run as current_run
from turnwise.agents.langgraph.run import env_tools as env_tools
from turnwise.agents.langgraph.run import environment_node as environment_node
from turnwise.agents.langgraph.run import episode_over as episode_over
from turnwise.agents.langgraph.run import tools_of as tools_of
