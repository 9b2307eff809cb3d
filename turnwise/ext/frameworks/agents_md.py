"""The command ``turnwise agents-md``: the part of a project's AGENTS.md about its environments and runs."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from turnwise.cli.options import CommandResult

_FILE: Final = "AGENTS.md"
_TEMPLATE: Final = Path(__file__).with_name("agents.md.jinja")
_PART: Final = re.compile(r"<!-- turnwise: begin.*?<!-- turnwise: end -->\n?", re.DOTALL)
_UNREAD: Final = {"node_modules", "build", "dist", "site-packages", "checkpoints"}


@dataclass(slots=True)
class ProjectFacts:
    """What a project's files define; nothing of it is imported.

    Attributes:
        environments: Names of their tools by reference, ``file.py:Class``.
        tools: References of functions that are tools.
        configs: Configurations of training runs.
        runs: Folders that hold runs.
    """

    environments: dict[str, list[str]] = field(default_factory=dict)
    tools: list[str] = field(default_factory=list)
    configs: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> ProjectFacts:
        """Read what stands below a folder."""
        facts = cls()
        for home, folders, names in os.walk(folder):
            here = Path(home).relative_to(folder)
            if "metrics.jsonl" in names or "trajectories.twz" in names:
                facts.runs += [str(here.parent)] if str(here.parent) not in facts.runs else []
                folders[:] = []
                continue
            folders[:] = sorted(name for name in folders if name not in _UNREAD and not name.startswith((".", "__")))
            for name in sorted(names):
                if name.endswith(".py"):
                    facts._add_module(Path(home, name), str(here / name))
                elif name.endswith((".yaml", ".yml")) and b"\npolicies:" in b"\n" + Path(home, name).read_bytes():
                    facts.configs.append(str(here / name))
        return facts

    def _add_module(self, file: Path, name: str) -> None:
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError):
            return
        self.tools += [f"{name}:{tool}" for tool in _tools_of(tree)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Env") for base in node.bases):
                self.environments[f"{name}:{node.name}"] = list(_tools_of(node))


def _tools_of(node: ast.Module | ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = [ast.unparse(decorator).partition("(")[0] for decorator in child.decorator_list]
            if any(decorator.endswith("function_tool") for decorator in decorators):
                yield child.name


def agents_md(
    folder: Annotated[Path, typer.Argument(help="The project's folder.")] = Path(),
    as_json: Annotated[bool, typer.Option("--json", help="Print what was read as JSON; write nothing.")] = False,
) -> CommandResult:
    """Write the part of a project's AGENTS.md that tells coding agents its environments, tools, runs and commands."""
    from jinja2 import Template

    from turnwise.append_file import replace_file, writing
    from turnwise.errors import ConfigError

    facts = ProjectFacts.read(folder)
    if as_json:
        return CommandResult(asdict(facts))
    words = {"env": next(iter(facts.environments), "ENV"), "config": next(iter(facts.configs), "train.yaml")}
    part = Template(_TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True).render(asdict(facts), **words)
    file = folder / _FILE
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    marks = len(re.findall(r"<!-- turnwise: (?:begin|end)", text))
    if marks not in (0, 2) or (marks and not _PART.search(text)):
        raise ConfigError(f"{file} has {marks} marks of turnwise, not one begin and one end: remove them")
    written = _PART.sub(lambda _: part, text) if marks else f"{text.rstrip()}\n\n{part}".lstrip()
    with writing(file):
        replace_file(file, written.encode())
    typer.echo(f"{file}: {len(facts.environments)} environments, {len(facts.configs)} configurations")
    return CommandResult(asdict(facts))
