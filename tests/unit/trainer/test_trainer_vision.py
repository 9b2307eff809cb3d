"""Rows with images in the trainer: log-probabilities against the engine's, packing, gradients, weights and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.engine.tiny_lm import make_model, save_model
from support.engine.tiny_vlm import FAMILIES, SETS, Runner, image, prompt, vision_model
from turnwise.chat.processor import load_processor
from turnwise.engine.batching.batch_state import Output
from turnwise.errors import TrainError
from turnwise.trainer.batch.packing import pack
from turnwise.trainer.config.policy import LoRAConfig, ModelConfig, OptimConfig, PolicyConfig
from turnwise.trainer.core import TrainRow
from turnwise.trainer.learn.fsdp_learner import check_sharding
from turnwise.trainer.learn.torch_learner import TorchLearner
from turnwise.trainer.model.policy import Policy, load_model
from turnwise.trajectory import TrainSample
from turnwise.types import TokenPrompt


def row(row_prompt: TokenPrompt, completion: Sequence[int], name: str = "t", logprobs: object = 0.0) -> TrainRow:
    """Return a row that trains a completion."""
    ids = np.concatenate([row_prompt.token_ids, np.asarray(completion, np.int32)])
    mask = np.arange(len(ids)) >= len(row_prompt.token_ids)
    scores = np.zeros(len(ids), np.float32)
    scores[mask] = logprobs
    turns = np.where(mask, 0, -1).astype(np.int32)
    return TrainRow(TrainSample(ids, mask, scores, turns, turns, name, "g", 0, row_prompt.media), advantage=1.0)


def logprobs(policy: Policy, rows: list[TrainRow], *, share: bool, budget: int = 4096) -> list[np.ndarray]:
    """Return the log-probabilities of each row's trained ids, in the order of ``rows``."""
    by_row: dict[int, np.ndarray] = {}
    for batch in pack(rows, budget, share_prefixes=share):
        with torch.no_grad():
            scores = policy.forward(batch).logprobs
        parts = torch.split(scores, [rows[index].sample.trained_tokens for index in batch.rows])
        by_row |= {index: part.numpy() for index, part in zip(batch.rows, parts, strict=True)}
    return [by_row[index] for index in range(len(rows))]


