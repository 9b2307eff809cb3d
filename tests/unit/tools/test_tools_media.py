"""Images, video and audio: declared by tools, held against the renderer before a rollout, never dropped in silence."""

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.pictures import PNG, URI
from turnwise import BaseTool, RolloutProducer, RolloutRequest, ToolEnv, ToolResponse, function_tool
from turnwise.errors import ConfigError, EnvError, ToolSchemaError
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutParts
from turnwise.tasks import Task
from turnwise.tools import ToolRunner
from turnwise.types import ToolCall

CALL = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "shot", {})]}
counts = {"made": 0, "reset": 0, "closed": 0}


class Base(ToolEnv):
    def __init__(self):
        counts["made"] += 1

    def reset(self, task=None, *, seed=None):
        counts["reset"] += 1
        return "look", {}

    def score(self, final):
        return 1.0

    async def close(self):
        counts["closed"] += 1
        await super().close()


class Declares(Base):
    @function_tool(media=["image"])
    def shot(self) -> ToolResponse:
        return ToolResponse("a cat", image=[PNG])


class Hides(Base):
    @function_tool
    def shot(self) -> ToolResponse:
        return ToolResponse("a cat", image=[PNG], audio=[b"wav"])


class Camera(BaseTool):
    media = ("image", "video")

    def __init__(self):
        super().__init__({}, {"name": "shot", "parameters": {"type": "object", "properties": {}}})


class HasCamera(Base):
    tools = (Camera,)


class Plain(Base):
    @function_tool
    def shot(self) -> ToolResponse:
        return ToolResponse("a cat", image=[], video=None)


class Broken(Base):
    def __init__(self):
        raise OSError("no disk")


@pytest.fixture(autouse=True)
def fresh():
    counts.update(made=0, reset=0, closed=0)


async def producer(env, lines=(CALL, "done"), renderer=None):
    renderer = renderer or ToyRenderer()
    config = RolloutConfig.model_validate({"env": {"name": f"{__name__}:{env}"}, "retries": 1})
    client = ScriptedClient(renderer, list(lines))
    written = []
    return await RolloutProducer.create(config, client, None, RolloutParts(renderer, write=written.append)), written


@pytest.mark.parametrize(("env", "kinds"), [("Declares", "image"), ("HasCamera", "image, video")])
async def test_unsupported_media_are_refused_before_any_episode(env, kinds):
    words = f"{env}': its tool 'shot' returns {kinds}, but the renderer of this model accepts text only: leave"
    with pytest.raises(ConfigError, match=words):
        await producer(env)
    assert counts == {"made": 1, "reset": 0, "closed": 1}


async def test_supported_media_are_accepted():
    class Sees(ToyRenderer):
        def __init__(self):
            super().__init__()
            self.media = frozenset(["image"])

    rollouts, _ = await producer("Declares", renderer=Sees())
    await rollouts.close()
    with pytest.raises(ConfigError, match=r"returns video, but .* accepts text, image only"):
        await producer("HasCamera", renderer=Sees())


async def test_task_environment_with_unsupported_media_fails_at_reset():
    rollouts, written = await producer("Plain")
    [group] = await rollouts.gather([RolloutRequest(Task("t", "", env=f"{__name__}:Declares"))])
    await rollouts.close()
    assert (group.failed, len(written)) == (1, 1), "it would fail again: no second attempt"
    assert "returns image" in written[0].error
    assert counts["reset"] == 0
    assert counts["made"] == counts["closed"] == 2


async def test_undeclared_media_end_the_episode_by_name():
    rollouts, written = await producer("Hides")
    [group] = await rollouts.gather([RolloutRequest(Task("t", ""))])
    await rollouts.close()
    assert (group.failed, len(written)) == (1, 2)
    for trajectory in written:
        assert "tool 'shot' returned image, audio, which it does not declare: write media=(" in trajectory.error
        assert trajectory.rewards == []


async def test_empty_lists_are_no_media_and_the_first_environment_is_used():
    rollouts, _ = await producer("Plain")
    [group] = await rollouts.gather([RolloutRequest(Task("t", ""), group_size=2)])
    await rollouts.close()
    assert [trajectory.reward for trajectory in group.trajectories] == [1.0, 1.0]
    assert counts == {"made": 2, "reset": 2, "closed": 2}


async def test_an_environment_that_cannot_be_made_is_said_by_its_episodes():
    rollouts, written = await producer("Broken")
    [group] = await rollouts.gather([RolloutRequest(Task("t", ""))])
    await rollouts.close()
    assert group.failed == 1
    assert "no disk" in written[0].error


async def test_a_declared_medium_is_part_of_the_message():
    outcome = await ToolRunner({"shot": function_tool("shot", media="image")(_shot)}).run(ToolCall("c", "shot", {}))
    assert outcome.response.content() == [
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "text", "text": "a cat"},
    ]


def _shot() -> ToolResponse:
    return ToolResponse("a cat", image=[PNG])


async def test_the_error_of_a_runner():
    with pytest.raises(EnvError, match="declare"):
        await ToolRunner({"shot": function_tool("shot", media=["audio"])(_shot)}).run(ToolCall("c", "shot", {}))


def test_unknown_kinds():
    with pytest.raises(
        ToolSchemaError, match="tool 'f': media names 'images', 'text': allowed are image, video, audio"
    ):
        function_tool("f", media=["images", "text"])(lambda: "")
