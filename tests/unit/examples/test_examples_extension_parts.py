"""What the extensions of ``examples/extensions`` compute, refuse and write, each alone."""

from __future__ import annotations

import asyncio
import copy
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from support.chat.model_dirs import renderer_for
from support.engine.tiny_lm import VOCABULARY, make_model, save_model
from support.trainer.learner_contract import check_learner
from turnwise.envs.core import Env
from turnwise.errors import ConfigError, TrainError
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engines import check_engine as check_inference
from turnwise.inference.scripted import ScriptedClient
from turnwise.plugins import load_file
from turnwise.rollout.config import RolloutConfig
from turnwise.rollout.core import GroupFacts, RolloutParts, RolloutRequest
from turnwise.rollout.managers import check_manager
from turnwise.rollout.replay.strategies import InFlight
from turnwise.tasks import Task
from turnwise.trainer.config.policy import LoggerConfig, PolicyConfig
from turnwise.trainer.learn.learner import check_engine, open_learner
from turnwise.trainer.observe.loggers import LoggedRun, chosen_logger
from turnwise.trajectory import TrajectoryGroup

FOLDER = Path(__file__).parents[3] / "examples" / "extensions"
LOGGER = f"{FOLDER}/logger.py:SQLiteLogger"
ENGINE = f"{FOLDER}/model_engine.py:UpperLayers"
SERVER = f"{FOLDER}/inference_engine.py:PrefixedServer"
pytestmark = pytest.mark.usefixtures("registries")


def example(name: str) -> Any:
    return load_file(FOLDER / f"{name}.py", "example")


# logger.py


def logged_run(directory: Path, step: int = 0, name: str = "one") -> LoggedRun:
    return LoggedRun(name=name, id=f"id-{name}", directory=directory, config={"steps": 3}, step=step)


def test_the_logger_of_a_resumed_run_replaces_steps(tmp_path: Path) -> None:
    make, curve = example("logger").SQLiteLogger, example("logger").curve
    logger = make(logged_run(tmp_path))
    for step in (1, 2, 3):
        logger.log(step, {"reward/mean": step / 10, "loss": float("nan")})
    logger.log(3, {"eval/sampled": 0.5})
    logger.close()
    file = tmp_path / "figures.db"
    assert curve(file, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.3)]
    # It was killed after step 3, whose checkpoint was not written.
    logger = make(logged_run(tmp_path, step=2))
    assert curve(file, "reward/mean") == [(1, 0.1), (2, 0.2)]
    assert curve(file, "eval/sampled") == []
    logger.log(3, {"reward/mean": 0.9})
    logger.log(3, {"reward/mean": 0.8})
    logger.close()
    assert curve(file, "reward/mean") == [(1, 0.1), (2, 0.2), (3, 0.8)]


def test_runs_share_a_database(tmp_path: Path) -> None:
    make, curve = example("logger").SQLiteLogger, example("logger").curve
    shared = tmp_path / "all.db"
    loggers = [make(logged_run(tmp_path, name=name), file=str(shared)) for name in ("one", "other")]
    for number, logger in enumerate(loggers):
        logger.log(1, {"loss": float(number)})
        logger.close()
    assert curve(shared, "loss") == [(1, 0.0), (1, 1.0)]
    assert curve(shared, "loss", run="other") == [(1, 1.0)]
    with closing(sqlite3.connect(shared)) as database:
        assert [json.loads(row[0]) for row in database.execute("SELECT config FROM runs")] == [{"steps": 3}] * 2


def test_options_of_the_logger_are_checked(tmp_path: Path) -> None:
    assert chosen_logger(LoggerConfig(name=LOGGER, config={"file": "x.db", "wait": 2})).options["wait"] == 2.0
    for config, message in (({"path": "x.db"}, "path"), ({"wait": 0}, "wait"), ({"file": 3}, "file")):
        with pytest.raises(ValueError, match=message):
            LoggerConfig(name=LOGGER, config=config)
    with pytest.raises(TrainError, match=r"loggers\.config\.file is .*: unable to open database file; name a file"):
        example("logger").SQLiteLogger(logged_run(tmp_path), file=str(tmp_path / "no" / "figures.db"))


