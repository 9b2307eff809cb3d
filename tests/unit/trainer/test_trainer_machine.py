"""Models that this machine cannot train or serve: said with figures and a remedy, before a weight is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from turnwise.chat.model_dir import read_model_dir
from turnwise.engine.capacity import emulation_warning, machine_memory, model_size
from turnwise.engine.server import ServerSpec, serve
from turnwise.errors import ConfigError, InferenceError, RenderError
from turnwise.inference.config import InferenceConfig, ServeConfig
from turnwise.trainer.config.offline import SFTConfig
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.offline.sft import run_sft
from turnwise.trainer.run.machine import check_machine

KEY = "policies.main.model"


def model_dir(path: Path, *shapes: tuple[int, ...], dtype: str = "BF16") -> Path:
    """Write a model directory whose safetensors files have headers and no data: only those may be read."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    for number, shape in enumerate(shapes):
        header = json.dumps(
            {
                "__metadata__": {"format": "pt"},
                f"weight.{number}": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]},
            }
        ).encode()
        (path / f"model-{number}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return path


def policy(path: Path, **model: object) -> PolicyConfig:
    return PolicyConfig.model_validate({"model": {"path": path, "device": "cpu", **model}})


def test_the_size_of_a_model_is_that_of_all_its_files(tmp_path: Path) -> None:
    size = model_size(model_dir(tmp_path / "model", (1000, 300), (700, 1000)))
    assert size is not None
    assert (size.parameters, size.dtype) == (1_000_000, "BF16")
    assert [size.served(dtype) for dtype in ("auto", "bfloat16", "float32")] == [2_000_000, 2_000_000, 4_000_000]
    (tmp_path / "model" / "model-0.safetensors").write_bytes(b"no header")
    assert model_size(tmp_path / "model") is None


def test_context_in_which_servers_use_other_rotary_embeddings_is_refused(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "model", (10, 10))
    rope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    settings = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": rope}
    (path / "config.json").write_text(json.dumps(settings))
    for context in (None, 4097):
        with pytest.raises(
            ConfigError, match=rf"max_context is {context}, but .* type longrope: .* set it to at most 4096"
        ):
            check_machine(policy(path), InferenceConfig(engine="vllm", max_context=context, device="cpu"), key=KEY)
    check_machine(policy(path), InferenceConfig(engine="vllm", max_context=4096, device="cpu"), key=KEY)
    check_machine(policy(path), InferenceConfig(device="cpu"), key=KEY)


def test_model_that_is_too_large_is_refused_with_its_size(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "huge", (10_000_000, 1_000_000))
    servers = InferenceConfig(replicas=2, dtype="float32", device="cpu")
    with pytest.raises(ConfigError) as raised:
        check_machine(policy(path), servers, key=KEY)
    text = str(raised.value)
    assert text.startswith(f"{KEY}.path is {path}, a model of 1e+04 billion parameters: it needs at least 240,000.0 GB")
    assert "moments 160,000.0 GB, the weights of 2 servers 80,000.0 GB" in text
    assert f"this machine has {machine_memory() / 1e9:,.1f} GB" in text
    for remedy in ("smaller model", f"{KEY}.lora.rank: 16", "inference.dtype: bfloat16", "lower inference.replicas"):
        assert remedy in text
    with pytest.raises(
        ConfigError, match=r"frozen weights in float32 40,000\.0 GB, the weights of 2 servers"
    ) as raised:
        check_machine(policy(path, lora={"rank": 4}), servers, key=KEY)
    assert "lora" not in str(raised.value)


def test_ranks_share_the_memory_of_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_dir(tmp_path / "huge", (10_000_000, 1_000_000))
    options = {"ranks": 4}
    config = {"model": {"path": path, "device": "cpu"}, "engine": "fsdp", "engine_options": options}
    with pytest.raises(ConfigError, match=r"at least 160,000\.0 GB .* moments 160,000\.0 GB\)"):
        check_machine(PolicyConfig.model_validate(config), key=KEY)
    with pytest.raises(ConfigError, match=r"moments 100,000\.0 GB\)"):
        check_machine(PolicyConfig.model_validate({**config, "optim": {"name": "adamw_int8"}}), key=KEY)
    # On GPUs each has its part of it.
    monkeypatch.setattr("turnwise.trainer.run.machine.require_device", lambda *_: torch.device("cuda"))
    monkeypatch.setattr("turnwise.engine.capacity.device_memory", lambda device: (int(39_999e9), f"the {device.type}"))
    with pytest.raises(ConfigError, match=r"a rank's share of weights, .* 40,000\.0 GB\), and the cuda has 39,999\.0"):
        check_machine(PolicyConfig.model_validate(config), key=KEY)
    options["cpu_offload"] = True
    with pytest.raises(ConfigError, match=r"the ranks' weights, .* 160,000\.0 GB\), and the cpu has"):
        check_machine(PolicyConfig.model_validate(config), key=KEY)


def test_offline_training_and_server_refuse_a_model_that_is_too_large(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "huge", (10_000_000, 1_000_000))
    config = {
        "name": "sft",
        "runs": tmp_path,
        "data": tmp_path / "none.jsonl",
        "model": {"path": path, "device": "cpu"},
    }
    with pytest.raises(ConfigError, match=r"model\.path is .*huge, a model of .* needs at least 160,000\.0 GB"):
        run_sft(SFTConfig.model_validate(config))
    spec = ServerSpec(model=path, config=ServeConfig(device="cpu"))
    with pytest.raises(InferenceError, match=r"model is .*huge.*the server's weights 20,000\.0 GB.*a smaller model"):
        serve(spec)


def test_server_on_a_missing_device_is_a_config_error_by_key(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "small", (10, 10), dtype="F32")
    message = r"inference\.device is 'cuda:99', which is not available here \(auto picks one\)"
    with pytest.raises(ConfigError, match=message):
        check_machine(policy(path), InferenceConfig(device="cuda:99"), key=KEY)
    with pytest.raises(InferenceError, match=message):
        serve(ServerSpec(model=path, config=ServeConfig(device="cuda:99")))


def test_a_model_that_fits_passes_without_a_word(tmp_path: Path) -> None:
    path = model_dir(tmp_path / "small", (10, 10), dtype="F32")
    assert check_machine(policy(path), InferenceConfig(device="cpu"), key=KEY) == []


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_folder_of_gguf_alone_names_the_conversion(tmp_path: Path, with_weights: bool) -> None:
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.Q4_1.gguf").write_bytes(b"GGUF")
    if with_weights:
        # Many repositories of GGUF files hold a tokenizer besides.
        (path / "tokenizer.json").write_text("{}")
    remedy = r"holds its weights as GGUF only.*convert it once with python .*conversion\.py .*model DIR, and name DIR"
    with pytest.raises(ConfigError, match=rf"{KEY}\.path is .*model, which {remedy}"):
        check_machine(policy(path), InferenceConfig(), key=KEY)
    with pytest.raises(RenderError, match=remedy):
        read_model_dir(path)


def test_gguf_file_as_model_path_names_the_conversion(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model\.gguf, which holds its weights as GGUF only"):
        check_machine(policy(file), InferenceConfig(), key=KEY)


def test_an_emulated_data_type_is_a_warning_with_key_value_and_remedy(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2\n")
    half, full = (model_size(model_dir(tmp_path / dtype, (2, 2), dtype=dtype)) for dtype in ("BF16", "F32"))
    warning = emulation_warning("inference.dtype", "auto", half, cpuinfo)
    assert warning is not None
    assert warning.startswith("inference.dtype is auto, the checkpoint's bfloat16, which this processor emulates")
    assert "set inference.dtype: float32" in warning
    assert emulation_warning(f"{KEY}.compute_dtype", "bfloat16", full, cpuinfo) is not None
    for dtype, size in (("auto", full), ("float32", half), ("auto", None)):
        assert emulation_warning("inference.dtype", dtype, size, cpuinfo) is None
    cpuinfo.write_text("flags\t\t: fpu avx2 avx512_bf16\n")
    assert emulation_warning("inference.dtype", "bfloat16", half, cpuinfo) is None
