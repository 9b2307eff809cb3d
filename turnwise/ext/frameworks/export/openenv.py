"""Folders of exported environments for OpenEnv: a server, its client, and a Dockerfile."""

from __future__ import annotations

from typing import Final

from turnwise.ext.frameworks.export.packages import Subject, filled

_MANIFEST: Final = """\
spec_version: 1
name: @NAME@
type: space
runtime: fastapi
app: server.app:app
port: 8000
"""
_PROJECT: Final = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "openenv-@NAME@"
version = "0.1.0"
description = @QUOTED@
requires-python = ">=3.11"
dependencies = ["openenv-core[core]>=0.3.0", "turnwise-rl>=@VERSION@"]

[project.scripts]
server = "@NAME@.server.app:main"

[tool.setuptools]
packages = ["@NAME@", "@NAME@.server"]
package-dir = { "@NAME@" = ".", "@NAME@.server" = "server" }

[tool.setuptools.package-data]
"@NAME@" = ["*.json", "*.jsonl", "*.yaml"]
"""
_PACKAGE: Final = '''\
"""@TITLE@ for OpenEnv: the client and what it sends and receives."""

from .client import @CLASS@Env
from .models import @CLASS@Action, @CLASS@Observation

__all__ = ["@CLASS@Action", "@CLASS@Env", "@CLASS@Observation"]
'''
_MODELS: Final = '''\
"""What a client sends and receives: messages."""

from typing import Any

from openenv.core.env_server.types import Action, Observation
from pydantic import Field


class @CLASS@Action(Action):
    """A message of the model."""

    content: str = Field(@DEFAULT@, description="Text of the message")
    tool_calls: list[dict[str, Any]] = Field(
        default_factory=list, description="Calls of tools, each an object with name and arguments"
    )


class @CLASS@Observation(Observation):
    """Messages to append to the conversation."""

    text: str = Field("", description="The messages as one text")
    messages: list[dict[str, Any]] = Field(default_factory=list, description="Messages with role and content")
    tools: list[dict[str, Any]] = Field(default_factory=list, description="Schemas of the tools on offer")
    truncated: bool = Field(False, description="Whether a limit ended the episode")
    rewards: dict[str, float] = Field(default_factory=dict, description="The parts of the reward")
'''
_CLIENT: Final = '''\
"""The client of the environment."""

from typing import Any

from openenv.core import EnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import State

from .models import @CLASS@Action, @CLASS@Observation


class @CLASS@Env(EnvClient[@CLASS@Action, @CLASS@Observation, State]):
    """Plays @TITLE@ on a server: ``reset(seed=..., task=...)``, then ``step(@CLASS@Action(...))``."""

    def _step_payload(self, action: @CLASS@Action) -> dict[str, Any]:
        return action.model_dump(exclude={"metadata"})

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[@CLASS@Observation]:
        held = {"done": payload.get("done", False), "reward": payload.get("reward")}
        observation = @CLASS@Observation(**{**payload.get("observation", {}), **held})
        return StepResult(observation=observation, **held)

    def _parse_state(self, payload: dict[str, Any]) -> State:
        return State(**payload)
'''
_ENVIRONMENT: Final = '''\
"""The environment on the server."""

from pathlib import Path
from uuid import uuid4

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import EnvironmentMetadata, State

from turnwise.ext.frameworks.export import load_exported

try:
    from ..models import @CLASS@Action, @CLASS@Observation
except ImportError:
    from models import @CLASS@Action, @CLASS@Observation

EXPORTED = load_exported(Path(__file__).resolve().parent.parent)


class @CLASS@Environment(Environment):
    """One session: an environment of its own, whose episodes follow each other."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._env = EXPORTED.gymnasium()
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed=None, episode_id=None, task=None, **kwargs):
        """Begin an episode: of the task that is named by its number, its id or as a row, else of a drawn one."""
        messages, info = self._env.reset(seed=seed, options=None if task is None else {"task": task})
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0, task_id=info["task_id"])
        return self._observed(messages, None, False, False, info)

    def step(self, action, timeout_s=None, **kwargs):
        """Take a message."""
        self._state.step_count += 1
        message = {"role": "assistant", "content": action.content}
        if action.tool_calls:
            message["tool_calls"] = action.tool_calls
        return self._observed(*self._env.step(message))

    @property
    def state(self):
        """The number of messages and the task."""
        return self._state

    def get_metadata(self):
        """What the environment is."""
        return EnvironmentMetadata(name="@NAME@", description=@QUOTED@, version="0.1.0")

    def close(self):
        """Close the environment."""
        self._env.close()

    def _observed(self, messages, reward, terminated, truncated, info):
        parts = [each.get("content") or "" for each in messages]
        tools = [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in self._env.action_space.tools
        ]
        return @CLASS@Observation(
            text="\\n\\n".join(part for part in parts if isinstance(part, str)),
            messages=list(messages),
            tools=tools,
            done=terminated or truncated,
            truncated=truncated,
            reward=reward,
            rewards=info.get("rewards") or {},
        )
