"""Objectives in docs/algorithms.md and in examples/objectives: what they say is what the code takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.doc_pages import blocks as blocks_of
from support.doc_pages import section
from turnwise.config import load_config
from turnwise.trainer.algorithms.config import DistillConfig, SelfDistillConfig
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.demonstrations import load_demonstrations

ROOT = Path(__file__).parents[3]
PAGE = section("algorithms.md", "Objectives beside reinforcement learning")
KINDS = {"rft": SFTConfig}


def blocks(kind: str) -> list[str]:
    return blocks_of(PAGE, kind)


def test_every_configuration_of_the_page_is_valid() -> None:
    sections = [yaml.safe_load(block) for block in blocks("yaml")]
    named = [config for config in sections if "name" in config]
    assert [config["name"] for config in named] == list(KINDS)
    for config in named:
        KINDS[config["name"]].model_validate(config)
    taught = []
    for config in (config for config in sections if "algorithm" in config):
        rollout = {"env": {"name": "lookup"}, **config.get("rollout", {})}
        rest = {"name": "n", "steps": 1, "policies": {"main": {"model": {"path": "m"}}}, "rollout": rollout}
        taught.append(type(TrainConfig.model_validate({**config, **rest}).algorithm.teacher))
    assert taught == [DistillConfig, SelfDistillConfig]


def test_rows_of_the_page_are_read(tmp_path: Path) -> None:
    lines = [line.strip() for line in PAGE.splitlines() if line.startswith('    {"')]
    tool = {"type": "function", "function": {"name": "team_of"}}
    rows = [line.replace("[...]", f"[{json.dumps(tool)}]") for line in lines]
    demonstrations = tmp_path / "demonstrations"
    demonstrations.write_text(rows[0])
    assert load_demonstrations(demonstrations)[0].tools[0].name == "team_of"
    assert len(rows) == 1


@pytest.mark.parametrize("name", ["rft", "distill"])
def test_the_examples_are_configurations(name: str) -> None:
    kinds: dict[str, Any] = {"rft": SFTConfig, "distill": TrainConfig}
    assert load_config(kinds[name], ROOT / "examples" / "objectives" / f"{name}.yaml").name.startswith("lookup-")
