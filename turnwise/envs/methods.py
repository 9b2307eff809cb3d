"""Which methods of an environment are tools.

Owns: :func:`tool_methods`. Refuses: tools that stand in ``Env.tools``.
"""

from __future__ import annotations

from turnwise.errors import ToolSchemaError
from turnwise.tools.core import FunctionTool


def tool_methods(cls: type) -> dict[str, FunctionTool]:
    """Return the tools among the methods of a class and its bases, by the tool's name.

    Raises:
        ToolSchemaError: A method replaces a tool without being one, or two tools have one name.
    """
    found: dict[str, FunctionTool] = {}
    for base in reversed(cls.__mro__):
        for attribute, value in vars(base).items():
            inner = value.__func__ if isinstance(value, staticmethod) else value
            if isinstance(inner, FunctionTool):
                found[attribute] = inner
            elif attribute in found and value is None:
                del found[attribute]
            elif attribute in found and attribute in vars(cls):
                raise ToolSchemaError(
                    f"{cls.__qualname__}.{attribute} replaces a tool of {base.__mro__[1].__qualname__} without being "
                    f"one: decorate it with @function_tool, or write {attribute} = None to take the tool away"
                )
    by_name: dict[str, FunctionTool] = {}
    for attribute, tool in found.items():
        if tool.name in by_name:
            raise ToolSchemaError(f"{cls.__qualname__}.{attribute}: another tool of it is called {tool.name!r} too")
        by_name[tool.name] = tool
    return by_name
