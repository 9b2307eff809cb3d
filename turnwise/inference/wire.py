"""The wire protocol: vLLM's ``/inference/v1/generate`` requests and responses, errors, and weight manifests.

Three request fields are extensions that other servers ignore. ``continued``: how many last ids of ``token_ids`` are the
completion to resume, in which a stop string may begin. ``seed``: that of the whole completion, for servers whose random
numbers are keyed by position; ``sampling_params.seed`` differs for each part, so that others do not repeat draws.
``sampling_mask``: whether choices report, under that name, the masks of their ids (``turnwise/types.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from turnwise.errors import FormatError, InferenceError, shown
from turnwise.inference.completion_progress import Choice, decode_spans
from turnwise.model.core import AdapterInfo, GroupAddress, TensorEntry, WeightManifest
from turnwise.seeding import stable_hash
from turnwise.types import (
    FinishReason,
    Guide,
    Logprobs,
    SamplingParams,
    TokenIds,
    VersionSpan,
    decode_mask,
    decode_routes,
)

GENERATE = "/inference/v1/generate"
LOAD = "/load"
"""vLLM's route with the requests in flight on a server."""
SESSION_HEADER = "X-Session-ID"

_NO_LOGPROB = -9999.0
_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class BadRequest(FormatError):
    """A request body that a server refuses; ``field`` is the path of the offending field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


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
            {"token_id": token_id, "logprob": logprob} for token_id, logprob in zip(ids, logprobs.tolist(), strict=True)
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


def decode_response(body: Any, url: str) -> Choice:
    """Validate a response. Raises InferenceError if it violates the protocol."""
    choice = _decode_choice(body, url)
    if choice.finish_reason is None:
        raise InferenceError(f"{url} returned a completion without a finish reason")
    return choice


def decode_event(body: Any, url: str) -> Choice | None:
    """Validate one event of a stream; None if it holds no choice (usage). Raises InferenceError."""
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
        encoded = choice.get("routed_experts")
        routes = None if encoded is None else decode_routes(encoded)
        masks = choice.get("sampling_mask")
        mask = decode_mask(masks) if isinstance(masks, str) else None
        digests = choice.get("logit_digests")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InferenceError(f"{url} returned no generate response ({error!r}): {short(body)}") from error
    if len(logprobs) != len(token_ids) or token_ids.ndim != 1:
        raise InferenceError(f"{url} answered {len(token_ids)} ids with {len(logprobs)} log-probabilities")
    if mask is not None and len(mask) != len(token_ids):
        raise InferenceError(f"{url} answered {len(token_ids)} ids with {len(mask)} sampling masks")
    # vLLM writes what is not finite as the number that OpenAI's API has for it. A sum is finite only if all are.
    values = logprobs.tolist()
    if values and not (min(values) > _NO_LOGPROB and math.isfinite(sum(values))):
        raise InferenceError(f"{url} returned log-probabilities that are not finite: the model has diverged")
    if reason is not None and reason not in _FINISH_REASONS:
        raise InferenceError(f"{url} ended a completion with finish_reason {reason!r}")
    ending = None if reason is None else _FINISH_REASONS[reason]
    return Choice(token_ids, logprobs, ending, spans, routes, mask, digests if isinstance(digests, str) else None)


def decode_load(raw: bytes) -> int | None:
    """Return the requests in flight of a response of :data:`LOAD`; None if it names none."""
    try:
        return int(orjson.loads(raw)["server_load"])
    except (KeyError, TypeError, ValueError):
        return None


def encode_prompt_logprobs(
    token_ids: TokenIds, logprobs: Logprobs | None
) -> list[dict[str, dict[str, float]] | None] | None:
    """Return ``prompt_logprobs`` of a response: None for the first id, then ``{id: {"logprob": ...}}`` for each."""
    if logprobs is None:
        return None
    pairs = zip(token_ids[1:].tolist(), logprobs.tolist(), strict=True)
    return [None, *({str(token): {"logprob": logprob}} for token, logprob in pairs)]


def decode_prompt_logprobs(body: Any, token_ids: TokenIds, url: str) -> Logprobs | None:
    """Return the log-probabilities of ``token_ids``, 0 for the first; None if interrupted. Raises InferenceError."""
    try:
        entries = body.get("prompt_logprobs")
        if entries is None and body["choices"][0]["finish_reason"] == "abort":
            return None
        if entries is None:
            raise InferenceError(f"{url} returned no prompt_logprobs: it cannot score given ids")
        logprobs = [
            float(entry[str(token)]["logprob"])
            for entry, token in zip(entries[1:], token_ids[1:].tolist(), strict=True)
        ]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InferenceError(
            f"{url} returned prompt_logprobs that do not match the ids ({error!r}): {short(body)}"
        ) from error
    if not (math.isfinite(sum(logprobs)) and min(logprobs, default=0.0) > _NO_LOGPROB):
        raise InferenceError(f"{url} returned log-probabilities that are not finite: the model has diverged")
    return np.array([0.0, *logprobs], dtype=np.float32)


def encode_manifest(manifest: WeightManifest) -> bytes:
    """Return the body of ``/update_weights``."""
    return orjson.dumps({"update_info": manifest_info(manifest)})


def manifest_info(manifest: WeightManifest) -> dict[str, Any]:
    """Return ``update_info`` of ``/update_weights``."""
    tensors = [
        {"name": entry.name, "shape": entry.shape, "dtype": entry.dtype, "checksum": entry.checksum}
        for entry in manifest.tensors
    ]
    info: dict[str, Any] = {"version": manifest.version, "path": manifest.path, "tensors": tensors}
    if manifest.group is not None:
        info["group"] = asdict(manifest.group)
    if manifest.adapter is not None:
        adapter = manifest.adapter
        info["adapter"] = {"kind": "lora", "rank": adapter.rank, "alpha": adapter.alpha, "targets": adapter.targets}
        if adapter.name is not None:
            info["adapter"]["name"] = adapter.name
    return info


def decode_manifest(raw: bytes) -> WeightManifest:
    """Validate the body of ``/update_weights``. Raises BadRequest for a missing or mistyped field."""
    info = decode_json(raw).get("update_info")
    if not isinstance(info, dict):
        raise BadRequest("update_info", f"update_info must be a weight manifest, not {short(info)}")
    version, path, tensors = info.get("version"), info.get("path"), info.get("tensors")
    if type(version) is not int or version < 0:
        raise BadRequest("update_info.version", f"version must be an integer of at least 0, not {short(version)}")
    if (group := info.get("group")) is not None:
        try:
            return WeightManifest(version, "", group=GroupAddress(**group))
        except TypeError as error:
            raise BadRequest("update_info.group", f"group needs backend, host, port, size, rank: {error}") from error
    if not isinstance(path, str) or not path:
        raise BadRequest("update_info.path", f"path must name a safetensors file, not {short(path)}")
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
    return WeightManifest(version, path, entries, _decode_adapter(info.get("adapter")))


def _decode_adapter(info: Any) -> AdapterInfo | None:
    if info is None:
        return None
    field = "update_info.adapter"
    if not isinstance(info, dict) or info.get("kind") != "lora":
        raise BadRequest(field, f"adapter must have kind 'lora', rank, alpha and targets, not {short(info)}")
    rank, alpha, targets = info.get("rank"), info.get("alpha"), info.get("targets")
    if type(rank) is not int or rank < 1:
        raise BadRequest(f"{field}.rank", f"rank must be an integer of at least 1, not {short(rank)}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise BadRequest(f"{field}.alpha", f"alpha must be a finite number, not {short(alpha)}")
    if not isinstance(targets, list) or not targets or not all(isinstance(target, str) for target in targets):
        raise BadRequest(f"{field}.targets", f"targets must list names of modules, not {short(targets)}")
    name = info.get("name")
    if name is not None and not (isinstance(name, str) and name):
        raise BadRequest(f"{field}.name", f"name must be a text that is not empty, or be left out, not {short(name)}")
    return AdapterInfo(rank, float(alpha), tuple(targets), name)


def encode_error(message: str, *, status: int, field: str | None = None) -> bytes:
    """Return the body of an error response."""
    kinds = {400: "BadRequestError", 403: "PermissionDeniedError", 404: "NotFoundError"}
    kind = kinds.get(status, "InternalServerError")
    return orjson.dumps({"error": {"message": message, "type": kind, "param": field, "code": status}})


def error_message(raw: bytes) -> str:
    """Return the message of an error response of any shape."""
    try:
        body = orjson.loads(raw)
        error = body.get("error", body)
        message = error if isinstance(error, str) else error.get("message", error.get("detail"))
    except (orjson.JSONDecodeError, AttributeError):
        message = None
    return str(message) if message else raw[:500].decode("utf-8", "replace") or "no message"


def error_field(raw: bytes) -> str | None:
    """Return the path of the field that an error response names, if it names one."""
    try:
        field = orjson.loads(raw)["error"]["param"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return None
    return field if isinstance(field, str) else None


def decode_json(raw: bytes) -> dict[str, Any]:
    """Parse a request body. Raises BadRequest if it is not a JSON object."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest("body", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("body", f"the body must be an object, not {short(body)}")
    return body


