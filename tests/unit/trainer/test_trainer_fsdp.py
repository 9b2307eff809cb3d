"""The engine fsdp: equal to one process on any number of ranks, whose checkpoints any number of ranks resume."""

from __future__ import annotations

import os
import shutil
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from support.engine.families import FAMILIES, save_family
from support.engine.tiny_lm import VOCABULARY, make_model, save_model
from support.trainer.ranks import WarmRanks, pair_of_ranks
from turnwise.engine.weights import WeightStream, read_weights, write_weights
from turnwise.errors import CheckpointError, RankDied, TrainError
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.algorithms.gap import GapWatch
from turnwise.trainer.algorithms.kl import KLConfig
from turnwise.trainer.algorithms.losses.core import LossSums
from turnwise.trainer.algorithms.losses.policy import ppo_clip_loss
from turnwise.trainer.algorithms.registry import ConfiguredFunction
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.learn.critic import Critic, ValueLearner
from turnwise.trainer.learn.fsdp_learner import FSDPLearner, deal
from turnwise.trainer.learn.learner import Learner, Objective, check_engine, open_learner
from turnwise.trainer.learn.objectives import CrossEntropyObjective, PolicyObjective
from turnwise.trainer.learn.rank_processes import Sharding
from turnwise.trainer.learn.reference import open_reference
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.model.policy import load_model
from turnwise.trainer.weight_sync import write_version
from turnwise.trajectory import TrainSample

LENGTHS = (31, 9, 14, 6, 11, 7, 22)
# AdamW's first step is lr * g / (|g| + eps): with both this large it is the gradient itself, to a millionth.
SHOWS_GRADIENTS = {"lr": 1e6, "eps": 1e6, "max_grad_norm": None}
# Four ranks cost as much as all other tests here.
FOUR = pytest.param("four", marks=pytest.mark.long)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Of odd sizes, which two ranks cannot share equally.
    tiny = make_model("qwen3", initializer_range=0.1, intermediate_size=97, vocab_size=VOCABULARY + 1)
    return save_model(tiny, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two() -> Iterator[WarmRanks]:
    with pair_of_ranks() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[WarmRanks]:
    with pair_of_ranks(4) as ranks:
        yield ranks


def policy(path: Path, **changes: Any) -> PolicyConfig:
    model_settings = {"path": path, "device": "cpu", **changes.pop("model", {})}
    return PolicyConfig.model_validate({"optim": {"lr": 1e-3}, "model": model_settings, **changes})


def rows(shared: int = 0) -> list[TrainRow]:
    """Rows of random ids, of which the first ``shared`` are those of all."""
    random = np.random.default_rng(3)
    made_rows = []
    first: np.ndarray | None = None
    for number, length in enumerate(LENGTHS):
        mask = np.zeros(length, np.bool_)
        mask[length // 3 :] = True
        ids = random.integers(0, VOCABULARY, length).astype(np.int32)
        first = ids if first is None else first
        ids[:shared] = first[: min(shared, length)]
        sample = TrainSample(
            input_ids=ids,
            loss_mask=mask,
            rollout_logprobs=np.where(mask, -random.random(length) - 2.0, 0).astype(np.float32),
            weight_versions=np.where(mask, 0, -1).astype(np.int32),
            turn_ids=np.where(mask, 0, -1).astype(np.int32),
            trajectory_id=f"t{number}",
            group_id="g",
            leaf=0,
        )
        made_rows.append(TrainRow(sample, advantage=1.0 if number % 2 else -0.5, weight=1.0))
    return made_rows


def batches(budget: int = 32, shared: int = 0) -> list[MicroBatch]:
    micro_batches = pack(rows(shared), budget, share_prefixes=shared > 0)
    for micro in micro_batches:
        micro.old_logprobs = micro.rollout_logprobs
    return micro_batches


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner.export_weights()}


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((tensor - other[name]).abs().max()) for name, tensor in one.items())


def assert_equal_gradients(
    learners: Sequence[Learner], micro_batches: Sequence[MicroBatch], objective: Objective
) -> None:
    """Compare loss, statistics and gradients of learners whose optimizer is ``SHOWS_GRADIENTS``."""
    gradients, losses = [], []
    for learner in learners:
        initial = weights(learner)
        stats = learner.forward_backward(micro_batches, objective, 40.0)
        norm = learner.optim_step().grad_norm
        losses.append({"loss": stats.loss, "tokens": stats.tokens, **stats.means, **stats.maxima, "norm": norm})
        gradients.append({name: initial[name] - tensor for name, tensor in weights(learner).items()})
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert max(float(gradient.abs().max()) for gradient in gradients[0].values()) > 1e-3
    assert gap(*gradients) < 1e-5


