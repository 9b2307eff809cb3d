"""The body of vLLM's ``/inference/v1/generate``, as a client writes it and as the built-in server reads it.

Owns: both directions, and the wording of what is wrong with a request. Refuses: responses and the other routes
(``wire.py``), transport (``client.py``, ``app.py``).

Two fields are ours, and other servers ignore them. ``continued`` says how many last ids of ``token_ids`` are a
completion that goes on, so that a stop string may begin in them. ``seed`` is then that of the whole completion, for
servers whose random numbers are keyed by position; others would draw the numbers of its beginning again, which the
seed in ``sampling_params``, a new one for each part, keeps them from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from turnwise.inference.wire import BadRequest, decode_json, short
from turnwise.seeding import stable_hash
from turnwise.types import Guide, SamplingParams, TokenIds

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
    {
        "temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "seed", "ignore_eos",
        "logprobs", "prompt_logprobs", "structured_outputs",
    }
)  # fmt: skip


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
        scored: Whether log-probabilities of the prompt are wanted.
    """

    request_id: str | None
    token_ids: TokenIds
    params: SamplingParams
    logprobs: bool
    stream: bool
    continued: int
    scored: bool = False


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
        sampling["seed"] = stable_hash(params.seed, continued) if continued else params.seed
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
    if params.guide is not None:
        sampling["structured_outputs"] = {"structural_tag": params.guide.tag}
    body: dict[str, Any] = {"token_ids": np.ascontiguousarray(token_ids), "sampling_params": sampling}
    if stream:
        body["stream"] = True
    if continued:
        body["continued"] = continued
        if params.seed is not None:
            body["seed"] = params.seed
    if model is not None:
        body["model"] = model
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def encode_scoring(token_ids: TokenIds, *, model: str | None = None) -> bytes:
    """Return the body of a request for the log-probabilities of ids. Servers sample at least one id beyond them."""
    sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
    body: dict[str, Any] = {"token_ids": np.ascontiguousarray(token_ids), "sampling_params": sampling}
    return orjson.dumps(body if model is None else {**body, "model": model}, option=orjson.OPT_SERIALIZE_NUMPY)


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
    token_ids = _decode_ids(body.get("token_ids"), vocabulary, max_context)
    for field in ("features", "content_parts"):
        if body.get(field):
            raise BadRequest(field, f"{field} is given, but this server takes token ids only")
    continued = body.get("continued") or 0
    if type(continued) is not int or not 0 <= continued <= len(token_ids):
        raise BadRequest("continued", f"continued must be 0 to {len(token_ids)}, not {short(continued)}")
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict):
        raise BadRequest("sampling_params", f"sampling_params must be an object, not {short(sampling)}")
    if continued and sampling.get("structured_outputs") is not None:
        raise BadRequest("continued", "continued goes on in the middle of a grammar: begin the completion again")
    seed = body.get("seed") if continued else None
    scored = sampling.get("prompt_logprobs")
    if scored not in (None, 0) or scored is False:
        raise BadRequest(
            "sampling_params.prompt_logprobs",
            f"sampling_params.prompt_logprobs is {short(scored)}, but only the given id's is reported: send 0",
        )
    if scored is not None and body.get("stream"):
        raise BadRequest("sampling_params.prompt_logprobs", "prompt_logprobs are not streamed: leave stream out")
    name = body.get("request_id")
    return GenerateRequest(
        request_id=name if isinstance(name, str) and name else None,
        token_ids=token_ids,
        params=_decode_sampling(sampling if seed is None else {**sampling, "seed": seed}, stop_strings),
        logprobs=sampling.get("logprobs") is not None,
        stream=bool(body.get("stream")),
        continued=continued,
        scored=scored is not None,
    )


