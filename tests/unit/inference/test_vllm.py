"""How vLLM is told to serve; what it then does is tested in ``tests/real``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from turnwise.config import load_config
from turnwise.errors import ConfigError, InferenceError, RequestRefused
from turnwise.inference.vllm import VLLMConfig, VLLMReplica
from turnwise.model.core import WeightManifest


def config(**changes: Any) -> VLLMConfig:
    return VLLMConfig.model_validate({"python": "/opt/vllm/bin/python", **changes})


def test_every_key_reaches_the_command_line_or_the_environment() -> None:
    def said(**changes: Any) -> tuple[list[str], dict[str, str]]:
        made = config(**changes)
        return made.command_line(Path("/models/m"), "m"), made.environment()

    plain_line, plain_environment = said()
    changed = {
        "dtype": "float32", "threads": 3, "max_seqs": 7, "max_context": 99, "max_batch_tokens": 77,
        "prefix_cache": False, "cpu_kv_gib": 9, "eager": True, "arguments": ["--seed=3"], "host": "::1", "port": 81,
        "log_level": "error",
    }  # fmt: skip
    for key, value in changed.items():
        line, environment = said(**{key: value})
        assert (line, environment) != (plain_line, plain_environment), key
    # The rest says with what and how long.
    assert set(VLLMConfig.model_fields) == {*changed, "python", "launch_timeout", "close_timeout"}


def test_what_training_needs_is_always_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    line = config().command_line(Path("/models/m"), "m")
    assert "--enable-scale-out" in line
    assert line[line.index("--worker-extension-cls") + 1] == "turnwise_vllm_worker.RolloutLogprobs"
    assert line[line.index("--generation-config") + 1] == "vllm"
    environment = config().environment()
    assert "PYTHONHOME" not in environment
    assert "VIRTUAL_ENV" not in environment
    # vLLM's Python sees two files of this package, and not the packages beside it.
    [side] = environment["PYTHONPATH"].split(os.pathsep)
    assert {file.name for file in Path(side).glob("turnwise*")} == {"turnwise_vllm_serve.py", "turnwise_vllm_worker.py"}


@pytest.mark.parametrize("argument", ["--port=1", "--logprobs-mode", "--worker_extension_cls=x.Y", "--model"])
def test_arguments_that_are_not_the_users_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)arguments.*{argument}.*or by training"):
        load_config(VLLMConfig, overrides=["python=/p", f"arguments=['{argument}']"])


async def test_a_missing_interpreter_is_named(tmp_path: Path) -> None:
    replica = VLLMReplica("m", config(python=tmp_path / "python"), log_file=tmp_path / "log")
    with pytest.raises(InferenceError, match=r"python is .*/python, which cannot be executed: name the interpreter"):
        await replica.launch()
    with pytest.raises(InferenceError, match="is not running"):
        await replica.resume()
    assert not await replica.health()
    with pytest.raises(RequestRefused, match="weights version 2"):
        await replica.update_weights(WeightManifest(2, "x"))
    await replica.close()
