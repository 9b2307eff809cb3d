"""Detection of ``__eq__`` methods that are equal to everything, and so pass any assertion of equality."""

import ast
from typing import Any


def equal_to_all(text: str) -> bool:
    """Return whether Python source has an ``__eq__`` that ignores its argument."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    comparisons: Any = [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == "__eq__"]
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            comparisons += [
                node.value for target in node.targets if isinstance(target, ast.Name) and target.id == "__eq__"
            ]
            comparisons += [
                node.value for target in node.targets if isinstance(target, ast.Attribute) and target.attr == "__eq__"
            ]
        elif isinstance(node, ast.Dict):
            names = [_constant(key) for key in node.keys]
            comparisons += [
                value
                for name, value in zip(names, node.values)  # noqa: B905 - older Pythons
                if name == "__eq__" and isinstance(value, ast.Lambda)
            ]
    return any(_ignores_argument(comparison) for comparison in comparisons)


def _constant(node: Any) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _ignores_argument(function: Any) -> bool:
    """Return whether a comparison never reads its second argument and returns equality."""
    names = [argument.arg for argument in function.args.args]
    inner = list(ast.walk(function))
    if len(names) > 1 and any(isinstance(node, ast.Name) and node.id == names[1] for node in inner):
        return False
    if isinstance(function, ast.Lambda):
        returned = [function.body]
    else:
        returned = [node.value for node in inner if isinstance(node, ast.Return) and node.value is not None]
    return not all(_is_unequal(value) for value in returned)


def _is_unequal(node: Any) -> bool:
    return (isinstance(node, ast.Name) and node.id == "NotImplemented") or _constant(node) is False