@pytest.mark.parametrize(
    ("world", "together"),
    [("two", 2), pytest.param("four", 2, marks=pytest.mark.long), pytest.param("four", 4, marks=pytest.mark.long)],
)
def test_ranks_that_share_sequences_equal_one_process(
    model: Path, world: str, together: int, request: pytest.FixtureRequest
) -> None:
    # Four query heads over two of keys: four ranks get one of each, keys twice. Slices end in the middle of segments.
    ranks: WarmRanks = request.getfixturevalue(world)
    shows = policy(model, optim=SHOWS_GRADIENTS)
    sharding = Sharding(len(ranks), sequence_parallel=together)
    micro_batches = batches(shared=10)
    assert any(parent != -1 for batch in micro_batches for _, _, parent in batch.segments)
    assert any(batch.tokens % together for batch in micro_batches)
    one, sharded = open_learner(shows, 5), FSDPLearner(ranks, shows, 5, sharding=sharding)
    for expected, actual in zip(one.logprobs(micro_batches), sharded.logprobs(micro_batches), strict=True):
        torch.testing.assert_close(expected, actual, atol=1e-5, rtol=0)
    assert_equal_gradients((one, sharded), micro_batches, PolicyObjective(entropy_coef=0.1))


def test_sequences_are_shared_under_windows_sinks_and_adapters(model_dir: Callable[..., Path], two: WarmRanks) -> None:
    pytest.importorskip("peft")
    micro_batches = batches(shared=10)
    for batch in micro_batches:
        batch.input_ids %= 61
        batch.target_ids %= 61
    settings = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "o_proj"]}, "gradient_checkpointing": True}
    shows = policy(model_dir("gpt_oss"), optim=SHOWS_GRADIENTS, model=settings)
    sharded = FSDPLearner(two, shows, 5, sharding=Sharding(2, sequence_parallel=2))
    assert_equal_gradients((open_learner(shows, 5), sharded), micro_batches, PolicyObjective())


@pytest.mark.parametrize("world", ["two", FOUR])
def test_ranks_equal_one_process(model: Path, world: str, request: pytest.FixtureRequest) -> None:
    ranks: WarmRanks = request.getfixturevalue(world)
    shows = policy(model, optim=SHOWS_GRADIENTS)
    assert_equal_gradients((open_learner(shows, 5), FSDPLearner(ranks, shows, 5)), batches(), PolicyObjective())

    trains = policy(model)
    initial = weights(open_learner(trains, 5))
    one, sharded = open_learner(trains, 5), FSDPLearner(ranks, trains, 5)
    for _ in range(5):
        losses = [learner.forward_backward(batches(), PolicyObjective(), 40.0).loss for learner in (one, sharded)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-5)
        whole, of_shards = one.optim_step(), sharded.optim_step()
        assert whole.learning_rates == of_shards.learning_rates
        assert of_shards.update_ratio == pytest.approx(whole.update_ratio, rel=0.3)
    assert gap(weights(one), initial) > 1e-3
    assert gap(weights(one), weights(sharded)) < 1e-5
    for expected, actual in zip(one.logprobs(batches()), sharded.logprobs(batches()), strict=True):
        torch.testing.assert_close(expected, actual, atol=1e-5, rtol=0)


def step(learner: Learner) -> None:
    learner.forward_backward(batches(), PolicyObjective(), 40.0)
    learner.optim_step()


@pytest.fixture(scope="module")
def one() -> Iterator[WarmRanks]:
    with pair_of_ranks(1) as ranks:
        yield ranks


