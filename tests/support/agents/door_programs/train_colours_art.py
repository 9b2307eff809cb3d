"""Train a model to name a colour, in the forms of ART's examples: one answer, several turns, a filter of groups."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import art
import openai
from openai.types.chat.chat_completion import Choice

RATES = (1e-3, 2e-3)
LIMIT = 2


async def answer(client: openai.AsyncOpenAI, model: art.Model, number: int) -> art.Trajectory:
    """Ask once, by a client that all rollouts share."""
    messages: art.Messages = [{"role": "user", "content": f"Name a colour, number {number}."}]
    completion = await client.chat.completions.create(
        model=model.get_inference_name(), messages=messages, max_tokens=4, timeout=100
    )
    choice = completion.choices[0]
    reward = 1.0 if choice.message.content == "red" else 0.0
    return art.Trajectory(messages_and_choices=[*messages, choice], reward=reward, metadata={"number": number})


async def play(model: art.Model, number: int) -> art.Trajectory:
    """Ask until the answer is red, by a client of this rollout; the last number cannot be played."""
    client = openai.AsyncOpenAI(base_url=model.inference_base_url, api_key=model.inference_api_key)
    trajectory = art.Trajectory(messages_and_choices=[{"role": "system", "content": "One word."}], reward=0)
    trajectory.metadata["number"] = number
    while trajectory.metrics.get("turns", 0) < LIMIT:
        trajectory.messages_and_choices.append({"role": "user", "content": f"Name a colour, number {number}."})
        completion = await client.chat.completions.create(
            model=model.get_inference_name(), messages=trajectory.messages(), max_completion_tokens=4
        )
        choice = completion.choices[0]
        trajectory.messages_and_choices.append(choice)
        trajectory.metrics["turns"] = trajectory.metrics.get("turns", 0) + 1
        if number == 7:
            raise ValueError("number 7 cannot be played")
        if choice.message.content == "red":
            trajectory.reward = 1 / trajectory.metrics["turns"]
            break
    return trajectory.finish()


async def keep_members(group: art.TrajectoryGroup) -> art.TrajectoryGroup | None:
    """Leave out groups of the number 1, and of others the last member; rewards differ within a group."""
    if any(trajectory.metadata["number"] == 1 for trajectory in group):
        return None
    for position, trajectory in enumerate(group):
        trajectory.reward = 2 * trajectory.reward + position / 100
    return art.TrajectoryGroup(group.trajectories[:3], metadata=group.metadata)


async def train(base_model: str, path: str) -> None:
    """Train for two steps; a program that starts again continues."""
    # Beside the others it would need the packages of a backend where none is used.
    from art.local import LocalBackend

    model = art.TrainableModel(name="colours", project="doors", base_model=base_model)
    backend = LocalBackend(path=path)
    await model.register(backend)
    client = model.openai_client()
    for step in range(await model.get_step(), len(RATES)):
        answers = await art.gather_trajectory_groups(
            (
                art.TrajectoryGroup((answer(client, model, number) for _ in range(4)), metadata={"step": step})
                for number in range(3)
            ),
            pbar_desc="gather",
            after_each=keep_members,
        )
        games = await art.gather_trajectory_groups(
            [art.TrajectoryGroup(play(model, number) for number in (5, 6, 7, 5))], max_exceptions=1
        )
        result = await backend.train(model, [*answers, *games], learning_rate=RATES[step])
        await model.log(answers, metrics=result.metrics, step=result.step, split="train")
        await model.delete_checkpoints()
        print(json.dumps({
            "step": result.step,
            "groups": [len(group) for group in (*answers, *games)],
            "exceptions": [len(group.exceptions) for group in games],
            "rewards": [trajectory.reward for group in (*answers, *games) for trajectory in group],
        }))  # fmt: skip
    await backend.close()


def fields_of(trajectory: art.Trajectory) -> list[Any]:
    """Return what a trajectory holds beside its conversation."""
    metrics, histories = dict(trajectory.metrics), trajectory.additional_histories
    return [trajectory.reward, metrics, trajectory.metadata, trajectory.logs, trajectory.tools, histories]


def describe() -> None:
    """Print what trajectories and groups say of themselves."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = Choice.model_validate({"finish_reason": "tool_calls", "index": 0, "message": message})
    tool = {"role": "tool", "tool_call_id": "c1", "content": "red"}
    trajectory = art.Trajectory(
        messages_and_choices=[{"role": "user", "content": "Look."}, choice, tool],
        tools=[{"type": "function", "function": {"name": "look"}}],
        reward=1,
        metrics={"turns": 2, "right": True},
        metadata={"number": 4},
    )
    trajectory.log("looked")
    group = art.TrajectoryGroup([trajectory, ValueError("lost")], metadata={"task": "look"})
    print(json.dumps({
        "trajectories": [fields_of(trajectory), fields_of(art.Trajectory())],
        "messages": trajectory.messages(),
        "finished": sorted(trajectory.finish().metrics),
        "members": [member.reward for member in group],
        "group": [len(group), group.metadata, len(group.exceptions)],
    }, sort_keys=True))  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(train(*sys.argv[1:]))
    else:
        describe()