'''
_APP: Final = '''\
"""The server: ``uvicorn server.app:app``, or ``python -m @NAME@.server.app``."""

from openenv.core.env_server.http_server import create_app

try:
    from ..models import @CLASS@Action, @CLASS@Observation
    from .environment import @CLASS@Environment
except ImportError:
    from models import @CLASS@Action, @CLASS@Observation
    from server.environment import @CLASS@Environment

app = create_app(
    @CLASS@Environment, @CLASS@Action, @CLASS@Observation, env_name="@NAME@", max_concurrent_envs=256
)


def main(host: str = "0.0.0.0", port: int = 8000):
    """Serve until interrupted."""
    import argparse

    import uvicorn

    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default=host)
    parser.add_argument("--port", type=int, default=port)
    options = parser.parse_args()
    uvicorn.run(app, host=options.host, port=options.port)


if __name__ == "__main__":
    main()
'''
_DOCKERFILE: Final = """\
# From the folder above: docker build -f server/Dockerfile -t @NAME@-env .
FROM python:3.12-slim
WORKDIR /app/env
COPY . /app/env
# Packages that are on no index (a wheel of turnwise, say) may lie in wheels/.
RUN pip install --no-cache-dir --find-links wheels "openenv-core[core]>=0.3.0" "turnwise-rl>=@VERSION@"
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=3s --start-period=10s --retries=3 \\
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"
CMD ["uvicorn", "server.app:app", "--host", "0.0.0.0", "--port", "8000"]
"""
_README: Final = """\
# @NAME@

@SUMMARY@

```
pip install .
uvicorn server.app:app --port 8000                          # or: docker build -f server/Dockerfile -t @NAME@-env .
```

```python
from @NAME@ import @CLASS@Action, @CLASS@Env

with @CLASS@Env(base_url="http://127.0.0.1:8000").sync() as env:
    result = env.reset(seed=0, task=0)
    result = env.step(@CLASS@Action(content="an answer"))
    print(result.observation.text, result.reward, result.done)
```

An action is a message: `content`, and `tool_calls` with `name` and `arguments`. `task` of `reset` is the number or id
of a task in `tasks.jsonl`, or a row; without it one is drawn.
"""


def openenv_files(subject: Subject) -> dict[str, str]:
    """Return an environment as OpenEnv's commands and loader expect it."""
    texts = {
        "openenv.yaml": _MANIFEST,
        "pyproject.toml": _PROJECT,
        "README.md": _README,
        "__init__.py": _PACKAGE,
        "models.py": _MODELS,
        "client.py": _CLIENT,
        "server/__init__.py": '"""The server of @TITLE@."""\n',
        "server/environment.py": _ENVIRONMENT,
        "server/app.py": _APP,
        "server/Dockerfile": _DOCKERFILE,
    }
    # What has no tools is played by its only required text.
    default = '""' if subject.has_tools else "..."
    return {name: filled(text, subject, DEFAULT=default) for name, text in texts.items()}