def branches(directory: Path) -> list[TrainRow]:
    """Return rows that share prompts with images, go on with others, and differ in an image of equal size alone."""
    first = prompt(directory, SETS[1])
    rows = [row(first, [70 + number, 80, 81], f"a{number}") for number in range(3)]
    for seed in (1, 2):
        new = prompt(directory, [image(200, 90, seed)])
        ids = np.concatenate([first.token_ids, rows[0].sample.input_ids[-3:], new.token_ids])
        at = len(ids) - len(new.token_ids)
        media = (*first.media, *(item.at(item.position + at) for item in new.media))
        rows += [row(TokenPrompt(ids, media), [90 + number, 91], f"b{seed}{number}") for number in range(2)]
    rows.append(row(prompt(directory, [image(64, 40, 9)]), [70, 80, 81], "c"))
    rows.append(row(TokenPrompt(np.arange(40, 60, dtype=np.int32)), [70, 80, 81], "text"))
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_on_images_of_three_sizes_and_several_a_turn(family: str) -> None:
    directory = vision_model(family)
    runner = Runner(directory, max_batch_tokens=32)
    prompts = [prompt(directory, images) for images in SETS]
    outputs: list[Output] = [runner.generate(sight) for sight in prompts]
    rows = [
        row(sight, output.token_ids, str(number), output.logprobs)
        for number, (sight, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    policy = load_model(directory)
    for share in (False, True):
        for output, scores in zip(outputs, logprobs(policy, rows, share=share), strict=True):
            np.testing.assert_allclose(scores, output.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
@pytest.mark.parametrize("budget", [4096, 160])
def test_shared_prefixes_with_images_give_the_scores_of_each_row_alone(family: str, budget: int) -> None:
    directory = vision_model(family)
    policy, rows = load_model(directory), branches(directory)
    alone = [logprobs(policy, [row], share=False)[0] for row in rows]
    shared = logprobs(policy, rows, share=True, budget=budget)
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


def test_each_image_of_a_tree_is_stored_and_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = vision_model()
    policy, rows = load_model(directory), branches(directory)
    batches = pack(rows, 4096, share_prefixes=True)
    assert len(batches) == 1
    media = batches[0].media
    assert sorted(stored.digest for stored in media) == sorted(
        {image_data.digest for row in rows for image_data in row.sample.media}
    )
    assert batches[0].tokens < sum(len(row.sample.input_ids) for row in rows) / 2
    assert policy.vision is not None
    encoded: list[int] = []
    encode = policy.vision.encode
    monkeypatch.setattr(policy.vision, "encode", lambda images: encoded.append(len(images)) or encode(images))
    with torch.no_grad():
        policy.forward(batches[0])
        unshared = pack(rows, 4096)
        assert [len(batch.media) for batch in unshared] == [3 + 4 * 2 + 1]
        policy.forward(unshared[0])
    assert encoded == [4, 4]


def gradients(policy: Policy, rows: list[TrainRow], *, share: bool) -> dict[str, torch.Tensor]:
    policy.model.zero_grad()
    for batch in pack(rows, 4096, share_prefixes=share):
        policy.forward(batch).logprobs.sum().backward()
    return {
        name: parameter.grad.clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_reach_the_vision_tower_and_do_not_depend_on_packing(family: str) -> None:
    directory = vision_model(family)
    policy, rows = load_model(directory), branches(directory)
    assert policy.vision is not None
    tower = {id(parameter) for parameter in policy.vision.parameters}
    named = {name for name, parameter in policy.model.named_parameters() if id(parameter) in tower}
    unshared, shared = (gradients(policy, rows, share=share) for share in (False, True))
    reached = {name for name in named if name in unshared and float(unshared[name].abs().max()) > 0}
    # What a tower does not use at all has no gradient: the normalization behind the layer that is read, for one.
    assert len(reached) > 0.9 * len(named)
    for name, gradient in unshared.items():
        torch.testing.assert_close(shared[name], gradient, atol=2e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("checkpointing", [True, "matmuls"])
def test_checkpointed_activations_change_no_gradient(checkpointing: bool | str) -> None:
    directory = vision_model("qwen3_vl")
    rows = branches(directory)
    plain = gradients(load_model(directory), rows, share=True)
    checkpointed = gradients(load_model(directory, gradient_checkpointing=checkpointing), rows, share=True)
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, atol=2e-4, rtol=1e-3, msg=name)


def test_a_frozen_tower_keeps_its_weights_and_the_language_model_learns() -> None:
    directory = vision_model()
    policy = load_model(directory, freeze_vision=True)
    assert policy.vision is not None
    learned = gradients(policy, branches(directory), share=True)
    assert learned
    assert all(parameter.grad is None for parameter in policy.vision.parameters)
    with pytest.raises(TrainError, match=r"model.freeze_vision is set, but .* has no vision tower"):
        load_model(save_model(make_model("qwen3"), directory.parent / "text"), freeze_vision=True)


def trained(directory: Path, **model: object) -> TorchLearner:
    """Return a learner after one step."""
    config = PolicyConfig(model=ModelConfig(path=directory, device="cpu", **model), optim=OptimConfig(lr=1e-3))
    learner = TorchLearner.create(config, 2)
    for batch in pack(branches(directory), 4096, share_prefixes=True):
        (-learner.policy.forward(batch).logprobs.mean()).backward()
    learner.optim_step()
    return learner


@pytest.mark.parametrize("lora", [None, LoRAConfig(rank=4)])
def test_engine_serves_trained_weights_of_the_vision_tower(lora: LoRAConfig | None) -> None:
    directory = vision_model()
    runner, sight = Runner(directory), prompt(vision_model(), SETS[3])
    untrained = runner.generate(sight)
    learner = trained(directory, lora=lora)
    weights = {name: tensor.clone() for name, tensor in learner.export_weights()}
    assert any("visual" in name for name in weights)
    runner.engine.update_weights(weights, 1, learner.adapter)
    served = runner.generate(sight)
    assert np.abs(served.logprobs - untrained.logprobs).max() > 1e-3
    scores = logprobs(learner.policy, [row(sight, served.token_ids)], share=True)[0]
    np.testing.assert_allclose(scores, served.logprobs, atol=1e-4)


def test_a_saved_model_loads_with_its_processor_and_resumes(tmp_path: Path) -> None:
    directory = vision_model("smolvlm")
    learner = trained(directory)
    learner.save(tmp_path / "saved")
    rows = branches(directory)
    expected = logprobs(learner.policy, rows, share=True)
    processor, origin = load_processor(tmp_path / "saved"), load_processor(directory)
    assert processor is not None
    assert origin is not None
    data = SETS[2][0]
    np.testing.assert_array_equal(processor.place("image", data).ids, origin.place("image", data).ids)
    for policy in (load_model(tmp_path / "saved"), (fresh := trained(directory)).policy):
        if policy is fresh.policy:
            fresh.load(tmp_path / "saved")
        for one, other in zip(logprobs(policy, rows, share=True), expected, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_rows_whose_images_do_not_fit_are_refused_by_name() -> None:
    directory = vision_model()
    sight = prompt(directory, SETS[1])
    fitting = row(sight, [70, 71])
    first = sight.media[0]
    policy = load_model(directory)
    moved = replace(fitting.sample, media=(first.at(first.position - 1),))
    with pytest.raises(TrainError, match="an image has 8 embeddings, but 7 placeholders: the rollout used another"):
        policy.forward(pack([replace(fitting, sample=moved)], 100)[0])


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    policy = load_model(save_model(make_model("qwen3"), tmp_path / "text"))
    sight = prompt(vision_model(), SETS[0])
    small = TokenPrompt(sight.token_ids % policy.vocab_size, sight.media)
    with pytest.raises(TrainError, match=r"a row holds image, but the model in .* takes text only: train a vision"):
        policy.forward(pack([row(small, [1, 2])], 100)[0])


def test_the_engine_fsdp_refuses_vision_models_before_a_start() -> None:
    config = PolicyConfig(model=ModelConfig(path=vision_model(), device="cpu"), engine="fsdp")
    with pytest.raises(TrainError, match="a vision-language model, which the engine fsdp does not shard: choose"):
        check_sharding(config, {"ranks": 2})
