"""Every extension point by reference, by name and as an entry point, with the extensions of ``examples/extensions``."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turnwise.agents import registry as agents
from turnwise.chat.formats import find_format
from turnwise.envs import registration as envs
from turnwise.envs.rewards.registry import load_function, register_reward
from turnwise.errors import ConfigError, RegistryError
from turnwise.inference import engines as inference
from turnwise.plugins import MODULES, load_extensions
from turnwise.rollout.config import NamedConfig, RolloutConfig
from turnwise.rollout.managers import check_manager, register_manager
from turnwise.rollout.replay.config import ReplayConfig, RunFacts, make_strategy, register_strategy
from turnwise.sandboxes.config import SandboxConfig, open_backend
from turnwise.tools.selection import named_tool
from turnwise.trainer.algorithms.advantages import advantage_fn
from turnwise.trainer.algorithms.losses import find_loss
from turnwise.trainer.config.policy import WeightTransportConfig
from turnwise.trainer.learn import learner
from turnwise.trainer.observe.loggers import LOGGERS, LoggedRun, Logger, register_logger
from turnwise.trainer.run.hooks import Hooks, load_hooks, register_hooks
from turnwise.trainer.weight_sync import chosen_transport

FOLDER = Path(__file__).parents[3] / "examples" / "extensions"
pytestmark = pytest.mark.usefixtures("registries")


def manager(name: str) -> Any:
    config = RolloutConfig.model_validate({"env": {"name": "lookup"}, "agent_loop_manager_class": name})
    return check_manager(config, {})


def strategy(name: str) -> Any:
    return type(make_strategy(ReplayConfig(strategy=NamedConfig(name=name)), RunFacts(groups=1, sync=False)))


def backend(name: str) -> Any:
    return type(
        open_backend(SandboxConfig(name=name, config={"log": "/dev/null", "isolation": "plain", "unsafe": True}))
    )


def transport(name: str) -> Any:
    config = WeightTransportConfig.model_construct(name=name, config={"directory": "/tmp"})
    return chosen_transport(config).function


# File, what is in it, its name, and how a configuration's name is looked up.
POINTS: dict[str, tuple[str, str, str, Callable[[str], Any]]] = {
    "environment": ("environment.py", "Folder", "folder", envs.env_class),
    "agent": ("agent.py", "prepared", "prepared", agents.find_agent),
    "rollout manager": ("rollout_manager.py", "WholeGroups", "whole_groups", manager),
    "reward": ("reward.py", "closeness", "closeness", lambda name: load_function(name, {}, "scorer")),
    "replay strategy": ("replay_strategy.py", "DistinctTasks", "distinct_tasks", strategy),
    "hook": ("hooks.py", "Plateau", "plateau", lambda name: load_hooks([name])[0]),
    "advantage": ("advantage.py", "median", "median", advantage_fn),
    "loss": ("loss.py", "tapered", "tapered", lambda name: find_loss(name).function),
    "chat format": ("chat_format.py", "Brackets", "brackets", find_format),
    "sandbox backend": ("sandbox_backend.py", "LoggedBackend", "logged", backend),
    "inference engine": ("inference_engine.py", "PrefixedServer", "prefixed", inference.find_engine),
    "model engine": ("model_engine.py", "UpperLayers", "upper_layers", learner.find_engine),
    "weight transport": ("weight_transport.py", "FolderTransport", "folder", transport),
    "logger": ("logger.py", "SQLiteLogger", "sqlite", LOGGERS.find),
}


def test_examples_and_the_page_list_the_same_files() -> None:
    files = {file.name for file in FOLDER.glob("*.py")}
    assert files == {file for file, _, _, _ in POINTS.values()} | {"tool.py"}
    page = (FOLDER.parents[1] / "docs" / "extending.md").read_text()
    assert [name for name in sorted(files) if f"examples/extensions/{name})" not in page] == []


@pytest.mark.parametrize("point", POINTS)
def test_by_reference_and_then_by_name(point: str) -> None:
    file, attribute, name, find = POINTS[point]
    with pytest.raises((ConfigError, RegistryError)):
        find(name)
    part = find(f"{FOLDER / file}:{attribute}")
    assert part.__module__.startswith("turnwise_file_")
    assert find(name) is part
    # One letter less is an error that names the right one; a file or class that is not there is one, too.
    with pytest.raises((ConfigError, RegistryError), match=name):
        find(name[:-1])
    with pytest.raises((ConfigError, RegistryError), match="no such file"):
        find(f"{FOLDER / 'missing.py'}:{attribute}")
    with pytest.raises((ConfigError, RegistryError), match="Missing"):
        find(f"{FOLDER / file}:Missing")


def test_modules_of_the_environment_variable_register_names(monkeypatch: pytest.MonkeyPatch) -> None:
    files = sorted({file for file, _, _, _ in POINTS.values()} | {"tool.py"})
    monkeypatch.setenv(MODULES, ",".join(str(FOLDER / file) for file in files))
    assert len(load_extensions()) >= len(files)
    for point, (_, attribute, name, find) in POINTS.items():
        assert find(name).__name__ == attribute, point
    assert named_tool("total").name == "total"


def test_single_entry_point_registers_every_part(tmp_path: Path, installed: Callable[[str, str], None]) -> None:
    package = tmp_path / "all_extensions"
    package.mkdir()
    for file in FOLDER.glob("*.py"):
        shutil.copy(file, package)
    stems = sorted(file.stem for file in FOLDER.glob("*.py"))
    (package / "__init__.py").write_text(f"def register():\n    from all_extensions import {', '.join(stems)}\n")
    installed("all_extensions", "all_extensions:register")
    assert load_extensions() == ["all_extensions"]
    for point, (file, attribute, name, find) in POINTS.items():
        part = find(name)
        assert (part.__module__, part.__name__) == (f"all_extensions.{Path(file).stem}", attribute), point
        # Another definition of that name is refused, and the message says where the first one stands.
        with pytest.raises((ConfigError, RegistryError), match=rf"{name}'? is taken by .*all_extensions"):
            find(f"{FOLDER / file}:{attribute}")
    assert named_tool("total").fn.__module__ == "all_extensions.tool"  # type: ignore[union-attr]


def test_invalid_parts_are_refused() -> None:
    class Mute(Logger):
        def __init__(self, run: LoggedRun) -> None: ...

    class Misspelt(Hooks):
        def on_step_ends(self) -> None: ...

    class Nothing: ...

    for register, thing, message in (
        (register_logger, Mute, "logger 'mine' does not define log"),
        (register_logger, Nothing, "must derive from"),
        (register_hooks, Misspelt, "on_step_ends, which is no hook"),
        (register_hooks, Nothing, "not a subclass of turnwise.Hooks"),
        (register_manager, Nothing, "must derive from turnwise.rollout.core.RolloutManager"),
        (register_strategy, Nothing, "must derive from turnwise.rollout.replay.strategies.Strategy"),
    ):
        with pytest.raises((ConfigError, RegistryError), match=message):
            register("mine")(thing)  # type: ignore[operator]
    with pytest.raises(RegistryError, match="'fifo' is that of one that ships"):
        register_strategy("fifo")(Nothing)  # type: ignore[type-var]
    with pytest.raises(RegistryError, match=r"'exact_match' is taken by turnwise\.envs\.rewards\.matching:Exact"):
        register_reward("exact_match")(Nothing)
    with pytest.raises(RegistryError, match=r"'a\.b' cannot be the name of the reward function"):
        register_reward("a.b")(Nothing)
