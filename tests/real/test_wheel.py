"""What a user installs: built with ``python -m build``, it runs the quickstart where nothing else is installed."""

from __future__ import annotations

import asyncio
import json
import resource
import shutil
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from aiohttp import web
from packaging.requirements import Requirement

import turnwise
from support.distribution import ROOT, WHEELHOUSE, EmptyEnvironment, copy_sources
from support.gateway.hosted_endpoint import provider

pytestmark = [
    pytest.mark.real,
    pytest.mark.alike("doors", "wheel"),
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not WHEELHOUSE.exists(), reason=f"{WHEELHOUSE} is missing: make real-installs"),
]

QUICKSTART_S = 300.0
USES = {
    "parquet": "pyarrow.parquet",
    "tables": "pandas",
    "mcp": "turnwise.ext.frameworks.mcp_server",
    "rewards": "math_verify",
    "search": "bm25s",
    "langgraph": "turnwise.agents.langgraph",
    "docker": "turnwise.sandboxes.docker.engine",
    "e2b": "turnwise.sandboxes.e2b",
    "vision": "PIL",
    "gym-envs": "pygame",
    "smollm": "gguf",
    "lora": "peft",
    "tinker": "google.protobuf",
    "tensorboard": "tensorboard",
    "datasets": "datasets",
}
"""A module that needs each extra; those whose packages bring others' come last."""
ELSEWHERE = {"serve", "train", "nf4", "wandb", "trackio", "mlflow", "ray", "docs", "bench", "dev"}
"""Extras that another test or target installs."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as a release is: a source distribution, and the wheel from that, with a build backend of its own."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    source.mkdir()
    copy_sources(source)
    builder = EmptyEnvironment(Path(sys.prefix), folder)
    builder.succeed("python", "-m", "build", "--outdir", str(folder / "dist"), str(source))
    (built,) = (folder / "dist").glob("*.whl")
    assert (folder / "dist" / f"turnwise_rl-{turnwise.__version__}.tar.gz").exists()
    return built


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> EmptyEnvironment:
    """The wheel without any extra, and the file of the quickstart."""
    environment = EmptyEnvironment.create(tmp_path_factory.mktemp("core") / "venv")
    environment.install(str(wheel))
    shutil.copy(ROOT / "examples" / "hello" / "env.py", environment.home)
    return environment


async def dice_player(request: web.Request) -> web.StreamResponse:
    """Answer as a model that looks at both dice, and then adds."""
    if request.method == "GET":
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
    messages = (await request.json())["messages"]
    dice = [int(message["content"]) for message in messages if message["role"] == "tool"]
    if dice:
        message = {"role": "assistant", "content": str(sum(dice))}
    else:
        calls = [{"name": "look", "arguments": json.dumps({"die": die})} for die in (1, 2)]
        tool_calls = [{"id": f"c{n}", "type": "function", "function": call} for n, call in enumerate(calls)]
        message = {"role": "assistant", "content": None, "tool_calls": tool_calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if not dice else "stop"}
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    return web.json_response(
        {"id": "x", "object": "chat.completion", "model": "scripted", "choices": [choice], "usage": usage}
    )


def test_wheel_from_the_source_distribution_has_every_file_of_the_package(wheel: Path) -> None:
    kinds = {".py", ".pyi", ".in", ".jinja", ".sh", ".toml", ".typed"}
    files = [file for file in (ROOT / "turnwise").rglob("*") if "__pycache__" not in file.parts and file.is_file()]
    data = {"assets", "shipped", "project_files"}
    expected = {str(file.relative_to(ROOT)) for file in files if file.suffix in kinds or data & set(file.parts)}
    with zipfile.ZipFile(wheel) as archive:
        assert expected - set(archive.namelist()) == set()


def test_core_alone_imports_no_torch_and_tells_how_long_an_import_takes(core: EmptyEnvironment) -> None:
    names = core.succeed("python", "-m", "pip", "list", "--format", "json")
    installed = {row["name"] for row in json.loads(names)}
    assert "turnwise-rl" in installed
    assert not installed & {"torch", "transformers", "pyarrow", "mcp", "ray", "datasets"}
    loaded = core.succeed("python", "-c", "import sys, turnwise; print(*sorted(sys.modules))").split()
    assert not {"torch", "aiohttp", "gymnasium", "rich"} & set(loaded)
    timed = (core.run("python", "-X", "importtime", "-c", "import turnwise").stderr for _ in range(7))
    microseconds = [int(text.splitlines()[-1].split("|")[1]) for text in timed]
    print(f"import turnwise: best of 7 {min(microseconds) / 1000:.1f} ms (all: {microseconds})")


async def test_core_alone_checks_and_evaluates_the_quickstart(core: EmptyEnvironment) -> None:
    checked = json.loads(core.succeed("turnwise", "check-env", "env.py:Dice", "--json"))
    assert checked["ok"], checked
    async with provider(dice_player) as endpoint:
        command = ["env.py", "eval", "--url", f"{endpoint.url}/v1", "hosted.model=scripted", "--limit", "20"]
        await asyncio.to_thread(core.succeed, "python", *command, "--out", "evaluated")
    summary = json.loads((core.home / "evaluated" / "summary.json").read_text())
    assert summary["sampled"]["success"]["mean"] == 1.0
    assert summary["sampled"]["tasks"] == 20
    trained = core.run("turnwise", "train", "--env", "env.py:Dice", "--model", ".", "steps=1")
    assert trained.returncode == 1
    assert "pip install 'turnwise-rl[" in trained.stderr, trained.stderr


def test_quickstart_trains_ten_steps_within_five_minutes_of_one_core(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # CPU seconds: how long it takes on the clock says how busy the machine is.
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = EmptyEnvironment.create(tmp_path_factory.mktemp("train") / "venv")
    environment.install(f"{wheel}[train]")
    shutil.copy(ROOT / "examples" / "hello" / "env.py", environment.home)
    environment.succeed("turnwise", "check-env", "env.py:Dice")
    environment.succeed("python", "env.py", "make-model", "models/first")
    environment.succeed("python", "env.py", "train", "models/first/train.yaml", "steps=10")
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    rows = (environment.home / "runs" / "dice" / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(row).get("step", 0) for row in rows) == 10
    seconds = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    print(f"from an empty environment to ten steps: {seconds:.0f} CPU seconds")
    assert seconds < QUICKSTART_S


def test_each_extra_installs_and_is_imported(wheel: Path, core: EmptyEnvironment) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == set(USES) | ELSEWHERE
    for extra, module in USES.items():
        before = core.run("python", "-c", f"import {module}")
        assert before.returncode != 0, f"{module} is there before the extra {extra} is installed"
        if module.startswith("turnwise"):
            assert f"pip install 'turnwise-rl[{extra}]'" in before.stderr
        core.install(f"{wheel}[{extra}]")
        core.succeed("python", "-c", f"import {module}")


@pytest.mark.parametrize("extra", ["wandb", "trackio", "mlflow", "ray"])
def test_versions_that_an_extra_asks_for_are_those_that_are_tested(extra: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for text in extras[extra]:
        requirement = Requirement(text)
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            pytest.skip(f"{requirement.name} is not installed: make test-real installs it")
        assert requirement.specifier.contains(installed), text
