"""Media processors: placements and model inputs against those of transformers, caching, and images that are refused."""

from __future__ import annotations

import io
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.engine.tiny_vlm import FAMILIES, SIZES, image, transformers_processor, vision_model
from turnwise.chat import processor as processors
from turnwise.chat.model_dir import read_model_dir
from turnwise.chat.processor import ImageProcessor, decode_image, load_processor
from turnwise.chat.template import ChatTemplate
from turnwise.errors import RenderError

TEXTS = ("Look: ", "\n\nand", " \n", "red")


def placed_chat(directory: Path, images: list[bytes]) -> tuple[list[int], str]:
    """Return the ids of a chat with markers replaced as a renderer does, and its text with markers."""
    files, processor = read_model_dir(directory), load_processor(directory)
    assert processor is not None
    parts = []
    for number in range(len(images)):
        parts += [{"type": "text", "text": TEXTS[number % len(TEXTS)]}, {"type": "image"}]
    chat = ChatTemplate(str(files.template))
    text = chat.render([{"role": "user", "content": [*parts, {"type": "text", "text": TEXTS[1]}]}], [], generate=True)
    marker = processor.marker("image")
    ids: list[int] = []
    for number, piece in enumerate(text.split(marker)):
        if number:
            ids += processor.place("image", images[number - 1]).ids.tolist()
        ids += files.tokenizer.encode(piece, add_special_tokens=False).ids
    return ids, text


@pytest.mark.parametrize("family", FAMILIES)
def test_placement_and_model_inputs_are_those_of_transformers(family: str) -> None:
    directory = vision_model(family)
    images = [image(*size, seed) for seed, size in enumerate(SIZES)]
    ids, text = placed_chat(directory, images)
    opened = [Image.open(io.BytesIO(data)) for data in images]
    expected = transformers_processor(directory)(text=[text], images=opened, return_tensors="np")
    assert ids == expected["input_ids"][0].tolist()
    processor = load_processor(directory)
    assert processor is not None
    features = [processor.features("image", data) for data in images]
    for name in features[0].keys() - {"num_patches"}:
        stack = np.stack if name == "image_grid_thw" else np.concatenate
        together = stack([inputs[name] for inputs in features])
        np.testing.assert_array_equal(together, expected[name].reshape(together.shape))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_offset_and_length_span_the_placeholders(family: str, size: tuple[int, int]) -> None:
    directory = vision_model(family)
    processor = load_processor(directory)
    assert processor is not None
    placed = processor.place("image", image(*size))
    placeholder = read_model_dir(directory).tokenizer.get_vocab()[processor.marker("image")]
    positions = np.flatnonzero(placed.ids == placeholder)
    assert positions[0] == placed.offset
    assert positions[-1] == placed.offset + placed.length - 1
    assert placed.ids.dtype == np.int32


def fresh(family: str = "qwen2_5_vl", room: int = 1 << 30) -> ImageProcessor:
    loaded = load_processor(vision_model(family))
    assert isinstance(loaded, ImageProcessor)
    return ImageProcessor(family, loaded._family, vision_model(family), cache_bytes=room)


def test_an_image_is_processed_once_whoever_asks() -> None:
    processor, data = fresh(), image(64, 40)

    def use() -> None:
        processor.place("image", data)
        processor.features("image", bytes(bytearray(data)))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert processor.processed == 1
    assert load_processor(vision_model()) is load_processor(str(vision_model()))


def test_feature_cache_is_bounded_in_bytes() -> None:
    images = [image(64, 40, seed) for seed in range(4)]
    one = sum(array.nbytes for array in fresh().features("image", images[0]).values())
    processor = fresh(room=2 * one)
    for data in images:
        processor.place("image", data)
    assert processor.processed == 4
    processor.place("image", images[0])
    assert processor.processed == 4
    processor.features("image", images[3])
    assert processor.processed == 4
    processor.features("image", images[0])
    assert processor.processed == 5


def test_model_inputs_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        fresh().features("image", image(20, 20))["pixel_values"][0] = 0


def test_transparency_palettes_and_orientation_are_resolved() -> None:
    assert decode_image(image(8, 8, mode="RGBA")).mode == "RGB"
    assert decode_image(image(8, 8, kind="GIF")).mode == "RGB"
    turned = Image.new("RGB", (8, 4))
    exif = turned.getexif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    turned.save(buffer, "JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).size == (4, 8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "of 0 bytes, .* cannot be read"),
        (b"hello, this is text", "begin with b'hello, this ', cannot be read .* as one of PNG"),
        (image(64, 64)[:-200], "cannot be read"),
    ],
)
def test_broken_image_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        fresh().place("image", data)


def test_too_large_image_is_refused_before_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "MAX_PIXELS", 100)
    with pytest.raises(RenderError, match="20 x 20 pixels is too large: at most 100 pixels"):
        fresh().place("image", image(20, 20))


def test_a_model_of_text_has_no_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert load_processor(tmp_path) is None


def test_another_model_in_the_same_place_has_its_own_processor(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    assert load_processor(directory) is None
    processors = []
    for family in ("smolvlm", "qwen2_5_vl"):
        shutil.copytree(vision_model(family), directory)
        processors.append(load_processor(directory))
        shutil.rmtree(directory)
    assert [processor and processor._name for processor in processors] == ["smolvlm", "qwen2_5_vl"]
    (tmp_path / "file.gguf").write_bytes(b"")
    assert load_processor(tmp_path / "file.gguf") is None


def test_a_vision_model_without_its_settings_takes_text_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "smolvlm"}')
    assert load_processor(tmp_path) is None
