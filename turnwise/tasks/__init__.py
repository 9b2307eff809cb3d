"""Tasks: dataset rows from files, hubs and functions, and the order in which they are taken."""

from turnwise.tasks.config import SourceConfig, Sources, SpecRow, TasksConfig, sources_of
from turnwise.tasks.core import Task
from turnwise.tasks.mix import LoadedTasks, load_mix, open_order
from turnwise.tasks.order import InMemoryOrder, StreamingOrder, TaskOrder
from turnwise.tasks.reader import Keep, SourceReport, iter_tasks, load_tasks
from turnwise.tasks.sources import TaskSource

__all__ = [
    "InMemoryOrder",
    "Keep",
    "LoadedTasks",
    "SourceConfig",
    "SourceReport",
    "Sources",
    "SpecRow",
    "StreamingOrder",
    "Task",
    "TaskOrder",
    "TaskSource",
    "TasksConfig",
    "iter_tasks",
    "load_mix",
    "load_tasks",
    "open_order",
    "sources_of",
]