def short(value: Any) -> str:
    """Return a value for a message, truncated."""
    return shown(value)


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
}
_OURS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "seed", "ignore_eos",
        "logprobs", "prompt_logprobs", "structured_outputs", "stream_interval", "routed_experts_prompt_start",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A validated generate request.

    Attributes:
        request_id: The client's, or None.
        token_ids: int32 of shape [tokens].
        logprobs: Whether log-probabilities are returned.
        stream: Whether the response is a stream of events.
        stream_interval: Least number of tokens of an event between the first and the last.
        continued: See the module.
        scored: Whether log-probabilities of the prompt are returned.
        features: ``features`` as given (``model/media_wire.py``); None without images.
        model: Name of what is sampled from; None for the served model.
    """

    request_id: str | None
    token_ids: TokenIds
    params: SamplingParams
    logprobs: bool
    stream: bool
    continued: int
    scored: bool = False
    stream_interval: int = 1
    features: Any = None
    model: str | None = None


def encode_request(
    token_ids: TokenIds,
    params: SamplingParams,
    *,
    stream: int = 0,
    continued: int = 0,
    model: str | None = None,
    features: Mapping[str, Any] | None = None,
) -> bytes:
    """Return the body of a request, without default values.

    Args:
        token_ids: Prompt ids, and what was sampled of the completion.
        params: Sampling parameters.
        stream: Least number of tokens of an event; 0 for one response.
        continued: See the module.
        model: Name of the model on servers of several.
        features: Images (``model/media_wire.py``).
    """
    events = {"stream_interval": stream} if stream > 1 else {}
    sampling: dict[str, Any] = {"temperature": params.temperature, "logprobs": 0, **events}
    if params.max_tokens is not None:
        sampling["max_tokens"] = params.max_tokens
    if params.top_p != 1.0:
        sampling["top_p"] = params.top_p
    if params.top_k:
        sampling["top_k"] = params.top_k
    if params.min_p:
        sampling["min_p"] = params.min_p
    if params.seed is not None:
        sampling["seed"] = stable_hash(params.seed, continued) if continued else params.seed
    if params.stop:
        sampling["stop"] = params.stop
        sampling["skip_special_tokens"] = False
    else:
        sampling["detokenize"] = False
    if params.ignore_eos:
        # Servers would still stop at explicit stop ids; here the caller asked to sample past all of them.
        sampling["ignore_eos"] = True
    elif params.stop_token_ids:
        sampling["stop_token_ids"] = params.stop_token_ids
    if params.guide is not None:
        sampling["structured_outputs"] = {"structural_tag": params.guide.tag}
    if params.routes_from is not None:
        # A token's routes are those of the state before it, and servers count states.
        sampling["routed_experts_prompt_start"] = max(0, params.routes_from - 1)
    body: dict[str, Any] = {"token_ids": np.ascontiguousarray(token_ids), "sampling_params": sampling}
    if stream:
        body["stream"] = True
    if continued:
        body["continued"] = continued
        if params.seed is not None:
            body["seed"] = params.seed
    masked = True if params.sampling_mask and params.truncates else None
    optional = (("model", model), ("features", features), ("sampling_mask", masked))
    body |= {key: value for key, value in optional if value is not None}
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_scoring(token_ids: TokenIds, *, model: str | None = None) -> bytes:
    """Return the body of a scoring request; servers sample at least one id beyond it."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
    body: dict[str, Any] = {"token_ids": np.ascontiguousarray(token_ids), "sampling_params": sampling}
    return orjson.dumps(body if model is None else {**body, "model": model}, option=orjson.OPT_SERIALIZE_NUMPY)


