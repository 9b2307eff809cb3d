"""Bodies of requests and responses: what is accepted, and how what is not is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise.errors import InferenceError
from turnwise.inference import wire
from turnwise.inference import wire as generate_request
from turnwise.inference.completion_progress import covers
from turnwise.types import SamplingParams

LIMITS = {"vocabulary": 100, "max_context": 50, "stop_strings": True}


def body(**changes) -> bytes:
    complete = {"token_ids": [1, 2, 3], "sampling_params": {"temperature": 1.0}}
    sampling = {name.removeprefix("s_"): value for name, value in changes.items() if name.startswith("s_")}
    rest = {name: value for name, value in changes.items() if not name.startswith("s_")}
    return orjson.dumps({**complete, **rest, **({"sampling_params": sampling} if sampling else {})})


@given(
    ids=st.lists(st.integers(0, 99), min_size=1, max_size=49),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0, 10),
        top_p=st.floats(0.01, 1),
        top_k=st.integers(0, 1000),
        min_p=st.floats(0, 1),
        max_tokens=st.none() | st.integers(1, 1000),
        stop=st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 99), max_size=5).map(tuple),
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
        ignore_eos=st.booleans(),
    ),
    stream=st.integers(0, 3),
)
def test_requests_cross_unchanged(ids, params, stream):
    raw = generate_request.encode_request(np.array(ids, dtype=np.int32), params, stream=stream, continued=len(ids) // 2)
    request = generate_request.decode_request(raw, **LIMITS)
    assert request.token_ids.tolist() == ids
    assert request.token_ids.dtype == np.int32
    assert (request.stream, request.logprobs, request.continued) == (stream > 0, True, len(ids) // 2)
    assert request.stream_interval == max(1, stream)
    # Who samples past the model's end samples past all stop ids.
    assert request.params == (replace(params, stop_token_ids=()) if params.ignore_eos else params)


@pytest.mark.parametrize(
    ("raw", "field", "message"),
    [
        (b"{", "body", "the body is not JSON"),
        (b"[1]", "body", r"the body must be an object, not \[1\]"),
        (body(token_ids=[]), "token_ids", r"at least one id, not \[\]"),
        (body(token_ids="1"), "token_ids", "not '1'"),
        (body(token_ids=[1, 2.5]), "token_ids", "must hold integers, not 2.5"),
        (body(token_ids=[1, True]), "token_ids", "must hold integers, not True"),
        (body(token_ids=[1, None]), "token_ids", "must hold integers, not None"),
        (body(token_ids=[[1], [2]]), "token_ids", r"must hold integers, not \[1\]"),
        (body(token_ids=[1, 2**63]), "token_ids", "must hold integers, not 9223372036854775808"),
        (
            body(token_ids=[1, 100]),
            "token_ids",
            r"token_ids\[1\] is 100, but .* 0 to 99: encode with its own tokenizer",
        ),
        (body(token_ids=[-1, 2]), "token_ids", r"token_ids\[0\] is -1"),
        (body(token_ids=[1] * 50), "token_ids", "has 50 ids, but the context length is 50.* shorten"),
        (body(content_parts=[{"type": "text"}]), "content_parts", "takes token ids and features only"),
        (body(sampling_params=None), "sampling_params", "must be an object, not None"),
        (body(s_temperature=-0.5), "sampling_params.temperature", "at least 0, not -0.5"),
        (body(s_temperature="hot"), "sampling_params.temperature", "not 'hot'"),
        (body(s_top_p=0), "sampling_params.top_p", "more than 0 and at most 1, not 0"),
        (body(s_top_p=1.5), "sampling_params.top_p", "not 1.5"),
        (body(s_top_k=-2), "sampling_params.top_k", "at least -1, not -2"),
        (body(s_top_k=1.0), "sampling_params.top_k", "not 1.0"),
        (body(s_min_p=2), "sampling_params.min_p", "at most 1, not 2"),
        (body(s_max_tokens=0), "sampling_params.max_tokens", "at least 1, not 0"),
        (body(s_stream_interval=0), "sampling_params.stream_interval", "at least 1, not 0"),
        (body(s_stop=[""]), "sampling_params.stop", "not empty"),
        (body(s_stop=3), "sampling_params.stop", "not 3"),
        (body(s_stop_token_ids=["a"]), "sampling_params.stop_token_ids", r"not \['a'\]"),
        (body(s_seed=1.5), "sampling_params.seed", "an integer, not 1.5"),
        (body(s_n=2), "sampling_params.n", "n=2 is not supported by this server: leave it out"),
        (body(s_presence_penalty=0.5), "sampling_params.presence_penalty", "is not supported"),
        (body(s_no_such_key=1), "sampling_params.no_such_key", "is not supported"),
        (body(s_logprobs=5), "sampling_params.logprobs", "send 0"),
        (body(s_prompt_logprobs=5), "sampling_params.prompt_logprobs", "is 5, but .* send 0"),
        (body(s_prompt_logprobs=0, stream=True), "sampling_params.prompt_logprobs", "leave stream out"),
        (body(continued=4), "continued", "must be 0 to 3, not 4"),
    ],
)
def test_bad_requests_name_field_value_and_remedy(raw, field, message):
    with pytest.raises(wire.BadRequest, match=message) as caught:
        generate_request.decode_request(raw, **LIMITS)
    assert caught.value.field == field


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(wire.BadRequest, match=r"no tokenizer.json .* send stop_token_ids"):
        generate_request.decode_request(body(s_stop=["x"]), **{**LIMITS, "stop_strings": False})


def test_neutral_parameters_of_other_clients_are_fine():
    raw = body(
        s_n=1,
        s_presence_penalty=0.0,
        s_repetition_penalty=1.0,
        s_detokenize=True,
        s_min_tokens=0,
        s_top_k=-1,
        s_seed=None,
    )
    request = generate_request.decode_request(raw, **LIMITS)
    assert request.params == SamplingParams()
    assert not request.logprobs


def choice(**changes) -> dict:
    one = {
        "index": 0,
        "token_ids": [5, 6],
        "logprobs": {"content": [{"token_id": 5, "logprob": -1.0}, {"token_id": 6, "logprob": -0.5}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    return {"choices": [{**one, **changes}]}


def test_responses_of_vllm_are_read():
    entry = {"token_id": 5, "logprob": -1.0, "rank": 1, "top_logprobs": []}
    decoded = wire.decode_response(choice(token_ids=[5], logprobs={"content": [entry]}, weight_versions=None), "u")
    assert (decoded.token_ids.tolist(), decoded.logprobs.tolist(), decoded.spans) == ([5], [-1.0], None)
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": 4, "start": 1, "end": 2}]
    assert wire.decode_response(choice(weight_versions=spans), "u").spans == ((0, 0, 1), (4, 1, 2))
    empty = wire.decode_response(choice(token_ids=[], logprobs={"content": []}, finish_reason="abort"), "u")
    assert (len(empty.token_ids), empty.finish_reason) == (0, "abort")
    assert wire.decode_event({"choices": [], "usage": {}}, "u") is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([], "no generate response"),
        ({"choices": []}, "no generate response"),
        ({"choices": [{}]}, "no generate response"),
        (choice(token_ids=["x", "y"]), "no generate response"),
        (choice(token_ids=[1]), "1 ids with 2 log-probabilities"),
        (choice(logprobs=None), "2 ids with 0 log-probabilities"),
        (choice(logprobs={"content": [{"logprob": None}, {"logprob": -1}]}), "not finite|no generate response"),
        (choice(logprobs={"content": [{"logprob": float("nan")}, {"logprob": -1}]}), "not finite"),
        (choice(logprobs={"content": [{"logprob": -9999.0}, {"logprob": -1}]}), "not finite"),
        (choice(finish_reason="error"), "finish_reason 'error'"),
        (choice(finish_reason=None), "without a finish reason"),
        (choice(weight_versions=[{"version": "x7", "start": 0, "end": 2}]), "no generate response"),
    ],
)
def test_nonsense_from_a_server_is_an_error(answer, message):
    with pytest.raises(InferenceError, match=message):
        wire.decode_response(answer, "http://x")


def test_spans_must_cover():
    assert covers((), 0)
    assert covers(((0, 0, 2), (1, 2, 3)), 3)
    for spans in (((0, 0, 2),), ((0, 1, 3),), ((0, 0, 2), (1, 1, 3)), ((0, 0, 3), (1, 3, 3)), ((0, 0, 4),)):
        assert not covers(spans, 3)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"{}", "update_info"),
        (b'{"update_info": {"version": "1", "path": "p", "tensors": []}}', "update_info.version"),
        (b'{"update_info": {"version": 1, "path": "", "tensors": []}}', "update_info.path"),
        (b'{"update_info": {"version": 1, "path": "p", "tensors": []}}', "update_info.tensors"),
        (b'{"update_info": {"version": 1, "path": "p", "tensors": [{"name": "a"}]}}', "update_info.tensors"),
    ],
)
def test_bad_manifests_name_the_field(raw, field):
    with pytest.raises(wire.BadRequest) as caught:
        wire.decode_manifest(raw)
    assert caught.value.field == field


def test_errors_of_any_shape_are_read():
    assert wire.error_message(wire.encode_error("bad", status=400, field="x")) == "bad"
    assert wire.error_message(b'{"error": "text"}') == "text"
    assert wire.error_message(b'{"detail": "fastapi"}') == "fastapi"
    assert wire.error_message(b"<html>") == "<html>"
    assert wire.error_message(b"") == "no message"
    assert wire.error_message(b"[1]") == "[1]"


def test_a_body_that_is_nested_too_deep_to_be_shown_is_refused() -> None:
    with pytest.raises(wire.BadRequest, match="the body must be an object, not a list that is nested too deep"):
        wire.decode_json(b"[" * 1000 + b"]" * 1000)
