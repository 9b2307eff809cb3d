"""Terminal environment: tasks in a shell, graded by tests copied in after the agent ended."""

from turnwise.ext.environments.terminal.env import TerminalEnv, harbor_class
from turnwise.ext.environments.terminal.folder import TaskFolder, read_folder, tasks

__all__ = ["TaskFolder", "TerminalEnv", "harbor_class", "read_folder", "tasks"]
