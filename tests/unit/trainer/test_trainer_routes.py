"""Router replay in the trainer: the servers' experts reach the packed forward pass, and gradients the routers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.chat.toy_renderer import ToyRenderer
from support.engine.families import save_family
from turnwise.errors import ConfigError, TrainError
from turnwise.inference.config import InferenceConfig
from turnwise.inference.engines import engine_warnings
from turnwise.inference.scripted import ScriptedClient
from turnwise.trainer.algorithms.config import AlgorithmConfig
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import PolicyConfig
from turnwise.trainer.config.train import BatchConfig
from turnwise.trainer.core import MicroBatch, TrainRow
from turnwise.trainer.learn.learner import open_learner
from turnwise.trainer.learn.update import update_policy
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trainer.run.policies import check_routes
from turnwise.trajectory import TrainSample
from turnwise.types import Completion, Routes, RouteShape, recorded

SHAPE = RouteShape(layers=2, experts=4, chosen=2)
SHARED = 12


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family("qwen3_moe", tmp_path_factory.mktemp("mixture"), initializer_range=0.2)


def rows(lengths: tuple[int, ...] = (30, 17, 23), unrouted: int = 0) -> list[TrainRow]:
    """Rows with equal ids and experts at their beginning; those of the last ``unrouted`` ids are not recorded."""
    random = np.random.default_rng(5)
    ids = [random.integers(2, 64, length).astype(np.int32) for length in lengths]
    experts = [random.permuted(np.tile(np.arange(4), (length, 2, 1)), axis=2)[:, :, :2] for length in lengths]
    made = []
    for number, (row_ids, row_experts) in enumerate(zip(ids, experts, strict=True)):
        # The experts of the last shared state stand beside the id after it.
        row_ids[:SHARED], row_experts[: SHARED + 1] = ids[0][:SHARED], experts[0][: SHARED + 1]
        routes: Routes = row_experts.astype(np.uint8)
        routes[0] = 255
        routes[max(0, len(routes) - unrouted) :] = 255
        mask = np.arange(len(row_ids)) >= SHARED // 2 + number
        sample = TrainSample(
            input_ids=row_ids,
            loss_mask=mask,
            rollout_logprobs=np.where(mask, -2.0, 0.0).astype(np.float32),
            weight_versions=np.where(mask, 0, -1).astype(np.int32),
            turn_ids=np.where(mask, 0, -1).astype(np.int32),
            trajectory_id=f"t{number}",
            group_id="g",
            leaf=0,
            routes=routes,
        )
        made.append(TrainRow(sample, advantage=1.0 if number % 2 else -0.5))
    return made


def scores(policy: Policy, batches: list[MicroBatch]) -> dict[int, torch.Tensor]:
    by_row = {}
    for batch in batches:
        logprobs = policy.forward(batch).logprobs
        for place, number in enumerate(batch.rows):
            by_row[number] = logprobs[batch.sequences == place]
    return by_row


def gradients(policy: Policy, batches: list[MicroBatch]) -> dict[str, torch.Tensor]:
    policy.model.zero_grad()
    for batch in batches:
        policy.forward(batch).logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share_prefixes", [False, True])
def test_packed_tokens_have_the_experts_of_their_state(share_prefixes: bool) -> None:
    given = rows(unrouted=3)
    for batch in pack(given, 64, share_prefixes=share_prefixes):
        assert batch.routes is not None
        assert batch.routes.dtype == torch.int16
        for place, target, number in zip(
            batch.predictors.tolist(), batch.target_ids.tolist(), batch.sequences.tolist(), strict=True
        ):
            sample = given[batch.rows[number]].sample
            position = int(batch.position_ids[0, place]) + 1
            assert sample.input_ids[position] == target
            assert sample.routes is not None
            known = bool(recorded(sample.routes)[position])
            assert batch.routes[place].tolist() == (sample.routes[position].tolist() if known else [[-1, -1]] * 2)


def test_scores_and_gradients_do_not_depend_on_packing_nor_on_checkpointing(mixture: Path) -> None:
    policy, recomputing = load_model(mixture), load_model(mixture, gradient_checkpointing=True)
    given = rows()
    alone = [batch for row in given for batch in pack([row], 64)]
    expected = torch.cat([policy.forward(batch).logprobs for batch in alone])
    expected_gradients = gradients(policy, alone)
    for of in (policy, recomputing):
        for share_prefixes in (False, True):
            batches = pack(given, 96, share_prefixes=share_prefixes)
            by_row = scores(of, batches)
            assert torch.allclose(torch.cat([by_row[number] for number in range(3)]), expected, atol=1e-5)
            found = gradients(of, batches)
            assert max(float((found[name] - expected_gradients[name]).abs().max()) for name in found) < 1e-4
    gate = expected_gradients["model.layers.1.mlp.gate.weight"]
    assert float(gate.abs().max()) > 1e-3


def test_rows_without_experts_are_routed_freely(mixture: Path) -> None:
    policy = load_model(mixture)
    free = [row.freely_routed() for row in rows()]
    expected = scores(policy, pack(free, 96))
    unrecorded = scores(policy, pack(rows(unrouted=40), 96))
    replayed = scores(policy, pack(rows(), 96))
    assert all(torch.equal(expected[number], unrecorded[number]) for number in expected)
    assert max(float((expected[n] - replayed[n]).detach().abs().max()) for n in expected) > 1e-3
    # What was replayed last is not kept.
    assert all(torch.equal(expected[number], again) for number, again in scores(policy, pack(free, 96)).items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "experts up to 3 in 2 layers, 2 a token, but the model in .* has 4 in 3, 2 a token"),
        ({"num_experts": 3}, "experts up to 3 in 2 layers, 2 a token, but the model in .* has 3 in 2, 2 a token"),
    ],
)
def test_experts_of_another_model_raise_train_error(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    policy = load_model(save_family("qwen3_moe", tmp_path, **changes))
    with pytest.raises(TrainError, match=message):
        policy.forward(pack(rows(), 96)[0])


def test_experts_for_a_model_without_any_raise_train_error(tmp_path: Path) -> None:
    policy = load_model(save_family("qwen3", tmp_path))
    with pytest.raises(TrainError, match=r"has no experts, or chooses them .* remove inference\.routed_experts"):
        policy.forward(pack(rows(), 96)[0])


def test_metrics_tell_what_replay_closes(mixture: Path) -> None:
    learner = open_learner(PolicyConfig.model_validate({"optim": {"lr": 1e-9}, "model": {"path": mixture}}), 4)
    batch = BatchConfig(groups=1, max_tokens_per_micro_batch=96)
    given = rows()
    exact = learner.logprobs(pack(given, 96))[0]
    micro = pack(given, 96)[0]
    served = []
    for place, number in enumerate(micro.rows):
        sample = given[number].sample
        logprobs = sample.rollout_logprobs.copy()
        logprobs[sample.loss_mask] = exact[micro.sequences == place].numpy()
        served.append(replace(given[number], sample=replace(sample, rollout_logprobs=logprobs)))
    metrics = update_policy(learner, served, AlgorithmConfig(), batch, seed=0)
    assert metrics["gap/replayed"] < 1e-5
    assert metrics["gap/mean"] < 1e-5
    assert metrics["gap/freely_routed"] > 1e-3
    assert 0.2 < metrics["gap/rerouted"] < 0.8
    assert 1 < metrics["train/expert_imbalance"] < 2
    # Two of the four experts of both layers compute all tokens.
    uneven = replace(micro, routes=torch.tensor([0, 1], dtype=torch.int16).expand(micro.tokens, 2, 2))
    assert float(learner.policy.forward(uneven).imbalance) == 2
    free = update_policy(learner, [row.freely_routed() for row in served], AlgorithmConfig(), batch, seed=0)
    assert not {"gap/replayed", "gap/freely_routed", "gap/rerouted"} & free.keys()


def reporting(layers: int, experts: int) -> ScriptedClient:
    """Return the client of a server that chooses the first and the last expert for every token."""
    chosen = np.tile(np.array([0, experts - 1], np.uint8), (2, layers, 1))
    completion = Completion(np.array([1], np.int32), np.zeros(1, np.float32), "stop", ((0, 0, 1),), chosen)
    return ScriptedClient(ToyRenderer(), [completion])


@pytest.mark.parametrize(
    ("layers", "experts", "message"),
    [(3, 4, "3 layers with 2 experts a token, not 2 with 2 as in"), (2, 8, "expert 7, where each layer has 4 as in")],
)
async def test_servers_of_another_mixture_are_refused_before_a_rollout(
    mixture: Path, layers: int, experts: int, message: str
) -> None:
    await check_routes(reporting(2, 4), mixture)
    with pytest.raises(ConfigError, match=rf"routed_experts is true, but servers report {message} model\.path"):
        await check_routes(reporting(layers, experts), mixture)


async def test_models_and_engines_without_experts_to_report_are_refused_by_key(mixture: Path, tmp_path: Path) -> None:
    replayed = InferenceConfig(routed_experts=True)
    assert await engine_warnings(mixture, replayed) == []
    with pytest.raises(ConfigError, match=r"inference\.routed_experts is true, but .* \(qwen3\) has no experts"):
        await engine_warnings(save_family("qwen3", tmp_path), replayed)
    with pytest.raises(ConfigError, match=r"inference\.engine is vllm, whose servers report no experts"):
        await engine_warnings(mixture, replayed.model_copy(update={"engine": "vllm"}))
