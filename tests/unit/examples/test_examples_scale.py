"""The configurations for 1, 8 and 64 GPUs: each passes a dry run for its cluster, with no weights anywhere."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from support.crossed import crossed
from turnwise.config import load_config
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.run.dry_run import dry_run
from turnwise.trainer.scale.cluster import PlanConfig
from turnwise.trainer.scale.plan import Plan

HERE = Path(__file__).parents[3] / "examples" / "scale"
LAYOUTS = {
    "gpus-1.yaml": 1,
    "gpus-8-colocated.yaml": 8,
    "gpus-8-separate.yaml": 8,
    "gpus-64-colocated.yaml": 64,
    "gpus-64-separate.yaml": 64,
}


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_directory", HERE / "model_directory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(program: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B"):
        program.write(name, folder / name)
    return folder


def test_every_gpus_file_passes_a_dry_run() -> None:
    assert {file.name for file in HERE.glob("gpus-*.yaml")} == set(LAYOUTS)


@pytest.mark.parametrize(("algorithm", "layout"), crossed(["grpo", "ppo"], list(LAYOUTS)))
async def test_a_dry_run_for_the_cluster_passes(models: Path, tmp_path: Path, layout: str, algorithm: str) -> None:
    files = [HERE / "train.yaml", HERE / layout, *([HERE / "ppo.yaml"] if algorithm == "ppo" else [])]
    name = load_config(TrainConfig, files).policy.model.path.name
    overrides = [f"runs={tmp_path}/runs", f"policies.main.model.path={models / name}", "eval.limit=2"]
    overrides += ["policies.main.critic.path=" + str(models / "Qwen3-0.6B")] if algorithm == "ppo" else []
    config = load_config(TrainConfig, files, overrides)
    cluster = load_config(PlanConfig, HERE / "clusters" / f"h100x{LAYOUTS[layout]}.yaml").cluster
    report = await dry_run(config, cluster=cluster)
    assert [check for check in report.checks if check.outcome != "ok"] == []
    memory = next(check.finding for check in report.checks if check.name == "memory")
    assert "72.0 GB of each are usable" in memory
    plan = Plan(config, cluster)
    (placement,) = (policy.placement for policy in plan.policies.values())
    assert placement.serving.isdisjoint(placement.trainer) == layout.endswith("separate.yaml")
    assert len(plan.devices) == LAYOUTS[layout]
    assert not (tmp_path / "runs").exists()


def test_model_directories_have_the_published_numbers_of_parameters(program: ModuleType, models: Path) -> None:
    # As the model cards say.
    published = {"Qwen3-0.6B": 0.6, "Qwen3-1.7B": 1.7, "Qwen3-8B": 8.2, "Qwen3-32B": 32.8}
    config = load_config(TrainConfig, HERE / "train.yaml")
    cluster = load_config(PlanConfig, HERE / "clusters" / "h100x64.yaml").cluster
    for name, billions in published.items():
        path = [f"policies.main.model.path={models / name}"]
        shape = Plan(load_config(TrainConfig, HERE / "train.yaml", path), cluster).policies["main"].shape
        assert round(shape.parameters / 1e9, 1) == billions
    assert config.policy.model.path == HERE / "models" / "Qwen3-8B"


def test_kuberay_and_slurm_files_describe_64_gpus() -> None:
    (ray,) = yaml.safe_load_all((HERE / "clusters" / "kuberay.yaml").read_text())
    (group,) = ray["spec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"]) == 64
    volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    subprocess.run(["bash", "-n", str(HERE / "clusters" / "slurm.sh")], check=True)
