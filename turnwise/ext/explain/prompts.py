"""What the model was shown: the first prompts of a run that offer different tools, their text, and the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

from turnwise.chat.model_dir import ModelFiles, read_model_dir
from turnwise.errors import TurnwiseError
from turnwise.trajectory import Trajectory

_MOST_PROMPTS: Final = 4


@dataclass(slots=True)
class Prompt:
    """The tokens before the first turn of a trajectory, and the names of the tools that they should show."""

    trajectory: str
    token_ids: Sequence[int]
    tools: tuple[str, ...]


@dataclass
class Prompts:
    """The prompts of a run, and what reads them.

    Attributes:
        model_path: The model that the run began with.
        template_path: The template that its configuration names, if any.
        first: The first prompt with each set of tools.
        unread: Why the tokenizer cannot be read; empty where it can.
    """

    run: Path = Path()
    model_path: str | None = None
    template_path: str | None = None
    first: dict[tuple[str, ...], Prompt] = field(default_factory=dict)
    unread: str = ""

    def add(self, trajectory: Trajectory) -> None:
        """Add the first prompt of a trajectory, if its tools are new."""
        root = trajectory.segments[0] if trajectory.segments else None
        tools = () if root is None else tuple(str(tool.get("function", tool).get("name")) for tool in root.tools or ())
        if root is not None and tools and tools not in self.first and len(self.first) < _MOST_PROMPTS:
            self.first[tools] = Prompt(trajectory.id, root.token_ids.tolist(), tools)

    @cached_property
    def model(self) -> ModelFiles | None:
        """Tokenizer and template, from the newest checkpoint or the model's directory."""
        checkpoints = sorted((self.run / "checkpoints").glob("step_*"), reverse=True)[:2]
        folders = [path for folder in checkpoints for path in (folder, folder / "model")]
        self.unread = "no tokenizer of the model is on this machine"
        for folder in (*folders, Path(self.model_path or "")):
            if (folder / "tokenizer.json").is_file():
                try:
                    model = read_model_dir(folder)
                except TurnwiseError as error:
                    self.unread = str(error)
                else:
                    self.unread = ""
                    return model
        return None

    def text(self, prompt: Prompt) -> str:
        """Return the text of a prompt; empty without a tokenizer."""
        if self.model is None:
            return ""
        return str(self.model.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))

    @cached_property
    def template(self) -> list[str]:
        """The lines of the chat template; none where it cannot be read."""
        if self.template_path and Path(self.template_path).is_file():
            return Path(self.template_path).read_text(encoding="utf-8").splitlines()
        model = None if self.template_path else self.model
        return [] if model is None else (model.tool_template or model.template or "").splitlines()