def decode_request(raw: bytes, *, vocabulary: int, max_context: int, stop_strings: bool) -> GenerateRequest:
    """Validate a generate request. Raises BadRequest with field, value and remedy.

    Args:
        raw: The body.
        vocabulary: Exclusive upper bound of ids.
        max_context: Maximum tokens of prompt plus completion.
        stop_strings: Whether the server has a tokenizer to find them with.
    """
    body = decode_json(raw)
    token_ids = _decode_ids(body.get("token_ids"), vocabulary, max_context)
    if body.get("content_parts"):
        raise BadRequest("content_parts", "content_parts is given, but this server takes token ids and features only")
    continued = body.get("continued") or 0
    if type(continued) is not int or not 0 <= continued <= len(token_ids):
        raise BadRequest("continued", f"continued must be 0 to {len(token_ids)}, not {short(continued)}")
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise BadRequest("sampling_params", f"sampling_params must be an object, not {short(sampling)}")
    if continued and sampling.get("structured_outputs") is not None:
        raise BadRequest("continued", "a completion constrained by a grammar cannot be continued: restart it")
    seed = body.get("seed") if continued else None
    scored = sampling.get("prompt_logprobs")
    if scored not in (None, 0) or scored is False:
        raise BadRequest(
            "sampling_params.prompt_logprobs",
            f"sampling_params.prompt_logprobs is {short(scored)}, but only the given id's is reported: send 0",
        )
    if scored is not None and body.get("stream"):
        raise BadRequest("sampling_params.prompt_logprobs", "prompt_logprobs are not streamed: leave stream out")
    name, model = body.get("request_id"), body.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model", f"model must be the name of what is served, or be left out, not {short(model)}")
    return GenerateRequest(
        request_id=name if isinstance(name, str) and name else None,
        token_ids=token_ids,
        params=replace(
            _decode_sampling(sampling if seed is None else {**sampling, "seed": seed}, stop_strings),
            sampling_mask=bool(body.get("sampling_mask")),
        ),
        logprobs=sampling.get("logprobs") is not None,
        stream=bool(body.get("stream")),
        continued=continued,
        scored=scored is not None,
        stream_interval=_integer(sampling, "stream_interval", 1, at_least=1),
        features=body.get("features") or None,
        model=model or None,
    )


