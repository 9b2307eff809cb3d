"""Which fields of the config sections the package's code reads, found by following annotated types through its syntax.

:func:`unread_fields` follows the annotations of parameters, attributes and returns, assignments to names, and
constructors. A value whose type these do not give is not followed, so a field may be reported as unread although it is
read, never the other way round.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

Read = tuple[str, str]  # class, field
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LEAVES = (ast.Constant, ast.Name, ast.expr_context, ast.operator, ast.cmpop, ast.alias)


class Code:
    """The classes and functions of some files, by name, with the annotations of what they hold and return."""

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        self.trees = list(trees)
        self.bases: dict[str, list[str]] = {}
        self.members: dict[str, dict[str, ast.expr]] = {}
        self.returns: dict[str, ast.expr] = {}
        self.reads: set[Read] = set()
        classes = [node for tree in self.trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self.members.update({node.name: {} for node in classes})
        for node in classes:
            self._class(node)
        for node in (node for tree in self.trees for node in tree.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.returns is not None:
                self.returns[node.name] = node.returns

    def _class(self, node: ast.ClassDef) -> None:
        self.bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        members = self.members[node.name]
        for item in node.body:
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                members[item.target.id] = item.annotation
            elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if item.returns is not None:
                    members[item.name] = item.returns
                if item.name == "__init__":
                    self._attributes(item, members)

    def _attributes(self, init: ast.FunctionDef | ast.AsyncFunctionDef, members: dict[str, ast.expr]) -> None:
        annotations = _annotations(init)
        for node in ast.walk(init):
            target = node.target if isinstance(node, ast.AnnAssign) else None
            if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute, ast.BoolOp)):
                target = node.targets[0]
            if not (isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)):
                continue
            if isinstance(node, ast.AnnAssign):
                members.setdefault(target.attr, node.annotation)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in annotations:
                members.setdefault(target.attr, annotations[node.value.id])
            elif isinstance(node, ast.Assign) and (kind := self.type_of(node.value, self.scope_of(init, None, {}))):
                members.setdefault(target.attr, ast.Name(kind))

    def member(self, cls: str, name: str) -> tuple[str, ast.expr] | None:
        """Return the class that defines a member, and the member's annotation."""
        if name in self.members.get(cls, {}):
            return cls, self.members[cls][name]
        in_bases = (self.member(base, name) for base in self.bases.get(cls, ()))
        return next((member for member in in_bases if member is not None), None)

    def named(self, annotation: ast.expr | None) -> str | None:
        """Return the one class of these files that an annotation speaks of."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if annotation is None:
            return None
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} & self.members.keys()
        return names.pop() if len(names) == 1 else None

    def scope_of(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, owner: str | None, outer: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the names that are known at a function's start, with their classes."""
        scope = dict(outer)
        if not isinstance(function, ast.Lambda):
            scope |= {
                name: kind for name, annotation in _annotations(function).items() if (kind := self.named(annotation))
            }
        if owner is not None and function.args.args and function.args.args[0].arg == "self":
            scope["self"] = owner
        return scope

    def type_of(self, node: ast.expr, scope: Mapping[str, str]) -> str | None:
        """Return the class of an expression's value, or of what it holds, and note the fields that it reads."""
        if isinstance(node, ast.Name):
            return scope.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.type_of(node.value, scope)
            member = self.member(owner, node.attr) if owner is not None else None
            if member is None:
                return None
            self.reads.add((member[0], node.attr))
            return self.named(member[1])
        if isinstance(node, (ast.Await, ast.Subscript, ast.Starred)):
            return self.type_of(node.value, scope)
        if isinstance(node, ast.IfExp):
            return self.type_of(node.body, scope) or self.type_of(node.orelse, scope)
        if isinstance(node, ast.BoolOp):
            return next((kind for operand in node.values if (kind := self.type_of(operand, scope))), None)
        if isinstance(node, ast.Call):
            return self._called(node, scope)
        return None

    def _called(self, node: ast.Call, scope: Mapping[str, str]) -> str | None:
        if isinstance(node.func, ast.Attribute):
            if node.func.attr in ("values", "get"):  # of a mapping, which stands for what it holds
                return self.type_of(node.func.value, scope)
            return self.type_of(node.func, scope)
        if not isinstance(node.func, ast.Name):
            return None
        if node.func.id in self.members:
            return node.func.id
        if node.func.id == "load_config" and isinstance(node.args[0], ast.Name):
            return node.args[0].id
        return self.named(self.returns.get(node.func.id))

    def follow(self, node: ast.AST, owner: str | None, scope: dict[str, str]) -> None:
        """Walk through code in its order, keep what names hold, and note the fields that are read."""
        if isinstance(node, ast.ClassDef):
            owner = node.name
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            scope = self.scope_of(node, owner, scope)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            self._bind(node.target, self.named(node.annotation), scope)
        elif isinstance(node, ast.Assign):
            self._assign(node.targets[0], node.value, scope)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._bind(node.target, self.type_of(node.iter, scope), scope)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            self.type_of(node, scope)
        children = [child for child in ast.iter_child_nodes(node) if not isinstance(child, _LEAVES)]
        if isinstance(node, _COMPREHENSIONS):
            # What a comprehension yields is read after what it goes through.
            children.sort(key=lambda child: not isinstance(child, ast.comprehension))
        for child in children:
            self.follow(child, owner, scope)

    def _assign(self, target: ast.expr, value: ast.expr, scope: dict[str, str]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for element, content in zip(target.elts, value.elts, strict=True):
                self._bind(element, self.type_of(content, scope), scope)
        else:
            self._bind(target, self.type_of(value, scope), scope)

    def _bind(self, target: ast.expr, kind: str | None, scope: dict[str, str]) -> None:
        for name in (node.id for node in ast.walk(target) if isinstance(node, ast.Name)):
            if kind is not None and isinstance(target, ast.Name):
                scope[name] = kind
            elif isinstance(target, (ast.Name, ast.Tuple)):
                scope.pop(name, None)


def _annotations(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return {argument.arg: argument.annotation for argument in arguments if argument.annotation is not None}


def unread_fields(trees: Iterable[ast.Module], sections: Mapping[str, Iterable[str]]) -> list[str]:
    """Return ``Section.field`` for every field that no code of some files reads.

    Args:
        trees: The syntax trees of the files.
        sections: The names of section classes, each with the fields that it defines itself.
    """
    code = Code(trees)
    for tree in code.trees:
        code.follow(tree, None, {})
    fields = [(name, field) for name, fields in sections.items() for field in fields]
    return [".".join(read) for read in fields if read not in code.reads]
