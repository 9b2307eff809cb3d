"""LangGraph graphs as agents: a chat model on the recorder and the environment's tools.

The only folder that imports langchain-core and langgraph (the extra ``langgraph``).
"""

from turnwise import export_lazily
from turnwise.errors import MissingExtraError

try:
    import langgraph.graph  # noqa: F401 - to say at once what is missing
except ImportError as error:
    raise MissingExtraError("langgraph", "langgraph", "an agent that is a graph of LangGraph") from error

__all__, __getattr__ = export_lazily(__name__, __file__)
