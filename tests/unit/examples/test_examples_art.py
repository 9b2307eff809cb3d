"""Loops written for ART drive a run: what their rollouts ask is recorded, audited and trained."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

# In ART: import art.
import art_door as art
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from support.trainer.judged_run import MODEL, build_judge
from support.trainer.lookup_run import lines, shared, silent
from turnwise.errors import AgentError, ConfigError, TrainError
from turnwise.trainer.run.audit import audit_run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that names colours."""
    return shared(tmp_path_factory, "judge-model", build_judge) / MODEL


@pytest.fixture
def trained(model: Path) -> art.TrainableModel:
    return art.TrainableModel(name="colours", project="test", base_model=str(model))


@pytest_asyncio.fixture
async def backend(trained: art.TrainableModel, tmp_path: Path) -> AsyncIterator[art.LocalBackend]:
    # All rows are trained, also where the rewards of a group happen to be equal.
    async with art.LocalBackend(path=str(tmp_path), algorithm={"drop_zero_variance": False}) as opened:
        await trained.register(opened)
        yield opened


async def name_colour(model: art.TrainableModel, number: int, returned: Any = None) -> Any:
    """Ask for a colour, as a rollout of ART does; raise for the number 3."""
    client = model.openai_client()
    prompt = {"role": "user", "content": f"Name a colour, number {number}."}
    completion = await client.chat.completions.create(model=model.get_inference_name(), messages=[prompt], max_tokens=4)
    choice = completion.choices[0]
    if number == 3:
        raise ValueError("no colour")
    reward = float(choice.message.content == "red")
    return returned or art.Trajectory(messages_and_choices=[prompt, choice], reward=reward, metrics={"requests": 1})


async def gather(*groups: Any, **options: Any) -> list[art.TrajectoryGroup]:
    return await art.gather_trajectory_groups(groups, **options)


async def test_a_loop_of_art_trains_on_what_its_rollouts_asked(
    trained: art.TrainableModel, backend: art.LocalBackend, tmp_path: Path
) -> None:
    async def double(group: art.TrajectoryGroup) -> art.TrajectoryGroup:
        for trajectory in group:
            assert trajectory.messages()[-1]["role"] == "assistant"
            trajectory.reward *= 2
        return group

    for step in range(await trained.get_step(), 2):
        groups = await gather(
            *(art.TrajectoryGroup(name_colour(trained, number) for _ in range(4)) for number in range(2)),
            art.TrajectoryGroup(name_colour(trained, 4) for _ in range(2)),
            after_each=double,
        )
        rewards = [trajectory.reward for group in groups for trajectory in group]
        assert [len(group) for group in groups] == [4, 4, 2]
        assert set(rewards) <= {0.0, 2.0}
        result = await backend.train(trained, groups, learning_rate=3e-3)
        assert result.step == step + 1
        assert result.metrics["reward/mean"] == pytest.approx(sum(rewards) / 10)
        assert result.metrics["lr/adamw"] == 3e-3
    await backend.close()
    run = tmp_path / "test" / "colours"
    report = audit_run(run, console=silent())
    assert report.contradictions == []
    assert report.counts["turns equal to a call"] == report.counts["turns"] == 2 * 10
    batches = [record for record in lines(run / "batches.jsonl") if "rows" in record]
    assert [len(record["rows"]) for record in batches] == [10, 10]
    with pytest.raises(AgentError, match="the run has ended: make a LocalBackend"):
        await gather(art.TrajectoryGroup([name_colour(trained, 0)]))


async def test_failed_rollouts_are_counted_and_raised(trained: art.TrainableModel, backend: art.LocalBackend) -> None:
    [group] = await gather(art.TrajectoryGroup(name_colour(trained, number) for number in (0, 3)), max_exceptions=1)
    assert ([str(error) for error in group.exceptions], len(group)) == (["no colour"], 1)
    members = [name_colour(trained, 0, "red"), name_colour(trained, 0), name_colour(trained, 3)]
    with pytest.raises(Exception, match=r"a rollout returned .*: return an art.Trajectory|no colour") as raised:
        await gather(art.TrajectoryGroup(members), max_exceptions=0.5)
    assert raised.value.__notes__ == ["2 of 3 rollouts failed; max_exceptions is 0.5"]
    with pytest.raises(AgentError, match=r"gather_trajectory_groups: .* is no group: give TrajectoryGroup"):
        await gather([])
    with pytest.raises(AgentError, match=r"model.register\(colours\): a run is open"):
        await trained.register(art.LocalBackend())