def _decode_ids(ids: Any, vocabulary: int, max_context: int) -> TokenIds:
    if not isinstance(ids, list) or not ids:
        raise BadRequest("token_ids", f"token_ids must be a list of at least one id, not {short(ids)}")
    try:
        token_ids = np.array(ids, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        token_ids = np.zeros(0, dtype=np.int64)
    if token_ids.shape != (len(ids),) or not all(type(value) is int for value in ids):
        bad = next((value for value in ids if type(value) is not int or not -(2**63) <= value < 2**63), ids)
        raise BadRequest("token_ids", f"token_ids must hold integers, not {short(bad)}")
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
    return token_ids.astype(np.int32)


def _decode_sampling(given: Mapping[str, Any], stop_strings: bool) -> SamplingParams:
    for key in given.keys() - _OURS:
        value = given[key]
        if value is None or (key in _NEUTRAL and (_NEUTRAL[key] is None or value == _NEUTRAL[key])):
            continue
        raise BadRequest(
            f"sampling_params.{key}",
            f"sampling_params.{key}={short(value)} is not supported by this server: leave it out",
        )
    if given.get("logprobs") not in (None, 0):
        raise BadRequest(
            "sampling_params.logprobs",
            f"sampling_params.logprobs is {short(given['logprobs'])}, but only the sampled id's is reported: send 0",
        )
    stop = given.get("stop") or ()
    stop = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stop, list | tuple) or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(
            "sampling_params.stop", f"sampling_params.stop must be texts that are not empty, not {short(stop)}"
        )
    if stop and not stop_strings:
        raise BadRequest(
            "sampling_params.stop",
            f"sampling_params.stop is {short(stop)}, but the served model has no tokenizer.json to find texts with: "
            "send stop_token_ids",
        )
    stop_ids = given.get("stop_token_ids") or ()
    if not isinstance(stop_ids, list) and stop_ids != ():
        stop_ids = [stop_ids]
    if not all(type(token) is int and 0 <= token < 2**31 for token in stop_ids):
        raise BadRequest("sampling_params.stop_token_ids", f"stop_token_ids must be ids, not {short(stop_ids)}")
    seed = given.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest("sampling_params.seed", f"sampling_params.seed must be an integer, not {short(seed)}")
    max_tokens = None if given.get("max_tokens") is None else _integer(given, "max_tokens", 1, at_least=1)
    if given.get("structured_outputs") is not None and given.get("ignore_eos"):
        raise BadRequest("sampling_params.ignore_eos", "ignore_eos samples past the end of a grammar: leave it out")
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
        guide=_decode_guide(given.get("structured_outputs")),
    )


def _decode_guide(given: Any) -> Guide | None:
    if given is None:
        return None
    field = "sampling_params.structured_outputs"
    if not isinstance(given, dict):
        raise BadRequest(field, f"{field} must be an object, not {short(given)}")
    asked = {key: value for key, value in given.items() if value is not None and value is not False}
    if list(asked) == ["json_object"]:
        return Guide(tag=_tag({"type": "object"}))
    if list(asked) == ["json"]:
        schema = decode_json(asked["json"].encode()) if isinstance(asked["json"], str) else asked["json"]
        return Guide(tag=_tag(schema))
    if list(asked) == ["structural_tag"] and isinstance(asked["structural_tag"], str):
        return Guide(tag=asked["structural_tag"])
    raise BadRequest(
        field,
        f"{field} must be one of structural_tag (a text), json (a schema) and json_object, not {short(sorted(asked))}",
    )


def _tag(schema: Any) -> str:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    return orjson.dumps(tag).decode()


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
            f"sampling_params.{key} must be a number of {start} {low:g}{upper}, not {short(value)}",
        )
    return float(value)


def _integer(given: Mapping[str, Any], key: str, default: int, *, at_least: int) -> int:
    value = given.get(key, default)
    value = default if value is None else value
    if type(value) is not int or not at_least <= value < 2**62:
        raise BadRequest(
            f"sampling_params.{key}",
            f"sampling_params.{key} must be an integer of at least {at_least}, not {short(value)}",
        )
    return value
