"""The protocol's messages of protobuf, against bytes that the SDK 0.38.0 wrote and reads."""

from __future__ import annotations

import numpy as np
import pytest

from turnwise.errors import FormatError
from turnwise.ext.tinker.messages import read_pass, write_pass, write_samples
from turnwise.types import Completion

# tinker.proto.request_conv.forward_backward_request_to_proto of one datum: inputs 5 6, targets 6 7, logprobs 0 -1.5,
# advantages 0 2, loss ppo with clip_low_threshold .5, forward_only.
REQUEST = bytes.fromhex(
    "0a016d10031a740a0c0a0a0a080500000006000000121d0a0a616476616e7461676573120f0a0800000000000000401801220102121b0a086c"
    "6f6770726f6273120f0a08000000000000c0bf180122010212280a0d7461726765745f746f6b656e7312170a10060000000000000007000000"
    "000000001802220102220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411000000000000e03f30013a1f0a12636c69705f6c"
    "6f775f7468726573686f6c64120909000000000000e03f"
)
# What tinker.proto.response_conv reads as logprobs [-1, -2] and [-3], and the metric loss:sum 1.5.
PASS = (
    "0a0b41727261795265636f726412470a0b41727261795265636f726412360a086c6f6770726f6273122a0a0c000080bf000000c0000040c012"
    "18000000000000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d11000000000000f83f"
)
# As [4, 9] with logprobs [-.5, -.25] (stop), [4] with [-.5] (length), and prompt logprobs [None, -1].
SAMPLES = "0a14120804000000090000001a08000000bf000080be0a0e08011204040000001a04000000bf12080000c07f000080bf"


def test_request_of_the_sdk_is_read() -> None:
    request = read_pass(REQUEST)
    assert (request.model_id, request.seq_id, request.loss, request.forward_only) == ("m", 3, "ppo", True)
    assert request.config == {"clip_low_threshold": 0.5}
    (datum,) = request.data
    assert datum.tokens.tolist() == [5, 6]
    values = {name: array.tolist() for name, array in datum.inputs.items()}
    assert values == {"advantages": [0, 2], "logprobs": [0, -1.5], "target_tokens": [6, 7]}


def test_result_of_a_pass_has_the_bytes_that_the_sdk_reads() -> None:
    logprobs = [np.array([-1, -2], np.float32), np.array([-3], np.float32)]
    assert write_pass(logprobs, {"loss:sum": 1.5}).hex() == PASS


def test_samples_have_the_bytes_that_the_sdk_reads() -> None:
    stopped = Completion(np.array([4, 9], np.int32), np.array([-0.5, -0.25], np.float32), "stop", ())
    cut = Completion(np.array([4], np.int32), np.array([-0.5], np.float32), "length", ())
    assert write_samples([stopped, cut], np.array([np.nan, -1], np.float32)).hex() == SAMPLES


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "no ForwardBackwardRequest of protobuf"),
        (REQUEST[:-3], "no ForwardBackwardRequest of protobuf"),
        (REQUEST.replace(b"\x18\x02\x22\x01\x02", b"\x18\x03\x22\x01\x02"), "data[0].target_tokens has dtype 3"),
        (
            REQUEST.replace(b"\x18\x02\x22\x01\x02", b"\x18\x02\x22\x01\x03"),
            "data[0].target_tokens has shape (3,) and 2",
        ),
        (REQUEST.replace(b"\x0a\x0a\x0a\x08\x05", b"\x12\x0a\x0a\x08\x05"), "data[0].model_input has a chunk of image"),
    ],
)
def test_malformed_request_is_refused_by_field(body: bytes, message: str) -> None:
    with pytest.raises(FormatError) as error:
        read_pass(body)
    assert message in str(error.value)
