"""LangGraph graphs as agents: a chat model on the recorder and the environment's tools.

The only folder that imports langchain-core and langgraph (the extra ``langgraph``).
"""

from turnwise import export_lazily
from turnwise.errors import requires_extra

with requires_extra("langgraph", "langgraph", "an agent that is a graph of LangGraph"):
    import langgraph.graph  # noqa: F401 - to say at once what is missing

__all__, __getattr__ = export_lazily(__name__, __file__)
