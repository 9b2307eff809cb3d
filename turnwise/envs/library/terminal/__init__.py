"""Tasks in a terminal, whose tests come in only after the agent has ended."""

from turnwise.envs.library.terminal.env import TerminalEnv
from turnwise.envs.library.terminal.folder import TaskFolder, read_folder, tasks

__all__ = ["TaskFolder", "TerminalEnv", "read_folder", "tasks"]
