"""A rollout manager from elsewhere: how it is found and made, what it is held to, how it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.chat.toy_renderer import ToyRenderer
from support.rollout.custom_managers import EXAMPLE, Dying, WholeGroups
from turnwise.config import load_config
from turnwise.errors import ConfigError, EnvError, RegistryError, SandboxUnavailable, TrainError, TurnwiseError
from turnwise.evaluation import EvalPlan, evaluate
from turnwise.inference.scripted import ScriptedClient
from turnwise.rollout import RolloutConfig, RolloutManager, RolloutParts, RolloutProducer, RolloutRequest
from turnwise.rollout.managers import check_manager, create_manager
from turnwise.rollout.replay.buffer import LocalReplayBuffer
from turnwise.tasks import Task
from turnwise.trajectory import Trajectory, TrajectoryGroup

HERE = __name__


def config(manager: str | None) -> RolloutConfig:
    return load_config(RolloutConfig, defaults={"env": {"name": "lookup"}, "agent_loop_manager_class": manager})


async def made(manager: str, *, buffer=None, write=None, custom: dict[str, Any] | None = None):
    renderer = ToyRenderer()
    client = ScriptedClient(renderer, lambda request: f"answer {request.session_id}")
    parts = RolloutParts(renderer, write=write, custom=custom or {})
    return await create_manager(config(manager), client, buffer, parts)


def requests(*ids: str, tag: str = "", size: int = 2) -> list[RolloutRequest]:
    return [RolloutRequest(Task(task_id, "go"), 0, size, "val", None, tag) for task_id in ids]


class Bare(RolloutManager):
    """What the contract asks for."""

    def __init__(self, buffer, parts):
        self.buffer, self.parts = buffer, parts

    @classmethod
    async def create(cls, config, client, buffer, parts):
        return cls(buffer, parts)

    async def close(self):
        """Nothing is held."""

    def generate_sequences(self, prompts):
        self.tasks = [asyncio.create_task(self.one(request)) for request in prompts]

    async def one(self, request):
        await self.buffer.put(self.group(request))

    def group(self, request):
        name = f"{request.task.id}{request.tag}"
        return TrajectoryGroup(name, request.task.id, [Trajectory(f"{name}/0", name, name, name)], request.partition)


class Coroutine(Bare):
    async def generate_sequences(self, prompts):
        for request in prompts:
            await self.one(request)


class Stranger(Bare):
    def group(self, request):
        return TrajectoryGroup("g", "another task", [], request.partition)


class Twice(Bare):
    async def one(self, request):
        await super().one(request)
        await super().one(request)


class Junk(Bare):
    def group(self, request):
        return {"prompt_ids": [1], "response_ids": [2]}


class Raising(Bare):
    def generate_sequences(self, prompts):
        raise KeyError("no such queue")


class Failing(Bare):
    @classmethod
    async def create(cls, config, client, buffer, parts):
        raise OSError("no cluster")


class Refusing(Bare):
    @classmethod
    async def create(cls, config, client, buffer, parts):
        raise EnvError("the pool is empty")


class Elsewhere(Bare):
    @classmethod
    async def create(cls, config, client, buffer, parts):
        return None


class Wanting(Bare):
    @classmethod
    async def create(cls, config, cluster):
        raise AssertionError


class Synchronous(Bare):
    @classmethod
    def create(cls, config, client, buffer, parts):
        return cls(buffer, parts)


class Deaf(RolloutManager):
    @classmethod
    async def create(cls, config, client, buffer, parts):
        return cls()

    async def close(self):
        """Nothing is held."""


class Baseless:
    """A manager for another framework."""

    def generate_sequences(self, prompts):
        raise AssertionError


class WrongModel(Bare):
    custom_model = dict


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Manager", "'Manager' is not a reference: write pkg.mod:Name"),
        ("no_such_package.Manager", "no module named 'no_such_package'"),
        (f"{HERE}.Bear", "has no 'Bear'; did you mean 'Bare'?"),
        (f"{HERE}.config", "is a function, not a class"),
        (f"{HERE}.Deaf", "does not define generate_sequences"),
        (f"{HERE}.Baseless", "must derive from turnwise.rollout.core.RolloutManager"),
        (f"{HERE}.Coroutine", "generate_sequences is async: start tasks in it and return at once"),
        (f"{HERE}.WrongModel", "custom_model is <class 'dict'>, not a pydantic model"),
    ],
)
def test_classes_that_are_no_manager_are_refused_before_the_start(name: str, message: str) -> None:
    with pytest.raises((ConfigError, RegistryError)) as error:
        check_manager(config(name), {})
    assert str(error.value).startswith(f"rollout.agent_loop_manager_class '{name}'")
    assert message in str(error.value)


def test_a_manager_is_loaded_from_a_file_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("from support.rollout.custom_managers import WholeGroups\n")
    monkeypatch.chdir(tmp_path)
    assert check_manager(config("mine.py:WholeGroups"), {}) is WholeGroups
    assert check_manager(config(None), {"anything": 1}) is None


def test_its_own_model_checks_the_custom_section() -> None:
    named = config("support.rollout.custom_managers.WholeGroups")
    assert check_manager(named, {"groups": {"at_once": 3}}) is WholeGroups
    with pytest.raises(ConfigError, match=r"custom, as support.rollout.custom_managers.WholeGroups reads it") as error:
        check_manager(named, {"groups": {"at_onc": 3}})
    assert "did you mean groups.at_once?" in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Failing", "create failed: OSError: no cluster"),
        ("Elsewhere", "create returned None, not a Elsewhere"),
        ("Wanting", "create failed: TypeError: Wanting.create() takes 3 positional arguments but 5 were given"),
        ("Synchronous", "create failed: TypeError: object Synchronous can't be used in 'await' expression"),
    ],
)
async def test_a_create_that_fails_is_an_error_of_the_configuration(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"{HERE}.{name}") as error:
        await made(f"{HERE}.{name}")
    assert message in str(error.value)


async def test_a_turnwise_error_of_create_is_raised_unchanged() -> None:
    with pytest.raises(EnvError, match="the pool is empty"):
        await made(f"{HERE}.Refusing")


async def test_without_a_class_the_package_s_own_rolls_out() -> None:
    renderer = ToyRenderer()
    manager = await create_manager(config(None), ScriptedClient(renderer, []), None, RolloutParts(renderer))
    assert isinstance(manager, RolloutProducer)
    await manager.close()


async def test_groups_come_back_in_the_order_of_the_requests() -> None:
    written: list[Trajectory] = []
    seen: list[str] = []
    manager = await made(f"{HERE}.Bare", write=written.append)
    try:
        batch = [*requests("b", "a", tag="x"), *requests("b", "c", tag="y")]
        groups = await manager.gather(batch, lambda group: seen.append(group.id))
    finally:
        await manager.close()
    assert [group.id for group in groups] == ["bx", "ax", "by", "cy"]
    assert sorted(seen) == ["ax", "bx", "by", "cy"]
    assert sorted(trajectory.id for trajectory in written) == ["ax/0", "bx/0", "by/0", "cy/0"], (
        "it wrote none itself: we did"
    )


async def test_a_manager_gets_the_custom_section() -> None:
    manager = await made(f"{HERE}.Bare", custom={"queue": {"size": 3}})
    assert manager._inner.parts.custom == {"queue": {"size": 3}}
    assert manager._inner.parts.settings is None
    await manager.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Stranger", "task 'another task' into partition 'val' that was not requested"),
        ("Twice", "task 'a' into partition 'val' a second time"),
        ("Junk", "got {'prompt_ids': [1], 'response_ids': [2]} instead of a TrajectoryGroup"),
        ("Raising", "Raising.generate_sequences raised KeyError: 'no such queue'"),
    ],
)
async def test_a_manager_that_breaks_its_contract_ends_the_run(name: str, message: str) -> None:
    manager = await made(f"{HERE}.{name}")
    async with asyncio.timeout(20):
        with pytest.raises(TrainError) as error:
            await manager.gather(requests("a", "b"))
    await manager.close()
    assert message in str(error.value)


async def test_gather_refuses_two_tasks_of_one_id() -> None:
    manager = await made(f"{HERE}.Bare")
    with pytest.raises(TurnwiseError, match="1 tasks have the id of another task"):
        await manager.gather(requests("a", "a"))
    await manager.close()


async def test_a_failed_task_of_a_manager_ends_waiting_samples() -> None:
    buffer = LocalReplayBuffer()
    custom = {"groups": {"at_once": 2}}
    manager = await made(f"support.rollout.custom_managers.{Dying.__name__}", buffer=buffer, custom=custom)
    manager.generate_sequences([RolloutRequest(Task(str(n), "go"), group_size=2) for n in range(4)])
    async with asyncio.timeout(20):
        with pytest.raises(TrainError, match="Dying: a task that it started raised RuntimeError: the scheduler lost"):
            await buffer.sample(1, "train", 4)
    await manager.close()


class Endless(Bare):
    ended = False

    async def one(self, request):
        try:
            await asyncio.Event().wait()
        finally:
            type(self).ended = True


async def test_closing_cancels_tasks_that_a_manager_left() -> None:
    manager = await made(f"{HERE}.Endless")
    manager.generate_sequences(requests("a"))
    await asyncio.sleep(0)
    await manager.close()
    assert Endless.ended


async def test_a_custom_manager_evaluates_with_the_figures_of_the_producer() -> None:
    plan = EvalPlan(tasks="turnwise.envs.basic.lookup:tasks?n=4&split=test", samples=3)
    figures = []
    for name in (None, EXAMPLE):
        manager = await made(name)
        try:
            figures.append(await evaluate(manager, plan))
        finally:
            await manager.close()
    inner, outside = figures
    assert inner.sampled is not None
    assert outside.sampled is not None
    assert outside.sampled.success == inner.sampled.success
    assert outside.sampled.stop_reasons == inner.sampled.stop_reasons
    assert inner.sampled.success.episodes == 12


def test_the_contract_alone_makes_no_manager() -> None:
    class Half(RolloutManager):
        def generate_sequences(self, requests):
            raise AssertionError

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


async def test_a_run_whose_sandboxes_cannot_be_had_does_not_begin(tmp_path: Path) -> None:
    renderer = ToyRenderer()
    for sandbox, error, message in (
        ({"name": "doker"}, ConfigError, "did you mean 'docker'"),
        ({"name": "docker", "config": {"url": f"unix://{tmp_path}/none"}}, SandboxUnavailable, "no container engine"),
    ):
        section = load_config(RolloutConfig, defaults={"env": {"name": "lookup"}, "sandbox": sandbox})
        with pytest.raises(error, match=message):
            await RolloutProducer.create(
                section, ScriptedClient(renderer, []), LocalReplayBuffer(), RolloutParts(renderer)
            )
