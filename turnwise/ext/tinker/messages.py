"""The protobuf messages of the protocol: their schema, and forward and backward passes and samples read and written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from turnwise.errors import FormatError, requires_extra
from turnwise.types import Completion, TokenIds

T = TypeVar("T")

VERSION: Final = "0.38"
"""The SDK's version whose messages these are."""
_FLOAT32, _INT64 = 1, 2
_STOP, _LENGTH = 0, 1
_TYPES: Final[Mapping[int, np.dtype[Any]]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8")}


@dataclass(frozen=True, slots=True)
class Datum:
    """A row of a forward and backward pass.

    Attributes:
        tokens: int32 of shape [T], the model's input.
        inputs: What the loss reads, by name.
    """

    tokens: TokenIds
    inputs: Mapping[str, npt.NDArray[np.float32] | npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A request of a forward pass, and of a backward pass unless ``forward_only``."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


@cache
def message_class(name: str) -> Any:
    """Return the class of a message of ``schema.json``. Raises MissingExtraError without protobuf."""
    with requires_extra("protobuf", "tinker", "Tinker's API"):
        from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
    text = (files(__package__) / "schema.json").read_text(encoding="utf-8")
    schema = json_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(schema)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{schema.package}.{name}"))


def read_fields(kind: type[T], fields: Any, where: str) -> T:
    """Return the settings in a part of a request. Raises FormatError, which names the field."""
    try:
        return kind(**dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, (where, *first["loc"])))
        raise FormatError(f"{field} is {first['input']!r}: {first['msg']}") from error


def read_pass(body: bytes) -> PassRequest:
    """Read the request of a forward and backward pass.

    Raises:
        FormatError: The body is no such message, or an array does not have the type or the shape that it names.
    """
    message = message_class("ForwardBackwardRequest")()
    try:
        message.ParseFromString(body)
    except Exception as error:  # protobuf's implementations raise different classes
        raise FormatError(
            f"the body of {len(body)} bytes is no ForwardBackwardRequest of protobuf ({error}): send what the SDK of "
            f"{VERSION} sends"
        ) from error
    config: dict[str, float | str] = dict(message.loss_fn_config)
    config |= {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }
    data = [
        Datum(
            _read_tokens(datum.model_input, f"data[{index}].model_input"),
            {name: _read_tensor(one, f"data[{index}].{name}") for name, one in sorted(datum.loss_fn_inputs.items())},
        )
        for index, datum in enumerate(message.data)
    ]
    return PassRequest(message.model_id, message.seq_id, data, message.loss_fn, config, message.forward_only)


def _read_tokens(chunks: Any, where: str) -> TokenIds:
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise FormatError(
                f"{where} has a chunk of {kind or 'no kind'}: send chunks of encoded_text, as ids of text"
            )
        parts.append(_read_array(chunk.encoded_text.tokens, np.dtype("<i4"), where))
    return np.concatenate([np.zeros(0, np.int32), *parts])


def _read_tensor(tensor: Any, where: str) -> Any:
    dtype = _TYPES.get(tensor.dtype)
    if dtype is None:
        raise FormatError(f"{where} has dtype {tensor.dtype}: send FLOAT32 ({_FLOAT32}) or INT64 ({_INT64})")
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") != "sparse_csr":
        values = _read_array(tensor.dense, dtype, where)
        if shape not in ((), values.shape):
            raise FormatError(
                f"{where} has shape {shape} and {len(values)} values: send a vector, a value for each token"
            )
        return values
    raise FormatError(f"{where} is sparse, of shape {shape}, as for several targets a token: send a dense vector")


def _read_array(data: bytes, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise FormatError(f"{where} has {len(data)} bytes, which are no whole number of {dtype.name}")
    return np.frombuffer(data, dtype)


def write_pass(logprobs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return the result of a forward and backward pass: log-probabilities by datum, metrics as ``name:reduction``."""
    message = message_class("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord", metrics=metrics)
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    tensor = record.fields["logprobs"]
    tensor.data = b"".join(one.astype("<f4").tobytes() for one in logprobs)
    tensor.offsets = np.cumsum([0, *(4 * len(one) for one in logprobs)], dtype="<i8").tobytes()
    tensor.dtype = _FLOAT32
    data: bytes = message.SerializeToString(deterministic=True)
    return data


def write_samples(completions: Sequence[Completion], prompt_logprobs: npt.NDArray[np.float32] | None = None) -> bytes:
    """Return the result of sampling; an id of the prompt without a log-probability, such as the first, has NaN."""
    message = message_class("SampleResponse")()
    for completion in completions:
        message.sequences.add(
            stop_reason=_STOP if completion.finish_reason == "stop" else _LENGTH,
            tokens=completion.token_ids.astype("<i4").tobytes(),
            logprobs=completion.logprobs.astype("<f4").tobytes(),
        )
    if prompt_logprobs is not None:
        message.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    data: bytes = message.SerializeToString(deterministic=True)
    return data