async def test_what_cannot_be_trained_is_refused_by_name(
    trained: art.TrainableModel, backend: art.LocalBackend
) -> None:
    groups = await gather(*(art.TrajectoryGroup(name_colour(trained, number) for _ in range(2)) for number in range(2)))
    with pytest.raises(ConfigError, match=r"loss_fn.*set it for the run: LocalBackend"):
        await backend.train(trained, groups, loss_fn="ppo")
    with pytest.raises(AgentError, match="a group joins rollouts of several groups"):
        await backend.train(trained, [art.TrajectoryGroup([*groups[0], *groups[1]])])
    with pytest.raises(AgentError, match="a trajectory is of no rollout since the last step"):
        await backend.train(trained, [art.TrajectoryGroup([art.Trajectory(reward=1.0)])])
    with pytest.raises(TrainError, match=r"learn\(\) was given no group"):
        await backend.train(trained, [art.TrajectoryGroup([])])
    groups[0].trajectories[0].reward = float("nan")
    with pytest.raises(AgentError, match="a reward is nan: set a finite number"):
        await backend.train(trained, groups)


async def test_run_continues_without_what_was_not_trained(trained: art.TrainableModel, tmp_path: Path) -> None:
    for steps in ([], [1]):
        async with art.LocalBackend(path=str(tmp_path)) as backend:
            await trained.register(backend)
            [group] = await gather(art.TrajectoryGroup(name_colour(trained, 0) for _ in range(4)))
            # Rolled out anew, not returned from the journal of the run before.
            assert len(group) == 4
            assert [(await backend.train(trained, [group])).step for _ in steps] == steps
    assert audit_run(tmp_path / "test" / "colours", console=silent()).contradictions == []


async def test_what_comes_before_register_is_refused() -> None:
    trained = art.TrainableModel(name="colours", project="test", base_model="/nowhere")
    with pytest.raises(AgentError, match=r"backend.train: await colours.register\(backend\) comes first"):
        await art.LocalBackend().train(trained, [])
    with pytest.raises(AgentError, match=r"inference_base_url: read it, and ask the model, in a rollout"):
        _ = trained.openai_client().chat
    with pytest.raises(AgentError, match=r"model.get_step: await model.register"):
        await trained.get_step()
    with pytest.raises(ConfigError, match="lr"):
        await trained.register(art.LocalBackend(lr=1.0))


@pytest_asyncio.fixture
async def judge() -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server of chats that prefers the last attempt, and what it was asked."""
    questions: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        questions.append(await request.json())
        names = questions[-1]["response_format"]["json_schema"]["schema"]["required"][1:]
        scores = {name: number / 10 for number, name in enumerate(names, 1)}
        message = {"role": "assistant", "content": json.dumps({"explanation": "later is better", **scores})}
        return web.json_response({"choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", questions
    await runner.cleanup()


async def test_ruler_rewards_a_group_by_the_scores_of_a_judge(judge: tuple[str, list[dict[str, Any]]]) -> None:
    address, questions = judge
    members = [
        art.Trajectory(messages_and_choices=[{"role": "assistant", "content": text}], reward=3.0, episode=text)
        for text in ("red", "blue")
    ]
    params = {"api_base": address, "api_key": "none", "temperature": 0.5}
    group = await art.ruler_score_group(art.TrajectoryGroup(members), "hosted_vllm/Qwen/Qwen3", params, "Be blue.")
    assert group is not None
    assert [trajectory.reward for trajectory in group] == [0.1, 0.2]
    assert [trajectory.episode for trajectory in group] == ["red", "blue"]
    assert members[0].metrics == {"independent_reward": 3.0, "ruler_score": 0.1}
    assert members[0].logs == ["RULER explanation: later is better"]
    assert (questions[0]["model"], questions[0]["temperature"]) == ("Qwen/Qwen3", 0.5)
    assert "Be blue." in questions[0]["messages"][0]["content"]
    assert json.loads(questions[0]["messages"][1]["content"])["attempt_2"] == [{"role": "assistant", "content": "blue"}]


async def test_ruler_without_an_answer_of_its_form_raises_or_leaves_the_group_out(
    judge: tuple[str, list[dict[str, Any]]],
) -> None:
    group = art.TrajectoryGroup([art.Trajectory()])
    params = {"api_base": f"{judge[0]}/none", "api_key": "none"}
    assert await art.ruler_score_group(group, "any/model", params, swallow_exceptions=True) is None
    with pytest.raises(openai.NotFoundError):
        await art.ruler_score_group(group, "any/model", params)
    with pytest.raises(ConfigError, match=r"judge_model is anthropic/x: name its API"):
        await art.ruler_score_group(group, "anthropic/x")
