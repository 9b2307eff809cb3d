"""Parts of drivers of other frameworks, imported in this process as an interpreter of their framework does."""

import sys

from support.envs import unshipped  # noqa: F401 - the folders of their packages
from turnwise.ext.frameworks.foreign import inside
from turnwise.ext.frameworks.foreign.inside import core

sys.modules.update({"turnwise_foreign": inside, "turnwise_foreign.core": core})

from game_frameworks.textarena_driver import without_headings  # noqa: E402
from openenv_servers.driver import EnvironmentServer, guard_host  # noqa: E402

__all__ = ["EnvironmentServer", "guard_host", "without_headings"]
