"""Pictures of tools, tasks and observations in whole episodes: ReAct, LangGraph, and what cannot be shown."""

from __future__ import annotations

import io
from pathlib import Path

import orjson
import pytest
from picture_env import chart, draw, tasks
from PIL import Image
from rich.console import Console

from support.chat.model_dirs import renderer_for
from support.chat.sees import shared
from support.pictures import PNG, URI, png
from turnwise import RolloutProducer, RolloutRequest, SingleTurnEnv, Task, load_tasks
from turnwise.errors import AgentError, ConfigError, SessionError, TaskError
from turnwise.evaluation.view import render
from turnwise.ext.programs.workdir import observation_values
from turnwise.images import image_label, image_part, image_size, readable_text
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import RolloutParts
from turnwise.types import Media, ToolCall

LOOK = {"role": "assistant", "content": "", "tool_calls": [ToolCall("", "look", {})]}


class Says(SingleTurnEnv):
    def score(self, final):
        return 1.0


async def played(task: Task, env: str, lines, *, agent: str = "react", renderer=None):
    renderer = renderer or shared()[0]
    config = RolloutConfig.model_validate({"env": {"name": env}, "agent": {"name": agent}, "retries": 0})
    written = []
    client = ScriptedClient(renderer, list(lines))
    producer = await RolloutProducer.create(config, client, None, RolloutParts(renderer, write=written.append))
    await producer.gather([RolloutRequest(task)])
    await producer.close()
    [trajectory] = written
    return trajectory


def digests(trajectory) -> list[str]:
    return [medium.digest for segment in trajectory.segments for medium in segment.media]


async def test_agent_sees_and_answers_the_image_of_a_tool() -> None:
    [task] = tasks(1, split="test")
    trajectory = await played(task, "picture", [LOOK, "red 4"])
    assert trajectory.error is None, trajectory.error
    drawn_chart = chart(trajectory.seed, split="test")
    [picture] = [medium for segment in trajectory.segments for medium in segment.media]
    assert picture.data == draw(drawn_chart)
    assert image_size(picture.data) == (64, 16)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(trajectory))
    assert image_label(picture.data) in console.export_text()


async def test_a_task_names_a_picture_beside_its_file(tmp_path: Path) -> None:
    (tmp_path / "boards").mkdir()
    (tmp_path / "boards" / "1.png").write_bytes(PNG)
    rows = [
        {"id": "path", "prompt": [{"role": "user", "content": [{"type": "image", "path": "boards/1.png"}]}]},
        {"id": "uri", "prompt": [{"role": "user", "content": [{"type": "text", "text": "?"}, image_part(PNG)]}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    for task in load_tasks(str(file)):
        assert b"iVBOR" not in orjson.dumps(task.to_record()) or task.id == "uri"
        reread = Task.from_record(orjson.loads(orjson.dumps(task.to_record())))
        trajectory = await played(reread, f"{__name__}:Says", ["red"])
        assert digests(trajectory) == [Media("image", PNG, 0, 1).digest]
    [task] = [row for row in load_tasks(str(file)) if row.id == "path"]
    (tmp_path / "boards" / "1.png").unlink()
    with pytest.raises(TaskError, match=r"rows\.jsonl:1: .*path is 'boards/1\.png': .* cannot be read"):
        load_tasks(str(file))
    with pytest.raises(TaskError, match=r"task path: the image .*1\.png cannot be read any more"):
        task.messages()


@pytest.mark.parametrize(
    ("part", "refusal"),
    [
        ({"type": "image", "path": "rows.jsonl"}, "no image of a known type"),
        ({"type": "image", "image": {"bytes": b"GIF"}}, "no image of a known type"),
        ("text", "a part is an object with 'type'"),
    ],
)
def test_rows_without_an_image_are_named(part, refusal, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    row = {"id": "a", "prompt": [{"role": "user", "content": [part]}]}
    with pytest.raises(TaskError, match=f"task: field 'prompt\\[0\\]'.content\\[0\\].*{refusal}"):
        Task.from_record(row, folder=tmp_path)


async def test_text_model_is_refused_for_images_by_name() -> None:
    with pytest.raises(ConfigError, match="its tool 'look' returns image, but the renderer of this model accepts text"):
        await played(Task("t", ""), "picture", ["red"], renderer=renderer_for("qwen3"))
    task = Task("t", [{"role": "user", "content": [image_part(PNG)]}])
    trajectory = await played(task, f"{__name__}:Says", ["red"], renderer=renderer_for("qwen3"))
    assert "RenderError" in trajectory.error
    assert "this model takes text only" in trajectory.error


def test_readers_of_text_are_told_of_an_image() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "See "}, image_part(png(16, 8)), {"text": "!"}]}
    assert readable_text(message).startswith("See [image 16x8 png, 0.")
    assert readable_text(message).endswith("]!")
    with pytest.raises(AgentError, match="the observation holds an image, and a program is given its task as text"):
        observation_values([message])
    with pytest.raises(SessionError, match="is not valid base64"):
        image_part(URI[:-1] + "%")


def test_the_size_of_every_type_is_read_from_its_header() -> None:
    for name in ("PNG", "JPEG", "GIF", "BMP", "WEBP"):
        for lossless in (False, True) if name == "WEBP" else (False,):
            with io.BytesIO() as file:
                Image.new("RGB", (37, 21), (9, 80, 200)).save(file, name, **({"lossless": True} if lossless else {}))
                assert image_size(file.getvalue()) == (37, 21), name
                assert image_size(file.getvalue()[:9]) is None
