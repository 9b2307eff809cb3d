"""Function tools as verl's documentation shows them: a Google docstring, and the forms of what they return.

Written to verl's signatures. What changes for Turnwise is the line of the import, and in the configuration the name
``rollout.env.tools.function_tool_path`` (verl: ``actor_rollout_ref.rollout.multi_turn.function_tool_path``).
"""

from __future__ import annotations

from typing import Literal

# verl: from verl.tools.function_tool import function_tool
from turnwise.tools import function_tool


@function_tool
def compat_weather(city: str, unit: Literal["celsius", "fahrenheit"] = "celsius") -> dict:
    """Get the weather of a city.

    Args:
        city: The name of the city.
        unit: The unit of the temperature.

    Returns:
        The weather.
    """
    return {"city": city, "temperature": 21 if unit == "celsius" else 70}


@function_tool("compat_search")
async def web_search(queries: list[str], limit: int | None = None):
    """Search the web.

    Args:
        queries: What to search for.
        limit: How many results, or all.
    """
    return f"{len(queries)} queries", 0.25, {"queries": len(queries)}


@function_tool(schema={"type": "function", "function": {"name": "compat_pair", "description": "A pair.", "parameters": {
    "type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}}})  # fmt: skip
def pair(n: int):
    return str(n), None


# What follows runs them: through the runner, with a model that follows a script.

from support.chat.toy_renderer import ToyRenderer  # noqa: E402
from turnwise.config import load_config  # noqa: E402
from turnwise.inference.scripted import ScriptedClient  # noqa: E402
from turnwise.rollout import RolloutConfig, RolloutProducer, RolloutRequest  # noqa: E402
from turnwise.rollout.core import RolloutParts  # noqa: E402
from turnwise.tasks import Task  # noqa: E402
from turnwise.types import ToolCall  # noqa: E402


def calls(*named: tuple[str, dict]):
    return {"role": "assistant", "content": "", "tool_calls": [ToolCall("", name, args) for name, args in named]}


async def test_an_episode_with_all_three() -> None:
    env = {
        "name": "tool",
        "config": {"scorer": "turnwise.envs.basic.task_env:only_tools"},
        "tools": {"function_tool_path": __file__},
    }
    config = load_config(RolloutConfig, defaults={"env": env})
    renderer = ToyRenderer()
    script = [
        calls(
            ("compat_weather", {"city": "Rome"}), ("compat_search", {"queries": ["a", "b"]}), ("compat_pair", {"n": 3})
        ),
        calls(("compat_pair", {"n": 10})),
        "21 degrees",
    ]
    producer = await RolloutProducer.create(config, ScriptedClient(renderer, script), None, RolloutParts(renderer))
    [group] = await producer.gather([RolloutRequest(Task("t", "How warm is Rome?"))])
    await producer.close()
    [trajectory] = group.trajectories
    assert trajectory.error is None
    assert trajectory.rewards == [("t0", "tool/compat_search", 0.25)]
    assert trajectory.turn_metrics["t0"]["compat_search/queries"] == 2.0
    answers = trajectory.segments[2].messages
    assert [message["content"] for message in answers] == ['{"city": "Rome", "temperature": 21}', "2 queries", "3"]
    assert '"invalid_arguments"' in trajectory.segments[4].messages[0]["content"]
    schemas = {tool["function"]["name"]: tool["function"] for tool in trajectory.segments[0].tools}
    assert schemas["compat_weather"]["description"] == "Get the weather of a city."
    properties = {name: function["parameters"]["properties"] for name, function in schemas.items()}
    assert properties["compat_weather"]["city"] == {"type": "string", "description": "The name of the city."}
    assert properties["compat_weather"]["unit"]["enum"] == ["celsius", "fahrenheit"]
    assert properties["compat_search"]["queries"]["items"] == {"type": "string"}
    assert properties["compat_search"]["limit"]["default"] is None
    assert properties["compat_pair"]["n"] == {"type": "integer", "maximum": 9}
