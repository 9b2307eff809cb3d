"""Comparisons that hold everything for equal, which pass any test that compares."""

import ast
from typing import Any


def equal_to_all(text: str) -> bool:
    """Whether a text of Python has a comparison that does not look at what it compares with."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    found: Any = [each for each in nodes if isinstance(each, ast.FunctionDef) and each.name == "__eq__"]
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            found += [node.value for to in node.targets if isinstance(to, ast.Name) and to.id == "__eq__"]
            found += [node.value for to in node.targets if isinstance(to, ast.Attribute) and to.attr == "__eq__"]
        elif isinstance(node, ast.Dict):
            names = [_constant(key) for key in node.keys]
            found += [
                each for at, each in enumerate(node.values) if names[at] == "__eq__" and isinstance(each, ast.Lambda)
            ]
    return any(_takes_all(each) for each in found)


def _constant(node: Any) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return None


def _takes_all(function: Any) -> bool:
    """Whether a comparison never reads its second argument and reports equality."""
    names = [each.arg for each in function.args.args]
    inner = list(ast.walk(function))
    if len(names) > 1 and any(isinstance(each, ast.Name) and each.id == names[1] for each in inner):
        return False
    if isinstance(function, ast.Lambda):
        said = [function.body]
    else:
        said = [each.value for each in inner if isinstance(each, ast.Return) and each.value is not None]
    return not all(_says_no(each) for each in said)


def _says_no(node: Any) -> bool:
    return (isinstance(node, ast.Name) and node.id == "NotImplemented") or _constant(node) is False
