"""Values of Gymnasium spaces as text and JSON, and back; renderings of well-known environments."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from turnwise.errors import EnvError, ToolError, shown

Render = Callable[[Any, Any], str]
"""``render(observation, env)`` returns what the model reads."""

_ESCAPE: Final = re.compile(r"\x1b\[[0-9;]*m")
_COLOURED: Final = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)


def value_text(space: Any, value: Any) -> str:
    """Format a value of a space: numbers in at most six digits, dicts as lines."""
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {value_text(subspace, value[name])}" for name, subspace in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(
            value_text(subspace, component) for subspace, component in zip(space.spaces, value, strict=True)
        )
    if isinstance(space, spaces.Text):
        return str(value)
    return json.dumps(_rounded(plain_value(value)), ensure_ascii=False)


def plain_value(value: Any) -> Any:
    """Return a value of a space as JSON values."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain_value(member) for name, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(component) for component in value]
    return value


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(member) for name, member in value.items()}
    return [_rounded(component) for component in value] if isinstance(value, list) else value


def space_schema(space: Any, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the JSON schema of a space's values."""
    if isinstance(space, spaces.Discrete):
        if names:
            return {"type": "string", "enum": list(names)}
        return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        return _array_schema(space)
    if isinstance(space, spaces.Text):
        return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
    if isinstance(space, spaces.Tuple):
        items = [space_schema(subspace) for subspace in space.spaces]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if isinstance(space, spaces.Dict):
        properties = {name: space_schema(subspace) for name, subspace in space.spaces.items()}
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    raise EnvError(f"the space {space} cannot be expressed in JSON: give your own render= and parse= functions")


def _array_schema(space: Any) -> dict[str, Any]:
    shape = space.shape
    if isinstance(space, spaces.Box):
        is_integer = np.issubdtype(space.dtype, np.integer)
        # A schema is one for all elements; the exact bounds are checked where the value is read.
        low, high = float(np.min(space.low)), float(np.max(space.high))
        schema: dict[str, Any] = {"type": "integer" if is_integer else "number"}
        schema |= {"minimum": low} if math.isfinite(low) else {}
        schema |= {"maximum": high} if math.isfinite(high) else {}
    elif isinstance(space, spaces.MultiBinary):
        schema = {"type": "integer", "minimum": 0, "maximum": 1}
    else:
        start = np.asarray(space.start)
        schema = {"type": "integer", "minimum": int(start.min()), "maximum": int((start + space.nvec).max() - 1)}
    for length in reversed(shape):
        schema = {"type": "array", "items": schema, "minItems": length, "maxItems": length}
    return schema


def space_hint(space: Any, names: Sequence[str] = ()) -> str:
    """Describe an action in words."""
    if isinstance(space, spaces.Discrete):
        if names:
            return f"one of: {', '.join(names)}"
        return f"a whole number from {int(space.start)} to {int(space.start + space.n - 1)}"
    if isinstance(space, spaces.Text):
        return f"a text of {space.min_length} to {space.max_length} characters"
    return f"JSON that fits {json.dumps(space_schema(space))}"


def value_from_json(space: Any, value: Any, names: Sequence[str] = ()) -> Any:
    """Convert a JSON value to a space.

    Raises:
        ToolError: It does not fit; the message tells the model what does.
    """
    converted = _converted(space, value, names)
    if converted is None or not space.contains(converted):
        raise ToolError(f"{shown(value)} is not an action: write {space_hint(space, names)}")
    return converted


def _converted(space: Any, value: Any, names: Sequence[str]) -> Any:
    if isinstance(space, spaces.Discrete):
        return _index(space, value, names)
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary, spaces.Box)):
        return _array(space, value)
    if isinstance(space, spaces.Text):
        return value if isinstance(value, str) else None
    if isinstance(space, spaces.Tuple) and isinstance(value, (list, tuple)) and len(value) == len(space.spaces):
        return tuple(
            _converted(subspace, component, ()) for subspace, component in zip(space.spaces, value, strict=True)
        )
    if isinstance(space, spaces.Dict) and isinstance(value, Mapping) and set(value) == set(space.spaces):
        return {name: _converted(subspace, value[name], ()) for name, subspace in space.spaces.items()}
    return None


def _array(space: Any, value: Any) -> Any:
    try:
        raw = np.asarray(value)
        array = np.asarray(raw, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    if raw.dtype == np.bool_ or array.shape != space.shape:
        return None
    # Cast only where nothing is lost: 1.5 is not a whole number, 1e300 no float32.
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(space.dtype)
    is_lossless = np.issubdtype(space.dtype, np.floating) or bool(np.all(array == cast))
    return cast if is_lossless and bool(np.all(np.isfinite(cast))) else None


def _index(space: Any, value: Any, names: Sequence[str]) -> int | None:
    if isinstance(value, str):
        lowered = value.strip().casefold()
        for number, name in enumerate(names):
            if name.casefold() == lowered:
                return int(space.start) + number
        value = int(lowered) if re.fullmatch(r"-?\d{1,18}", lowered) else None
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1.0 is an integer to JSON's schemas
    return None if isinstance(value, bool) or not isinstance(value, int) else value


def ansi_text(_observation: Any, env: Any) -> str:
    """Return ``env.render()`` as text; coloured parts in brackets."""
    rendering = env.render()
    if not isinstance(rendering, str):
        raise EnvError(
            f"env.render() returned {shown(rendering)}, not text: make the environment with render_mode='ansi', or "
            "give a render= function"
        )
    return _ESCAPE.sub("", _COLOURED.sub(r"[\1]", rendering)).strip("\n")


@dataclass(frozen=True, slots=True)
class World:
    """A well-known environment: its rules, the names of its actions, and its rendering unless that is of numbers."""

    rules: str
    actions: tuple[str, ...]
    render: Render | None = None


def _frozen_lake(observation: Any, env: Any) -> str:
    desc = env.unwrapped.desc
    row, column = divmod(int(observation), desc.shape[1])
    grid = [[cell.decode() for cell in line] for line in desc]
    grid[row][column] = "P"
    return "\n".join("".join(line) for line in grid)


WORLDS: Final[dict[str, World]] = {
    "FrozenLake": World(
        "Cross the lake. S is the start, F is ice, H a hole, G the goal, P where you are. G pays 1, H ends it.",
        ("left", "down", "right", "up"),
        _frozen_lake,
    ),
    "Taxi": World(
        "Drive the taxi to the passenger, pick them up, drive to the destination, drop them off. | is a wall. Each "
        "move costs 1, a wrong pickup or dropoff 10; delivering pays 20.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
    ),
    "Blackjack": World(
        "Come as close to 21 as you can, closer than the dealer, and not over it. Winning pays 1, losing -1. You see "
        "your sum, the dealer's card and whether you have a usable ace.",
        ("stick", "hit"),
    ),
    "CartPole": World(
        "Keep the pole upright and the cart within 2.4 of the middle. Every step pays 1. You see cart position, cart "
        "velocity, pole angle and pole angular velocity.",
        ("left", "right"),
    ),
}
"""Well-known environments, by their names in Gymnasium without the version."""
