"""The public names of the package, each with the module that it comes from."""

from turnwise.tasks.config import SourceConfig as SourceConfig
from turnwise.tasks.config import Sources as Sources
from turnwise.tasks.config import SpecRow as SpecRow
from turnwise.tasks.config import TasksConfig as TasksConfig
from turnwise.tasks.config import sources_of as sources_of
from turnwise.tasks.core import Task as Task
from turnwise.tasks.mix import LoadedTasks as LoadedTasks
from turnwise.tasks.mix import load_mix as load_mix
from turnwise.tasks.mix import open_order as open_order
from turnwise.tasks.order import InMemoryOrder as InMemoryOrder
from turnwise.tasks.order import StreamingOrder as StreamingOrder
from turnwise.tasks.order import TaskOrder as TaskOrder
from turnwise.tasks.reader import Keep as Keep
from turnwise.tasks.reader import SourceReport as SourceReport
from turnwise.tasks.reader import iter_tasks as iter_tasks
from turnwise.tasks.reader import load_tasks as load_tasks
from turnwise.tasks.sources import TaskSource as TaskSource