@pytest.mark.parametrize("world", ["one", FOUR])
def test_a_checkpoint_of_two_ranks_resumes_on_other_ranks(
    model: Path, two: WarmRanks, world: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = policy(model)
    saved = FSDPLearner(two, config, 9)
    step(saved)
    saved.save(tmp_path)
    step(saved)
    resumed = FSDPLearner(request.getfixturevalue(world), config, 9, model_path=tmp_path)
    resumed.load(tmp_path)
    assert resumed.steps == 1
    step(resumed)
    assert gap(weights(saved), weights(resumed)) < 1e-5
    # It is a model's folder as any other: one process scores with what two have written.
    scored = open_learner(policy(tmp_path), 1).logprobs(batches())
    with_it = FSDPLearner(two, policy(tmp_path), 1).logprobs(batches())
    torch.testing.assert_close(torch.cat(scored), torch.cat(with_it), atol=1e-5, rtol=0)


@pytest.mark.parametrize("world", ["one", "two"])
def test_states_in_eight_bits_equal_one_process_and_resume_on_other_ranks(
    two: WarmRanks, world: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # Rows that blocks divide, but not the two ranks.
    tiny = make_model("qwen3", hidden_size=64, intermediate_size=129, vocab_size=VOCABULARY + 1, initializer_range=0.1)
    path = save_model(tiny, tmp_path / "model")
    config = policy(path, optim={"lr": 1e-3, "name": "adamw_int8"})
    plain, saved = open_learner(config, 9), FSDPLearner(two, config, 9)
    initial = weights(plain)
    for learner in (plain, plain, plain, saved, saved):
        step(learner)
    saved.save(tmp_path / "saved")
    step(saved)
    resumed = FSDPLearner(request.getfixturevalue(world), config, 9, model_path=tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    step(resumed)
    assert gap(weights(saved), weights(resumed)) <= (0 if world == "two" else 1e-5)
    # Where gradients differ in their last bit, a code may be the next one.
    assert gap(weights(saved), weights(plain)) < 0.05 * gap(initial, weights(plain))
    other = FSDPLearner(two, policy(path), 9)
    with pytest.raises(CheckpointError, match=r"moments are int8: resume with optim\.name: adamw_int8"):
        other.load(tmp_path / "saved")


def test_a_checkpoint_that_cannot_be_loaded_is_refused(model: Path, two: WarmRanks, tmp_path: Path) -> None:
    config = policy(model)
    sharded, one = FSDPLearner(two, config, 9), open_learner(config, 9)
    for learner, name in ((one, "torch"), (sharded, "fsdp")):
        learner.save(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"written by the engine torch .*policies\.main\.engine: torch"):
        sharded.load(tmp_path / "torch")
    with pytest.raises(CheckpointError, match=r"written by the engine fsdp .*policies\.main\.engine: fsdp"):
        one.load(tmp_path / "fsdp")
    other = FSDPLearner(two, policy(save_model(make_model("qwen2"), tmp_path / "other")), 9)
    with pytest.raises(CheckpointError, match="holds no weights for this model"):
        other.load(tmp_path / "fsdp")
    (tmp_path / "fsdp" / "optimizer" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="optimizer cannot be read"):
        sharded.load(tmp_path / "fsdp")
    # The ranks are in step after each of them.
    step(sharded)


def test_the_reference_is_sharded_alike(model: Path, two: WarmRanks, tmp_path: Path) -> None:
    learner = FSDPLearner(two, policy(model), 9)
    other = save_model(make_model("qwen3", seed=1, vocab_size=VOCABULARY + 1), tmp_path)
    kl = KLConfig(coef=0.1, reference=other)
    named = open_reference(kl, policy(model), learner)
    alone = open_reference(kl, policy(model), open_learner(policy(model), 9))
    torch.testing.assert_close(torch.cat(named(batches())), torch.cat(alone(batches())), atol=1e-5, rtol=0)
    untrained = torch.cat(learner.logprobs(batches()))
    initial = open_reference(KLConfig(coef=0.1), policy(model), learner)
    step(learner)
    assert torch.equal(torch.cat(initial(batches())), untrained)
    assert not torch.equal(torch.cat(learner.logprobs(batches())), untrained)


@pytest.mark.long
def test_reference_of_continued_adapters_scores_with_the_initial_adapters(
    model: Path, two: WarmRanks, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    first = FSDPLearner(two, policy(model, model={"lora": {"rank": 4}}, optim={"lr": 1e-2}), 9)
    step(first)
    first.save(tmp_path)
    config = policy(model, model={"lora": {"path": tmp_path}}, optim={"lr": 1e-2})
    further = FSDPLearner(two, config, 9)
    untrained = torch.cat(further.logprobs(batches()))
    reference = open_reference(KLConfig(coef=0.1), config, further)
    step(further)
    assert torch.equal(torch.cat(reference(batches())), untrained)
    assert not torch.equal(torch.cat(further.logprobs(batches())), untrained)


def valued() -> list[TrainRow]:
    random = np.random.default_rng(5)
    return [
        replace(row, **{name: random.normal(size=n).astype(np.float32) for name in ("values", "returns")})
        for row, n in zip(rows(), LENGTHS, strict=True)
    ]


def train(learner: Learner, critic: Critic, seed: int) -> dict[str, float]:
    """Take two optimizer steps of each."""
    algorithm = AlgorithmConfig.model_validate({"advantage": "gae", "minibatches": 2})
    budget = BatchConfig(max_tokens_per_micro_batch=32)
    return update_policy(learner, valued(), algorithm, budget, seed=seed, critic=critic)


@pytest.mark.long
def test_a_critic_is_sharded_alike_and_resumes_on_other_ranks(
    model: Path, two: WarmRanks, four: WarmRanks, tmp_path: Path
) -> None:
    # It starts from a saved one, whose head is not zero: so its layers learn from the first step on.
    first = tmp_path / "first"
    shutil.copytree(model, first)
    torch.manual_seed(5)
    torch.save({"head": {"linear.weight": torch.randn(1, 64) / 8, "linear.bias": torch.randn(1)}}, first / "critic.pt")
    config = policy(model, critic={"path": first, "lr": 1e-3})

    def opened(learner: Learner, directory: Path | None = None) -> Critic:
        critic = Critic.create(config, learner, 9, directory=directory)
        assert critic is not None
        return critic

    one, sharded = open_learner(config, 9), FSDPLearner(two, config, 9)
    critics = opened(one), opened(sharded)
    assert [type(critic.learner) for critic in critics] == [ValueLearner, FSDPLearner]
    untrained = torch.cat(critics[0].learner.values(batches()))
    for seed in (1, 2):
        figures = [train(learner, critic, seed) for learner, critic in zip((one, sharded), critics, strict=True)]
        assert figures[0].keys() == figures[1].keys()
        # Of another sample of the weights where they are sharded.
        ratios = [metrics.pop("train/update_ratio") for metrics in figures]
        assert ratios[1] == pytest.approx(ratios[0], rel=0.3)
        assert figures[1] == pytest.approx(figures[0], abs=1e-5)
        sharded.save(tmp_path / str(seed))
        critics[1].learner.save(tmp_path / str(seed) / "critic")
    values = torch.cat(critics[0].learner.values(batches()))
    assert float((values - untrained).abs().max()) > 1e-3
    torch.testing.assert_close(torch.cat(critics[1].learner.values(batches())), values, atol=1e-5, rtol=0)
    assert gap(weights(one), weights(sharded)) < 1e-5

    resumed = FSDPLearner(four, config, 9, model_path=tmp_path / "1", sharding=Sharding(4, sequence_parallel=2))
    resumed_critic = opened(resumed, tmp_path / "1" / "critic")
    resumed.load(tmp_path / "1")
    assert (resumed.steps, resumed_critic.steps) == (2, 2)
    train(resumed, resumed_critic, 2)
    torch.testing.assert_close(torch.cat(resumed_critic.learner.values(batches())), values, atol=1e-5, rtol=0)
    # What is saved is a critic as any other: one process starts from it.
    config = policy(model, critic={"path": tmp_path / "2" / "critic"})
    torch.testing.assert_close(torch.cat(opened(one).learner.values(batches())), values, atol=1e-5, rtol=0)
    with pytest.raises(CheckpointError, match=r"critic was written by the engine fsdp .*one rank suffices"):
        opened(one, tmp_path / "2" / "critic")
    with pytest.raises(TrainError, match="has values, and no log-probabilities"):
        resumed_critic.learner.logprobs(batches())


def loss_after_compiled_blocks(*arguments: Any, **keywords: Any) -> LossSums:
    if dist.is_initialized():
        assert counters["stats"]["unique_graphs"] > 0, "a rank computed its blocks as they are"
    return ppo_clip_loss(*arguments, **keywords)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_blocks_on_ranks_equal_one_process(model: Path, two: WarmRanks) -> None:
    """Rows of several sizes, padded to one; a rank without a micro-batch computes an idle one."""
    compiled = {"optimizations": ["compile"], "gradient_checkpointing": True}
    one = open_learner(policy(model, optim=SHOWS_GRADIENTS), 9)
    sharded = FSDPLearner(two, policy(model, optim=SHOWS_GRADIENTS, model=compiled), 9)
    objective = PolicyObjective(ConfiguredFunction("compiled", loss_after_compiled_blocks, {}))
    for micro_batches in (batches(), batches(100, shared=3)):
        assert_equal_gradients((one, sharded), micro_batches, objective)


def test_weights_in_bfloat16(model: Path, two: WarmRanks) -> None:
    config = policy(model, model={"gradient_checkpointing": True})
    shardings = (Sharding(2), Sharding(2, True), Sharding(2, True, sequence_parallel=2))
    full, half, together = (FSDPLearner(two, config, 9, sharding=sharding) for sharding in shardings)
    for learner in (full, half, together):
        step(learner)
    exact = torch.cat(full.logprobs(batches()))
    for learner in (half, together):
        assert 1e-4 < float((exact - torch.cat(learner.logprobs(batches()))).abs().max()) < 0.2
    assert {tensor.dtype for tensor in weights(half).values()} == {torch.float32}


def test_frozen_bfloat16_matrices_on_ranks_compute_what_float32_ones_do(two: WarmRanks, tmp_path: Path) -> None:
    path = save_model(make_model("qwen3").bfloat16(), tmp_path / "base")
    float32, half, gathered = (
        FSDPLearner(
            two,
            policy(path, model={"lora": {"rank": 4}, "compute_dtype": "bfloat16", "optimizations": names}),
            9,
            sharding=sharding,
        )
        for names, sharding in (
            ([], Sharding(2)),
            (["bfloat16_base"], Sharding(2)),
            (["bfloat16_base"], Sharding(2, True)),
        )
    )
    for learner in (float32, half, gathered):
        step(learner)
    exact = torch.cat(float32.logprobs(batches()))
    assert torch.equal(exact, torch.cat(half.logprobs(batches())))
    assert gap(weights(float32), weights(half)) == 0.0
    assert float((exact - torch.cat(gathered.logprobs(batches()))).abs().max()) < 0.2
    for number, learner in enumerate((float32, half)):
        learner.save_model(tmp_path / str(number))
    saved = [load_file(tmp_path / str(number) / "model.safetensors") for number in range(2)]
    assert {tensor.dtype for tensor in saved[1].values()} == {torch.float32}
    assert gap(saved[0], saved[1]) == 0.0


def test_a_critic_of_an_untied_model_with_weights_in_bfloat16(two: WarmRanks, tmp_path: Path) -> None:
    # Its output matrix is frozen, and its head computes in float32.
    path = save_model(make_model("qwen2"), tmp_path)
    torch.save({"head": {"linear.weight": torch.randn(1, 64) / 8, "linear.bias": torch.zeros(1)}}, path / "critic.pt")
    config = policy(path, critic={"lr": 1e-4})
    values = []
    for learner in (open_learner(config, 9), FSDPLearner(two, config, 9, sharding=Sharding(2, True))):
        critic = Critic.create(config, learner, 9)
        assert critic is not None
        untrained = torch.cat(critic.learner.values(batches()))
        train(learner, critic, 1)
        values.append(torch.cat(critic.learner.values(batches())))
        assert float((values[-1] - untrained).abs().max()) > 0.3
    assert values[1].dtype == torch.float32
    assert 1e-4 < float((values[0] - values[1]).abs().max()) < 0.2


def test_weights_are_written_one_at_a_time(model: Path, two: WarmRanks, tmp_path: Path) -> None:
    learner = FSDPLearner(two, policy(model), 9)
    exported = learner.export_weights()
    assert isinstance(exported, WeightStream)
    living: list[weakref.ref[torch.Tensor]] = []
    peak = [0]

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in exported:
            living.append(weakref.ref(tensor))
            peak[0] = max(peak[0], sum(reference() is not None for reference in living))
            yield name, tensor
            del tensor

    written = write_weights(WeightStream(exported.described, watched()), tmp_path, 1)
    assert len(living) > 10
    assert peak[0] <= 2
    read = read_weights(written)
    assert gap(weights(learner), read) == 0
    # Unchanged ones are renumbered, changed ones are not.
    rewritten = write_weights(learner.export_weights(), tmp_path, 2, previous=written)
    assert (rewritten.version, rewritten.path) == (2, written.path)
    assert [reference.name for reference in tmp_path.iterdir()] == [Path(written.path).name]
    step(learner)
    assert write_weights(learner.export_weights(), tmp_path, 3, previous=rewritten).path != written.path


def test_the_first_rank_writes_weights_and_ranks_stay_in_step_where_it_cannot(
    model: Path, two: WarmRanks, tmp_path: Path
) -> None:
    learner = FSDPLearner(two, policy(model), 9)
    exported = weights(learner)
    manifest = learner.send_weights(partial(write_version, directory=tmp_path, version=1), torch.bfloat16)
    sent = read_weights(manifest)
    assert sent.keys() == exported.keys()
    assert all(torch.equal(sent[name], exported[name].bfloat16()) for name in sent)
    (tmp_path / "file").touch()
    with pytest.raises(TrainError, match="weights of version 2 cannot be written to "):
        learner.send_weights(partial(write_version, directory=tmp_path / "file", version=2))
    assert gap(weights(learner), exported) == 0


@pytest.mark.long
@pytest.mark.parametrize("experts", [1, 2])
def test_checkpoint_of_a_mixture_has_the_names_of_released_ones_and_resumes(
    two: WarmRanks, tmp_path: Path, experts: int
) -> None:
    mixture = save_family("qwen3_moe", tmp_path / "mixture", vocab_size=VOCABULARY)
    learner = FSDPLearner(two, policy(mixture), 9, sharding=Sharding(2, expert_parallel=experts))
    one = open_learner(policy(mixture), 9)
    for trained in (learner, one):
        step(trained)
    assert gap(weights(learner), weights(one)) < 1e-5
    learner.save(tmp_path)
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in weights(learner)
    rounded = learner.export_weights(torch.bfloat16)
    assert isinstance(rounded, WeightStream)
    assert {dtype for dtype, _ in rounded.described.values()} == {torch.bfloat16}
    assert all(torch.equal(tensor, weights(learner)[name].bfloat16()) for name, tensor in rounded)
    assert gap(weights(learner), dict(load_model(tmp_path).named_weights())) == 0
    # Its experts are spread in the other way, and so are their optimizer's states.
    resumed = FSDPLearner(two, policy(mixture), 9, sharding=Sharding(2, expert_parallel=3 - experts))
    resumed.load(tmp_path)
    assert gap(weights(learner), weights(resumed)) == 0
    for trained in (learner, resumed, one):
        step(trained)
    assert gap(weights(learner), weights(resumed)) < 1e-5
    assert gap(weights(learner), weights(one)) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_adapters_on_experts_equal_one_process(two: WarmRanks, tmp_path: Path, family: str) -> None:
    pytest.importorskip("peft")
    mixture = save_family(family, tmp_path / "mixture", vocab_size=VOCABULARY, initializer_range=0.2)
    targets = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
    config = policy(mixture, model={"lora": {"rank": 2, "targets": targets}}, optim=SHOWS_GRADIENTS)
    one, sharded = open_learner(config, 9), FSDPLearner(two, config, 9)
    initial = weights(one)
    assert gap(initial, weights(sharded)) == 0
    for _ in range(2):
        step(one)
        step(sharded)
    assert gap(initial, weights(one)) > 1e-3
    assert gap(weights(one), weights(sharded)) < 1e-5
    sharded.save(tmp_path / "saved")
    later = open_learner(policy(mixture, model={"lora": {"path": tmp_path / "saved"}}), 9)
    merged = FSDPLearner(two, policy(tmp_path / "saved"), 9)
    for learner in (later, merged):
        assert gap(weights(learner), weights(sharded)) < 1e-6
    if family == "qwen3_moe":
        with pytest.raises(TrainError, match=r"expert_parallel is 2, and adapters on experts are not spread"):
            FSDPLearner(two, config, 9, sharding=Sharding(2, expert_parallel=2))


@pytest.mark.long
@pytest.mark.parametrize("spread", [{"expert_parallel": 2}, {"replicas": 2}, {"expert_parallel": 2, "replicas": 2}])
def test_experts_and_replicas_over_four_ranks_equal_one_process(
    four: WarmRanks, tmp_path: Path, spread: dict[str, int]
) -> None:
    mixture = save_family("qwen3_moe", tmp_path, vocab_size=VOCABULARY, initializer_range=0.2)
    for settings in (SHOWS_GRADIENTS, {**SHOWS_GRADIENTS, "max_grad_norm": 0.1}):
        shows = policy(mixture, optim=settings)
        sharded = FSDPLearner(four, shows, 5, sharding=Sharding(4, **spread))
        one = open_learner(shows, 5)
        assert gap(weights(one), weights(sharded)) == 0
        assert_equal_gradients((one, sharded), batches(), PolicyObjective())


@pytest.mark.parametrize(("together", "experts"), [(1, 1), (2, 1), pytest.param(2, 2, marks=pytest.mark.long)])
def test_replayed_experts_on_ranks_equal_one_process(
    two: WarmRanks, tmp_path: Path, together: int, experts: int
) -> None:
    mixture = save_family("qwen3_moe", tmp_path / "mixture", vocab_size=VOCABULARY, initializer_range=0.2)
    settings = {"gradient_checkpointing": together == 2}
    shows = policy(mixture, optim=SHOWS_GRADIENTS, model=settings)
    random = np.random.default_rng(8)
    routed = []
    for row in rows(10):
        routes = random.permuted(np.tile(np.arange(4), (len(row.sample.input_ids), 2, 1)), axis=2)[:, :, :2]
        # Of the ids that rows share, and of one in each, no server reported any.
        routes[:11] = routes[-1] = 255
        routed.append(replace(row, sample=replace(row.sample, routes=routes.astype(np.uint8))))
    micro_batches = pack(routed, 32, share_prefixes=True)
    one = open_learner(shows, 5)
    sharding = Sharding(2, sequence_parallel=together, expert_parallel=experts)
    sharded = FSDPLearner(two, shows, 5, sharding=sharding)
    for expected, actual in zip(one.logprobs(micro_batches), sharded.logprobs(micro_batches), strict=True):
        torch.testing.assert_close(expected, actual, atol=1e-5, rtol=0)
    free = one.logprobs([batch.freely_routed() for batch in micro_batches])
    assert max(float((a - b).abs().max()) for a, b in zip(free, one.logprobs(micro_batches), strict=True)) > 1e-3
    assert_equal_gradients((one, sharded), micro_batches, PolicyObjective())


def test_ranks_return_statistics_and_gaps(model: Path, two: WarmRanks) -> None:
    gaps = []
    for learner in (open_learner(policy(model), 9), FSDPLearner(two, policy(model), 9)):
        watch = GapWatch()
        watch.set_rows(rows())
        learner.forward_backward(batches(), PolicyObjective(watch=watch), 40.0)
        gaps.append(watch.take_gaps())
    assert [token["token"] for token in gaps[0].largest] == [token["token"] for token in gaps[1].largest]
    assert gaps[1].metrics() == pytest.approx(gaps[0].metrics(), abs=1e-5)


def fails_on_long_rows(logprobs: torch.Tensor, *_: Any, **__: Any) -> LossSums:
    if len(logprobs) > 20:
        raise ArithmeticError(f"{len(logprobs)} tokens")
    return LossSums(-logprobs.sum())


def test_a_loss_that_raises_leaves_the_ranks_in_step(model: Path, two: WarmRanks, tmp_path: Path) -> None:
    learner = FSDPLearner(two, policy(model), 9)
    initial = weights(learner)
    objective = PolicyObjective(ConfiguredFunction("mine", fails_on_long_rows, {}))
    with pytest.raises(ArithmeticError, match="23 tokens"):
        learner.forward_backward(batches(), objective, 40.0)
    assert not two.lost
    assert gap(initial, weights(learner)) == 0
    learner.save(tmp_path)
    with pytest.raises(TrainError, match=r"cannot import this one: .*define it at the top level"):
        learner.forward_backward(batches(), PolicyObjective(ConfiguredFunction("own", lambda *_: None, {})), 40.0)
    outside = batches()
    outside[0].target_ids[0] = VOCABULARY + 1
    with pytest.raises(TrainError, match=f"holds the id {VOCABULARY + 1}"):
        learner.logprobs(outside)


def test_death_of_a_rank_ends_all_ranks(model: Path) -> None:
    with pair_of_ranks() as ranks:
        learner = FSDPLearner(ranks, policy(model), 9)
        os.kill(ranks.pids[1], signal.SIGKILL)
        with pytest.raises(RankDied, match=r"rank 1 of 2 .* died \(signal 9\) in forward_backward: the same command"):
            learner.forward_backward(batches(), CrossEntropyObjective(), 1.0)
        assert ranks.lost
        assert all(process.poll() is not None for process in ranks._processes)
        with pytest.raises(RankDied, match="resume the run"):
            learner.optim_step()


@pytest.mark.long
def test_a_rank_that_stays_stopped_ends_all_ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it in a collective; nothing fails by itself for half an hour."""
    monkeypatch.setattr("turnwise.trainer.learn.rank_processes._LOOK_SECONDS", 0.5)
    with pair_of_ranks() as ranks:
        learner = FSDPLearner(ranks, policy(model), 9)
        os.kill(ranks.pids[1], signal.SIGSTOP)
        with pytest.raises(RankDied, match=r"rank 1 of 2 .* has been stopped \(SIGSTOP\) for over 1 s in forward_"):
            learner.forward_backward(batches(), CrossEntropyObjective(), 1.0)
        assert all(process.poll() is not None for process in ranks._processes)


@pytest.mark.long
@pytest.mark.parametrize("model_type", FAMILIES)
def test_shards_equal_the_weights_that_one_process_loads(model_type: str, two: WarmRanks, tmp_path: Path) -> None:
    folder = save_family(model_type, tmp_path)
    expected = {name: tensor.clone() for name, tensor in load_model(folder).named_weights()}
    loaded = weights(FSDPLearner(two, policy(folder), None))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_a_model_that_cannot_be_loaded_leaves_the_ranks_in_step(model: Path, two: WarmRanks, tmp_path: Path) -> None:
    learner = FSDPLearner(two, policy(model), 9)
    broken = shutil.copytree(model, tmp_path / "broken", ignore=lambda *_: ["model.safetensors"])
    with pytest.raises(TrainError, match=r"no causal language model can be loaded .* holds no model\.safetensors"):
        FSDPLearner(two, policy(broken), 9)
    step(learner)


def test_passes_have_micro_batches_of_similar_size() -> None:
    # 90 and 80, then 60 to the rank that has 80, then 5 to the one that has 100.
    assert deal([5, 90, 10, 80, 60], 2) == [[1, 2, 0], [3, 4]]
    assert deal([7], 3) == [[0], [], []]


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"optim": {"name": "muon"}}, {}, r"optim\.name is muon, .*choose adamw"),
        ({"critic": {"kind": "shared"}}, {}, r"critic\.kind is shared, .*choose own"),
        ({}, {"ranks": 4, "sequence_parallel": 3}, r"sequence_parallel is 3, but the 4 ranks .*a divisor of 4"),
        ({}, {"ranks": 6, "sequence_parallel": 3}, r"parallel is 3, .* has 4 attention heads, .* share: choose 1 or 2"),
        ({}, {"ranks": 4, "replicas": 3}, r"replicas is 3, over which the 4 ranks .*choose a divisor of 4"),
        ({}, {"expert_parallel": 2}, r"expert_parallel is 2, but transformers cannot spread experts .*: choose 1"),
        ({}, {"ranks": 4, "replicas": 2, "expert_parallel": 4}, r"is 4, but the 2 ranks of a copy .*a divisor of 2"),
        ({"model": {"threads": 3}}, {}, r"model\.threads is 3, which the 2 ranks .*choose a multiple of 2"),
        ({"model": {"device": "meta"}}, {}, r"model\.device is 'meta', .*choose cpu"),
        ({}, {"cpu_offload": True}, r"engine_options\.cpu_offload is true, .*remove it"),
    ],
)
def test_unshardable_configurations_raise_train_error(model: Path, changes: Any, options: Any, says: str) -> None:
    config = policy(model, **changes, engine="fsdp", engine_options=options)
    for check in (check_engine, lambda config: open_learner(config, 9)):
        with pytest.raises(TrainError, match=says):
            check(config)


def test_experts_that_ranks_do_not_divide_are_refused(tmp_path: Path) -> None:
    mixture = save_family("qwen3_moe", tmp_path, vocab_size=VOCABULARY)
    options = {"ranks": 6, "expert_parallel": 3}
    with pytest.raises(TrainError, match=r"expert_parallel is 3, but the model .* has 4 experts, .*: choose 1 or 2$"):
        check_engine(policy(mixture, engine="fsdp", engine_options=options))
    options = {"ranks": 8, "expert_parallel": 2, "replicas": 2}
    plan = "cpu in 8 ranks (gloo, 2 for the experts, 2 replicas)"
    assert check_engine(policy(mixture, engine="fsdp", engine_options=options)) == plan


def test_the_plan_of_a_run_names_the_ranks(model: Path) -> None:
    assert check_engine(policy(model, engine="fsdp")) == "cpu in 2 ranks (gloo)"
    for options, plan in (
        ({"mixed_precision": True}, "cpu in 4 ranks (gloo, bfloat16 weights)"),
        ({"sequence_parallel": 2}, "cpu in 4 ranks (gloo, 2 for each sequence)"),
    ):
        assert check_engine(policy(model, engine="fsdp", engine_options={"ranks": 4, **options})) == plan


def test_a_torch_without_the_backend_raises_train_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_backend_available", lambda _: False)
    with pytest.raises(TrainError, match=r"engine_options\.ranks is 3, which needs .* with gloo, .*install a build"):
        check_engine(policy(model, engine="fsdp", engine_options={"ranks": 3}))


def test_zero_ranks_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match=r"engine_options\.ranks"):
        policy(model, engine="fsdp", engine_options={"ranks": 0})
