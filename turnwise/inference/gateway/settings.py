"""The settings that a controller gives one session: read, checked, and laid over the gateway's own.

Owns: :class:`SessionSettings`, :func:`read_settings` and :data:`FIXED_SAMPLING`. Refuses: making sessions.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, fields, replace
from typing import Any, cast

from turnwise.errors import shown
from turnwise.inference.echo import EchoPolicy, ReasoningPolicy
from turnwise.inference.gateway.errors import invalid
from turnwise.inference.gateway.fields import Fields
from turnwise.inference.session import SessionLimits
from turnwise.types import SamplingParams

FIXED_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "seed"})
"""What a request may not choose where what it samples is trained."""
_MOST = 2**31 - 1
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_LIMITS = ("context_length", "max_tokens_per_turn", "max_total_tokens", "max_turns")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """What one session does in a way of its own; None is the gateway's way.

    Attributes:
        seed: Of its sampling, as it is: the session's id does not enter into it.
        temperature: Sampling temperature of requests that name none.
        top_p: Nucleus mass in (0, 1] of such requests.
        top_k: Keep the k likeliest tokens, for such requests; 0 keeps all.
        min_p: Least share of the likeliest token's probability, for such requests.
        fixed_sampling: Whether requests sample as set here, whatever they name themselves.
        context_length: Most tokens of prompt and completion.
        max_tokens_per_turn: Most tokens of one completion.
        max_total_tokens: Most tokens over all branches, prompts included.
        max_turns: Most model calls.
        reasoning: What becomes of the reasoning of earlier turns.
        echo: What becomes of turns that come back rewritten.
    """

    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    fixed_sampling: bool | None = None
    context_length: int | None = None
    max_tokens_per_turn: int | None = None
    max_total_tokens: int | None = None
    max_turns: int | None = None
    reasoning: ReasoningPolicy | None = None
    echo: EchoPolicy | None = None

    def params(self, own: SamplingParams) -> SamplingParams:
        """Return how the session samples, given how the gateway does."""
        return replace(own, **self._set(_SAMPLING))

    def limits(self, own: SessionLimits) -> SessionLimits:
        """Return what the session may use, given what the gateway allows; its context cannot be larger."""
        mine = replace(own, **self._set(_LIMITS))
        return replace(mine, context_length=min(mine.context_length, own.context_length))

    def noted(self) -> dict[str, float]:
        """Return those settings that a trajectory says as numbers: how it was sampled. Its temperature is that of the
        requests, and a seed that such a number cannot hold exactly is not said.
        """
        given = self._set(("seed", "top_p", "top_k", "min_p"))
        return {name: float(value) for name, value in given.items() if float(value) == value}

    def _set(self, names: tuple[str, ...]) -> dict[str, Any]:
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}


SETTINGS = frozenset(each.name for each in fields(SessionSettings))
"""The names of all settings."""


def read_settings(body: Fields, context_length: int) -> SessionSettings:
    """Return the settings of a body. Each has the meaning of the gateway's configuration key of its name.

    Args:
        body: What a controller sent.
        context_length: The gateway's own, which a session's cannot exceed.

    Raises:
        ApiError: One is wrong; it is named.
    """
    top_p = body.number("top_p", 0, 1)
    if top_p == 0:
        raise invalid("top_p", "must be above 0; a temperature of 0 is greedy")
    fixed = None if body.get("fixed_sampling") is None else body.flag("fixed_sampling")
    return SessionSettings(
        seed=body.whole("seed", -(2**63), 2**63 - 1),
        temperature=body.number("temperature", 0, 100),
        top_p=top_p,
        top_k=body.whole("top_k", 0, _MOST),
        min_p=body.number("min_p", 0, 1),
        fixed_sampling=fixed,
        context_length=body.whole("context_length", 1, context_length),
        max_tokens_per_turn=body.whole("max_tokens_per_turn", 1, _MOST),
        max_total_tokens=body.whole("max_total_tokens", 1, 2**63 - 1),
        max_turns=body.whole("max_turns", 1, _MOST),
        reasoning=cast("ReasoningPolicy | None", _one_of(body, "reasoning", ("keep", "template"))),
        echo=cast("EchoPolicy | None", _one_of(body, "echo", ("same", "strict"))),
    )


def check_known(body: Fields, known: Set[str]) -> None:
    """Raise where a body has a field that nobody reads: what a controller misspelt must not go unnoticed.

    Raises:
        ApiError: It names all of them.
    """
    unknown = sorted(key for key in body if key not in known)
    if unknown:
        raise invalid(unknown[0], f"unknown: {', '.join(map(shown, unknown))}; there are {', '.join(sorted(known))}")


def _one_of(body: Fields, key: str, allowed: tuple[str, ...]) -> str | None:
    if body.get(key) is None:
        return None
    value = body.text(key)
    if value not in allowed:
        raise invalid(key, f"must be {' or '.join(allowed)}, not {shown(value)}")
    return value
