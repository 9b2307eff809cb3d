"""Images on the wire: what is written can be read, also as vLLM writes it, and broken bytes are refused."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import FormatError, RequestRefused
from turnwise.model.media_wire import (
    FeaturesError,
    MediaEncoder,
    decode_features,
    decode_item,
    encode_item,
    features_digest,
)
from turnwise.types import Media

INPUTS = {
    "pixel_values": np.arange(24, dtype=np.float32).reshape(4, 6) / 7,
    "image_grid_thw": np.array([1, 2, 2], dtype=np.int64),
    "num_patches": np.asarray(3, dtype=np.int64),
}


class Fixed:
    """A processor with one answer."""

    kinds = frozenset({"image"})

    def features(self, kind: str, data: bytes) -> dict[str, np.ndarray]:
        return {name: np.asarray(array + len(data), dtype=array.dtype) for name, array in INPUTS.items()}


def test_model_inputs_come_back_bit_for_bit() -> None:
    decoded = decode_item(encode_item(INPUTS))
    assert list(decoded) == list(INPUTS)
    for name, array in INPUTS.items():
        assert decoded[name].dtype == array.dtype
        np.testing.assert_array_equal(decoded[name], array)


def test_the_shorter_forms_of_messagepack_are_read() -> None:
    """As msgspec writes them: small maps, lists, texts and integers are single bytes."""
    raw = np.array([1, 2, 3], dtype=np.int64).tobytes()
    data = b"\x93\xa5int64\x91\x03" + b"\xc7" + bytes([len(raw), 3]) + raw
    field = b"\x92\xa7batched\x81\xabkeep_on_cpu\xc3"
    packed = b"\x81\xaeimage_grid_thw\x82\xa4data" + data + b"\xa5field" + field
    decoded = decode_item(base64.b64encode(packed).decode())
    np.testing.assert_array_equal(decoded["image_grid_thw"], [1, 2, 3])


def test_images_are_in_order_of_their_places() -> None:
    media = [Media("image", b"ab", 9, 2), Media("image", b"a", 2, 4)]
    features = MediaEncoder(Fixed()).encode(media)
    assert features is not None
    processed = [Fixed().features("image", image.data) for image in (media[1], media[0])]
    assert features["mm_hashes"]["image"] == [features_digest(inputs) for inputs in processed]
    images = decode_features(features, 20)
    assert [(image.offset, image.length) for image in images] == [(2, 4), (9, 2)]
    np.testing.assert_array_equal(images[0].features["pixel_values"], INPUTS["pixel_values"] + 1)
    assert MediaEncoder(None).encode(()) is None


def test_a_client_without_a_processor_sends_no_images() -> None:
    with pytest.raises(RequestRefused, match="the prompt holds 1 media, but the model of this client takes text only"):
        MediaEncoder(None).encode([Media("image", b"", 0, 1)])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ([], "features must be an object"),
        ({}, "each with lists of 'image' only"),
        ({"mm_hashes": {"image": [1]}, "mm_placeholders": {"image": [{}]}, "kwargs_data": {"image": [""]}}, "no text"),
    ],
)
def test_malformed_features_are_refused_by_field(features: object, message: str) -> None:
    with pytest.raises(FeaturesError, match=message):
        decode_features(features, 10)


def test_images_that_overlap_are_refused() -> None:
    media = [Media("image", b"a", 2, 4), Media("image", b"b", 5, 4)]
    with pytest.raises(FeaturesError, match="the images at 2 and 5 overlap"):
        decode_features(MediaEncoder(Fixed()).encode(media), 20)


@pytest.mark.parametrize(
    ("change", "message"), [(("float32", "float16"), "has dtype 'float16'"), (("int64", "int32"), "has dtype 'int32'")]
)
def test_other_dtypes_are_refused(change: tuple[str, str], message: str) -> None:
    inputs = {name: array.astype(change[1]) if array.dtype == change[0] else array for name, array in INPUTS.items()}
    with pytest.raises(FormatError, match=message):
        decode_item(encode_item(inputs))


def test_a_shape_that_is_not_the_bytes_is_refused() -> None:
    raw = base64.b64decode(encode_item(INPUTS)).replace(b"\x92\x04\x06", b"\x92\x05\x06", 1)
    with pytest.raises(FormatError, match="which is not the size of float32"):
        decode_item(base64.b64encode(raw).decode())


@given(st.binary(max_size=200), st.integers(0, 150))
def test_broken_bytes_are_refused_and_nothing_else_happens(noise: bytes, at: int) -> None:
    packed = base64.b64decode(encode_item(INPUTS))
    for raw in (noise, packed[:at], packed[:at] + noise, packed + noise[:1] if noise else packed[:-1]):
        try:
            decoded = decode_item(base64.b64encode(raw).decode())
        except FormatError:
            continue
        assert all(isinstance(array, np.ndarray) for array in decoded.values())