# model_engine.py


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(make_model("qwen3", initializer_range=0.1), tmp_path_factory.mktemp("model"))


def policy(model: Path, frozen: Any, **more: Any) -> PolicyConfig:
    settings = {"model": {"path": model, "device": "cpu", **more}, "optim": {"lr": 1e-2}}
    return PolicyConfig.model_validate({**settings, "engine": ENGINE, "engine_options": {"frozen": frozen}})


def test_the_model_engine_keeps_the_contract_and_its_frozen_weights(model: Path) -> None:
    learner = open_learner(policy(model, 1), 100)
    exported = {name: tensor.clone() for name, tensor in learner.export_weights()}
    learners = []

    def make() -> Any:
        learners.append(copy.deepcopy(learner))
        return learners[-1]

    assert check_learner(make, vocabulary=VOCABULARY) == []
    frozen = {name for name in exported if ".layers.0." in name or "embed_tokens" in name}
    moved = {
        name for learner in learners for name, tensor in learner.export_weights() if not tensor.equal(exported[name])
    }
    assert any(".layers.1." in name for name in moved)
    assert not frozen & moved
    assert frozen


def test_options_of_the_model_engine_are_checked_before_the_model_is_loaded(model: Path) -> None:
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    check_engine(policy(model, layers - 1))
    with pytest.raises(TrainError, match=rf"engine_options\.frozen is {layers}, .* has {layers} layers: leave one"):
        check_engine(policy(model, layers))
    with pytest.raises(TrainError, match=r"model\.lora freezes the model already"):
        check_engine(policy(model, 1, lora={"rank": 4}))
    for option in (-1, "two"):
        with pytest.raises(ValueError, match="frozen"):
            policy(model, option)


