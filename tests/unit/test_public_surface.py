"""The dump of what must not change by accident: .ci/public_surface.py."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

FILE = Path(__file__).parents[2] / ".ci" / "public_surface.py"


@pytest.fixture(scope="module")
def surface() -> ModuleType:
    spec = importlib.util.spec_from_file_location("public_surface", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_differences_are_renames_removals_additions_and_changes(surface: ModuleType) -> None:
    old = {
        "errors": {"A": ["E"], "B": ["E"]},
        "names": {"Old": {"class": [], "fields": {"x": "int"}}, "f": "def (x)", "Gone": {"class": []}},
        "files": ["a.json", "b.json"],
    }
    new = {
        "errors": {"A": ["E"], "B": ["E"]},
        "names": {"New": {"class": [], "fields": {"x": "int"}}, "f": "def (y)"},
        "files": ["a.json", "c.json"],
    }
    assert surface.differences(old, new) == [
        "names: Old -> New",
        "- names / Gone / class",
        "! names / f: 'def (x)' -> 'def (y)'",
        '- files / "b.json"',
        '+ files / "c.json"',
    ]
    assert surface.differences(old, old) == []


def test_modules_are_no_part_of_a_name(surface: ModuleType) -> None:
    assert surface.plain("turnwise.trainer.config.train.TrainConfig | None") == "TrainConfig | None"
    assert surface.plain("turnwise.envs.basic.lookup:LookupEnv") == "LookupEnv"
    assert surface.plain("<function f at 0x7f00>") == "<function f>"
    assert surface.plain("Check(func=<function f.<locals>.<lambda> at 0x7f00>)") == "Check(func)"


def test_commands_are_those_of_the_application_and_its_groups(surface: ModuleType) -> None:
    commands = surface.commands()
    assert {"", "train", "report", "envs", "envs show"} <= commands.keys()
    assert commands["envs show"]["--tasks -t"]["help"]


def test_registry_that_is_not_found_raises(surface: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from turnwise.trainer.algorithms.registry import ClassRegistry

    module = SimpleNamespace(
        _AGENTS={"react": "a:React"}, ENGINES=ClassRegistry(object, "engine", "engine", {"torch": "a:T"})
    )
    monkeypatch.setattr(surface, "REGISTRIES", {"agents": ("react",), "engines": ("torch",)})
    assert surface.registries({"turnwise.a": module}) == {"agents": {"react": "a:React"}, "engines": {"torch": "a:T"}}
    monkeypatch.setattr(surface, "REGISTRIES", {"agents": ("react", "single_turn")})
    with pytest.raises(LookupError, match="no registry of agents holds react, single_turn"):
        surface.registries({"turnwise.a": module})


def test_shape_of_a_file_of_lines(surface: ModuleType, tmp_path: Path) -> None:
    lines = [{"kind": "train", "step": 3, "tokens": [1, 2.5]}, {"kind": "eval", "ids": {"0a1b2c3d4e": None}}]
    (tmp_path / "run-17").mkdir()
    (tmp_path / "run-17" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert surface.run_files(tmp_path) == {
        "run-N/metrics.jsonl": {
            "kind=train": ["object"],
            "kind=train.kind": ["str"],
            "kind=train.step": ["number"],
            "kind=train.tokens": ["list"],
            "kind=train.tokens[]": ["number"],
            "kind=eval": ["object"],
            "kind=eval.kind": ["str"],
            "kind=eval.ids": ["object"],
            "kind=eval.ids.ID": ["NoneType"],
        }
    }


def test_keys_of_a_configuration_are_named_by_their_path(surface: ModuleType) -> None:
    from turnwise.trainer.config.train import TrainConfig

    keys = dict(surface.config_keys(TrainConfig, ""))
    assert keys["steps"] != keys["seed"]
    assert {"rollout.env.name", "policies.*.model.path", "batch.groups", "loggers[].name"} <= keys.keys()
    assert "required" in keys["name"]
