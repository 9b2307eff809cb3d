r"""Two tools: a class that searches the files of a sandbox (its schema is in ``tools.yaml``), and a function.

rollout:
  env:
    name: environment.py:Folder
    tools: {tool_config_path: tools.yaml, function_tool_path: tool.py}

Where the module is imported (``TURNWISE_EXTERNAL_MODULES``), the function is also ``tools: [total]``.
"""

from __future__ import annotations

from typing import Any

from turnwise import BaseTool, ToolResponse, function_tool
from turnwise.errors import ConfigError, EnvError, ToolError
from turnwise.sandboxes.core import Sandbox


@function_tool
def total(numbers: list[float]) -> float:
    """Add numbers.

    Args:
        numbers: What to add.
    """
    return sum(numbers)


class Search(BaseTool):
    """Finds lines in files, as ``grep`` does; its sandbox is that of the environment.

    Configuration: ``max_lines`` (20), how many lines an answer has at most.
    """

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.max_lines = config.get("max_lines", 20)
        if not isinstance(self.max_lines, int) or self.max_lines < 1:
            raise ConfigError(f"config.max_lines is {self.max_lines!r}: it must be a number of lines, at least 1")
        self._boxes: dict[str, Sandbox] = {}

    async def create(
        self, instance_id: str | None = None, *, agent_data: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        if agent_data is None or agent_data.sandbox is None:
            raise EnvError("the tool 'search' needs a sandbox: call 'await self.open_sandbox()' in the env's reset()")
        instance_id, response = await super().create(instance_id)
        self._boxes[instance_id] = agent_data.sandbox
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any]]:
        command = ["grep", "-rniE", "--", parameters["pattern"], parameters.get("path") or "."]
        result = await self._boxes[instance_id].exec(command, timeout=10)
        if result.timed_out or result.exit_code > 1:
            why = "it took over 10 seconds" if result.timed_out else result.stderr.decode(errors="replace").strip()
            raise ToolError(f"{why}: give another pattern or path")
        lines = result.stdout.decode(errors="replace").splitlines()
        first_lines = lines[: self.max_lines]
        if len(lines) > len(first_lines):
            first_lines.append(f"({len(lines) - len(first_lines)} more lines: search for something rarer)")
        return ToolResponse("\n".join(first_lines) or "nothing found"), None, {"lines": len(lines)}

    async def fork(self, instance_id: str, agent_data: Any) -> str:
        fork_id, _ = await self.create(agent_data=agent_data)
        return fork_id

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._boxes.pop(instance_id, None)
