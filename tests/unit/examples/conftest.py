"""What the tests of examples share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from turnwise import plugins
from turnwise.agents import registry as agents
from turnwise.chat.formats import FORMATS
from turnwise.envs import registration as envs
from turnwise.envs.rewards import registry as rewards
from turnwise.inference import engines as inference
from turnwise.rollout.managers import MANAGERS
from turnwise.rollout.replay.config import CUSTOM_STRATEGIES
from turnwise.sandboxes.config import BACKENDS
from turnwise.tools import core as tools
from turnwise.trainer.algorithms.advantages import ADVANTAGES
from turnwise.trainer.algorithms.losses import LOSSES
from turnwise.trainer.learn import learner
from turnwise.trainer.observe.loggers import LOGGERS
from turnwise.trainer.run.hooks import HOOKS
from turnwise.trainer.weight_sync import TRANSPORTS

REGISTRIES: list[Any] = [
    agents._AGENTS, envs._ENVS, tools._TOOLS, rewards.REWARDS, inference.ENGINES, learner.ENGINES.classes, FORMATS,
    BACKENDS, TRANSPORTS.classes, MANAGERS, CUSTOM_STRATEGIES, ADVANTAGES, LOSSES, LOGGERS.classes, HOOKS,
]  # fmt: skip
FROM_FILES = "turnwise_file_"


def _module(entry: Any) -> str:
    """Return the module of what a registry holds: a class or function, or something around one."""
    function = getattr(entry, "fn", None) or getattr(entry, "function", None) or getattr(entry, "entry_point", entry)
    return str(getattr(function, "__module__", ""))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Install a distribution in ``tmp_path``: its name, and the target of its one entry point."""

    def install(name: str, target: str) -> None:
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[turnwise.extensions]\n{name} = {target}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv(plugins.CHOSEN, name)

    return install


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test begins without what other tests loaded from files, and what it registers or loads is gone after it."""
    monkeypatch.setattr(plugins, "_loaded", set())
    monkeypatch.setattr(plugins, "_done", {})
    rewards._shared.cache_clear()
    copies = [(registry, dict(registry)) for registry in REGISTRIES]
    files = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(FROM_FILES)}
    for registry in REGISTRIES:
        for name in [name for name, entry in registry.items() if _module(entry).startswith(FROM_FILES)]:
            del registry[name]
    yield
    for registry, entries in copies:
        registry.clear()
        registry.update(entries)
    for name in [name for name in sys.modules if name.startswith((FROM_FILES, "all_extensions", "ext_brackets"))]:
        del sys.modules[name]
    sys.modules.update(files)
