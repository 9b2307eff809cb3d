"""The bodies that cross between a client and a server: vLLM's ``/inference/v1/generate`` and our weight manifest.

Owns: both directions of both, and the wording of what is wrong with a body. Refuses: transport (``client.py``,
``server.py``).

One field is ours: ``continued`` says how many last ids of ``token_ids`` are a completion that goes on, so that a stop
string may begin in them. Other servers ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from turnwise.errors import FormatError, InferenceError
from turnwise.inference.core import TensorEntry, WeightManifest
from turnwise.types import FinishReason, Logprobs, SamplingParams, TokenIds, VersionSpan

GENERATE = "/inference/v1/generate"
SESSION_HEADER = "X-Session-ID"

# Parameters of vLLM that change nothing at these values (None: at any value), and that we do not have otherwise.
_NEUTRAL: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_tokens": 0,
    "detokenize": None,
    "skip_special_tokens": None,
    "spaces_between_special_tokens": None,
    "include_stop_str_in_output": None,
    "output_kind": None,
    "flat_logprobs": None,
    "stream_interval": None,
}
_OURS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "seed", "ignore_eos", "logprobs"}
)
_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class BadRequest(FormatError):
    """A body that a server refuses.

    Attributes:
        field: Where in the body.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A generate body, checked.

    Attributes:
        request_id: The client's name for it, or None.
        token_ids: int32 of shape [tokens].
        params: How to sample.
        logprobs: Whether log-probabilities are wanted.
        stream: Whether the answer is a stream of events.
        continued: See the module.
    """

    request_id: str | None
    token_ids: TokenIds
    params: SamplingParams
    logprobs: bool
    stream: bool
    continued: int


def encode_request(
    token_ids: TokenIds,
    params: SamplingParams,
    *,
    stream: bool = False,
    continued: int = 0,
    model: str | None = None,
) -> bytes:
    """Return the body of a request. Values that are the server's default are left out."""
    sampling: dict[str, Any] = {"temperature": params.temperature, "logprobs": 0}
    if params.max_tokens is not None:
        sampling["max_tokens"] = params.max_tokens
    if params.top_p != 1.0:
        sampling["top_p"] = params.top_p
    if params.top_k:
        sampling["top_k"] = params.top_k
    if params.min_p:
        sampling["min_p"] = params.min_p
    if params.seed is not None:
        sampling["seed"] = params.seed
    if params.stop:
        sampling["stop"] = params.stop
        sampling["skip_special_tokens"] = False
    else:
        sampling["detokenize"] = False
    if params.ignore_eos:
        # Servers go on honouring explicit stop ids; here the caller asked to sample past all of them.
        sampling["ignore_eos"] = True
    elif params.stop_token_ids:
        sampling["stop_token_ids"] = params.stop_token_ids
    body: dict[str, Any] = {"token_ids": np.ascontiguousarray(token_ids), "sampling_params": sampling}
    if stream:
        body["stream"] = True
    if continued:
        body["continued"] = continued
    if model is not None:
        body["model"] = model
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_request(raw: bytes, *, vocabulary: int, max_context: int, stop_strings: bool) -> GenerateRequest:
    """Check a generate body.

    Args:
        raw: The body.
        vocabulary: Ids must be below this.
        max_context: Most tokens of prompt and completion together.
        stop_strings: Whether the server has a tokenizer to find them with.

    Raises:
        BadRequest: With the field, the value and the remedy.
    """
    body = decode_json(raw)
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids:
        raise BadRequest("token_ids", f"token_ids must be a list of at least one id, not {_short(ids)}")
    try:
        token_ids = np.array(ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        token_ids = np.zeros(0, dtype=np.int64)
    if token_ids.shape != (len(ids),) or not all(type(value) is int for value in ids):
        bad = next((value for value in ids if type(value) is not int or not -(2**63) <= value < 2**63), ids)
        raise BadRequest("token_ids", f"token_ids must hold integers, not {_short(bad)}")
    if token_ids.min() < 0 or token_ids.max() >= vocabulary:
        place = int(np.flatnonzero((token_ids < 0) | (token_ids >= vocabulary))[0])
        raise BadRequest(
            "token_ids",
            f"token_ids[{place}] is {token_ids[place]}, but this model's ids are 0 to {vocabulary - 1}: "
            "encode with its own tokenizer",
        )
    if len(token_ids) >= max_context:
        raise BadRequest(
            "token_ids",
            f"token_ids has {len(token_ids)} ids, but the context length is {max_context} and one more is to be "
            "sampled: shorten the prompt",
        )
    for field in ("features", "content_parts"):
        if body.get(field):
            raise BadRequest(field, f"{field} is given, but this server takes token ids only")
    continued = body.get("continued") or 0
    if type(continued) is not int or not 0 <= continued <= len(token_ids):
        raise BadRequest("continued", f"continued must be 0 to {len(token_ids)}, not {_short(continued)}")
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise BadRequest("sampling_params", f"sampling_params must be an object, not {_short(sampling)}")
    name = body.get("request_id")
    return GenerateRequest(
        request_id=name if isinstance(name, str) and name else None,
        token_ids=token_ids.astype(np.int32),
        params=_decode_sampling(sampling, stop_strings),
        logprobs=sampling.get("logprobs") is not None,
        stream=bool(body.get("stream")),
        continued=continued,
    )


def _decode_sampling(given: Mapping[str, Any], stop_strings: bool) -> SamplingParams:
    for key in given.keys() - _OURS:
        value = given[key]
        if value is None or (key in _NEUTRAL and (_NEUTRAL[key] is None or value == _NEUTRAL[key])):
            continue
        raise BadRequest(
            f"sampling_params.{key}",
            f"sampling_params.{key}={_short(value)} is not supported by this server: leave it out",
        )
    if given.get("logprobs") not in (None, 0):
        raise BadRequest(
            "sampling_params.logprobs",
            f"sampling_params.logprobs is {_short(given['logprobs'])}, but only the sampled id's is reported: send 0",
        )
    stop = given.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(
            "sampling_params.stop", f"sampling_params.stop must be texts that are not empty, not {_short(stop)}"
        )
    if stop and not stop_strings:
        raise BadRequest(
            "sampling_params.stop",
            f"sampling_params.stop is {_short(stop)}, but the served model has no tokenizer.json to find texts with: "
            "send stop_token_ids",
        )
    stop_ids = given.get("stop_token_ids") or ()
    if not isinstance(stop_ids, list) and stop_ids != ():
        stop_ids = [stop_ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in stop_ids):
        raise BadRequest("sampling_params.stop_token_ids", f"stop_token_ids must be ids, not {_short(stop_ids)}")
    seed = given.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest("sampling_params.seed", f"sampling_params.seed must be an integer, not {_short(seed)}")
    max_tokens = None if given.get("max_tokens") is None else _integer(given, "max_tokens", 1, at_least=1)
    return SamplingParams(
        temperature=_number(given, "temperature", 1.0, 0.0, math.inf),
        top_p=_number(given, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(0, _integer(given, "top_k", 0, at_least=-1)),
        min_p=_number(given, "min_p", 0.0, 0.0, 1.0),
        max_tokens=max_tokens,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        seed=seed,
        ignore_eos=bool(given.get("ignore_eos")),
    )


def _number(
    given: Mapping[str, Any], key: str, default: float, low: float, high: float, *, above: bool = False
) -> float:
    value = given.get(key, default)
    value = default if value is None else value
    if (
        type(value) not in (int, float)
        or not math.isfinite(value)
        or not low <= value <= high
        or (above and value == low)
    ):
        start = "more than" if above else "at least"
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise BadRequest(
            f"sampling_params.{key}",
            f"sampling_params.{key} must be a number of {start} {low:g}{upper}, not {_short(value)}",
        )
    return float(value)


def _integer(given: Mapping[str, Any], key: str, default: int, *, at_least: int) -> int:
    value = given.get(key, default)
    value = default if value is None else value
    if type(value) is not int or not at_least <= value < 2**62:
        raise BadRequest(
            f"sampling_params.{key}",
            f"sampling_params.{key} must be an integer of at least {at_least}, not {_short(value)}",
        )
    return value


def encode_choice(
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32] | None,
    finish_reason: str | None,
    stop_reason: int | str | None,
    weight_versions: Sequence[VersionSpan],
) -> dict[str, Any]:
    """Return ``choices[0]`` of a response."""
    ids = token_ids.tolist()
    content = None
    if logprobs is not None:
        content = [
            {"token_id": token, "logprob": logprob} for token, logprob in zip(ids, logprobs.tolist(), strict=True)
        ]
    return {
        "index": 0,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
        "token_ids": ids,
        "logprobs": None if content is None else {"content": content},
        "weight_versions": [
            {"version": str(version), "start": start, "end": end} for version, start, end in weight_versions
        ],
    }


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of a response, checked.

    Attributes:
        token_ids: int32 of shape [tokens].
        logprobs: float32 of shape [tokens].
        finish_reason: None while a stream goes on.
        spans: Of the whole completion; None where the server named none.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    finish_reason: FinishReason | None
    spans: tuple[VersionSpan, ...] | None


def decode_response(body: Any, url: str) -> Choice:
    """Check a response.

    Raises:
        InferenceError: It is not what the protocol promises; nothing of it can be used.
    """
    choice = _decode_choice(body, url)
    if choice.finish_reason is None:
        raise InferenceError(f"{url} answered a completion without a finish reason")
    return choice


def decode_event(body: Any, url: str) -> Choice | None:
    """Check one event of a stream; None when it holds no choice (usage).

    Raises:
        InferenceError: As for :func:`decode_response`.
    """
    if isinstance(body, dict) and body.get("choices") == []:
        return None
    return _decode_choice(body, url)


def _decode_choice(body: Any, url: str) -> Choice:
    try:
        choice = body["choices"][0]
        reason = choice["finish_reason"]
        content = (choice.get("logprobs") or {}).get("content") or []
        token_ids = np.array(choice["token_ids"] or [], dtype=np.int32)
        logprobs = np.array([entry["logprob"] for entry in content], dtype=np.float32)
        spans = decode_spans(choice.get("weight_versions"))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InferenceError(f"{url} answered no generate response ({error!r}): {_short(body)}") from error
    if len(logprobs) != len(token_ids) or token_ids.ndim != 1:
        raise InferenceError(f"{url} answered {len(token_ids)} ids with {len(logprobs)} log-probabilities")
    if not np.isfinite(logprobs).all():
        raise InferenceError(f"{url} answered log-probabilities that are not finite: the model has diverged")
    if reason is not None and reason not in _FINISH_REASONS:
        raise InferenceError(f"{url} ended a completion with finish_reason {reason!r}")
    return Choice(token_ids, logprobs, None if reason is None else _FINISH_REASONS[reason], spans)


def decode_spans(given: Any) -> tuple[VersionSpan, ...] | None:
    """Return version spans; versions may be integers or texts, vLLM's unnamed ``default`` is 0."""
    if not given:
        return None
    return tuple(
        (0 if span["version"] == "default" else int(span["version"]), int(span["start"]), int(span["end"]))
        for span in given
    )


def covers(spans: Sequence[VersionSpan], tokens: int) -> bool:
    """Return whether spans follow each other from 0 to ``tokens`` without gaps."""
    place = 0
    for _, start, end in spans:
        if start != place or end <= start:
            return False
        place = end
    return place == tokens


def encode_manifest(manifest: WeightManifest) -> bytes:
    """Return the body of ``/update_weights``."""
    tensors = [
        {"name": entry.name, "shape": entry.shape, "dtype": entry.dtype, "checksum": entry.checksum}
        for entry in manifest.tensors
    ]
    return orjson.dumps({"update_info": {"version": manifest.version, "path": manifest.path, "tensors": tensors}})


def decode_manifest(raw: bytes) -> WeightManifest:
    """Check the body of ``/update_weights``.

    Raises:
        BadRequest: A field is missing or of another type.
    """
    info = decode_json(raw).get("update_info")
    if not isinstance(info, dict):
        raise BadRequest("update_info", f"update_info must be a weight manifest, not {_short(info)}")
    version, path, tensors = info.get("version"), info.get("path"), info.get("tensors")
    if type(version) is not int or version < 0:
        raise BadRequest("update_info.version", f"version must be an integer of at least 0, not {_short(version)}")
    if not isinstance(path, str) or not path:
        raise BadRequest("update_info.path", f"path must name a safetensors file, not {_short(path)}")
    if not isinstance(tensors, list) or not tensors:
        raise BadRequest("update_info.tensors", "tensors must list what the file holds; it is empty")
    try:
        entries = tuple(
            TensorEntry(str(one["name"]), tuple(int(size) for size in one["shape"]), str(one["dtype"]), one["checksum"])
            for one in tensors
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(
            "update_info.tensors", f"each tensor needs name, shape, dtype and checksum ({error!r})"
        ) from error
    return WeightManifest(version, path, entries)


def encode_error(message: str, *, status: int, field: str | None = None) -> bytes:
    """Return the body of an error response."""
    kind = "BadRequestError" if status == 400 else "NotFoundError" if status == 404 else "InternalServerError"
    return orjson.dumps({"error": {"message": message, "type": kind, "param": field, "code": status}})


def error_message(raw: bytes) -> str:
    """Return what an error response says, whatever shape it has."""
    try:
        body = orjson.loads(raw)
        error = body.get("error", body)
        message = error if isinstance(error, str) else error.get("message", error.get("detail"))
    except (orjson.JSONDecodeError, AttributeError):
        message = None
    return str(message) if message else raw[:500].decode("utf-8", "replace") or "no message"


def decode_json(raw: bytes) -> dict[str, Any]:
    """Parse a request body.

    Raises:
        BadRequest: It is not a JSON object.
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest("body", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("body", f"the body must be an object, not {_short(body)}")
    return body


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
