"""Folders of exported environments that Python itself loads: a Gymnasium package and an MCP server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from turnwise.version import __version__


@dataclass(frozen=True, slots=True)
class Subject:
    """What is exported.

    Attributes:
        name: A name of a Python package, such as ``guess_number``.
        title: The name or reference of the environment.
        summary: First sentence of its docstring.
        has_tools: Whether it offers tools at the beginning of an episode.
    """

    name: str
    title: str
    summary: str
    has_tools: bool

    @property
    def package(self) -> str:
        """Name of the package that Gymnasium imports."""
        return f"turnwise_{self.name}"

    @property
    def words(self) -> str:
        """The summary, or the name without one."""
        return self.summary or f"The environment {self.title}."


def filled(template: str, subject: Subject, **more: str) -> str:
    """Return a template with ``@NAME@`` and others replaced."""
    values = {
        "NAME": subject.name,
        "CLASS": "".join(part.capitalize() for part in subject.name.split("_")),
        "PACKAGE": subject.package,
        "TITLE": subject.title,
        "SUMMARY": subject.words,
        "VERSION": __version__,
        # In TOML and JSON a text is quoted alike.
        "QUOTED": json.dumps(subject.words, ensure_ascii=False),
        **more,
    }
    for name, value in values.items():
        template = template.replace(f"@{name}@", value)
    return template


_GYMNASIUM_PROJECT: Final = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "turnwise-gymnasium-@NAME@"
version = "0.1.0"
description = @QUOTED@
requires-python = ">=3.11"
dependencies = ["turnwise-rl>=@VERSION@", "gymnasium>=1.2"]

[tool.setuptools]
packages = ["@PACKAGE@"]

[tool.setuptools.package-data]
"@PACKAGE@" = ["*"]
"""
_GYMNASIUM_PACKAGE: Final = '''\
"""@TITLE@ as a Gymnasium environment, with the id ``@PACKAGE@/@NAME@-v0``."""

from pathlib import Path

import gymnasium

from turnwise.ext.frameworks.export import load_exported

ID = "@PACKAGE@/@NAME@-v0"


def make(render_mode=None, **config):
    """Make the environment; keyword arguments change its configuration."""
    return load_exported(Path(__file__).parent).gymnasium(render_mode=render_mode, **config)


if ID not in gymnasium.registry:
    gymnasium.register(ID, entry_point=make)
'''
_GYMNASIUM_README: Final = """\
# @PACKAGE@

@SUMMARY@

```
pip install .
```

```python
import gymnasium

env = gymnasium.make("@PACKAGE@:@PACKAGE@/@NAME@-v0")   # imports the package, which registers the id
messages, info = env.reset(seed=0, options={"task": 0})
messages, reward, terminated, truncated, info = env.step("an answer")
```

Observations are tuples of messages, actions texts or assistant messages with `tool_calls`. `options={"task": ...}`
takes the number or id of a task in `@PACKAGE@/tasks.jsonl`, or a row; without it one is drawn.
"""


def gymnasium_files(subject: Subject) -> dict[str, str]:
    """Return a package that registers a Gymnasium id."""
    return {
        "pyproject.toml": filled(_GYMNASIUM_PROJECT, subject),
        "README.md": filled(_GYMNASIUM_README, subject),
        f"{subject.package}/__init__.py": filled(_GYMNASIUM_PACKAGE, subject),
    }


_MCP_SERVER: Final = '''\
"""@TITLE@ as an MCP server: each session plays an episode, and the last result has its reward."""

import argparse
import asyncio
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from turnwise.ext.frameworks.export import load_exported
from turnwise.ext.frameworks.mcp_server import EnvServer


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", action="store_true", help="serve many clients, not one over stdin and stdout")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--task", help="play only the task with this id")
    parser.add_argument("--seed", type=int, help="seed of every reset; default: the task's")
    parser.add_argument("--out", type=Path, help="append one line of JSON per episode to this file")
    options = parser.parse_args()
    # Over stdio, what an environment prints must not come between the messages.
    with nullcontext() if options.http else redirect_stdout(sys.stderr):
        exported = load_exported(Path(__file__).parent)
        tasks = [task for task in exported.tasks if options.task in (None, task.id)]
        if options.task is not None and not tasks:
            parser.error(f"there is no task {options.task!r}")
    server = EnvServer(exported.make, exported.name, tasks=tasks or None, seed=options.seed, out=options.out)
    if options.http:
        started = lambda address: print(f"serving {exported.name} at {address}", flush=True)
        asyncio.run(server.serve_http(options.host, options.port, started))
    else:
        asyncio.run(server.serve_stdio())


if __name__ == "__main__":
    main()
'''
_MCP_README: Final = """\
# @NAME@

@SUMMARY@

`python server.py` serves one client over standard input and output, `python server.py --http` many over HTTP.
`mcp.json` is a client's configuration of the former, in this folder. Needs `pip install 'turnwise-rl[mcp]'`.

A session is an episode: the tool `task` says what is to be done, and the call that ends the episode (`finish`, `reply`
or a tool of the environment) returns `{"over": ..., "reward": ..., "rewards": {...}}`. Tasks are those of
`tasks.jsonl`, in order.
"""


def mcp_files(subject: Subject) -> dict[str, str]:
    """Return a server script with a client's configuration."""
    client = {"mcpServers": {subject.name: {"command": "python", "args": ["server.py"]}}}
    return {
        "server.py": filled(_MCP_SERVER, subject),
        "mcp.json": json.dumps(client, indent=2) + "\n",
        "README.md": filled(_MCP_README, subject),
    }