# inference_engine.py


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"custom": {}}, r"inference\.custom\.prefix is None: write the command"),
        ({"custom": {"prefix": ""}}, r"prefix is '': write the command"),
        ({"custom": {"prefix": "nice 'x"}}, r"prefix is .*: No closing quotation"),
        ({"custom": {"prefix": ["nice", 5]}}, r"prefix is \['nice', 5\]"),
        ({"custom": {"prefix": "nicest -n 5"}}, r"begins with 'nicest', which is no program on PATH"),
        ({"custom": {"prefix": "nice", "cores": 2}}, r"inference\.custom\.cores is unknown"),
        ({"custom": {"prefix": "nice"}, "url": "http://127.0.0.1:1"}, r"inference\.url names servers that run already"),
        ({"custom": {"prefix": "nice"}, "dtype": "float16"}, r"inference\.dtype is float16"),
    ],
)
async def test_the_prefix_is_checked_before_a_server_starts(model: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await check_inference(model, InferenceConfig.model_validate({"engine": SERVER, **options}))


async def test_a_prefix_stands_before_the_command_line_wherever_the_run_is_placed(model: Path, tmp_path: Path) -> None:
    engines = example("inference_engine")
    started: list[Any] = []

    class Listed(engines.Placement):  # type: ignore[misc, name-defined]
        ranks = None

        async def start(self, program: Any) -> Any:
            started.append(list(program.command(engines.Inherited(7, 8))))
            raise OSError("not here")

    config = InferenceConfig.model_validate({"engine": SERVER, "custom": {"prefix": "nice -n {number}"}})
    with engines.placed_by(Listed()):
        replica = engines.PrefixedServer(model, config, log_file=tmp_path / "log", number=3)
        with pytest.raises(Exception, match="not here"):
            await replica.launch()
        await replica.close()
    [command] = started
    assert command[:3] == ["nice", "-n", "3"]
    assert "turnwise.engine.server" in command


# rollout_manager.py


class Counting(Env):
    """Counts the episodes that run; the first two of the task ``flaky`` fail."""

    running = most = 0
    tried: ClassVar[dict[str, int]] = {}

    async def reset(self, task=None, *, seed=None):
        kind = type(self)
        kind.running += 1
        kind.most = max(kind.most, kind.running)
        kind.tried[task.id] = number = kind.tried.get(task.id, 0) + 1
        try:
            await asyncio.sleep(0)
            if task.id == "flaky" and number <= 2:
                raise ConnectionError("the database is gone")
            if task.id == "stuck":
                await asyncio.Event().wait()
        except BaseException:
            kind.running -= 1
            raise
        return task.messages(), {}

    async def step(self, action):
        type(self).running -= 1
        return [], 1.0, True, False, {}


class Kept:
    """The side of a replay buffer that a manager sees."""

    def __init__(self) -> None:
        self.groups: asyncio.Queue[TrajectoryGroup] = asyncio.Queue()

    async def put(self, group: TrajectoryGroup) -> None:
        self.groups.put_nowait(group)


async def made_manager(**groups: int) -> tuple[Any, Kept]:
    Counting.running, Counting.most, Counting.tried = 0, 0, {}
    config = RolloutConfig.model_validate({
        "env": {"name": f"{__name__}:Counting"},
        "agent_loop_manager_class": f"{FOLDER}/rollout_manager.py:WholeGroups",
    })  # fmt: skip
    custom = {"groups": groups, "plateau": {}}
    kind = check_manager(config, custom)
    assert kind is not None
    renderer, sink = renderer_for("qwen3"), Kept()
    parts = RolloutParts(renderer, custom=custom, settings=kind.custom_model.model_validate(custom))
    client = ScriptedClient(renderer, lambda request: "Done.")
    return await kind.create(config, client, sink, parts), sink


async def test_the_manager_runs_whole_groups_and_tries_members_again() -> None:
    manager, sink = await made_manager(at_once=2, attempts=2)
    names = ["a", "b", "flaky", "c", "d"]
    manager.generate_sequences([RolloutRequest(Task(name, "Say done."), group_size=2) for name in names])
    groups = {group.task_id: group for group in [await sink.groups.get() for _ in names]}
    await manager.close()
    assert {name: (len(group.trajectories), group.failed) for name, group in groups.items()} == dict.fromkeys(
        names, (2, 0)
    )
    assert Counting.tried["flaky"] == 4
    assert Counting.most == 4
    ids = [trajectory.episode_id for group in groups.values() for trajectory in group.trajectories]
    assert len(set(ids)) == len(ids)


async def test_a_member_that_fails_too_often_is_counted_and_a_group_is_cancelled() -> None:
    manager, sink = await made_manager(at_once=2, attempts=1)
    flaky, stuck = (RolloutRequest(Task(name, "Say done."), group_size=3) for name in ("flaky", "stuck"))
    manager.generate_sequences([flaky, stuck])
    group = await sink.groups.get()
    assert (len(group.trajectories), group.failed) == (1, 2)
    assert await manager.cancel({flaky.key, stuck.key, "unknown"}) == {stuck.key}
    await manager.close()
    assert sink.groups.empty()
    with pytest.raises(ConfigError, match="at_once"):
        await made_manager(at_once=0)


# replay_strategy.py


def facts(number: int, task: str, version: int = 0) -> GroupFacts:
    return GroupFacts(f"g{number}", f"k{number}", task, "train", number, version, (0.0, 1.0))


def test_a_batch_has_distinct_tasks_as_long_as_others_are_on_their_way() -> None:
    strategy = example("replay_strategy").DistinctTasks(max_staleness=1)
    ready = [facts(0, "a"), facts(1, "a"), facts(2, "b")]
    coming = InFlight("k3", "c", "train", 0)
    assert strategy.choose(ready, [], 1, 2).take == ("g0", "g2")
    assert strategy.choose(ready, [coming], 1, 3).take is None
    # Only tasks that it has already are on their way.
    assert strategy.choose(ready, [replace(coming, task_id="b")], 1, 3).take == ("g0", "g2", "g1")
    assert strategy.choose(ready, [], 1, 4).take is None
    stale = strategy.choose([*ready, facts(3, "c", version=2)], [], 3, 1)
    assert stale.take == ("g3",)
    assert {group for group, _ in stale.drop} == {"g0", "g1", "g2"}
    with pytest.raises(ValueError, match="max_staleness is -1"):
        example("replay_strategy").DistinctTasks(-1)


# advantage.py, loss.py, reward.py


def test_advantages_from_the_median() -> None:
    median = example("advantage").median
    rewards, groups = torch.tensor([0.0, 1.0, 5.0, 2.0, 4.0, 3.0]), torch.tensor([0, 0, 0, 1, 1, 2])
    advantages = median(rewards, groups)
    # Medians: 1 of (0, 1, 5), 3 of (2, 4); a group of one has no gradient.
    assert advantages.values.tolist() == [-1.0, 0.0, 4.0, -1.0, 1.0, 0.0]
    assert (advantages.groups, advantages.dead_groups, advantages.dead.tolist()) == (3, 1, [False] * 5 + [True])
    # |r - median| is (1, 0, 4) and (1, 1), whose median is 1 in both.
    scaled = median(rewards, groups, norm_by_mad=True, eps=1e-9).values
    assert torch.allclose(scaled * 1.4826, advantages.values)


def test_loss_tapers_unlikely_tokens_of_negative_advantage() -> None:
    tapered = example("loss").tapered
    old = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    new = torch.tensor([-1.5, -1.5, -1.5, -1.5], requires_grad=True)
    advantages, weights = torch.tensor([2.0, 2.0, -2.0, -2.0]), torch.ones(4)
    loss = tapered(new, old, advantages, weights, sequences=torch.tensor([0, 0, 1, 1]))
    loss.loss.backward()
    # The second sequence's ratio is exp(-0.5 - 0.5).
    ratio = torch.tensor(-1.0).exp()
    assert torch.allclose(new.grad, torch.tensor([-2.0, -2.0, 2 * ratio, 2 * ratio]))  # type: ignore[arg-type]
    assert float(loss.sums["taper"]) == pytest.approx(2 + 2 * float(ratio))
    likelier = tapered(old + 1, old, advantages, weights, sequences=torch.tensor([0, 0, 1, 1]))
    assert float(likelier.sums["taper"]) == 4.0


@pytest.mark.parametrize(
    ("text", "reward"), [("It is 40.", 1.0), ("10, no: 20", 1 / 1.5), ("-40", 1 / 3), ("I do not know", 0.0)]
)
def test_rewards(text: str, reward: float) -> None:
    value, measured = example("reward").closeness(text, "40")
    assert value == pytest.approx(reward)
    assert measured == {"answered": float(reward > 0)}
    assert example("reward").brevity(text, limit=20) == pytest.approx(1 - len(text) / 20)
    assert example("reward").brevity(text, limit=2) == 0.0
    assert example("reward").brevity("") == 0.0


# hooks.py


class Stopped(Exception):
    """What a stopped run says."""


@pytest.fixture
def plateau(tmp_path: Path) -> Iterator[Any]:
    hooks = example("hooks")

    class Asked(hooks.Plateau):  # type: ignore[misc, name-defined]
        def stop(self, why: str) -> None:
            raise Stopped(why)

    class Config:
        runs, name, custom = tmp_path, "run", {"plateau": {"patience": 2, "least": 0.1}}

    (tmp_path / "run").mkdir()

    def begun(step: int) -> Any:
        recorder = Asked()
        recorder.config, recorder.global_steps, recorder.metrics = Config(), step, {}
        recorder.on_init_end()
        return recorder

    return begun


def ended(hooks: Any, step: int, value: float) -> float:
    hooks.global_steps, hooks.metrics = step, {"reward/mean": value}
    hooks.on_step_end()
    return float(hooks.metrics["plateau/steps"])


def test_a_plateau_ends_the_run_and_a_resumed_run_goes_on_counting(plateau: Any) -> None:
    hooks = plateau(0)
    assert [ended(hooks, step, value) for step, value in ((1, 0.2), (2, 0.5), (3, 0.55))] == [0, 0, 1]
    # Killed after step 3, resumed from step 2: the same figures again.
    hooks = plateau(2)
    assert ended(hooks, 3, 0.55) == 1
    with pytest.raises(Stopped, match="reward/mean has not risen for 2 steps"):
        ended(hooks, 4, 0.4)
    # Resumed from step 1, what step 2 reached has not been reached yet.
    assert ended(plateau(1), 2, 0.4) == 0


def test_a_wrong_setting_of_the_hook_is_an_error(plateau: Any) -> None:
    hooks = plateau(0)
    hooks.config.custom = {"plateau": {"patiense": 3}}
    with pytest.raises(ConfigError, match="patiense"):
        hooks.on_init_end()
