"""What becomes of a program's objects: names, files and keys of a configuration."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from support.envs.run_envs import Graded
from turnwise.agents import Agent, rollout
from turnwise.config import load_config
from turnwise.errors import ConfigError, RegistryError, TaskError, TrainError
from turnwise.plugins import reference_to
from turnwise.tasks import SourceConfig, Task, load_tasks
from turnwise.trainer.algorithms.advantages import ADVANTAGES
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.gae import CRITIC_ADVANTAGES
from turnwise.trainer.algorithms.losses import LOSSES, LossSums
from turnwise.trainer.api import Trainer, algorithm_keys
from turnwise.trainer.config.train import TrainConfig
from turnwise.trainer.datasets import task_config
from turnwise.trainer.loops.steps import Batch
from turnwise.trainer.training import Training

BASE: dict[str, Any] = {"steps": 3, "policies": {"main": {"model": {"path": "m"}}}}


@rollout
async def asks(task, llm) -> float:
    return 0.0


class Acts(Agent):
    def __init__(self, size: int = 1) -> None:
        self.size = size

    async def run(self, episode) -> None:
        return None


def own_loss(logprobs, old_logprobs, advantages, weights):
    return LossSums((weights * -advantages * logprobs).sum())


def twenty_rows():
    return ({"prompt": str(n)} for n in range(20))


def needs(n):
    return [{"prompt": "x"}] * n


def test_objects_become_references_in_the_configuration(tmp_path: Path) -> None:
    trainer = Trainer({**BASE, "runs": tmp_path}, "seed=4", env=Graded, agent=asks, model="other", n_runners=7)
    config = trainer.plan(None, twenty_rows).config
    assert config.rollout.env.name == "support.envs.run_envs:Graded"
    assert config.rollout.agent.name == f"{__name__}:asks"
    assert (config.name, config.seed, config.rollout.concurrency) == ("asks", 4, 7)
    assert config.policy.model.path == Path.cwd() / "other"
    assert config.tasks == f"{__name__}:twenty_rows"
    assert not list(tmp_path.iterdir())
    named = Trainer(BASE, agent={"name": Acts, "config": {"size": 3}}, env="lookup", name="r").plan().config
    assert named.rollout.agent.name == f"{__name__}:Acts"
    assert (named.rollout.agent.config, named.rollout.env.name, named.name) == ({"size": 3}, "lookup", "r")
    # An agent alone brings its own reward; what a configuration says stays.
    assert Trainer(BASE, agent=Acts).plan().config.rollout.env.name == "task"
    settings = {**BASE, "rollout": {"env": {"name": "lookup"}}}
    assert Trainer(settings).plan(Acts()).config.rollout.env.name == "lookup"


def test_unknown_keys_are_refused_where_the_trainer_is_made(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("batch: {grups: 2}\n")
    for config, overrides, message in (
        (
            {"algorithm": {"adv_estimator": "grpo"}},
            (),
            r"^algorithm\.adv_estimator: .*did you mean algorithm\.advantage\?",
        ),
        (file, (), r"^batch\.grups \(run\.yaml:1\): unknown key"),
        (None, ["optm.lr=1"], "^optm: unknown key"),
    ):
        with pytest.raises(ConfigError, match=message):
            Trainer(config, *overrides)
    Trainer({"batch": {"groups": 2}})


def test_a_file_and_a_checked_configuration_are_taken_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: x\nsteps: 3\npolicies: {main: {model: {path: m}}}\nrollout: {env: {name: lookup}}\n")
    config = load_config(TrainConfig, file)
    assert Trainer(file).plan().config == config
    assert Trainer(config).plan().config == config
    assert Trainer(str(file), "steps=5").plan().config.steps == 5
    with pytest.raises(ConfigError, match=r"rollout\.max_turnz \(override"):
        Trainer(file, "rollout.max_turnz=5").plan()
    with pytest.raises(ConfigError, match=r"algorithm\.minibatchez"):
        Trainer(file).plan({"minibatchez": 5})


def test_an_algorithm_brings_its_critic_to_a_checked_configuration_too() -> None:
    config = load_config(TrainConfig, None, [], {**BASE, "name": "x", "rollout": {"env": {"name": "lookup"}}})
    planned = Trainer(config).plan("ppo").config
    assert planned.policy.critic is not None
    assert planned.model_copy(update={"policies": config.policies, "algorithm": config.algorithm}) == config
    # One that is there stays.
    policies = {"main": {"model": {"path": "m"}, "critic": {"warmup_steps": 2}}}
    config = load_config(
        TrainConfig,
        None,
        ["algorithm.advantage=gae"],
        {**BASE, "name": "x", "rollout": {"env": {"name": "lookup"}}, "policies": policies},
    )
    critic = Trainer(config).plan("ppo").config.policy.critic
    assert critic is not None
    assert critic.warmup_steps == 2


async def test_learn_without_groups_raises_train_error() -> None:
    run: Any = types.SimpleNamespace(state=types.SimpleNamespace(step=4))
    with pytest.raises(TrainError, match=r"step 5: learn\(\) was given no group"):
        await Training(run).learn([])


async def test_requests_of_a_step_have_the_same_seeds_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(TrainConfig, None, [], {**BASE, "name": "x", "rollout": {"env": {"name": "lookup"}}})
    tags: list[str] = []

    async def rolled_out(run: Any, requests: Any, *, group_size: int | None = None) -> Batch:
        tags.extend(request.tag for request in requests)
        return Batch([], {}, 0.0, 1.0)

    async def trained(run: Any, batch: Batch) -> dict[str, float]:
        run.state.step += 1
        return {}

    async def finished(run: Any) -> None: ...

    for name, function in (("roll_out", rolled_out), ("train_on", trained), ("finish_step", finished)):
        monkeypatch.setattr(f"turnwise.trainer.training.{name}", function)

    def at(step: int) -> Training:
        parts: Any = types.SimpleNamespace(
            config=config, state=types.SimpleNamespace(step=step), tasks=types.SimpleNamespace(epoch=0)
        )
        return Training(parts)

    group: Any = object()
    uninterrupted, resumed = at(0), at(1)
    for training, steps in ((uninterrupted, 2), (resumed, 1)):
        for _ in range(steps):
            await training.rollouts([Task("t", "?")])
            await training.rollouts([Task("t", "?")])
            await training.learn([group])
    assert tags == ["step1.1", "step1.2", "step2.1", "step2.2", "step2.1", "step2.2"]


def test_a_named_algorithm_replaces_the_formula_and_keeps_the_rest() -> None:
    section = {"loss": "gspo", "epochs": 2, "minibatches": 4, "credit": "last"}
    section["loss_options"] = {"clip_low": 3e-4, "clip_high": 4e-4}
    trainer = Trainer({**BASE, "algorithm": section}, env="lookup", name="r")
    config = trainer.plan("grpo").config.algorithm
    assert (config.advantage, config.loss, config.loss_options) == ("grpo", "ppo_clip", {})
    assert (config.epochs, config.minibatches, config.credit.name) == (2, 4, "last")
    # Keys are laid over what is there.
    options = {"clip_low": 3e-4, "clip_high": 5e-4}
    for keys in ({"loss_options": options}, AlgorithmConfig.model_construct({"loss_options"}, loss_options=options)):
        config = trainer.plan(keys).config.algorithm
        assert (config.loss, config.loss_options) == ("gspo", options)
    assert trainer.plan({"loss": own_loss, "loss_options": {}}).config.algorithm.loss == (f"{__name__}:own_loss")


# The formula of each name: estimator, loss, aggregation, and whether groups of equal rewards are left out.
FORMULAS = {
    "grpo": ("grpo", "ppo_clip", "token_mean", True),
    "dr_grpo": ("dr_grpo", "ppo_clip", "seq_mean_token_sum_norm", True),
    "rloo": ("rloo", "ppo_clip", "token_mean", True),
    "reinforce_plus_plus": ("reinforce_plus_plus", "ppo_clip", "token_mean", False),
    "reinforce_plus_plus_baseline": ("reinforce_plus_plus_baseline", "ppo_clip", "token_mean", True),
    "opo": ("opo", "ppo_clip", "token_mean", True),
    "gpg": ("gpg", "gpg", "token_mean", False),
    "passk": ("passk", "ppo_clip", "token_mean", True),
    "gdpo": ("gdpo", "ppo_clip", "token_mean", True),
    "ppo": ("gae", "ppo_clip", "token_mean", False),
    "gae": ("gae", "ppo_clip", "token_mean", False),
    "remax": ("remax", "ppo_clip", "token_mean", True),
    "ppo_clip": ("grpo", "ppo_clip", "token_mean", True),
    "gspo": ("grpo", "gspo", "seq_mean_token_mean", True),
    "gmpo": ("grpo", "gmpo", "seq_mean_token_mean", True),
    "cispo": ("grpo", "cispo", "token_mean", True),
    "sapo": ("grpo", "sapo", "seq_mean_token_mean", True),
    "clip_cov": ("grpo", "clip_cov", "token_mean", True),
    "kl_cov": ("grpo", "kl_cov", "token_mean", True),
    "dppo_tv": ("grpo", "dppo_tv", "token_mean", True),
    "dppo_kl": ("grpo", "dppo_kl", "token_mean", True),
    "dro": ("grpo", "dro", "token_mean", True),
}


def test_every_estimator_and_every_loss_is_the_name_of_an_algorithm() -> None:
    names = {*ADVANTAGES, *CRITIC_ADVANTAGES, *LOSSES}
    assert {name for name in FORMULAS if name != "ppo"} == names


@pytest.mark.parametrize("name", FORMULAS)
def test_each_algorithm_name_stands_for_its_formula(name: str) -> None:
    section = {"advantage": "rloo", "loss_aggregation": "trajectory_mean"}
    if name == "dr_grpo":
        section = {"loss_aggregation": "seq_mean_token_sum_norm", "loss_scale": 64.0}
    config = Trainer({**BASE, "algorithm": section}, env="lookup", name="r").plan(name).config
    algorithm = config.algorithm
    assert (algorithm.advantage, algorithm.loss, algorithm.aggregation, algorithm.drop_zero_variance) == FORMULAS[name]
    assert (config.policy.critic is not None) == (algorithm.advantage == "gae")


OLD = {
    "GRPO": "grpo", "DrGRPO": "dr_grpo", "RLOO": "rloo", "ReinforcePlusPlus": "reinforce_plus_plus",
    "ReinforcePlusPlusBaseline": "reinforce_plus_plus_baseline", "OPO": "opo", "GPG": "gpg", "PassK": "passk",
    "GDPO": "gdpo", "PPO": "ppo", "ReMax": "remax", "GSPO": "gspo", "GMPO": "gmpo", "CISPO": "cispo", "SAPO": "sapo",
    "ClipCov": "clip_cov", "KLCov": "kl_cov", "DPPO": "dppo_(kl|tv)", "DRO": "dro",
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_class_name_of_an_algorithm_is_refused_with_the_right_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm '{name}' is unknown; did you mean '{OLD[name]}'\?"):
        algorithm_keys(name)


def test_algorithm_is_a_name_keys_or_a_training_loop() -> None:
    trainer = Trainer(BASE, env="lookup", name="r")

    async def loop(training) -> None: ...

    assert trainer.plan(loop).loop is loop
    assert trainer.plan("grpo").loop is None
    for keys in ({"epochs": 2}, AlgorithmConfig(epochs=2)):
        plan = trainer.plan(keys)
        assert (plan.config.algorithm.epochs, plan.loop) == (2, None)

    def blocking(training) -> None: ...

    async def of_two(training, store) -> None: ...

    class WithRun:
        async def run(self, training) -> None: ...

    assert trainer.plan(WithRun().run).loop is not None
    for algorithm, message in [
        (blocking, "blocking is not async"),
        (of_two, "of_two(training) (missing a required argument: 'store')"),
        (WithRun(), "an AlgorithmConfig, a mapping of its keys, or an async function run(training)"),
        ("grop", "algorithm 'grop' is unknown; did you mean 'grpo'?"),
        (3, "the algorithm is 3: give a name such as 'grpo'"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            trainer.plan(algorithm)


def test_object_without_an_importable_reference_is_refused() -> None:
    class Local(Agent):
        async def run(self, episode) -> None: ...

    with pytest.raises(ConfigError, match="is defined inside a function"):
        Trainer(BASE, agent=Local).plan()
    with pytest.raises(ConfigError, match=r"Acts is an object with state.*config"):
        Trainer(BASE).plan(Acts(size=3))
    assert Trainer(BASE).plan(Acts()).config.rollout.agent.name == f"{__name__}:Acts"
    with pytest.raises(ConfigError, match="refers to another object"):
        reference_to(type("own_loss", (), {"__module__": __name__, "__qualname__": "own_loss"}), "thing")
    with pytest.raises(ConfigError, match="cannot be imported by another process"):
        reference_to(5, "thing")
    with pytest.raises((ConfigError, RegistryError), match="lookpu"):
        Trainer(BASE, env="lookpu", agent="raect").plan({"loss": "lookpu"})


def test_rows_are_written_to_a_file_named_by_their_digest(tmp_path: Path) -> None:
    rows = [Task("a", "one", {"n": 1}, env="lookup"), {"prompt": "two", "n": 2}]
    source = task_config(iter(rows), tmp_path, name="train")
    first, second = load_tasks(source)
    assert (first, second.prompt, second.data) == (rows[0], "two", {"n": 2})
    assert task_config(rows, tmp_path, name="train") == source
    assert task_config(rows[:1], tmp_path, name="train") != source
    assert len(list((tmp_path / "datasets").iterdir())) == 2
    # The row is the agent's: it may lack a prompt.
    [row] = load_tasks(task_config([{"question": "q"}], tmp_path, name="val", whole_rows=True))
    assert (row.prompt, row.data) == ("", {"question": "q"})


@pytest.mark.parametrize(
    "source",
    ["rows.jsonl", SourceConfig(source="a.jsonl", limit=3), {"source": "a.jsonl"}, ["a.jsonl", {"source": "b.jsonl"}]],
)
def test_sources_are_passed_on_unchanged(source, tmp_path: Path) -> None:
    assert task_config(source, tmp_path, name="train") == source
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "the train dataset holds no row"),
        ([{"prompt": "x"}, 5], r"train dataset: row 1 is 5: a row is a turnwise\.Task or a dict"),
        ([{"prompt": "x", "when": object()}], r"row 0 cannot be written as JSON .*field 'when'"),
        ({"train": [], "test": []}, r"a mapping of 'train', 'test': give one of its parts"),
        (7, "the train dataset is 7: give rows"),
        (needs, r"cannot be called without arguments.*pkg\.module:function\?n=200"),
    ],
)
def test_invalid_dataset_raises_task_error(dataset, message, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        task_config(dataset, tmp_path, name="train")


def test_dataset_with_getitem_is_read(tmp_path: Path) -> None:
    class Indexed:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> dict[str, Any]:
            return [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}][index]

    assert [task.data["n"] for task in load_tasks(task_config(Indexed(), tmp_path, name="train"))] == [1, 2]


def test_class_of_the_running_program_is_referenced_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", program)
    script = tmp_path / "mine.py"
    script.write_text("raise RuntimeError('run a second time')\n")
    exec("class Mine(Base): pass", vars(program) | {"Base": Graded}, vars(program))
    # In a notebook there is no file: only this process finds it.
    assert reference_to(program.Mine, "environment") == "__main__:Mine"
    program.__file__ = str(script)
    trainer = Trainer(BASE, env=program.Mine)
    assert trainer.plan().config.rollout.env.name == f"{script.resolve()}:Mine"
