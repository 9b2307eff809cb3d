"""What servers answer: the responses of vLLM's ``/inference/v1/generate``, errors, and our weight manifest.

Owns: both directions of them, and :class:`BadRequest`, the wording of what is wrong with a body. Refuses: the generate
request (``generate_request.py``) and transport (``client.py``, ``app.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from turnwise.errors import FormatError, InferenceError, shown
from turnwise.inference.core import AdapterInfo, TensorEntry, WeightManifest
from turnwise.types import FinishReason, Logprobs, TokenIds, VersionSpan

GENERATE = "/inference/v1/generate"
SESSION_HEADER = "X-Session-ID"

_NO_LOGPROB = -9999.0
_FINISH_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class BadRequest(FormatError):
    """A body that a server refuses.

    Attributes:
        field: Where in the body.
    """

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


@dataclass(slots=True)
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
        raise InferenceError(f"{url} answered no generate response ({error!r}): {short(body)}") from error
    if len(logprobs) != len(token_ids) or token_ids.ndim != 1:
        raise InferenceError(f"{url} answered {len(token_ids)} ids with {len(logprobs)} log-probabilities")
    # vLLM writes what is not finite as the number that OpenAI's API has for it. A sum is finite only if all are.
    values = logprobs.tolist()
    if values and not (min(values) > _NO_LOGPROB and math.isfinite(sum(values))):
        raise InferenceError(f"{url} answered log-probabilities that are not finite: the model has diverged")
    if reason is not None and reason not in _FINISH_REASONS:
        raise InferenceError(f"{url} ended a completion with finish_reason {reason!r}")
    return Choice(token_ids, logprobs, None if reason is None else _FINISH_REASONS[reason], spans)


def encode_prompt_logprobs(
    token_ids: TokenIds, logprobs: Logprobs | None
) -> list[dict[str, dict[str, float]] | None] | None:
    """Return ``prompt_logprobs`` of a response: nothing for the first id, then ``{id: {"logprob": ...}}`` for each."""
    if logprobs is None:
        return None
    pairs = zip(token_ids[1:].tolist(), logprobs.tolist(), strict=True)
    return [None, *({str(token): {"logprob": logprob}} for token, logprob in pairs)]


def decode_prompt_logprobs(body: Any, token_ids: TokenIds, url: str) -> Logprobs | None:
    """Return the log-probabilities of the ids that were asked about, 0 for the first; None where it was interrupted.

    Raises:
        InferenceError: The answer holds none, or not one for each id.
    """
    try:
        given = body.get("prompt_logprobs")
        if given is None and body["choices"][0]["finish_reason"] == "abort":
            return None
        if given is None:
            raise InferenceError(f"{url} answered no prompt_logprobs: it cannot score given ids")
        found = [
            float(entry[str(token)]["logprob"]) for entry, token in zip(given[1:], token_ids[1:].tolist(), strict=True)
        ]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise InferenceError(
            f"{url} answered prompt_logprobs that do not fit the ids ({error!r}): {short(body)}"
        ) from error
    if not (math.isfinite(sum(found)) and min(found, default=0.0) > _NO_LOGPROB):
        raise InferenceError(f"{url} answered log-probabilities that are not finite: the model has diverged")
    return np.array([0.0, *found], dtype=np.float32)


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
    info: dict[str, Any] = {"version": manifest.version, "path": manifest.path, "tensors": tensors}
    if manifest.adapter is not None:
        adapter = manifest.adapter
        info["adapter"] = {"kind": "lora", "rank": adapter.rank, "alpha": adapter.alpha, "targets": adapter.targets}
    return orjson.dumps({"update_info": info})


def decode_manifest(raw: bytes) -> WeightManifest:
    """Check the body of ``/update_weights``.

    Raises:
        BadRequest: A field is missing or of another type.
    """
    info = decode_json(raw).get("update_info")
    if not isinstance(info, dict):
        raise BadRequest("update_info", f"update_info must be a weight manifest, not {short(info)}")
    version, path, tensors = info.get("version"), info.get("path"), info.get("tensors")
    if type(version) is not int or version < 0:
        raise BadRequest("update_info.version", f"version must be an integer of at least 0, not {short(version)}")
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


def _decode_adapter(given: Any) -> AdapterInfo | None:
    if given is None:
        return None
    field = "update_info.adapter"
    if not isinstance(given, dict) or given.get("kind") != "lora":
        raise BadRequest(field, f"adapter must say kind 'lora', rank, alpha and targets, not {short(given)}")
    rank, alpha, targets = given.get("rank"), given.get("alpha"), given.get("targets")
    if type(rank) is not int or rank < 1:
        raise BadRequest(f"{field}.rank", f"rank must be an integer of at least 1, not {short(rank)}")
    if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise BadRequest(f"{field}.alpha", f"alpha must be a finite number, not {short(alpha)}")
    if not isinstance(targets, list) or not targets or not all(isinstance(each, str) for each in targets):
        raise BadRequest(f"{field}.targets", f"targets must list names of modules, not {short(targets)}")
    return AdapterInfo(rank, float(alpha), tuple(targets))


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
        raise BadRequest("body", f"the body must be an object, not {short(body)}")
    return body


def short(value: Any) -> str:
    """Return a value for a message, cut where it is long."""
    return shown(value)
