"""Weights through a file: what is written is what is read, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.engine.tiny_lm import make_model
from support.property_tests import examples
from turnwise.engine.vllm_side.turnwise_weight_file import checksum
from turnwise.engine.weights import WeightStream, read_weights, weights_directory, write_weights
from turnwise.errors import FormatError
from turnwise.inference import wire


def tensors() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        ("a", torch.randn(3, 4, generator=generator)),
        ("b", torch.randn(5, generator=generator).to(torch.bfloat16)),
        ("scalar", torch.tensor(2.5)),
        ("empty", torch.zeros(0, 3)),
        ("turned", torch.randn(4, 6, generator=generator).t()),
    ]


def test_a_stream_is_rounded_piece_by_piece_into_the_file(tmp_path: Path) -> None:
    wide = torch.randn(1500, 1000)
    described = {"wide": (torch.bfloat16, (1000, 1500)), "none": (torch.float32, (0, 3))}
    manifest = write_weights(
        WeightStream(described, iter([("wide", wide.t()), ("none", torch.zeros(0, 3))])), tmp_path, 1
    )
    assert torch.equal(read_weights(manifest)["wide"], wide.t().to(torch.bfloat16))
    assert manifest.tensors[0].checksum == checksum(wide.t().to(torch.bfloat16))


def test_written_weights_are_read_back(tmp_path):
    manifest = write_weights(iter(tensors()), tmp_path / "new" / "place", 7)
    assert manifest.version == 7
    loaded = read_weights(manifest)
    assert list(loaded) == [name for name, _ in tensors()]
    for name, tensor in tensors():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    assert [path.name for path in Path(manifest.path).parent.iterdir()] == [Path(manifest.path).name]


def test_the_manifest_crosses_the_wire(tmp_path):
    manifest = write_weights(tensors(), tmp_path, 3)
    assert wire.decode_manifest(wire.encode_manifest(manifest)) == manifest


def test_tied_tensors_are_written_once():
    model = make_model("qwen3")
    home = weights_directory("test")
    try:
        manifest = write_weights(model.state_dict().items(), home, 0)
        names = [entry.name for entry in manifest.tensors]
        assert "lm_head.weight" not in names
        assert "model.embed_tokens.weight" in names
    finally:
        for file in home.iterdir():
            file.unlink()
        home.rmdir()


def test_old_versions_go_and_the_newest_two_stay(tmp_path):
    (tmp_path / "mine.txt").write_text("stays")
    manifests = [write_weights(tensors(), tmp_path, version) for version in (1, 2, 3, 10)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mine.txt",
        "weights-00000003.safetensors",
        "weights-00000010.safetensors",
    ]
    read_weights(manifests[-1])
    with pytest.raises(FormatError, match=r"version 1 .*there is no file"):
        read_weights(manifests[0])
    write_weights(tensors(), tmp_path, 11, keep=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1


def test_a_version_that_is_mapped_never_changes(tmp_path):
    """A server uses them as its weights: neither a later version nor a removal may reach them."""
    mapped = read_weights(write_weights(tensors(), tmp_path, 1))
    for version in (2, 3, 4):
        write_weights([("a", torch.full((3, 4), float(version)))], tmp_path, version, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["weights-00000004.safetensors"]
    for name, tensor in tensors():
        assert torch.equal(mapped[name], tensor)
    mapped["b"].zero_()
    assert not read_weights(write_weights(tensors(), tmp_path, 5))["b"].eq(0).all()


def test_weights_of_the_version_before_are_not_written_again(tmp_path):
    first = write_weights(tensors(), tmp_path, 1)
    second = write_weights(tensors(), tmp_path, 2, previous=first)
    assert second == replace(first, version=2)
    assert second.same_weights(first)
    assert len(list(tmp_path.iterdir())) == 1
    read_weights(second)
    third = write_weights(tensors(), tmp_path, 3, previous=second)
    assert third.path == first.path


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), False),
        (torch.zeros(2, 3), torch.zeros(3, 2), False),
        (torch.zeros(5).bfloat16(), torch.zeros(5).bfloat16(), True),
    ],
)
def test_the_same_weights_are_those_with_the_same_bits(tmp_path, old, new, same):
    first = write_weights([("a", old)], tmp_path, 1)
    second = write_weights([("a", new)], tmp_path, 2, previous=first)
    assert (second.path == first.path) == second.same_weights(first) == same
    assert torch.equal(read_weights(second)["a"].nan_to_num(), new.nan_to_num())


def test_other_names_and_a_file_that_is_gone_or_changed_are_written_anew(tmp_path):
    first = write_weights([("a", torch.zeros(3))], tmp_path, 1)
    second = write_weights([("b", torch.zeros(3))], tmp_path, 2, previous=first)
    assert not second.same_weights(first)
    Path(second.path).unlink()
    third = write_weights([("b", torch.zeros(3))], tmp_path, 3, previous=second)
    read_weights(third)
    raw = bytearray(Path(third.path).read_bytes())
    raw[-1] ^= 1
    Path(third.path).write_bytes(raw)
    fourth = write_weights([("b", torch.zeros(3))], tmp_path, 4, previous=third)
    assert torch.equal(read_weights(fourth)["b"], torch.zeros(3))


def test_failed_write_leaves_no_file(tmp_path):
    with pytest.raises(FormatError, match=r"b is torch\.complex64, which safetensors cannot hold"):
        write_weights([("a", torch.zeros(3)), ("b", torch.zeros(3, dtype=torch.complex64))], tmp_path, 1)
    assert not list(tmp_path.iterdir())


def large() -> list[tuple[str, torch.Tensor]]:
    """Tensors of more than the 4 KiB that a checksum sums up at a time, their sizes no multiples of it."""
    generator = torch.Generator().manual_seed(2)
    return [("odd", torch.randn(2500, generator=generator).half()), ("long", torch.randn(3001, generator=generator))]


@settings(max_examples=examples(60), deadline=None)
@given(offset=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_any_flipped_bit_of_the_data_is_noticed(tmp_path_factory, offset, bit):
    home = tmp_path_factory.mktemp("flip")
    manifest = write_weights([*tensors(), *large()], home, 1)
    file = Path(manifest.path)
    raw = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(raw[:8], "little")
    raw[start + offset % (len(raw) - start)] ^= 1 << bit
    file.write_bytes(raw)
    with pytest.raises(FormatError, match=r"the checksum of .* differs"):
        read_weights(manifest)


def test_broken_files_and_manifests_are_named(tmp_path):
    manifest = write_weights(tensors(), tmp_path, 1)
    first, *rest = manifest.tensors
    cases = {
        r"the file lacks \['more'\]": replace(manifest, tensors=(*manifest.tensors, replace(first, name="more"))),
        r"has \['a'\] that the manifest": replace(manifest, tensors=tuple(rest)),
        r"a is float32 \[3, 4\] in the file, but float32 \[4, 3\]": replace(
            manifest, tensors=(replace(first, shape=(4, 3)), *rest)
        ),
        r"but float16 \[3, 4\]": replace(manifest, tensors=(replace(first, dtype="float16"), *rest)),
        r"names a tensor twice": replace(manifest, tensors=(first, *manifest.tensors)),
        r"checksum of a differs": replace(manifest, tensors=(replace(first, checksum="00"), *rest)),
    }
    for message, wrong in cases.items():
        with pytest.raises(FormatError, match=message):
            read_weights(wrong)
    file = Path(manifest.path)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(FormatError, match="cannot be read"):
        read_weights(manifest)


def test_no_tensors_and_duplicate_names_are_refused(tmp_path):
    with pytest.raises(FormatError, match="no tensors"):
        write_weights([], tmp_path, 1)
    with pytest.raises(FormatError, match="'a' occurs twice"):
        write_weights([("a", torch.zeros(1)), ("a", torch.ones(1))], tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_checksums_see_dtype_bits_and_order():
    one = torch.arange(6, dtype=torch.float32)
    assert checksum(one) == checksum(one.clone().view(2, 3))
    assert checksum(one.view(2, 3).t()) != checksum(one.view(2, 3))
    assert checksum(one) != checksum(one.to(torch.bfloat16))
    for size in (4096, 5000):
        many = torch.randn(size, generator=torch.Generator().manual_seed(size))
        exchanged = many.clone()
        exchanged[2], exchanged[600] = many[600], many[2]
        assert checksum(many) == checksum(many.clone())
        assert len({checksum(many), checksum(exchanged), checksum(many.roll(1024)), checksum(many[:-1])}) == 4


def test_a_version_that_is_written_again_keeps_its_file(tmp_path: Path) -> None:
    first = write_weights([("a", torch.ones(3))], tmp_path, 2)
    again = write_weights([("a", torch.ones(3))], tmp_path, 2, previous=first)
    assert torch.equal(read_weights(again)["a"], torch.ones(3))