def _decode_ids(ids: Any, vocabulary: int, max_context: int) -> TokenIds:
    if not isinstance(ids, list) or not ids:
        raise BadRequest("token_ids", f"token_ids must be a list of at least one id, not {short(ids)}")
    try:
        token_ids = np.array(ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        token_ids = np.zeros(0, dtype=np.int64)
    if token_ids.shape != (len(ids),) or not all(type(value) is int for value in ids):
        invalid = next((value for value in ids if type(value) is not int or not -(2**63) <= value < 2**63), ids)
        raise BadRequest("token_ids", f"token_ids must hold integers, not {short(invalid)}")
    if token_ids.min() < 0 or token_ids.max() >= vocabulary:
        position = int(np.flatnonzero((token_ids < 0) | (token_ids >= vocabulary))[0])
        raise BadRequest(
            "token_ids",
            f"token_ids[{position}] is {token_ids[position]}, but this model's ids are 0 to {vocabulary - 1}: "
            "encode with its own tokenizer",
        )
    if len(token_ids) >= max_context:
        raise BadRequest(
            "token_ids",
            f"token_ids has {len(token_ids)} ids, but the context length is {max_context}, which leaves no room to "
            "sample: shorten the prompt",
        )
    return token_ids.astype(np.int32)


def _decode_sampling(fields: Mapping[str, Any], stop_strings: bool) -> SamplingParams:
    for key in fields.keys() - _OURS:
        value = fields[key]
        if value is None or (key in _NEUTRAL and (_NEUTRAL[key] is None or value == _NEUTRAL[key])):
            continue
        raise BadRequest(
            f"sampling_params.{key}",
            f"sampling_params.{key}={short(value)} is not supported by this server: leave it out",
        )
    if fields.get("logprobs") not in (None, 0):
        raise BadRequest(
            "sampling_params.logprobs",
            f"sampling_params.logprobs is {short(fields['logprobs'])}, but only the sampled id's is reported: send 0",
        )
    stop = fields.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(
            "sampling_params.stop", f"sampling_params.stop must be strings that are not empty, not {short(stop)}"
        )
    if stop and not stop_strings:
        raise BadRequest(
            "sampling_params.stop",
            f"sampling_params.stop is {short(stop)}, but the served model has no tokenizer.json to find texts with: "
            "send stop_token_ids",
        )
    stop_ids = fields.get("stop_token_ids") or ()
    if not isinstance(stop_ids, list) and stop_ids != ():
        stop_ids = [stop_ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in stop_ids):
        raise BadRequest("sampling_params.stop_token_ids", f"stop_token_ids must be ids, not {short(stop_ids)}")
    seed = fields.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest("sampling_params.seed", f"sampling_params.seed must be an integer, not {short(seed)}")
    max_tokens = None if fields.get("max_tokens") is None else _integer(fields, "max_tokens", 1, at_least=1)
    routes_start = fields.get("routed_experts_prompt_start")
    if routes_start is not None:
        routes_start = 1 + _integer(fields, "routed_experts_prompt_start", 0, at_least=0)
    if fields.get("structured_outputs") is not None and fields.get("ignore_eos"):
        raise BadRequest(
            "sampling_params.ignore_eos", "ignore_eos cannot be combined with structured output: leave it out"
        )
    return SamplingParams(
        temperature=_number(fields, "temperature", 1.0, 0.0, math.inf),
        top_p=_number(fields, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(0, _integer(fields, "top_k", 0, at_least=-1)),
        min_p=_number(fields, "min_p", 0.0, 0.0, 1.0),
        max_tokens=max_tokens,
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        seed=seed,
        ignore_eos=bool(fields.get("ignore_eos")),
        guide=_decode_guide(fields.get("structured_outputs")),
        routes_from=routes_start,
    )


def _decode_guide(fields: Any) -> Guide | None:
    if fields is None:
        return None
    field = "sampling_params.structured_outputs"
    if not isinstance(fields, dict):
        raise BadRequest(field, f"{field} must be an object, not {short(fields)}")
    constraints = {key: value for key, value in fields.items() if value is not None and value is not False}
    if list(constraints) == ["json_object"]:
        return Guide(tag=_tag({"type": "object"}))
    if list(constraints) == ["json"]:
        schema = (
            decode_json(constraints["json"].encode()) if isinstance(constraints["json"], str) else constraints["json"]
        )
        return Guide(tag=_tag(schema))
    if list(constraints) == ["structural_tag"] and isinstance(constraints["structural_tag"], str):
        return Guide(tag=constraints["structural_tag"])
    raise BadRequest(
        field,
        f"{field} must be one of structural_tag (a text), json (a schema) and json_object, not "
        f"{short(sorted(constraints))}",
    )


def _tag(schema: Any) -> str:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    return orjson.dumps(tag).decode()


def _number(
    fields: Mapping[str, Any], key: str, default: float, low: float, high: float, *, above: bool = False
) -> float:
    value = fields.get(key, default)
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
            f"sampling_params.{key} must be a number of {start} {low:g}{upper}, not {short(value)}",
        )
    return float(value)


def _integer(fields: Mapping[str, Any], key: str, default: int, *, at_least: int) -> int:
    value = fields.get(key, default)
    value = default if value is None else value
    if type(value) is not int or not at_least <= value < 2**62:
        raise BadRequest(
            f"sampling_params.{key}",
            f"sampling_params.{key} must be an integer of at least {at_least}, not {short(value)}",
        )
    return value
