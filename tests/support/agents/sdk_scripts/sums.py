"""The task that every client is given, and its one tool. Imports nothing: each client has an environment of its own."""

SYSTEM = "Be brief."
QUESTION = "What are 1+2 and 3+4, and what is the sum of the two?"
DESCRIPTION = "Add two integers."
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
MODEL = "turnwise-tiny"
MOST_TURNS = 5


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b
